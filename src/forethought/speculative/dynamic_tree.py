"""Builds the drafts of a head level by level: static trees of ranks, and EAGLE-2's dynamic trees.

Tokens stay on the device meanwhile: each level's forward is queued behind the previous one, and all
drafts are transferred to the host together.

Dynamic trees: Li et al., 2024 (arXiv 2406.16858). A node's score is the log-probability of its path
under the head. The k best nodes of each level are expanded, each with its k most probable children;
in the end the best nodes of all levels are kept. Of equal scores the node that was made first wins,
and a child never scores more than its parent, so the kept nodes form a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from forethought.model.batch import ancestors
from forethought.speculative.draft import Draft
from forethought.speculative.draft_module import DraftModuleRunner
from forethought.speculative.drafter import DraftRequest
from forethought.speculative.tree import TreeChoices, tokens_of_ranks


class TreeBuilder(Protocol):
    """Builds the drafts of a step with a draft module."""

    def nodes(self, depth: int) -> int:
        """KV slots behind the root that a draft of ``depth`` levels needs."""
        ...

    def grow(self, runner: DraftModuleRunner, requests: Sequence[DraftRequest]) -> None:
        """Set the drafts of ``requests``."""
        ...


class StaticTreeBuilder:
    """A static tree of ranks, or a chain.

    Args:
        choices: the tree.
        device: of the draft module.
    """

    def __init__(self, choices: TreeChoices, device: torch.device) -> None:
        self._choices = choices
        self._levels = _levels(choices, device)

    def nodes(self, depth: int) -> int:
        """Nodes of the tree down to ``depth``."""
        return self._choices.num_nodes(depth)

    def grow(self, runner: DraftModuleRunner, requests: Sequence[DraftRequest]) -> None:
        """See :class:`TreeBuilder`. Short drafts take no part in the forwards of deeper levels."""
        requests = sorted(requests, key=self._size, reverse=True)
        sizes = list(map(self._size, requests))
        root = runner.begin(requests, sum(level.inner for level in self._levels))
        states, logits = root.output
        drawn: list[Tensor] = []
        for depth, level in enumerate(self._levels, start=1):
            tokens = level.draw(logits, runner.network.ids)
            drawn.append(tokens)
            further = sum(size > level.end for size in sizes)
            if not further:
                break
            root.workspace.keep(further)
            token_ids, states = level.grown(tokens[:further], states[: further * level.width])
            seen = None if level.seen is None else level.seen.expand(further, -1, -1)
            states, logits = runner.advance(root, depth, token_ids, states, seen)
        self._finish(requests, sizes, drawn)

    def _size(self, request: DraftRequest) -> int:
        """Number of nodes of its draft."""
        return min(self.nodes(request.max_draft_len), request.max_nodes)

    def _finish(
        self, requests: Sequence[DraftRequest], sizes: Sequence[int], drawn: Sequence[Tensor]
    ) -> None:
        """Transfer all tokens to the host at once, and set the drafts."""
        flat: list[int] = torch.cat([level.flatten() for level in drawn]).tolist()
        drafts: list[list[int]] = [[] for _ in requests]
        begin = 0
        for tokens in drawn:
            rows, width = tokens.shape
            for row in range(rows):
                drafts[row] += flat[begin : begin + width]
                begin += width
        is_chain = self._choices.depth == len(self._choices)
        for request, tokens_, size in zip(requests, drafts, sizes, strict=True):
            parents = None if is_chain else self._choices.parents[:size]
            request.draft = Draft(tokens_[:size], parents)


class _StaticLevel:
    """The nodes of one depth.

    Attributes:
        begin, end: which nodes of the tree they are.
        width: nodes of the level above that have children; 1 for the root.
        inner: nodes of this level that have children.
        seen: bool ``[inner, read]``, which of the nodes with children so far are visible to each of
            these; None: all.
    """

    def __init__(
        self, choices: TreeChoices, above: Sequence[int], nodes: range, read: list[int]
    ) -> None:
        parents, ranks = choices.parents, choices.ranks
        self.begin, self.end, self.width = nodes.start, nodes.stop, len(above)
        inner = [node for node in nodes if node in set(parents)]
        self.nodes, self.inner = inner, len(inner)
        row_of = {node: row for row, node in enumerate(above)}
        self._rows = torch.tensor([row_of[parents[node]] for node in nodes])
        self._ranks = torch.tensor([ranks[node] for node in nodes])
        self._max_rank = max(ranks[node] for node in nodes)
        self._inner = torch.tensor([node - nodes.start for node in inner], dtype=torch.int64)
        self._inner_rows = self._rows[self._inner]
        self._is_single = len(nodes) == self.width == 1
        seen = ancestors(parents)[inner][:, read + inner]
        self.seen = None if bool(seen.all()) else seen

    def to(self, device: torch.device) -> _StaticLevel:
        """Its tensors on a device."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        return self

    def draw(self, logits: Tensor, ids: Tensor | None) -> Tensor:
        """logits ``[rows * width, D]`` -> int64 ``[rows, nodes]``, the target's ids."""
        if self._is_single and not self._max_rank:
            tokens = logits.argmax(-1, keepdim=True)  # a chain's level, without an index
        else:
            grouped = logits.view(-1, self.width, logits.shape[-1])
            tokens = tokens_of_ranks(grouped, self._rows, self._ranks, self._max_rank)
        return tokens if ids is None else ids[tokens]

    def grown(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of the nodes with children ``[rows * inner]``, and their parents' states.

        Args:
            tokens: ``[rows, nodes]``.
            states: ``[rows * width, hidden]``.
        """
        if self._is_single:
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


class Expansion:
    """The trees of B requests while they are built. All tensors are on the head's device.

    Args:
        width: k.

    Attributes:
        beams: int64 ``[B, k]``: the tokens of the last level that go on, as the head's ids.
        above: int64 ``[B, k]``: which beam of the level above each of them follows.
        seen: bool ``[B, k, levels * k]``: of the beams of all levels so far, which each of the last
            ones sees, itself included.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.beams: Tensor
        self.above: Tensor
        self.seen: Tensor
        self._beam_scores: Tensor
        self._beam_nodes: Tensor
        self._tokens: list[Tensor] = []  # each [B, nodes of the level]
        self._scores: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._num_made = 0

    def begin(self, logits: Tensor) -> None:
        """The children of the roots; logits ``[B, D]``."""
        scores, tokens = logits.float().log_softmax(-1).topk(self.width)
        self._add(tokens, scores, torch.full_like(tokens, -1))
        places = torch.arange(self.width, device=tokens.device).expand_as(tokens)
        self.beams, self._beam_scores, self._beam_nodes = tokens, scores, places
        self.above = torch.zeros_like(tokens)
        own = torch.eye(self.width, dtype=torch.bool, device=tokens.device)
        self.seen = own.expand(len(tokens), -1, -1)

    def grow(self, logits: Tensor) -> None:
        """The children of the beams, and the beams among them; logits ``[B * k, D]``."""
        rows, width = len(self.beams), self.width
        scores, tokens = logits.float().log_softmax(-1).topk(width)
        scores = (scores.view(rows, width, width) + self._beam_scores[:, :, None]).flatten(1)
        tokens = tokens.view(rows, width * width)
        first = self._num_made
        self._add(tokens, scores, self._beam_nodes.repeat_interleave(width, 1))
        chosen = top_indices(scores, width)
        self.above = chosen // width
        self.beams, self._beam_scores = tokens.gather(1, chosen), scores.gather(1, chosen)
        self._beam_nodes = chosen + first
        past = self.seen.gather(1, self.above[..., None].expand(-1, -1, self.seen.shape[-1]))
        own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(rows, -1, -1)
        self.seen = torch.cat([past, own], -1)

    def kept(self, total: int, ids: Tensor | None) -> Tensor:
        """The best ``total`` nodes, best first: int64 ``[B, total, 3]`` of number, token, parent.

        Numbers say in which order nodes were made; the parent is one, or -1.

        Args:
            total: how many, if there are so many.
            ids: the target's id of each of the head's tokens; None: the same ids.
        """
        scores, tokens = torch.cat(self._scores, 1), torch.cat(self._tokens, 1)
        chosen = top_indices(scores, min(total, scores.shape[1]))
        tokens = tokens.gather(1, chosen)
        parents = torch.cat(self._parents, 1).gather(1, chosen)
        return torch.stack([chosen, tokens if ids is None else ids[tokens], parents], -1)

    def _add(self, tokens: Tensor, scores: Tensor, parents: Tensor) -> None:
        self._tokens.append(tokens)
        self._scores.append(scores)
        self._parents.append(parents)
        self._num_made += tokens.shape[1]


def top_indices(scores: Tensor, count: int) -> Tensor:
    """int64 ``[B, count]``: indices of the highest scores ``[B, N]``; of equal ones the first."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def tree_of(nodes: Sequence[list[int]], count: int) -> Draft:
    """The first ``count`` of some nodes of :meth:`Expansion.kept`, in the order they were made."""
    kept = sorted(nodes[:count])
    node_of = {-1: -1, **{number: node for node, (number, _, _) in enumerate(kept)}}
    return Draft([token for _, token, _ in kept], tuple(node_of[parent] for _, _, parent in kept))


class DynamicTreeBuilder:
    """Builds dynamic trees; see this module's docstring.

    Args:
        width: k.
        total: nodes that are kept at most.
    """

    def __init__(self, width: int, total: int) -> None:
        self._width, self._total = width, total

    def nodes(self, depth: int) -> int:
        """The nodes that are kept, or the beams that are computed, whichever are more."""
        made = self._width + (depth - 1) * self._width**2
        return max(min(self._total, made), self._width * (depth - 1))

    def grow(self, runner: DraftModuleRunner, requests: Sequence[DraftRequest]) -> None:
        """See :class:`TreeBuilder`. Requests with fewer KV slots get narrower trees, separately."""
        shapes: dict[tuple[int, int], list[DraftRequest]] = {}
        for request in requests:
            shapes.setdefault(self._shape(request, runner.network.vocab_size), []).append(request)
        for (depth, width), group in shapes.items():
            self._grow(runner, group, depth, width)

    def _shape(self, request: DraftRequest, vocab_size: int) -> tuple[int, int]:
        """Depth and width that fit into the request's KV slots."""
        depth = min(request.max_draft_len, request.max_nodes)
        return depth, max(1, min(self._width, vocab_size, request.max_nodes // max(1, depth - 1)))

    def _grow(
        self, runner: DraftModuleRunner, requests: Sequence[DraftRequest], depth: int, width: int
    ) -> None:
        expansion, ids = Expansion(width), runner.network.ids
        root = runner.begin(requests, width * (depth - 1))
        output = root.output
        with torch.inference_mode():
            expansion.begin(output.logits)
            states = output.states.unsqueeze(1)  # [B, 1, hidden], later [B, k, hidden]
            for level in range(1, depth):
                beams = expansion.beams.flatten()
                above = expansion.above[..., None].expand(-1, -1, states.shape[-1])
                output = runner.advance(
                    root,
                    level,
                    beams if ids is None else ids[beams],
                    states.gather(1, above).flatten(0, 1),
                    expansion.seen,
                )
                expansion.grow(output.logits)
                states = output.states.view(len(requests), width, -1)
            kept = expansion.kept(self._total, ids).tolist()  # one transfer for all
        for request, nodes in zip(requests, kept, strict=True):
            request.draft = tree_of(nodes, request.max_nodes)
