"""Arguments that a model writes as text, as values of the types in their function's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MAX_REFERENCES = 16
_COMBINING = ("anyOf", "oneOf", "allOf")
_TEXT: frozenset[str] = frozenset({"string"})
_ALL = ("boolean", "integer", "number", "null", "object", "array")


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


def _types(schema: Any, root: Mapping[str, Any], num_references: int = 0) -> frozenset[str]:
    """The types that a schema allows; that of text where it says nothing."""
    if not isinstance(schema, Mapping) or num_references > _MAX_REFERENCES:
        return _TEXT
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_resolved(reference, root), root, num_references + 1)
    named = schema.get("type")
    if isinstance(named, str | list):
        return frozenset([named] if isinstance(named, str) else filter(_is_name, named))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset().union(*map(_type, values)) or _TEXT
    for word in _COMBINING:
        if isinstance(parts := schema.get(word), list):
            types = [_types(part, root, num_references + 1) for part in parts]
            return frozenset().union(*types) or _TEXT
    if "properties" in schema:
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else _TEXT


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
