"""Drafts from EAGLE's heads: how they are configured. Knows nothing about heads."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import pydantic
from pydantic import Field

from forethought.decoding.base import DecodingBaseConfig
from forethought.decoding.bounds import MOST_LEVELS, MOST_NODES
from forethought.decoding.tree_paths import TreePaths


class EagleDecodingConfig(DecodingBaseConfig):
    """Drafts come from a head that reads the target's hidden states.

    EAGLE-1, 2 and 3 (Li et al., 2024 to 2025); which head it is, its checkpoint says. Drafts are
    chains, static trees, or EAGLE-2's dynamic trees. See ``speculative.drafters.eagle``.
    """

    decoding_type: ClassVar[str] = "Eagle"
    uses_model: ClassVar[bool] = True
    branches: ClassVar[bool] = True

    name: str = Field(default="eagle", min_length=1)
    eagle_choices: TreePaths | None = None
    """A static tree: paths of ranks, ``[1, 0]`` being the likeliest token after the second
    likeliest. See ``decoding.tree_paths``."""
    use_dynamic_tree: bool = False
    """Grow each tree where the head is sure of itself, within ``max_total_draft_tokens``."""
    dynamic_tree_max_topK: int | None = Field(default=None, ge=1, le=MOST_NODES)
    """Children of a node of a dynamic tree, and nodes of a level that have any."""
    eagle3_layers_to_capture: tuple[int, ...] | None = None
    """Layers of the target whose outputs an EAGLE-3 head reads, -1 being behind the final norm.
    None: as its checkpoint says, or ``1, L // 2 - 1, L - 4`` of L layers, at least 7."""
    num_eagle_layers: int | None = Field(default=None, ge=1, le=MOST_LEVELS)
    """Another name of ``max_draft_len`` in older files; the two must agree."""
    eagle3_one_model: bool = True
    """Read and without meaning: there is one engine, and the head drafts in it."""
    greedy_sampling: Literal[True] = True
    """Acceptance is exact here, greedy or sampled; ``False`` would mean typical acceptance."""
    eagle3_model_arch: Literal["llama3"] = "llama3"
    """Heads are made of Llama's layer."""

    @pydantic.field_validator("eagle3_layers_to_capture", mode="before")
    @classmethod
    def _rising(cls, value: Any) -> Any:
        """A set says which layers; heads read them in rising order, the final norm's last."""
        if isinstance(value, set | frozenset | list | tuple) and len(set(value)) == len(value):
            return tuple(sorted(value, key=lambda layer: (layer == -1, layer)))
        return value

    @property
    def drafts_chains(self) -> bool:
        """Whether no draft of it branches, however short."""
        return not self.use_dynamic_tree and super().drafts_chains

    def _settle_lengths(self) -> None:
        if self.num_eagle_layers is not None:
            if self.max_draft_len not in (0, self.num_eagle_layers):
                reason = f"max_draft_len is {self.max_draft_len}"
                raise self._refuse("num_eagle_layers", self.num_eagle_layers, reason)
            self._set("max_draft_len", self.num_eagle_layers)
        if self.eagle_choices is not None:
            if self.use_dynamic_tree:
                reason = "eagle_choices are a static tree"
                raise self._refuse("use_dynamic_tree", True, reason)
            self._settle_tree("eagle_choices", self.eagle_choices)
        self._settle_dynamic_tree()
        captured = self.eagle3_layers_to_capture
        if captured is not None and (not captured or min(captured) < -1):
            reason = "layers are counted from 0, and -1 is the final norm"
            raise self._refuse("eagle3_layers_to_capture", captured, reason)
        super()._settle_lengths()

    def _settle_dynamic_tree(self) -> None:
        """Every node of a dynamic tree is one of the ``topK`` best of its level."""
        width = self.dynamic_tree_max_topK
        if self.use_dynamic_tree != (width is not None):
            reason = "use_dynamic_tree and dynamic_tree_max_topK are given together or not at all"
            raise self._refuse("dynamic_tree_max_topK", width, reason)
        if width is None:
            if self.eagle_choices is None and self.max_total_draft_tokens > self.max_draft_len:
                reason = "without eagle_choices or use_dynamic_tree a draft is a chain"
                raise self._refuse("max_total_draft_tokens", self.max_total_draft_tokens, reason)
            return
        most = width * self.max_draft_len
        if self.max_total_draft_tokens > most:
            reason = f"dynamic_tree_max_topK times max_draft_len is {most}"
            raise self._refuse("max_total_draft_tokens", self.max_total_draft_tokens, reason)
        self._set("max_total_draft_tokens", self.max_total_draft_tokens or most)


Eagle3DecodingConfig = EagleDecodingConfig
"""Its name in newer files."""
