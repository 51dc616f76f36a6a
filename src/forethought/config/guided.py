"""``GuidedDecodingParams``: the schema, regex, grammar or choice that an output must match."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator
from pydantic.dataclasses import dataclass

from forethought.config.base import STRICT, RequestParams, refusal, request_params
from forethought.errors import ParameterError
from forethought.strict_json import read_json

_SHOWN = "{} in guided_decoding"


def _schema_text(schema: Any) -> str:
    """As JSON text; the order of properties, which is that of the output, is kept."""
    if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    try:
        read = read_json(schema) if isinstance(schema, str) else schema
        if isinstance(read, Mapping):
            return json.dumps(dict(read), ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise _refuse_schema(schema, "it is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise _refuse_schema(schema, f"it is no JSON: {error}") from error
    raise _refuse_schema(schema, "a schema is a JSON object, its text, or a pydantic model")


def _refuse_schema(schema: Any, reason: str) -> ParameterError:
    return refusal(_SHOWN.format("json"), schema, reason)


def _distinct(choices: Any) -> Any:
    is_list = isinstance(choices, Iterable) and not isinstance(choices, str)
    return tuple(dict.fromkeys(choices)) if is_list else choices


_Schema = Annotated[str | Mapping[str, Any] | type[Any], PlainValidator(_schema_text)]
_Text = Annotated[str, Field(min_length=1)]
_Choices = Annotated[tuple[_Text, ...], BeforeValidator(_distinct), Field(min_length=1)]


@request_params(_SHOWN)
@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class GuidedDecodingParams(RequestParams):
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

    json: _Schema | None = None
    regex: _Text | None = None
    grammar: _Text | None = None
    json_object: bool = False
    choice: _Choices | None = None

    def __post_init__(self) -> None:
        shapes = self._set_fields()
        if len(shapes) != 1:
            raise ParameterError(
                "invalid guided_decoding",
                f"one shape is needed, and {' and '.join(shapes) or 'none'} is given",
                f"Set one of {', '.join(self.names())}",
                param="guided_decoding",
            )

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return self._set_fields()[0]

    def _set_fields(self) -> list[str]:
        return [name for name in self.names() if getattr(self, name) not in (None, False)]
