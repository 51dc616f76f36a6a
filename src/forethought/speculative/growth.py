"""How a draft grows, level by level, from the guesses of a head that reads pairs.

Tokens stay on the device while a draft grows: each level's forward is queued behind the last one,
and all drafts come to the host together. Knows nothing about heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from forethought.speculative.draft import Draft
from forethought.speculative.drafter import DraftRequest
from forethought.speculative.pairs import Pairs
from forethought.speculative.tree import TokenTree, TreeChoices


class Growth(Protocol):
    """A way to grow drafts."""

    def nodes(self, depth: int) -> int:
        """Room behind the root that a draft of ``depth`` levels takes."""
        ...

    def grow(self, pairs: Pairs, requests: Sequence[DraftRequest]) -> None:
        """Set the drafts of ``requests``."""
        ...


class StaticGrowth:
    """A tree of ranks, of which a chain is the thinnest.

    Args:
        choices: the tree.
        device: of the head.
    """

    def __init__(self, choices: TreeChoices, device: torch.device) -> None:
        self._choices = choices
        self._levels = _levels(choices, device)

    def nodes(self, depth: int) -> int:
        """Nodes of the tree down to ``depth``."""
        return sum(len(path) <= depth for path in self._choices.paths)

    def grow(self, pairs: Pairs, requests: Sequence[DraftRequest]) -> None:
        """See :class:`Growth`. Drafts of fewer levels drop out of the forwards of later ones."""
        requests = sorted(requests, key=self._size, reverse=True)
        sizes = list(map(self._size, requests))
        begun = pairs.begin(requests, sum(level.inner for level in self._levels))
        states, logits = begun.guess
        drawn: list[Tensor] = []
        for depth, level in enumerate(self._levels, start=1):
            tokens = level.draw(logits, pairs.head.ids)
            drawn.append(tokens)
            further = sum(size > level.end for size in sizes)
            if not further:
                break
            begun.strands.keep(further)
            token_ids, states = level.grown(tokens[:further], states[: further * level.width])
            seen = None if level.seen is None else level.seen.expand(further, -1, -1)
            states, logits = pairs.advance(begun, depth, token_ids, states, seen)
        self._finish(requests, sizes, drawn)

    def _size(self, request: DraftRequest) -> int:
        """Nodes of its draft."""
        return min(self.nodes(request.max_draft_len), request.max_nodes)

    def _finish(
        self, requests: Sequence[DraftRequest], sizes: Sequence[int], drawn: Sequence[Tensor]
    ) -> None:
        """Bring all tokens to the host at once, and hand them out."""
        flat: list[int] = torch.cat([level.flatten() for level in drawn]).tolist()
        drafts: list[list[int]] = [[] for _ in requests]
        begin = 0
        for tokens in drawn:
            rows, width = tokens.shape
            for row in range(rows):
                drafts[row] += flat[begin : begin + width]
                begin += width
        thin = self._choices.depth == len(self._choices)
        for request, tokens_, size in zip(requests, drafts, sizes, strict=True):
            parents = None if thin else self._choices.parents[:size]
            request.draft = Draft(tokens_[:size], parents)


class _StaticLevel:
    """The nodes of one depth.

    Attributes:
        begin, end: which nodes of the tree they are.
        width: nodes of the level above that have children; 1 for the root.
        inner: nodes of this level that have children.
        seen: bool ``[inner, read]``, of the nodes with children so far, which each of these sees;
            None: all.
    """

    def __init__(
        self, choices: TreeChoices, above: Sequence[int], nodes: range, read: list[int]
    ) -> None:
        parents, ranks = choices.parents, choices.ranks
        self.begin, self.end, self.width = nodes.start, nodes.stop, len(above)
        inner = [node for node in nodes if node in set(parents)]
        self.nodes, self.inner = inner, len(inner)
        place = {node: number for number, node in enumerate(above)}
        self._rows = torch.tensor([place[parents[node]] for node in nodes])
        self._ranks = torch.tensor([ranks[node] for node in nodes])
        self._most = max(ranks[node] for node in nodes)
        self._inner = torch.tensor([node - nodes.start for node in inner], dtype=torch.int64)
        self._inner_rows = self._rows[self._inner]
        self._thin = len(nodes) == self.width == 1
        seen = TokenTree(parents).mask[inner][:, read + inner]
        self.seen = None if bool(seen.all()) else seen

    def to(self, device: torch.device) -> _StaticLevel:
        """Its tensors on a device."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        return self

    def draw(self, logits: Tensor, ids: Tensor | None) -> Tensor:
        """logits ``[rows * width, D]`` -> int64 ``[rows, nodes]``, the target's ids."""
        if self._thin and not self._most:
            best = logits.argmax(-1, keepdim=True)
        elif not self._most:
            best = logits.argmax(-1).view(-1, self.width)[:, self._rows]
        else:
            width = min(self._most + 1, logits.shape[-1])
            likeliest = logits.topk(width).indices.view(-1, self.width, width)
            # A rank beyond the vocabulary repeats the last one; repeated siblings are left out.
            best = likeliest[:, self._rows, self._ranks.clamp(max=width - 1)]
        return best if ids is None else ids[best]

    def grown(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Of nodes with children the tokens ``[rows * inner]``, and the states of their parents.

        Args:
            tokens: ``[rows, nodes]``.
            states: ``[rows * width, hidden]``.
        """
        if self._thin:
            return tokens.flatten(), states
        grouped = states.view(len(tokens), self.width, -1)
        return tokens[:, self._inner].flatten(), grouped[:, self._inner_rows].flatten(0, 1)


def _levels(choices: TreeChoices, device: torch.device) -> list[_StaticLevel]:
    levels: list[_StaticLevel] = []
    above, read, begin = [-1], list[int](), 0
    for depth in range(1, choices.depth + 1):
        end = begin + sum(len(path) == depth for path in choices.paths)
        levels.append(_StaticLevel(choices, above, range(begin, end), read))
        above, begin = levels[-1].nodes, end
        read = read + above
    return [level.to(device) for level in levels]
