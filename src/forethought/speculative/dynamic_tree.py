"""EAGLE-2's dynamic draft trees (Li et al., 2024, arXiv 2406.16858), built level by level.

Tokens stay on the device meanwhile: each level's forward is queued behind the previous one, or all
levels are one CUDA graph, and all drafts are transferred to the host together. A node's score is
the log-probability of its path under the head. The k best nodes of each level are expanded, each
with its k most probable children; in the end the best nodes of all levels are kept. Of equal scores
the node that was made first wins, and a child never scores more than its parent, so the kept nodes
form a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from forethought.config.tree import TreeShape
from forethought.model import backends
from forethought.speculative.draft_module import DraftModuleRunner, ModuleOutput
from forethought.speculative.drafter import Draft, DraftRequest
from forethought.speculative.tree import Advance, DraftGraphs, ReadNodes, TreeBuilder


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
        indices = torch.arange(self.width, device=tokens.device).expand_as(tokens)
        self.beams, self._beam_scores, self._beam_nodes = tokens, scores, indices
        self.above = torch.zeros_like(tokens)
        diagonal = torch.eye(self.width, dtype=torch.bool, device=tokens.device)
        self.seen = diagonal.expand(len(tokens), -1, -1)

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
        diagonal = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(rows, -1, -1)
        self.seen = torch.cat([past, diagonal], -1)

    def kept(self, total: int, ids: Tensor | None) -> Tensor:
        """The best ``total`` nodes, best first: int64 ``[B, total, 3]`` of number, token, parent.

        Numbers say in which order nodes were made; the parent is one, or -1.

        Args:
            total: the maximum.
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
    best = sorted(nodes[:count])
    node_of = {-1: -1, **{number: node for node, (number, _, _) in enumerate(best)}}
    return Draft([token for _, token, _ in best], tuple(node_of[parent] for _, _, parent in best))


class DynamicTreeBuilder(TreeBuilder):
    """Builds dynamic trees; see this module's docstring.

    Args:
        width: k.
        total: nodes that are kept at most.
    """

    def __init__(self, width: int, total: int) -> None:
        self._width, self._total = width, total
        self._graphs: dict[DraftModuleRunner, DraftGraphs] = {}

    def nodes(self, depth: int) -> int:
        """The nodes that are kept, or the beams that are computed, whichever are more."""
        num_nodes = self._width + (depth - 1) * self._width**2
        return max(min(self._total, num_nodes), self._width * (depth - 1))

    @override
    def grow(self, runner: DraftModuleRunner, requests: Sequence[DraftRequest]) -> None:
        """Requests with fewer KV slots get narrower trees, separately."""
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
        if runner.network.draft_trees is not None:
            trees = runner.draft_trees(requests, TreeShape(depth, width, self._total))
            for request, nodes in zip(requests, trees, strict=True):
                request.draft = tree_of(nodes, request.max_nodes)
            return
        ids = runner.network.ids
        nodes_of = self._grow_by_graph(runner, requests, depth, width)
        if nodes_of is None:
            root = runner.begin(requests, width * (depth - 1))
            with torch.inference_mode():
                nodes_of = self._levels(
                    root.output, partial(runner.advance, root), ids, depth, width
                )
        for request, nodes in zip(requests, nodes_of.tolist(), strict=True):  # one transfer for all
            request.draft = tree_of(nodes, request.max_nodes)

    def _grow_by_graph(
        self, runner: DraftModuleRunner, requests: Sequence[DraftRequest], depth: int, width: int
    ) -> Tensor | None:
        """The kept nodes of all trees, as of ``Expansion.kept``; None: there is no graph."""
        if runner.graphs is None:
            return None
        if runner not in self._graphs:
            self._graphs[runner] = backends.cuda().draft_graphs(runner)
        ids, read = runner.network.ids, ReadNodes.of_beams(width, depth)

        def grow(output: ModuleOutput, advance: Advance) -> Tensor:
            return self._levels(output, advance, ids, depth, width)

        num_deeper = [len(requests)] * (depth - 1)
        return self._graphs[runner].draft(requests, read, num_deeper, grow)

    def _levels(
        self, output: ModuleOutput, advance: Advance, ids: Tensor | None, depth: int, width: int
    ) -> Tensor:
        """Build the trees from the outputs at the roots; see ``Expansion.kept``."""
        expansion, rows = Expansion(width), len(output.logits)
        expansion.begin(output.logits)
        states = output.states.unsqueeze(1)  # [B, 1, hidden], later [B, k, hidden]
        for level in range(1, depth):
            beams = expansion.beams.flatten()
            above = expansion.above[..., None].expand(-1, -1, states.shape[-1])
            token_ids, states = beams if ids is None else ids[beams], states.gather(1, above)
            output = advance(level, token_ids, states.flatten(0, 1), expansion.seen)
            expansion.grow(output.logits)
            states = output.states.view(rows, width, -1)
        return expansion.kept(self._total, ids)
