"""The sampling parameters of a request, and the names that its client has given them.

::

    ChatRequest, CompletionRequest, ResponseRequest -- sampling_of --> RequestSampling --> Ask

A field that a client sets is honoured, or refused by its own name: no option of the server and no
other field of the request replaces it.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from forethought.config.guided import GuidedDecodingParams
from forethought.config.sampling import LLAMA_SAMPLERS, SamplingParams, SpeculationParams
from forethought.errors import (
    ForethoughtError,
    ParameterError,
    RequestError,
    TaskError,
    UnknownNameError,
    UsageError,
)
from forethought.server.protocol.body import Completing, Generating
from forethought.server.protocol.chat_request import ChatRequest
from forethought.server.protocol.completion_request import CompletionRequest
from forethought.server.protocol.responses_request import ResponseRequest
from forethought.server.protocol.tool_calls import Tools

EFFORTS: Mapping[str, int | None] = {
    "none": 0,
    "minimal": 128,
    "low": 1024,
    "medium": 4096,
    "high": 16384,
    "xhigh": None,
}
"""Tokens of thought of each ``reasoning_effort``; None: no limit."""
NO_LIMIT = 2**31 - 1
"""A thinking budget that no context holds: the thought in front of a shape ends as it likes."""
_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    *LLAMA_SAMPLERS,
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "thinking_soft",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
)
_BUDGETS = ("thinking_budget", "thinking_token_budget", "reasoning_budget")
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Arguments of chat templates that ask for a thought."""
_LOGPROBS = "message.output_text.logprobs"
"""In ``include`` of a response."""
_WHITE_SPACE = " ?"
"""Between the tokens of JSON."""


@dataclass(frozen=True, slots=True)
class RequestSampling:
    """What a body sets.

    Attributes:
        params: sampling fields by the names of tasks.
        fields: path of the body's field by the name of the sampling parameter that it sets, where
            the two differ.
        has_shape: whether a grammar holds for the answer.
        thinks_first: whether the request asks for a thought in front of that.
        prompt_logprobs: of an echoed prompt's tokens; None: it is not scored.
    """

    params: dict[str, Any]
    fields: Mapping[str, str]
    has_shape: bool = False
    thinks_first: bool = False
    prompt_logprobs: int | None = None


def sampling_of(
    body: Generating,
    tools: Tools | None = None,
    *,
    thinks: bool = False,
    passes_chats_on: bool = False,
    takes_effort: bool = False,
) -> RequestSampling:
    """The sampling fields that a body sets; a forced call of ``tools`` is a shape.

    Args:
        thinks: whether the model has thoughts that can be limited.
        passes_chats_on: whether another server forces the calls and reads ``reasoning_effort``.
        takes_effort: whether the chat template reads it.

    Raises:
        ParameterError: fields that contradict each other, by their names.
    """
    params = {name: value for name in _SAME if (value := getattr(body, name, None)) is not None}
    fields: dict[str, str] = {}
    _read_limit(body, params, fields)
    _read_logprobs(body, params, fields)
    _read_speculation(body, params, fields)
    if body.logit_bias:
        params["logit_bias"] = body.logit_bias
    _read_shape(body, None if passes_chats_on else tools, params, fields)
    passes_effort = passes_chats_on or takes_effort
    is_unlimited = _read_thinking(body, thinks, passes_effort, params, fields)
    has_shape = "guided_decoding" in params
    if has_shape and thinks and is_unlimited and not passes_chats_on:
        params["thinking_budget"] = NO_LIMIT
    thinks_first = params.get("thinking_budget") != 0 and bool(
        params.keys() & {"thinking_budget", "thinking_soft"}
    )
    return RequestSampling(params, fields, has_shape, thinks_first, _prompt_logprobs(body))


def sampling_params(params: Mapping[str, Any], **further: Any) -> SamplingParams:
    """The sampling fields of a task, and further ones, as the engine takes them.

    Raises ParameterError for a value outside its range.
    """
    arguments = {("logprobs" if name == "num_logprobs" else name): v for name, v in params.items()}
    return SamplingParams(**arguments, **further)


def compact(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """``params`` whose JSON has little white space: a model can get lost where any is allowed."""
    shape = params.get("guided_decoding")
    if not isinstance(shape, GuidedDecodingParams) or not (shape.json or shape.json_object):
        return params
    schema = {"type": "object"} if shape.json_object else json.loads(str(shape.json))
    if not isinstance(schema, dict) or "x-guidance" in schema:
        return params
    schema = {**schema, "x-guidance": {"whitespace_pattern": _WHITE_SPACE}}
    return {**params, "guided_decoding": GuidedDecodingParams(json=schema)}


@contextmanager
def named_by_client(fields: Mapping[str, str]) -> Iterator[None]:
    """An error raised inside names the fields as the client does; see
    ``RequestSampling.fields``.
    """
    try:
        yield
    except ForethoughtError as error:
        cause = error.__cause__ if isinstance(error, TaskError) else error
        if isinstance(cause, RequestError) and isinstance(cause.__cause__, UsageError):
            cause = cause.__cause__  # such as a grammar that no output can be kept to
        if not isinstance(cause, ForethoughtError):
            raise
        raise _renamed(cause, fields) from error


def _renamed(error: ForethoughtError, fields: Mapping[str, str]) -> ForethoughtError:
    """A copy, since requests that wait for the same grammar share its error."""
    renamed = copy.copy(error)
    renamed.what, renamed.why = _in_words(error.what, fields), _in_words(error.why, fields)
    renamed.fix = _in_words(error.fix, fields)
    if isinstance(renamed, ParameterError) and renamed.param is not None:
        name = renamed.param.rpartition(" in ")[2]  # as "json in guided_decoding"
        renamed.param = fields.get(name, name)
    if isinstance(renamed, UnknownNameError):
        renamed.param = fields.get(renamed.kind)
    return renamed


def _in_words(text: str, fields: Mapping[str, str]) -> str:
    for name, path in fields.items():
        of_shape = r"(?:(?:json|json_object|regex|grammar|choice) in )?"
        pattern = (of_shape if name == "guided_decoding" else "") + rf"(?<![\w.]){re.escape(name)}"
        pattern += r"(?!\w|\.\w)"
        text = re.sub(pattern, path.replace("\\", r"\\"), text)
    return text


# ---- the fields of one kind ----------------------------------------------------------------------


def _read_limit(body: Generating, params: dict[str, Any], fields: dict[str, str]) -> None:
    """``max_tokens``, which some clients call otherwise."""
    values = {name: getattr(body, name, None) for name in _LIMITS}
    values = {name: value for name, value in values.items() if value is not None}
    if len(set(values.values())) > 1:
        raise ParameterError(
            "the limit of tokens is given twice",
            f"{values}",
            "Give max_completion_tokens alone",
            param="max_tokens",
        )
    for name, value in values.items():
        if value == 0 and not (isinstance(body, CompletionRequest) and body.echo):
            why, fix = "nothing would be generated", "Give at least 1"
            raise ParameterError(f"invalid {name}", why, fix, param=name)
        params["max_tokens"], fields["max_tokens"] = value, name


def _prompt_logprobs(body: Generating) -> int | None:
    """Of an echoed prompt: asked for, or needed because nothing else is computed."""
    if not isinstance(body, CompletionRequest) or not body.echo:
        return None
    return body.logprobs if body.logprobs is not None or body.max_tokens != 0 else 0


def _read_logprobs(body: Generating, params: dict[str, Any], fields: dict[str, str]) -> None:
    if isinstance(body, CompletionRequest) and body.logprobs is not None:
        params["num_logprobs"], fields["num_logprobs"] = body.logprobs, "logprobs"
    if isinstance(body, ResponseRequest) and wants_logprobs(body):
        params["num_logprobs"] = body.top_logprobs or 0
        fields["logprobs"] = fields["num_logprobs"] = "top_logprobs"
    if not isinstance(body, ChatRequest):
        return
    if body.top_logprobs and not body.logprobs:
        why, fix = "it is not true", "Set logprobs: true"
        raise ParameterError("top_logprobs needs logprobs", why, fix, param="top_logprobs")
    if body.logprobs:
        params["num_logprobs"], name = body.top_logprobs or 0, "logprobs"
        if body.top_logprobs is not None:
            name = fields["logprobs"] = "top_logprobs"
        fields["num_logprobs"] = name


def wants_logprobs(body: ResponseRequest) -> bool:
    """Whether a response shows log-probabilities."""
    is_included = _LOGPROBS in (body.include or ())
    return is_included or body.top_logprobs is not None


def _read_speculation(body: Generating, params: dict[str, Any], fields: dict[str, str]) -> None:
    choice = body.speculation
    if choice is not None:
        chosen: dict[str, Any] = {"drafter": choice}
        fields["drafter"] = "speculation"
        if not isinstance(choice, str):
            chosen = choice.model_dump(exclude_none=True)
            fields["drafter"] = "speculation.drafter"
        if chosen.get("drafter") == "none":
            chosen = {**chosen, "drafter": None, "enabled": False}
        params["speculation"] = SpeculationParams(**chosen)
    if isinstance(body, ChatRequest) and body.prediction is not None and body.prediction.text:
        fields["speculation.prediction"] = "prediction"
        with named_by_client(fields):
            speculation = params.get("speculation") or SpeculationParams()
            params["speculation"] = speculation.replace(prediction=body.prediction.text)
        if choice is None:
            fields["speculation"] = "prediction"


def _read_shape(
    body: Generating, tools: Tools | None, params: dict[str, Any], fields: dict[str, str]
) -> None:
    """The shape of the answer, of which there is one at most."""
    shapes = dict(_shapes(body))
    if tools is not None and tools.forced:
        with named_by_client({"guided_decoding": "tools"}):
            shapes["tools"] = tools.shape
    if len(shapes) > 1:
        raise ParameterError(
            "two shapes of the output",
            f"{' and '.join(shapes)} each demand one",
            "Give one of them",
            param=next(iter(shapes)),
        )
    for path, shape in shapes.items():
        params["guided_decoding"], fields["guided_decoding"] = shape, path


def _shapes(body: Generating) -> Iterator[tuple[str, GuidedDecodingParams]]:
    if body.structured_outputs is not None:
        fields = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
        path = ".".join(["structured_outputs", *(fields if len(fields) == 1 else ())])
        yield path, _shape(path, **fields)
    if isinstance(body, Completing):
        if body.json_schema is not None:
            yield "json_schema", _shape("json_schema", json=body.json_schema)
        if body.grammar:
            yield "grammar", _shape("grammar", grammar=body.grammar)
    if isinstance(body, ChatRequest) and (format := body.response_format) is not None:
        path, schema = "response_format.json_schema.schema", format.json_schema
        if format.type == "json_object":
            yield "response_format", _shape("response_format", json_object=True)
        elif format.type == "json_schema":
            yield path, _schema(path, schema.schema_ if schema else None)
    if isinstance(body, ResponseRequest) and body.text is not None and body.text.format is not None:
        if body.text.format.type == "json_object":
            yield "text.format", _shape("text.format", json_object=True)
        elif body.text.format.type == "json_schema":
            yield "text.format.schema", _schema("text.format.schema", body.text.format.schema_)


def _schema(path: str, schema: Mapping[str, Any] | None) -> GuidedDecodingParams:
    if schema is None:
        parent, _, name = path.partition(".")
        raise ParameterError(f"{parent} needs {name}", "it is missing", "Give it", param=path)
    return _shape(path, json=schema)


def _shape(path: str, **arguments: Any) -> GuidedDecodingParams:
    with named_by_client({"guided_decoding": path}):
        return GuidedDecodingParams(**arguments)


def _read_thinking(
    body: Generating,
    thinks: bool,
    passes_effort: bool,
    params: dict[str, Any],
    fields: dict[str, str],
) -> bool:
    """The limit of the thought; whether a thought without a limit is asked for.

    Raises ParameterError if it is given twice, or the model does not think.
    """
    budgets = {name: getattr(body, name) for name in _BUDGETS if getattr(body, name) is not None}
    if len(set(budgets.values())) > 1:
        raise ParameterError(
            "the thinking budget is given twice",
            f"{budgets}",
            "Give one of them",
            param=next(iter(budgets)),
        )
    is_unlimited = _asks_template_for_thought(body)
    for name, budget in budgets.items():
        if budget < -1:
            why, fix = f"got {budget}", "-1 means no limit"
            raise ParameterError(f"invalid {name}", why, fix, param=name)
        is_unlimited = is_unlimited or budget == -1
        if budget != -1:
            params["thinking_budget"], fields["thinking_budget"] = budget, name
    path, effort = _effort(body)
    if effort is None or passes_effort:
        return is_unlimited and "thinking_budget" not in params
    if budgets:
        raise ParameterError(
            f"{path} and a thinking budget exclude each other",
            "both limit the thought",
            "Give one of them",
            param=path,
        )
    if not thinks and effort != "none":
        why, fix = "this model has no thoughts to limit", "Leave it out"
        raise ParameterError(f"invalid {path}", why, fix, param=path)
    if thinks and (stands_for := EFFORTS[effort]) is not None:
        params["thinking_budget"], fields["thinking_budget"] = stands_for, path
    return "thinking_budget" not in params and (is_unlimited or effort != "none")


def _effort(body: Generating) -> tuple[str, str | None]:
    """Path of the field, and its value."""
    if isinstance(body, ResponseRequest):
        return "reasoning.effort", body.reasoning.effort if body.reasoning else None
    return "reasoning_effort", getattr(body, "reasoning_effort", None)


def _asks_template_for_thought(body: Generating) -> bool:
    arguments = body.chat_template_kwargs if isinstance(body, ChatRequest) else None
    return any((arguments or {}).get(name) is True for name in _THINKING_SWITCHES)
