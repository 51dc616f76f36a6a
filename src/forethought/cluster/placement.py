"""Which replica generates: branches of a request stay together, others go where there is room."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Protocol, TypeVar

MAX_KEYS = 1 << 16
"""That are remembered once nothing of them is open."""


class Place(Protocol):
    """A replica, as a placement sees it."""

    name: str

    @property
    def load(self) -> int:
        """Generations that run or wait there."""

    @property
    def capacity(self) -> int:
        """Generations that run there at once."""

    @property
    def takes(self) -> bool:
        """Whether new generations may begin there."""


_P = TypeVar("_P", bound=Place)


class Placement:
    """Keys of requests and sessions, and the replicas that they stay on.

    A key stays where its first generation began, unless that replica is full and another one is
    not: then a generation alone spills over, and computes its prompt again. A new key goes to the
    replica with the smallest share of its places taken; of several, to the first in an order that
    depends on the key, the same in every ingress (rendezvous hashing), so that few keys move when
    replicas come and go.
    """

    def __init__(self) -> None:
        self._homes: dict[str, tuple[str, int]] = {}
        """By key: the replica, and how many sequences are open."""

    def choose(self, places: Iterable[_P], key: str | None, current: _P | None) -> _P | None:
        """Where a generation of a key begins; None: nothing takes any.

        ``current`` has the tokens that it goes on from.
        """
        ready = [place for place in places if place.takes]
        if not ready:
            return None
        best = min(ready, key=lambda place: (place.load / place.capacity, _rank(key, place.name)))
        home = current if current in ready else self._home(ready, key)
        if home is None or (home.load >= home.capacity and best.load < best.capacity):
            return best
        return home

    def opened(self, key: str | None, place: Place) -> None:
        """A sequence of a key has been opened somewhere."""
        if key is not None:
            name, count = self._homes.get(key, (place.name, 0))
            self._homes[key] = name, count + 1

    def moved(self, key: str | None, place: Place) -> None:
        """A sequence of a key is somewhere else now: further ones follow it."""
        if key is not None and key in self._homes:
            self._homes[key] = place.name, self._homes[key][1]

    def lost(self, place: Place) -> None:
        """A replica is gone: what stayed on it goes on together elsewhere."""
        self._homes = {key: home for key, home in self._homes.items() if home[0] != place.name}

    def closed(self, key: str | None) -> None:
        """A sequence of a key has been closed."""
        if key is not None and key in self._homes:
            name, count = self._homes.pop(key)
            self._homes[key] = name, max(0, count - 1)
            while len(self._homes) > MAX_KEYS and (oldest := next(iter(self._homes))) != key:
                self._homes.pop(oldest)

    def _home(self, places: list[_P], key: str | None) -> _P | None:
        name, _ = self._homes.get(key or "", ("", 0))
        return next((place for place in places if place.name == name), None)


def _rank(key: str | None, name: str) -> bytes:
    return blake2b(f"{key}\0{name}".encode(), digest_size=8).digest()
