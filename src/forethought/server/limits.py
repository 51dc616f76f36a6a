"""``Admission``: how many requests may be unfinished, and the end of the server.

``ScaffoldingLlm`` runs ``max_running`` requests and lets others wait. What is beyond both limits is
refused at once, with the time after which a place is likely to be free.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from forethought.errors import ForethoughtError

_SMOOTHING = 0.1


class Overloaded(ForethoughtError):
    """The queue is full, or the server is about to end; ``retry_after`` seconds may help."""

    def __init__(self, what: str, why: str, retry_after: int, *, draining: bool = False) -> None:
        super().__init__(what, why, f"Try again in {retry_after} s")
        self.retry_after, self.draining = retry_after, draining


class ByteLimit:
    """Bounds the bytes of the bodies of all unfinished requests."""

    def __init__(self, max_bytes: int) -> None:
        self._num_free = max_bytes

    def take(self, num_bytes: int) -> None:
        """Hold further bytes; raises Overloaded if there are too many."""
        if num_bytes > self._num_free:
            raise Overloaded("too many large requests", "their bodies take too much memory", 5)
        self._num_free -= num_bytes

    def give_back(self, num_bytes: int) -> None:
        """They are held no more."""
        self._num_free += num_bytes


class Admission:
    """Counts unfinished requests: ``max_running`` run, ``max_waiting`` wait.

    Attributes:
        unfinished: requests that run or wait.
        draining: whether no further request is taken.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._max_running, self._max_unfinished = max_running, max_running + max_waiting
        self.unfinished, self.draining = 0, False
        self._mean_seconds = 1.0
        self._idle = asyncio.Event()
        self._idle.set()
        self._drain_until: float | None = None

    @contextmanager
    def admit(self) -> Iterator[None]:
        """A request is unfinished inside.

        Raises Overloaded if there are too many, or the server is about to end.
        """
        if self.draining:
            raise Overloaded(
                "the server is shutting down", "it finishes what runs", 30, draining=True
            )
        if self.unfinished >= self._max_unfinished:
            raise Overloaded(
                "too many requests", f"{self.unfinished} are unfinished", self._retry_after()
            )
        self.unfinished += 1
        self._idle.clear()
        began = time.monotonic()
        try:
            yield
        finally:
            self.unfinished -= 1
            self._mean_seconds += _SMOOTHING * (time.monotonic() - began - self._mean_seconds)
            if not self.unfinished:
                self._idle.set()

    async def drain(self, seconds: float) -> bool:
        """Take no further request, and wait for the others; whether they have finished.

        ``seconds`` count from the first call; a further one waits no longer.
        """
        self.draining = True
        if self._drain_until is None:
            self._drain_until = asyncio.get_running_loop().time() + seconds
        try:
            async with asyncio.timeout_at(self._drain_until):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    @property
    def waiting(self) -> int:
        """Requests that wait for others to end."""
        return max(0, self.unfinished - self._max_running)

    def _retry_after(self) -> int:
        """Seconds until one of those that run is likely to end."""
        return max(1, min(60, math.ceil(self._mean_seconds)))
