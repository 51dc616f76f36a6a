"""A client's end of one generation: between the engine's thread and the client's event loop.

The engine never waits for a client. While a client is busy with one output, later ones are not
even made; when it asks again it gets the newest, which holds everything before.

Knows nothing about how generations run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Generic, TypeVar

from forethought.text.generation import Generation

Output = TypeVar("Output")


class Listener(Generic[Output]):
    """Listens to one generation from the running event loop.

    Args:
        read: makes the client's output of a generation; called on the engine's thread.
    """

    def __init__(self, read: Callable[[Generation], Output]) -> None:
        self._read, self._loop = read, asyncio.get_running_loop()
        self._wants_more = False
        """Set by the client, cleared by the engine's thread."""
        self._newest: Output | None = None
        self._failure: BaseException | None = None
        self.ended = False
        """Whether the last output or the failure has arrived."""
        self._waiter: asyncio.Future[None] | None = None

    # ---- on the engine's thread -------------------------------------------------------------

    def hear(self, generation: Generation) -> None:
        """A step gave the generation something, or it is finished."""
        if generation.failure is not None:
            self.fail(generation.failure)
        elif generation.finished or self._wants_more:
            self._wants_more = False
            try:
                output = self._read(generation)
            except Exception as error:  # is this client's misfortune, and nobody else's
                self.fail(error)
            else:
                self._post(output, None, generation.finished)

    def fail(self, failure: BaseException) -> None:
        """Nothing more will come, and this is why."""
        self._post(None, failure, True)

    def _post(self, output: Output | None, failure: BaseException | None, ended: bool) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, its client gone
            self._loop.call_soon_threadsafe(self._receive, output, failure, ended)

    # ---- on the client's loop ---------------------------------------------------------------

    def _receive(self, output: Output | None, failure: BaseException | None, ended: bool) -> None:
        if output is not None:
            self._newest = output
        self._failure, self.ended = failure, ended
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

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
            self._wants_more = True
            await self._wait()
        output, self._newest = self._newest, None
        return output

    async def last(self) -> Output:
        """The output of the finished generation. Raises as ``next``."""
        while not self.ended:
            await self._wait()
        if self._failure is not None:
            raise self._failure
        assert self._newest is not None, "the last output is asked for once"
        return self._newest

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        await self._waiter
