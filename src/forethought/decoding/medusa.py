"""Drafts from Medusa's heads: how they are configured.

Knows nothing about heads but the ``config.json`` beside them.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from pydantic import Field

from forethought.decoding.base import DecodingBaseConfig
from forethought.decoding.bounds import MOST_LEVELS
from forethought.decoding.tree_paths import TreePaths

MEDUSA_CHOICES: tuple[tuple[int, ...], ...] = (
    *((0, 0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 2, 0), (0, 3)),
    *((1, 0, 0), (1, 1), (2, 0, 0), (3, 0), (4,), (5,)),
)
"""The leaves of a tree of 24 nodes: the best one where a head's first choices are right in 60, 14,
7, 4, 2 and 2 of 100 places, and each further head in 12 % fewer."""


class MedusaDecodingConfig(DecodingBaseConfig):
    """Drafts come from heads beside the target's own, each of which guesses one token further on.

    Medusa (Cai et al., 2024). See ``speculative.drafters.medusa``.
    """

    decoding_type: ClassVar[str] = "Medusa"
    uses_model: ClassVar[bool] = True
    branches: ClassVar[bool] = True

    name: str = Field(default="medusa", min_length=1)
    medusa_choices: TreePaths | None = None
    """The tree: paths of ranks, ``[1, 0]`` being the likeliest token of the second head after the
    second likeliest of the first. All paths, or those to the leaves only; a list, or the text of
    one. None: as the heads' ``config.json`` says, or one that suits most heads."""
    num_medusa_heads: int | None = Field(default=None, ge=1, le=MOST_LEVELS)
    """How many heads to use; None: as many as there are."""
    posterior_threshold: float | None = Field(default=None, gt=0.0, le=1.0)
    """Accept what is typical of the target instead of what it would have drawn: tokens of at least
    this probability, or fewer where it is unsure. Changes the outputs of sampled requests, and
    marks them. None: exact. Medusa's authors use 0.09."""
    posterior_alpha: float | None = Field(default=None, gt=0.0)
    """How far unsureness lowers that threshold, ``posterior_alpha * exp(-entropy)`` being enough;
    None: the square root of ``posterior_threshold``."""

    def _settle_lengths(self) -> None:
        """Depth and size are those of the tree, which is cut to the heads that are used."""
        if self.posterior_alpha is not None and self.posterior_threshold is None:
            reason = "posterior_threshold is not given, and without it acceptance is exact"
            raise self._refuse("posterior_alpha", self.posterior_alpha, reason)
        if self.posterior_threshold is not None and self.posterior_alpha is None:
            self._set("posterior_alpha", self.posterior_threshold**0.5)
        given = self.medusa_choices
        if given is None:
            self._set("medusa_choices", self._default_tree())
        elif self.num_medusa_heads is not None and max(map(len, given)) > self.num_medusa_heads:
            reason = f"a path of it is longer than num_medusa_heads, {self.num_medusa_heads}"
            raise self._refuse("medusa_choices", given, reason)
        assert self.medusa_choices is not None
        self._settle_tree("medusa_choices", self.medusa_choices)
        super()._settle_lengths()

    @property
    def has_usual_tree(self) -> bool:
        """Whether the tree is the one that it chooses itself where none is given."""
        return self.medusa_choices == self._default_tree()

    def _default_tree(self) -> tuple[tuple[int, ...], ...]:
        """What the heads' own configuration says, within the wanted depth and heads."""
        stored = self._stored()
        tree = stored.get("medusa_choices") or MEDUSA_CHOICES
        heads = self.num_medusa_heads or stored.get("medusa_num_heads") or stored.get("num_heads")
        limits = [limit for limit in (heads, self.max_draft_len) if limit]
        return tuple(dict.fromkeys(tuple(path[: min(limits, default=None)]) for path in tree))

    def _stored(self) -> dict[str, Any]:
        """The heads' ``config.json``; whether there has to be one is for who loads them to say."""
        if self.speculative_model is None:
            return {}
        try:
            text = (self.speculative_model / "config.json").read_text(encoding="utf-8")
            return dict(json.loads(text))
        except (OSError, ValueError):
            return {}
