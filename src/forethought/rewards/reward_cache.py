"""The prefix cache of a reward model: keys, values and scores by the tokens before them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class SegmentForward(Protocol):
    """Computes segments, runs of tokens, and defines the form of their KV, the states."""

    def compute(
        self, rows: Sequence[list[int]], pasts: Sequence[Sequence[Any]]
    ) -> list[tuple[Any, list[float]]]:
        """Run R segments after their pasts, in one pass.

        Args:
            rows: token ids.
            pasts: of each row, the states of the segments before it, in their order.

        Returns:
            For each row its states, and the score at each token.
        """

    def split(self, states: Any, count: int) -> tuple[Any, Any]:
        """The states of the first ``count`` tokens, and those of the others."""

    def free(self, states: Any) -> None:
        """Free states that are not needed any more."""


_LEAST_SHARED = 8
"""Tokens from which on it pays to compute what two rows have in common in a pass of its own."""


@dataclass(eq=False, slots=True)
class _Segment:
    """A run of tokens after its parent's."""

    tokens: list[int]
    parent: _Segment | None = None
    children: list[_Segment] = field(default_factory=list)
    states: Any = None
    """Its keys and values, as the forward holds them; None: not computed yet."""
    scores: list[float] = field(default_factory=list)
    """At each token."""
    used: int = 0
    """Number of the call that needed it last."""

    @property
    def path(self) -> list[_Segment]:
        """From the first segment below the root to this one."""
        path: list[_Segment] = []
        segment: _Segment | None = self
        while segment is not None and segment.parent is not None:
            path.append(segment)
            segment = segment.parent
        return path[::-1]


class RewardPrefixCache:
    """Keys, values and scores of rows of tokens; common prefixes of rows are stored once::

        root -- question -- step 1 -- step 2
                               |
                               +----- another step 2

    Args:
        forward: computes segments after those above them.
        max_tokens: kept between calls; the least recently used leaves go first.
    """

    def __init__(self, forward: SegmentForward, max_tokens: int) -> None:
        self._forward, self._max_tokens = forward, max_tokens
        self._root, self._clock, self.num_tokens = _Segment([]), itertools.count(1), 0

    def score(self, rows: Sequence[list[int]]) -> list[tuple[list[float], int]]:
        """The score at each token of each row, and how many of its tokens had to be computed.

        A token that several rows have in common is counted for the first of them.
        """
        now = next(self._clock)
        ends = [self._insert(ids) for ids in rows]
        paths = [end.path for end in ends]
        missing = [s for s in dict.fromkeys(itertools.chain(*paths)) if s.states is None]
        counted, results = set(missing), list[tuple[list[float], int]]()
        try:
            self._fill(missing)
        except BaseException:
            for segment in missing:
                self._remove(segment)
            raise
        for ids, path in zip(rows, paths, strict=True):
            for segment in path:
                segment.used = now
            new = [segment for segment in path if segment in counted]
            counted.difference_update(new)
            scores = [score for segment in path for score in segment.scores][: len(ids)]
            results.append((scores, sum(len(segment.tokens) for segment in new)))
        self._evict()
        return results

    def _fill(self, missing: Sequence[_Segment]) -> None:
        """Compute segments, parents before children, all that are ready in one pass."""
        remaining = list(missing)
        while remaining:
            waiting = set(remaining)
            ready = [segment for segment in remaining if segment.parent not in waiting]
            pasts = [[s.states for s in segment.path[:-1]] for segment in ready]
            results = self._forward.compute([segment.tokens for segment in ready], pasts)
            for segment, (states, scores) in zip(ready, results, strict=True):
                segment.states, segment.scores = states, scores
                self.num_tokens += len(segment.tokens)
            remaining = [segment for segment in remaining if segment.states is None]

    def _insert(self, ids: list[int]) -> _Segment:
        """The segment in which ``ids`` end, new or not; its path begins with them."""
        segment, at = self._root, 0
        while at < len(ids):
            rest = ids[at:]
            shared = [_num_shared(child.tokens, rest) for child in segment.children]
            best = max(range(len(shared)), key=shared.__getitem__, default=None)
            if best is None or shared[best] < min(
                _LEAST_SHARED, len(rest), len(segment.children[best].tokens)
            ):
                child = _Segment(rest, segment)
                segment.children.append(child)
                return child
            child, count = segment.children[best], shared[best]
            if count == len(rest):
                return child
            segment = child if count == len(child.tokens) else self._split(child, count)
            at += count
        return segment

    def _split(self, segment: _Segment, count: int) -> _Segment:
        """Split a segment after its first ``count`` tokens; it keeps the rest, below a new one."""
        assert segment.parent is not None, "the root has no tokens"
        upper = _Segment(segment.tokens[:count], segment.parent, [segment], used=segment.used)
        siblings = segment.parent.children
        siblings[siblings.index(segment)] = upper
        segment.parent, segment.tokens = upper, segment.tokens[count:]
        if segment.states is not None:
            upper.scores, segment.scores = segment.scores[:count], segment.scores[count:]
            upper.states, segment.states = self._forward.split(segment.states, count)
        return upper

    def _evict(self) -> None:
        """Remove leaves, the least recently used first, until the rest may stay."""
        if self.num_tokens <= self._max_tokens:
            return
        order = itertools.count()
        segments, leaves = [self._root], list[tuple[int, int, _Segment]]()
        for segment in segments:  # it grows meanwhile
            segments += segment.children
            if not segment.children and segment is not self._root:
                leaves.append((segment.used, next(order), segment))
        heapq.heapify(leaves)
        while leaves and self.num_tokens > self._max_tokens:
            _, _, leaf = heapq.heappop(leaves)
            parent = leaf.parent
            self._remove(leaf)
            if parent is not None and parent is not self._root and not parent.children:
                heapq.heappush(leaves, (parent.used, next(order), parent))

    def _remove(self, segment: _Segment) -> None:
        parent = segment.parent
        if parent is not None and segment in parent.children:
            parent.children.remove(segment)
        if segment.states is not None:
            self.num_tokens -= len(segment.tokens)
            self._forward.free(segment.states)
            segment.states = None


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
