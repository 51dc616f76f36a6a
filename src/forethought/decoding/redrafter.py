"""Drafts from ReDrafter's head: how they are configured. Knows nothing about heads."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from forethought.decoding.base import DecodingBaseConfig
from forethought.decoding.bounds import MOST_LEVELS, MOST_NODES


class ReDrafterDecodingConfig(DecodingBaseConfig):
    """Drafts come from a small recurrent network that searches ahead with beams.

    ReDrafter (Cheng et al., 2024). See ``speculative.drafters.redrafter``.
    """

    decoding_type: ClassVar[str] = "ReDrafter"
    uses_model: ClassVar[bool] = True
    branches: ClassVar[bool] = True

    name: str = Field(default="redrafter", min_length=1)
    num_beams: int = Field(default=10, ge=1, le=MOST_NODES)
    """Continuations that are kept at each length of the search."""
    draft_len_per_beam: int = Field(default=4, ge=1, le=MOST_LEVELS)
    """Most tokens of one; ``max_draft_len`` is another name for it."""
    tree: Literal["likeliest", "beams"] = "likeliest"
    """``beams``: what is left at the end of the search, as published. ``likeliest``: what was
    likely at any length, which gets further with fewer tokens: 15 unless
    ``max_total_draft_tokens`` says otherwise."""
    min_draft_probability: float = Field(default=0.0, ge=0.0, lt=1.0)
    """What the head holds less likely than this, together with all before it, is left out of the
    ``likeliest``: verifying costs something, too."""

    @property
    def drafts_chains(self) -> bool:
        """Whether no draft of it branches, however short."""
        return self.num_beams == 1

    def _settle_lengths(self) -> None:
        """The depth is that of a beam; the size at most that of beams with nothing in common."""
        given = "draft_len_per_beam" in self.model_fields_set
        if not given and self.max_draft_len:
            self._set("draft_len_per_beam", self.max_draft_len)
        if self.min_draft_probability and self.tree == "beams":
            reason = "tree is 'beams', which are all verified"
            raise self._refuse("min_draft_probability", self.min_draft_probability, reason)
        length = self.draft_len_per_beam
        if self.max_draft_len not in (0, length):
            reason = f"draft_len_per_beam makes it {length}"
            raise self._refuse("max_draft_len", self.max_draft_len, reason)
        self._set("max_draft_len", length)
        most = self.num_beams * length
        if self.max_total_draft_tokens > most:
            reason = f"{self.num_beams} beams of {length} have no more than {most}"
            raise self._refuse("max_total_draft_tokens", self.max_total_draft_tokens, reason)
        usual = most if self.tree == "beams" else min(most, max(length, 15))
        self._set("max_total_draft_tokens", self.max_total_draft_tokens or usual)
        super()._settle_lengths()
