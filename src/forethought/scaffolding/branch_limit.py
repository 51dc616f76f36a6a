"""``BranchLimit`` and ``StartPace``: how many branches run, and how fast they begin."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable

MAX_BRANCHES, MIN_BRANCHES = 2048, 32
"""Branches of all requests together that run at once, which share them equally, but for
one of each branch that waits for others; and those that each request may have in any case."""
MAX_STARTS = 16
"""Items that are started, or cancelled, before the event loop serves other requests."""


class StartPace:
    """Starts only a few items in each turn of the event loop, over all frames together.

    An item runs up to its first wait when it starts: a thousand at once would block the loop.
    """

    def __init__(self) -> None:
        self._num_starts = MAX_STARTS

    async def step(self) -> None:
        """Count a started item; yields to the event loop after the last one of its turn."""
        if self._num_starts == MAX_STARTS:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._num_starts -= 1
        while self._num_starts <= 0:
            await asyncio.sleep(0)

    def _next_turn(self) -> None:
        self._num_starts = MAX_STARTS


class BranchLimit:
    """Limits how many branches of a request run at once; others begin when one ends.

    A frame without a running branch may always begin one, so that the innermost ones can end.

    Args:
        num_requests: the number of requests that share ``MAX_BRANCHES`` now.
    """

    def __init__(self, num_requests: Callable[[], int] = lambda: 1) -> None:
        self._num_requests, self._num_branches = num_requests, 0
        self._num_of: Counter[object] = Counter()
        self._waiting: dict[object, asyncio.Future[None]] = {}

    def admits(self, frame: object) -> bool:
        """Whether a frame may begin a branch now."""
        return self._has_room or not self._num_of[frame]

    @property
    def _has_room(self) -> bool:
        share = MAX_BRANCHES // max(1, self._num_requests())
        return self._num_branches < max(MIN_BRANCHES, share)

    async def wait(self, frame: object) -> None:
        """Until a frame may begin a branch."""
        while not self.admits(frame):
            waiter = self._waiting[frame] = asyncio.get_running_loop().create_future()
            try:
                await waiter
            finally:
                del self._waiting[frame]

    def begun(self, frame: object) -> None:
        """Count a branch of a frame that has begun."""
        self._num_branches += 1
        self._num_of[frame] += 1

    def ended(self, frame: object) -> None:
        """Count a branch that has ended: its frame, or the longest waiting one, may go on."""
        self._num_branches -= 1
        self._num_of[frame] -= 1
        if not self._num_of[frame]:
            del self._num_of[frame]
        if frame in self._waiting and self.admits(frame):
            _wake(self._waiting[frame])
        elif self._has_room:
            next_one = next(
                (waiter for waiter in self._waiting.values() if not waiter.done()), None
            )
            if next_one is not None:
                _wake(next_one)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


async def cancel_all(jobs: Iterable[asyncio.Future[None]]) -> None:
    """Cancel them, a few in each turn of the event loop; all at once if this is cancelled."""
    remaining = iter(jobs)
    try:
        for number, job in enumerate(remaining, 1):
            _cancel(job)
            if number % MAX_STARTS == 0:
                await asyncio.sleep(0)
    finally:
        for job in remaining:
            _cancel(job)


def _cancel(job: asyncio.Future[None]) -> None:
    if not isinstance(job, asyncio.Task) or not job.cancelling():
        job.cancel()
