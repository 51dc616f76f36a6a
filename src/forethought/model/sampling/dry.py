"""DRY ("don't repeat yourself"): penalties for the tokens that would continue a repeat.

If the last n tokens occur earlier in the text and token t follows them there, then t would make the
repeat longer, and its logit is lowered by ``multiplier * base ** (n - allowed_length)``, n being
the largest such number, where that is at least ``allowed_length``::

    a b c x y a b c         x would continue a repeat of n = 3 tokens

A repeat does not reach across a sequence breaker, and a token that is one is not penalised. Both,
and the names and defaults of the parameters, are those of llama.cpp, whose sampler follows the
proposal of P. E. Weidmann (text-generation-webui, pull request 5677, 2024). A repeat counts up
to the length whose penalty float32 holds, at most 1000 tokens more than are allowed.

Plain Python; all repeats are found in one pass, by the Z-algorithm (D. Gusfield, Algorithms on
Strings, Trees, and Sequences, 1997, section 1.3).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from forethought.config.sampling import SamplingParams

MAX_PENALTY = 2.0**126
"""Larger ones would overflow in float32."""
MAX_BREAKER_TOKENS = 64
"""Most tokens of a breaker."""
_MAX_EXPONENT = 1000
"""Largest power of a base, so that the tokens to compare are bounded."""
_LOG_MAX_FLOAT = 88.7228391
"""Logarithm of the largest float32, as llama.cpp writes it."""


@dataclass(slots=True)
class BreakerTree:
    """Breakers of several tokens, as a tree of those after the first one: what begins alike is
    compared once, however many breakers there are.

    Attributes:
        heads: first tokens of the breakers that end at this node.
        branches: the node of each token that may follow.
    """

    heads: frozenset[int] = frozenset()
    branches: dict[int, BreakerTree] = field(default_factory=dict)

    def add(self, heads: frozenset[int], rest: Sequence[int]) -> None:
        """A breaker that begins with one of ``heads``, and goes on with ``rest``."""
        node = self
        for token in rest:
            node = node.branches.setdefault(token, BreakerTree())
        if not heads <= node.heads:
            node.heads = node.heads | heads if node.heads else heads  # large sets are shared


@dataclass(frozen=True, slots=True)
class SequenceBreakers:
    """Texts that no repeat reaches across, in the tokens of one vocabulary.

    Attributes:
        is_breaker: one byte per id, 1 where the text of the token contains a breaker; ids beyond
            are none.
        tree: the breakers of several tokens.
    """

    is_breaker: bytes
    tree: BreakerTree = field(default_factory=BreakerTree)

    def breaks(self, token: int) -> bool:
        """Whether a token contains a breaker."""
        return token < len(self.is_breaker) and self.is_breaker[token] == 1

    def distance(self, newest_first: Sequence[int]) -> int:
        """Number of tokens after the last breaker; all, if there is none."""
        for at, token in enumerate(newest_first):
            length = self._length(newest_first, at, token)
            if length:
                return at + 1 - length
        return len(newest_first)

    def _length(self, newest_first: Sequence[int], at: int, token: int) -> int:
        """Tokens of the longest breaker that begins with ``token``, at an index; 0: none does."""
        length, node = int(self.breaks(token)), self.tree
        for index in range(at - 1, -1, -1):
            branch = node.branches.get(newest_first[index])
            if branch is None:
                break
            node = branch
            if token in node.heads:
                length = at + 1 - index
        return length


def dry_penalties(
    params: SamplingParams, tokens: Sequence[int], breakers: SequenceBreakers | None
) -> dict[int, float]:
    """What is subtracted from the logits of tokens, by id; ``tokens`` are prompt and output."""
    last_n, allowed = params.dry_penalty_last_n, params.dry_allowed_length
    recent = tokens if last_n < 0 else tokens[max(0, len(tokens) - last_n) :]
    newest_first = recent[::-1]
    longest = allowed + _max_exponent(params.dry_base)
    if breakers is not None:
        longest = min(longest, breakers.distance(newest_first[: longest + MAX_BREAKER_TOKENS]))
    if longest < allowed:
        return {}
    lengths = dict[int, int]()
    for at, length in repeats(newest_first, longest):
        token = newest_first[at - 1]  # what followed the earlier occurrence
        if length >= allowed and length > lengths.get(token, 0):
            lengths[token] = length
    return {
        token: min(MAX_PENALTY, params.dry_multiplier * params.dry_base ** (length - allowed))
        for token, length in lengths.items()
        if breakers is None or not breakers.breaks(token)
    }


def repeats(newest_first: Sequence[int], longest: int) -> Iterator[tuple[int, int]]:
    """Where the newest tokens occur earlier, and how many of them, up to ``longest``: the common
    prefixes of a sequence and of what begins at each index of it from 1 on, without empty ones.
    """
    lengths = dict[int, int]()
    begin = end = 0  # of the prefix that has been seen furthest
    for at in _occurrences(newest_first):
        length = min(lengths.get(at - begin, 0), end - at) if at < end else 0
        limit = min(longest, len(newest_first) - at)
        while length < limit and newest_first[length] == newest_first[at + length]:
            length += 1
        if at + length > end:
            begin, end = at, at + length
        lengths[at] = length
        yield at, length


def _occurrences(newest_first: Sequence[int]) -> Iterator[int]:
    """The earlier positions of the newest token."""
    if not newest_first:
        return
    newest, at = newest_first[0], 0
    try:
        while True:
            at = newest_first.index(newest, at + 1)
            yield at
    except ValueError:
        return


def _max_exponent(base: float) -> int:
    """Largest power of the base that counts, which float32 holds; of 1, all are alike."""
    return 0 if base == 1.0 else int(min(_MAX_EXPONENT, _LOG_MAX_FLOAT / math.log(base)))
