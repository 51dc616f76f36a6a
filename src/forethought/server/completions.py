"""``POST /v1/completions``: texts or token ids are continued, at once or as a stream of chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forethought.errors import ParameterError
from forethought.outputs import SpeculationMetrics, TokenLogprobs, Usage
from forethought.scaffolding.result import ScaffoldingOutput
from forethought.server.backends import raw_prompt
from forethought.server.http import (
    Caller,
    ChunkEncoder,
    EventStream,
    LastEvents,
    encode,
    encode_failure,
    http_error,
    until_gone,
)
from forethought.server.job import Job, Outcome, Piece, Update
from forethought.server.logprobs import completion_logprobs
from forethought.server.protocol import CompletionRequest
from forethought.server.service import Service
from forethought.server.usage import chat_usage


async def completions(service: Service, body: CompletionRequest, request: Request) -> Response:
    """Continue one prompt or several.

    Raises:
        Exception: what ``http_error`` makes a response of.
    """
    with ExitStack() as held:
        held.enter_context(service.admitted())
        prepare = partial(_prepared, service, body, request.state.caller)
        answer = await service.prepared(request, prepare)
        if body.stream:
            return EventStream(answer.events(), held.pop_all())
        return await until_gone(request.receive, answer.whole())


def _prepared(service: Service, body: CompletionRequest, caller: Caller) -> _Completions:
    """The answer to a body, before it begins."""
    prompts = prompts_of(body)
    asked = service.sampling_of(body)
    if len(prompts) * (body.n or 1) > service.settings.max_choices:
        raise ParameterError(
            "too many prompts",
            f"{len(prompts)} with n={body.n or 1}",
            f"Send at most {service.settings.max_choices} in one request",
            param="prompt",
        )
    num_choices, raw = body.n or 1, [raw_prompt(prompt) for prompt in prompts]
    asks = [
        service.ask("cmpl-", body, each, asked, num_choices=num_choices, caller=caller)
        for each in raw
    ]
    return _Completions(service, [service.start(ask) for ask in asks], body, prompts)


def prompts_of(body: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a body, each as text or token ids.

    Raises:
        ParameterError: there is none.
    """
    given: Any = body.prompt
    prompts = given if isinstance(given, list) and given and not _is_id(given[0]) else [given]
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
        """All answers at the end."""
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
        """Choice ``index`` of prompt ``number``."""
        output, text = outcome.outputs[index], self._echoed(number)
        logprobs = self._logprobs(output, outcome, len(text))
        text += output.text or ""
        return self._chosen(number, index, text, logprobs, _reason(output))

    def _chosen(
        self,
        number: int,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        reason: str | None,
    ) -> dict[str, Any]:
        return {
            "index": number * self._jobs[0].num_choices + index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
        }

    def _echoed(self, number: int) -> str:
        """What stands in front of the answer: the prompt, if it is echoed."""
        if not self._body.echo:
            return ""
        prompt = self._prompts[number]
        return prompt if isinstance(prompt, str) else self._service.backend.detokenize(prompt)

    def _logprobs(
        self, output: ScaffoldingOutput, outcome: Outcome, offset: int
    ) -> dict[str, Any] | None:
        if self._body.logprobs is None or output.logprobs is None:
            return None
        entries: list[TokenLogprobs | None] = list(output.logprobs)
        ids = list(output.token_ids or ())
        if outcome.prompt_logprobs is not None:
            entries = [*outcome.prompt_logprobs, *entries]
            ids, offset = [*outcome.prompt_ids, *ids], 0
        found = completion_logprobs(entries, ids, self._body.logprobs, offset)
        if outcome.prompt_logprobs is not None:  # the first token has a text and no probability
            found["tokens"][0] = self._service.backend.detokenize(ids[:1])
            found["text_offset"][1:] = [
                offset + len(found["tokens"][0]) for offset in found["text_offset"][1:]
            ]
        return found

    # ---- as a stream --------------------------------------------------------------------------

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answers as they come, those of several prompts between each other."""
        offsets: dict[tuple[int, int], int] = {}
        has_begun, lines = bool(self._body.events), list[bytes]()
        if has_begun:
            started = [self._event(n, job.started()) for n, job in enumerate(self._jobs)]
            yield b"".join(started)
        try:
            async with aclosing(_merged(self._service, self._jobs)) as updates:
                async for number, update in updates:
                    lines += [self._event(number, each) for each in update.events]
                    for piece in update.pieces:
                        lines.append(self._piece(number, piece, offsets))
                    has_begun = has_begun or bool(lines)
                    if lines and not (update.is_last and len(self._jobs) == 1):
                        yield b"".join(lines)
                        lines = []
            yield LastEvents(b"".join([*lines, *self._end(offsets)]))
        except _JobFailed as failed:
            if not has_begun:
                raise failed.error from failed.error.__cause__
            if self._body.events:
                told = self._jobs[failed.number].failed(http_error(failed.error).message)
                lines.append(self._event(failed.number, told))
            yield LastEvents(b"".join([*lines, encode_failure(failed.error)]))

    def _event(self, number: int, event: dict[str, Any]) -> bytes:
        """An event of prompt ``number``."""
        return encode("forethought", {**event, "prompt": number})

    def _piece(self, number: int, piece: Piece, offsets: dict[tuple[int, int], int]) -> bytes:
        key, text = (number, piece.index), piece.text
        if key not in offsets:
            text = self._echoed(number) + text
            offsets[key] = len(text) - len(piece.text)
        logprobs = None
        if self._body.logprobs is not None and piece.logprobs:
            entries: list[TokenLogprobs | None] = list(piece.logprobs)
            top = self._body.logprobs
            logprobs = completion_logprobs(entries, piece.token_ids, top, offsets[key])
        offsets[key] += len(piece.text)
        return self._chunk(self._chosen(number, piece.index, text, logprobs, None))

    def _end(self, offsets: dict[tuple[int, int], int]) -> list[bytes]:
        lines, outcomes = [], [job.ended() for job in self._jobs]
        for number, outcome in enumerate(outcomes):
            for index, output in enumerate(outcome.outputs):
                text = self._jobs[number].rest(index, output.text or "")
                if (number, index) not in offsets:
                    text = self._echoed(number) + text
                logprobs = None
                if not self._jobs[number].streams_logprobs:
                    logprobs = self._logprobs(output, outcome, 0)
                choice = self._chosen(number, index, text, logprobs, _reason(output))
                lines.append(self._chunk(choice))
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


def _reason(output: ScaffoldingOutput) -> str:
    return "length" if output.finish_reason == "length" else "stop"


def _usage(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Of all prompts together."""
    usage = sum((outcome.usage for outcome in outcomes), Usage())
    metrics = sum((outcome.metrics for outcome in outcomes), SpeculationMetrics())
    spent = next((each.spent_budget for each in outcomes if each.spent_budget), None)
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

    Raises:
        _JobFailed: one of them has failed.
    """
    queue: asyncio.Queue[tuple[int, Update] | _JobFailed | None] = asyncio.Queue()

    async def read(number: int) -> None:
        try:
            async with aclosing(service.updates(jobs[number])) as updates:
                async for update in updates:
                    queue.put_nowait((number, update))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(_JobFailed(number, error))

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
