"""Keys and values as a cache holds them: in floats, or in int8 with a scale of each entry.

An entry is what one token has in one KV head. In int8 it is ``dim`` integers ``q``, symmetric, and
the four bytes of a float32 ``scale``, with ``x = scale * q`` and ``scale = max |x| / 127``::

    int8 [dim + 4]      [ q 0..dim | scale ]

So whatever copies, moves or saves slots copies scales with them. An entry depends on its token and
head alone: it is the same in every batch, and with drafts or without. ``entries.h`` writes the same
bytes in the C++ forward, of which this is the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
_LARGEST = 127


def stored_dim(dim: int, dtype: torch.dtype) -> int:
    """Elements of an entry of ``dim`` numbers."""
    return dim + SCALE_BYTES if dtype == torch.int8 else dim


def to_entries(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``[..., dim]`` -> ``[..., stored_dim]`` in ``dtype``. An entry with numbers that are not
    finite is NaN when it is read.
    """
    if dtype != torch.int8:
        return x.to(dtype)
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True) / _LARGEST
    has_values = (scales > 0) & scales.isfinite()
    quotients = torch.where(has_values, x / scales, 0.0)
    integers = quotients.round().clamp(-_LARGEST, _LARGEST).to(torch.int8)
    return torch.cat([integers, scales.contiguous().view(torch.int8)], -1)


def from_entries(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """``[..., stored_dim]`` -> ``[..., dim]`` in ``dtype``; unchanged where it is that."""
    if stored.dtype != torch.int8:
        return stored.to(dtype)
    dim = stored.shape[-1] - SCALE_BYTES
    scales = stored[..., dim:].contiguous().view(torch.float32)
    return (stored[..., :dim] * scales).to(dtype)
