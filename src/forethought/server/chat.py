"""``POST /v1/chat/completions``: a conversation is answered, at once or as a stream of chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forethought.errors import ParameterError
from forethought.outputs import TokenLogprobs
from forethought.scaffolding.result import ScaffoldingOutput
from forethought.server.backends import Backend, Conversation
from forethought.server.http import EventStream, encode, http_error, until_gone
from forethought.server.job import Ask, Job, Outcome
from forethought.server.message import Answer, AnswerStream, answer_of
from forethought.server.message_input import message_dict, shape_of, tools_of
from forethought.server.protocol import ChatRequest
from forethought.server.service import (
    Service,
    max_tokens_of,
    sampling_of,
    with_effort,
    with_shape,
)
from forethought.server.tool_calls import Call, Tools
from forethought.server.usage import chat_usage

FIRST_SECONDS = 5.0
"""How long the status of a stream waits for the first token, or for an error."""


async def chat_completions(service: Service, body: ChatRequest, request: Request) -> Response:
    """Answer a conversation.

    Raises:
        Exception: what ``http_error`` makes a response of.
    """
    tools = tools_of(body)
    conversation = Conversation(
        [message_dict(message) for message in body.messages],
        tools,
        body.chat_template_kwargs or {},
    )
    params = _params(service, body, tools)
    with ExitStack() as held:
        held.enter_context(service.admitted())
        prompted = await service.backend.open(conversation)
        ask = service.ask(
            "chatcmpl",
            body,
            prompted,
            params,
            num_choices=body.n or 1,
            tenant=request.state.tenant,
        )
        job = service.start(ask)
        chat = _Chat(service, job, body, tools)
        if body.stream:
            return await chat.stream(held.pop_all())
        return await until_gone(request, chat.whole())


def _params(service: Service, body: ChatRequest, tools: Tools) -> dict[str, Any]:
    params = sampling_of(body)
    limits = {"max_completion_tokens": body.max_completion_tokens, "max_tokens": body.max_tokens}
    params |= max_tokens_of(**limits)
    params = with_effort(params, body.reasoning_effort, service.backend.markers is not None)
    params = with_shape(params, shape_of(body.response_format))
    if tools.forced:
        params = with_shape(params, tools.shape)
    if body.top_logprobs is not None and not body.logprobs:
        raise ParameterError("top_logprobs needs logprobs", "it is not true", "Set logprobs: true")
    if body.logprobs:
        params["num_logprobs"] = body.top_logprobs or 0
    return params


class _Chat:
    """The answer to one request."""

    def __init__(self, service: Service, job: Job, body: ChatRequest, tools: Tools) -> None:
        self._service, self._job, self._body, self._tools = service, job, body, tools
        self._created = int(time.time())
        self._shows_reasoning = body.include_reasoning is not False
        self._wants_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._wants_logprobs = bool(body.logprobs)

    @property
    def _ask(self) -> Ask:
        return self._job.ask

    def _answer(self, output: ScaffoldingOutput) -> Answer:
        return answer_of(output, self._service, self._ask.prompted, self._tools)

    # ---- at once ------------------------------------------------------------------------------

    async def whole(self) -> JSONResponse:
        """The answer at the end."""
        outcome = None
        try:
            outcome = await self._job.outcome()
        finally:
            self._service.ended(self._job, outcome, "ok" if outcome else "failed")
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
            "content": answer.content or ("" if not answer.calls else None),
            "refusal": None,
        }
        if answer.reasoning and self._shows_reasoning:
            message |= {"reasoning": answer.reasoning, "reasoning_content": answer.reasoning}
        if answer.calls:
            message["tool_calls"] = [call.to_dict() for call in answer.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(output.logprobs),
            "finish_reason": answer.finish_reason,
        }

    def _usage(self, outcome: Outcome, answers: Sequence[Answer]) -> dict[str, Any]:
        reasoning = sum(answer.num_reasoning_tokens for answer in answers)
        return chat_usage(outcome.usage, outcome.metrics, reasoning)

    def _logprobs(self, entries: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        if not self._wants_logprobs or entries is None:
            return None
        top = self._body.top_logprobs or 0
        return {"content": [logprob_dict(entry, top, self._service.backend) for entry in entries]}

    # ---- as a stream --------------------------------------------------------------------------

    async def stream(self, held: ExitStack) -> Response:
        """The answer as it comes. Its status waits for the first token."""
        return await begun(self._events(), held)

    async def _events(self) -> AsyncIterator[bytes]:
        service, job = self._service, self._job
        streams = [AnswerStream(service, job.ask.prompted, self._tools) for _ in job.choices]
        outcome, status = None, "cancelled"
        if job.ask.events:
            yield encode("forethought", job.started())
        opened = False
        try:
            async for update in service.watched(job):
                lines = [] if opened else [self._role()]
                opened = True
                lines += [encode("forethought", event) for event in update.events]
                for piece in update.pieces:
                    lines += self._delta(piece.index, streams[piece.index], piece.text)
                if data := b"".join(lines):
                    yield data
            outcome, status = job.ended_outcome(), "ok"
            yield b"".join([*([] if opened else [self._role()]), *self._end(streams, outcome)])
        except Exception as error:
            status = "failed"
            told = http_error(error)
            if not opened and not job.ask.events:
                raise
            if job.ask.events:
                yield encode("forethought", job.failed(told.message))
            yield encode(None, told.to_dict()) + b"data: [DONE]\n\n"
        finally:
            service.ended(job, outcome, status)

    def _role(self) -> bytes:
        """The first chunk of each choice: the role."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, delta) for index in self._job.choices)

    def _delta(self, index: int, stream: AnswerStream, text: str) -> list[bytes]:
        reasoning, content = stream.push(text)
        lines = []
        if reasoning and self._shows_reasoning:
            lines.append(self._chunk(index, _thought(reasoning)))
        if content:
            lines.append(self._chunk(index, {"content": content}))
        return lines

    def _end(self, streams: Sequence[AnswerStream], outcome: Outcome) -> list[bytes]:
        """The rest of each choice, the reasons of their ends, and the usage."""
        lines, answers = [], [self._answer(output) for output in outcome.outputs]
        for index, (stream, answer) in enumerate(zip(streams, answers, strict=True)):
            output = outcome.outputs[index]
            lines += self._delta(index, stream, self._job.rest(index, output.text or ""))
            reasoning, content = stream.finish(answer)
            if reasoning and self._shows_reasoning:
                lines.append(self._chunk(index, _thought(reasoning)))
            if content:
                lines.append(self._chunk(index, {"content": content}))
            for number, call in enumerate(answer.calls):
                lines += self._call(index, number, call)
            logprobs = self._logprobs(output.logprobs)
            lines.append(self._chunk(index, {}, answer.finish_reason, logprobs))
        usage = self._usage(outcome, answers)
        if self._ask.events:
            lines.append(encode("forethought", {**self._job.finished(outcome), "usage": usage}))
        if self._wants_usage:
            lines.append(encode(None, {**self._head(), "choices": [], "usage": usage}))
        return [*lines, b"data: [DONE]\n\n"]

    def _call(self, index: int, number: int, call: Call) -> list[bytes]:
        opening = {**call.to_dict(), "index": number}
        opening["function"] = {"name": call.name, "arguments": ""}
        rest = {"index": number, "function": {"arguments": call.arguments}}
        return [self._chunk(index, {"tool_calls": [each]}) for each in (opening, rest)]

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
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return encode(None, {**self._head(), "choices": [choice]})


def _thought(text: str) -> dict[str, Any]:
    return {"reasoning": text, "reasoning_content": text}


async def begun(events: AsyncIterator[bytes], held: ExitStack) -> EventStream:
    """A response whose status is known: the first event has come, or a while has passed.

    Raises:
        Exception: what the first event failed with.
    """
    first = asyncio.ensure_future(anext(events, None))
    try:
        await asyncio.wait([first], timeout=FIRST_SECONDS)
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        held.close()
        raise

    async def everything() -> AsyncIterator[bytes]:
        try:
            data = await first
            if data is not None:
                yield data
                async for data in events:
                    yield data
        finally:
            first.cancel()
            await events.aclose()  # type: ignore[attr-defined]

    return EventStream(everything(), held)


def logprob_dict(entry: TokenLogprobs, top: int, backend: Backend) -> dict[str, Any]:
    """One position as OpenAI's chats write it; the chosen token comes first in ``entry``."""
    named = [
        (token, each.token if each.token is not None else "", each.logprob)
        for token, each in entry.items()
    ]
    shown = [
        {"token": text, "logprob": _finite(value), "bytes": list(text.encode(errors="replace"))}
        for _, text, value in named
    ]
    ranked = sorted(shown, key=lambda each: -each["logprob"])
    return {**(shown[0] if shown else {}), "top_logprobs": ranked[:top]}


def _finite(value: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for what cannot be."""
    return max(value, -9999.0)
