"""What is likely to come behind places that look alike: what came behind them, counted.

A token's probability is its share of the places; a path's is the product along it. The sum over all
nodes of a draft is the number of its tokens that are expected to be accepted (SuffixDecoding, 2024,
section 4). Knows nothing about how the places were found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from forethought.speculative.suffix_index import Place

Ends = list[list[int]]
"""The tokens behind some places, the newest place first. They are as long as their texts go on."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """A proposal; ``tokens`` and ``parents`` are those of a ``Draft``."""

    tokens: Sequence[int]
    parents: tuple[int, ...] | None
    score: float
    """Tokens that are expected to be accepted."""


NOTHING = Continuation((), None, 0.0)


def chain(places: Sequence[Place], depth: int, min_prob: float) -> Continuation:
    """The likeliest next token, again and again, at most ``depth`` times.

    It ends where the path's probability would fall below ``min_prob``. Of equally likely tokens it
    takes the newest.
    """
    ends = [text[at : at + depth] for text, at in reversed(places)]
    tokens: list[int] = []
    prob, score = 1.0, 0.0
    while len(ends) > 1:
        level = len(tokens)
        ends = [end for end in ends if len(end) > level]
        heads = [end[level] for end in ends]
        if not heads:
            break
        token = max(dict.fromkeys(heads), key=heads.count)
        count = heads.count(token)
        if count < len(heads):
            prob *= count / len(heads)
            ends = [end for end in ends if end[level] == token]
        if prob < min_prob:
            return Continuation(tokens, None, score)
        tokens.append(token)
        score += prob
    rest = ends[0][len(tokens) :] if ends else []
    return Continuation(tokens + rest, None, score + prob * len(rest))


def tree(places: Sequence[Place], depth: int, nodes: int, min_prob: float) -> Continuation:
    """The likeliest ``nodes`` nodes of all, at most ``depth`` deep.

    None of a path less likely than ``min_prob``. A parent is at least as likely as its children, so
    it always comes before them.
    """
    tokens: list[int] = []
    parents: list[int] = []
    score, pushed = 0.0, 0
    heap: list[tuple[float, int, int, int, int, Ends]] = []
    ends = [text[at : at + depth] for text, at in reversed(places)]
    prob, node, level = 1.0, -1, 0
    while True:
        for share, token, reaching in _branches(ends, level):
            if prob * share >= min_prob:
                heappush(heap, (-prob * share, pushed, token, node, level, reaching))
                pushed += 1
        if not heap:
            break
        negative, _, token, parent, above, ends = heappop(heap)
        prob, node, level = -negative, len(tokens), above + 1
        tokens.append(token)
        parents.append(parent)
        score += prob
        if len(tokens) == nodes:
            break
    thin = parents == list(range(-1, len(parents) - 1))
    return Continuation(tokens, None if thin else tuple(parents), score)


def _branches(ends: Ends, level: int) -> Iterator[tuple[float, int, Ends]]:
    """The tokens at ``level``, each with its share and the ends that go through it."""
    ends = [end for end in ends if len(end) > level]
    through: dict[int, Ends] = {}
    for end in ends:
        through.setdefault(end[level], []).append(end)
    for token, reaching in through.items():
        yield len(reaching) / len(ends), token, reaching
