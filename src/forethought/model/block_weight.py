"""Weights that stay in the blocks of the GGUF file that they come from.

With ``rounds_input`` activations are rounded to 8 bits and integers are multiplied
(``IntegerProduct``); else the blocks are dequantised, and the products are those of plain weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forethought.gguf.block_type import BlockType
from forethought.model.dequantize import Unpacked, dequantize, unpack
from forethought.model.integer_product import ACTIVATION_GROUP, IntegerProduct, IntegerWeight

BLOCK_TYPES = (
    *(BlockType.Q8_0, BlockType.Q4_0, BlockType.Q4_1, BlockType.Q5_0, BlockType.Q5_1),
    *(BlockType.Q4_K, BlockType.Q5_K, BlockType.Q6_K),
)
"""Of the weights that may stay in their blocks; others are dequantised when they are read."""


_SCALES = {
    **dict.fromkeys((BlockType.Q8_0, BlockType.Q4_0, BlockType.Q5_0), (0, 1)),
    **dict.fromkeys((BlockType.Q4_1, BlockType.Q5_1, BlockType.Q4_K, BlockType.Q5_K), (0, 2)),
    BlockType.Q6_K: (208, 1),
}
"""Where a block has its scales and offsets in float16: the first byte, and how many."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeight:
    """A weight ``[out, in]`` in blocks.

    Attributes:
        blocks: uint8 ``[out, bytes of a row]``, as in the file, which may be mapped into memory.
        type: of the blocks, one of ``BLOCK_TYPES``.
        dtype: of activations.
        rounds_input: activations are rounded to 8 bits.
        is_native: integers are multiplied in C++, whatever computes the rest of a layer.
    """

    blocks: Tensor
    type: BlockType
    dtype: torch.dtype
    rounds_input: bool = False
    is_native: bool = False

    def __post_init__(self) -> None:
        assert self.type in BLOCK_TYPES
        assert self.blocks.dtype == torch.uint8

    @property
    def shape(self) -> torch.Size:
        """``[out, in]``."""
        num_outputs, num_bytes = self.blocks.shape
        return torch.Size((num_outputs, num_bytes // self.type.num_bytes * self.type.num_weights))

    @property
    def device(self) -> torch.device:
        """Of the blocks."""
        return self.blocks.device

    @property
    def kind(self) -> tuple[object, ...]:
        """What weights have in common that can be concatenated."""
        return self.type, self.dtype, self.rounds_input

    @property
    def num_bytes(self) -> int:
        """Of the blocks."""
        return self.blocks.nbytes

    def has_finite_scales(self) -> bool:
        """Whether no scale, and so no weight, is NaN or infinite."""
        first, count = _SCALES[self.type]
        blocks = self.blocks.view(-1, self.type.num_bytes)
        scales = blocks[:, first : first + 2 * count].contiguous().view(torch.float16)
        return bool(scales.isfinite().all())

    def rows(self, start: int, stop: int) -> Tensor:
        """Outputs ``start`` to ``stop``, dequantised: ``[stop - start, in]`` in ``dtype``."""
        return dequantize(self.blocks[start:stop], self.type).to(self.dtype)

    def dequantize(self) -> Tensor:
        """The whole weight ``[out, in]`` in ``dtype``."""
        return self.rows(0, self.shape[0])

    def to(self, device: torch.device | str) -> BlockWeight:
        """A copy on another device."""
        return replace(self, blocks=self.blocks.to(device))

    def followed_by(self, others: Sequence[BlockWeight]) -> BlockWeight:
        """One weight of its outputs and then those of ``others``, which are of its ``kind``."""
        return replace(self, blocks=torch.cat([self.blocks, *(other.blocks for other in others)]))

    def integer_product(self) -> IntegerProduct:
        """The product with activations in 8 bits."""
        num_outputs, num_inputs = self.shape
        unpacked = unpack(self.blocks.reshape(-1, self.type.num_bytes), self.type)
        return IntegerProduct(_in_groups(unpacked, num_outputs, num_inputs), self.dtype)


def _in_groups(unpacked: Unpacked, num_outputs: int, num_inputs: int) -> IntegerWeight:
    """The blocks of a weight ``[out, in]``, by output, in groups of ``ACTIVATION_GROUP`` inputs."""
    num_groups = num_inputs // ACTIVATION_GROUP

    def by_group(x: Tensor) -> Tensor:  # [out * groups, ...] -> [groups, out, ...]
        return x.unflatten(0, (num_outputs, num_groups)).transpose(0, 1).contiguous()

    def per_group(x: Tensor) -> Tensor:  # [blocks, parts], one for each group, or fewer
        repeats = num_outputs * num_groups // x.numel()
        return by_group(x.flatten().repeat_interleave(repeats))

    offsets, factors = unpacked.offsets, unpacked.factors
    return IntegerWeight(
        by_group(unpacked.values.reshape(-1, ACTIVATION_GROUP)),
        per_group(unpacked.scales),
        None if offsets is None else per_group(offsets),
        None if factors is None else by_group(factors.reshape(-1, 2)),
        multiplies_rest=True,
    )
