"""The arguments of a forced call in the notation of grammars (llguidance's Lark).

Objects are closed: they have the properties that their schema names and no others, since a small
model otherwise writes keys for ever.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from forethought.errors import ParameterError
from forethought.llm.exact_bounds import with_exact_bounds
from forethought.llm.typed_argument import is_text

Literal = Callable[[str], Iterable[str]]
"""The notation of a text."""
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As templates write JSON; small models write blanks for ever where they may."""
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas")
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")
"""Words of a schema that say which further properties an object may have."""
_VALUES = ("const", "enum", "default", "examples")
"""Words of a schema that have values."""
_DEFINITIONS = ("$defs", "definitions")


def json_arguments(parameters: Mapping[str, Any]) -> str:
    """Arguments as JSON. Raises ParameterError for numbers that cannot be kept to exactly."""
    if not any(word in parameters for word in (*_COMBINING, *_VALUES, "type")):
        parameters = {"type": "object", **parameters}  # arguments are none but objects
    return _json(closed(parameters))


def _json(schema: Mapping[str, Any]) -> str:
    try:
        schema = {**with_exact_bounds(dict(schema)), "x-guidance": _SPACING}
    except ValueError as error:
        raise ParameterError(
            "invalid parameters of a tool", str(error), "Change the schema", param="tools"
        ) from error
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def xml_parameters(
    parameters: Mapping[str, Any], prefix: str, rules: list[str], literal: Literal
) -> str | None:
    """Arguments one by one, as ``<parameter=a>`` and the value; text is as it is, the rest JSON.

    Rules that they need are added to ``rules``, under names with ``prefix``. None: the schema says
    more than can be kept to in this form.
    """
    properties = parameters.get("properties", {})
    required = parameters.get("required", [])
    words = parameters.keys() - {*_ANNOTATIONS, *_DEFINITIONS, *_OBJECT}
    is_plain = not words and parameters.get("type", "object") == "object"
    if not (is_plain and isinstance(properties, Mapping) and isinstance(required, list)):
        return None
    if not all(isinstance(name, str) and name in properties for name in required):
        return None
    parts, own_rules = list[str](), list[str]()
    for number, (key, schema) in enumerate(properties.items()):
        value = _xml_value(schema, parameters, f"{prefix}_{number}", own_rules)
        if value is None or ">" in key or "\n" in key:
            return None
        parameter = " ".join([*literal(f"<parameter={key}>\n"), value])
        parts.append(parameter if key in required else f"({parameter})?")
    rules += own_rules
    return " ".join(parts) or '""'


_VALUE_END = "\n</parameter>\n"
_OBJECT = ("type", "properties", "required", "additionalProperties")
_ANNOTATIONS = ("title", "description", "default", "examples", "$schema", "$id", "$comment")
_TEXT = ("type", "enum", "const", "minLength", "maxLength")
_MAX_LENGTH = 1000
"""Characters of text up to which its bounds are a regular expression."""


def _xml_value(schema: Any, root: Mapping[str, Any], name: str, rules: list[str]) -> str | None:
    """A value and its closing mark."""
    if not isinstance(schema, Mapping):
        return None
    if is_text({"properties": {"": schema}}, ""):
        return _xml_text(schema, name, rules)
    if not all(_leads_to_definition(reference) for reference in _references(schema)):
        return None
    definitions = {word: root[word] for word in _DEFINITIONS if word in root}
    rules.append(f"{name}: {_json(closed({**schema, **definitions}))}")
    return f"{name} {json.dumps(_VALUE_END)}"


def _xml_text(schema: Mapping[str, Any], name: str, rules: list[str]) -> str | None:
    if schema.keys() - {*_TEXT, *_ANNOTATIONS}:
        return None
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list):
        texts = [json.dumps(f"{choice}{_VALUE_END}", ensure_ascii=False) for choice in choices]
        return f"({' | '.join(texts)})"
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if any(type(n) is not int or not 0 <= n <= _MAX_LENGTH for n in (least, most or 0)):
        return None
    count = f"{{{least},{'' if most is None else most}}}"
    rules.append(rf"{name}[lazy]: /(?s:.{count})\n<\/parameter>\n/")
    return name


def _leads_to_definition(reference: str) -> bool:
    return any(reference.startswith(f"#/{word}/") for word in _DEFINITIONS)


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for item in schema:
            yield from _references(item)
    if isinstance(schema, Mapping):
        if "$ref" in schema:
            yield str(schema["$ref"])
        for part in schema.values():
            yield from _references(part)


# ---- closed objects ------------------------------------------------------------------------------


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema whose objects have the properties that it names and no others.

    An object that says otherwise, or is combined of several schemas, stays as it is.
    """
    return _closed(schema, frozenset(_combined_refs(schema, False)))


def _closed(schema: Any, open_refs: Set[str]) -> Any:
    """``closed`` of a subschema; definitions that ``open_refs`` refer to stay as they are."""
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    for word in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(word), Mapping):
            result[word] = {
                name: value if f"#/{word}/{name}" in open_refs else _closed(value, open_refs)
                for name, value in schema[word].items()
            }
    is_combined = any(word in schema for word in _COMBINING)
    is_object = "properties" in schema or "object" in _types(schema)
    lists = ["prefixItems"] if is_object else ["prefixItems", "anyOf", "oneOf"]
    for word in lists:
        if isinstance(schema.get(word), list):
            result[word] = [_closed(value, open_refs) for value in schema[word]]
    if "items" in schema:
        result["items"] = _closed(schema["items"], open_refs)
    if is_object and not is_combined and not any(word in schema for word in _OPEN):
        result["additionalProperties"] = False
    return result


def _combined_refs(schema: Any, is_combined: bool) -> Iterator[str]:
    """The references in a schema whose objects have further properties by other schemas."""
    if isinstance(schema, list):
        for item in schema:
            yield from _combined_refs(item, is_combined)
    if not isinstance(schema, Mapping):
        return
    is_object = "properties" in schema or "object" in _types(schema)
    if "$ref" in schema and (is_combined or is_object):
        yield str(schema["$ref"])
    for word, part in schema.items():
        in_combination = word == "allOf" or (is_object and word in _COMBINING)
        yield from _combined_refs(part, in_combination)


def _types(schema: Mapping[str, Any]) -> Sequence[Any]:
    types = schema.get("type")
    return types if isinstance(types, list) else [types]
