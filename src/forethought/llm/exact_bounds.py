"""Integers of a JSON schema beyond 2**53, where llguidance, which reads doubles, is not exact.

::

    {"type": "integer", "minimum": 2**53 + 1} --> {"type": "integer", "minimum": 2**53 + 2}

A bound moves inwards to the next one that llguidance keeps to exactly, so that each number that is
written is within the client's bounds; the few between the two are never written. A ``const`` and
the values of an ``enum`` cannot move: those that a double does not hold are refused.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

EXACT = 2**53
"""Up to here each integer is a double."""
_MAX = 2**63 - 1
"""The largest integer of llguidance."""
_MIN = 1024 - 2**63
"""The smallest that it compiles, and a double."""
_LARGEST = sys.float_info.max
_DIGITS = 15
"""Of a decimal number that a double always holds."""
_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords with schemas by name."""
_VALUES = ("const", "enum")
"""Keywords with values instead of schemas."""
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def with_exact_bounds(schema: Any) -> Any:
    """A JSON schema that llguidance follows exactly; the same object where it does already. Raises
    ValueError, with the path, for a value or a range that it cannot write.
    """
    return schema if not any(_large(schema)) else _exact(schema, "")


def _large(value: Any) -> Iterator[bool]:
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list):
        yield isinstance(value, int | float) and abs(value) >= EXACT
        return
    for inner in value:
        yield from _large(inner)


def _exact(schema: Any, path: str) -> Any:
    if isinstance(schema, list):
        return [_exact(inner, f"{path}{index}.") for index, inner in enumerate(schema)]
    if not isinstance(schema, Mapping):
        return schema
    checked_schema: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _VALUES:
            _check_values(value, f"{path}{name}")
            checked_schema[name] = value
        elif name in _SCHEMAS and isinstance(value, Mapping):
            checked_schema[name] = {
                key: _exact(inner, f"{path}{name}.{key}.") for key, inner in value.items()
            }
        elif name in ("default", "examples"):
            checked_schema[name] = value
        else:
            checked_schema[name] = _exact(value, f"{path}{name}.")
    return _with_bounds(checked_schema, path)


def _check_values(value: Any, path: str) -> None:
    """Raises ValueError if an integer is not exact as a double."""
    if isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            _check_values(inner, path)
    elif isinstance(value, int) and (abs(value) >= _MAX or int(float(value)) != value):
        raise ValueError(f"{path} has {value}, which cannot be kept to exactly: use a string")


def _with_bounds(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """The schema with its own large bounds moved."""
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    is_integer = "integer" in kinds and "number" not in kinds
    lower, upper = _bound(schema, _LOWER, is_integer, -1), _bound(schema, _UPPER, is_integer, 1)
    is_large = [bound is not None and abs(bound) >= EXACT for bound in (lower, upper)]
    if not any(is_large):
        return schema
    if is_integer:  # llguidance does not compile a large bound without the other one
        lower, upper = _MIN if lower is None else lower, _MAX if upper is None else upper
        if not _MIN <= lower <= upper <= _MAX:
            shown = {name: schema[name] for name in (*_LOWER, *_UPPER) if name in schema}
            what = f"{path[:-1] or 'the schema'} allows no integer that can be kept to exactly"
            raise ValueError(f"{what}: {shown}")
    for names, bound, moves in ((_LOWER, lower, is_large[0]), (_UPPER, upper, is_large[1])):
        if moves or (is_integer and bound in (_MIN, _MAX)):
            schema = {name: value for name, value in schema.items() if name not in names}
            schema[names[0]] = bound
    return schema


def _bound(
    schema: Mapping[str, Any], names: tuple[str, str], is_integer: bool, sign: int
) -> int | None:
    """The inclusive bound that an inclusive and an exclusive keyword stand for together.

    ``sign`` is 1 of an upper bound and -1 of a lower one. Unless ``is_integer``, decimals are
    allowed between integers.
    """
    bounds = []
    for name, is_exclusive in zip(names, (False, True), strict=True):
        value = schema.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not -_LARGEST <= value <= _LARGEST:
            raise ValueError(f"{name} is no number of double precision")
        whole = math.floor(sign * value)  # the largest integer within an upper bound
        bounds.append(whole - (is_exclusive and whole == sign * value))
    if not bounds:
        return None
    bound = min(bounds)
    if abs(bound) < EXACT:
        return sign * bound
    if not is_integer:
        return sign * _decimal_within(bound)
    most = _MAX if sign > 0 else -_MIN
    return sign * (most if bound >= most else _double_within(bound))


def _double_within(bound: int) -> int:
    """The largest double up to ``bound``."""
    near = float(bound)
    return int(near if near <= bound else math.nextafter(near, -math.inf))


def _decimal_within(bound: int) -> int:
    """The largest double up to ``bound`` of at most 15 digits, which its text keeps."""
    unit = 10 ** max(0, len(str(abs(bound))) - _DIGITS)
    value = bound // unit * unit
    return value if float(value) <= bound else value - unit
