"""Stop strings: where a text ends, and how much of its end may be the start of one.

The result does not depend on how the text was cut into tokens: it is that of matching one character
at a time. Knows nothing about tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop string found."""

    text: str
    start: int
    """Where it begins; the text before is the answer."""

    @property
    def end(self) -> int:
        """The position behind it."""
        return self.start + len(self.text)


def find_stop(text: str, known: int, stops: Sequence[str]) -> Stop | None:
    """The stop string completed first behind ``text[:known]``; of several, the longest.

    Args:
        text: the text so far.
        known: how much of it was searched before; a match may begin there but not end.
        stops: non-empty strings.
    """
    found = []
    for stop in stops:
        start = text.find(stop, max(0, known - len(stop) + 1))
        if start >= 0:
            found.append(Stop(stop, start))
    return min(found, key=lambda stop: (stop.end, stop.start), default=None)


def count_held(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of ``text`` may be the beginning of a stop string."""
    longest = max((len(stop) for stop in stops), default=1)
    for count in range(min(len(text), longest - 1), 0, -1):
        if any(len(stop) > count and text.endswith(stop[:count]) for stop in stops):
            return count
    return 0
