"""The tokens with which a stop string may end, so that its text is read when one is decoded.

Several steps of a generation with stop strings run in one call of the engine, in which it makes
none after such a token. A stop string that ends with another one (a tokenizer that joins its tokens
by spaces) is found at the end of the call; the tokens after it are dropped, as those of a draft
are.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

_SEPARATOR = "\n"
_SPACE = "▁"
"""As sentencepiece writes it in the names of tokens."""
_MAX_SHARE = 16
"""Letters that more than one of this number of tokens has are too frequent to wait for."""


class StopCandidates:
    """Of one vocabulary.

    Args:
        names: of the tokens -> their ids.
        byte_letters: letter -> byte, as byte-level BPE names tokens.
        byte_values: id -> byte, of tokens of one raw byte.
    """

    def __init__(
        self,
        names: Mapping[str, int],
        byte_letters: Mapping[str, int],
        byte_values: Mapping[int, int],
    ) -> None:
        self._ids = list(names.values())
        self._text = _SEPARATOR.join(name.replace(_SEPARATOR, " ") for name in names)
        self._ends = list(accumulate(len(name) + len(_SEPARATOR) for name in names))
        self._letters = {byte: letter for letter, byte in byte_letters.items()}
        self._byte_values = byte_values
        self._ids_of = lru_cache(maxsize=256)(self._find)

    def of(self, stops: Sequence[str]) -> array[int] | None:
        """Int64 ids in rising order; None: they are frequent, and each token is read."""
        ids = set[int]()
        for letter in {stop[-1] for stop in stops}:
            matching = self._ids_of(letter)
            if matching is None:
                return None
            ids |= matching
        return array("q", sorted(ids))

    def _find(self, letter: str) -> frozenset[int] | None:
        """Ids of the tokens that have the letter, or its last byte."""
        last_byte = letter.encode("utf-8", "replace")[-1]
        spellings = {letter, self._letters[last_byte]} - {_SEPARATOR}
        if letter == " ":
            spellings.add(_SPACE)
        ids = {token for token, byte in self._byte_values.items() if byte == last_byte}
        for spelling in spellings:
            position = self._text.find(spelling)
            while position >= 0:
                number = bisect_right(self._ends, position)
                ids.add(self._ids[number])
                if len(ids) * _MAX_SHARE > len(self._ids):
                    return None
                position = self._text.find(spelling, self._ends[number])
        return frozenset(ids)
