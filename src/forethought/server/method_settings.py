"""What requests may set of methods: a closed schema, made of the types of their parameters.

============================  ======================================================================
type of a parameter           what a request gives
============================  ======================================================================
number, text, choice          the same; lists and mappings of them, too
``Controller``                the name of a method, or a mapping of ``method`` and its settings
``Policy``                    a mapping of its fields, with names of methods
``SettingsByMethod``          a mapping of methods to mappings of their settings
``SamplingParams``            a mapping of the fields in ``_SAMPLING``
``Path``, ``FileName``        nothing: it names a file
a function, another object    nothing: it is code, or made by it
not declared                  nothing
============================  ======================================================================

Names of methods are those of a closed ``MethodTable``, on every level; other names (answer spaces,
verifiers, formats) are looked up in the tables of the methods that take them. The schema of all
methods is made when the server starts, so that a request neither imports nor compiles anything.
"""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from forethought.config.base import refusal, rule
from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError
from forethought.methods import MethodTable
from forethought.methods.parts.difficulty import PROBES, Policy
from forethought.methods.stack import SAMPLES, StackedMethod, split
from forethought.methods.table import BY_METHOD
from forethought.scaffolding.controller import Controller
from forethought.scaffolding.settings import NAMES_A_FILE, NotInRequests, members_of, settings_of
from forethought.server.protocol.body import StructuredOutputs

MAX_SAMPLES, MAX_NUMBER = 1024, 1 << 17
"""Of a method's samples, and of any whole number among its settings, as clients may set them."""
_MAX_LEVELS = 8
"""Methods inside of methods."""
_MAX_TABLES = 64
"""Whose schemas are remembered: one per server of a process."""
_MAX_POLICY = 64
"""Methods of a policy."""
_MAX_STACKED, _MAX_LENGTH = 16, 1024
"""Methods of a stack, and characters of its name."""
_ROOT = "method_params"
_KINDS = ("bool", "int", "float", "str", "none")
"""What pydantic puts into the way to a value that may be of several kinds."""
_NO_VALUE = "it takes an object of Python, which a request cannot hold"
_NO_TYPE = (
    "its type is not declared. Annotate the parameter in the code of the method, as in "
    "'samples: int = 4'"
)
_SHAPE = "guided_decoding"
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "stop"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "ignore_eos"),
    *("top_n_sigma", "xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base"),
    *("dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    *("thinking_budget", "thinking_soft", _SHAPE),
)
"""Sampling fields that a method may be given for what it generates."""


def _plain(value: Any) -> Any:
    """Refuses numbers that are too large, and texts that UTF-8 cannot encode, at every depth."""
    level = [value]
    while level:
        mappings = [item for item in level if isinstance(item, dict)]
        lists = [item for item in level if isinstance(item, list)]
        for item in level:
            if isinstance(item, int) and abs(item) > MAX_NUMBER:
                raise ValueError(f"whole numbers are at most {MAX_NUMBER}")
            if isinstance(item, float) and not math.isfinite(item):
                raise ValueError("numbers are finite")
            if isinstance(item, str) and not _is_text(item):
                raise ValueError("texts have no lone surrogates")
        level = [inner for item in mappings for pair in item.items() for inner in pair]
        level += [inner for item in lists for inner in item]
    return value


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


_Json = Annotated[Any, AfterValidator(_plain)]
_SCALARS: Mapping[Any, Any] = types.MappingProxyType(
    {
        bool: Annotated[bool, Field(strict=True)],
        int: Annotated[int, Field(strict=True, ge=-MAX_NUMBER, le=MAX_NUMBER)],
        float: Annotated[float, Field(strict=True, allow_inf_nan=False)],
        str: Annotated[str, Field(strict=True, min_length=0)],  # a constraint refuses surrogates
        type(None): None,
    }
)

Kind = Literal["json", "controller", "policy", "by_method", "sampling", "none"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """What a request may give for one parameter of a method."""

    kind: Kind
    adapter: TypeAdapter[Any] | None = None
    """Of what is JSON as it is; for other kinds than ``"json"``, of ``null`` if that is taken."""
    reason: str = ""
    """Why a request may give nothing; of ``"json"``, no text."""

    def json_schema(self) -> dict[str, Any]:
        """Of what a request may give."""
        if self.kind == "json":
            assert self.adapter is not None, "made with one"
            return self.adapter.json_schema()
        kinds = ["string", "object"] if self.kind == "controller" else ["object"]
        return {"type": kinds if self.adapter is None else [*kinds, "null"]}


@functools.lru_cache(_MAX_TABLES)
def schema_of(table: MethodTable) -> SettingsSchema:
    """The schema of a table, made once."""
    return SettingsSchema(table)


class SettingsSchema:
    """The settings that requests may give the methods of a closed table; read once, now."""

    def __init__(self, table: MethodTable) -> None:
        self._table = table
        for name in table.names():
            _parameters_of(table.resolve(name))

    def settable(self, name: str) -> dict[str, Parameter]:
        """The parameters of a method that a request may give, by name."""
        parameters = _parameters_of(self._table.resolve(name))
        return {key: value for key, value in parameters.items() if value.kind != "none"}

    def check(self, spec: str, settings: Mapping[str, Any]) -> None:
        """Refuse settings that a request may not give to the methods of ``spec`` (as for
        ``stack``).

        Raises ParameterError, with the whole path, for an unknown setting, one that names code or a
        file, and a value of another type or beyond its bound.
        """
        self._check_settings(self._stacked(spec, "method"), settings, _ROOT, 0)

    # ---- the kinds of values --------------------------------------------------------------------

    def _check_settings(
        self, stacked: Sequence[StackedMethod], settings: Mapping[str, Any], path: str, level: int
    ) -> None:
        if level > _MAX_LEVELS:
            raise _refused(path, f"at most {_MAX_LEVELS} methods are inside of each other")
        for name, value in settings.items():
            where = f"{path}.{name}"
            owners = [method for method in stacked if name in method.parameters]
            if not owners:
                allowed = [key for method in stacked for key in self.settable(method.name)]
                error = ParameterError.unknown(f"method {stacked[-1].name!r}", [name], allowed)
                error.param = where
                raise error
            parameter = _parameters_of(self._table.resolve(owners[-1].name))[name]
            self._check_value(parameter, value, where, level)
            if name == SAMPLES and isinstance(value, int) and value > MAX_SAMPLES:
                raise _refused(where, f"at most {MAX_SAMPLES} are allowed here", value)

    def _check_value(self, parameter: Parameter, value: Any, path: str, level: int) -> None:
        match parameter.kind:
            case "none" if value is not None or parameter.adapter is None:
                raise _refused(path, parameter.reason, value)
            case "controller" if value is not None:
                self._check_controller(value, path, level)
            case "policy":
                self._check_policy(value, path)
            case "by_method" if value is not None:
                for spec, settings in _mapping(value, path).items():
                    inner = self._stacked(spec, f"{path}.{spec}")
                    where = f"{path}.{spec}"
                    self._check_settings(inner, _mapping(settings, where), where, level + 1)
            case "sampling" if value is not None:
                _check_sampling(value, path)
            case _ if parameter.reason and isinstance(value, str):
                raise _refused(path, parameter.reason, value)
            case _ if parameter.adapter is not None:
                _validate(parameter.adapter, value, path)

    def _check_controller(self, value: Any, path: str, level: int) -> None:
        if isinstance(value, str):
            self._check_name(value, path)
            return
        settings = dict(_mapping(value, path))
        name = settings.pop("method", "plain")
        self._check_name(name, f"{path}.method")
        self._check_settings([StackedMethod(name, table=self._table)], settings, path, level + 1)

    def _check_policy(self, value: Any, path: str) -> None:
        fields = _mapping(value, path, NAMES_A_FILE)
        for name, content in fields.items():
            if name not in _POLICY:
                error = ParameterError.unknown("a policy", [name], _POLICY)
                error.param = f"{path}.{name}"
                raise error
            _validate(_POLICY[name], content, f"{path}.{name}")
        for number, spec in enumerate(fields.get("methods", ())):
            if spec != PROBES:
                self._stacked(spec, f"{path}.methods.{number}")

    def _stacked(self, spec: str, path: str) -> list[StackedMethod]:
        if len(spec) > _MAX_LENGTH or spec.count("+") >= _MAX_STACKED:
            raise _refused(path, f"at most {_MAX_STACKED} methods are stacked", spec)
        try:
            stacked = split(spec, self._table)
        except ParameterError as error:
            error.param = path
            raise
        for method in stacked:
            self._check_name(method.name, path)
            if method.samples is not None and method.samples > MAX_SAMPLES:
                raise _refused(path, f"at most {MAX_SAMPLES} samples are allowed here", spec)
        return stacked

    def _check_name(self, name: Any, path: str) -> None:
        if not isinstance(name, str) or name not in self._table.names():
            allowed = ", ".join(self._table.names())
            raise ParameterError(
                f"invalid {path}",
                f"no method of this server is called {name!r:.80}",
                f"Allowed: {allowed}",
                param=path,
            )


def _mapping(value: Any, path: str, unless_text: str = "") -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, str) and unless_text:
        raise _refused(path, unless_text, value)
    raise refusal(path, value, "it must be a mapping")


def _check_sampling(value: Any, path: str) -> None:
    fields = _mapping(value, path)
    if unknown := [name for name in fields if name not in _SAMPLING]:
        error = ParameterError.unknown(path, unknown[:1], _SAMPLING)
        error.param = f"{path}.{unknown[0]}"
        raise error
    if fields.get(_SHAPE) is not None:
        _validate(_STRUCTURED, fields[_SHAPE], f"{path}.{_SHAPE}")
    try:
        SamplingParams(**fields)
    except ParameterError as error:
        error.param = f"{path}.{error.param}" if error.param else path
        raise


def _validate(adapter: TypeAdapter[Any], value: Any, path: str) -> None:
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        steps = [str(step) for step in first["loc"] if _is_step(step)]
        raise refusal(".".join([path, *steps]), first["input"], rule(first)) from None


def _is_step(step: int | str) -> bool:
    """Whether it is an index or a key, and not pydantic's name of a union's member."""
    return isinstance(step, int) or (step.isidentifier() and step not in _KINDS)


def _refused(path: str, reason: str, value: Any = None) -> ParameterError:
    shown = reason if value is None else f"got {value!r:.80}, and {reason}"
    return ParameterError(f"{path} is not allowed", shown, "", param=path)


# ---- from types to schemas -----------------------------------------------------------------------


@functools.cache
def _parameters_of(method: Any) -> Mapping[str, Parameter]:
    """By name, for the class of a method; makes the validators of its constructor, too."""
    settings = settings_of(method)
    for setting in settings.values():
        _ = setting.adapter
    return {name: _parameter(setting.type, setting.default) for name, setting in settings.items()}


def _parameter(hint: Any, default: Any) -> Parameter:
    members = list(members_of(hint))
    classes = [member for member in members if isinstance(member, type)]
    null = TypeAdapter(None)
    if any(issubclass(member, Controller) for member in classes):
        return Parameter("controller", null)
    if Policy in classes:
        return Parameter("policy")
    if SamplingParams in classes:
        return Parameter("sampling", null)
    marks = [mark for member in members for mark in getattr(member, "__metadata__", ())]
    if BY_METHOD in marks:
        return Parameter("by_method", null)
    reasons = [mark.reason for mark in marks if isinstance(mark, NotInRequests)]
    if Path in classes:
        members = [member for member in members if member not in (str, Path)]
        reasons.append(NAMES_A_FILE)
    schemas = [] if hint is Any else [_json_type(member) for member in members]
    schemas = [schema for schema in schemas if schema is not _NOTHING]
    if all(schema is None for schema in schemas):
        adapter = null if default is None else None
        reasons.append(_NO_TYPE if hint is Any else _NO_VALUE)
        return Parameter("none", adapter, reasons[0])
    return Parameter("json", TypeAdapter(_union(schemas)), reasons[0] if reasons else "")


_LIST: Any = list
_DICT: Any = dict
_UNION: Any = Union
"""They are given types that are computed, which type checkers do not read."""
_NOTHING = object()
"""In place of a type: no JSON value is of it."""


def _json_type(hint: Any) -> Any:
    """The values of JSON that are of a type, as pydantic has it; ``_NOTHING``: there are none."""
    if hint in _SCALARS:
        return _SCALARS[hint]
    if hint is Any:
        return _Json
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return hint
    if origin is Annotated:
        inner = _json_type(args[0])
        is_refused = any(isinstance(mark, NotInRequests) for mark in args[1:])
        return _NOTHING if is_refused or inner is _NOTHING else Annotated[inner, *args[1:]]
    if origin in (list, tuple, Sequence):
        items = [_json_union(arg) for arg in args if arg is not Ellipsis]
        return (
            _NOTHING if _NOTHING in items else Annotated[_LIST[_union(items)], Field(strict=True)]
        )
    if origin in (dict, Mapping):
        items = [_json_union(arg) for arg in args]
        return _NOTHING if _NOTHING in items or args[0] is not str else _DICT[tuple(items)]
    return _NOTHING


def _json_union(hint: Any) -> Any:
    schemas = [_json_type(member) for member in members_of(hint)]
    schemas = [schema for schema in schemas if schema is not _NOTHING]
    return _union(schemas) if schemas else _NOTHING


def _union(schemas: Sequence[Any]) -> Any:
    return _UNION[tuple(schemas)]


_STRUCTURED = TypeAdapter(StructuredOutputs)
_POLICY: Mapping[str, TypeAdapter[Any]] = types.MappingProxyType(
    {
        **{
            name: TypeAdapter(_json_union(hint))
            for name, hint in typing.get_type_hints(Policy).items()
        },
        "methods": TypeAdapter(
            Annotated[
                list[Annotated[str, Field(strict=True, max_length=1024)]],
                Field(strict=True, max_length=_MAX_POLICY),
            ]
        ),
    }
)
