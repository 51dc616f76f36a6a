"""Settings: annotated fields, from which all that is said about them is made.

::

    @with_settings
    class BestOfNController(Controller):
        generation_controller: Controller = required("Cloned for each sample.")
        default_sample_num: PositiveInt = setting(4, "Samples.")
        _: KW_ONLY
        on_failure: OnFailure = setting("raise", '`"drop"` leaves failed samples out.')

The annotation is the type and the range. The constructor, its errors, ``forethought methods``, what
a server's clients may set and the tables of docs/methods are made of these fields. pydantic checks
the values strictly: neither ``True`` nor ``"2"`` is a number.

``validated("sample_num", count, POSITIVE_INT)`` checks a single value, such as an argument of
``process``, within about a microsecond.
"""

from __future__ import annotations

import functools
import inspect
import json
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

from pydantic import (
    AfterValidator,
    ConfigDict,
    DirectoryPath,
    Field,
    TypeAdapter,
    ValidationError,
)

from forethought.config.base import refusal, rule
from forethought.errors import UsageError

_T = TypeVar("_T")
_C = TypeVar("_C", bound="type[Any]")

# ---- types ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NotInRequests:
    """Marks, in ``Annotated``, a type of settings that a server's clients may not set.

    Paths, functions and objects need no mark.
    """

    reason: str
    """Why not, as a clause about the setting."""


NAMES_A_FILE = "it names a file of the server"
FileName = Annotated[str, Field(min_length=1), NotInRequests(NAMES_A_FILE)]
"""A name under which something is read from or written to a directory of this machine."""

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
Words = Annotated[Sequence[Annotated[str, Field(pattern=r"\S")]], AfterValidator(tuple)]
"""Texts that are not blank; a single text is no sequence of words."""

OnFailure = Literal["raise", "drop"]
"""What happens to a failure: it is raised in the controller that waits, or only recorded."""

Concurrency = PositiveInt | Literal["doubling"] | None
"""Samples that run at once; ``"doubling"``: as many again as have ended; None: all."""

# ---- fields --------------------------------------------------------------------------------------

REQUIRED = inspect.Parameter.empty
"""The default of a setting that has none."""
_FIELDS = "__setting_fields__"
"""The attribute of a class that holds the fields that it declares itself."""
_CONFIG = ConfigDict(strict=True, arbitrary_types_allowed=True)


@dataclass(frozen=True, slots=True)
class _Field:
    """What a class body says about a setting, beside its annotation."""

    default: Any
    help: str
    is_keyword: bool = False


@dataclass(frozen=True)
class Setting:
    """A setting of a controller."""

    name: str
    type: Any
    """The annotation."""
    default: Any
    """``REQUIRED``: there is none."""
    help: str
    """One line of Markdown."""
    is_keyword: bool
    """Whether it is given by name alone."""

    @functools.cached_property
    def adapter(self) -> TypeAdapter[Any]:
        """The validator of values; made when it is first read."""
        return _adapter(self.type)

    def value(self, arguments: Mapping[str, Any]) -> Any:
        """The setting's value in the arguments of a constructor; raises ``ParameterError`` if it is
        invalid.
        """
        if self.name not in arguments:
            return self.default
        return validated(self.name, arguments[self.name], self.adapter)

    @property
    def is_plain(self) -> bool:
        """Whether its values are numbers, texts and truth values alone."""
        return all(map(_is_plain, members_of(self.type)))

    @property
    def type_text(self) -> str:
        """The type and the range, such as ``int >= 1 or None``."""
        return _text_of(self.type)


def setting(default: _T, help: str) -> _T:
    """Declare a setting that has a default.

    Args:
        default: used as it is.
        help: one line, a sentence in Markdown.
    """
    field: Any = _Field(default, help)
    return typing.cast("_T", field)


def required(help: str) -> Any:
    """Declare a setting without a default."""
    return _Field(REQUIRED, help)


@dataclass_transform(eq_default=False, field_specifiers=(required,))
def with_settings(cls: _C) -> _C:
    """Give a class the constructor that its settings, and those of its bases, make.

    As with dataclasses, settings after ``_: KW_ONLY`` are passed by name, and ``__post_init__``
    checks settings against each other and derives attributes. A subclass with a constructor of its
    own calls this one with ``super().__init__(...)``.
    """
    declared: dict[str, _Field] = {}
    is_keyword = False
    for name, annotation in inspect.get_annotations(cls).items():
        if annotation in (KW_ONLY, "KW_ONLY"):
            is_keyword = True
        elif isinstance(field := vars(cls).get(name), _Field):
            declared[name] = replace(field, is_keyword=is_keyword)
    if bare := [
        n for n, value in vars(cls).items() if isinstance(value, _Field) and n not in declared
    ]:
        raise TypeError(f"{cls.__name__}.{bare[0]} is a setting without an annotation")
    for name, field in declared.items():
        if field.default is REQUIRED:
            delattr(cls, name)
        else:
            setattr(cls, name, field.default)
    setattr(cls, _FIELDS, declared)
    cls.__init__ = _constructor(cls)
    return cls


def _constructor(cls: Any) -> Callable[..., None]:
    fields = _fields(cls)
    signature = inspect.Signature([_parameter(name, field) for name, field in fields.items()])
    bases: Iterator[Any] = (base for base in cls.__mro__ if _FIELDS not in vars(base))
    plain_base = next(base for base in bases if "__init__" in vars(base))

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{cls.__name__}: {error}") from None
        plain_base.__init__(self)
        for item in _settings(cls).values():
            setattr(self, item.name, item.value(arguments))
        self.__post_init__()

    myself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [myself, *signature.parameters.values()]
    __init__.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    __init__.__qualname__ = f"{cls.__qualname__}.__init__"
    return __init__


def _parameter(name: str, field: _Field) -> inspect.Parameter:
    by = inspect.Parameter
    kind = by.KEYWORD_ONLY if field.is_keyword else by.POSITIONAL_OR_KEYWORD
    return by(name, kind, default=field.default)


def _fields(cls: type[Any]) -> dict[str, _Field]:
    """Positional settings, a base's before its subclasses'; then those by name, reversed."""
    declared = [vars(base)[_FIELDS] for base in cls.__mro__ if _FIELDS in vars(base)]
    fields: dict[str, _Field] = {}
    for fields_of_base in reversed(declared):
        fields |= fields_of_base
    positional = {name: field for name, field in fields.items() if not field.is_keyword}
    nearest_first = dict.fromkeys(name for fields_of_base in declared for name in fields_of_base)
    return positional | {name: fields[name] for name in nearest_first if name not in positional}


def settings_of(method: Callable[..., Any]) -> Mapping[str, Setting]:
    """Name -> setting, in the order of the constructor's parameters.

    Of a class with a constructor of its own, or a function, the parameters are settings without
    help.
    """
    bases = method.__mro__ if isinstance(method, type) else ()
    owner = next((base for base in bases if "__init__" in vars(base)), None)
    if owner is not None and _FIELDS in vars(owner):
        return _settings(owner)
    return _parameters(method)


@functools.lru_cache(1024)
def _settings(cls: Any) -> Mapping[str, Setting]:
    hints = typing.get_type_hints(cls, include_extras=True)
    settings = {
        name: Setting(name, hints[name], field.default, field.help, field.is_keyword)
        for name, field in _fields(cls).items()
    }
    return types.MappingProxyType(settings)


@functools.lru_cache(1024)
def _parameters(method: Callable[..., Any]) -> Mapping[str, Setting]:
    call = getattr(method, "__init__", method) if isinstance(method, type) else method
    try:
        hints = typing.get_type_hints(call, include_extras=True)
    except (NameError, TypeError, AttributeError, SyntaxError):
        hints = {}
    parameters = inspect.signature(method).parameters
    settings = {
        name: Setting(name, hints.get(name, Any), of.default, "", of.kind is of.KEYWORD_ONLY)
        for name, of in parameters.items()
    }
    return types.MappingProxyType(settings)


def members_of(hint: Any) -> Iterator[Any]:
    """The members of a union, nested ones too; any other type is its only member."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        for member in typing.get_args(hint):
            yield from members_of(member)
    else:
        yield hint


def _is_plain(kind: Any) -> bool:
    if typing.get_origin(kind) is Annotated:
        kind = typing.get_args(kind)[0]
    return kind in (int, float, str, bool, type(None)) or typing.get_origin(kind) is Literal


# ---- types as text -------------------------------------------------------------------------------

_BOUNDS: Mapping[str, str] = types.MappingProxyType({"ge": ">=", "gt": ">", "le": "<=", "lt": "<"})


def _text_of(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _limited(_text_of(args[0]), args[1:])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_text_of, args)))
    if origin is Literal:
        return " or ".join(json.dumps(choice) for choice in args)
    if origin in (list, tuple, Sequence):
        return "list" if args[0] is Any else f"list of {_text_of(args[0])}"
    if origin in (dict, Mapping):
        return "mapping"
    if origin is Callable:
        return "function"
    return "None" if kind is type(None) else getattr(kind, "__name__", str(kind))


def _limited(text: str, marks: Sequence[Any]) -> str:
    limits = [limit for mark in marks for limit in getattr(mark, "metadata", ())]
    bounds = {
        name: getattr(limit, name) for limit in limits for name in _BOUNDS if hasattr(limit, name)
    }
    lower, upper = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    if lower is not None and upper is not None:
        brackets = "[" if "ge" in bounds else "(", "]" if "le" in bounds else ")"
        return f"{text} in {brackets[0]}{lower}, {upper}{brackets[1]}"
    signs = " ".join(f"{_BOUNDS[name]} {bound}" for name, bound in bounds.items())
    if any(hasattr(limit, "min_length") for limit in limits):
        text = f"non-empty {text}"
    return f"{text} {signs}".rstrip()


# ---- single values -------------------------------------------------------------------------------


def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=_CONFIG)


POSITIVE_INT: TypeAdapter[int] = _adapter(PositiveInt)
NON_NEGATIVE_INT: TypeAdapter[int] = _adapter(NonNegativeInt)
NON_NEGATIVE_FLOAT: TypeAdapter[float] = _adapter(NonNegativeFloat)
SECONDS: TypeAdapter[float] = _adapter(Annotated[float, Field(gt=0)])
OPTIONAL_POSITIVE_INT: TypeAdapter[int | None] = _adapter(PositiveInt | None)
ANY_TEXT: TypeAdapter[str] = _adapter(str)
TEXT: TypeAdapter[str] = _adapter(Text)
OPTIONAL_TEXT: TypeAdapter[str | None] = _adapter(Text | None)
OPTIONAL_BOOL: TypeAdapter[bool | None] = _adapter(bool | None)
BOOL: TypeAdapter[bool] = _adapter(bool)
WORDS: TypeAdapter[tuple[str, ...]] = _adapter(Words)
FUNCTION: TypeAdapter[Any] = _adapter(Callable[..., Any])
DIRECTORY: TypeAdapter[Path] = TypeAdapter(DirectoryPath)
ON_FAILURE: TypeAdapter[OnFailure] = _adapter(OnFailure)


def validated(name: str, value: Any, kind: TypeAdapter[_T]) -> _T:
    """``value`` as ``kind``; raises ``ParameterError`` for another type or range."""
    try:
        return kind.validate_python(value, context=name)
    except ValidationError as error:
        raise _refusal(name, value, error) from error


def _refusal(name: str, value: Any, error: ValidationError) -> UsageError:
    complaints = error.errors(include_url=False)
    caught = complaints[0].get("ctx", {}).get("error")
    if isinstance(caught, UsageError):
        return caught
    is_union = all(
        complaint["loc"] and isinstance(complaint["loc"][0], str) for complaint in complaints
    )
    first, *others = dict.fromkeys(map(rule, complaints if is_union else complaints[:1]))
    return refusal(name, value, " or ".join([first, *(o.removeprefix("it must ") for o in others)]))
