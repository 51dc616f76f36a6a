"""Numbers on their way to a device, without a wait for what the device still computes, and back.

A copy from ordinary memory waits until the GPU has done all work that was queued before. A copy
from pinned memory is queued like that work. Pinned memory is taken from torch's cache, which hands
a block out again only when the copies that read it are done.

Numbers that come back are waited for, so a step reads all of them together (``Download``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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


class StaticBuffer:
    """Integers at fixed addresses on a device, as a CUDA graph reads them.

    Args:
        defaults: the arrays by name, with the values of places that a step does not write. Of the
            last one only the rows that are written are copied to the device.

    Attributes:
        tensors: by name, int64, views of one tensor.
    """

    def __init__(self, defaults: Mapping[str, Integers], device: torch.device | str) -> None:
        self._shapes = {name: array.shape for name, array in defaults.items()}
        self._begins: dict[str, int] = {}
        end = 0
        for name, array in defaults.items():
            self._begins[name], end = end, end + array.size + -array.size % ALIGNMENT
        self._last = next(reversed(self._begins))
        self._template = np.zeros(end, np.int64)
        for name, array in defaults.items():
            self._array(self._template, name)[:] = array
        self._device = torch.from_numpy(self._template.copy()).to(device)
        self.tensors = {
            name: self._device.narrow(0, self._begins[name], array.size).view(array.shape)
            for name, array in defaults.items()
        }

    def fill(self, values: Mapping[str, Integers | Sequence[int]]) -> None:
        """Queue one copy of the defaults with ``values`` written over the first places of each."""
        arrays = {name: np.asarray(value, np.int64) for name, value in values.items()}
        last = arrays.get(self._last)
        end = self._begins[self._last]
        end += 0 if last is None else len(last) * math.prod(self._shapes[self._last][1:])
        on_gpu = self._device.device.type == "cuda"
        host = torch.empty(end, dtype=torch.int64, pin_memory=on_gpu)
        staged = host.numpy()
        staged[:] = self._template[:end]
        for name, array in arrays.items():
            assert len(array) <= self._shapes[name][0]
            rows = self._array(staged, name, len(array))
            rows[tuple(map(slice, array.shape))] = array
        self._device.narrow(0, 0, end).copy_(host, non_blocking=True)

    def _array(self, flat: Integers, name: str, num_rows: int | None = None) -> Integers:
        """The array of a name, or its first rows, as a view of ``flat``."""
        shape, begin = self._shapes[name], self._begins[name]
        shape = shape if num_rows is None else (num_rows, *shape[1:])
        return flat[begin : begin + math.prod(shape)].reshape(shape)


class Download:
    """Tensors of one device that come to the host together: at most one transfer, and one wait."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def add(self, values: Tensor) -> int:
        """Add one of any shape, integers below 2**53; returns its index in what ``read``
        returns.
        """
        self._parts.append(values.reshape(-1))
        return len(self._parts) - 1

    def read(self) -> list[list[Any]]:
        """The numbers of each; integers stay integers, booleans may become 0 and 1."""
        parts = self._parts
        if len(parts) < 2 or parts[0].device.type == "cpu":
            return [part.tolist() for part in parts]
        is_float = [part.is_floating_point() for part in parts]
        dtype = torch.float64 if any(is_float) else torch.int64  # ids are exact in both
        numbers: list[Any] = torch.cat([part.to(dtype) for part in parts]).tolist()
        results, begin = list[list[Any]](), 0
        for part, keeps in zip(parts, is_float, strict=True):
            values, begin = numbers[begin : begin + len(part)], begin + len(part)
            results.append(values if keeps or dtype == torch.int64 else list(map(int, values)))
        return results


def upload(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers, or lists of them, as a tensor on a device."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
