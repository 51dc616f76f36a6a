"""Finds where the end of a text has stood before: the longest match, at its newest places.

It answers what a suffix tree answers, but is kept as deflate keeps its window: n-grams of three
sizes lead to the places behind them, and from there the texts themselves are compared backwards.
A token costs three entries, however long the matches may be, where a tree with counts costs as many
as its depth; a text can be taken away again; and as a common n-gram keeps its newest places only, a
search is bounded too. Knows nothing about requests.
"""

from __future__ import annotations

from collections.abc import Sequence

Text = list[int]
Place = tuple[Text, int]
"""A text, and the position in it of the token behind the match."""

SIZES = (6, 3, 1)
"""Sizes of the n-grams that lead to places."""
MOST_PLACES = 16
"""Most places of one n-gram that are searched, the newest ones. More found hardly better drafts."""


class SuffixIndex:
    """Places by what stands before them.

    Args:
        max_depth: most tokens that a match is compared over, at least 1.
    """

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._sizes = tuple(size for size in SIZES if size <= max_depth)
        self._places: dict[tuple[int, ...], list[Place]] = {}

    def __len__(self) -> int:
        """N-grams that lead to places."""
        return len(self._places)

    def add(self, text: Text, start: int, stop: int) -> None:
        """Make the places at positions [start, stop) of ``text`` findable.

        The text is kept, not copied. It may grow; what it holds must not change.
        """
        all_places, sizes = self._places, self._sizes
        for at in range(max(1, start), stop):
            place = (text, at)
            window = tuple(text[max(0, at - sizes[0]) : at])
            for size in sizes:
                if size <= at:
                    ngram = window[-size:]
                    places = all_places.get(ngram)
                    if places is None:
                        all_places[ngram] = [place]
                    elif len(places) < 2 * MOST_PLACES:
                        places.append(place)
                    else:
                        places[:] = [*places[1 - MOST_PLACES :], place]

    def remove(self, text: Text) -> None:
        """Take all places of a text away; of the texts that are left it was added first."""
        for at in range(1, len(text)):
            for size in self._sizes:
                ngram = tuple(text[at - size : at]) if size <= at else ()
                places = self._places.get(ngram)
                if places and places[0][0] is text:
                    del places[0]
                    if not places:
                        del self._places[ngram]

    def find(self, tokens: Sequence[int]) -> tuple[int, list[Place]]:
        """The longest match of the end of ``tokens``.

        Returns:
            Tokens matched, 0 if nothing is, at most ``max_depth``; the newest of the places behind
            such a match, the oldest of them first.
        """
        end = tuple(tokens[-self._max_depth :])
        for size in self._sizes:
            places = self._places.get(end[-size:]) if size <= len(end) else None
            if places:
                return _longest(end, size, places[-MOST_PLACES:])
        return 0, []


def _longest(end: tuple[int, ...], length: int, places: list[Place]) -> tuple[int, list[Place]]:
    """Those of ``places``, which match in ``length`` tokens, that match in the most."""
    if length == SIZES[0]:
        depth, whole = len(end), list(end)
        matching = [(text, at) for text, at in places if text[max(0, at - depth) : at] == whole]
        if matching:
            return depth, matching
    while length < len(end):
        token, back = end[-1 - length], length + 1
        longer = [(text, at) for text, at in places if at >= back and text[at - back] == token]
        if not longer:
            break
        places, length = longer, back
    return length, places
