"""A draft: a tree of proposed tokens that follow the last known one.

Node numbers count the drafted tokens from 0; -1 is the root, the last known token. A chain is a
tree without branches. A draft states how its tokens were drawn, because verification is exact only
for the distribution that they really come from.
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
    """Deterministically, or at random in a way that verification need not know: n-grams, the k most
    probable tokens, beams. Each is tested as a point mass."""
    IID = "iid"
    """Drawn independently from ``q`` (chains; SpecInfer's trees)."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Drawn one after the other from ``q``, earlier siblings taken out."""


@dataclass(frozen=True, slots=True)
class Draft:
    """N proposed tokens.

    Attributes:
        tokens: N ids of the target's vocabulary.
        parents: the node that each one follows, -1 for the root; parents come before children.
            None: a chain.
        kind: how siblings were chosen.
        q: None for ``POINT``; else float32 ``[N, D]``, on the target's device: row n is the
            distribution that node n's token was drawn from, before any sibling was taken out.
        ids: int64 ``[D]``, the target's id of each column of ``q``; None: D is its vocabulary.
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
