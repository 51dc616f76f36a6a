"""The thread that owns an ``AsyncLLM``'s engine, and the output streams of its clients.

::

    client's event loop                              engine thread
    -------------------                              -------------
    thread.begin(stream, start)   -- command -->     start()
    await stream.next()                              frontend.step()
    stream._receive(output, ...)  <-- callback --    stream.on_step(generation)

*Commands* change the engine. They run on the engine thread between two steps, in the order in which
they were queued; the thread sleeps when there are none and the engine has no work. *Callbacks*
deliver outputs; they run on the client's event loop, which is woken up once per step for all of
them. The engine never waits for a client: an output is made only if the client asked for one with
as many tokens as there are now, and holds everything before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from forethought.errors import EngineStopped
from forethought.llm.frontend import Frontend, Generation

log = logging.getLogger(__name__)

Output = TypeVar("Output")
Result = TypeVar("Result")
Callback = Callable[[], None]
"""Delivers an output; runs on the client's event loop."""


class OutputStream(Generic[Output]):
    """The outputs of one generation, awaited on the event loop that is running now.

    Several coroutines of that loop may wait at once, for different numbers of tokens. The engine
    thread calls ``read`` to make the client's output.
    """

    def __init__(self, read: Callable[[Generation], Output]) -> None:
        self.read, self.loop = read, asyncio.get_running_loop()
        self._wake: Callback = _nothing
        """Wakes the engine thread: a coroutine waits, and not for the end alone."""
        self._generation: Generation | None = None
        self._hold = math.inf
        """Tokens at which the generation stops until more are wanted."""
        self._min_tokens = math.inf
        """The next output is made once the generation has this many tokens. Set on the client's
        loop, reset by the engine thread when it makes an output; each callback sets it again for
        the coroutines that still wait."""
        self._num_events = 0
        """Events of the generation that the newest output was made after; nobody waits for the same
        one again."""
        self._waiters: dict[asyncio.Future[None], float] = {}
        """What coroutines await -> tokens they wait for; infinity: the end."""
        self._newest: Output | None = None
        self._size = -1
        """Tokens of the newest output."""
        self._returned = False
        """Whether ``next`` has returned the newest output."""
        self._last: Output | None = None
        self._failure: BaseException | None = None
        self.ended = False
        """Whether the last output or the failure has arrived."""
        self.is_read_anew = False
        """Whether a command is queued that has the engine thread see what is waited for."""

    # ---- on the engine thread ---------------------------------------------------------------

    def follow(self, generation: Generation, wake: Callback) -> None:
        """Give the outputs of a generation that has been started; ``wake`` wakes this thread."""
        self._generation, self._wake = generation, wake
        generation.hold_at(self._hold)

    def num_missing(self, generation: Generation) -> float:
        """Tokens until the next output is wanted."""
        return self._min_tokens - generation.size

    def on_step(self, generation: Generation) -> Callback | None:
        """The callback for what a step did to the generation; None if no output is wanted yet. None
        is made before the first token: a client that gathers tokens would pause after it.
        """
        failure: Exception | None = generation.failure
        size, has_tokens = generation.size, generation.first_token_time is not None
        is_new = generation.num_events > self._num_events
        is_wanted = has_tokens and is_new and size >= self._min_tokens
        if failure is None and not generation.finished and not is_wanted:
            return None
        self._min_tokens, self._num_events = math.inf, generation.num_events
        try:
            output = None if failure else self.read(generation)
        except Exception as error:  # fails this request only
            output, failure = None, error
        ended = generation.finished or failure is not None
        return functools.partial(self._receive, output, size, failure, ended)

    @property
    def first_token_time(self) -> float | None:
        """When its first tokens came, as of ``time.perf_counter``; None: there are none."""
        return None if self._generation is None else self._generation.first_token_time

    def fail(self, failure: BaseException) -> None:
        """End the stream with a failure."""
        schedule(self.loop, [functools.partial(self._receive, None, self._size, failure, True)])

    # ---- on the client's loop ---------------------------------------------------------------

    def _receive(
        self, output: Output | None, size: int, failure: BaseException | None, ended: bool
    ) -> None:
        if self.ended:
            return  # what ended it first stays
        if output is not None:
            self._newest, self._size, self._returned = output, size, False
        if ended:
            self._last = output
        self._failure, self.ended = failure, ended
        for waiter, count in list(self._waiters.items()):
            if ended or count <= size:
                del self._waiters[waiter]
                _resume(waiter)
        self._want(min(self._waiters.values(), default=math.inf))

    def _want(self, min_tokens: float) -> None:
        if min_tokens < self._min_tokens:
            self._min_tokens = min_tokens
            self._wake()

    async def next(self) -> Output | None:
        """The newest output not returned before; None when there are no more.

        Raises the generation's error, or EngineStopped.
        """
        while self._newest is None or self._returned:
            if self._failure is not None:
                raise self._failure
            if self.ended:
                return None
            await self._wait(0)
        self._returned = True
        return self._newest

    async def reach(self, count: float, hold: float = math.inf) -> Output:
        """The newest output once its first sample has ``count`` tokens; the last if it ends before.
        The loop is not woken up earlier. At ``hold`` tokens the generation stops until the next
        call. Raises as ``next``.
        """
        self._set_hold(hold)
        while not self.ended and self._size < count:
            await self._wait(count)
        return await self.last() if self._newest is None or self.ended else self._newest

    async def last(self) -> Output:
        """The output of the finished generation, however often asked. Raises as ``next``."""
        self._set_hold(math.inf)
        while not self.ended:
            await self._wait(math.inf)
        if self._failure is not None:
            raise self._failure
        assert self._last is not None, "what ends without a failure ends with an output"
        return self._last

    async def pause(self, seconds: float) -> None:
        """Wait for the next tick of a clock that ticks every ``seconds``, or for the end.

        All streams of a loop share its clock, so one step and one wake-up serve all of them.
        """
        if self.ended:
            return
        tick = (self.loop.time() // seconds + 1) * seconds
        waiter = self.loop.create_future()
        timer = self.loop.call_at(tick, _resume, waiter)
        try:
            await self._resumed(waiter, math.inf)
        finally:
            timer.cancel()

    def _set_hold(self, hold: float) -> None:
        if hold != self._hold:
            self._hold = hold
            if self._generation is not None:
                self._generation.hold_at(hold)
                self._wake()

    async def _wait(self, count: float) -> None:
        self._want(count)
        await self._resumed(self.loop.create_future(), count)

    async def _resumed(self, waiter: asyncio.Future[None], count: float) -> None:
        """Wait until ``waiter`` is resumed: by ``count`` tokens, by the end, or from outside."""
        self._waiters[waiter] = count
        try:
            await waiter
        finally:
            self._waiters.pop(waiter, None)


def _nothing() -> None:
    pass


def _resume(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def schedule(loop: asyncio.AbstractEventLoop, callbacks: list[Callback]) -> None:
    """Run callbacks on their event loop, which is woken up once."""
    with contextlib.suppress(RuntimeError):  # the loop is closed, its clients gone
        loop.call_soon_threadsafe(_run, callbacks)


def _run(callbacks: list[Callback]) -> None:
    for callback in callbacks:
        callback()


class EngineThread:
    """Steps a frontend's engine until it is stopped or the engine dies. Other threads then call
    only what ``Frontend`` allows from any thread.
    """

    def __init__(self, frontend: Frontend) -> None:
        self.frontend = frontend
        self._interrupt = frontend.engine.interrupt
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._forwards: SimpleQueue[Callable[[], None]] = SimpleQueue()
        """Of others than the generations: one runs between two steps."""
        self._streams: dict[Generation, OutputStream[Any]] = {}
        self._ended = False
        self._cause: BaseException | None = None
        """What the engine died of, if it did."""
        self._stopping = False
        self._pid = os.getpid()
        self.barrier: Callable[[], None] | None = None
        """Called before a step if callbacks were scheduled or commands run since the step before;
        see ``AsyncLLM.set_step_barrier``."""
        self._needs_barrier = False
        self._end_lock = threading.Lock()  # no command is queued once the thread has ended
        self._thread = threading.Thread(target=self._serve, name="forethought-engine", daemon=True)
        self._thread.start()

    # ---- from any thread --------------------------------------------------------------------

    def call(self, function: Callable[..., Result], *args: Any) -> Future[Result]:
        """Queue a command: run a function on the engine thread before the next step. If the future
        is cancelled before that, it is not run.

        Raises EngineStopped if the thread has ended; if it ends later, the future fails with it.
        """
        return self._queued(self._commands.put, function, args)

    def call_for_long(self, function: Callable[..., Result], *args: Any) -> Future[Result]:
        """As ``call``, for what takes as long as a step: the next one runs after a step, if
        something generates.
        """
        future = self._queued(self._forwards.put, function, args)
        self.wake()
        return future

    def _queued(
        self,
        put: Callable[[Callable[[], None]], None],
        function: Callable[..., Result],
        args: tuple[Any, ...],
    ) -> Future[Result]:
        future, run = Future[Result](), self._bound(function, *args)

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._ended:
                    raise self._failure()
                future.set_result(run())
            except Exception as error:
                future.set_exception(error)

        self._put(put, command)
        return future

    def _put(self, put: Callable[[Callable[[], None]], None], command: Callable[[], None]) -> None:
        self.check_process()
        with self._end_lock:
            if self._ended:
                raise self._failure()
            put(command)
        self._interrupt.request()

    def _bound(self, function: Callable[..., Result], *args: Any) -> Callable[[], Result]:
        """A command that calls the function, made by the thread that gives it."""
        return functools.partial(function, *args)

    @property
    def has_ended(self) -> bool:
        """Whether it was stopped, or the engine died: no command is taken any more."""
        return self._ended

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child of the process that has the thread."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raises EngineStopped in a forked child, where the thread does not run. Called before
        anything that could wait for the thread, or for a lock that it held.
        """
        if self.is_forked:
            raise EngineStopped(
                "this AsyncLLM does not run in a forked process",
                f"its engine thread stayed in process {self._pid}",
                "Build it in the process that uses it",
            )

    def begin(self, stream: OutputStream[Any], start: Callable[[], Generation]) -> None:
        """Start a generation whose outputs go to ``stream``; it fails if ``start`` does. Raises
        EngineStopped if the thread has ended.
        """
        self.call_for(stream.fail, self.follow, stream, start)

    def call_for(
        self, fail: Callable[[Exception], None], function: Callable[..., None], *args: Any
    ) -> None:
        """As ``call``, for what has no result; ``fail`` is called with an error of the function, or
        of the thread that has ended meanwhile. A future would take longer than most commands.
        """
        run = self._bound(function, *args)

        def command() -> None:
            try:
                if self._ended:
                    raise self._failure()
                run()
            except Exception as error:
                fail(error)

        self._put(self._commands.put, command)

    def abort(self, stream: OutputStream[Any]) -> None:
        """End the generation of a stream that is not read any more."""
        with contextlib.suppress(EngineStopped):
            self.call(self.end, stream)

    def wake(self) -> None:
        """Wake an idle thread up to look for work. Safe in the garbage collector."""
        self._commands.put(None)
        self._interrupt.request()

    def stop(self) -> None:
        """End the thread after its current step; what is unfinished fails with EngineStopped. In a
        forked child, which has no such thread, nothing is done.
        """
        if self.is_forked:
            return
        self._stopping = True
        self.wake()
        if threading.current_thread() is not self._thread:  # the garbage collector may be there
            self._thread.join()

    # ---- on the engine thread ---------------------------------------------------------------

    def publish(self, generations: Iterable[Generation]) -> None:
        """Schedule the callbacks of generations that have changed."""
        callbacks = defaultdict(list)
        for generation in generations:
            if (stream := self._streams.get(generation)) is None:
                continue
            if (callback := stream.on_step(generation)) is not None:
                callbacks[stream.loop].append(callback)
            if generation.finished:
                del self._streams[generation]
            if generation.failure is not None:  # perhaps of reading its output
                self.frontend.abort(generation)
        for loop, batch in callbacks.items():
            schedule(loop, batch)
            self._needs_barrier = True

    def follow(self, stream: OutputStream[Any], start: Callable[[], Generation]) -> None:
        """Start a generation whose outputs go to ``stream``."""
        generation = start()
        self._streams[generation] = stream
        stream.follow(generation, functools.partial(self._read_anew, generation, stream))

    def _read_anew(self, generation: Generation, stream: OutputStream[Any]) -> None:
        """Have the engine thread see what a stream waits for now, which may be there already."""

        def command() -> None:
            stream.is_read_anew = False  # first: what is wanted from now on needs another command
            self.publish([generation])

        if not stream.is_read_anew:
            stream.is_read_anew = True
            self._commands.put(command)
            self._interrupt.request()

    def peek(self, stream: OutputStream[Result]) -> Result | None:
        """The output of a stream's generation so far; None if that has ended."""
        generation = self._generation_of(stream)
        return None if generation is None else stream.read(generation)

    def end(self, stream: OutputStream[Any]) -> None:
        """End the generation of a stream, if it has one that goes on."""
        generation = self._generation_of(stream)
        if generation is not None:
            self.frontend.abort(generation)
            self.publish([generation])

    def _generation_of(self, stream: OutputStream[Any]) -> Generation | None:
        return next((g for g, other in self._streams.items() if other is stream), None)

    def _serve(self) -> None:
        try:
            while not self._stopping:
                self._run_commands()
                while self._needs_barrier and self.barrier is not None:
                    self._needs_barrier = False
                    self.barrier()  # clients may queue further commands
                    self._run_commands()
                self._run_forward()
                self.publish(self.frontend.step(self._max_steps()))
        except BaseException as error:
            log.exception("the engine died")
            self._cause = error
        finally:
            self._end()

    def _run_forward(self) -> None:
        if not self._forwards.empty():
            self._forwards.get()()

    def _max_steps(self) -> float:
        """Steps until the first output that is waited for, at least one."""
        missing = (stream.num_missing(generation) for generation, stream in self._streams.items())
        return max(1, min(missing, default=math.inf))

    def _run_commands(self) -> None:
        """Run the queued commands; wait for one if there is nothing else to do. What is queued or
        waited for from now on interrupts the next steps.
        """
        self._interrupt.clear()
        while not (self._commands.empty() and self._has_more):
            command = self._commands.get()
            self._interrupt.clear()  # of this one, and of those that are queued by now
            if command is not None:
                command()
                self._needs_barrier = True
            command = None  # while the thread sleeps it keeps no references

    @property
    def _has_more(self) -> bool:
        """Whether there is something to do beside commands."""
        return self.frontend.has_work or self._stopping or not self._forwards.empty()

    def _end(self) -> None:
        with self._end_lock:
            self._ended = True
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command()
        while not self._forwards.empty():
            self._run_forward()
        for stream in self._streams.values():
            stream.fail(self._failure())
        self._streams.clear()
        self._interrupt.clear()
        try:
            self.frontend.clear()
        except Exception:
            log.exception("the engine could not be left in order")

    def _failure(self) -> EngineStopped:
        if self._cause is None:
            return EngineStopped("the engine has been shut down", fix="Build a new one")
        failure = EngineStopped("the engine died", repr(self._cause), "Build a new one")
        failure.__cause__ = self._cause
        return failure
