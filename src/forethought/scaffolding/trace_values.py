"""Values of tasks as JSON and back: prompts, settings and results in a trace file.

A value that JSON lacks is an object with the key ``"$"``: the name of its class, and its content.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeVar, cast, get_type_hints

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from forethought import outputs
from forethought.scaffolding import messages
from forethought.scaffolding.result import ScaffoldingOutput
from forethought.scaffolding.thinking import ThinkingProfile

_CLASSES: Mapping[str, type[Any]] = MappingProxyType(
    {
        kind.__name__: kind
        for kind in (
            outputs.FinishReason,
            outputs.Logprob,
            outputs.SpeculationMetrics,
            outputs.ThinkingOutput,
            outputs.ThoughtEnd,
            outputs.TokenConfidence,
            outputs.Usage,
            messages.AssistantMessage,
            messages.OpenAIToolDescription,
            messages.RoleMessage,
            messages.SystemMessage,
            messages.ToolCall,
            messages.ToolDescription,
            messages.ToolFunction,
            messages.ToolMessage,
            messages.UserMessage,
            ScaffoldingOutput,
            ThinkingProfile,
        )
    }
)


def encoded(value: Any, *, lenient: bool = False) -> Any:
    """``value`` in the types of JSON.

    Args:
        value: made of plain values, containers, and the classes of results and messages.
        lenient: write the name of its class for a value that is anything else, in place of raising
            ``TypeError``.
    """
    kind = type(value)
    if kind is float and not math.isfinite(value):
        return {"$": "float", "value": str(value)}
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [encoded(item, lenient=lenient) for item in value]
    if kind in (tuple, set, frozenset):
        return {"$": kind.__name__, "value": [encoded(item, lenient=lenient) for item in value]}
    if isinstance(value, dict):
        return _encoded_dict(value, lenient)
    if kind.__name__ in _CLASSES and _CLASSES[kind.__name__] is kind:
        content = (
            value.value if isinstance(value, Enum) else encoded(_fields(value), lenient=lenient)
        )
        return {"$": kind.__name__, "value": content}
    if isinstance(value, Enum) and isinstance(value, str):
        return str(value.value)  # which equals it
    if lenient:
        return {"$": "other", "value": kind.__name__}
    raise TypeError(f"a trace holds no {kind.__name__}")


def _encoded_dict(value: dict[Any, Any], lenient: bool) -> Any:
    if "$" not in value and all(type(key) is str for key in value):
        return {key: encoded(item, lenient=lenient) for key, item in value.items()}
    pairs = [
        [encoded(key, lenient=lenient), encoded(item, lenient=lenient)]
        for key, item in value.items()
    ]
    return {"$": "dict", "value": pairs}


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, tuple):
        return dict(value._asdict())  # type: ignore[attr-defined]  # a NamedTuple
    if hasattr(value, "__dict__"):
        return dict(vars(value))
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


_PLAIN: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "float": float,
        "tuple": tuple,
        "set": set,
        "frozenset": frozenset,
        "dict": dict,
        "other": lambda name: None,
    }
)


def decoded(value: Any, place: str = "") -> Any:
    """The value that ``encoded`` was called with; None for what it could not hold.

    Args:
        value: as it is in the trace.
        place: where that is, for errors.
    """
    if isinstance(value, list):
        return [decoded(item, f"{place}.{number}") for number, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {key: decoded(item, f"{place}.{key}") for key, item in value.items()}
    name = value["$"]
    if not isinstance(name, str) or not (name in _PLAIN or name in _CLASSES):
        raise ValueError(f"{place} is of the class {name!r}, of which a trace has no objects")
    if value.keys() != {"$", "value"}:
        raise ValueError(f"{place} has not the two fields of an encoded {name}")
    content = decoded(value["value"], place)
    try:
        return _PLAIN[name](content) if name in _PLAIN else _object(_CLASSES[name], content)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{place} is no {name}: {_reason(error)}") from error


def _object(kind: Any, content: Any) -> Any:
    """An object of the class with exactly its attributes; raises ``ValueError`` for wrong ones."""
    if issubclass(kind, Enum):
        return kind(content)
    attributes = _attributes(kind)
    for why, names in (
        ("it lacks", attributes - content.keys()),
        ("it has unknown", content.keys() - attributes - _OPTIONAL),
    ):
        if names:
            raise ValueError(f"{why} {', '.join(sorted(map(str, names)))}")
    if kind.__name__ not in _MESSAGES:
        _whole_adapter(kind).validate_python(content)
    if issubclass(kind, tuple):
        return kind(**content)
    instance = object.__new__(kind)
    for name, item in content.items():
        object.__setattr__(instance, name, item)
    return instance


@functools.lru_cache(maxsize=64)
def _whole_adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


_MESSAGES: Mapping[str, messages.RoleMessage] = MappingProxyType(
    {
        type(example).__name__: example
        for example in (
            messages.AssistantMessage(None),
            messages.RoleMessage("user", None),
            messages.SystemMessage(""),
            messages.ToolMessage("", None),
            messages.UserMessage(""),
        )
    }
)
"""An example of each class whose attributes are not the arguments of its constructor."""

_OPTIONAL = frozenset({"unreadable_call"})


def _attributes(kind: type[Any]) -> frozenset[str]:
    if kind.__name__ in _MESSAGES:
        return frozenset(vars(_MESSAGES[kind.__name__]))
    if issubclass(kind, tuple):
        return frozenset(kind._fields)  # type: ignore[attr-defined]  # a NamedTuple
    return frozenset(field.name for field in dataclasses.fields(kind))


def _reason(error: Exception) -> str:
    """The first thing wrong, with the path of its field."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    path = "".join(f".{name}" for name in first["loc"])
    return f"{path}: {first['msg']}"


def expect_type(kind: Any, name: str, value: Any) -> None:
    """Raise ``ValueError`` unless an attribute has the type that the class declares."""
    if isinstance(getattr(kind, name, None), property):
        raise ValueError(f"{name} cannot be set")
    try:
        _adapter(kind, name).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{name}{_reason(error)}") from error


@functools.lru_cache(maxsize=512)
def _adapter(kind: type[Any], name: str) -> TypeAdapter[Any]:
    hint = get_type_hints(kind).get(name, Any)
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:  # a type with a configuration of its own
        return TypeAdapter(hint)


Kind = TypeVar("Kind")


def checked(kind: type[Kind], values: Any, place: str = "") -> Kind:
    """A dataclass of JSON values, each of the type of its field; else raises ``ValueError``.

    Args:
        kind: the dataclass.
        values: by the names of its fields; those that have defaults may be left out.
        place: where they are, for errors.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if not isinstance(values, dict):
        raise ValueError(f"{place or 'it'} is no object")
    if unknown := values.keys() - fields.keys():
        raise ValueError(f"{place}{min(unknown)}: {kind.__name__} has no such field")
    for name, field in fields.items():
        if name in values:
            try:
                adapter: TypeAdapter[Any] = _adapter(cast(Any, kind), name)
                adapter.validate_python(values[name], strict=True)
            except ValidationError as error:
                raise ValueError(f"{place}{name}{_reason(error)}") from error
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{place}{name} is missing")
    return kind(**values)
