"""RMS norms of modules, whose weights the native forward reads in float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forethought.backends.cpu.library import load_library
from forethought.model.device import native_threads


def norm_weight(norm: nn.Module | None) -> Tensor | None:
    """Float32 ``[size]``: what an RMS norm multiplies by; Gemma stores it less 1."""
    if norm is None:
        return None
    # A copy: a part of the file that the weights are read from would keep all of it mapped.
    weight = norm.weight.to(torch.float32, copy=True).contiguous()
    return weight + 1 if type(norm).__name__.startswith("Gemma3") else weight


def norm_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norms of float32 x ``[T, size]``, times a float32 weight ``[size]``."""
    y = torch.empty_like(x)
    num_rows, size = x.shape
    num_threads = native_threads()
    load_library().norm_rows(
        x.data_ptr(), weight.data_ptr(), num_rows, size, eps, y.data_ptr(), num_threads
    )
    return y


def norm_eps(norm: nn.Module) -> float:
    """The epsilon of an RMS norm, whatever its name."""
    eps = getattr(norm, "variance_epsilon", None)
    return float(norm.eps if eps is None else eps)
