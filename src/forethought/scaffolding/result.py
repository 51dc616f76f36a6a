"""The outputs of tasks, their streamed deltas, and the result of a request.

``ScaffoldingResult`` is awaitable, iterable while it streams, and readable from any thread; only
the driver writes to it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from forethought.errors import RequestCancelled, RequestTimeout, UsageError
from forethought.outputs import (
    DraftSpan,
    SpeculationMetrics,
    ThinkingOutput,
    TokenConfidence,
    TokenLogprobs,
    Usage,
)

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ScaffoldingOutput:
    """One finished text: what a method answers with, or one sample of a generation task.

    ``text`` and ``token_ids`` also have the names that code written for
    ``tensorrt_llm.scaffolding`` uses: ``output_str``, ``tokens`` and ``output_tokens``; and
    ``async for`` over an output yields it once, as over an engine's result that streams.
    """

    text: str | None = None
    token_ids: list[int] | None = None
    """Generated ids; None where the worker cannot know them (most HTTP servers)."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Details from the method, by its name; and what a server tells apart from the text of a
    message: its ``tool_calls``, ``reasoning`` and ``refusal``."""
    finish_reason: str | None = None
    """``"stop"``, ``"length"`` or ``"abort"``."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry per generated token, if asked for (nats)."""
    cumulative_logprob: float | None = None
    usage: Usage = field(default_factory=Usage)
    """Tokens of its task; ``ScaffoldingResult.usage`` is that of the whole request."""
    confidences: list[TokenConfidence | None] | None = None
    """One entry per generated token, if asked for; None for a token that a method put in."""
    thinking: ThinkingOutput | None = None
    """Its thought, where a thinking budget was set and the worker enforces it itself."""
    candidates: list[str | None] = field(default_factory=list)
    """Texts of the samples among which a method chose, by their numbers: None for one that failed
    or was ended early. Empty where it drew no samples."""
    cut_candidates: list[int] = field(default_factory=list)
    """Numbers of those that a limit of tokens ended."""

    @classmethod
    def inserted(cls, text: str, token_ids: list[int] | None = None) -> Self:
        """Text that a method puts between generated parts, to be joined with them.

        Args:
            text: exactly as it is inserted.
            token_ids: its ids, where they are known.
        """
        ids = token_ids if token_ids is not None or text else []
        absent: list[TokenConfidence | None] = [None] * len(ids or ())
        return cls(
            text,
            ids,
            logprobs=[{} for _ in absent],
            cumulative_logprob=0.0,
            confidences=absent,
        )

    @classmethod
    def join(cls, parts: Iterable[ScaffoldingOutput | str]) -> Self:
        """One output of several parts, in their order; a string is inserted text without ids.

        Text, ids, log-probabilities, their sum and confidences are joined where all parts have
        them, and else None. An inserted token has an empty dictionary of log-probabilities and no
        confidence. How it ended is that of the last part; ``usage`` is the sum, of ``meta`` and
        ``thinking`` the later one wins. Ids are joined unchanged: a token that ended a part and is
        not in its text stays.
        """
        outputs = [cls.inserted(part) if isinstance(part, str) else part for part in parts]
        whole = cls("", [], logprobs=[], cumulative_logprob=0.0, confidences=[])
        for part in outputs:
            whole.text = _sum(whole.text, part.text)
            whole.token_ids = _sum(whole.token_ids, part.token_ids)
            whole.logprobs = _sum(whole.logprobs, part.logprobs)
            whole.cumulative_logprob = _sum(whole.cumulative_logprob, part.cumulative_logprob)
            whole.confidences = _sum(whole.confidences, part.confidences)
            whole.meta |= part.meta
            whole.finish_reason, whole.stop_reason = part.finish_reason, part.stop_reason
            whole.thinking = part.thinking or whole.thinking
        for usage in {id(part.usage): part.usage for part in outputs}.values():
            whole.usage += usage
        return whole

    def cut(self, text: str, num_tokens: int) -> ScaffoldingOutput:
        """The output as if it had stopped after ``num_tokens`` tokens, with another text."""
        return dataclasses.replace(
            self,
            text=text,
            token_ids=self.token_ids and self.token_ids[:num_tokens],
            finish_reason="stop",
            stop_reason=None,
            logprobs=self.logprobs and self.logprobs[:num_tokens],
            cumulative_logprob=None,
            confidences=self.confidences and self.confidences[:num_tokens],
        )

    def without_last(self, num_tokens: int) -> ScaffoldingOutput:
        """The same text without its last ``num_tokens`` ids, which contribute no text."""
        if not num_tokens or self.token_ids is None:
            return self
        cut = dataclasses.replace(self, token_ids=self.token_ids[:-num_tokens])
        cut.confidences = self.confidences and self.confidences[:-num_tokens]
        if self.logprobs is not None:
            cut.logprobs = self.logprobs[:-num_tokens]
            dropped = zip(self.token_ids, self.logprobs, strict=True)
            lost = [entries[token].logprob for token, entries in [*dropped][-num_tokens:]]
            if self.cumulative_logprob is not None:
                cut.cumulative_logprob = self.cumulative_logprob - sum(lost)
        return cut

    @property
    def output_str(self) -> str | None:
        """The text."""
        return self.text

    @output_str.setter
    def output_str(self, text: str | None) -> None:
        self.text = text

    @property
    def output_tokens(self) -> list[int] | None:
        """The generated ids."""
        return self.token_ids

    @output_tokens.setter
    def output_tokens(self, token_ids: list[int] | None) -> None:
        self.token_ids = token_ids

    @property
    def tokens(self) -> list[int] | None:
        """The generated ids."""
        return self.token_ids

    @property
    def outputs(self) -> list[ScaffoldingOutput]:
        """Itself, in the shape of an engine's result."""
        return [self]

    async def __aiter__(self) -> AsyncIterator[ScaffoldingOutput]:
        yield self


def _sum(one: Any, other: Any) -> Any:
    """Both together, in a new object; None if one of them is unknown."""
    return None if one is None or other is None else one + other


class CallDelta(NamedTuple):
    """New arguments of a call of a tool."""

    number: int
    """Of the call in its message."""
    id: str | None
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of a stream. A controller that yields one streams it to the caller itself."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    source: str = ""
    """Identifies a stream within its branch: the deltas of one source join to one text."""
    drafts: tuple[DraftSpan, ...] = ()
    """Where drafts were verified in ``text``, if its worker knows."""
    reasoning: str = ""
    """New text of a thought that a server tells apart from ``text``; it comes before it."""
    calls: tuple[CallDelta, ...] = ()
    """New arguments of calls that a server tells apart from ``text``."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A step of a method, for observers: ``yield Stage("pruned", "its score is lowest")``.

    The driver itself emits ``spawned`` and ``ended`` for each parallel branch, and ``scored`` for
    each reward task. A method adds what it decides; it resumes at once.
    """

    name: str
    """``spawned``, ``probed``, ``scored``, ``pruned``, ``voted``, ``selected``, ``called`` (a tool
    was), ``ended``, or another; docs/traces.md has their table."""
    why: str = ""
    """The reason: for ``ended`` it is ``done``, ``failed``, ``cancelled`` or ``budget``."""
    branch: str | None = None
    """Path of the branch that it is about (``Branch.path``); None: the one that yields it."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Details by name, such as ``answer`` or ``score``: plain values, as in JSON."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """Something streamed, and where in the request it comes from."""

    branch: str
    """Path of the parallel branch: ``""`` for the request itself, ``"2"``, ``"2.0"``, ..."""
    output: Any
    """A ``Delta`` or ``Stage``; or what a user's worker appended to ``streaming_output_list``."""
    fields: Mapping[str, Any] | None = None
    """``Task.stream_fields`` of the task that streams."""


class StreamedText:
    """The text that a request has streamed so far: the parts in the order in which they started.

    A part is a task of the request itself, or a ``Delta`` of its controller; tasks of parallel
    branches are not in it. Text of a part is held back until all earlier parts are over, so the
    text only grows. Of the ``n`` samples of a task, the first one to stream is its text.
    """

    def __init__(self) -> None:
        self._parts: deque[StreamedPart] = deque()

    def begin(self) -> StreamedPart:
        """A new part. Earlier streams that are not awaited any more are over."""
        for part in self._parts:
            part.is_open = part.is_open and part.is_awaited
        self._parts.append(StreamedPart())
        return self._parts[-1]

    def take(self) -> list[Delta]:
        """The new text since the last call."""
        grown: list[Delta] = []
        while self._parts:
            first = self._parts[0]
            grown += first.deltas
            first.deltas.clear()
            if first.is_open:
                break
            self._parts.popleft()
        return grown


class StreamedPart:
    """The text that one task has streamed and nobody has taken yet.

    Attributes:
        is_open: whether more may come.
        is_awaited: whether its task is being executed; a stream is not, between its steps.
        deltas: in order.
    """

    def __init__(self) -> None:
        self.is_open = self.is_awaited = True
        self.deltas: list[Delta] = []
        self._source: str | None = None

    def add(self, delta: Delta) -> None:
        """Append ``delta``, unless it is of another sample."""
        self._source = delta.source if self._source is None else self._source
        if delta.source == self._source:
            self.deltas.append(delta)


class StreamedItem(NamedTuple):
    """Something streamed: an event, text that was held back before, or both."""

    event: StreamEvent | None
    grown: Sequence[Delta]
    """The new text of the request itself; see ``StreamedText``."""

    @property
    def is_stage(self) -> bool:
        """Whether the event is a step of the method, and no output."""
        return self.event is not None and isinstance(self.event.output, Stage)

    def shown(self, so_far: ScaffoldingOutput) -> Any:
        """What ``cur_output`` is now; takes the new text into ``so_far``."""
        for delta in self.grown:
            so_far.text = (so_far.text or "") + delta.text
            (so_far.token_ids or []).extend(delta.token_ids)
        is_text = self.event is None or isinstance(self.event.output, Delta | Stage)
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
        for event in result.events(stages=True): ...      # StreamEvent(branch, Stage(name)) too

    Attributes:
        id: name of the request; workers know it as the scope.
        task_collections: the collections of the request's controller, by name.
        usage: tokens of everything that the request ran; live.
        generations: the tasks of all generations that it began, in order, once it is over.
        spent_budget: the limit of the budget that was reached, ``"tokens"``, ``"calls"`` or
            ``"seconds"``, once it is over; None: none.
        queue_s: seconds that it waited for its turn; None: it has not begun.
        created_at: when it was submitted, on the clock of ``time.perf_counter``.
        metrics: of speculative decoding, once it is over; with zero steps if no worker reports
            any.
        trace: what ``ScaffoldingLlm(..., trace=True)`` has recorded, a ``Trace``, once it is over;
            else None.
    """

    def __init__(self, request_id: str, abort: Callable[[Exception], None]) -> None:
        self.id = request_id
        self.task_collections: Mapping[str, Any] = {}
        self.usage = Usage()
        self.metrics = SpeculationMetrics()
        self.spent_budget: str | None = None
        self.generations: list[Any] = []
        self.queue_s: float | None = None
        self.created_at = time.perf_counter()
        self.trace: Any = None
        self._abort = abort
        self._done: concurrent.futures.Future[list[ScaffoldingOutput]] = concurrent.futures.Future()
        self._streamed: list[StreamedItem] = []
        self._lock = threading.Lock()
        self._is_over = False
        self._changed: concurrent.futures.Future[None] | None = None
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

        Output of a custom worker that is no text is passed through unchanged.
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

    def events(self, *, stages: bool = False) -> Iterator[StreamEvent]:
        """Everything streamed, from the beginning, as it comes.

        Args:
            stages: the stages of the method too, each in its place between the text.
        """
        for streamed in self._follow():
            if streamed.event is not None and (stages or not streamed.is_stage):
                yield streamed.event

    async def aevents(self, *, stages: bool = False) -> AsyncIterator[StreamEvent]:
        """``events`` for coroutines."""
        async for streamed in self._afollow():
            if streamed.event is not None and (stages or not streamed.is_stage):
                yield streamed.event

    def __iter__(self) -> Iterator[ScaffoldingResult]:
        so_far = ScaffoldingOutput("", [])
        for streamed in self._follow():
            if streamed.is_stage and not streamed.grown:
                continue
            self._current = streamed.shown(so_far)
            yield self
        self._current = None
        yield self

    async def __aiter__(self) -> AsyncIterator[ScaffoldingResult]:
        so_far = ScaffoldingOutput("", [])
        async for streamed in self._afollow():
            if streamed.is_stage and not streamed.grown:
                continue
            self._current = streamed.shown(so_far)
            yield self
        self._current = None
        yield self

    async def abatches(self, gather: float = 0.0) -> AsyncIterator[Sequence[StreamedItem]]:
        """Everything streamed, from the beginning, in batches of all items since the last one.

        For a single reader, such as a server: batches are kept for no other iterator. An item has
        the event, and the new text of the request itself.

        Args:
            gather: minimum seconds between two batches, unless the request ends.
        """
        loop = asyncio.get_running_loop()
        ended = asyncio.ensure_future(_wait(self._done))
        try:
            while True:
                changed = self._next_change()
                with self._lock:
                    batch, self._streamed = self._streamed, []
                if batch:
                    yield batch
                    sent = loop.time()
                if changed is None:
                    break
                await _wait(changed)
                if batch and gather and not self._done.done():
                    await asyncio.wait([ended], timeout=max(0.0, sent + gather - loop.time()))
        finally:
            ended.cancel()
        self._done.result()

    def _follow(self) -> Iterator[StreamedItem]:
        position = 0
        while True:
            changed = self._next_change()
            yield from self._streamed[position : (position := len(self._streamed))]
            if changed is None:
                break
            self._forbid_on_loop()
            changed.result()
        self._done.result()

    async def _afollow(self) -> AsyncIterator[StreamedItem]:
        position = 0
        while True:
            changed = self._next_change()
            for streamed in self._streamed[position : (position := len(self._streamed))]:
                yield streamed
            if changed is None:
                break
            await _wait(changed)
        self._done.result()

    def _next_change(self) -> concurrent.futures.Future[None] | None:
        """A future that is done at the next change; None if the request is over."""
        with self._lock:
            if self._done.done():
                return None
            if self._changed is None:
                self._changed = concurrent.futures.Future()
            return self._changed

    def _notify(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set_result(None)

    # ---- for the driver -----------------------------------------------------------------------

    def stream(self, event: StreamEvent | None, grown: Sequence[Delta]) -> None:
        """Append a streamed event, and the new text, for all iterators."""
        with self._lock:
            self._streamed.append(StreamedItem(event, grown))
            self._notify()

    def on_finish(self, call: Callable[[], Any]) -> None:
        """Run ``call`` once the request is over; at once if it is. What it raises is logged."""

        def run(_: object) -> None:
            try:
                call()
            except BaseException as error:  # of any kind: others wait for the end, too
                _logger.error("a callback of %s failed", self.id, exc_info=error)

        self._done.add_done_callback(run)

    def finish(self, outcome: list[ScaffoldingOutput] | Exception) -> None:
        """Set the outcome of the request; only the first call counts."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        if isinstance(outcome, Exception):  # without the lock: callbacks may read the stream
            self._done.set_exception(outcome)
        else:
            self._done.set_result(outcome)
        with self._lock:
            self._notify()


async def _wait(future: concurrent.futures.Future[Any]) -> None:
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
