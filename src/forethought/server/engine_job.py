"""``EngineJob``: plain decoding on this machine's engine, without a method between.

All samples share the prompt's prefill, log-probabilities come with the tokens, and those of the
prompt are possible.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import TYPE_CHECKING

from forethought.errors import RequestTimeout
from forethought.outputs import (
    CompletionOutput,
    RequestOutput,
    SpeculationMetrics,
    TokenLogprobs,
    Usage,
)
from forethought.scaffolding.budget import Budget, BudgetAccount
from forethought.scaffolding.execution_scope import ExecutionScope, enter
from forethought.scaffolding.result import ScaffoldingOutput
from forethought.server.backends.backend import Backend
from forethought.server.job import Ask, Job, Outcome, Piece, Update

if TYPE_CHECKING:
    from forethought.llm.async_llm import AsyncLLM


class EngineJob(Job):
    """A request that the engine answers without a method.

    Args:
        ask: what to run; its composition is plain.
        place: opens a place among the running requests, for which it waits.
        gather: seconds in which new tokens are gathered.
    """

    streams_logprobs = True

    def __init__(
        self,
        llm: AsyncLLM,
        backend: Backend,
        ask: Ask,
        place: Callable[[int], AbstractAsyncContextManager[None]],
        gather: float = 0.0,
    ) -> None:
        super().__init__(ask, backend)
        self._llm, self._gather, self._place = llm, gather, place
        self._queue_seconds: float | None = None
        self._params = ask.sampling
        self._prompt = ask.prompted.text_or_ids
        self._last: RequestOutput | None = None
        self._num_shown = [0] * self.num_choices

    @property
    def queue_seconds(self) -> float | None:
        """How long it waited for its turn; None: it has not begun."""
        return self._queue_seconds

    @property
    def usage(self) -> Usage:
        """As of the last output."""
        return Usage() if self._last is None else self._last.usage

    @property
    def metrics(self) -> SpeculationMetrics:
        """As of the last output."""
        samples = [] if self._last is None else self._last.outputs
        return sum((sample.metrics for sample in samples if sample.metrics), SpeculationMetrics())

    @property
    def prompt_scores(self) -> tuple[Sequence[TokenLogprobs | None], Sequence[int]] | None:
        """Log-probabilities and ids of the prompt's tokens, if they are asked for."""
        if self._last is None or self._last.prompt_logprobs is None:
            return None
        return self._last.prompt_logprobs, self._last.prompt_token_ids

    async def outcome(self) -> Outcome:
        """The end. Raises what the request failed with; cancelling ends it."""
        async with self._running():
            self._last = await self._llm.generate(self._prompt, self._params)
        return self.ended()

    async def updates(self) -> AsyncGenerator[Update, None]:
        """What it streams; leaving the iterator early ends the request."""
        prompt, params, gather = self._prompt, self._params, self._gather
        async with (
            self._running(),
            aclosing(self._llm.stream(prompt, params, gather=gather)) as outputs,
        ):
            async for output in outputs:
                self._last = output
                if (update := self._update(output)).pieces:
                    yield update

    def ended(self) -> Outcome:
        """The end of a job whose updates are over."""
        assert self._last is not None, "it has ended"
        return Outcome(
            [_as_output(sample) for sample in self._last.outputs],
            self.usage,
            self.metrics,
            self.seconds,
        )

    def _update(self, output: RequestOutput) -> Update:
        pieces = [self._piece(sample) for sample in output.outputs]
        pieces = [piece for piece in pieces if piece.num_tokens or piece.text]
        if not self.ask.events:
            return Update(pieces, [], output.finished)
        several = self.num_choices > 1
        branches = [(str(piece.index) if several else "", piece) for piece in pieces]
        deltas = [self._delta(b, piece.text, piece.num_tokens) for b, piece in branches]
        return Update(pieces, deltas, output.finished)

    def _piece(self, output: CompletionOutput) -> Piece:
        """The part of a sample that has not been streamed."""
        index, num_shown = output.index, self._num_shown[output.index]
        text = output.text[len(self._streamed[index]) :]
        tokens = output.token_ids[num_shown:]
        self._num_shown[index], self._streamed[index] = len(output.token_ids), output.text
        return Piece(index, text, len(tokens), tokens, (output.logprobs or [])[num_shown:])

    @asynccontextmanager
    async def _running(self) -> AsyncGenerator[None, None]:
        """Takes a place among the running requests; raises ``RequestTimeout`` after too long."""
        try:
            async with asyncio.timeout(self.ask.timeout), self._place(self.ask.priority):
                self._queue_seconds = self.seconds
                if self.ask.session is not None:
                    account = BudgetAccount(Budget())
                    enter(ExecutionScope(self.ask.id, "", account, session=self.ask.session))
                yield
        except TimeoutError as error:
            if isinstance(error, RequestTimeout):
                raise
            why = f"{self.ask.timeout} s have passed since it was submitted"
            raise RequestTimeout("the request took too long", why, "Ask for less") from error


def _as_output(output: CompletionOutput) -> ScaffoldingOutput:
    return ScaffoldingOutput(
        text=output.text,
        token_ids=output.token_ids,
        finish_reason=output.finish_reason and output.finish_reason.value,
        stop_reason=output.stop_reason,
        logprobs=output.logprobs,
        cumulative_logprob=output.cumulative_logprob,
        thinking=output.thinking,
    )
