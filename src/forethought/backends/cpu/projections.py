"""The products that enter a layer of a transformers' module, whose outputs are beside each other in
the projections of a token (``projections.h``).

A product reads the layer's inputs, or what earlier ones gave: as in latent attention, and where a
product of low rank is added to another one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forethought.backends.cpu.norms import norm_rows
from forethought.backends.cpu.structures import ProjectionStruct

if TYPE_CHECKING:
    from forethought.backends.cpu.module_parts import NativeNorm
    from forethought.backends.cpu.packed_linear import PackedLinear


@dataclass(frozen=True, slots=True)
class Projection:
    """A product.

    Attributes:
        name: of its linear in the layer.
        begin: of its outputs among the projections.
        source: the first projection that it reads; None: it reads the layer's inputs.
        is_added: to what is there.
        norm: of its first outputs, as many as the norm has weights; None: there is none.
    """

    name: str
    begin: int
    source: int | None = None
    is_added: bool = False
    norm: NativeNorm | None = None

    def struct(self, packed: PackedLinear) -> ProjectionStruct:
        """With its weights."""
        fields: dict[str, Any] = {"source": -1 if self.source is None else self.source}
        if self.norm is not None:
            size, weight = len(self.norm.weight), self.norm.weight.data_ptr()
            fields |= {"norm": weight, "norm_size": size, "eps": self.norm.eps}
        return ProjectionStruct(
            weight=packed.struct, begin=self.begin, adds=self.is_added, **fields
        )


class Projections:
    """The products that enter a layer.

    Args:
        part: the layer, which keeps their linears.
        items: in the order in which they are computed.

    Attributes:
        width: of the projections of a token.
        widest_input: of any of the products.
    """

    def __init__(self, part: nn.Module, items: Sequence[Projection]) -> None:
        self._part, self._items = part, items
        linears = self.linears()
        self.width = max(
            item.begin + linear.out_features for item, linear in zip(items, linears, strict=True)
        )
        self.widest_input = max(linear.in_features for linear in linears)

    @classmethod
    def beside(cls, part: nn.Module, names: Sequence[str]) -> Projections:
        """Of linears that all read the layer's inputs."""
        items, begin = list[Projection](), 0
        for name in names:
            items.append(Projection(name, begin))
            begin += part.get_submodule(name).out_features  # type: ignore[operator]
        return cls(part, items)

    def linears(self) -> list[Any]:
        """The linears, which are replaced once they are packed."""
        return [self._part.get_submodule(item.name) for item in self._items]

    def multiply(self, x: Tensor) -> Tensor:
        """x ``[1, T, inputs]`` -> float32 ``[T, width]``, by the linears, which may be hooked."""
        projected = torch.empty(x.shape[1], self.width)
        for item, linear in zip(self._items, self.linears(), strict=True):
            inputs = x
            if item.source is not None:
                columns = projected[:, item.source : item.source + linear.in_features]
                inputs = columns.to(x.dtype)[None]
            outputs = projected[:, item.begin : item.begin + linear.out_features]
            if item.is_added:
                outputs += linear(inputs)[0]
            else:
                outputs.copy_(linear(inputs)[0])
            if item.norm is not None:
                size = len(item.norm.weight)
                rows = outputs[:, :size].contiguous()
                outputs[:, :size] = norm_rows(rows, item.norm.weight, item.norm.eps)
        return projected

    def structs(self, packed: Sequence[PackedLinear]) -> ctypes.Array[ProjectionStruct]:
        """With the weights of the linears."""
        structs = [item.struct(linear) for item, linear in zip(self._items, packed, strict=True)]
        return (ProjectionStruct * len(structs))(*structs)


def low_rank_projections(pair: str, begin: int, low: int) -> list[Projection]:
    """Of a sequence of two linears, whose product is added to the projections from ``begin`` on;
    ``low``: where the outputs of the first one are put.
    """
    return [
        Projection(f"{pair}.0", low),
        Projection(f"{pair}.1", begin, source=low, is_added=True),
    ]
