"""``POST /v1/chat/completions``: a conversation is answered, at once or as a stream of chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forethought.scaffolding.result import ScaffoldingOutput
from forethought.server.backends.backend import Conversation
from forethought.server.endpoints.message import (
    Answer,
    AnswerStream,
    AnswerTokens,
    answer_of,
    num_thought_tokens,
    told_stop_reason,
)
from forethought.server.http import (
    Caller,
    ChunkEncoder,
    EventStream,
    LastEvents,
    encode,
    encode_failure,
    http_error,
    until_disconnected,
)
from forethought.server.job import Ask, Job, Outcome, Piece
from forethought.server.protocol.chat_request import (
    ChatRequest,
    message_dicts,
    schema_fields,
    tools_of,
)
from forethought.server.protocol.logprobs import Span, chat_logprobs
from forethought.server.protocol.sampling import RequestSampling
from forethought.server.protocol.tool_calls import CallPiece, Tools
from forethought.server.protocol.usage import chat_usage
from forethought.server.service import Service

_CONTENT = ("content",)
_THOUGHT = ("reasoning", "reasoning_content")
"""Fields of a message or a delta: the second has the name that DeepSeek's API gives it."""


async def chat_completions(service: Service, body: ChatRequest, request: Request) -> Response:
    """Answer a conversation. Raises what ``http_error`` makes a response of."""
    with ExitStack() as held:
        held.enter_context(service.admitted())
        prepare = partial(_prepared, service, body, request.state.caller)
        chat = await service.prepared(request, prepare)
        if body.stream:
            return EventStream(chat.events(), held.pop_all())
        return await until_disconnected(request.receive, chat.whole())


def _prepared(service: Service, body: ChatRequest, caller: Caller) -> _Chat:
    tools = service.tools(tools_of(body))
    sampling = service.sampling_of(body, tools)
    prompted = service.backend.open(conversation_of(body, tools, sampling))
    num_choices = body.n or 1
    ask = service.ask("chatcmpl-", body, prompted, sampling, num_choices=num_choices, caller=caller)
    return _Chat(service, service.start(ask), body, tools)


def conversation_of(body: ChatRequest, tools: Tools, sampling: RequestSampling) -> Conversation:
    """What a body asks the model to answer."""
    return Conversation(
        message_dicts(body.messages),
        tools,
        body.chat_template_kwargs or {},
        has_shape=sampling.has_shape,
        thinks_first=sampling.thinks_first,
        schema_fields=schema_fields(
            body.response_format.json_schema if body.response_format else None
        ),
        reasoning_effort=body.reasoning_effort,
        max_tokens_field=(
            "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        ),
        prompt_end=body.prompt_end,
    )


class _Chat:
    """The answer to one request."""

    def __init__(self, service: Service, job: Job, body: ChatRequest, tools: Tools) -> None:
        self._service, self._job, self._body, self._tools = service, job, body, tools
        self._created = int(time.time())
        self._shows_reasoning = body.include_reasoning is not False
        self._wants_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._wants_logprobs = bool(body.logprobs)
        self._tokens: dict[int, AnswerTokens] = {}
        """Of the choices that are streamed."""
        self._chunks = ChunkEncoder(self._head())

    @property
    def _ask(self) -> Ask:
        return self._job.ask

    def _answer(self, output: ScaffoldingOutput) -> Answer:
        return answer_of(output, self._service, self._ask.prompted, self._tools)

    # ---- at once ------------------------------------------------------------------------------

    async def whole(self) -> JSONResponse:
        outcome = await self._service.outcome(self._job)
        answers = [self._answer(output) for output in outcome.outputs]
        return JSONResponse(
            {
                "id": self._ask.id,
                "object": "chat.completion",
                "created": self._created,
                "model": self._ask.model,
                "choices": [
                    self._choice(index, answer, output)
                    for index, (answer, output) in enumerate(
                        zip(answers, outcome.outputs, strict=True)
                    )
                ],
                "usage": self._usage(outcome, answers),
            }
        )

    def _choice(self, index: int, answer: Answer, output: ScaffoldingOutput) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.content or (None if answer.calls or answer.refusal else ""),
            "refusal": answer.refusal,
        }
        if answer.reasoning and self._shows_reasoning:
            message |= dict.fromkeys(_THOUGHT, answer.reasoning)
        if answer.calls:
            message["tool_calls"] = [call.to_dict() for call in answer.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._all_logprobs(answer, output),
            "finish_reason": answer.finish_reason,
            "stop_reason": told_stop_reason(output),
        }

    def _usage(self, outcome: Outcome, answers: Sequence[Answer]) -> dict[str, Any]:
        reasoning = num_thought_tokens(self._service, self._job, answers)
        return chat_usage(outcome.usage, outcome.metrics, reasoning, outcome.spent_budget)

    def _all_logprobs(self, answer: Answer, output: ScaffoldingOutput) -> dict[str, Any] | None:
        if not self._wants_logprobs or output.logprobs is None:
            return None
        return self._logprobs(*AnswerTokens(self._service, self._ask).rest(answer, output))

    def _logprobs(self, thought: Sequence[Span], content: Sequence[Span]) -> dict[str, Any]:
        """Those of the content under OpenAI's name, and those of the thought in a field of their
        own.
        """
        top = self._body.top_logprobs or 0
        logprobs: dict[str, Any] = {"content": chat_logprobs(content, top), "refusal": None}
        if thought and self._shows_reasoning:
            logprobs["reasoning"] = chat_logprobs(thought, top)
        return logprobs

    # ---- as a stream --------------------------------------------------------------------------

    async def events(self) -> AsyncGenerator[bytes, None]:
        service, job, opened = self._service, self._job, False
        streams = [AnswerStream(service, job.ask.prompted, self._tools) for _ in job.choices]
        lines: list[bytes] = []  # not sent: those of the last update go with the end
        if job.ask.events:
            yield encode("forethought", job.started())
        try:
            async with aclosing(service.updates(job)) as updates:
                async for update in updates:
                    if not opened and (update.pieces or update.events):
                        lines.append(self._role())
                        opened = True
                    lines += [encode("forethought", event) for event in update.events]
                    for piece in update.pieces:
                        lines += self._delta(piece, streams[piece.index])
                    if lines and not update.is_last:
                        yield b"".join(lines)
                        lines = []
            lines += [] if opened else [self._role()]
            yield LastEvents(b"".join([*lines, *self._end(streams)]))
        except Exception as error:
            if not opened and not job.ask.events:
                raise  # what has been sent is at most a status
            if job.ask.events:
                lines.append(encode("forethought", job.failed(http_error(error).message)))
            yield LastEvents(b"".join([*lines, encode_failure(error)]))

    def _role(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, delta) for index in self._job.choices)

    def _delta(self, piece: Piece, stream: AnswerStream) -> list[bytes]:
        """The chunks of new text, with the log-probabilities of its tokens."""
        split = stream.push(piece.text, piece.thought)
        stream.push_calls(piece.calls)
        calls = [self._call(piece.index, call) for call in stream.take_calls()]
        if not self._wants_logprobs or not self._job.streams_logprobs:
            return [*self._parts(piece.index, *split), *calls]
        if piece.index not in self._tokens:
            self._tokens[piece.index] = AnswerTokens(self._service, self._ask)
        tokens = self._tokens[piece.index].push(piece, stream)
        return [*self._parts(piece.index, *split, *tokens), *calls]

    def _parts(
        self,
        index: int,
        reasoning: str,
        content: str,
        thought_tokens: Sequence[Span] = (),
        content_tokens: Sequence[Span] = (),
    ) -> list[bytes]:
        lines = []
        if (reasoning or thought_tokens) and self._shows_reasoning:
            logprobs = self._logprobs(thought_tokens, ()) if thought_tokens else None
            lines.append(self._text(index, _THOUGHT, reasoning, logprobs))
        if content or content_tokens:
            logprobs = self._logprobs((), content_tokens) if content_tokens else None
            lines.append(self._text(index, _CONTENT, content, logprobs))
        return lines

    def _text(
        self, index: int, names: Sequence[str], text: str, logprobs: dict[str, Any] | None
    ) -> bytes:
        if logprobs is None:
            return self._chunks.encode_delta(index, names, text)
        return self._chunk(index, dict.fromkeys(names, text), logprobs)

    def _end(self, streams: Sequence[AnswerStream]) -> list[bytes]:
        """The rest of each choice, the reasons of their ends, and the usage."""
        outcome = self._job.ended()
        lines, answers = [], [self._answer(output) for output in outcome.outputs]
        for index, (stream, answer) in enumerate(zip(streams, answers, strict=True)):
            output = outcome.outputs[index]
            lines += self._parts(
                index, *stream.push_rest(self._job.rest(index, output.text or ""), output)
            )
            lines += self._parts(index, *stream.finish(answer))
            if answer.refusal:
                lines.append(self._chunk(index, {"refusal": answer.refusal}))
            lines += [self._call(index, piece) for piece in stream.take_calls()]
            logprobs = self._last_logprobs(index, answer, output)
            lines.append(self._last_chunk(index, answer, output, logprobs))
        usage = self._usage(outcome, answers)
        if self._ask.events:
            lines.append(encode("forethought", {**self._job.finished(outcome), "usage": usage}))
        if self._wants_usage:
            lines.append(encode(None, {**self._head(), "choices": [], "usage": usage}))
        return [*lines, b"data: [DONE]\n\n"]

    def _last_logprobs(
        self, index: int, answer: Answer, output: ScaffoldingOutput
    ) -> dict[str, Any] | None:
        """Those not yet sent with the text of choice ``index``; None if there are none."""
        if index in self._tokens:
            logprobs = self._logprobs(*self._tokens[index].rest(answer, output))
        elif self._job.streams_logprobs:
            return None
        else:
            logprobs = self._all_logprobs(answer, output) or {}
        return logprobs if logprobs.get("content") or logprobs.get("reasoning") else None

    def _call(self, index: int, piece: CallPiece) -> bytes:
        """The chunks of new text of a call: its name, and its arguments."""
        calls: list[dict[str, Any]] = []
        if piece.opening is not None:
            call = piece.opening._replace(arguments="")
            calls.append({"index": piece.number, **call.to_dict()})
        if piece.arguments:
            calls.append({"index": piece.number, "function": {"arguments": piece.arguments}})
        return b"".join(self._chunk(index, {"tool_calls": [fields]}) for fields in calls)

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._ask.id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._ask.model,
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        **ended: Any,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return self._chunks.encode(choice | ended)

    def _last_chunk(
        self, index: int, answer: Answer, output: ScaffoldingOutput, logprobs: dict[str, Any] | None
    ) -> bytes:
        ended = {"finish_reason": answer.finish_reason, "stop_reason": told_stop_reason(output)}
        return self._chunk(index, {}, logprobs, **ended)
