"""``POST /v1/messages``: a conversation in the form of Anthropic's API, answered at once or as a
stream of events; ``/v1/messages/count_tokens``.

Blocks of an answer follow each other: thoughts, text, calls of tools. Signatures of thoughts are
empty, and thoughts that come back are taken as they are.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, aclosing
from functools import partial
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forethought.outputs import Usage
from forethought.scaffolding.result import ScaffoldingOutput
from forethought.server.endpoints.chat import conversation_of
from forethought.server.endpoints.message import Answer, AnswerStream, answer_of
from forethought.server.http import (
    Caller,
    EventStream,
    HttpError,
    LastEvents,
    encode,
    http_error,
    until_disconnected,
)
from forethought.server.job import Job, Piece
from forethought.server.protocol.chat_request import ChatRequest, tools_of
from forethought.server.protocol.messages_request import (
    CountTokensRequest,
    MessagesRequest,
    chat_of,
)
from forethought.server.protocol.tool_calls import CallPiece, Tools
from forethought.server.protocol.usage import cached_prompt_tokens
from forethought.server.service import Service

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}
"""Kind of a block -> type of its deltas, and the field with the text."""


async def messages(service: Service, body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation. Raises what ``http_error`` makes a response of."""
    with ExitStack() as held:
        held.enter_context(service.admitted())
        prepare = partial(_prepared, service, body, request.state.caller)
        message = await service.prepared(request, prepare)
        if body.stream:
            return EventStream(message.events(), held.pop_all())
        return await until_disconnected(request.receive, message.whole())


async def count_tokens(service: Service, body: CountTokensRequest, request: Request) -> Response:
    """How many tokens a conversation has, with its tools."""

    def count() -> JSONResponse:
        chat = _chat(body)
        service.resolve(chat)
        tools = service.tools(tools_of(chat))
        conversation = conversation_of(chat, tools, service.sampling_of(chat, tools))
        return JSONResponse({"input_tokens": len(service.backend.render(conversation))})

    return await service.prepared(request, count)


def _chat(body: CountTokensRequest) -> ChatRequest:
    try:
        return chat_of(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(map(str, first["loc"]))
        message = f"invalid {param}: {first['msg']}"
        raise HttpError(400, message, param=param, code="invalid_value") from error


def _prepared(service: Service, body: MessagesRequest, caller: Caller) -> _Message:
    chat = _chat(body)
    tools = service.tools(tools_of(chat))
    sampling = service.sampling_of(chat, tools)
    prompted = service.backend.open(conversation_of(chat, tools, sampling))
    ask = service.ask("msg_", chat, prompted, sampling, num_choices=1, caller=caller)
    return _Message(service, service.start(ask), body, tools)


class _Message:
    """The answer to one request."""

    def __init__(self, service: Service, job: Job, body: MessagesRequest, tools: Tools) -> None:
        self._service, self._job, self._tools = service, job, tools
        self._stops = body.stop_sequences or ()
        thinking = body.thinking
        self._shows_thought = thinking is None or thinking.display != "omitted"

    # ---- at once ------------------------------------------------------------------------------

    async def whole(self) -> JSONResponse:
        outcome = await self._service.outcome(self._job)
        (output,) = outcome.outputs
        answer = self._answer(output)
        ended = {**self._end_of(answer, output), "usage": _usage(outcome.usage)}
        return JSONResponse({**self._head(), "content": [*self._blocks(answer)], **ended})

    def _answer(self, output: ScaffoldingOutput) -> Answer:
        return answer_of(output, self._service, self._job.ask.prompted, self._tools)

    def _head(self) -> dict[str, Any]:
        ask = self._job.ask
        return {"id": ask.id, "type": "message", "role": "assistant", "model": ask.model}

    def _blocks(self, answer: Answer) -> Iterator[dict[str, Any]]:
        if answer.reasoning and self._shows_thought:
            yield {"type": "thinking", "thinking": answer.reasoning, "signature": ""}
        if answer.content or answer.refusal:
            yield {"type": "text", "text": answer.content or answer.refusal}
        for call in answer.calls:
            yield _tool_use(call.id, call.name, _object(call.arguments))

    def _end_of(self, answer: Answer, output: ScaffoldingOutput) -> dict[str, Any]:
        reason = _REASONS.get(answer.finish_reason, "end_turn")
        stop = output.stop_reason if output.stop_reason in self._stops else None
        if reason == "end_turn" and stop is not None:
            reason = "stop_sequence"
        if answer.refusal:
            reason = "refusal"
        return {"stop_reason": reason, "stop_sequence": stop}

    # ---- as a stream --------------------------------------------------------------------------

    async def events(self) -> AsyncGenerator[bytes, None]:
        service, job = self._service, self._job
        stream = AnswerStream(service, job.ask.prompted, self._tools)
        blocks, lines = _BlockEvents(), list[bytes]()
        has_begun = False
        if job.ask.events:
            yield encode("forethought", job.started())
        try:
            async with aclosing(service.updates(job)) as updates:
                async for update in updates:
                    lines += [] if has_begun else self._start()
                    has_begun = True
                    lines += [encode("forethought", event) for event in update.events]
                    for piece in update.pieces:
                        lines += self._pieces(blocks, stream, piece)
                    if lines and not update.is_last:
                        yield b"".join(lines)
                        lines = []
            lines += [] if has_begun else self._start()
            yield LastEvents(b"".join([*lines, *self._end(blocks, stream)]))
        except Exception as error:
            if not has_begun:
                raise  # what has been sent is at most a status
            yield LastEvents(b"".join([*lines, _failure(error)]))

    def _start(self) -> list[bytes]:
        prompt = self._job.ask.prompted.prompt
        usage = _usage(Usage(prompt_tokens=len(prompt) if isinstance(prompt, list) else 0))
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None}
        start = {"type": "message_start", "message": {**message, "usage": usage}}
        return [encode("message_start", start), encode("ping", {"type": "ping"})]

    def _pieces(self, blocks: _BlockEvents, stream: AnswerStream, piece: Piece) -> Iterator[bytes]:
        """The events of new text."""
        split = stream.push(piece.text, piece.thought)
        stream.push_calls(piece.calls)
        yield from self._texts(blocks, *split)
        for call in stream.take_calls():
            yield from blocks.call(call)

    def _texts(self, blocks: _BlockEvents, thought: str, content: str) -> Iterator[bytes]:
        if thought and self._shows_thought:
            yield from blocks.text("thinking", thought)
        if content:
            yield from blocks.text("text", content)

    def _end(self, blocks: _BlockEvents, stream: AnswerStream) -> Iterator[bytes]:
        """The rest of the answer, the reason of its end, and the usage."""
        outcome = self._job.ended()
        (output,) = outcome.outputs
        answer = self._answer(output)
        rest = self._job.rest(self._job.choices[0], output.text or "")
        yield from self._texts(blocks, *stream.push_rest(rest, output))
        yield from self._texts(blocks, *stream.finish(answer))
        if answer.refusal:
            yield from blocks.text("text", answer.refusal)
        for call in stream.take_calls():
            yield from blocks.call(call)
        yield from blocks.close()
        if self._job.ask.events:
            yield encode("forethought", self._job.finished(outcome))
        delta = self._end_of(answer, output)
        usage = _usage(outcome.usage)
        yield encode("message_delta", {"type": "message_delta", "delta": delta, "usage": usage})
        yield encode("message_stop", {"type": "message_stop"})


class _BlockEvents:
    """The events of blocks that follow each other, one of which is open at a time."""

    def __init__(self) -> None:
        self._index, self._kind = -1, ""

    def text(self, kind: str, text: str) -> Iterator[bytes]:
        """New text of the open block, or of a new one if that is of another kind."""
        if self._kind != kind:
            empty = {"thinking": {"thinking": "", "signature": ""}, "text": {"text": ""}}
            yield from self._open(kind, {"type": kind, **empty[kind]})
        name, field = _DELTAS[kind]
        yield self._delta({"type": name, field: text})

    def call(self, piece: CallPiece) -> Iterator[bytes]:
        """A call that begins, or new text of its arguments."""
        if piece.opening is not None:
            call = piece.opening
            yield from self._open("tool_use", _tool_use(call.id, call.name, {}))
        if piece.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": piece.arguments})

    def close(self) -> Iterator[bytes]:
        """End the open block."""
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        if self._kind:
            stop = {"type": "content_block_stop", "index": self._index}
            yield encode("content_block_stop", stop)
        self._kind = ""

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self.close()
        self._index, self._kind = self._index + 1, kind
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        yield encode("content_block_start", start)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        fields = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return encode("content_block_delta", fields)


def _tool_use(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _object(arguments: str) -> Any:
    """Arguments as an object; those that a limit has cut are none, and their text is kept."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {"text": arguments}
    return value if isinstance(value, dict) else {"value": value}


def _usage(usage: Usage) -> dict[str, Any]:
    cached = cached_prompt_tokens(usage)
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def _failure(error: BaseException) -> bytes:
    return encode("error", http_error(error).to_dict())
