"""The Triton kernels of ``fused_ops.py``; the functions take the operations' arguments."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forethought.model.attention.paged_layout import next_power_of_2

SILU_BLOCK = 1024
"""Outputs of a program."""


@triton.jit
def _rms_norm(x_ptr, weight_ptr, out_ptr, weights, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    inside = n < WIDTH
    begin = row.to(tl.int64) * WIDTH
    x = tl.load(x_ptr + begin + n, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + (row % weights) * WIDTH + n, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    y = x * scale * weight.to(tl.float32)
    tl.store(out_ptr + begin + n, y.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """One program per token, or per token and head."""
    x = x.contiguous()
    out = x.new_empty(x.shape)
    width = x.shape[-1]
    block = next_power_of_2(width)
    if rows := x.numel() // width:
        _rms_norm[(rows,)](
            *(x, weight, out, weight.numel() // width, eps, width, block),
            num_warps=max(1, min(8, block // 512)),
        )
    return out


@triton.jit
def _silu_and_mul(x_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < WIDTH
    gate = tl.load(x_ptr + row * 2 * WIDTH + n, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * WIDTH + WIDTH + n, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * WIDTH + n, y.to(out_ptr.dtype.element_ty), mask=inside)


def silu_and_mul(x: Tensor) -> Tensor:
    """One program per token and ``SILU_BLOCK`` outputs."""
    x = x.contiguous()
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, width)
    if rows:
        _silu_and_mul[(rows, -(-width // SILU_BLOCK))](x, out, width, SILU_BLOCK)
    return out


@triton.jit
def _rotate_and_store(
    qk_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    qk_stride,
    qk_head_stride,
    v_stride,
    v_head_stride,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token and head: first the queries' heads, then the keys', then the values'."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.arange(0, BLOCK)
    inside = n < DIM
    slot = tl.load(slots_ptr + token)
    if head < HEADS + KV_HEADS:
        x_ptr = qk_ptr + token * qk_stride + head * qk_head_stride
        x = tl.load(x_ptr + n, mask=inside, other=0.0).to(tl.float32)
        across = tl.load(x_ptr + (n + DIM // 2) % DIM, mask=inside, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + token * table_stride + n, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + token * table_stride + n, mask=inside, other=0.0).to(tl.float32)
        y = x * cos + across * sin
        if head < HEADS:
            to_ptr = q_ptr + (token * HEADS + head) * DIM
        else:
            to_ptr = keys_ptr + (slot * KV_HEADS + head - HEADS) * DIM
        tl.store(to_ptr + n, y.to(q_ptr.dtype.element_ty), mask=inside)
    else:
        kv_head = head - HEADS - KV_HEADS
        v = tl.load(v_ptr + token * v_stride + kv_head * v_head_stride + n, mask=inside, other=0.0)
        tl.store(values_ptr + (slot * KV_HEADS + kv_head) * DIM + n, v, mask=inside)


def rotate_and_store(
    qk: Tensor, v: Tensor, rotation: list[Tensor], slots: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """One program per token and head."""
    (cos, sin), kv_heads = rotation, keys.shape[1]
    tokens, heads, dim = qk.shape[0], qk.shape[1] - kv_heads, qk.shape[2]
    assert cos.stride() == sin.stride()
    q = qk.new_empty(tokens, heads, dim)
    strides = (*qk.stride()[:2], *v.stride()[:2], cos.stride(0))
    if tokens:
        _rotate_and_store[(tokens, heads + 2 * kv_heads)](
            *(qk, v, cos, sin, slots, q, keys, values, *strides),
            *(heads, kv_heads, dim, next_power_of_2(dim)),
            num_warps=1,
        )
    return q
