"""What a layer needs of attention."""

from __future__ import annotations

from dataclasses import dataclass

from forethought.kv.storage import LayerShape
from forethought.model.attention.base import Capability
from forethought.model.attention.window import Window


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """What one layer needs of attention, found by the probe.

    Attributes:
        shape: what it stores per token.
        heads: its query heads.
        window: see ``model.attention.window``.
        softcap: whether its scores have a softcap.
        sinks: whether it has a learned logit per head.
    """

    shape: LayerShape
    heads: int
    window: Window
    softcap: bool
    sinks: bool

    def needs(self) -> frozenset[Capability]:
        """The capabilities that a backend must declare for this layer."""
        shape = self.shape
        needs = {
            Capability.GROUPED_QUERIES: self.heads != shape.kv_heads,
            Capability.VALUE_DIM: shape.key_dim != shape.value_dim,
            Capability.SLIDING_WINDOW: self.window is not None,
            Capability.SOFTCAP: self.softcap,
            Capability.SINKS: self.sinks,
        }
        return frozenset(capability for capability, needed in needs.items() if needed)
