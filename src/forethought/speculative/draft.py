"""A draft: the tokens that a drafter proposes behind the last known one, as a tree.

Node numbers count the drafted tokens from 0; -1 is the root, the last token that is known. A chain
is a thin tree. A draft says how its tokens were drawn, because verification is exact only for the
law that they really come from. Knows nothing about who drew them or what becomes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from forethought.speculative.tree import node_depths

if TYPE_CHECKING:
    from torch import Tensor


class DraftKind(Enum):
    """How the children of one node were chosen."""

    POINT = "point"
    """By a rule without chance of its own, or with chance that needs no account: n-grams, the k
    likeliest tokens, beams. Each is tested as a point mass."""
    IID = "iid"
    """Drawn independently from ``q`` (chains; SpecInfer's trees)."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Drawn one after the other from ``q``, what was drawn before taken out."""


@dataclass(frozen=True, slots=True)
class Draft:
    """N proposed tokens.

    Attributes:
        tokens: N ids of the target's vocabulary.
        parents: the node that each one follows, -1 for the root; parents come before children.
            None: a chain.
        kind: how siblings were chosen.
        q: None for ``POINT``; else float32 ``[N, D]``, on the target's device: row n is the law
            that node n's token was drawn from, before any sibling was taken out.
        ids: int64 ``[D]``, the target's id of each column of ``q``; None: D is the vocabulary.
    """

    tokens: Sequence[int]
    parents: tuple[int, ...] | None = None
    kind: DraftKind = DraftKind.POINT
    q: Tensor | None = None
    ids: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def parent(self, node: int) -> int:
        """The node that ``node`` follows; -1 is the root."""
        return node - 1 if self.parents is None else self.parents[node]

    @property
    def depths(self) -> list[int]:
        """Depth of each node: 1 for the children of the root."""
        if self.parents is None:
            return list(range(1, len(self) + 1))
        return node_depths(self.parents)

    @property
    def depth(self) -> int:
        """Number of tokens on the longest path."""
        return len(self) if self.parents is None else max(self.depths, default=0)


NO_DRAFT = Draft(())
"""Nothing is proposed: plain decoding."""
