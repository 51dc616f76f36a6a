"""Trees of what heads guess for the next places, each of them whatever stands at those before.

A static tree tries the same combinations of ranks every time (Cai et al., 2024, arXiv 2401.10774,
section 2.1.2). A tree of the likeliest takes the law of each place as it is: deep where the heads
are sure, wide where they are not, as EAGLE-2 (arXiv 2406.16858) does with one head. Knows nothing
about heads.

[medusa] Heads beside the target's own guess the next tokens all at once: Medusa's trees.

Cai et al., 2024 (arXiv 2401.10774). Each head proposes its likeliest tokens for one place, whatever
stands at the places before; a static tree says which combinations of ranks are tried, or the heads'
own laws do. The heads read the target's state behind the final norm from which it drew the root, so
that nothing is computed again and a draft costs one small forward. Knows nothing about acceptance.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from forethought.config.drafters import MedusaDecodingConfig
from forethought.errors import ParameterError
from forethought.kv.draft_cache import DraftKvCache, HiddenStateCache
from forethought.model.causal_lm import FINAL
from forethought.speculative.draft import Draft
from forethought.speculative.drafter import (
    Drafter,
    DraftRequest,
    ResourceManager,
    ScheduledRequests,
)
from forethought.speculative.heads.medusa import DraftHeads, MedusaHeads
from forethought.speculative.registry import Target
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
        top_nodes = logits.topk(width, dim=-1).indices
        # A rank beyond the vocabulary repeats the last one; repeated siblings are left out.
        tokens = top_nodes[self._levels[:size], :, self._ranks[:size].clamp(max=width - 1)].T
        drafted = (tokens if ids is None else ids[tokens]).tolist()  # one transfer for all
        for request, row, count in zip(requests, drafted, sizes, strict=True):
            request.draft = Draft(row[:count], self._choices.parents[:count])


class TopTrees:
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
            nodes = top_nodes(mine, min(self._most, request.max_nodes), self._floor)
            request.draft = Draft(
                [int(columns[level][place][rank]) for _, level, rank in nodes],
                tuple(parent for parent, _, _ in nodes),
            )


def top_nodes(
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


class MedusaDrafter(Drafter):
    """Drafts with heads.

    Args:
        heads: at least as many as the trees have levels.
        features: of the target, behind its final norm.
        trees: made of what they say.
    """

    def __init__(self, heads: DraftHeads, features: HiddenStateCache, trees: HeadTrees) -> None:
        assert features.places == (FINAL,)
        assert trees.depth <= len(heads)
        self._heads, self._features, self._trees = heads, features, trees

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
        drafting = DraftHeads(heads, lm.dtype, lm.device)
        return cls(
            drafting, HiddenStateCache([FINAL], hidden, storage), _trees(config, heads, lm.device)
        )

    @property
    def draft_caches(self) -> Sequence[DraftKvCache]:
        """The target's states."""
        return (self._features,)

    def nodes(self, depth: int) -> int:
        """Most nodes of a tree of so many levels."""
        return self._trees.nodes(depth)

    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        """See :class:`Drafter`."""
        requests, slots = list[DraftRequest](), list[int]()
        for request in scheduled_requests.generation_requests:
            assert request.table is not None
            known = len(request.tokens) - 1  # the root is not computed yet
            if known and self._features.ready_length(request.table, known) == known:
                requests.append(request)
                slots += request.table.slots(known - 1, known)
        if not requests:
            return
        stored = self._features.storage.keys[0]
        levels = min(self._trees.depth, max(request.max_draft_len for request in requests))
        with torch.inference_mode():
            states = stored.index_select(0, torch.tensor(slots, device=stored.device))[:, 0]
            logits = self._heads(states, levels)  # [levels, N, vocab]
            self._trees.grow(logits, self._heads.token_map, requests)


def _trees(config: MedusaDecodingConfig, heads: MedusaHeads, device: torch.device) -> HeadTrees:
    if config.tree == "likeliest":
        if "max_draft_len" in config.model_fields_set and config.max_draft_len > len(heads):
            raise ParameterError(
                f"max_draft_len is {config.max_draft_len}",
                f"{config.speculative_model} holds {len(heads)} heads, each for one token",
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
            f"Set num_medusa_heads to {len(heads)}, or give a tree of so many levels",
        )
    choices.expect_ranks_below(heads.shape.vocab, "medusa_choices")
    return StaticTrees(choices, device)
