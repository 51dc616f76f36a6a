"""``replay``: run a controller again from a trace, without a model.

::

    result = replay(Trace.load("why.json"), controller)

The controller is executed anew; only the workers are replaced: each task gets the results that the
trace has for it, tasks and branches end in the recorded order, what was cancelled is cancelled
again by the controller itself, and a budget ends where it ended. So the result is the same, and a
changed controller fails at its first task that differs. Functions of ``ComputeTask`` run again. A
controller goes on after a wait when exactly the recorded items have ended, as it may read the
results of other branches.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from forethought import errors
from forethought.errors import BudgetExceeded, ForethoughtError, TraceError
from forethought.scaffolding.base_task import ComputeTask, Task, TaskStatus
from forethought.scaffolding.budget import Budget, BudgetAccount
from forethought.scaffolding.controller import Controller
from forethought.scaffolding.parallel import Branch, Item
from forethought.scaffolding.result import ScaffoldingResult
from forethought.scaffolding.scaffolding_llm import ScaffoldingLlm
from forethought.scaffolding.task import GenerationTask
from forethought.scaffolding.trace import Span, Trace
from forethought.scaffolding.trace_values import decoded
from forethought.scaffolding.tracer import Recorder, Tracer, apply_results, thinking_key
from forethought.scaffolding.worker import Routes, Worker

_IDLE_TURNS = 100
"""Turns of the event loop in which whatever has been released reaches its next event."""


def replay(
    trace: Trace, controller: Controller, *, timeout: float = 60.0, **kwargs: Any
) -> ScaffoldingResult:
    """Run ``controller`` on the request of ``trace``.

    Args:
        trace: of a request that was not stopped from outside.
        controller: with the settings of the one that was recorded.
        timeout: seconds until it fails.
        **kwargs: arguments of its ``generate`` in place of the recorded ones; those that a file
            cannot hold, such as functions, have to be passed here.

    Returns:
        A finished result, with a trace of its own. If the recorded request failed, so does this
        one: see ``error``.

    Raises:
        TraceError: the trace is incomplete or damaged, or the controller runs something else than
            the recorded one.
        RequestTimeout: it takes longer, such as a function of a ``ComputeTask``.
    """
    if trace.stopped or trace.seconds is None:
        raise TraceError(
            "this trace cannot be replayed",
            "its request was ended from outside, before its method had ended",
            "Replay the trace of a request that ended by itself",
        )
    trace.check()
    budget = Budget(trace.budget.get("tokens"), trace.budget.get("calls"))
    arguments = {**decoded(trace.kwargs), **kwargs}
    with _ReplayLlm(controller, trace) as llm:
        result = llm.generate_async(
            decoded(trace.prompt), budget=budget, timeout=timeout, **arguments
        )
        try:
            result.result()
        except (TraceError, errors.RequestTimeout):
            raise
        except Exception:
            if trace.error is None:
                raise
    return result


class _ReplayLlm(ScaffoldingLlm):
    """Gives every task to a ``ReplayWorker``."""

    def __init__(self, controller: Controller, trace: Trace) -> None:
        super().__init__(controller, {})
        self._recorded = trace

    def _tracer(self, request: Any, account: BudgetAccount) -> Tracer:
        fail = partial(self._stop, request)
        tracer = Replay(self._recorded, account, request, fail)
        self._routes = _OneRoute(ReplayWorker(tracer))
        return tracer


class _OneRoute(Routes):
    """One worker for every tag."""

    def __init__(self, worker: ReplayWorker) -> None:
        super().__init__({"": worker})
        self._worker = worker

    def find(self, tag: Any) -> Worker:
        return self._worker.of(tag)


@dataclass(slots=True, eq=False)
class _Wait:
    """A controller that waits until it may go on."""

    branch: str
    num_ended: int
    """Spans that had ended when it went on."""
    waiting: asyncio.Future[None] | None = None
    """None: it has not come so far."""
    is_over: bool = False


class Replay(Recorder):
    """Lets tasks and branches end in the order of a recorded trace; records the new one.

    A cancelled span never ends alone. A span whose branch is over is not waited for.

    Args:
        recorded: the trace that is repeated.
        account: of the new request.
        request: the new request.
        fail: ends the new request with an error.
    """

    def __init__(
        self,
        recorded: Trace,
        account: BudgetAccount,
        request: Any,
        fail: Callable[[Exception], None],
    ) -> None:
        trace = Trace(request.result.id, recorded.method, recorded.started, budget=recorded.budget)
        super().__init__(trace, account, request.prompt, request.kwargs)
        self._fail, self._used = fail, recorded.usage
        self._by_branch: dict[tuple[str, str], list[Span]] = defaultdict(list)
        for span in recorded.spans:
            self._by_branch[span.branch, span.kind].append(span)
        self._waits = deque(_Wait(*values) for values in recorded.resumed)
        in_order = _by_end(recorded.spans, {wait.num_ended for wait in self._waits})
        self._pending = [span for span in in_order if span.outcome != "cancelled"]
        self._waits_of: dict[str, deque[_Wait]] = defaultdict(deque)
        for wait in self._waits:
            self._waits_of[wait.branch].append(wait)
        self._matches: dict[int, Span] = {}
        self._spans: dict[int, tuple[Task, Span]] = {}
        self._over: set[int] = set()
        self._ended_branches: set[str] = set()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._computing: set[int] = set()
        self._num_events = 0
        self.profiles = decoded(recorded.thinking)
        """How the models of workers think, by ``thinking_key``."""

    def recorded(self, task: Task) -> tuple[Span, Span]:
        """The span of the present execution of ``task``, and the recorded one."""
        span = self._spans[id(task)][1]
        return span, self._match(span)

    def begin(self, branch: str, item: Item) -> Span:
        """Find the recorded span."""
        span = super().begin(branch, item)
        self._happened()
        spans = self._by_branch[branch, span.kind]
        match = spans.pop(0) if spans else None
        if isinstance(item, Task):
            self._spans[id(item)] = item, span
        if isinstance(item, ComputeTask):
            self._computing.add(span.number)
        if match is None or _asked(match) != _asked(span):
            self._fail(_divergence(span, match))
        else:
            self._matches[span.number] = match
        return span

    async def turn(self, span: Span) -> None:
        """Wait until all that ended before ``span`` in the recording has ended."""
        match = self._match(span)
        self._computing.discard(span.number)
        self._happened()
        self._advance()
        if self._pending and self._pending[0] is match and not self._has_to_wait(match):
            await asyncio.sleep(0)  # after the end of the budget, if that came first
            return
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[match.number] = waiting
        await waiting

    async def resume(self, branch: str) -> None:
        """Wait until what had ended by then in the recording has ended."""
        await super().resume(branch)
        self._happened()
        waits = self._waits_of[branch]
        if not waits:
            return  # an old trace, or a controller that is about to be found out
        wait = waits.popleft()
        self._advance()
        if self._may_go_on(wait):
            wait.is_over = True
        else:
            wait.waiting = asyncio.get_running_loop().create_future()
            await wait.waiting
        asyncio.get_running_loop().call_soon(self._advance)  # after what it does now

    def ended(self, span: Span, item: Item, outcome: str) -> None:
        """Let the next one end."""
        super().ended(span, item, outcome)
        self._computing.discard(span.number)
        self._happened()
        if isinstance(item, Branch):
            self._ended_branches.add(span.branch)
        if span.number in self._matches:
            self._over.add(self._matches[span.number].number)
        self._advance()

    def exhausted(self, then: Callable[[], None]) -> None:
        """The budget has run out."""
        super().exhausted(then)
        self._happened()
        self._advance()

    def finish(self, outcome: Any, *, stopped: bool = False) -> None:
        """The request is over. It has used what was recorded: generations that their tasks have
        dropped decode on after their last span.
        """
        for name, count in self._used.items():
            setattr(self._account.usage, name, count)
        super().finish(outcome, stopped=stopped)
        self._num_events += 1

    def failed(self, error: BaseException) -> None:
        """Ends the request: without the recorded order nothing would be reproduced."""
        why = f"{error.what}: {error.why}" if isinstance(error, TraceError) else repr(error)
        failure = TraceError("this trace cannot be replayed", why, "Record the request anew")
        failure.__cause__ = error
        self._fail(failure)

    def _happened(self) -> None:
        """Called when something begins, waits or ends; detects a replay that cannot go on."""
        self._num_events += 1
        asyncio.get_running_loop().call_soon(self._expect_event, self._num_events, _IDLE_TURNS)

    def _expect_event(self, num_events: int, turns: int) -> None:
        """Look for a new event in the next turns of the event loop, which has no other work."""
        if num_events != self._num_events or self._computing:
            return
        if turns:
            asyncio.get_running_loop().call_soon(self._expect_event, num_events, turns - 1)
            return
        pending = f"span {self._pending[0].number}" if self._pending else "no span"
        wait = self._first_wait()
        branch = "no controller" if wait is None else f"the controller of branch {wait.branch!r}"
        self._fail(
            TraceError(
                "this trace cannot be replayed",
                f"{pending} is to end next and {branch} to go on, and what runs is something else",
                "Its record of what ended when is damaged: record the request anew",
            )
        )

    def exhaust(self, recorded: Span) -> None:
        """The budget ends here, with the error of a recorded span."""
        texts = recorded.error or {"what": "the budget is spent", "why": "", "fix": ""}
        limit = "seconds" if recorded.name == "seconds" else None
        self._account.expired = self._account.expired or limit is not None
        self._account.exhaust(BudgetExceeded(texts["what"], texts["why"], texts["fix"]), limit)

    def _match(self, span: Span) -> Span:
        if span.number not in self._matches:
            raise _divergence(span, None)
        return self._matches[span.number]

    def _first_wait(self) -> _Wait | None:
        """The first controller that has not gone on yet."""
        while self._waits and (self._waits[0].is_over or self._has_ended(self._waits[0].branch)):
            self._waits.popleft()
        return self._waits[0] if self._waits else None

    def _may_go_on(self, wait: _Wait) -> bool:
        """Whether all has ended, and all have gone on, that did so before this controller."""
        first = self._pending[0].order if self._pending else None
        return wait is self._first_wait() and (first is None or first >= wait.num_ended)

    def _has_to_wait(self, span: Span) -> bool:
        """Whether a controller goes on before ``span`` ends."""
        wait = self._first_wait()
        return wait is not None and wait.num_ended <= (span.order or 0)

    def _advance(self) -> None:
        self._drop_ended()
        wait = self._first_wait()
        if wait is not None and wait.waiting is not None and self._may_go_on(wait):
            wait.is_over = True
            if not wait.waiting.done():
                wait.waiting.set_result(None)
        if self._pending and not self._has_to_wait(self._pending[0]):
            waiting = self._waiting.pop(self._pending[0].number, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    def _drop_ended(self) -> None:
        """Leave out what has ended, up to the first that has not; the budget ends in its place."""
        while self._pending:
            first = self._pending[0]
            if first.kind == "budget":
                if len(self.trace.spans) < first.number or self._has_to_wait(first):
                    break  # not all had begun that had begun then
                self._pending.pop(0)  # soon: what has begun is to reach its worker first
                asyncio.get_running_loop().call_soon(self.exhaust, first)
            elif first.number in self._over or self._has_ended(first.branch):
                self._pending.pop(0)
            else:
                break

    def _has_ended(self, branch: str) -> bool:
        """Whether a branch, or one that contains it, has ended."""
        steps = branch.split(".")
        paths = {".".join(steps[:count]) for count in range(1, len(steps) + 1)}
        return bool(paths & self._ended_branches)


def _by_end(spans: Sequence[Span], resumed: Collection[int]) -> list[Span]:
    """The spans that have ended, in the order of their ends.

    The end of the budget is put after tasks that were done by then, though their ends were
    recorded later: it stops those that are executed.

    Args:
        spans: of the recording.
        resumed: how many had ended whenever a controller went on.
    """
    ended = [span for span in spans if span.order is not None]
    in_order = sorted(ended, key=lambda span: span.order or 0)
    for at in range(len(in_order) - 1):
        first, second = in_order[at : at + 2]
        was_done = second.outcome == "done" and second.kind == "task"
        has_begun = second.number < first.number and second.order not in resumed
        if first.kind == "budget" and was_done and has_begun:
            in_order[at : at + 2] = [second, first]
    return in_order


class ReplayWorker(Worker):
    """Answers each task with the trace's results, when it is its turn.

    Args:
        tracer: of the request.
    """

    def __init__(self, tracer: Replay) -> None:
        self._tracer = tracer
        self._tag: Any = None

    def of(self, tag: Any) -> ReplayWorker:
        """This worker for a tag."""
        worker = ReplayWorker(self._tracer)
        worker._tag = tag
        return worker

    def thinking(self, task: Any) -> Any:
        """As recorded; None: not known."""
        return self._tracer.profiles.get(thinking_key(task, self._tag))

    async def run_task(self, task: Any) -> TaskStatus:
        """Wait for the turn of ``task``; leave the recorded results, or fail as recorded."""
        span, match = self._tracer.recorded(task)
        try:
            await self._tracer.turn(span)
        except asyncio.CancelledError:
            if match.outcome == "budget":
                await self._tracer.turn(span)  # a controller may go on before it has been stopped
            raise
        finally:
            for name, count in match.usage.items():
                setattr(task.usage, name, count)
            self._answer(match, task)  # also of what is stopped as the budget is spent
        if isinstance(task, GenerationTask) and task.request_handle is None:
            task.request_handle = _Sequence()
        if match.outcome == "budget":
            self._tracer.exhaust(match)
        if match.error is not None:
            raise _rebuilt(match.error)
        return TaskStatus.SUCCESS

    def _answer(self, match: Span, task: Task) -> None:
        """Put the recorded results on ``task``; raises ``TraceError`` if they are missing or
        damaged.
        """
        try:
            apply_results(match, task)
        except TraceError as error:
            self._tracer.failed(error)
            raise


class _Sequence:
    """Replaces the worker's handle of a sequence."""


def _asked(span: Span) -> tuple[Any, ...]:
    """The fields that have to be equal in both; computations are compared by their function."""
    request = dict(span.request)
    if "digest" in request:  # of the same text; whether it is there depends on the worker's handles
        request.pop("prompt", None)
    return span.kind, span.name, span.tag, request


def _divergence(span: Span, match: Span | None) -> TraceError:
    where = f"in branch {span.branch}" if span.branch else "in the request itself"
    replayed = f"{span.name} {span.request or ''}".strip()
    recorded = "nothing more" if match is None else f"{match.name} {match.request or ''}".strip()
    return TraceError(
        "the controller does something else than the recorded one",
        f"{where} it runs {replayed[:300]}, and the trace has {recorded[:300]}",
        "Give a controller with the settings of the recorded one",
    )


def _rebuilt(error: dict[str, str]) -> Exception:
    """An error with the type's name and the texts of the recorded one."""
    kind = getattr(errors, error["type"], None)
    if isinstance(kind, type) and issubclass(kind, ForethoughtError) and kind is not BudgetExceeded:
        try:
            return kind(error["what"], error["why"], error["fix"])
        except TypeError:
            pass
    unknown: type[Exception] = type(error["type"], (Exception,), {})
    return unknown(error["what"])
