"""A client's end of one generation: between the engine's thread and the client's event loop.

The engine never waits for a client. While a client is busy with one output, later ones are not
even made; when it asks again it gets the newest, which holds everything before.

Several coroutines of the client may wait at once, each for something else. Knows nothing about how
generations run.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import Callable
from typing import Generic, TypeVar

from forethought.text.generation import Generation

Output = TypeVar("Output")
Letter = Callable[[], None]
"""Something for a client to learn, to be called on its loop."""


class Listener(Generic[Output]):
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

    def hear(self, generation: Generation) -> Letter | None:
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


def deliver(loop: asyncio.AbstractEventLoop, letters: list[Letter]) -> None:
    """Have letters opened on their loop, which is woken up once."""
    with contextlib.suppress(RuntimeError):  # the loop is closed, its clients gone
        loop.call_soon_threadsafe(_open, letters)


def _open(letters: list[Letter]) -> None:
    for letter in letters:
        letter()
