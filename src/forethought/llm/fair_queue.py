"""``FairQueue``: work that waits for a few workers, and whose turn it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Gives out the next item of the tenant that has the fewest running.

    Of one tenant it is by turns the smallest item and the oldest: small items overtake large ones,
    and no large one waits for ever. Not thread-safe.
    """

    def __init__(self, tenant: Callable[[Item], str], size: Callable[[Item], int]) -> None:
        self._tenant, self._size = tenant, size
        self._waiting: list[Item] = []
        self._num_running: Counter[str] = Counter()
        self._num_taken = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, item: object) -> bool:
        return item in self._waiting

    def push(self, item: Item) -> None:
        """Add an item."""
        self._waiting.append(item)

    def remove(self, item: Item) -> None:
        """Take out an item that waits."""
        self._waiting.remove(item)

    def take(self) -> Item:
        """Take out the item whose turn it is; it runs until ``ended``."""
        running = [self._num_running[self._tenant(item)] for item in self._waiting]
        fewest = min(running)
        fair = [item for item, num in zip(self._waiting, running, strict=True) if num == fewest]
        self._num_taken += 1
        chosen = min(fair, key=self._size) if self._num_taken % 2 else fair[0]
        self._waiting.remove(chosen)
        self._num_running[self._tenant(chosen)] += 1
        return chosen

    def clear(self) -> None:
        """Forget what waits and what runs."""
        self._waiting.clear()
        self._num_running.clear()

    def ended(self, item: Item) -> None:
        """An item that was taken runs no more."""
        tenant = self._tenant(item)
        self._num_running[tenant] -= 1
        if not self._num_running[tenant]:
            del self._num_running[tenant]
