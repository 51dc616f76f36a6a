"""The bases of everything that a caller configures: validated by pydantic, none changed later.

``StrictModel`` is the base of configurations, ``RequestParams`` that of what a single request is
given. Both raise ``ParameterError`` where pydantic would raise its own error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, KeysView, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pydantic
from pydantic import AliasChoices, BaseModel, ConfigDict
from pydantic_core import ErrorDetails

from forethought.config.foreign_arguments import ForeignArgument, translate
from forethought.errors import ParameterError, UsageError

_Model = TypeVar("_Model", bound="StrictModel")
_Params = TypeVar("_Params", bound="RequestParams")
_Class = TypeVar("_Class", bound="type[Any]")

STRICT = ConfigDict(strict=True, extra="forbid")
"""The pydantic configuration of ``RequestParams``: neither ``True`` nor ``"2"`` is a number."""

_OUR_WORDS = {
    "Input should": "it must",
    "Input is not a valid path for <class 'pathlib.Path'>": "it must be a path",
    "String should have at least 1 character": "it must be a non-empty string",
    "Value should": "it must",
    " after validation": "",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "a valid boolean": "True or False",
    "a valid integer": "a whole number",
    "a valid number": "a finite number",
    "a valid tuple": "a list",
    "a valid dictionary": "a mapping",
    "an instance of Sequence": "a list",
    "'str' instances are not allowed as a Sequence value": "it must be a list",
    "a valid string": "a string",
    "a string, unable to parse raw data as a unicode string": "text without lone surrogates",
    "an instance of ": "",
}


class StrictModel(BaseModel):
    """A frozen pydantic model that raises ``ParameterError`` for an unknown name, or a value of the
    wrong type or outside its range.

    A name whose value is None, ``null`` in YAML, is not given: its field has its default, and an
    unknown name is ignored (``cuda_graph_config: null`` in a file for TensorRT-LLM).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)
    foreign_arguments: ClassVar[Mapping[str, ForeignArgument]] = {}
    """What becomes of the arguments of other engines."""

    if not TYPE_CHECKING:  # checkers and editors see pydantic's own, which knows the fields

        def __init__(self, *args: Any, **values: Any) -> None:
            if args:
                raise _unnamed(type(self), type(self).model_fields, args[0])
            values = {name: value for name, value in values.items() if value is not None}
            values = self.translated(values)
            unknown = set(values) - self._known_names()
            if unknown:
                raise ParameterError.unknown(type(self).__name__, unknown, type(self).model_fields)
            try:
                super().__init__(**values)
            except pydantic.ValidationError as error:
                owner = type(self).__name__
                raise _refusal(owner, f"{{}} in {owner}", error) from error

    @classmethod
    def translated(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values by the names of our fields, where they have those of other engines.

        Raises ParameterError for an argument of another engine that cannot be honoured.
        """
        return translate(cls.__name__, values, cls._known_names(), cls.foreign_arguments)

    @classmethod
    def _known_names(cls) -> set[str]:
        names = set(cls.model_fields)
        for info in cls.model_fields.values():
            if isinstance(info.validation_alias, AliasChoices):
                names |= {str(choice) for choice in info.validation_alias.choices}
        return names

    @classmethod
    def from_dict(cls: type[_Model], values: dict[str, Any]) -> _Model:
        """Build from field names and values; raises as the constructor."""
        return cls(**values)


class RequestParams:
    """Base of frozen pydantic dataclasses with slots: made for each request, within microseconds.

    Attributes:
        given: names of the fields that the constructor was given, be it with their defaults. Where
            layers merge, such as a request's params and a method's settings, these win. No part of
            equality.
    """

    __slots__ = ("given",)
    given: frozenset[str]

    def to_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return {name: getattr(self, name) for name in self.names()}

    def replace(self: _Params, **changes: Any) -> _Params:
        """A copy with some fields changed; what was given before still counts as given.

        Raises ParameterError if a field does not exist or its value is outside its range.
        """
        return type(self)(**{**self._given_values(), **changes})

    def _given_values(self) -> dict[str, Any]:
        """What makes these params: all other fields are at their defaults."""
        return {name: getattr(self, name) for name in self.given}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_dict, (self._given_values(),)

    @classmethod
    def names(cls) -> KeysView[str]:
        """The names of all fields, in their order."""
        names: KeysView[str] = cls.__dataclass_fields__.keys()  # type: ignore[attr-defined]
        return names

    @classmethod
    def from_dict(cls: type[_Params], values: Mapping[str, Any]) -> _Params:
        """Build from field names and values; raises ParameterError for a wrong name or value."""
        return cls(**values)


def request_params(
    shown: str = "{}", foreign_arguments: Mapping[str, ForeignArgument] | None = None
) -> Callable[[_Class], _Class]:
    """Decorate a pydantic dataclass: note in ``given`` what is given, raise ``ParameterError``.

    Its fields are given by name: other engines have other ones first.

    Args:
        shown: how a field is called in messages, with ``{}`` for its name.
        foreign_arguments: what becomes of the arguments of other engines.
    """
    foreign = foreign_arguments or {}

    def decorate(cls: _Class) -> _Class:
        construct: Callable[..., None] = cls.__init__
        names = frozenset(cls.names())

        @functools.wraps(construct)
        def __init__(self: RequestParams, *args: Any, **values: Any) -> None:
            if args:
                raise _unnamed(cls, cls.names(), args[0])
            if not values.keys() <= names:
                values = translate(cls.__name__, values, names, foreign)
                if unknown := values.keys() - names:
                    raise ParameterError.unknown(cls.__name__, unknown, names)
            object.__setattr__(self, "given", frozenset(values))
            try:
                construct(self, **values)
            except pydantic.ValidationError as error:
                raise _refusal(cls.__name__, shown, error) from error

        cls.__init__ = __init__  # type: ignore[method-assign, assignment]
        return cls

    return decorate


def _unnamed(cls: type[Any], names: Collection[str], value: Any) -> ParameterError:
    """The error for a value without the name of its field, with a field that it fits."""
    fitting = (name for name in names if _fits(cls, name, value))
    name = next(fitting, next(iter(names)))
    return ParameterError(
        f"{cls.__name__} takes its fields by name",
        f"got {_shown(value)} without one",
        f"Write it with its name, such as {cls.__name__}({name}={_shown(value)})",
    )


def _fits(cls: type[Any], name: str, value: Any) -> bool:
    try:
        cls(**{name: value})
    except (UsageError, TypeError):
        return False
    return True


def rule(complaint: ErrorDetails) -> str:
    """What pydantic demands of a value, such as ``it must be at least 1``."""
    words = complaint["msg"]
    for theirs, ours in _OUR_WORDS.items():
        words = words.replace(theirs, ours)
    return words


def refusal(name: str, value: Any, reason: str) -> ParameterError:
    """The error of an impossible value of a field; long values are cut."""
    return ParameterError(
        f"invalid {name}", f"got {_shown(value)}, but {reason}", f"Change {name}", param=name
    )


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        return f"a deep {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]} ..."


def _refusal(owner: str, shown: str, error: pydantic.ValidationError) -> UsageError:
    """The first complaint of pydantic in our own words, or the refusal that it has caught."""
    first = error.errors(include_url=False)[0]
    caught = first.get("ctx", {}).get("error")
    if isinstance(caught, UsageError):
        return caught
    name = str(first["loc"][0]) if first["loc"] else owner
    if first["type"] == "missing":
        return ParameterError(f"{owner} needs {name}", "it is not given", f"Give {name}")
    return refusal(shown.format(name), first["input"], rule(first))
