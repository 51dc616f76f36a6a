"""ollama's ``/api/chat``, ``/api/generate``, ``/api/tags`` and ``/api/show``.

A body becomes the chat that it stands for. A stream has a JSON object per line; times are in
nanoseconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forethought.errors import ParameterError
from forethought.llm.reasoning import Split
from forethought.server.backends.backend import raw_prompt
from forethought.server.endpoints import catalog
from forethought.server.endpoints.chat import conversation_of
from forethought.server.endpoints.message import Answer, AnswerStream, answer_of
from forethought.server.http import (
    Caller,
    EventStream,
    LastEvents,
    http_error,
    until_disconnected,
)
from forethought.server.job import Job
from forethought.server.protocol.chat_request import tools_of
from forethought.server.protocol.ollama_request import (
    FIELDS,
    OllamaChatRequest,
    OllamaGenerateRequest,
    ShowRequest,
    chat_of,
)
from forethought.server.protocol.sampling import named_by_client
from forethought.server.protocol.tool_calls import Tools
from forethought.server.service import Service

OllamaBody = OllamaChatRequest | OllamaGenerateRequest
_LATEST = ":latest"


async def ollama(service: Service, body: OllamaBody, request: Request) -> Response:
    """Answer a conversation or a prompt; where there is none, say that the model is loaded."""
    with ExitStack() as held:
        held.enter_context(service.admitted())
        prepare = partial(_prepared, service, body, request.state.caller)
        prepared = await service.prepared(request, prepare)
        if prepared is None:
            loaded = _Shape(body).part(Split("", ""))
            return JSONResponse({**loaded, "done": True, "done_reason": "load"})
        if body.stream:
            return _Lines(prepared.lines(), held.pop_all())
        return await until_disconnected(request.receive, prepared.whole())


def tags(service: Service) -> dict[str, Any]:
    """The body of ``GET /api/tags``: the models of ``/v1/models``."""
    return {"models": [_entry(model) for model in catalog.models(service)["data"]]}


def show(service: Service, body: ShowRequest) -> dict[str, Any]:
    """The body of ``POST /api/show``. Raises UnknownNameError if there is no such model."""
    model = catalog.model(service, served_name(service, body.model))
    thinks = ["thinking"] if service.backend.thinks else []
    info = {"general.basename": model["id"], "general.context_length": model["max_model_len"]}
    return {
        **_entry(model),
        "model_info": info,
        "capabilities": ["completion", "tools", *thinks],
    }


def served_name(service: Service, name: str) -> str:
    """A model's name without the tag ``latest``, which ollama's clients add."""
    return name if name in service.models else name.removesuffix(_LATEST)


def _entry(model: dict[str, Any]) -> dict[str, Any]:
    name, began = model["id"], datetime.fromtimestamp(model["created"], UTC)
    digest = hashlib.sha256(name.encode()).hexdigest()  # clients show its first characters
    entry = {"name": name, "model": name, "modified_at": began.isoformat(), "digest": digest}
    return {**entry, "size": 0, "details": {"family": "", "parameter_size": ""}}


def _prepared(service: Service, body: OllamaBody, caller: Caller) -> _Answer | None:
    """The answer, ready to run; None: there is nothing to answer."""
    model = served_name(service, body.model)
    catalog.model(service, model)
    _check(service, body)
    try:
        chat = chat_of(body, model)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(map(str, first["loc"]))
        raise ParameterError(f"invalid {param}", first["msg"], param=param) from error
    if chat is None:
        return None
    with named_by_client(FIELDS):
        tools = service.tools(tools_of(chat))
        sampling = service.sampling_of(chat, tools)
        fields = {name: FIELDS.get(path, path) for name, path in sampling.fields.items()}
        sampling = replace(sampling, fields={**FIELDS, **fields})
        if isinstance(body, OllamaGenerateRequest) and body.raw:
            prompted = raw_prompt(body.prompt)
        else:
            prompted = service.backend.open(conversation_of(chat, tools, sampling))
        ask = service.ask("ollama-", chat, prompted, sampling, num_choices=1, caller=caller)
        return _Answer(service, service.start(ask), tools, _Shape(body))


def _check(service: Service, body: OllamaBody) -> None:
    """Raises ParameterError for a context, a thought or a template that there is not."""
    context, max_length = body.options.num_ctx, service.backend.max_length
    if context is not None and max_length is not None and context > max_length:
        why = f"got {context}, and the model has {max_length} here"
        fix = "Leave it out, or start the server with a larger --max-seq-len"
        raise ParameterError("invalid options.num_ctx", why, fix, param="options.num_ctx")
    if isinstance(body, OllamaGenerateRequest) and body.raw and body.system:
        why = "a raw prompt is in no template that would write it"
        raise ParameterError("invalid system", why, "Write it into the prompt", param="system")
    if body.think and service.backend.thinks is False:
        why = "this model has no thoughts"
        raise ParameterError("invalid think", why, "Leave it out", param="think")


class _Shape:
    """The form of the objects of an answer: of a chat, or of a text."""

    def __init__(self, body: OllamaBody) -> None:
        self._is_chat, self._model = isinstance(body, OllamaChatRequest), body.model

    def part(self, text: Split, answer: Answer | None = None) -> dict[str, Any]:
        """New text, with the calls of the whole answer."""
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        head = {"model": self._model, "created_at": now, "done": False}
        thought = {"thinking": text.reasoning} if text.reasoning else {}
        if not self._is_chat:
            return {**head, "response": text.content, **thought}
        message: dict[str, Any] = {"role": "assistant", "content": text.content, **thought}
        if answer is not None and answer.calls:
            calls = [{"name": c.name, "arguments": _object(c.arguments)} for c in answer.calls]
            message["tool_calls"] = [{"function": function} for function in calls]
        return {**head, "message": message}


def _object(arguments: str) -> dict[str, Any]:
    """Arguments as an object; those that a limit has cut are none, and their text is kept."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {"text": arguments}
    return value if isinstance(value, dict) else {"value": value}


class _Answer:
    """The answer to one request."""

    def __init__(self, service: Service, job: Job, tools: Tools, shape: _Shape) -> None:
        self._service, self._job, self._tools, self._shape = service, job, tools, shape
        self._first_token: float | None = None

    async def whole(self) -> JSONResponse:
        async with aclosing(self._updates(self._stream())) as texts:
            async for _ in texts:
                pass
        answer = self._ended()
        text = Split(answer.reasoning, answer.content or answer.refusal or "")
        return JSONResponse({**self._shape.part(text, answer), **self._end(answer)})

    async def lines(self) -> AsyncGenerator[bytes, None]:
        stream, has_begun = self._stream(), False
        try:
            async with aclosing(self._updates(stream)) as texts:
                async for text in texts:
                    has_begun = True
                    yield _line(self._shape.part(text))
            answer, (output,) = self._ended(), self._job.ended().outputs
            rest = stream.push_rest(self._job.rest(0, output.text or ""), output)
            last = stream.finish(answer)
            text = Split(
                rest.reasoning + last.reasoning,
                rest.content + last.content + (answer.refusal or ""),
            )
            yield LastEvents(_line({**self._shape.part(text, answer), **self._end(answer)}))
        except Exception as error:
            if not has_begun:
                raise  # what has been sent is at most a status
            yield LastEvents(_failure(error))

    def _stream(self) -> AnswerStream:
        return AnswerStream(self._service, self._job.ask.prompted, self._tools)

    async def _updates(self, stream: AnswerStream) -> AsyncGenerator[Split, None]:
        """The text that is new and certain."""
        async with aclosing(self._service.updates(self._job)) as updates:
            async for update in updates:
                if self._first_token is None:
                    self._first_token = self._job.seconds
                for piece in update.pieces:
                    text = stream.push(piece.text, piece.thought)
                    if text.reasoning or text.content:
                        yield text

    def _ended(self) -> Answer:
        (output,) = self._job.ended().outputs
        return answer_of(output, self._service, self._job.ask.prompted, self._tools)

    def _end(self, answer: Answer) -> dict[str, Any]:
        """The fields of the last object."""
        outcome = self._job.ended()
        first = outcome.seconds if self._first_token is None else self._first_token
        return {
            "done": True,
            "done_reason": "length" if answer.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(outcome.seconds),
            "load_duration": 0,
            "prompt_eval_count": outcome.usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first),
            "eval_count": outcome.usage.completion_tokens,
            "eval_duration": _nanoseconds(outcome.seconds - first),
        }


class _Lines(EventStream):
    """A stream of JSON objects, one per line."""

    media_type = "application/x-ndjson"

    def encode_failure(self, error: BaseException) -> bytes:
        return _failure(error)


def _failure(error: BaseException) -> bytes:
    return _line({"error": http_error(error).message})


def _line(fields: dict[str, Any]) -> bytes:
    return f"{json.dumps(fields, ensure_ascii=False)}\n".encode(errors="replace")


def _nanoseconds(seconds: float) -> int:
    return max(0, int(seconds * 1e9))
