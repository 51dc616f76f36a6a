"""Blocks of GGUF files: random ones, and those that the format's reference implementation makes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from forethought.gguf.block_type import BlockType
from gguf import GGMLQuantizationType, quants

SCALES_AT = {
    BlockType.Q4_1: (0, 2),
    BlockType.Q5_1: (0, 2),
    BlockType.Q2_K: (80, 82),
    BlockType.Q3_K: (108,),
    BlockType.Q4_K: (0, 2),
    BlockType.Q5_K: (0, 2),
    BlockType.Q6_K: (208,),
    BlockType.MXFP4: (),
}
"""Bytes of a block where numbers in float16 begin; of other types: at 0."""


def random_blocks(kind: BlockType, num_outputs: int, num_inputs: int, seed: int = 0) -> Tensor:
    """Uint8 ``[out, bytes]``: any bits, but for scales, which are normal numbers about 1."""
    source = np.random.default_rng(seed)
    size = (num_outputs, num_inputs // kind.num_weights, kind.num_bytes)
    raw = source.integers(0, 256, size, dtype=np.uint8)
    for at in SCALES_AT.get(kind, (0,)):
        scales = source.standard_normal((*size[:2], 1)).astype(np.float16)
        raw[:, :, at : at + 2] = scales.view(np.uint8)
    if kind == BlockType.MXFP4:
        raw[:, :, 0] = raw[:, :, 0] % 250
    return torch.from_numpy(raw).flatten(1)


def quantized_blocks(kind: BlockType, weight: Tensor) -> Tensor | None:
    """Those of a weight ``[out, in]``; None: the reference implementation only reads the type."""
    try:
        raw = quants.quantize(weight.numpy(), GGMLQuantizationType(kind.number))
    except NotImplementedError:
        return None
    return torch.from_numpy(raw.view(np.uint8))


def reference_weights(kind: BlockType, raw: Tensor) -> Tensor:
    """Float32 ``[out, in]``, as the reference implementation dequantises them."""
    if kind == BlockType.F16:
        return torch.from_numpy(raw.numpy().view(np.float16).astype(np.float32))
    return torch.from_numpy(quants.dequantize(raw.numpy(), GGMLQuantizationType(kind.number)))
