"""An event loop and an engine that alternate, so that a measurement repeats exactly.

Methods run on an event loop and the engine in a thread of its own, which does not wait for them: by
the time that a controller ends a chain of thought or a sample, the engine has run some steps more,
and their number depends on how the operating system schedules the two threads. So do the token
counts and, in half precision, which sequences share a batch and with it how near-ties are rounded.
Here the engine steps only while the event loop is idle: every controller has received the outputs
of the last step and submitted its requests in reply.

The event loop counts as busy while an executor works for it (``run_in_executor``, as for a
``ComputeTask``). Other awaited work, such as a process or a server, is not waited for.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from forethought.llm.async_llm import AsyncLLM

Result = TypeVar("Result")
Values = TypeVarTuple("Values")
_POLL_SECONDS = 0.1
"""How often the engine checks whether the event loop that it waits for has ended."""
_SETTLE_SECONDS = 5.0


class Lockstep:
    """Runs an event loop in a thread, and has an engine wait for it between steps.

    ::

        with Lockstep(llm) as lockstep:
            scaffolding = lockstep.call(lambda: ScaffoldingLlm(controller, workers))

    Args:
        llm: all of its clients run on this event loop.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm, self._loop = llm, _IdleLoop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="forethought-lockstep", daemon=True
        )

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function on the event loop; returns its result.

        The engine does not step before the function has returned and its tasks wait for the engine.
        """
        done: Future[Result] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return done.result()

    def __enter__(self) -> Self:
        self._thread.start()
        self._llm.set_step_barrier(self._wait)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._llm.set_step_barrier(None)
        asyncio.run_coroutine_threadsafe(_settle(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self) -> None:
        """Wait until the event loop is idle; called on the engine's thread."""
        idle = threading.Event()
        try:
            self._loop.call_soon_threadsafe(self._loop.notify_when_idle, idle)
        except RuntimeError:  # it is closed
            return
        while not idle.wait(_POLL_SECONDS) and self._thread.is_alive():
            pass


class _IdleLoop(asyncio.SelectorEventLoop):
    """An event loop that sets an event when it is idle and no executor works for it."""

    def __init__(self) -> None:
        super().__init__(_Selector(self._on_wait))
        self._asked: threading.Event | None = None
        self._num_computing = 0

    def notify_when_idle(self, idle: threading.Event) -> None:
        """Set ``idle`` as soon as the loop waits for something from outside."""
        self._asked = idle

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Values], Result], *args: *Values
    ) -> asyncio.Future[Result]:
        """As any event loop; until it is done the loop is not idle."""
        future = super().run_in_executor(executor, func, *args)
        self._num_computing += 1
        future.add_done_callback(self._computed)
        return future

    def _computed(self, _: object) -> None:
        self._num_computing -= 1

    def _on_wait(self) -> None:
        if self._asked is not None and not self._num_computing:
            self._asked.set()
            self._asked = None


class _Selector(selectors.DefaultSelector):
    """A selector that calls ``on_wait`` whenever it is about to block.

    An event loop with callbacks that are ready selects without blocking.
    """

    def __init__(self, on_wait: Callable[[], None]) -> None:
        super().__init__()
        self._on_wait = on_wait

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self._on_wait()
        return super().select(timeout)


async def _settle() -> None:
    """Wait for tasks shielded from cancellation, such as those that close sequences."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=_SETTLE_SECONDS)
