"""Small operations of a decoder layer that are one kernel each on CUDA.

In plain torch they are two to six kernels, and at small batches a step spends more time on them
than the bytes they move would take. Each is an operation of ``forethought::``, which compilers see
as one: on CUDA it launches a Triton kernel of ``fused_ops_triton.py``, on a CPU it is the plain
torch below, which is the reference.
"""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forethought.model import backends


def has_kernels(device: torch.device) -> bool:
    """Whether the operations are kernels on the device: on CUDA, where triton is installed."""
    return device.type == "cuda" and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotary embedding of x ``[T, heads, dim]``, with a ``rotary_table``'s entries."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    exact = x.float()
    scale = exact.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (exact * scale * weight).to(x.dtype)


def _silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)


def _rotate_and_store(
    qk: Tensor, v: Tensor, rotation: list[Tensor], slots: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    cos, sin = (table.float() for table in rotation)
    rotated = rotate(qk.float(), cos, sin).to(qk.dtype)
    q, k = rotated.split_with_sizes([qk.shape[1] - keys.shape[1], keys.shape[1]], 1)
    keys.index_copy_(0, slots, k)
    values.index_copy_(0, slots, v)
    return q.contiguous()


@functools.cache
def _kernels() -> ModuleType:
    return backends.cuda().fused_ops()


def _register(name: str, schema: str, reference: Any, fake: Any) -> Any:
    def launch(*operands: Any) -> Tensor:
        result: Tensor = getattr(_kernels(), name)(*operands)
        return result

    def on_cuda(*operands: Any) -> Tensor:
        with torch.cuda.device_of(operands[0]):  # Triton launches on the current device
            return launch(*operands)

    def on_cpu(*operands: Any) -> Tensor:
        is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        result: Tensor = launch(*operands) if is_interpreted else reference(*operands)
        return result

    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, on_cuda, "CUDA")
    _LIBRARY.impl(name, on_cpu, "CPU")
    torch.library.register_fake(f"forethought::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.forethought, name).default


_LIBRARY = torch.library.Library("forethought", "FRAGMENT")

rms_norm = _register(
    "rms_norm",
    "(Tensor x, Tensor weight, float eps) -> Tensor",
    _rms_norm,
    lambda x, weight, eps: torch.empty_like(x, memory_format=torch.contiguous_format),
)
"""``x / sqrt(mean(x^2) + eps) * weight`` in float32, rounded once.

Args:
    x: ``[T, width]``, or ``[T, heads, width]`` for a weight of each head.
    weight: ``[width]`` or ``[heads, width]``, contiguous.
    eps: added to the mean square.
"""

silu_and_mul = _register(
    "silu_and_mul",
    "(Tensor x) -> Tensor",
    _silu_and_mul,
    lambda x: x.new_empty(x.shape[0], x.shape[1] // 2),
)
"""``silu(gate) * up`` of x ``[T, 2 * width]`` = [gate, up]: ``[T, width]``, rounded once."""

rotate_and_store = _register(
    "rotate_and_store",
    "(Tensor qk, Tensor v, Tensor[] rotation, Tensor slots, Tensor(a!) keys, Tensor(b!) values)"
    " -> Tensor",
    _rotate_and_store,
    lambda qk, v, rotation, slots, keys, values: qk.new_empty(
        qk.shape[0], qk.shape[1] - keys.shape[1], qk.shape[2]
    ),
)
"""Rotate queries and keys, and write keys and values to the KV cache.

Args:
    qk: ``[T, heads + kv_heads, dim]``, the last dimension contiguous.
    v: ``[T, kv_heads, dim]``, the last dimension contiguous.
    rotation: cosines and signed sines ``[T, 1, dim]``; see ``rotary_table``.
    slots: int64 ``[T]``.
    keys, values: ``[slots, kv_heads, dim]`` of a layer, contiguous; written.

Returns:
    The rotated queries ``[T, heads, dim]``, contiguous.
"""
