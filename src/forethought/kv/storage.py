"""The tensors of the KV cache: one key and one value tensor per layer, addressed by slot.

A slot is one token's place: ``slot = page * page_size + offset``. This file moves tensors; it knows
nothing about who owns a page, about prefixes, or about attention. Layers of one shape share one
allocation, so that copying a page costs two tensor operations however many layers there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from forethought.kv.table import PageCopy, SlotMove


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores per token, in elements."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        """Elements stored per token: keys and values together."""
        return self.kv_heads * (self.key_dim + self.value_dim)


class KvStorage:
    """Keys and values of every layer for a fixed number of pages.

    Attributes:
        keys: per layer, ``[slots, kv_heads, key_dim]`` in ``dtype``.
        values: per layer, ``[slots, kv_heads, value_dim]`` in ``dtype``.
        bytes_per_page: bytes that one page takes over all layers.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        assert layers
        assert num_pages > 0
        assert page_size > 0
        self.layers, self.page_size = tuple(layers), page_size
        self.dtype, self.device = dtype, torch.device(device)
        self.bytes_per_page = self.page_bytes(layers, page_size, dtype)
        self.resize(num_pages)

    def resize(self, num_pages: int) -> None:
        """Have room for ``num_pages``. What was stored is lost: only before anything is."""
        self.num_pages = num_pages
        # One stack per distinct shape: [layers of that shape, slots, kv_heads, dim].
        self._stacks: list[Tensor] = []
        keys: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}
        slots = num_pages * self.page_size
        for shape in dict.fromkeys(self.layers):
            members = [index for index, other in enumerate(self.layers) if other == shape]
            size = (len(members), slots, shape.kv_heads)
            key_stack = torch.zeros(*size, shape.key_dim, dtype=self.dtype, device=self.device)
            value_stack = torch.zeros(*size, shape.value_dim, dtype=self.dtype, device=self.device)
            self._stacks += [key_stack, value_stack]
            keys.update(zip(members, key_stack, strict=True))
            values.update(zip(members, value_stack, strict=True))
        self.keys = [keys[index] for index in range(len(self.layers))]
        self.values = [values[index] for index in range(len(self.layers))]

    @staticmethod
    def page_bytes(layers: Sequence[LayerShape], page_size: int, dtype: torch.dtype) -> int:
        """Bytes that one page of ``page_size`` tokens takes over ``layers`` in ``dtype``."""
        return sum(shape.elements for shape in layers) * page_size * int(dtype.itemsize)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k ``[T, kv_heads, key_dim]``, v ``[T, kv_heads, value_dim]`` at slots ``[T]``."""
        self.keys[layer].index_copy_(0, slots, k)
        self.values[layer].index_copy_(0, slots, v)

    def gather(self, pages: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Copies of the tokens of pages int64 ``[P]``: keys and values of each layer.

        Each ``[P * page_size, kv_heads, dim]``.
        """
        keys: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}
        stacks = iter(self._stacks)
        for shape in dict.fromkeys(self.layers):
            members = [index for index, other in enumerate(self.layers) if other == shape]
            for found in (keys, values):
                stack = next(stacks)
                paged = stack.view(len(members), self.num_pages, -1).index_select(1, pages)
                layers = paged.view(len(members), -1, *stack.shape[2:]).unbind(0)
                found.update(zip(members, layers, strict=True))
        order = range(len(self.layers))
        return [keys[layer] for layer in order], [values[layer] for layer in order]

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy whole pages, all layers; every source is read before anything is written."""
        if not copies:
            return
        src = self._indices([copy.src for copy in copies])
        dst = self._indices([copy.dst for copy in copies])
        for stack in self._stacks:
            pages = stack.view(stack.shape[0], self.num_pages, self.page_size, *stack.shape[2:])
            pages[:, dst] = pages[:, src]

    def move_slots(self, moves: Sequence[SlotMove]) -> None:
        """Copy single tokens, all layers; every source is read before anything is written."""
        if not moves:
            return
        src = self._indices([move.src for move in moves])
        dst = self._indices([move.dst for move in moves])
        for stack in self._stacks:
            stack[:, dst] = stack[:, src]

    def clear_slots(self, slots: Sequence[int]) -> None:
        """Overwrite single tokens with zeros, all layers."""
        if slots:
            cleared = self._indices(list(slots))
            for stack in self._stacks:
                stack[:, cleared] = 0

    def _indices(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)
