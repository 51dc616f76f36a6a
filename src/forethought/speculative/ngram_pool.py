"""What followed which n-gram: the pool of TensorRT-LLM's n-gram decoding.

A *pattern* is 1 to N consecutive tokens, its *matches* are the up to D tokens that followed it,
told apart by their tokens and kept in the order in which they were first seen. A text is learnt as
it grows: a match is stored once, when its D tokens are there, so a step costs what it has added,
and no stored match is ever the stump of one that has grown since. Where no match of a pattern is
complete, the stumps at the end of the text itself are looked at (runs and short loops live there).

Each owner has patterns of its own, and no owner's tokens are ever shown to another. The whole is
bounded: the patterns that were used longest ago leave, of the owner that was active longest ago.
Knows nothing about requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

Pattern = tuple[int, ...]
Match = tuple[int, ...]

MOST_MATCHES = 64
"""Most matches that one pattern keeps. The first and the last are the only ones ever answered."""


@dataclass(eq=False, slots=True)
class _Shelf:
    """The patterns of one owner; used last, stands last."""

    patterns: OrderedDict[Pattern, dict[Match, None]] = field(default_factory=OrderedDict)
    size: int = 0
    """Matches of all patterns."""


class NGramPool:
    """Matches by pattern, by owner.

    Args:
        max_ngram: N, tokens of the longest pattern.
        max_match: D, tokens of a complete match.
        keep_all: keep up to ``MOST_MATCHES`` matches of a pattern; if False one, the one that would
            be answered.
        use_oldest: answer the match that was first seen first, else the one first seen last.
        max_size: most matches of all patterns of all owners.
    """

    def __init__(
        self, max_ngram: int, max_match: int, keep_all: bool, use_oldest: bool, max_size: int
    ) -> None:
        self.max_ngram, self.max_match = max_ngram, max_match
        self._use_oldest, self._max_size = use_oldest, max_size
        self._most = MOST_MATCHES if keep_all else 1
        self._shelves: OrderedDict[Hashable, _Shelf] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        """Matches of all patterns of all owners."""
        return self._size

    @property
    def owners(self) -> list[Hashable]:
        """Those who have patterns, the one that was active last at the end."""
        return list(self._shelves)

    def matches(self, owner: Hashable, pattern: Sequence[int]) -> list[Match]:
        """What is stored for one pattern, in the order in which it was first seen."""
        shelf = self._shelves.get(owner)
        return list(shelf.patterns.get(tuple(pattern), ())) if shelf else []

    def learn(self, owner: Hashable, tokens: Sequence[int], start: int, stop: int) -> None:
        """Store what follows each pattern whose last token is at a position in [start, stop)."""
        shelf = self._shelf(owner)
        patterns, before = shelf.patterns, shelf.size
        for last in range(start, stop):
            first = max(0, last + 1 - self.max_ngram)
            window = tuple(tokens[first : last + 1 + self.max_match])
            middle = last + 1 - first
            match = window[middle:]
            for begin in range(middle):
                pattern = window[begin:middle]
                known = patterns.get(pattern)
                if known is None:
                    patterns[pattern] = {match: None}
                    shelf.size += 1
                    continue
                patterns.move_to_end(pattern)
                if match not in known:
                    shelf.size += self._add(known, match)
        self._size += shelf.size - before
        self._shrink()

    def look_up(self, owner: Hashable, tokens: Sequence[int]) -> Sequence[int]:
        """What followed the longest known pattern that ``tokens`` end in; empty if none is known.

        Of its own last tokens it finds the unfinished matches too.
        """
        shelf = self._shelf(owner)
        recent = self._recent(tokens)
        for size in range(min(self.max_ngram, len(tokens) - 1), 0, -1):
            pattern = tuple(tokens[-size:])
            known = shelf.patterns.get(pattern)
            found: Sequence[int] = ()
            if known is not None:
                shelf.patterns.move_to_end(pattern)
                found = next(iter(known) if self._use_oldest else reversed(known))
            if len(found) < self.max_match:
                stump = self._stump(tokens, recent, pattern)
                found = stump if len(stump) > len(found) else found
            if found:
                return found
        return ()

    def forget(self, owner: Hashable) -> None:
        """Drop all patterns of one owner."""
        shelf = self._shelves.pop(owner, None)
        if shelf is not None:
            self._size -= shelf.size

    def _shelf(self, owner: Hashable) -> _Shelf:
        shelf = self._shelves.get(owner)
        if shelf is None:
            shelf = self._shelves[owner] = _Shelf()
        self._shelves.move_to_end(owner)
        return shelf

    def _add(self, known: dict[Match, None], match: Match) -> int:
        """Store another match of a pattern; returns by how many it has more now.

        All matches of a pattern are equally long: those that the end of a text has cut short give
        way to longer ones, and are not taken beside them.
        """
        before, length = len(known), len(next(iter(known)))
        if len(match) < length:
            return 0
        if len(match) > length:
            known.clear()
        elif before == self._most:
            if self._use_oldest:
                return 0
            del known[next(iter(known))]
        known[match] = None
        return len(known) - before

    def _recent(self, tokens: Sequence[int]) -> list[int]:
        """The positions near the end that hold the last token again, their matches incomplete."""
        end = len(tokens)
        last = tokens[-1]
        return [at for at in range(max(0, end - self.max_match), end - 1) if tokens[at] == last]

    @staticmethod
    def _stump(tokens: Sequence[int], recent: list[int], pattern: Pattern) -> Sequence[int]:
        """The longest unfinished match of a pattern at the end of its own text."""
        size = len(pattern)
        for last in recent:
            if last + 1 >= size and tuple(tokens[last + 1 - size : last + 1]) == pattern:
                return tokens[last + 1 :]
        return ()

    def _shrink(self) -> None:
        while self._size > self._max_size:
            owner, shelf = next(iter(self._shelves.items()))
            if shelf.patterns:
                _, gone = shelf.patterns.popitem(last=False)
                shelf.size -= len(gone)
                self._size -= len(gone)
            if not shelf.patterns:
                del self._shelves[owner]
