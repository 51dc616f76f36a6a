"""Heads beside the target's own guess the next tokens all at once: Medusa's trees.

Cai et al., 2024 (arXiv 2401.10774). Each head proposes its likeliest tokens for one place, whatever
stands at the places before; a static tree says which combinations of ranks are tried, or the heads'
own laws do. The heads read the target's state behind the final norm from which it drew the root, so
that nothing is computed again and a draft costs one small forward. Knows nothing about acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forethought.decoding import MedusaDecodingConfig
from forethought.errors import ParameterError
from forethought.kv.companion import Companion
from forethought.model.taps import FINAL
from forethought.speculative.drafter import (
    Drafter,
    DraftRequest,
    ResourceManager,
    ScheduledRequests,
)
from forethought.speculative.features import Features
from forethought.speculative.head_trees import HeadTrees, LikeliestTrees, StaticTrees
from forethought.speculative.heads.medusa import DraftHeads, MedusaHeads
from forethought.speculative.table import Target
from forethought.speculative.tree import TreeChoices


class MedusaDrafter(Drafter):
    """Drafts with heads.

    Args:
        heads: at least as many as the trees have levels.
        features: of the target, behind its final norm.
        trees: made of what they say.
    """

    def __init__(self, heads: DraftHeads, features: Features, trees: HeadTrees) -> None:
        assert features.places == (FINAL,)
        assert trees.depth <= len(heads)
        self._heads, self._features, self._trees = heads, features, trees

    @classmethod
    def build(cls, config: MedusaDecodingConfig, target: Target) -> MedusaDrafter:
        """Load the heads. See ``speculative.table``.

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
        return cls(drafting, Features([FINAL], hidden, storage), _trees(config, heads, lm.device))

    @property
    def companions(self) -> Sequence[Companion]:
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
        return LikeliestTrees(depth, config.max_total_draft_tokens, config.min_draft_probability)
    assert config.medusa_choices is not None
    choices = TreeChoices.parse(config.medusa_choices)
    if choices.depth > len(heads) and config.has_usual_tree:
        choices = choices.truncated(len(heads))
    if choices.depth > len(heads):
        raise ParameterError(
            f"medusa_choices have {choices.depth} levels",
            f"{config.speculative_model} holds {len(heads)} heads",
            f"Set num_medusa_heads to {len(heads)}, or give a tree of so many levels",
        )
    choices.expect_ranks_below(heads.shape.vocab, "medusa_choices")
    return StaticTrees(choices, device)
