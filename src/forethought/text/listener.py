"""A client's end of one generation: between the engine's thread and the client's event loop.

The engine never waits for a client. While a client is busy with one output, later ones are not
even made; when it asks again it gets the newest, which holds everything before.

Knows nothing about how generations run.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
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
        self._wanted: int | None = None
        """With how many tokens the client wants to know of it; None: not now. Set by the client,
        cleared by the engine's thread."""
        self._newest: Output | None = None
        self._last: Output | None = None
        self._failure: BaseException | None = None
        self.ended = False
        """Whether the last output or the failure has arrived."""
        self._waiters: list[asyncio.Future[None]] = []

    # ---- on the engine's thread -------------------------------------------------------------

    def hear(self, generation: Generation) -> Letter | None:
        """What the client wants to know after a step gave the generation something or ended it."""
        failure: Exception | None = generation.failure
        wanted = self._wanted is not None and generation.size >= self._wanted
        if failure is None and not generation.finished and not wanted:
            return None
        self._wanted = None
        try:
            output = None if failure else self.read(generation)
        except Exception as error:  # is this client's misfortune, and nobody else's
            output, failure = None, error
        ended = generation.finished or failure is not None
        return functools.partial(self._receive, output, failure, ended)

    def fail(self, failure: BaseException) -> None:
        """Nothing more will come, and this is why."""
        deliver(self.loop, [functools.partial(self._receive, None, failure, True)])

    # ---- on the client's loop ---------------------------------------------------------------

    def _receive(self, output: Output | None, failure: BaseException | None, ended: bool) -> None:
        if output is not None:
            self._newest = output
        if ended:
            self._last = output
        self._failure, self.ended = failure, ended
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def next(self) -> Output | None:
        """The newest output not returned before; None when there are no more.

        Raises:
            RequestError, EngineStopped: the generation failed.
        """
        while self._newest is None:
            if self._failure is not None:
                raise self._failure
            if self.ended:
                return None
            self._wanted = 0
            await self._wait()
        output, self._newest = self._newest, None
        return output

    async def reach(self, count: int) -> Output:
        """The newest output, once its first sample has ``count`` tokens; or the last one.

        Raises as ``next``. The loop is not woken up before.
        """
        self._newest = None
        while self._newest is None and not self.ended:
            self._wanted = count
            await self._wait()
        return await self.last() if self._newest is None or self.ended else self._newest

    async def last(self) -> Output:
        """The output of the finished generation, however often asked. Raises as ``next``."""
        while not self.ended:
            await self._wait()
        if self._failure is not None:
            raise self._failure
        assert self._last is not None, "what ends without a failure ends with an output"
        return self._last

    async def _wait(self) -> None:
        waiter = self.loop.create_future()
        self._waiters.append(waiter)
        await waiter


def deliver(loop: asyncio.AbstractEventLoop, letters: list[Letter]) -> None:
    """Have letters opened on their loop, which is woken up once."""
    with contextlib.suppress(RuntimeError):  # the loop is closed, its clients gone
        loop.call_soon_threadsafe(_open, letters)


def _open(letters: list[Letter]) -> None:
    for letter in letters:
        letter()
