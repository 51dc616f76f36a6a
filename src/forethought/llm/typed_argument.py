"""Arguments that a model writes as text, as values of the types in their function's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MAX_SCHEMAS = 256
"""Parts of a schema that are read for the types of one argument."""
_COMBINING = ("anyOf", "oneOf", "allOf")
_TEXT: frozenset[str] = frozenset({"string"})


def is_text(parameters: Mapping[str, Any], key: str) -> bool:
    """Whether an argument can be nothing but text."""
    return _types(_property(parameters, key), parameters) == _TEXT


def typed_argument(text: str, parameters: Mapping[str, Any], key: str) -> str:
    """The JSON of an argument: of the first type that it can have, or else a string."""
    types = _types(_property(parameters, key), parameters)
    value = _read(text.strip())
    is_typed = value is not None and _type(value[0]) & types
    if not is_typed and text.strip() in ("True", "False") and "boolean" in types:
        return text.strip().lower()
    if not is_typed and text.strip() in ("None", "") and "null" in types and "string" not in types:
        return "null"
    if not is_typed or value is None:
        return json.dumps(text, ensure_ascii=False)
    if "integer" in types and "number" not in types and isinstance(value[0], float):
        return str(int(value[0]))
    return text.strip() if isinstance(value[0], int | float) else json.dumps(value[0])


def _read(text: str) -> tuple[Any] | None:
    """A value in JSON; None: it is none."""
    try:
        return (json.loads(text, parse_constant=_refuse),)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _type(value: Any) -> frozenset[str]:
    """The types of a schema that a value has."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"integer", "number"})
    names = {float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return frozenset({names[type(value)]})


def _property(parameters: Mapping[str, Any], key: str) -> Any:
    """The schema of an argument; None: it has none."""
    properties = parameters.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    return parameters.get("additionalProperties")


def _types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema allows; that of text where it says nothing."""
    types, open_schemas, num_seen = set[str](), [schema], 0
    while open_schemas:
        part, num_seen = open_schemas.pop(), num_seen + 1
        if not isinstance(part, Mapping) or num_seen > _MAX_SCHEMAS:
            continue
        if isinstance(reference := part.get("$ref"), str):
            open_schemas.append(_resolved(reference, root))
        elif combined := next((w for w in _COMBINING if isinstance(part.get(w), list)), None):
            open_schemas += part[combined]
        else:
            types |= _own_types(part)
    return frozenset(types) or _TEXT


def _own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema names itself."""
    named = schema.get("type")
    if isinstance(named, str | list):
        return frozenset([named] if isinstance(named, str) else filter(_is_name, named))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset().union(*map(_type, values))
    if "properties" in schema:
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else frozenset()


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of a schema that a local reference names; None: there is none."""
    part: Any = root
    for word in reference.removeprefix("#").split("/")[1:]:
        word = word.replace("~1", "/").replace("~0", "~")
        if not isinstance(part, Mapping) or word not in part:
            return None
        part = part[word]
    return part if reference.startswith("#") else None
