"""``x W^T`` for few rows of x as one Triton kernel that reads W once, to compare with cuBLAS.

A program computes some outputs of all rows. One row is multiplied and summed, several are a matrix
product whose rows are padded to 16.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forethought.model.attention.paged_layout import next_power_of_2

Block = tuple[int, int, int]
"""Outputs and inputs of a block of W, and warps of a program."""
BLOCKS: list[Block] = [(8, 512, 4), (16, 256, 4), (16, 512, 8), (32, 256, 8), (16, 128, 4)]
MIN_DOT = 16
"""Rows that a matrix product of Triton has at least."""


@triton.jit
def _multiply(
    x_ptr,
    w_ptr,
    y_ptr,
    outputs,
    inputs,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, PADDED)
    total = tl.zeros([PADDED, OUTPUTS], tl.float32)
    for begin in range(0, inputs, INPUTS):
        k = begin + tl.arange(0, INPUTS)
        inside = k < inputs
        w = tl.load(
            w_ptr + n[None].to(tl.int64) * inputs + k[:, None],
            mask=(n < outputs)[None] & inside[:, None],
            other=0.0,
        )
        x = tl.load(
            x_ptr + row[:, None] * inputs + k[None],
            mask=(row < ROWS)[:, None] & inside[None],
            other=0.0,
        )
        if PADDED == 1:
            wide = tl.trans(x).to(tl.float32) * w.to(tl.float32)
            total += tl.sum(wide, 0)[None]
        else:
            total += tl.dot(x, w, input_precision="ieee")
    tl.store(
        y_ptr + row[:, None] * outputs + n[None],
        total.to(y_ptr.dtype.element_ty),
        mask=(row < ROWS)[:, None] & (n < outputs)[None],
    )


def multiply(x: Tensor, weight: Tensor, block: Block) -> Tensor:
    """x ``[rows, inputs]``, weight ``[outputs, inputs]``, contiguous -> ``[rows, outputs]``."""
    (rows, inputs), outputs = x.shape, len(weight)
    y = x.new_empty(rows, outputs)
    num_outputs, num_inputs, warps = block
    padded = 1 if rows == 1 else max(MIN_DOT, next_power_of_2(rows))
    if padded > 1:
        num_outputs = max(MIN_DOT, num_outputs)
    _multiply[(-(-outputs // num_outputs),)](
        *(x, weight, y, outputs, inputs, rows, padded, num_outputs, num_inputs), num_warps=warps
    )
    return y
