"""Values of tasks as JSON and back: what a trace file holds of prompts, settings and results.

A value that JSON lacks is an object with the key ``"$"``: the name of its class, and its content.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any

from forethought import outputs
from forethought.scaffolding import messages
from forethought.scaffolding.result import ScaffoldingOutput

_CLASSES: Mapping[str, type[Any]] = MappingProxyType(
    {
        known.__name__: known
        for known in (
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
        )
    }
)


def encoded(value: Any, *, lenient: bool = False) -> Any:
    """``value`` in the types of JSON.

    Args:
        value: made of plain values, containers, and the classes of results and messages.
        lenient: stand the name of its class in for a value that is anything else.

    Raises:
        TypeError: it holds something else.
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


def decoded(value: Any) -> Any:
    """The value that ``encoded`` was given; None for what it could not hold.

    Raises:
        ValueError: an object of a class that no trace holds.
    """
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {key: decoded(item) for key, item in value.items()}
    name, content = value["$"], decoded(value["value"])
    if name in _PLAIN:
        return _PLAIN[name](content)
    if name not in _CLASSES:
        raise ValueError(f"a trace holds no {name}")
    return _object(_CLASSES[name], content)


def _object(kind: type[Any], content: Any) -> Any:
    if issubclass(kind, Enum):
        return kind(content)
    if issubclass(kind, tuple):
        return kind(**content)
    made = object.__new__(kind)
    for name, item in content.items():
        object.__setattr__(made, name, item)
    return made
