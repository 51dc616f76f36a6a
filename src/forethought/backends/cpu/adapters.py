"""LoRA adapters in the native forward: their matrices in panels, by layer."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forethought.backends.cpu.packed_linear import PANEL, PackedLinear
from forethought.backends.cpu.structures import AdapterLayerStruct, LowRankStruct
from forethought.model.adapter import LowRank
from forethought.model.batch import Span


@dataclass(frozen=True, slots=True)
class NativeAdditions:
    """The additions of an adapter to all layers of a network.

    Attributes:
        layers: for ``forward.cpp``.
        low_width: floats of a token between two products, whole panels.
        linears: that ``layers`` points to.
    """

    layers: ctypes.Array[AdapterLayerStruct]
    low_width: int
    linears: Sequence[PackedLinear]

    @classmethod
    def of(cls, additions: Mapping[tuple[int, str], LowRank], num_layers: int) -> NativeAdditions:
        """Pack additions by layer and product; see ``adapter.layer_additions``."""
        layers, linears, low_width = (AdapterLayerStruct * num_layers)(), [], 0
        for (index, product), addition in additions.items():
            down = PackedLinear.pack(addition.down, None)
            up = PackedLinear.pack(addition.up, None, gated=product == "gate_up")
            setattr(layers[index], product, LowRankStruct(down=down.struct, up=up.struct))
            linears += [down, up]
            low_width = max(low_width, -(-addition.rank // PANEL) * PANEL)
        return cls(layers, low_width, linears)

    @property
    def address(self) -> int:
        """Of ``layers``."""
        return ctypes.addressof(self.layers)


def token_addresses(spans: Sequence[Span]) -> tuple[array[int], int]:
    """The layers of the adapter of each token of a batch, 0 for none, and the greatest
    ``low_width``.
    """
    addresses, low_width = array("q"), 0
    for span in spans:
        parts: NativeAdditions | None = None if span.adapter is None else span.adapter.parts
        addresses.extend([0 if parts is None else parts.address] * span.length)
        low_width = low_width if parts is None else max(low_width, parts.low_width)
    return addresses, low_width
