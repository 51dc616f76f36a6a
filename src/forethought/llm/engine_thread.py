"""A client's end of one generation: between the engine's thread and the client's event loop.

The engine never waits for a client. While a client is busy with one output, later ones are not
even made; when it asks again it gets the newest, which holds everything before.

Several coroutines of the client may wait at once, each for something else. Knows nothing about how
generations run.

[engine_thread] The thread that owns a desk, and with it the engine: the only one in the package.

Everything that changes the engine runs here, between two steps, in the order in which it was asked
for. The thread sleeps when there is nothing to do. Knows nothing about event loops.
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

Output = TypeVar("Output")
Callback = Callable[[], None]
"""Something for a client to learn, to be called on its loop."""


class OutputStream(Generic[Output]):
    """Listens to one generation from the running event loop.

    Args:
        read: makes the client's output of a generation; called on the engine's thread.
    """

    def __init__(self, read: Callable[[Generation], Output]) -> None:
        self.read, self.loop = read, asyncio.get_running_loop()
        self._wanted = math.inf
        """With how many tokens the client wants to know of it. Set on the client's loop, reset by
        the engine's thread when it writes; every letter has it set again for who still waits."""
        self._waiters: dict[asyncio.Future[None], float] = {}
        """Who waits, and for how many tokens; without end: for the end."""
        self._newest: Output | None = None
        self._size = -1
        """Tokens of the newest output."""
        self._returned = False
        """Whether ``next`` has returned the newest output."""
        self._last: Output | None = None
        self._failure: BaseException | None = None
        self.ended = False
        """Whether the last output or the failure has arrived."""

    # ---- on the engine's thread -------------------------------------------------------------

    def hear(self, generation: Generation) -> Callback | None:
        """What the client wants to know after a step gave the generation something or ended it."""
        failure: Exception | None = generation.failure
        size = generation.size
        if failure is None and not generation.finished and size < self._wanted:
            return None
        self._wanted = math.inf
        try:
            output = None if failure else self.read(generation)
        except Exception as error:  # is this client's misfortune, and nobody else's
            output, failure = None, error
        ended = generation.finished or failure is not None
        return functools.partial(self._receive, output, size, failure, ended)

    def fail(self, failure: BaseException) -> None:
        """Nothing more will come, and this is why."""
        deliver(self.loop, [functools.partial(self._receive, None, self._size, failure, True)])

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
                if not waiter.done():
                    waiter.set_result(None)
        self._wanted = min(self._waiters.values(), default=math.inf)

    async def next(self) -> Output | None:
        """The newest output not returned before; None when there are no more.

        Raises:
            RequestError, EngineStopped: the generation failed.
        """
        while self._newest is None or self._returned:
            if self._failure is not None:
                raise self._failure
            if self.ended:
                return None
            await self._wait(0)
        self._returned = True
        return self._newest

    async def reach(self, count: int) -> Output:
        """The newest output that has come, once its first sample has ``count`` tokens; or the last.

        Raises as ``next``. The loop is not woken up before.
        """
        while not self.ended and self._size < count:
            await self._wait(count)
        return await self.last() if self._newest is None or self.ended else self._newest

    async def last(self) -> Output:
        """The output of the finished generation, however often asked. Raises as ``next``."""
        while not self.ended:
            await self._wait(math.inf)
        if self._failure is not None:
            raise self._failure
        assert self._last is not None, "what ends without a failure ends with an output"
        return self._last

    async def _wait(self, count: float) -> None:
        waiter = self.loop.create_future()
        self._waiters[waiter] = count
        self._wanted = min(self._wanted, count)
        try:
            await waiter
        finally:
            self._waiters.pop(waiter, None)


def deliver(loop: asyncio.AbstractEventLoop, callbacks: list[Callback]) -> None:
    """Have letters opened on their loop, which is woken up once."""
    with contextlib.suppress(RuntimeError):  # the loop is closed, its clients gone
        loop.call_soon_threadsafe(_open, callbacks)


def _open(callbacks: list[Callback]) -> None:
    for callback in callbacks:
        callback()


log = logging.getLogger(__name__)
Result = TypeVar("Result")


class EngineThread:
    """Runs a desk until it is stopped or the engine dies.

    Args:
        desk: which no other thread uses from now on.
    """

    def __init__(self, frontend: Frontend) -> None:
        self.frontend = frontend
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._listeners: dict[Generation, OutputStream[Any]] = {}
        self._ended = False
        self._cause: BaseException | None = None
        """What the engine died of, if it did."""
        self._stopping = False
        self._pid = os.getpid()
        self.barrier: Callable[[], None] | None = None
        """Called before a step if a client has been told something, or handed in something, since
        the step before; see ``AsyncLLM.set_step_barrier``."""
        self._has_news = False
        self._gate = threading.Lock()  # between handing in an errand and the end of the thread
        self._thread = threading.Thread(target=self._serve, name="forethought-engine", daemon=True)
        self._thread.start()

    # ---- from any thread --------------------------------------------------------------------

    def call(self, function: Callable[..., Result], *args: Any) -> Future[Result]:
        """Run a function on the engine's thread, before its next step.

        If the future is cancelled before its turn, the function is not run.

        Raises:
            EngineStopped: the thread has ended. If it ends later, the future fails with the same.
        """
        self.check_process()
        future: Future[Result] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._ended:
                    raise self._failure()
                future.set_result(function(*args))
            except Exception as error:
                future.set_exception(error)

        with self._gate:
            if self._ended:
                raise self._failure()
            self._commands.put(command)
        return future

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child of the process that has the thread."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Called before anything that could wait for the thread, or for a lock that it held.

        Raises:
            EngineStopped: this is a forked child, in which the thread does not run.
        """
        if self.is_forked:
            raise EngineStopped(
                "this AsyncLLM does not run in a forked process",
                f"its engine thread stayed behind in process {self._pid}",
                "Build it in the process that uses it",
            )

    def begin(self, listener: OutputStream[Any], start: Callable[[], Generation]) -> None:
        """Start a generation that ``listener`` is told of, its failure to start included.

        Raises:
            EngineStopped: the thread has ended.
        """
        self.call_for(listener, self.adopt, listener, start)

    def call_for(
        self, listener: OutputStream[Any], function: Callable[..., None], *args: Any
    ) -> None:
        """As ``call``; if the function fails, so does what ``listener`` waits for."""

        def fail(done: Future[None]) -> None:
            if (error := done.exception()) is not None:
                listener.fail(error)

        self.call(function, *args).add_done_callback(fail)

    def abort(self, listener: OutputStream[Any]) -> None:
        """End the generation of a listener that does not listen any more."""
        with contextlib.suppress(EngineStopped):
            self.call(self.end, listener)

    def wake(self) -> None:
        """Let an idle thread look around. Safe in the garbage collector."""
        self._commands.put(None)

    def stop(self) -> None:
        """End the thread after its current step; what is unfinished fails with EngineStopped.

        In a forked child, which has no such thread, nothing is done.
        """
        if self.is_forked:
            return
        self._stopping = True
        self.wake()
        if threading.current_thread() is not self._thread:  # the garbage collector may be there
            self._thread.join()

    # ---- on the engine's thread -------------------------------------------------------------

    def tell(self, generations: Iterable[Generation]) -> None:
        """Tell the listeners of generations that these have changed."""
        callbacks = defaultdict(list)
        for generation in generations:
            if (listener := self._listeners.get(generation)) is None:
                continue
            if (callback := listener.hear(generation)) is not None:
                callbacks[listener.loop].append(callback)
            if generation.finished:
                del self._listeners[generation]
            if generation.failure is not None:  # perhaps of the listener's reading it
                self.frontend.abort(generation)
        for loop, written in callbacks.items():
            deliver(loop, written)
            self._has_news = True

    def adopt(self, listener: OutputStream[Any], start: Callable[[], Generation]) -> None:
        """Start a generation that ``listener`` is told of."""
        self._listeners[start()] = listener

    def look(self, listener: OutputStream[Result]) -> Result | None:
        """What there is of a listener's generation; None if that has ended."""
        found = next((g for g, other in self._listeners.items() if other is listener), None)
        return None if found is None else listener.read(found)

    def end(self, listener: OutputStream[Any]) -> None:
        """End the generation of a listener, if it has one that goes on."""
        for generation in [g for g, other in self._listeners.items() if other is listener]:
            self.frontend.abort(generation)
            self.tell([generation])

    def _serve(self) -> None:
        try:
            while not self._stopping:
                self._run_commands()
                while self._has_news and self.barrier is not None:
                    self._wait(self.barrier)
                    self._run_commands()
                self.tell(self.frontend.step())
        except BaseException as error:
            log.exception("the engine died")
            self._cause = error
        finally:
            self._end()

    def _wait(self, barrier: Callable[[], None]) -> None:
        """Let the clients react to what they have been told."""
        self._has_news = False
        barrier()

    def _run_commands(self) -> None:
        """Run what has been handed in; wait for something if there is nothing else to do."""
        while not self._commands.empty() or not (self.frontend.has_work or self._stopping):
            command = self._commands.get()
            if command is not None:
                command()
                self._has_news = True
            command = None  # while the thread sleeps, nothing that it has made is kept

    def _end(self) -> None:
        with self._gate:
            self._ended = True
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command()
        for listener in self._listeners.values():
            listener.fail(self._failure())
        self._listeners.clear()
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
