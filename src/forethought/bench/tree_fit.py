"""A static tree of drafts that fits what was measured: greedy expansion, as for Medusa.

Cai et al., 2024 (arXiv 2401.10774), section 2.3.3 and its appendix on tree construction: with the
ranks of different levels taken as independent, a node is accepted with the product of the chances
on its path, and the expected number of accepted tokens is the sum over all nodes. Adding the
likeliest node that hangs on the tree, again and again, gives the best tree of each size. Knows
nothing about how a profile was measured.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

RankPath = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AcceptanceProfile:
    """How often the drafter's r-th likeliest token at a level was right, its parent being right."""

    chances: tuple[tuple[float, ...], ...]
    """One row per level, from the root's children down; entry r is that of rank r, from 0."""

    def chance(self, path: RankPath) -> float:
        """Of all tokens on a path together."""
        product = 1.0
        for level, rank in enumerate(path):
            product *= self.chances[level][rank]
        return product


@dataclass(frozen=True, slots=True)
class FittedTree:
    """The best tree of its size, as far as the profile tells."""

    choices: tuple[RankPath, ...]
    """All nodes, sorted by length, then by value."""
    acceptance_length: float
    """Tokens per step to expect: 1 and the chances of all nodes."""

    @property
    def depth(self) -> int:
        """Tokens on the longest path."""
        return max(map(len, self.choices), default=0)

    def to_dict(self) -> dict[str, object]:
        """Plain values."""
        return {
            "choices": [list(path) for path in self.choices],
            "nodes": len(self.choices),
            "depth": self.depth,
            "acceptance_length": round(self.acceptance_length, 3),
        }


def fit_tree(profile: AcceptanceProfile, nodes: int) -> FittedTree:
    """The tree of at most ``nodes`` nodes with the most accepted tokens to expect.

    Nodes without any chance are left out. Among equals the one that comes first is taken: by
    length, then by value.
    """
    kept: list[RankPath] = []
    expected = 1.0
    heap: list[tuple[float, int, RankPath]] = []

    def offer(parent: RankPath) -> None:
        for path in _children(profile, parent):
            if (chance := profile.chance(path)) > 0:
                heapq.heappush(heap, (-chance, len(path), path))

    offer(())
    while heap and len(kept) < nodes:
        cost, _, path = heapq.heappop(heap)
        kept.append(path)
        expected -= cost
        offer(path)
    return FittedTree(tuple(sorted(kept, key=lambda path: (len(path), path))), expected)


def _children(profile: AcceptanceProfile, path: RankPath) -> Iterator[RankPath]:
    if len(path) < len(profile.chances):
        for rank in range(len(profile.chances[len(path)])):
            yield (*path, rank)


def comb(depth: int, width: int) -> tuple[RankPath, ...]:
    """The tree to measure a profile with: ``width`` ranks behind each prefix of the likeliest path.

    It has ``depth * width`` nodes, and every rank of every level is seen where the levels before
    it were right.
    """
    return tuple((*(0,) * level, rank) for level in range(depth) for rank in range(width))


class ProfileCount:
    """Counts which ranks were right, level by level.

    Args:
        depth: levels of the drafts.
        width: ranks at each.
    """

    def __init__(self, depth: int, width: int) -> None:
        self._tried = [0] * depth
        self._right = [[0] * width for _ in range(depth)]

    def record(self, drafted: Sequence[RankPath], accepted: RankPath) -> None:
        """One draft was verified.

        Args:
            drafted: its nodes, as paths of ranks.
            accepted: the path that was right, as far as it was.
        """
        inner = {path[:-1] for path in drafted}
        for level in range(len(accepted) + 1):
            if accepted[:level] in inner:
                self._tried[level] += 1
        for level, rank in enumerate(accepted):
            self._right[level][rank] += 1

    def profile(self) -> AcceptanceProfile:
        """What was found; levels that were never tried are left out."""
        return AcceptanceProfile(
            tuple(
                tuple(count / tried for count in right)
                for tried, right in zip(self._tried, self._right, strict=True)
                if tried
            )
        )
