"""``ScaffoldingLlm``: answers prompts with a method. Admits requests and clones the controller.

The numbered life of a request:

1. ``generate_async`` makes a ``ScaffoldingResult`` and posts the request to the event loop.
2. It waits there, by priority and then first come first served, for one of
   ``max_parallel_requests`` slots; its deadline already runs.
3. The prototype controller is cloned, and ``generate`` of the clone is driven (see ``driver``).
4. What it returns, or its error, ends the result; the next request takes its slot.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import logging
import queue
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from numbers import Integral
from types import TracebackType
from typing import Any, Self, overload

from forethought.config.sampling import SamplingParams
from forethought.errors import EngineStopped, ParameterError, RequestTimeout, UsageError
from forethought.scaffolding import sampling
from forethought.scaffolding.base_task import Task
from forethought.scaffolding.branch_limit import BranchLimit, StartPace
from forethought.scaffolding.budget import Budget, BudgetAccount
from forethought.scaffolding.controller import Controller
from forethought.scaffolding.driver import Frame, Run
from forethought.scaffolding.execution_scope import ExecutionScope, SharedResources
from forethought.scaffolding.failure import controller_quit
from forethought.scaffolding.parallel import checked_process
from forethought.scaffolding.result import ScaffoldingOutput, ScaffoldingResult
from forethought.scaffolding.settings import ANY_TEXT, BOOL, POSITIVE_INT, SECONDS, validated
from forethought.scaffolding.trace import Trace
from forethought.scaffolding.tracer import GuardedTracer, Recorder, Tracer
from forethought.scaffolding.worker import Routes, Worker

_logger = logging.getLogger(__name__)

_COMPUTE_THREADS = 4
_SETTLE_SECONDS = 5.0


@dataclass
class _Waiting:
    """An entry of the waiting queue: by priority, and then first come first served."""

    priority: int
    arrival: int

    def __lt__(self, other: _Waiting) -> bool:
        return (self.priority, self.arrival) < (other.priority, other.arrival)


@dataclass
class _Place(_Waiting):
    """A slot among the running requests that is held for work elsewhere."""

    granted: asyncio.Future[None]
    """Done when it is there; cancelled when nobody waits for it any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The arguments of ``generate_async`` that are not the controller's, where they are
    explained.
    """

    timeout: float | None
    priority: int
    budget: Budget
    cache_salt: str
    adapter: str | None
    session: str | None

    def check(self) -> None:
        """Raise ParameterError for an invalid one."""
        if self.timeout is not None:
            validated("timeout", self.timeout, SECONDS)
        if not isinstance(self.priority, int):
            why, fix = f"got {self.priority!r}", "Give a whole number; lower runs first"
            raise ParameterError("invalid priority", why, fix)
        if not isinstance(self.budget, Budget):
            why, fix = f"got {self.budget!r}", "Give Budget(tokens=..., seconds=...)"
            raise ParameterError("invalid budget", why, fix)
        validated("cache_salt", self.cache_salt, ANY_TEXT)
        for name, value in (("adapter", self.adapter), ("session", self.session)):
            if value is not None:
                validated(name, value, ANY_TEXT)


@dataclass
class _Request(_Waiting):
    result: ScaffoldingResult
    prompt: Any
    kwargs: dict[str, Any]
    """Of ``generate`` of the controller."""
    options: _Options
    job: asyncio.Task[None] | None = None
    """Set while it runs."""
    stopped: Exception | None = None
    """Why it was ended from outside."""


class ScaffoldingLlm:
    """Runs a method on many prompts at once.

    ::

        with ScaffoldingLlm(NativeGenerationController(), worker) as llm:
            print(llm.generate("Why?").outputs[0].text)

    Created inside a running event loop it lives on that loop; else it runs one of its own in a
    thread. Its methods may be called from any thread.

    Args:
        prototype_controller: cloned for each request.
        workers: one for all tasks, or worker by tag (enum members or plain strings).
        max_parallel_requests: requests in flight; further ones wait.
        trace: record every task, branch and stage; each result then has its ``trace``.

    Attributes:
        loop: the event loop that everything runs on.

    Raises:
        ParameterError: something among ``workers`` that cannot work,
            ``max_parallel_requests`` below 1, or ``trace`` is not a bool.
    """

    def __init__(
        self,
        prototype_controller: Controller,
        workers: Mapping[Any, Worker] | Worker,
        max_parallel_requests: int = 64,
        *,
        trace: bool = False,
    ) -> None:
        validated("max_parallel_requests", max_parallel_requests, POSITIVE_INT)
        self.trace = validated("trace", trace, BOOL)
        self.prototype_controller = prototype_controller
        self.max_parallel_requests = max_parallel_requests
        self._routes = Routes(workers)
        self.workers = self._routes.by_tag
        self._waiting: list[_Request | _Place] = []
        self._num_held = 0
        self._running: dict[asyncio.Task[None], _Request] = {}
        self._arrivals, self._pace = itertools.count(), StartPace()
        self._stopped = False
        self._pool = ThreadPoolExecutor(_COMPUTE_THREADS, "forethought-compute")
        self._resources = SharedResources()
        self._thread: threading.Thread | None = None
        try:
            self.loop = asyncio.get_running_loop()
            self._loop_thread = threading.get_ident()
        except RuntimeError:
            self.loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_run_forever, args=[self.loop], name="forethought-scaffolding", daemon=True
            )
            self._thread.start()
            self._loop_thread = self._thread.ident or 0

    # ---- asking -------------------------------------------------------------------------------

    def generate_async(
        self,
        prompt: Any,
        *,
        sampling_params: Mapping[str, Any] | SamplingParams | None = None,
        timeout: float | None = None,
        priority: int = 0,
        budget: Budget | None = None,
        cache_salt: str = "",
        adapter: str | None = None,
        session: str | None = None,
        **kwargs: Any,
    ) -> ScaffoldingResult:
        """Submit a request and return at once.

        Args:
            prompt: text or token ids; whatever ``generate`` of the controller takes.
            sampling_params: sampling fields set by the caller; they win over the controller's.
            timeout: seconds from now until the request fails with ``RequestTimeout``.
            priority: lower runs first.
            budget: limits of everything that the method does inside.
            cache_salt: cached prefixes and draft pools are shared only with requests of the same
                salt, such as those of one tenant. ``OpenaiWorker`` refuses it.
            adapter: the LoRA adapter of all that is generated, in every branch and probe, by its
                name; "": none; None: the worker's. ``OpenaiWorker`` refuses it.
            session: key of the requests that are placed together where there are several replicas
                or servers, such as those of an agent's session.
            **kwargs: passed on to ``generate``, and by it to ``process`` of the controller.

        Raises:
            ParameterError: an invalid argument.
            EngineStopped: after ``shutdown``.
        """
        options = _Options(
            timeout=timeout,
            priority=priority,
            budget=Budget() if budget is None else budget,
            cache_salt=cache_salt,
            adapter=adapter,
            session=session,
        )
        options.check()
        if self._stopped or self.loop.is_closed():
            raise EngineStopped("the ScaffoldingLlm is shut down", fix="Create another one")
        if sampling_params is not None:
            kwargs["sampling_params"] = sampling.checked("sampling_params", sampling_params)
        return self._posted(prompt, kwargs, options)

    def _posted(self, prompt: Any, kwargs: dict[str, Any], options: _Options) -> ScaffoldingResult:
        """Post a request to the event loop; its result, whose ``abort`` stops it there."""
        request: _Request
        result = ScaffoldingResult(
            uuid.uuid4().hex, lambda reason: self._post(self._stop, request, reason)
        )
        result.loop_thread = self._loop_thread
        arrival = next(self._arrivals)
        request = _Request(options.priority, arrival, result, prompt, kwargs, options)
        self._post(self._submit, request)
        return result

    @overload
    def generate(self, prompts: str | list[int], **options: Any) -> ScaffoldingResult: ...

    @overload
    def generate(
        self, prompts: list[str] | list[list[int]], **options: Any
    ) -> list[ScaffoldingResult]: ...

    def generate(self, prompts: Any, **options: Any) -> ScaffoldingResult | list[ScaffoldingResult]:
        """Answer one prompt, or a list of prompts at once, and wait for the results.

        Args:
            prompts: a string, a list of token ids, or a list of either.
            **options: those of ``generate_async``.

        Raises:
            UsageError: called on the event loop itself; use ``generate_async`` there.
            Exception: what the first failing request failed with; the others are aborted.
        """
        if threading.get_ident() == self._loop_thread:
            raise UsageError(
                "generate() would wait for ever",
                "this thread runs the event loop that the request needs",
                "Use 'await llm.generate_async(prompt)' there",
            )
        if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
            raise ParameterError(
                "invalid prompts", f"got {prompts!r}", "Give text, token ids, or a list of them"
            )
        several = not isinstance(prompts, str) and not _is_ids(prompts)
        results = [
            self.generate_async(prompt, **options) for prompt in (prompts if several else [prompts])
        ]
        try:
            ended: queue.SimpleQueue[ScaffoldingResult] = queue.SimpleQueue()
            for result in results:
                result.on_finish(partial(ended.put, result))
            for _ in results:
                ended.get().result()
        except BaseException:
            for result in results:
                result.abort()
            raise
        return results if several else results[0]

    def enable_output_task_collection(self) -> None:
        """Kept for code that calls it: results always have their ``task_collections``."""

    @asynccontextmanager
    async def place(self, priority: int = 0) -> AsyncGenerator[None, None]:
        """Hold one of the request slots, for work that runs elsewhere on this event loop.

        Args:
            priority: as of a request, among which it waits for its turn.
        """
        place = _Place(priority, next(self._arrivals), self.loop.create_future())
        heapq.heappush(self._waiting, place)
        self._admit()
        try:
            await place.granted
            yield
        finally:
            if place.granted.done() and not place.granted.cancelled():
                self._num_held -= 1
            place.granted.cancel()
            self._admit()

    # ---- running, on the event loop -----------------------------------------------------------

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        if threading.get_ident() == self._loop_thread:
            function(*args)
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function, *args)

    def _submit(self, request: _Request) -> None:
        if self._stopped:
            self._stop(request, EngineStopped("the ScaffoldingLlm is shut down"))
        timeout = request.options.timeout
        if timeout is not None:
            why = f"{timeout} s have passed since it was submitted"
            reason = RequestTimeout("the request took too long", why, "Allow more time")
            timer = self.loop.call_later(timeout, self._stop, request, reason)
            request.result.on_finish(timer.cancel)
        heapq.heappush(self._waiting, request)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._running) + self._num_held < self.max_parallel_requests:
            request = heapq.heappop(self._waiting)
            if isinstance(request, _Place):
                if not request.granted.done():
                    self._num_held += 1
                    request.granted.set_result(None)
            elif request.stopped is None:
                request.job = self.loop.create_task(self._serve(request))
                self._running[request.job] = request
                request.job.add_done_callback(self._leave)

    def _leave(self, job: asyncio.Task[None]) -> None:
        request = self._running.pop(job)
        if request.stopped is not None:
            request.result.finish(request.stopped)  # cancelled before it could begin
        self._admit()

    async def _serve(self, request: _Request) -> None:
        result = request.result
        try:
            result.finish(await self._answer(request))
        except Exception as error:
            if request.stopped is not None:
                _logger.warning("a controller failed while it was ended: %r", error)
            result.finish(request.stopped or error)
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError) and _is_cancelling(request)
            stopped = EngineStopped("the event loop was shut down") if cancelled else None
            result.finish(request.stopped or stopped or controller_quit(error))

    async def _answer(self, request: _Request) -> list[ScaffoldingOutput]:
        result = request.result
        result.queue_s = time.perf_counter() - result.created_at
        controller = self.prototype_controller.clone()
        result.task_collections = controller.task_collections
        run = self._new_run(request)
        timer, seconds = None, request.options.budget.seconds
        if seconds is not None:
            timer = self.loop.call_later(seconds, run.account.expire)
        try:
            process = controller.generate(request.prompt, **request.kwargs)
            checked_process(controller, "generate", process)
            output = await Frame(run, self._scope(request, run)).drive(process)
            outputs = _outputs(controller, output)
        except BaseException as error:
            if run.tracer is not None:
                run.tracer.finish(request.stopped or error, stopped=request.stopped is not None)
            raise
        else:
            if run.tracer is not None:
                run.tracer.finish(outputs)
        finally:
            result.metrics, result.spent_budget = run.account.metrics, run.account.spent
            result.generations = run.account.generated_in("")
            if timer is not None:
                timer.cancel()
        return outputs

    def _new_run(self, request: _Request) -> Run:
        """The run of a request, whose result has its usage, and its trace, from here on."""
        account = BudgetAccount(request.options.budget)
        recorder = self._tracer(request, account)
        tracer = None if recorder is None else GuardedTracer(recorder)
        run = Run(
            self._routes,
            account,
            request.result.stream,
            self._compute,
            tracer=tracer,
            branches=BranchLimit(self._running.__len__),
            pace=self._pace,
        )
        account.on_exhausted = run.stop_executions
        if recorder is not None and tracer is not None:
            request.result.trace = recorder.trace
            account.on_exhausted = partial(tracer.exhausted, run.stop_executions)
        request.result.usage = account.usage
        return run

    def _scope(self, request: _Request, run: Run) -> ExecutionScope:
        options = request.options
        return ExecutionScope(
            request.result.id,
            "",
            run.account,
            options.priority,
            resources=self._resources,
            thinking=run.thinking,
            cache_salt=options.cache_salt,
            adapter=options.adapter,
            session=options.session,
        )

    def _tracer(self, request: _Request, account: BudgetAccount) -> Tracer | None:
        if not self.trace:
            return None
        method = type(self.prototype_controller).__name__
        budget = asdict(request.options.budget)
        trace = Trace(request.result.id, method, time.time(), budget=budget)
        return Recorder(trace, account, request.prompt, request.kwargs)

    def _compute(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        context = contextvars.copy_context()  # so that it finds its scope
        return self.loop.run_in_executor(self._pool, context.run, function)

    def _stop(self, request: _Request, reason: Exception) -> None:
        if request.stopped is None and not request.result.finished:
            request.stopped = reason
            if request.job is None:
                request.result.finish(reason)
            else:
                request.job.cancel()

    # ---- the end ------------------------------------------------------------------------------

    def shutdown(self, shutdown_workers: bool = False, shutdown_wokers: bool = False) -> None:
        """End all requests (they fail with ``EngineStopped``) and stop.

        On an event loop that is not its own, the ending is only begun: ``await ashutdown()``.

        Args:
            shutdown_workers: shut the workers down as well.
            shutdown_wokers: a misspelling of it that ported code still uses.
        """
        workers = shutdown_workers or shutdown_wokers
        if self.loop.is_closed():
            return
        if threading.get_ident() == self._loop_thread:
            self._ending = self.loop.create_task(self.ashutdown(workers))
            return
        try:
            asyncio.run_coroutine_threadsafe(self.ashutdown(workers), self.loop).result()
        finally:
            if self._thread is not None:
                self._stop_loop(self._thread)

    def _stop_loop(self, thread: threading.Thread) -> None:
        asyncio.run_coroutine_threadsafe(_settle(), self.loop).result()
        asyncio.run_coroutine_threadsafe(self.loop.shutdown_asyncgens(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        thread.join()
        self.loop.close()

    async def ashutdown(self, shutdown_workers: bool = False) -> None:
        """``shutdown`` for coroutines on the same event loop."""
        self._stopped = True
        reason = EngineStopped("the ScaffoldingLlm was shut down", "the request had not finished")
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            if isinstance(request, _Place):
                request.granted.cancel()
            else:
                self._stop(request, reason)
        running = dict(self._running)
        for request in running.values():
            self._stop(request, reason)
        if running:
            await asyncio.wait(running)
        self._pool.shutdown(wait=False)
        self._resources.close()
        async with AsyncExitStack() as endings:  # all of them run, also if one of them raises
            for worker in reversed(self._routes.workers):
                endings.push_async_callback(worker.on_loop_end)
            for worker in reversed(self._routes.workers if shutdown_workers else []):
                endings.callback(worker.shutdown)
                endings.push_async_callback(worker.async_shutdown)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.ashutdown()


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    """Run ``loop`` until it is stopped.

    ``KeyboardInterrupt`` and ``SystemExit`` of any asyncio task come out of the loop, after they
    have become that task's result: they end the task, and not what else runs here.
    """
    while True:
        try:
            return loop.run_forever()
        except (KeyboardInterrupt, SystemExit) as error:
            _logger.error("a task on the event loop raised %r", error)


def _is_cancelling(request: _Request) -> bool:
    """Whether the request is ended from outside, rather than by its own code."""
    return request.job is not None and request.job.cancelling() > 0


async def _settle() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=_SETTLE_SECONDS)


def _outputs(controller: Controller, output: Any) -> list[ScaffoldingOutput]:
    """The outputs that ``generate`` of a controller returned; ``UsageError`` if it is something
    else.
    """
    if output is None:
        return []
    outputs = output if isinstance(output, list) else [output]
    for item in outputs:
        if isinstance(item, Task) or not hasattr(item, "text"):
            raise UsageError(
                f"{type(controller).__name__}.generate returned {type(item).__name__}",
                f"got {str(item)[:60]!r}, but the result holds ScaffoldingOutput",
                "Return task.create_scaffolding_output(), or ScaffoldingOutput(text)",
            )
    return outputs


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Integral)
