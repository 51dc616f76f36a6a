"""``dry_sequence_breakers`` in the tokens of a vocabulary.

A breaker is found in a token whose text contains it, or in several: one that ends with a beginning
of it, and the tokens of the rest as the tokenizer writes it. Where a model splits a breaker in
another way, it is not seen.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice

from forethought.model.sampling import SequenceBreakers
from forethought.model.sampling.dry import MAX_BREAKER_TOKENS, BreakerTree

_SPACE = "▁"
"""As sentencepiece writes it in the names of tokens."""
_LAST = "\U0010ffff"
"""After all letters of names."""
_MAX_KNOWN = 64
"""Sets of breakers that are remembered."""


class BreakerTokens:
    """Of one vocabulary. Safe to use from several threads.

    Args:
        names: makes the names of the tokens -> their ids, once they are needed.
        byte_letters: letter -> byte, as byte-level BPE names tokens.
        byte_values: id -> byte, of tokens of one raw byte.
        encode: the tokens of a text that continues another one.
    """

    def __init__(
        self,
        names: Callable[[], Mapping[str, int]],
        byte_letters: Mapping[str, int],
        byte_values: Mapping[int, int],
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        self._read_names, self._encode = names, encode
        self._byte_values = byte_values
        self._letters = {byte: letter for letter, byte in byte_letters.items()}
        self._known = dict[tuple[str, ...], SequenceBreakers]()

    def knows(self, texts: tuple[str, ...]) -> bool:
        """Whether ``of`` has its answer at hand; else it takes up to some 0.1 s."""
        return texts in self._known

    def of(self, texts: tuple[str, ...]) -> SequenceBreakers:
        """The breakers in tokens. Raises as ``Tokenizer.encode``."""
        breakers = self._known.get(texts)
        if breakers is None:
            breakers = self._known[texts] = self._find(texts)
            for oldest in list(islice(self._known, max(0, len(self._known) - _MAX_KNOWN))):
                self._known.pop(oldest, None)
        return breakers

    @cached_property
    def _names(self) -> Mapping[str, int]:
        return self._read_names()

    @cached_property
    def _reversed_names(self) -> list[tuple[str, int]]:
        """Sorted, so that the names with one ending are neighbours."""
        return sorted((name[::-1], token) for name, token in self._names.items())

    @cached_property
    def _is_byte_level(self) -> bool:
        space = self._letters[ord(" ")]
        return any(space in name for name in self._names)

    def _find(self, texts: tuple[str, ...]) -> SequenceBreakers:
        is_breaker = bytearray(1 + max(self._names.values(), default=0))
        heads = dict[str, frozenset[int]]()
        tree = BreakerTree()
        for token in self._containing(texts):
            is_breaker[token] = 1
        for text in dict.fromkeys(texts):
            for cut in range(1, len(text)):
                begin, rest = text[:cut], tuple(self._encode(text[cut:]))
                if begin not in heads:
                    heads[begin] = frozenset(self._ending(begin))
                if heads[begin] and 0 < len(rest) < MAX_BREAKER_TOKENS:
                    tree.add(heads[begin], rest)
            whole = tuple(self._encode(text))
            if len(whole) == 1:
                is_breaker[whole[0]] = 1
            elif 1 < len(whole) <= MAX_BREAKER_TOKENS:
                tree.add(frozenset(whole[:1]), whole[1:])
        return SequenceBreakers(bytes(is_breaker), tree)

    def _spellings(self, text: str) -> set[str]:
        """A text as names of tokens write it."""
        if self._is_byte_level:
            return {"".join(self._letters[byte] for byte in text.encode())}
        return {text, text.replace(" ", _SPACE)}

    def _containing(self, texts: Collection[str]) -> Iterator[int]:
        """The tokens that contain any of the texts."""
        if not texts:
            return
        single_bytes = {encoded[0] for text in texts if len(encoded := text.encode()) == 1}
        yield from (token for token, byte in self._byte_values.items() if byte in single_bytes)
        spellings = (spelling for text in texts for spelling in self._spellings(text))
        contains = re.compile("|".join(map(re.escape, spellings))).search
        yield from (token for name, token in self._names.items() if contains(name))

    def _ending(self, text: str) -> Iterator[int]:
        for spelling in self._spellings(text):
            first = spelling[::-1]
            begin = bisect_left(self._reversed_names, (first, -1))
            end = bisect_left(self._reversed_names, (first + _LAST, -1))
            yield from (token for _, token in self._reversed_names[begin:end])
