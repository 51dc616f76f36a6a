"""What all bodies of requests have in common; pydantic checks them.

Names, types and ranges are OpenAI's, with the extensions that vLLM's clients send, and those of
this server: ``method``, ``method_params``, ``budget``, ``speculation``, ``events``. A field that is
not listed is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from forethought.config.sampling import (
    MAX_BREAKER_LENGTH,
    MAX_BREAKERS,
    seed_of,
    top_k_of,
    top_n_sigma_of,
)

MAX_GRAMMAR = 1 << 16
"""Characters of a grammar."""
MAX_DEPTH, MAX_VALUES = 64, 1 << 16
"""Levels and values of the JSON that is passed on as it is: schemas, settings of methods."""


def check_values(content: bytes, limit: int) -> None:
    """Raises ValueError for JSON with more than ``limit`` values, counted by commas, braces and
    brackets outside of strings: reading it would keep others waiting.
    """
    if sum(map(content.count, _BEFORE_VALUES)) <= limit:
        return
    text = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    count, end = 0, 0
    while end >= 0 and count <= limit:
        start = text.find(b'"', end)
        stop = len(text) if start < 0 else start
        count += sum(text.count(mark, end, stop) for mark in _BEFORE_VALUES)
        end = -1 if start < 0 else text.find(b'"', start + 1)
        end += end >= 0
    if count > limit:
        raise ValueError(f"it holds more than {limit:,} values")


_BEFORE_VALUES = (b",", b"{", b"[")


def _shallow(value: Any) -> Any:
    """Refuses deep nesting, which recursive readers could not follow."""
    level, count = [value], 0
    for _ in range(MAX_DEPTH):
        inner = [item for item in level if isinstance(item, dict | list)]
        level = [c for item in inner for c in (item.values() if isinstance(item, dict) else item)]
        count += len(level)
        if count > MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES:,} values")
        if not level:
            return value
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


def _shallow_text(text: str) -> str:
    """``_shallow`` of JSON as text; text that is no JSON is refused where it is needed."""
    try:
        _shallow(json.loads(text))
    except json.JSONDecodeError:
        return text
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    return text


def _object(arguments: str) -> str:
    return arguments if arguments.strip() else "{}"


Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


def _token_key(key: str) -> str:
    if not re.fullmatch("0|[1-9][0-9]{0,18}", key):
        raise ValueError(f'{key!r:.40} is no token id, which is written as in "42"')
    return key


Text = Annotated[str, Field(min_length=0)]
"""Text that UTF-8 can encode: with any constraint, pydantic refuses lone surrogates."""
ArgumentsText = Annotated[Text, AfterValidator(_shallow_text), AfterValidator(_object)]
"""Arguments of a call: JSON, or what a model has written in its place."""
Ids = Annotated[list[Count], Field(fail_fast=True)]
Free = Annotated[dict[Text, Any], AfterValidator(_shallow)]
"""Any JSON object."""
Few = Annotated[Free, Field(max_length=64)]
TokenKey = Annotated[Text, AfterValidator(_token_key)]
"""A token id as the key of an object; each has one way to be written."""
Stop = Annotated[str, Field(max_length=1024)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1), AfterValidator(seed_of)]
"""Any integer of 64 bits; -1: fresh, as vLLM and llama.cpp have it."""
TopK = Annotated[int, AfterValidator(top_k_of)]
"""-1 is no limit, as 0 is."""
TopNSigma = Annotated[float, AfterValidator(top_n_sigma_of)]
"""-1 is no limit, as 0 is."""
Breaker = Annotated[str, Field(min_length=1, max_length=MAX_BREAKER_LENGTH)]
Verbosity = Literal["low", "medium", "high"]
Summary = Literal["auto", "concise", "detailed"]


def _itself(value: Any) -> Any:
    """``value``. Calling Python for each item of a list lets other threads run meanwhile."""
    return value


Interruptible = BeforeValidator(_itself)
MAX_ITEMS = 1 << 13
"""Messages of a conversation, and parts of one."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class Body(BaseModel):
    """Base of everything that clients send: no field is unknown, no value is converted.

    A field whose value is ``null`` is not given, whether it is known or not.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if isinstance(values, dict) and None in values.values():
            return {name: value for name, value in values.items() if value is not None}
        return values


# ---- what the generating APIs have in common ---------------------------------------------------


class StreamOptions(Body):
    """Of a stream of chunks."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class BudgetFields(Body):
    """Limits of everything that a method does inside; see ``scaffolding.budget.Budget``."""

    tokens: Positive | None = None
    calls: Positive | None = None
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class Speculation(Body):
    """Speculative decoding of this request; see ``SpeculationParams``."""

    enabled: bool = True
    drafter: Annotated[str, Field(min_length=1)] | None = None
    max_draft_len: Count | None = None


class StructuredOutputs(Body):
    """The shape of the output; exactly one field."""

    json_schema: Free | Annotated[Text, AfterValidator(_shallow_text)] | None = Field(
        default=None, alias="json"
    )
    regex: Annotated[str, Field(max_length=1 << 14)] | None = None
    choice: Annotated[list[Text], Field(max_length=1024)] | None = None
    grammar: Annotated[str, Field(max_length=MAX_GRAMMAR)] | None = None
    json_object: bool | None = None


class AgentContext(Body):
    """The session of an agent that a request belongs to, as Dynamo has it."""

    session_id: Annotated[str, Field(min_length=1, max_length=256)]
    parent_session_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class NvidiaExtensions(Body):
    """Of Dynamo's fields, those that mean something here."""

    agent_context: AgentContext | None = None


class Generating(Body):
    """Fields of all generating APIs."""

    model: Text | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    # extensions that vLLM's clients send too
    top_k: TopK | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[Ids, Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: int | None = None
    # of OpenAI's chats and completions; extensions in responses
    seed: Seed | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=32)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[TokenKey, float], Field(max_length=1024)] | None = None
    nvext: NvidiaExtensions | None = None
    structured_outputs: StructuredOutputs | None = None
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None
    reasoning_budget: int | None = None
    thinking_soft: Count | None = None
    # samplers of llama.cpp
    top_n_sigma: TopNSigma | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: Annotated[list[Breaker], Field(max_length=MAX_BREAKERS)] | None = None
    # methods
    method: Annotated[str, Field(max_length=1024)] | None = None
    method_params: Few | None = None
    budget: BudgetFields | None = None
    speculation: Speculation | Text | None = None
    events: bool | None = None
    # accepted without effect
    user: Text | None = None
    metadata: Few | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None


class Completing(Generating):
    """Fields of chats and completions."""

    n: Positive | None = None
    max_tokens: int | None = None
    # as llama.cpp has the shape of the output
    json_schema: Free | None = None
    grammar: Annotated[str, Field(max_length=MAX_GRAMMAR)] | None = None
    stream_options: StreamOptions | None = None


def path_of(complaint: Mapping[str, Any], body: Any) -> list[str | int]:
    """The path of the field in ``body`` that a complaint of pydantic is about.

    Where a value may be of several kinds, pydantic names the kind among the steps of the path.
    """
    path: list[str | int] = []
    is_missing = complaint["type"] == "missing"
    for step in complaint["loc"][:-1] if is_missing else complaint["loc"]:
        is_index = isinstance(body, list) and isinstance(step, int) and step < len(body)
        if is_index or (isinstance(body, dict) and step in body):
            body = body[step]
            path.append(step)
    return [*path, complaint["loc"][-1]] if is_missing else path
