"""Trees of what heads guess for the next places, each of them whatever stands at those before.

A static tree tries the same combinations of ranks every time (Cai et al., 2024, arXiv 2401.10774,
section 2.1.2). A tree of the likeliest takes the law of each place as it is: deep where the heads
are sure, wide where they are not, as EAGLE-2 (arXiv 2406.16858) does with one head. Knows nothing
about heads.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from forethought.speculative.draft import Draft
from forethought.speculative.drafter import DraftRequest
from forethought.speculative.tree import TreeChoices


class HeadTrees(Protocol):
    """A way to make trees."""

    depth: int
    """Most levels."""

    def nodes(self, depth: int) -> int:
        """Most nodes of a tree of so many levels."""
        ...

    def grow(self, logits: Tensor, ids: Tensor | None, requests: Sequence[DraftRequest]) -> None:
        """Set the drafts of N requests.

        Args:
            logits: ``[levels, N, V]``, of each place behind the roots; as many levels as the
                longest draft may have.
            ids: int64 ``[V]``, the target's id of each column; None: the columns are ids.
            requests: whose.
        """
        ...


class StaticTrees:
    """The same combinations of ranks every time.

    Args:
        choices: the tree.
        device: of the logits.
    """

    def __init__(self, choices: TreeChoices, device: torch.device) -> None:
        self._choices, self.depth = choices, choices.depth
        self._levels = torch.tensor([len(path) - 1 for path in choices.paths], device=device)
        self._ranks = torch.tensor(choices.ranks, device=device)

    def nodes(self, depth: int) -> int:
        """See :class:`HeadTrees`."""
        return sum(len(path) <= depth for path in self._choices.paths)

    def grow(self, logits: Tensor, ids: Tensor | None, requests: Sequence[DraftRequest]) -> None:
        """See :class:`HeadTrees`. Shorter drafts are made of the tree's first nodes."""
        sizes = [
            min(self.nodes(min(request.max_draft_len, len(logits))), request.max_nodes)
            for request in requests
        ]
        size, vocab = max(sizes), logits.shape[-1]
        width = min(max(self._choices.ranks[:size], default=0) + 1, vocab)
        likeliest = logits.topk(width, dim=-1).indices
        # A rank beyond the vocabulary repeats the last one; repeated siblings are left out.
        tokens = likeliest[self._levels[:size], :, self._ranks[:size].clamp(max=width - 1)].T
        drafted = (tokens if ids is None else ids[tokens]).tolist()  # one transfer for all
        for request, row, count in zip(requests, drafted, sizes, strict=True):
            request.draft = Draft(row[:count], self._choices.parents[:count])


class LikeliestTrees:
    """The likeliest combinations, if the places were independent of each other.

    Args:
        depth: most levels.
        most: nodes of a tree.
        floor: a combination that is less probable than this is left out.
    """

    def __init__(self, depth: int, most: int, floor: float) -> None:
        self.depth, self._most = depth, most
        self._floor = math.log(floor) if floor else -math.inf

    def nodes(self, depth: int) -> int:
        """See :class:`HeadTrees`."""
        return self._most if depth > 0 else 0

    def grow(self, logits: Tensor, ids: Tensor | None, requests: Sequence[DraftRequest]) -> None:
        """See :class:`HeadTrees`."""
        width = min(self._most, logits.shape[-1])
        found = logits.log_softmax(-1, dtype=torch.float32).topk(width, dim=-1)
        tokens = found.indices if ids is None else ids[found.indices]
        # Token ids are exact in float64, so that one transfer brings everything.
        scores, columns = torch.stack([found.values.double(), tokens.double()]).tolist()
        for place, request in enumerate(requests):
            levels = range(min(request.max_draft_len, len(logits)))
            mine = [scores[level][place] for level in levels]
            nodes = likeliest(mine, min(self._most, request.max_nodes), self._floor)
            request.draft = Draft(
                [int(columns[level][place][rank]) for _, level, rank in nodes],
                tuple(parent for parent, _, _ in nodes),
            )


def likeliest(
    scores: Sequence[Sequence[float]], most: int, floor: float = -math.inf
) -> list[tuple[int, int, int]]:
    """The likeliest nodes of the tree of all combinations of ranks.

    Args:
        scores: log-probabilities by level and rank, falling with the rank.
        most: how many.
        floor: less likely ones are left out: a log-probability.

    Returns:
        Parent, level and rank of each node, the likeliest first; a node's parent comes before it.
    """
    nodes: list[tuple[int, int, int]] = []
    # Negative log-probability, level, rank, parent, log-probability of the parent.
    open_: list[tuple[float, int, int, int, float]] = []

    def offer(level: int, rank: int, parent: int, before: float) -> None:
        if level < len(scores) and rank < len(scores[level]):
            score = before + scores[level][rank]
            if score > -math.inf and score >= floor:
                heapq.heappush(open_, (-score, level, rank, parent, before))

    offer(0, 0, -1, 0.0)
    while open_ and len(nodes) < most:
        negative, level, rank, parent, before = heapq.heappop(open_)
        offer(level + 1, 0, len(nodes), -negative)
        offer(level, rank + 1, parent, before)
        nodes.append((parent, level, rank))
    return nodes
