"""When to try again: ever more seldom while trying brings nothing new."""

from __future__ import annotations


class Backoff:
    """Counts steps between tries.

    Args:
        first: steps before the first try, and before each try after news.
        last: most steps between tries.
    """

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self.interval = first
        """Steps before the next try."""
        self._waited = 0

    @property
    def due(self) -> bool:
        """Whether it is time."""
        return self._waited >= self.interval

    def wait(self) -> None:
        """A step without a try."""
        self._waited += 1

    def tried(self, news: bool) -> None:
        """A try: with news the next one comes soon, without in twice the time."""
        self._waited = 0
        self.interval = self._first if news else min(2 * self.interval, self._last)
