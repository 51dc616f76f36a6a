"""Heads of residual blocks over one hidden state, all of them in one call of ``forward.cpp``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from forethought.model.native.library import LinearStruct, load_library
from forethought.model.native.weights import PackedLinear


class NativeHeads:
    """Each head is ``x + silu(W x + b)``, so many times, and a projection; all read one state.

    Args:
        heads: the linears of each one, those of its blocks and then the projection.
        dtype: of the packed weights.
    """

    def __init__(self, heads: Sequence[Sequence[nn.Linear]], dtype: torch.dtype) -> None:
        self._library, self._num_blocks = load_library(), len(heads[0]) - 1
        self._packed = [
            PackedLinear.pack(
                linear.weight.to(dtype), None if linear.bias is None else linear.bias.to(dtype)
            )
            for linears in heads
            for linear in linears
        ]
        structs = [packed.struct for packed in self._packed]
        self._structs = (LinearStruct * len(structs))(*structs)
        self._num_outputs = heads[0][-1].out_features

    def __call__(self, states: Tensor, count: int = 1) -> Tensor:
        """The first ``count`` heads: states ``[N, width]`` -> float32 ``[count, N, outputs]``."""
        x = states.float().contiguous()
        logits = torch.empty(count, len(x), self._num_outputs, dtype=torch.float32)
        self._library.residual_heads(
            self._structs,
            count,
            self._num_blocks,
            ctypes.c_void_p(x.data_ptr()),
            len(x),
            ctypes.c_void_p(logits.data_ptr()),
            torch.get_num_threads(),
        )
        return logits
