"""Medusa: heads beside the target's own predict the next tokens all at once.

Cai et al., 2024 (arXiv 2401.10774). Head k, from 0, predicts the token k + 1 positions after the
root from the target's final hidden state that the root was sampled from, whatever the tokens in
between; so a draft costs one small forward, and nothing is computed again. A static tree selects
the same combinations of ranks in every step (section 2.1.2). The tree of the most probable nodes is
built from the heads' probs in each step: deep where they are certain, wide where they are not, as
in EAGLE-2 (arXiv 2406.16858).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from forethought.config.medusa import MedusaDecodingConfig
from forethought.config.tree import TreeChoices
from forethought.errors import ParameterError
from forethought.kv.storage import DraftKvCache
from forethought.model.hidden_states import FINAL, HiddenStateCache
from forethought.speculative.drafter import (
    Draft,
    Drafter,
    DraftRequest,
    ResourceManager,
    ScheduledRequests,
    Target,
    readable,
    root_states,
)
from forethought.speculative.heads.medusa import (
    MedusaHeads,
    RankingHeads,
    draft_heads,
)
from forethought.speculative.tree import tokens_of_ranks


class HeadTrees(Protocol):
    """Builds the drafts of a step from what the heads predict."""

    depth: int
    """Levels at most."""

    def nodes(self, depth: int) -> int:
        """Nodes of a tree of ``depth`` levels at most."""
        ...

    def grow(self, heads: RankingHeads, states: Tensor, requests: Sequence[DraftRequest]) -> None:
        """Set the drafts of N requests.

        Args:
            heads: of each position after the roots.
            states: ``[N, hidden]``, which the roots were sampled from.
            requests: N of them.
        """
        ...


class StaticTrees(HeadTrees):
    """The same tree of ranks in every step.

    Args:
        choices: the tree.
        device: of the logits.
    """

    def __init__(self, choices: TreeChoices, device: torch.device) -> None:
        self._choices, self.depth = choices, choices.depth
        self._levels = torch.tensor([len(path) - 1 for path in choices.paths], device=device)
        self._ranks = torch.tensor(choices.ranks, device=device)

    @override
    def nodes(self, depth: int) -> int:
        return self._choices.num_nodes[min(depth, self.depth)]

    @override
    def grow(self, heads: RankingHeads, states: Tensor, requests: Sequence[DraftRequest]) -> None:
        """Shorter drafts are made of the tree's first nodes."""
        logits, ids = heads(states, _num_levels(self, requests)), heads.token_map
        sizes = [
            min(self.nodes(min(request.max_draft_len, len(logits))), request.max_nodes)
            for request in requests
        ]
        size = max(sizes)
        max_rank = max(self._choices.ranks[:size], default=0)
        tokens = tokens_of_ranks(
            logits.transpose(0, 1), self._levels[:size], self._ranks[:size], max_rank
        )
        drafted = (tokens if ids is None else ids[tokens]).tolist()  # one transfer for all
        for request, row, count in zip(requests, drafted, sizes, strict=True):
            request.draft = Draft(row[:count], self._choices.draft_parents(count))


class TopTrees(HeadTrees):
    """The most probable nodes, with the positions taken as independent of each other.

    Args:
        depth: levels at most.
        max_nodes: of a tree.
        min_prob: nodes whose path is less probable than this are left out.
    """

    def __init__(self, depth: int, max_nodes: int, min_prob: float) -> None:
        self.depth, self._max_nodes = depth, max_nodes
        self._min_logprob = math.log(min_prob) if min_prob else -math.inf

    @override
    def nodes(self, depth: int) -> int:
        return self._max_nodes if depth > 0 else 0

    @override
    def grow(self, heads: RankingHeads, states: Tensor, requests: Sequence[DraftRequest]) -> None:
        count, width = _num_levels(self, requests), min(self._max_nodes, heads.vocab)
        scores, tokens = heads.most_probable(states, count, width)
        for row, request in enumerate(requests):
            row_scores = [scores[level][row] for level in range(min(request.max_draft_len, count))]
            nodes = top_nodes(
                row_scores, min(self._max_nodes, request.max_nodes), self._min_logprob
            )
            request.draft = Draft(
                [tokens[level][row][rank] for _, level, rank in nodes],
                tuple(parent for parent, _, _ in nodes),
            )


def _num_levels(trees: HeadTrees, requests: Sequence[DraftRequest]) -> int:
    return min(trees.depth, max(request.max_draft_len for request in requests))


def top_nodes(
    scores: Sequence[Sequence[float]], max_nodes: int, min_logprob: float = -math.inf
) -> list[tuple[int, int, int]]:
    """The most probable nodes of the tree of all combinations of ranks.

    Args:
        scores: log-probabilities by level and rank, falling with the rank.
        max_nodes: how many.
        min_logprob: of a node's path; less probable nodes are left out.

    Returns:
        Parent, level and rank of each node, the most probable first, parents before children.
    """
    nodes: list[tuple[int, int, int]] = []
    # Negative log-probability, level, rank, parent, log-probability of the parent.
    open_: list[tuple[float, int, int, int, float]] = []

    def offer(level: int, rank: int, parent: int, before: float) -> None:
        if level < len(scores) and rank < len(scores[level]):
            score = before + scores[level][rank]
            if score > -math.inf and score >= min_logprob:
                heapq.heappush(open_, (-score, level, rank, parent, before))

    offer(0, 0, -1, 0.0)
    while open_ and len(nodes) < max_nodes:
        negative, level, rank, parent, before = heapq.heappop(open_)
        offer(level + 1, 0, len(nodes), -negative)
        offer(level, rank + 1, parent, before)
        nodes.append((parent, level, rank))
    return nodes


class MedusaDrafter(Drafter):
    """Drafts with heads.

    Args:
        heads: at least as many as the trees have levels.
        hidden_states: of the target, after its final norm.
        trees: built from their logits.
    """

    def __init__(
        self,
        heads: RankingHeads,
        hidden_states: HiddenStateCache,
        trees: HeadTrees,
    ) -> None:
        assert hidden_states.layer_ids == (FINAL,)
        assert trees.depth <= len(heads)
        self._heads, self._hidden_states, self._trees = heads, hidden_states, trees

    @classmethod
    def build(cls, config: MedusaDecodingConfig, target: Target) -> MedusaDrafter:
        """Load the heads.

        Raises:
            ModelError: they cannot be loaded, or are another target's.
            ParameterError: the tree, or a draft that is asked for, is deeper than there are heads.
        """
        assert config.speculative_model is not None
        lm, storage = target.runner.lm, target.runner.storage
        hidden = lm.hidden_size
        heads = MedusaHeads.load(
            config.speculative_model, hidden, lm.vocab_size, config.num_medusa_heads
        )
        drafting = draft_heads(heads, lm)
        hidden_states = HiddenStateCache([FINAL], hidden, storage, roots_only=True)
        return cls(drafting, hidden_states, _trees(config, heads, lm.device))

    @property
    @override
    def forward_path(self) -> str:
        return self._heads.forward_path

    @property
    def draft_caches(self) -> Sequence[DraftKvCache]:
        """The target's hidden states."""
        return (self._hidden_states,)

    def nodes(self, depth: int) -> int:
        """Nodes of a tree of ``depth`` levels at most."""
        return self._trees.nodes(depth)

    @override
    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        requests = readable(scheduled_requests.generation_requests, self._hidden_states)
        if not requests:
            return
        with torch.inference_mode():
            states = root_states(requests, self._hidden_states)
            self._trees.grow(self._heads, states, requests)


def _trees(config: MedusaDecodingConfig, heads: MedusaHeads, device: torch.device) -> HeadTrees:
    if config.tree == "most_probable":
        if "max_draft_len" in config.model_fields_set and config.max_draft_len > len(heads):
            raise ParameterError(
                f"max_draft_len is {config.max_draft_len}",
                f"{config.speculative_model} holds {len(heads)} heads, one per token",
                f"Set max_draft_len to at most {len(heads)}, or leave it out",
            )
        depth = min(config.max_draft_len, len(heads))
        return TopTrees(depth, config.max_total_draft_tokens, config.min_draft_probability)
    assert config.medusa_choices is not None
    choices = TreeChoices.parse(config.medusa_choices)
    if choices.depth > len(heads) and config.has_default_tree:
        choices = choices.truncated(len(heads))
    if choices.depth > len(heads):
        raise ParameterError(
            f"medusa_choices have {choices.depth} levels",
            f"{config.speculative_model} holds {len(heads)} heads",
            f"Set num_medusa_heads to {len(heads)}, or give a tree of {len(heads)} levels",
        )
    choices.expect_ranks_below(heads.shape.vocab, "medusa_choices")
    return StaticTrees(choices, device)
