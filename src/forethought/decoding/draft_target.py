"""Drafts from a draft model: how they are configured. Knows nothing about models."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from forethought.decoding.base import DecodingBaseConfig
from forethought.decoding.tree_paths import TreePaths


class DraftTargetDecodingConfig(DecodingBaseConfig):
    """Drafts come from a smaller model with the same vocabulary.

    Speculative decoding (Leviathan et al., 2023; Chen et al., 2023). See
    ``speculative.drafters.draft_target``.
    """

    decoding_type: ClassVar[str] = "Draft_Target"
    uses_model: ClassVar[bool] = True
    branches: ClassVar[bool] = True

    name: str = Field(default="draft_target", min_length=1)
    draft_sampling: Literal["greedy", "sampled"] = "greedy"
    """``greedy``: the likeliest tokens. ``sampled``: drawn from the draft model's law where the
    request is sampled itself."""
    draft_choices: TreePaths | None = None
    """A tree instead of a chain: paths of ranks, ``[1, 0]`` being the likeliest token after the
    second likeliest. See ``decoding.tree_paths``."""

    def _settle_lengths(self) -> None:
        """With a tree, its depth and size are the lengths; others beside it are refused."""
        if self.draft_choices is not None:
            self._settle_tree("draft_choices", self.draft_choices)
        elif self.max_total_draft_tokens > self.max_draft_len > 0:
            reason = "without draft_choices a draft is a chain"
            raise self._refuse("max_total_draft_tokens", self.max_total_draft_tokens, reason)
        super()._settle_lengths()
