"""``GuidedDecodingParams``: the schema, regex, grammar or choice that an output must match."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from forethought.errors import ParameterError


@dataclass(frozen=True, slots=True)
class GuidedDecodingParams:
    """The shape of the whole output of one generation. Exactly one field is set.

    ===============  ===============================================================================
    ``json``         a JSON schema: a mapping, its text, or a pydantic model's class; kept as text
    ``json_object``  any JSON object
    ``regex``        a regular expression that matches the whole output; no look-around
    ``grammar``      a context-free grammar in Lark's or in GBNF's (EBNF) notation
    ``choice``       one of these strings
    ===============  ===============================================================================

    The generation ends with ``finish_reason`` ``stop`` where the shape is complete, unless
    ``max_tokens`` ends it before. Names as in TensorRT-LLM's ``llmapi``, which has no ``choice``.

    Raises:
        ParameterError: no field or several are set, or one is not what it should be. Whether
            schemas, expressions and grammars can be followed is known where a tokenizer is.
    """

    json: str | Mapping[str, Any] | type[Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    choice: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        given = [name for name in self.names() if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ParameterError(
                "invalid guided_decoding",
                f"one shape is needed, and {' and '.join(given) or 'none'} is given",
                f"Set one of {', '.join(self.names())}",
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                raise _refuse(name, text, "it must be a non-empty string")
        if not isinstance(self.json_object, bool):
            raise _refuse("json_object", self.json_object, "it must be True or False")
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return next(name for name in self.names() if getattr(self, name) not in (None, False))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all fields."""
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GuidedDecodingParams:
        """Build from field names and values.

        Raises:
            ParameterError: a name is not a field, or as the class.
        """
        unknown = set(values) - set(cls.names())
        if unknown:
            raise ParameterError.unknown("GuidedDecodingParams", unknown, cls.names())
        return cls(**values)


def _schema_text(schema: Any) -> str:
    """As JSON text; the order of properties, which is that of the output, is kept."""
    if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    try:
        read = json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(read, Mapping):
            return json.dumps(dict(read), ensure_ascii=False)
    except RecursionError:
        raise _refuse("json", schema, "it is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise _refuse("json", schema, f"it is no JSON: {error}") from error
    raise _refuse("json", schema, "a schema is a JSON object, its text, or a pydantic model")


def _choices(given: Any) -> tuple[str, ...]:
    is_list = isinstance(given, Iterable) and not isinstance(given, str)
    if not is_list or not all(isinstance(text, str) and text for text in given):
        raise _refuse("choice", given, "it must be a list of non-empty strings")
    choices = tuple(dict.fromkeys(given))
    if not choices:
        raise _refuse("choice", given, "there must be something to choose from")
    return choices


def _refuse(name: str, value: Any, reason: str) -> ParameterError:
    try:
        shown = repr(str(value)[:200])
    except RecursionError:
        shown = f"a deep {type(value).__name__}"
    return ParameterError(
        f"invalid {name} in guided_decoding",
        f"got {shown}, but {reason}",
        f"Change {name}",
    )
