"""The thread that owns a desk, and with it the engine: the only one in the package.

Everything that changes the engine runs here, between two steps, in the order in which it was asked
for. The thread sleeps when there is nothing to do. Knows nothing about event loops.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from forethought.errors import EngineStopped
from forethought.text.desk import Desk
from forethought.text.generation import Generation
from forethought.text.listener import Listener, deliver

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class EngineThread:
    """Runs a desk until it is stopped or the engine dies.

    Args:
        desk: which no other thread uses from now on.
    """

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self._errands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._listeners: dict[Generation, Listener[Any]] = {}
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

        def errand() -> None:
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
            self._errands.put(errand)
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

    def begin(self, listener: Listener[Any], start: Callable[[], Generation]) -> None:
        """Start a generation that ``listener`` is told of, its failure to start included.

        Raises:
            EngineStopped: the thread has ended.
        """
        self.call_for(listener, self.adopt, listener, start)

    def call_for(self, listener: Listener[Any], function: Callable[..., None], *args: Any) -> None:
        """As ``call``; if the function fails, so does what ``listener`` waits for."""

        def fail(done: Future[None]) -> None:
            if (error := done.exception()) is not None:
                listener.fail(error)

        self.call(function, *args).add_done_callback(fail)

    def abort(self, listener: Listener[Any]) -> None:
        """End the generation of a listener that does not listen any more."""
        with contextlib.suppress(EngineStopped):
            self.call(self._abort, listener)

    def wake(self) -> None:
        """Let an idle thread look around. Safe in the garbage collector."""
        self._errands.put(None)

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
        letters = defaultdict(list)
        for generation in generations:
            if (listener := self._listeners.get(generation)) is None:
                continue
            if (letter := listener.hear(generation)) is not None:
                letters[listener.loop].append(letter)
            if generation.finished:
                del self._listeners[generation]
            if generation.failure is not None:  # perhaps of the listener's reading it
                self.desk.abort(generation)
        for loop, written in letters.items():
            deliver(loop, written)
            self._has_news = True

    def adopt(self, listener: Listener[Any], start: Callable[[], Generation]) -> None:
        """Start a generation that ``listener`` is told of."""
        self._listeners[start()] = listener

    def look(self, listener: Listener[Result]) -> Result | None:
        """What there is of a listener's generation; None if that has ended."""
        found = next((g for g, other in self._listeners.items() if other is listener), None)
        return None if found is None else listener.read(found)

    def _abort(self, listener: Listener[Any]) -> None:
        for generation in [g for g, other in self._listeners.items() if other is listener]:
            self.desk.abort(generation)
            self.tell([generation])

    def _serve(self) -> None:
        try:
            while not self._stopping:
                self._run_errands()
                while self._has_news and self.barrier is not None:
                    self._wait(self.barrier)
                    self._run_errands()
                self.tell(self.desk.step())
        except BaseException as error:
            log.exception("the engine died")
            self._cause = error
        finally:
            self._end()

    def _wait(self, barrier: Callable[[], None]) -> None:
        """Let the clients react to what they have been told."""
        self._has_news = False
        barrier()

    def _run_errands(self) -> None:
        """Run what has been handed in; wait for something if there is nothing else to do."""
        while not self._errands.empty() or not (self.desk.has_work or self._stopping):
            errand = self._errands.get()
            if errand is not None:
                errand()
                self._has_news = True
            errand = None  # while the thread sleeps, nothing that it has made is kept

    def _end(self) -> None:
        with self._gate:
            self._ended = True
        while not self._errands.empty():
            errand = self._errands.get()
            if errand is not None:
                errand()
        for listener in self._listeners.values():
            listener.fail(self._failure())
        self._listeners.clear()
        try:
            self.desk.clear()
        except Exception:
            log.exception("the engine could not be left in order")

    def _failure(self) -> EngineStopped:
        if self._cause is None:
            return EngineStopped("the engine has been shut down", fix="Build a new one")
        failure = EngineStopped("the engine died", repr(self._cause), "Build a new one")
        failure.__cause__ = self._cause
        return failure
