"""A lock that threads get in the order in which they asked."""

from __future__ import annotations

import threading
from collections import deque


class FifoLock:
    """A lock that threads get in order of arrival. With ``threading.Lock``, a thread that releases
    it and acquires it again at once can keep the others waiting.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._locked = False
        self.owner: int | None = None
        """The thread that holds it, as ``threading.get_ident`` gives it; None also between the
        release by one thread and the return of ``acquire`` in the next."""
        self.lost_at_fork = False
        """Whether this is a forked child, and a thread of the parent held it at the fork."""

    def __enter__(self) -> None:
        with self._lock:
            if not self._locked:
                self._hold()
                return
            waiter = threading.Lock()
            waiter.acquire()
            self._waiting.append(waiter)
        try:
            waiter.acquire()
        except BaseException:  # KeyboardInterrupt
            with self._lock:
                waited = waiter in self._waiting
                if waited:
                    self._waiting.remove(waiter)
            if not waited:
                self.release()
            raise
        self.owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def is_wanted(self) -> bool:
        """Whether a thread waits for it."""
        return bool(self._waiting)

    def try_acquire(self) -> bool:
        """Acquire if no thread holds it. Never waits, so the garbage collector may call it."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._locked:
                return False
            self._hold()
            return True
        finally:
            self._lock.release()

    def release(self) -> None:
        """Hand it to the thread that has waited longest."""
        with self._lock:
            self.owner = None
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._locked = False

    def after_fork(self) -> None:
        """In a forked child, whose single thread nobody else waits for.

        If another thread held it, or was about to, it is never released: what that thread was
        changing may be half changed.
        """
        held = self._locked and self.owner != threading.get_ident()
        self.lost_at_fork = self.lost_at_fork or held or self._lock.locked()
        self._locked = self._locked or self.lost_at_fork
        self._lock = threading.Lock()
        self._waiting.clear()

    def _hold(self) -> None:
        self._locked, self.owner = True, threading.get_ident()
