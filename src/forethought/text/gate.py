"""How many may be inside at once; the rest wait in the order of their coming.

``Gate`` is for tasks of any event loop in any thread, which ``asyncio.Semaphore`` is not. ``Turns``
is for threads, one at a time.
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


class Turns:
    """``with turns:`` waits until no other thread is inside.

    In order of arrival, which ``threading.Lock`` does not promise: there a thread that leaves and
    comes back at once keeps the others out for as long as it likes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._taken = False
        self.owner: int | None = None
        """The thread inside, as ``threading.get_ident`` names it."""

    def __enter__(self) -> None:
        with self._lock:
            if not self._taken:
                self._take()
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()
        except BaseException:  # KeyboardInterrupt
            with self._lock:
                waited = turn in self._waiting
                if waited:
                    self._waiting.remove(turn)
            if not waited:
                self.leave()
            raise
        self.owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self.leave()

    def enter_at_once(self) -> bool:
        """Enter if nobody is inside. Never waits, so the garbage collector may call it."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._taken:
                return False
            self._take()
            return True
        finally:
            self._lock.release()

    def leave(self) -> None:
        """Let the one in who waits longest."""
        with self._lock:
            self.owner = None
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False

    def _take(self) -> None:
        self._taken, self.owner = True, threading.get_ident()
