"""``BranchLimit`` and ``StartPace``: how many branches of a request run at once, and how fast they
begin.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

MAX_BRANCHES, MIN_BRANCHES = 2048, 32
"""Branches of all requests together that run at once, which share them equally, but for
one of each branch that waits for others; and those that each request may have in any case."""
MAX_STARTS = 16
"""Items that are started, or cancelled, before the event loop serves other requests."""


class StartPace:
    """Lets all frames together start a few items in each turn of the event loop.

    Each item is made and run up to its first wait: a thousand at once would hold up everything else
    on the loop.
    """

    def __init__(self) -> None:
        self._num_starts = MAX_STARTS

    async def step(self) -> None:
        """An item has been started; returns in another turn of the loop if it was the last one."""
        if self._num_starts == MAX_STARTS:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._num_starts -= 1
        while self._num_starts <= 0:
            await asyncio.sleep(0)

    def _next_turn(self) -> None:
        self._num_starts = MAX_STARTS


class BranchLimit:
    """How many branches of a request run at once. Others begin when one of them ends.

    A frame without a running branch may always begin one, so that the innermost ones end.

    Args:
        num_requests: how many requests share ``MAX_BRANCHES``, at present.
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
        """A branch of a frame has begun."""
        self._num_branches += 1
        self._num_of[frame] += 1

    def ended(self, frame: object) -> None:
        """A branch of a frame has ended: that frame may go on, or the one that waits longest."""
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
