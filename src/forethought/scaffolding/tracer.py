"""The tracer of a request: the driver calls it with what it runs; it records a trace."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from forethought.errors import ForethoughtError, TraceError
from forethought.outputs import Usage
from forethought.scaffolding import sampling
from forethought.scaffolding.base_task import (
    ComputeTask,
    MCPCallTask,
    RewardTask,
    Task,
)
from forethought.scaffolding.budget import BudgetAccount
from forethought.scaffolding.parallel import Branch, Item
from forethought.scaffolding.result import Stage
from forethought.scaffolding.session_task import RestoreSessionTask, SaveSessionTask
from forethought.scaffolding.task import (
    ChatTask,
    GenerationTask,
    StreamGenerationTask,
)
from forethought.scaffolding.thinking import ThinkingProfile
from forethought.scaffolding.trace import Span, Trace
from forethought.scaffolding.trace_values import decoded, encoded, expect_type

_logger = logging.getLogger(__name__)
_NOT_RESULTS = frozenset(
    {
        "attention_group",
        "draft_spans",
        "error",
        "fork_point",
        "request_handle",
        "result",
        "status",
        "stream_fields",
        "streams_beside",
        "streaming_output_flag",
        "streaming_output_list",
        "usage",
        "worker_tag",
    }
)
"""Attributes of tasks that the driver sets, or that belong to one process alone."""


class Tracer:
    """Hooks that the driver calls as spans begin and end, and for stages.

    Attributes:
        trace: where they are recorded.
    """

    trace: Trace

    def begin(self, branch: str, item: Item) -> Span:
        """Called when a task in ``branch``, or the branch of this path itself, is about to run."""
        raise NotImplementedError

    async def turn(self, span: Span) -> None:
        """Return once ``span`` may end. Only a branch or a computation waits for it."""

    async def resume(self, branch: str) -> None:
        """Return once the controller of ``branch``, whose wait is over, may go on."""

    def ended(self, span: Span, item: Item, outcome: str) -> None:
        """Called when the job of ``item`` is over, whatever its outcome."""

    def stage(self, branch: str, stage: Stage) -> None:
        """Called for a stage of ``branch``."""

    def profiled(self, task: GenerationTask, tag: Any, profile: ThinkingProfile) -> None:
        """Called when a controller has asked how the model thinks after the prompt of ``task``."""

    def exhausted(self, then: Callable[[], None]) -> None:
        """Called when the budget has run out; ``then`` stops what is still running."""

    def finish(self, outcome: Sequence[Any] | BaseException, *, stopped: bool = False) -> None:
        """Called when the request is over, with its outputs or its error; ``stopped`` from outside
        or not.
        """

    def failed(self, error: BaseException) -> None:
        """Called when it has raised ``error`` in one of the hooks; none of them is called again."""
        _logger.error("the trace of %s is incomplete", self.trace.request_id, exc_info=error)


class GuardedTracer:
    """Calls a tracer until it raises; then the request goes on without it."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer: Tracer | None = tracer

    def begin(self, branch: str, item: Item) -> Span | None:
        """As of the tracer; None: it has failed."""
        with self._calling() as tracer:
            return None if tracer is None else tracer.begin(branch, item)
        return None

    async def turn(self, span: Span | None) -> None:
        """As of the tracer; at once where it did not see the span begin."""
        with self._calling() as tracer:
            if tracer is not None and span is not None:
                await tracer.turn(span)

    async def resume(self, branch: str) -> None:
        """As of the tracer."""
        with self._calling() as tracer:
            if tracer is not None:
                await tracer.resume(branch)

    def ended(self, span: Span | None, item: Item, outcome: str) -> None:
        """As of the tracer."""
        with self._calling() as tracer:
            if tracer is not None and span is not None:
                tracer.ended(span, item, outcome)

    def stage(self, branch: str, stage: Stage) -> None:
        """As of the tracer."""
        with self._calling() as tracer:
            if tracer is not None:
                tracer.stage(branch, stage)

    def profiled(self, task: GenerationTask, tag: Any, profile: ThinkingProfile) -> None:
        """As of the tracer."""
        with self._calling() as tracer:
            if tracer is not None:
                tracer.profiled(task, tag, profile)

    def exhausted(self, then: Callable[[], None]) -> None:
        """As of the tracer; ``then`` is called whatever it does."""
        with self._calling() as tracer:
            if tracer is not None:
                tracer.exhausted(then)
        then()  # what it has stopped already is left alone

    def finish(self, outcome: Sequence[Any] | BaseException, *, stopped: bool = False) -> None:
        """As of the tracer."""
        with self._calling() as tracer:
            if tracer is not None:
                tracer.finish(outcome, stopped=stopped)

    @contextmanager
    def _calling(self) -> Iterator[Tracer | None]:
        tracer = self._tracer
        try:
            yield tracer
        except BaseException as error:
            if tracer is None or _ends_the_task(error):
                raise
            self._tracer = None
            tracer.failed(error)


def _ends_the_task(error: BaseException) -> bool:
    try:
        current = asyncio.current_task()
    except RuntimeError:  # the event loop is closed
        return True
    return isinstance(error, asyncio.CancelledError) and bool(current and current.cancelling())


class Recorder(Tracer):
    """Records a request.

    Args:
        trace: filled.
        account: of the request.
        prompt: of the request.
        kwargs: other arguments of ``generate`` of the controller.
    """

    def __init__(
        self, trace: Trace, account: BudgetAccount, prompt: Any, kwargs: Mapping[str, Any]
    ) -> None:
        self.trace, self._account = trace, account
        trace.prompt = encoded(prompt, lenient=True)
        trace.kwargs = encoded(dict(kwargs), lenient=True)
        self._began, self._num_ended = time.perf_counter(), 0
        self._before: dict[int, dict[str, Any]] = {}
        self._handles: dict[int, tuple[Any, int]] = {}  # holding the first keeps its id its own
        self._streams: dict[int, tuple[Task, int]] = {}

    def begin(self, branch: str, item: Item) -> Span:
        """Record what is asked for."""
        kind = "branch" if isinstance(item, Branch) else "task"
        name = type(item.controller if isinstance(item, Branch) else item).__name__
        span = self._new(kind, name, branch)
        if isinstance(item, Task):
            self._describe(span, item)
            self._before[span.number] = _snapshot(item)
        return span

    async def resume(self, branch: str) -> None:
        """Record what had ended by then."""
        self.trace.resumed.append([branch, self._num_ended])

    def ended(self, span: Span, item: Item, outcome: str) -> None:
        """Record the results."""
        self._end(span, outcome)
        if item.error is not None and outcome != "done":
            span.error = described(item.error)
        if not isinstance(item, Task):
            return
        span.usage = _counts(item.usage)
        before = self._before.pop(span.number)
        if not isinstance(item, ComputeTask):
            _record_results(span, before, vars(item))
        handle = getattr(item, "request_handle", None)
        if handle is not None:
            self._handles[id(handle)] = handle, span.number

    def stage(self, branch: str, stage: Stage) -> None:
        """Record the stage."""
        fields = encoded(dict(stage.fields), lenient=True)
        values = {"branch": branch, "name": stage.name, "why": stage.why, "fields": fields}
        self.trace.stages.append({"at": self._now(), **values})

    def profiled(self, task: GenerationTask, tag: Any, profile: ThinkingProfile) -> None:
        """Record the profile."""
        self.trace.thinking[thinking_key(task, tag)] = encoded(profile)

    def exhausted(self, then: Callable[[], None]) -> None:
        """Record when the budget ran out."""
        what = "seconds" if self._account.expired else "tokens"
        span = self._new("budget", what, "")
        self._end(span, "budget")
        if self._account.exhausted is not None:
            span.error = described(self._account.exhausted)
        then()

    def finish(self, outcome: Sequence[Any] | BaseException, *, stopped: bool = False) -> None:
        """Record how the request ended."""
        self.trace.seconds, self.trace.usage = self._now(), _counts(self._account.usage)
        self.trace.stopped = stopped or isinstance(outcome, GeneratorExit)
        if isinstance(outcome, BaseException):
            self.trace.error = described(outcome)
        else:
            self.trace.outputs = [encoded(output, lenient=True) for output in outcome]

    def _now(self) -> float:
        return round(time.perf_counter() - self._began, 6)

    def _new(self, kind: str, name: str, branch: str) -> Span:
        span = Span(len(self.trace.spans), kind, name, branch, self._now())
        self.trace.spans.append(span)
        return span

    def _end(self, span: Span, outcome: str) -> None:
        span.end, span.outcome, span.order = self._now(), outcome, self._num_ended
        self._num_ended += 1

    def _describe(self, span: Span, task: Task) -> None:
        """Record what ``task`` asks for."""
        tag = getattr(task.worker_tag, "value", task.worker_tag)
        span.tag = None if tag is None else str(tag)
        if isinstance(task, StreamGenerationTask) and task.under_way:
            span.step_of = self._streams.get(id(task), (task, None))[1]
            span.request = {"step": task.streaming_step, "cancel": task.cancel_flag}
            return
        self._streams[id(task)] = task, span.number
        if isinstance(task, GenerationTask):
            span.request = self._request_fields(span, task)
        elif isinstance(task, RewardTask):
            span.request = {
                "prompt": _prompt_of(task),
                "answer": task.output_str,
            }
        elif isinstance(task, MCPCallTask):
            span.request = {"tool": task.tool_name, "args": encoded(task.args, lenient=True)}
        elif isinstance(task, SaveSessionTask | RestoreSessionTask):
            span.request = {"snapshot": task.name}
        elif isinstance(task, ComputeTask):
            span.request = {"function": getattr(task.function, "__qualname__", "")}

    def _request_fields(self, span: Span, task: GenerationTask) -> dict[str, Any]:
        values = {
            name: getattr(task, name) for name in sampling.FIELDS if sampling.is_set(task, name)
        }
        fields = {"sampling": encoded(values, lenient=True)}
        point = task.fork_point
        if isinstance(task, ChatTask):
            return {**fields, "messages": encoded(task.messages_to_dict_content(), lenient=True)}
        if point is not None and point.input_str == task.input_str:
            handle, number = self._handles.get(id(point.handle), (None, None))
            span.fork_of = number if handle is point.handle else None
            digest = hashlib.blake2b((task.input_str or "").encode(), digest_size=8).hexdigest()
            fields |= {"suffix": point.suffix, "kept": point.num_kept, "digest": digest}
        if span.fork_of is None:
            fields["prompt"] = _prompt_of(task)
        return fields


def _prompt_of(task: GenerationTask | RewardTask) -> Any:
    if task.input_tokens is not None:
        return list(map(int, task.input_tokens))  # of any kind of sequence
    return encoded(task.input_str, lenient=True)


def thinking_key(task: GenerationTask, tag: Any) -> str:
    """The key of a profile in a trace: the worker's tag, and a hash of the prompt."""
    prompt = json.dumps([task.input_str, task.input_tokens]).encode()
    digest = hashlib.blake2b(prompt, digest_size=8).hexdigest()
    return f"{getattr(tag, 'value', tag)}:{digest}"


def _counts(usage: Usage) -> dict[str, int]:
    return asdict(usage)


def _snapshot(task: Task) -> dict[str, Any]:
    """The attributes of ``task``, containers copied, each with the object itself."""
    return {
        name: (value, copy.copy(value) if isinstance(value, list | dict | set) else value)
        for name, value in vars(task).items()
        if name not in _NOT_RESULTS
    }


def _record_results(span: Span, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for name, value in after.items():
        if name in _NOT_RESULTS:
            continue
        same, old = before.get(name, (None, None))
        try:
            if name in before and (same is value or old == value) and bool(old == value):
                continue
            span.results[name] = _change(same, old, value)
        except (TypeError, ValueError, RuntimeError):
            span.omitted.append(name)


def _change(same: Any, old: Any, value: Any) -> Any:
    """``value`` as encoded, or only what it has grown by."""
    extends = type(old) is type(value) and isinstance(value, str | list) and bool(old)
    if extends and value[: len(old)] == old:
        grown = {"kept": len(old), "items": encoded(value[len(old) :])}
        return {"$": "grown", **grown, "in_place": same is value}
    return encoded(value)


def apply_results(span: Span, task: Task) -> None:
    """Apply the results in ``span`` to ``task``; raises ``TraceError`` if some are missing."""
    if span.omitted:
        raise TraceError(
            f"the trace cannot answer span {span.number}",
            f"it lacks {', '.join(span.omitted)} of its {span.name}",
            "Replay methods whose tasks have plain results",
        )
    for name, value in span.results.items():
        grown = isinstance(value, dict) and value.get("$") == "grown"
        new = decoded(value["items"] if grown else value)
        old = getattr(task, name, None) if grown else None
        if grown and (old is None or type(old) is not type(new) or len(old) < value["kept"]):
            raise _damaged(span, f"{name} has grown from {value['kept']} items, of {old!r:.60}")
        whole = old[: value["kept"]] + new if grown and old is not None else new
        try:
            expect_type(type(task), name, whole)
        except ValueError as error:
            raise _damaged(span, str(error)) from error
        if grown and value["in_place"] and isinstance(old, list):
            old[value["kept"] :] = new
        else:
            setattr(task, name, whole)


def _damaged(span: Span, why: str) -> TraceError:
    return TraceError(
        f"the trace cannot answer span {span.number}",
        f"of its {span.name}, {why}",
        "Its record of results is damaged: record the request anew",
    )


def described(error: BaseException) -> dict[str, str]:
    """An error as plain values; of a failed task, what its worker raised."""
    cause = error.__cause__ or error
    if isinstance(cause, ForethoughtError):
        texts = {"what": cause.what, "why": cause.why, "fix": cause.fix}
    else:
        texts = {"what": str(cause), "why": "", "fix": ""}
    return {"type": type(cause).__name__, **texts}
