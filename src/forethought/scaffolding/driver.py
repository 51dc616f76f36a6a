"""Drives the generators of one request: runs what they yield, and resumes them with the results.

A ``Frame`` drives one generator: that of the request, or that of a parallel branch. It owns
everything that it has started, and when it ends, nothing of it is still running.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import iscoroutinefunction
from typing import Any

from forethought.errors import (
    BudgetExceeded,
    UsageError,
    WorkerTagError,
)
from forethought.outputs import Usage
from forethought.scaffolding.base_task import (
    ComputeTask,
    RewardTask,
    StreamedOutputs,
    Task,
    TaskStatus,
)
from forethought.scaffolding.branch_limit import BranchLimit, StartPace, cancel_all
from forethought.scaffolding.budget import BudgetAccount
from forethought.scaffolding.execution_scope import ExecutionScope, enter
from forethought.scaffolding.failure import (
    controller_quit,
    failure_of,
    is_cancelled,
    is_of_group,
    unsuccessful,
)
from forethought.scaffolding.parallel import (
    AsCompleted,
    Branch,
    FirstDone,
    Item,
    Job,
    ParallelProcess,
    Process,
)
from forethought.scaffolding.result import (
    Delta,
    Stage,
    StreamedPart,
    StreamedText,
    StreamEvent,
)
from forethought.scaffolding.settings import ON_FAILURE, validated
from forethought.scaffolding.task import GenerationTask, StreamGenerationTask
from forethought.scaffolding.thinking import ThinkingProfile
from forethought.scaffolding.trace import Span
from forethought.scaffolding.tracer import GuardedTracer
from forethought.scaffolding.worker import Routes

_logger = logging.getLogger(__name__)

_IMMEDIATE = 256
"""Yields of a generator that wait for nothing, after which others run."""


@dataclass
class Run:
    """What all frames of one request share."""

    routes: Routes
    account: BudgetAccount
    stream: Callable[[StreamEvent | None, Sequence[Delta]], None]
    """Passes a streamed event and the new text to the result."""
    compute: Callable[..., Any]
    """``compute(function)`` -> awaitable of its return value, run in a thread."""
    executions: set[asyncio.Task[None]] = field(default_factory=set)
    """Running executions of tasks by workers, in all frames."""
    computations: set[asyncio.Task[None]] = field(default_factory=set)
    """Running ``ComputeTask``s, in all frames."""
    text: StreamedText = field(default_factory=StreamedText)
    """What the request itself streams."""
    tracer: GuardedTracer | None = None
    """Records the tasks and branches, or repeats the order of a recording."""
    branches: BranchLimit = field(default_factory=BranchLimit)
    """Of all frames."""
    pace: StartPace = field(default_factory=StartPace)
    """Of all requests on the event loop."""

    def thinking(self, task: GenerationTask, tag: Any) -> ThinkingProfile | None:
        """How the model of the worker of a tag thinks; None: unknown."""
        try:
            profile: ThinkingProfile | None = self.routes.find(tag).thinking(task)
        except WorkerTagError:  # it is raised where the task is yielded
            return None
        if self.tracer is not None and profile is not None:
            self.tracer.profiled(task, tag, profile)
        return profile

    def publish(self, event: StreamEvent | None = None) -> None:
        """Pass ``event`` and the new text to the result."""
        grown = self.text.take()
        if event is not None or grown:
            self.stream(event, grown)

    def stop_executions(self) -> None:
        """Cancel what workers execute, as the budget is spent; out of time, computations too."""
        for job in self.executions | (self.computations if self.account.expired else set()):
            if not job.cancelling():
                job.cancel()


class Frame:
    """One generator being driven."""

    def __init__(self, run: Run, scope: ExecutionScope) -> None:
        self.run, self.scope = run, scope
        self._jobs: set[asyncio.Task[None]] = set()
        self._races: list[AsCompleted] = []
        self._branch_numbers = itertools.count()
        self._item_finished = asyncio.Event()
        self._num_immediate = 0
        """Yields at which nothing was waited for."""
        self._is_out_of_budget = False
        """Whether the generator has been told so."""
        self._parts: dict[int, tuple[Task, StreamedPart]] = {}
        """By id of the running tasks whose text is the request's; the values keep the ids valid."""

    async def drive(self, process: Process) -> Any:
        """Run ``process`` to its end and return what it returns.

        A failure is thrown into it at its ``yield``; one that it does not catch is raised here.
        """
        enter(self.scope)
        resume = partial(process.send, None)
        try:
            while True:
                try:
                    request = resume()
                except StopIteration as stop:
                    return stop.value
                except Exception:
                    raise
                except BaseException as error:
                    raise controller_quit(error) from error
                try:
                    value = await self._perform(request)
                except Exception as error:
                    self._is_out_of_budget |= isinstance(error, BudgetExceeded)
                    resume = partial(process.throw, error)
                else:
                    resume = partial(process.send, value)
                if self.run.tracer is not None and not isinstance(request, Delta | Stage):
                    await self.run.tracer.resume(self.scope.path)
        finally:
            try:
                _close(process)
            finally:
                await self._settle()

    async def _perform(self, request: Any) -> Any:
        """Do what a controller yielded; returns what its ``yield`` evaluates to."""
        await self._cancel_stopped()
        self._end_cancelled_streams()
        if isinstance(request, Sequence) and all(isinstance(item, Task) for item in request):
            _check_distinct(request)
            return await (self._all(request) if request else self._none())
        if isinstance(request, ParallelProcess):
            return await self._all(request.branches)
        if isinstance(request, AsCompleted):
            return await self._next(request)
        if isinstance(request, FirstDone):
            try:
                with request.race:
                    return await self._next(request.race)
            finally:
                await cancel_all(request.race.take_stopped())
        if isinstance(request, Delta):
            self._stream(None, request)
            return await self._let_others_run()
        if isinstance(request, Stage):
            self._tell(request)
            return await self._let_others_run()
        if isinstance(request, Task | Branch):
            raise UsageError(
                f"a controller yielded a bare {type(request).__name__}",
                "what is yielded is a list, of one task too",
                "Write 'yield [task]'" if isinstance(request, Task) else "Use a ParallelProcess",
            )
        raise UsageError(
            f"a controller yielded {type(request).__name__}",
            f"{request!r} is nothing that can be run",
            "Yield a list of tasks, a ParallelProcess, AsCompleted, FirstDone, a Delta or a Stage",
        )

    # ---- waiting ------------------------------------------------------------------------------

    async def _none(self) -> None:
        """Run no task; fails without a budget, if the generator has not been told so."""
        await self._let_others_run()
        exhausted = self.run.account.exhausted
        if exhausted is not None and not self._is_out_of_budget:
            raise exhausted

    async def _let_others_run(self) -> None:
        """Called where nothing is waited for: a generator that never waits can be cancelled, and
        its budget ends. Seldom, as the order in which others go on is that of a replay.
        """
        self._num_immediate += 1
        if self._num_immediate % _IMMEDIATE == 0:
            await asyncio.sleep(0)

    async def _all(self, items: Iterable[Item]) -> None:
        """Run all and wait for all; the first failure cancels the others.

        Where the failure is that the budget of calls is spent, items that have begun run to their
        end.
        """
        jobs: dict[asyncio.Task[None], Item] = {}
        pending: set[Job] = set()
        try:
            goes_on = await self._start_all(items, jobs)
            pending |= jobs.keys()
            while pending and goes_on:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
                goes_on = all(self._goes_on_beside(job) for job in done)
            pending = {job for job in pending if not job.done()}
        finally:
            await _end([job for job in jobs if not job.done()])
        for job, item in jobs.items():
            if job not in pending:
                self._raise_error(item, job)

    async def _start_all(self, items: Iterable[Item], jobs: dict[Any, Item]) -> bool:
        """Start items until the limit of branches is reached; False if one stops the rest."""
        stopping: list[Job] = []

        def on_done(job: Job) -> None:
            if not self._goes_on_beside(job):
                stopping.append(job)

        for item in items:
            if isinstance(item, Branch):
                await self.run.branches.wait(self)
            if stopping:
                break
            job = self._start(item)
            jobs[job] = item
            job.add_done_callback(on_done)
            await self.run.pace.step()
        return not stopping

    def _goes_on_beside(self, job: Job) -> bool:
        failure = asyncio.CancelledError() if job.cancelled() else job.exception()
        refused = isinstance(failure, BudgetExceeded) and self.run.account.exhausted is None
        return failure is None or refused

    async def _next(self, race: AsCompleted) -> Item:
        """Start what is new, wait for the first to finish, and return it."""
        if not any(other is race for other in self._races):
            self._races.append(race)
        for item in race.new:
            is_full = isinstance(item, Branch) and not self.run.branches.admits(self)
            if is_full or race.has_finished:
                break  # it begins when the controller waits again
            job = self._start(item)
            race.started(item, job)
            job.add_done_callback(partial(self._finished, race, item))
            await self.run.pace.step()
        while True:
            done = race.take()
            if done is not None:
                self._raise_error(*done)
                return done[0]
            if not race:
                raise UsageError(
                    "nothing is in flight",
                    "an AsCompleted was yielded that is empty",
                    "Loop with 'while running:', or add something first",
                )
            self._item_finished.clear()
            await self._item_finished.wait()

    def _raise_error(self, item: Item, job: Job) -> None:
        """Raise what ``item`` failed with.

        This frame never waits for a job that it has cancelled, so a cancelled job was cancelled by
        its own code: a failure like any other.
        """
        try:
            job.result()
        except asyncio.CancelledError as error:
            item.error = failure_of(item, error)
            if isinstance(item, Task):
                item.status = TaskStatus.WORKER_EXECEPTION
            if item.on_failure == "raise":
                raise item.error from error

    async def _cancel_stopped(self) -> None:
        for race in self._races:
            await cancel_all(race.take_stopped())

    def _end_cancelled_streams(self) -> None:
        """End the generations of cancelled streams, which cancelling a step does only while it is
        awaited.
        """
        cancelled = [item for race in self._races for item in race.take_cancelled()]
        self._races = [race for race in self._races if race]
        for item in cancelled:
            if isinstance(item, StreamGenerationTask) and item.under_way:
                item.cancel_flag = True
                self._start(item)

    def _finished(self, race: AsCompleted, item: Item, _: object) -> None:
        race.finished(item)
        self._item_finished.set()

    async def _settle(self) -> None:
        """End everything still in flight, then call ``on_scope_end`` of all workers, also if this
        is cancelled meanwhile: a request may be aborted while it ends.
        """
        cancellation: BaseException | None = None
        try:
            await _end(list(self._jobs))
        except asyncio.CancelledError as error:
            cancellation = error
            await _end(list(self._jobs))
        for worker in self.run.routes.workers:
            try:
                await worker.on_scope_end(self.scope.scope_id)
            except BaseException as error:
                if is_cancelled(error):
                    cancellation = error
                else:
                    _logger.exception("%s failed to end %s", worker, self.scope.scope_id)
        if cancellation is not None:
            raise cancellation

    # ---- jobs ---------------------------------------------------------------------------------

    def _start(self, item: Item) -> asyncio.Task[None]:
        if isinstance(item, Task) and item.streaming_output_flag and not item.streams_beside:
            self._begin_part(item)
        scope = self.scope
        if isinstance(item, Branch):
            scope = self.scope.child(next(self._branch_numbers))
            item.path = scope.path
            self.run.branches.begun(self)
            self._tell(Stage("spawned", type(item.controller).__name__, scope.path))
        span = None if self.run.tracer is None else self.run.tracer.begin(scope.path, item)
        work = (
            self._branch(item, scope, span)
            if isinstance(item, Branch)
            else self._execute(item, span)
        )
        job = asyncio.get_running_loop().create_task(work)
        self._jobs.add(job)
        job.add_done_callback(partial(self._on_ended, item, span))
        return job

    def _on_ended(self, item: Item, span: Span | None, job: asyncio.Task[None]) -> None:
        try:
            why = self._why_ended(item, job)
            if isinstance(item, GenerationTask) and item.attention_group is not None:
                item.attention_group.ended(item, None if job.cancelled() else job.exception())
            if isinstance(item, Branch):
                self._tell(Stage("ended", why, item.path))
            elif isinstance(item, RewardTask) and why == "done":
                fields = {"score": item.score, "steps": list(item.step_scores)}
                self._tell(Stage("scored", fields=fields))
            if self.run.tracer is not None:
                self.run.tracer.ended(span, item, why)
        finally:
            if isinstance(item, Branch):
                self.run.branches.ended(self)
            self._forget(job)

    def _why_ended(self, item: Item, job: asyncio.Task[None]) -> str:
        """``done``, ``failed``, ``cancelled`` or ``budget``."""
        if job.cancelled():
            return "cancelled"
        error = job.exception() or item.error
        if error is None:
            return "done"
        return "budget" if isinstance(error, BudgetExceeded) else "failed"

    def _forget(self, job: asyncio.Task[None]) -> None:
        self._jobs.discard(job)
        if not job.cancelled():
            job.exception()  # marks it as retrieved, in case that no frame waits for it

    async def _branch(self, branch: Branch, scope: ExecutionScope, span: Span | None) -> None:
        frame = Frame(self.run, scope)
        try:
            branch.result = await frame.drive(branch.begin())
        except Exception as error:
            branch.error = error
        await self._turn(span)
        dropped = branch.on_failure == "drop" and self.run.account.exhausted is None
        if branch.error is not None and not dropped:
            raise branch.error

    async def _turn(self, span: Span | None) -> None:
        """Wait until ``span`` may end: at once, unless a recording is replayed."""
        if self.run.tracer is not None:
            await self.run.tracer.turn(span)

    async def _execute(self, task: Task, span: Span | None) -> None:
        """Execute ``task``; raises its failure, unless ``on_failure`` drops it."""
        try:
            validated("on_failure", task.on_failure, ON_FAILURE)
            if isinstance(task, ComputeTask):
                await self._compute(task, span)
            else:
                await self._run_on_worker(task)
        finally:
            self._end_part(task)
        if task.error is not None and task.on_failure == "raise":
            raise task.error

    async def _compute(self, task: ComputeTask, span: Span | None) -> None:
        """Run ``task`` until it is done, or raise ``BudgetExceeded`` once the seconds are over."""
        run = self.run
        if run.account.expired:
            task.status, task.error = TaskStatus.WORKER_EXECEPTION, run.account.exhausted
        else:
            on_loop = iscoroutinefunction(task.function)
            work = self._compute_on_loop if on_loop else self._compute_in_thread
            computation = asyncio.current_task()
            assert computation is not None, "computations run in asyncio tasks of their own"
            run.computations.add(computation)
            try:
                await work(task)
                await self._turn(span)
            except asyncio.CancelledError:
                if not run.account.expired:
                    raise
                task.status, task.error = TaskStatus.WORKER_EXECEPTION, run.account.exhausted
            finally:
                run.computations.discard(computation)
        if run.account.exhausted is not None and task.error is run.account.exhausted:
            raise run.account.exhausted

    async def _compute_in_thread(self, task: ComputeTask) -> None:
        work = partial(task.function, *task.args, **task.kwargs)
        task.result, error = await self.run.compute(partial(_attempt, work))
        task.status = TaskStatus.SUCCESS if error is None else TaskStatus.WORKER_EXECEPTION
        raisable = error is None or (
            isinstance(error, Exception) and not isinstance(error, StopIteration)
        )
        task.error = error if raisable else failure_of(task, error)

    async def _compute_on_loop(self, task: ComputeTask) -> None:
        task.status, task.error = TaskStatus.SUCCESS, None
        try:
            task.result = await task.function(*task.args, **task.kwargs)
        except BaseException as error:
            if is_cancelled(error):
                raise
            task.status = TaskStatus.WORKER_EXECEPTION
            task.error = error if isinstance(error, Exception) else failure_of(task, error)

    async def _run_on_worker(self, task: Task) -> None:
        """Have a worker execute ``task``, and record its usage; fails without a budget."""
        run = self.run
        execution = asyncio.current_task()
        assert execution is not None, "executions run in asyncio tasks of their own"
        ending = self._begin_execution(task)
        if not ending:
            run.executions.add(execution)
        try:
            task.status, task.error = await self._outcome(task)
        except asyncio.CancelledError:
            if run.account.exhausted is None or ending:
                raise
            task.status, task.error = TaskStatus.WORKER_EXECEPTION, run.account.exhausted
        finally:
            run.executions.discard(execution)
            run.account.record(task.usage)
        if run.account.exhausted is not None and not ending:
            raise run.account.exhausted

    def _begin_execution(self, task: Task) -> bool:
        """Prepare ``task``; returns whether it only ends its stream."""
        stream = task if isinstance(task, StreamGenerationTask) and task.under_way else None
        ending = stream is not None and stream.cancel_flag
        if stream is None:
            self.run.account.begin_call()
            task.usage = Usage()
        elif not ending and self.run.account.exhausted is not None:
            raise self.run.account.exhausted
        if isinstance(task, GenerationTask):
            self.run.account.begin_generation(self.scope.path, task)
        if task.streaming_output_flag:
            task.streaming_output_list = StreamedOutputs(partial(self._stream, task))
        return ending

    async def _outcome(self, task: Task) -> tuple[TaskStatus, Exception | None]:
        failed = TaskStatus.WORKER_EXECEPTION
        try:
            worker = self.run.routes.find(task.worker_tag)
            status = await worker.run_task(task)
        except UsageError as error:
            return failed, error
        except BaseException as error:
            if is_cancelled(error):
                raise
            if isinstance(error, BudgetExceeded) and is_of_group(error, task):
                return failed, error
            return failed, failure_of(task, error)
        if status is not TaskStatus.SUCCESS:
            failure = unsuccessful(task, status, worker)
            return failure.status or failed, failure
        if isinstance(task, GenerationTask):  # if the worker does not count
            num_generated, num_counted = task.num_generated, task.usage.completion_tokens
            task.usage.completion_tokens = max(num_generated, num_counted)
        return status, None

    # ---- streaming ----------------------------------------------------------------------------

    def _begin_part(self, task: Task) -> None:
        if self.scope.parent is not None:
            return  # a branch's
        _, part = self._parts.get(id(task), (task, None))
        if part is None or not part.is_open:
            part = self.run.text.begin()
            self._parts[id(task)] = task, part
        part.is_awaited = True

    def _end_part(self, task: Task) -> None:
        _, part = self._parts.get(id(task), (task, None))
        if part is not None:
            part.is_awaited = False
            if not (isinstance(task, StreamGenerationTask) and task.under_way):
                part.is_open = False
                del self._parts[id(task)]
                self.run.publish()

    def _stream(self, task: Task | None, output: Any) -> None:
        """Stream ``output`` of a task, or for None of the controller itself."""
        if isinstance(output, Delta):
            if task is not None and not output.source:
                output = dataclasses.replace(output, source=f"{id(task):x}")
            _, part = self._parts.get(id(task), (task, None))
            if task is None and self.scope.parent is None:
                part = self.run.text.begin()
                part.is_open = False
            if part is not None:
                part.add(output)
        fields = None if task is None else task.stream_fields
        self.run.publish(StreamEvent(self.scope.path, output, fields))

    def _tell(self, stage: Stage) -> None:
        branch = self.scope.path if stage.branch is None else stage.branch
        if self.run.tracer is not None:
            self.run.tracer.stage(branch, stage)
        self.run.publish(StreamEvent(branch, stage))


def _attempt(work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """The result and the error of ``work``: a future cannot carry every kind of exception."""
    try:
        return work(), None
    except BaseException as error:
        return None, error


def _check_distinct(tasks: Sequence[Task]) -> None:
    if len({id(task) for task in tasks}) < len(tasks):
        raise UsageError(
            "a controller yielded a task twice in one list",
            "the results of the second run would replace those of the first",
            "Make copies: task.samples_of(n)",
        )


def _close(process: Process) -> None:
    try:
        process.close()
    except Exception:
        raise
    except BaseException as error:
        raise controller_quit(error) from error


async def _end(jobs: Sequence[asyncio.Task[None]]) -> None:
    """Cancel and wait until they have ended. A second cancellation would disturb their clean-up."""
    await cancel_all(jobs)
    if jobs:
        await asyncio.wait(jobs)
