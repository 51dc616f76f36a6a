"""Numbers on their way to a device, without a wait for what the device still computes.

A copy from ordinary memory waits until the GPU has done all work that was queued before. A copy
from pinned memory is queued like that work. Pinned memory is taken from torch's cache, which hands
a block out again only when the copies that read it are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int64]

ALIGNMENT = 2
"""Integers to a multiple of which each array is padded in a staging buffer: 16 bytes, so that a
compiled kernel sees the same alignment in every batch."""


class StagingBuffer:
    """Integers that go to a device together: one pinned buffer, one copy."""

    def __init__(self) -> None:
        self._parts: list[Integers] = []
        self._shapes: list[tuple[int, ...]] = []

    def add(self, values: Integers | Sequence[int]) -> None:
        """Add an array of any shape."""
        part = np.asarray(values, dtype=np.int64)
        self._shapes.append(part.shape)
        self._parts.append(part.reshape(-1))

    def upload(self, device: torch.device | str) -> list[Tensor]:
        """All arrays on the device, int64, in order: views of one tensor."""
        sizes = [len(part) for part in self._parts]
        padded = [size + -size % ALIGNMENT for size in sizes]
        staged = torch.empty(sum(padded), dtype=torch.int64, pin_memory=True)
        host, begin = staged.numpy(), 0
        for part, width in zip(self._parts, padded, strict=True):
            host[begin : begin + len(part)] = part
            begin += width
        parts = staged.to(device, non_blocking=True).split(padded)
        return [
            part[:size].view(shape)
            for part, size, shape in zip(parts, sizes, self._shapes, strict=True)
        ]


def upload(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers, or lists of them, as a tensor on a device."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
