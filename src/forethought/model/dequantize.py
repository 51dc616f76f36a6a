"""Weights from the blocks of a GGUF file.

A block holds ``type.num_weights`` inputs of one output: integers, and the scales that they share.
``unpack`` gives both, for products of integers; ``dequantize`` gives the weights in float32, to the
last bit those of the format's reference implementation (the ``gguf`` package).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from forethought.errors import ModelError
from forethought.gguf.block_type import BlockType

DEQUANTIZED_WEIGHTS = 2**18
"""That are dequantised at a time: what is computed for them takes several times their memory."""
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the value of each pattern: the exponent is one less."""
_FLOATS = {
    BlockType.F32: torch.float32,
    BlockType.F16: torch.float16,
    BlockType.BF16: torch.bfloat16,
}


class Unpacked(NamedTuple):
    """N blocks as integers: a weight is ``values * (scales * factors) + offsets``.

    Attributes:
        values: int8 or uint8 ``[N, num_weights]``.
        scales: float32 ``[N, parts]``, of as many equal parts of a block.
        offsets: float32 ``[N, parts]``; None: 0.
        factors: int8 ``[N, smaller parts]``; None: 1.
    """

    values: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    factors: Tensor | None = None

    def dequantize(self) -> Tensor:
        """Float32 ``[N, num_weights]``."""
        scales = self.scales
        if self.factors is not None:
            repeats = self.factors.shape[1] // scales.shape[1]
            scales = scales.repeat_interleave(repeats, 1) * self.factors
        weights = self.values.unflatten(1, (scales.shape[1], -1)) * scales[..., None]
        if self.offsets is not None:
            weights += self.offsets[..., None]
        return weights.flatten(1)


def dequantize(raw: Tensor, kind: BlockType) -> Tensor:
    """Rows of blocks, uint8 ``[rows, bytes]``, in float32 ``[rows, inputs]``.

    Raises:
        ModelError: the type is not read.
    """
    check_type(kind)
    if kind in _FLOATS:
        return _as(raw, _FLOATS[kind]).float()
    num_inputs = raw.shape[1] // kind.num_bytes * kind.num_weights
    weights = raw.new_empty((len(raw), num_inputs), dtype=torch.float32)
    num_rows = max(1, DEQUANTIZED_WEIGHTS // max(1, num_inputs))
    for rows, part in zip(raw.split(num_rows), weights.split(num_rows), strict=True):
        part.copy_(unpack(rows.reshape(-1, kind.num_bytes), kind).dequantize().view(part.shape))
    return weights


def unpack(blocks: Tensor, kind: BlockType) -> Unpacked:
    """Integers and scales of blocks, uint8 ``[N, num_bytes]``, of a type with integers."""
    return _UNPACK[kind](blocks)


def check_type(kind: BlockType) -> None:
    """Raises ModelError if blocks of the type are not read."""
    if kind not in _FLOATS and kind not in _UNPACK:
        names = ", ".join(known.name for known in (*_FLOATS, *_UNPACK))
        raise ModelError(
            f"weights in {kind.name} are not read",
            f"the types that are: {names}",
            "Give a file in one of them, such as Q4_K_M or Q8_0",
        )


def _as(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes ``[..., size]`` as numbers, copied to where they are aligned."""
    return raw.clone(memory_format=torch.contiguous_format).view(dtype)


def _halves(blocks: Tensor, begin: int, count: int = 1) -> Tensor:
    """``count`` numbers in float16 from byte ``begin`` on, in float32 ``[N, count]``."""
    return _as(blocks[:, begin : begin + 2 * count], torch.float16).float()


def _bits(packed: Tensor, width: int, run: int) -> Tensor:
    """Fields of ``width`` bits of bytes ``[N, size]``, the low ones first: those of ``run`` bytes,
    then the next ones of the same bytes; uint8 ``[N, size * 8 / width]``.
    """
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    fields = packed.unflatten(1, (-1, 1, run)) >> shifts[:, None] & (1 << width) - 1
    return fields.flatten(1)


def _signed(values: Tensor, offset: int) -> Tensor:
    """Unsigned integers less an offset, int8."""
    return values.to(torch.int8) - offset


def _q4_0(blocks: Tensor) -> Unpacked:
    return Unpacked(_signed(_bits(blocks[:, 2:], 4, 16), 8), _halves(blocks, 0))


def _q4_1(blocks: Tensor) -> Unpacked:
    return Unpacked(_bits(blocks[:, 4:], 4, 16), _halves(blocks, 0), _halves(blocks, 2))


def _with_fifth_bit(blocks: Tensor, begin: int) -> Tensor:
    """Integers of 5 bits: 32 high ones from byte ``begin`` on, then nibbles."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = blocks[:, begin : begin + 4, None] >> shifts & 1
    return _bits(blocks[:, begin + 4 :], 4, 16) | high.flatten(1) << 4


def _q5_0(blocks: Tensor) -> Unpacked:
    return Unpacked(_signed(_with_fifth_bit(blocks, 2), 16), _halves(blocks, 0))


def _q5_1(blocks: Tensor) -> Unpacked:
    return Unpacked(_with_fifth_bit(blocks, 4), _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: Tensor) -> Unpacked:
    return Unpacked(_as(blocks[:, 2:], torch.int8), _halves(blocks, 0))


def _q2_k(blocks: Tensor) -> Unpacked:
    scales, large = blocks[:, :16], _halves(blocks, 80, 2)
    values = _bits(blocks[:, 16:80], 2, 32)
    return Unpacked(values, large[:, :1] * (scales & 15), -large[:, 1:] * (scales >> 4))


def _q3_k(blocks: Tensor) -> Unpacked:
    high, low = _bits(blocks[:, :32], 1, 32), _bits(blocks[:, 32:96], 2, 32)
    scales = _bits(blocks[:, 96:104], 4, 8) | _bits(blocks[:, 104:108], 2, 4) << 4
    values = low.to(torch.int8) - ((high ^ 1) << 2).to(torch.int8)
    return Unpacked(values, _halves(blocks, 108), factors=_signed(scales, 32))


def _small_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets ``[N, 8]`` of Q4_K and Q5_K, from 8 scales and 8 minima in 6 bits."""
    large, packed = _halves(blocks, 0, 2), blocks[:, 4:16]
    first, rest = packed[:, :8].unflatten(1, (2, 4)), packed[:, 8:]  # [N, 2, 4], [N, 4]
    low = torch.stack([rest & 15, rest >> 4], 1)
    small = torch.cat([first & 63, low | first >> 2 & 48], 2)  # [N, 2, 8]
    return large[:, :1] * small[:, 0], -large[:, 1:] * small[:, 1]


def _q4_k(blocks: Tensor) -> Unpacked:
    return Unpacked(_bits(blocks[:, 16:], 4, 32), *_small_scales(blocks))


def _q5_k(blocks: Tensor) -> Unpacked:
    values = _bits(blocks[:, 48:], 4, 32) | _bits(blocks[:, 16:48], 1, 32) << 4
    return Unpacked(values, *_small_scales(blocks))


def _q6_k(blocks: Tensor) -> Unpacked:
    values = _bits(blocks[:, :128], 4, 64) | _bits(blocks[:, 128:192], 2, 32) << 4
    factors = _as(blocks[:, 192:208], torch.int8)
    return Unpacked(_signed(values, 32), _halves(blocks, 208), factors=factors)


def _values_of(table: tuple[int, ...], indices: Tensor) -> Tensor:
    return torch.tensor(table, dtype=torch.int8, device=indices.device)[indices.int()]


def _iq4_nl(blocks: Tensor) -> Unpacked:
    return Unpacked(_values_of(_IQ4_VALUES, _bits(blocks[:, 2:], 4, 16)), _halves(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Unpacked:
    low, high = _bits(blocks[:, 4:8], 4, 1), _bits(blocks[:, 2:4], 2, 1)
    values = _values_of(_IQ4_VALUES, _bits(blocks[:, 8:], 4, 16))
    return Unpacked(values, _halves(blocks, 0), factors=_signed(low | high << 4, 32))


def _mxfp4(blocks: Tensor) -> Unpacked:
    exponents = blocks[:, :1].int()  # of 2, plus 128; the two smallest scales are not normal
    bits = torch.where(exponents < 2, 0x200000 << exponents.clamp(max=1), (exponents - 1) << 23)
    return Unpacked(_values_of(_FP4_VALUES, _bits(blocks[:, 1:], 4, 16)), bits.view(torch.float32))


_UNPACK: dict[BlockType, Callable[[Tensor], Unpacked]] = {
    BlockType.Q4_0: _q4_0,
    BlockType.Q4_1: _q4_1,
    BlockType.Q5_0: _q5_0,
    BlockType.Q5_1: _q5_1,
    BlockType.Q8_0: _q8_0,
    BlockType.Q2_K: _q2_k,
    BlockType.Q3_K: _q3_k,
    BlockType.Q4_K: _q4_k,
    BlockType.Q5_K: _q5_k,
    BlockType.Q6_K: _q6_k,
    BlockType.IQ4_NL: _iq4_nl,
    BlockType.IQ4_XS: _iq4_xs,
    BlockType.MXFP4: _mxfp4,
}
