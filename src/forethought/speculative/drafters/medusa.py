"""Heads beside the target's own guess the next tokens all at once: Medusa's trees.

Cai et al., 2024 (arXiv 2401.10774). Each head proposes its likeliest tokens for one place, whatever
stands at the places before; a static tree says which combinations of ranks are tried. The heads
read the target's state behind the final norm from which it drew the root, so that nothing is
computed again and a draft costs one small forward. Knows nothing about acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forethought.decoding import MedusaDecodingConfig
from forethought.errors import ParameterError
from forethought.kv.companion import Companion
from forethought.model.taps import FINAL
from forethought.speculative.draft import Draft
from forethought.speculative.drafter import (
    Drafter,
    DraftRequest,
    ResourceManager,
    ScheduledRequests,
)
from forethought.speculative.features import Features
from forethought.speculative.heads.medusa import DraftHeads, MedusaHeads
from forethought.speculative.table import Target
from forethought.speculative.tree import TreeChoices


class MedusaDrafter(Drafter):
    """Drafts with heads.

    Args:
        heads: at least as many as the tree has levels.
        features: of the target, behind its final norm.
        choices: the tree.
    """

    def __init__(self, heads: DraftHeads, features: Features, choices: TreeChoices) -> None:
        assert features.places == (FINAL,)
        assert choices.depth <= len(heads)
        self._heads, self._features, self._choices = heads, features, choices
        device = features.storage.device
        self._levels = torch.tensor([len(path) - 1 for path in choices.paths], device=device)
        self._ranks = torch.tensor(choices.ranks, device=device)

    @classmethod
    def build(cls, config: MedusaDecodingConfig, target: Target) -> MedusaDrafter:
        """Load the heads. See ``speculative.table``.

        Raises:
            ModelError: they cannot be loaded, or are another target's.
            ParameterError: the tree is deeper than there are heads.
        """
        assert config.speculative_model is not None
        assert config.medusa_choices is not None
        lm, storage = target.runner.lm, target.runner.storage
        hidden = lm.hidden_size
        heads = MedusaHeads.load(
            config.speculative_model, hidden, lm.vocab_size, config.num_medusa_heads
        )
        choices = TreeChoices.parse(config.medusa_choices)
        if choices.depth > len(heads) and config.has_usual_tree:
            choices = choices.truncated(len(heads))
        if choices.depth > len(heads):
            raise ParameterError(
                f"medusa_choices have {choices.depth} levels",
                f"{config.speculative_model} holds {len(heads)} heads",
                f"Set num_medusa_heads to {len(heads)}, or give a tree of so many levels",
            )
        drafting = DraftHeads(heads, lm.dtype, lm.device)
        return cls(drafting, Features([FINAL], hidden, storage), choices)

    @property
    def companions(self) -> Sequence[Companion]:
        """The target's states."""
        return (self._features,)

    def nodes(self, depth: int) -> int:
        """Nodes of the tree down to ``depth``."""
        return sum(len(path) <= depth for path in self._choices.paths)

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
        sizes = [self._size(request) for request in requests]
        drafted = self._draft(slots, max(sizes)).tolist()  # one transfer for all
        for request, tokens, size in zip(requests, drafted, sizes, strict=True):
            request.draft = Draft(tokens[:size], self._choices.parents[:size])

    def _size(self, request: DraftRequest) -> int:
        """Nodes of the request's draft: the tree's first ones, as these are the shallow ones."""
        return min(self.nodes(request.max_draft_len), request.max_nodes)

    def _draft(self, slots: Sequence[int], size: int) -> Tensor:
        """int64 ``[N, size]``: the tokens of the first nodes behind the states at N slots."""
        levels, ranks = self._levels[:size], self._ranks[:size]
        stored = self._features.storage.keys[0]
        with torch.inference_mode():
            states = stored[torch.tensor(slots, device=stored.device), 0]
            depth = len(self._choices.paths[size - 1]) if size else 0
            logits = self._heads(states, depth)  # [depth, N, vocab]
            width = int(max(self._choices.ranks[:size])) + 1
            likeliest = logits.topk(min(width, logits.shape[-1]), dim=-1).indices
            # A rank beyond the vocabulary repeats the last one; repeated siblings are left out.
            tokens = likeliest[levels, :, ranks.clamp(max=likeliest.shape[-1] - 1)].T
            return tokens if self._heads.token_map is None else self._heads.token_map[tokens]
