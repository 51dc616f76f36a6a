"""How many may be inside at once; the rest wait in the order of their coming.

For tasks of any event loop in any thread, which ``asyncio.Semaphore`` is not. Knows nothing about
what they do inside.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque


class Gate:
    """``async with gate:`` waits for a place and gives it back.

    Args:
        places: how many there are, at least 1.
    """

    def __init__(self, places: int) -> None:
        self._free, self._lock = places, threading.Lock()
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
        try:
            await turn
        except BaseException:  # cancelled
            with self._lock:
                waited = turn in self._waiting
                if waited:
                    self._waiting.remove(turn)
            if not waited:  # the place had been given, or was about to be
                self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        """Pass the place on to whoever waits longest and still has a loop to run on."""
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                try:
                    turn.get_loop().call_soon_threadsafe(_admit, turn)
                except RuntimeError:  # its loop is closed
                    continue
                return
            self._free += 1


def _admit(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
