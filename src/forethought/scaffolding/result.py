"""The result of one request: awaitable, iterable while it streams, readable from any thread.

Knows nothing about controllers or workers; the driver writes to it, everybody else reads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from forethought.errors import RequestCancelled, RequestTimeout, UsageError
from forethought.outputs import SpeculationMetrics, Usage
from forethought.scaffolding.collections import TaskCollection
from forethought.scaffolding.output import Delta, ScaffoldingOutput, StreamEvent


class _Streamed(NamedTuple):
    """Something streamed: an event, text that was held back before, or both."""

    event: StreamEvent | None
    grown: Sequence[Delta]

    def shown(self, so_far: ScaffoldingOutput) -> Any:
        """What ``cur_output`` is now; takes the new text into ``so_far``."""
        for delta in self.grown:
            so_far.text = (so_far.text or "") + delta.text
            (so_far.token_ids or []).extend(delta.token_ids)
        is_text = self.event is None or isinstance(self.event.output, Delta)
        return so_far if is_text else self.event and self.event.output


class ScaffoldingResult:
    """What ``generate_async`` returns at once, and what fills as the request runs.

    ::

        result.result(timeout=60)        # blocks; returns the result itself
        await result                     # the same, on any event loop
        for partial in result: ...       # partial.cur_output grows; last comes the final output
        async for partial in result: ... # the same
        for event in result.events(): ...       # StreamEvent(branch, Delta(text, token_ids))
        async for event in result.aevents(): ...

    Attributes:
        id: name of the request; workers know it as the scope.
        task_collections: those of the request's controller, by name.
        usage: tokens of everything that the request ran; live.
        metrics: how well its generations were guessed ahead, once it is over; without steps if no
            worker tells.
    """

    def __init__(self, request_id: str, abort: Callable[[Exception], None]) -> None:
        self.id = request_id
        self.task_collections: Mapping[str, TaskCollection] = {}
        self.usage = Usage()
        self.metrics = SpeculationMetrics()
        self._abort = abort
        self._done: concurrent.futures.Future[list[ScaffoldingOutput]] = concurrent.futures.Future()
        self._streamed: list[_Streamed] = []
        self._lock = threading.Lock()
        self._news: concurrent.futures.Future[None] | None = None
        self._current: ScaffoldingOutput | None = None
        self.loop_thread: int | None = None

    # ---- the end ------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether the request is over, well or not."""
        return self._done.done()

    @property
    def error(self) -> BaseException | None:
        """Why the request failed; None if it did not, or goes on."""
        return self._done.exception() if self._done.done() else None

    @property
    def outputs(self) -> list[ScaffoldingOutput]:
        """What the method answered; empty while it goes on, after a failure, and for None."""
        return self._done.result() if self._done.done() and not self._done.exception() else []

    @property
    def output(self) -> ScaffoldingOutput | None:
        """The first of ``outputs``."""
        return self.outputs[0] if self.outputs else None

    @property
    def cur_output(self) -> Any:
        """While iterating: the text so far (see ``StreamedText``); else the final output.

        What a user's worker streams that is no text is shown as it is.
        """
        return self.output if self._current is None else self._current

    def result(self, timeout: float | None = None) -> ScaffoldingResult:
        """Wait for the end.

        Args:
            timeout: seconds; the request is aborted when they have passed.

        Raises:
            RequestTimeout: they have passed.
            UsageError: called on the event loop that runs the request; await it there.
            Exception: whatever the request failed with.
        """
        self._forbid_on_loop()
        try:
            self._done.result(timeout)
        except concurrent.futures.TimeoutError as error:
            if self._done.done():
                raise
            raise self._time_out(timeout) from error
        return self

    async def aresult(self, timeout: float | None = None) -> ScaffoldingResult:
        """``result`` for coroutines, on any event loop. Cancelling it aborts the request."""
        try:
            async with asyncio.timeout(timeout):
                await _wait(self._done)
        except TimeoutError as error:
            raise self._time_out(timeout) from error
        except asyncio.CancelledError:
            self.abort()
            raise
        self._done.result()
        return self

    def __await__(self) -> Generator[Any, None, ScaffoldingResult]:
        return self.aresult().__await__()

    def abort(self) -> None:
        """End the request now: it fails with ``RequestCancelled``, unless it has finished."""
        self._abort(RequestCancelled("the request was cancelled", "its owner aborted it"))

    def _time_out(self, timeout: float | None) -> RequestTimeout:
        reason = RequestTimeout(
            "the result did not come in time",
            f"{timeout} s have passed, and the request was aborted",
            "Allow more time, or ask for less",
        )
        self._abort(reason)
        return reason

    def _forbid_on_loop(self) -> None:
        if not self._done.done() and threading.get_ident() == self.loop_thread:
            raise UsageError(
                "waiting here would wait for ever",
                "this thread runs the event loop that the request needs",
                "Use 'await result' or 'async for' there",
            )

    # ---- the stream ---------------------------------------------------------------------------

    def events(self) -> Iterator[StreamEvent]:
        """Everything streamed, from the beginning, as it comes."""
        for event, _ in self._follow():
            if event is not None:
                yield event

    async def aevents(self) -> AsyncIterator[StreamEvent]:
        """Everything streamed, from the beginning, as it comes."""
        async for event, _ in self._afollow():
            if event is not None:
                yield event

    def __iter__(self) -> Iterator[ScaffoldingResult]:
        so_far = ScaffoldingOutput("", [])
        for streamed in self._follow():
            self._current = streamed.shown(so_far)
            yield self
        self._current = None
        yield self

    async def __aiter__(self) -> AsyncIterator[ScaffoldingResult]:
        so_far = ScaffoldingOutput("", [])
        async for streamed in self._afollow():
            self._current = streamed.shown(so_far)
            yield self
        self._current = None
        yield self

    def _follow(self) -> Iterator[_Streamed]:
        position = 0
        while True:
            news = self._watch()
            yield from self._streamed[position : (position := len(self._streamed))]
            if news is None:
                break
            self._forbid_on_loop()
            news.result()
        self._done.result()

    async def _afollow(self) -> AsyncIterator[_Streamed]:
        position = 0
        while True:
            news = self._watch()
            for streamed in self._streamed[position : (position := len(self._streamed))]:
                yield streamed
            if news is None:
                break
            await _wait(news)
        self._done.result()

    def _watch(self) -> concurrent.futures.Future[None] | None:
        """What will be done at the next news; None if there will be none any more."""
        with self._lock:
            if self._done.done():
                return None
            if self._news is None:
                self._news = concurrent.futures.Future()
            return self._news

    def _tell(self) -> None:
        news, self._news = self._news, None
        if news is not None:
            news.set_result(None)

    # ---- for the driver -----------------------------------------------------------------------

    def stream(self, event: StreamEvent | None, grown: Sequence[Delta]) -> None:
        """Hand something streamed, and what the text has grown by, to whoever iterates."""
        with self._lock:
            self._streamed.append(_Streamed(event, grown))
            self._tell()

    def on_finish(self, call: Callable[[], Any]) -> None:
        """``call`` once the request is over; at once if it is."""
        self._done.add_done_callback(lambda _: call())

    def finish(self, outcome: list[ScaffoldingOutput] | Exception) -> None:
        """End the request, once and for all."""
        with self._lock:
            if self._done.done():
                return
            if isinstance(outcome, Exception):
                self._done.set_exception(outcome)
            else:
                self._done.set_result(outcome)
            self._tell()


async def _wait(future: concurrent.futures.Future[Any]) -> None:
    """Until ``future`` is done, well or not, in any thread."""
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def wake(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop that waited is closed
            loop.call_soon_threadsafe(_wake, waiter)

    future.add_done_callback(wake)
    await waiter


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
