"""``POST /v1/completions``: texts or token ids are continued, at once or as a stream of chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forethought.errors import ParameterError
from forethought.outputs import (
    GRAMMAR_COMPLETE,
    SpeculationMetrics,
    TokenLogprobs,
    Usage,
)
from forethought.scaffolding.result import ScaffoldingOutput
from forethought.server.backends.backend import Backend, raw_prompt
from forethought.server.endpoints.message import told_stop_reason
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
from forethought.server.job import Job, Outcome, Piece, Update
from forethought.server.protocol.completion_request import CompletionRequest
from forethought.server.protocol.logprobs import (
    Span,
    TextLogprobs,
    TokenSpans,
    completion_logprobs,
    texts_within,
)
from forethought.server.protocol.usage import chat_usage
from forethought.server.service import Service


async def completions(service: Service, body: CompletionRequest, request: Request) -> Response:
    """Continue one prompt or several. Raises what ``http_error`` makes a response of."""
    with ExitStack() as held:
        held.enter_context(service.admitted())
        prepare = partial(_prepared, service, body, request.state.caller)
        answer = await service.prepared(request, prepare)
        if body.stream:
            return EventStream(answer.events(), held.pop_all())
        return await until_disconnected(request.receive, answer.whole())


def _prepared(service: Service, body: CompletionRequest, caller: Caller) -> _Completions:
    prompts = prompts_of(body)
    sampling = service.sampling_of(body)
    if len(prompts) * (body.n or 1) > service.settings.max_choices:
        raise ParameterError(
            "too many prompts",
            f"{len(prompts)} with n={body.n or 1}",
            f"Send at most {service.settings.max_choices} in one request",
            param="prompt",
        )
    num_choices, raw = body.n or 1, [raw_prompt(prompt) for prompt in prompts]
    asks = [
        service.ask("cmpl-", body, prompt, sampling, num_choices=num_choices, caller=caller)
        for prompt in raw
    ]
    return _Completions(service, [service.start(ask) for ask in asks], body, prompts)


def prompts_of(body: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a body, each as text or token ids; raises ParameterError if there is none."""
    value: Any = body.prompt
    prompts = value if isinstance(value, list) and value and not _is_id(value[0]) else [value]
    if any(not prompt for prompt in prompts):
        why, fix = "there is nothing to continue", "Give some text"
        raise ParameterError("empty prompt", why, fix, param="prompt")
    return list(prompts)


def _is_id(value: Any) -> bool:
    return isinstance(value, int)


class _Completions:
    """The answers to one request: one job per prompt."""

    def __init__(
        self,
        service: Service,
        jobs: Sequence[Job],
        body: CompletionRequest,
        prompts: Sequence[str | list[int]],
    ) -> None:
        self._service, self._jobs, self._body, self._prompts = service, jobs, body, prompts
        self._head = {
            "id": f"cmpl-{next(service.ids)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": jobs[0].ask.model,
        }
        self._chunks = ChunkEncoder(self._head)
        options = body.stream_options
        self._wants_usage = bool(options and options.include_usage)

    # ---- at once ------------------------------------------------------------------------------

    async def whole(self) -> JSONResponse:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._caught(job)) for job in self._jobs]
        outcomes = []
        for task in tasks:
            result = task.result()
            if isinstance(result, Exception):
                raise result
            outcomes.append(result)
        choices = [
            self._choice(number, index, outcome)
            for number, outcome in enumerate(outcomes)
            for index in range(len(outcome.outputs))
        ]
        usage = _usage(outcomes)
        return JSONResponse({**self._head, "choices": choices, "usage": usage})

    async def _caught(self, job: Job) -> Outcome | Exception:
        try:
            return await self._service.outcome(job)
        except Exception as error:
            return error

    def _choice(self, number: int, index: int, outcome: Outcome) -> dict[str, Any]:
        output, text = outcome.outputs[index], self._text(number)
        text.add_all(output)
        return self._ended(number, index, *text.finish(output.text or "", output), output)

    def _text(self, number: int) -> _Text:
        echoed = self._echoed(number) if self._body.echo else None
        return _Text(self._service.backend, self._jobs[number], echoed, self._body.logprobs)

    def _chosen(
        self,
        number: int,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
    ) -> dict[str, Any]:
        return {
            "index": number * self._jobs[0].num_choices + index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None,
        }

    def _ended(
        self,
        number: int,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        output: ScaffoldingOutput,
    ) -> dict[str, Any]:
        ended = {"finish_reason": _reason(output), "stop_reason": told_stop_reason(output)}
        return self._chosen(number, index, text, logprobs) | ended

    def _echoed(self, number: int) -> str:
        prompt = self._prompts[number]
        return prompt if isinstance(prompt, str) else self._service.backend.detokenize(prompt)

    # ---- as a stream --------------------------------------------------------------------------

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answers as they come; those of several prompts are interleaved."""
        texts: dict[tuple[int, int], _Text] = {}
        has_begun, lines = bool(self._body.events), list[bytes]()
        if has_begun:
            started = [self._event(n, job.started()) for n, job in enumerate(self._jobs)]
            yield b"".join(started)
        try:
            async with aclosing(_merged(self._service, self._jobs)) as updates:
                async for number, update in updates:
                    lines += [self._event(number, event) for event in update.events]
                    for piece in update.pieces:
                        lines.append(self._piece(number, piece, texts))
                    has_begun = has_begun or bool(lines)
                    if lines and not (update.is_last and len(self._jobs) == 1):
                        yield b"".join(lines)
                        lines = []
            yield LastEvents(b"".join([*lines, *self._end(texts)]))
        except _JobFailed as failed:
            if not has_begun:
                raise failed.error from failed.error.__cause__
            if self._body.events:
                event = self._jobs[failed.number].failed(http_error(failed.error).message)
                lines.append(self._event(failed.number, event))
            yield LastEvents(b"".join([*lines, encode_failure(failed.error)]))

    def _event(self, number: int, event: dict[str, Any]) -> bytes:
        return encode("forethought", {**event, "prompt": number})

    def _piece(self, number: int, piece: Piece, texts: dict[tuple[int, int], _Text]) -> bytes:
        key = (number, piece.index)
        if key not in texts:
            texts[key] = self._text(number)
        texts[key].add(piece.logprobs, piece.token_ids)
        return self._chunk(self._chosen(*key, *texts[key].push(piece.text)))

    def _end(self, texts: dict[tuple[int, int], _Text]) -> list[bytes]:
        lines, outcomes = [], [job.ended() for job in self._jobs]
        for number, outcome in enumerate(outcomes):
            for index, output in enumerate(outcome.outputs):
                text = texts.get((number, index)) or self._text(number)
                if not self._jobs[number].streams_logprobs:
                    text.add_all(output)
                rest = self._jobs[number].rest(index, output.text or "")
                ended = text.finish(rest, output)
                lines.append(self._chunk(self._ended(number, index, *ended, output)))
        if self._body.events:
            lines += [
                self._event(number, job.finished(outcome))
                for number, (job, outcome) in enumerate(zip(self._jobs, outcomes, strict=True))
            ]
        if self._wants_usage:
            lines.append(encode(None, {**self._head, "choices": [], "usage": _usage(outcomes)}))
        return [*lines, b"data: [DONE]\n\n"]

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return self._chunks.encode(choice)


class _Text:
    """The text of one choice, at once or as it streams, and the log-probabilities of its tokens.

    Args:
        echoed: the prompt in front of it; None: it is not echoed.
        top: alternatives per token; None: no log-probabilities are asked for.
    """

    def __init__(self, backend: Backend, job: Job, echoed: str | None, top: int | None) -> None:
        self._backend, self._job, self._echoed, self._top = backend, job, echoed, top
        prompt, skips = job.ask.prompted.prompt, job.ask.sampling.skip_special_tokens
        self._tokens: TextLogprobs | None = None
        if top is not None:
            self._tokens = TextLogprobs(backend.token_texts(prompt, skips), len(echoed or ""))
        self._length, self._has_begun = 0, False

    def add(self, entries: Sequence[TokenLogprobs], ids: Sequence[int]) -> None:
        """Further tokens; ``push`` or ``finish`` follows with their text."""
        if self._tokens is not None:
            self._tokens.add(entries, ids)

    def add_all(self, output: ScaffoldingOutput) -> None:
        """All tokens of an answer, of which none have been added; ``finish`` follows."""
        entries, ids = output.logprobs or (), output.token_ids or ()
        if self._tokens is not None and not ids:  # another server's
            text_of = texts_within(output.text or "", entries)
            self._tokens = TextLogprobs(text_of, len(self._echoed or ""))
        self.add(entries, ids)

    def push(self, text: str) -> tuple[str, dict[str, Any] | None]:
        """The next text and its log-probabilities, those of the echoed prompt in front."""
        opening, spans = self._opening()
        self._length += len(text)
        spans += [] if self._tokens is None else self._tokens.take(self._length)
        return opening + text, self._logprobs(spans)

    def finish(self, text: str, output: ScaffoldingOutput) -> tuple[str, dict[str, Any] | None]:
        opening, spans = self._opening()
        if self._tokens is not None:
            is_cut = isinstance(output.stop_reason, str) and output.stop_reason != GRAMMAR_COMPLETE
            spans += self._tokens.take_rest(len(output.text or ""), keeps_last=not is_cut)
        return opening + text, self._logprobs(spans)

    def _opening(self) -> tuple[str, list[Span]]:
        """The echoed prompt, once."""
        if self._has_begun or self._echoed is None:
            return "", []
        self._has_begun, scores = True, self._job.prompt_scores
        return self._echoed, [] if scores is None else list(self._prompt_spans(*scores))

    def _prompt_spans(
        self, entries: Sequence[TokenLogprobs | None], ids: Sequence[int]
    ) -> Iterator[Span]:
        """Of the prompt's tokens; its text may be without the first of them."""
        text_of, first = self._backend.token_texts((), False), self._backend.detokenize(ids[:1])
        shown = first if (self._echoed or "").startswith(first) else ""
        if shown or "\ufffd" in first:  # else a special token that the text is without
            text_of(ids[0], None)
        yield Span(0, len(shown), ids[0], None, first)
        yield from TokenSpans(text_of, len(shown)).add(entries[1:], ids[1:])

    def _logprobs(self, spans: Sequence[Span]) -> dict[str, Any] | None:
        if self._top is None or not spans:
            return None
        return completion_logprobs(spans, self._top)


def _reason(output: ScaffoldingOutput) -> str:
    reason = output.finish_reason
    return reason if reason in ("length", "content_filter") else "stop"


def _usage(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    usage = sum((outcome.usage for outcome in outcomes), Usage())
    metrics = sum((outcome.metrics for outcome in outcomes), SpeculationMetrics())
    spent = next((end.spent_budget for end in outcomes if end.spent_budget), None)
    return chat_usage(usage, metrics, None, spent)


class _JobFailed(Exception):
    """The job of prompt ``number`` has failed with ``error``."""

    def __init__(self, number: int, error: Exception) -> None:
        super().__init__(number, error)
        self.number, self.error = number, error


async def _merged(
    service: Service, jobs: Sequence[Job]
) -> AsyncGenerator[tuple[int, Update], None]:
    """The updates of all jobs as they come, each with the number of its job.

    Raises _JobFailed if one of them has failed.
    """
    queue: asyncio.Queue[tuple[int, Update] | _JobFailed | None] = asyncio.Queue(1)

    async def read(number: int) -> None:
        try:
            async with aclosing(service.updates(jobs[number])) as updates:
                async for update in updates:
                    await queue.put((number, update))
            await queue.put(None)
        except Exception as error:
            await queue.put(_JobFailed(number, error))

    reading = [asyncio.create_task(read(number)) for number in range(len(jobs))]
    try:
        for _ in jobs:
            while (item := await queue.get()) is not None:
                if isinstance(item, _JobFailed):
                    raise item
                yield item
    finally:
        for task in reading:
            task.cancel()
        await asyncio.wait(reading)
