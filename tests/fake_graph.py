"""A CUDA graph without CUDA: operations on tensors, recorded once and repeated on the same memory.

As in a real graph, everything that Python decided while it was captured is frozen: numbers, shapes,
which tensors are read and written. What a replay does not compute keeps its old value. Before each
replay all tensors that the graph made are poisoned, so that a value left from the capture or from
the replay before is never right by accident.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fake_cuda


class _Recorder(TorchDispatchMode):
    """Records what is computed in its context."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.made: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_memory(leaf) for leaf in _tensors((args, kwargs))}
        found = _tensors(result)
        self.calls.append((func, args, kwargs or {}, found))
        self.made += [each for each in found if _memory(each) not in given]
        return result


class FakeGraph:
    """See the top of this file.

    Args:
        compute: what is captured; it runs once, with what its inputs hold.
    """

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        before = _waits()
        with _Recorder() as recorder:
            self.output = compute()
        assert _waits() == before, "a capture neither waits nor copies from the host"
        self._recorder = recorder
        self.num_replays = 0

    def replay(self) -> None:
        """Repeat every operation on the same tensors; one launch."""
        self.num_replays += 1
        device = fake_cuda.active()
        counts = None if device is None else (device.counts.copy(), device.sites.copy())
        with torch.inference_mode():
            for each in self._recorder.made:
                each.fill_(float("nan") if each.dtype.is_floating_point else 77)
            for call in self._recorder.calls:
                _repeat(*call)
        if device is not None and counts is not None:
            device.counts, device.sites = counts
            device._count("launches")


def _repeat(func: Any, args: Any, kwargs: Any, found: list[Tensor]) -> None:
    for old, new in zip(found, _tensors(func(*args, **kwargs)), strict=True):
        if _memory(old) != _memory(new):
            old.copy_(new)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    host = tensor.host if isinstance(tensor, fake_cuda.CudaTensor) else tensor
    return host.untyped_storage().data_ptr() if host.numel() else id(host)


def _waits() -> tuple[int, ...]:
    device = fake_cuda.active()
    if device is None:
        return ()
    return tuple(device.counts[kind] for kind in ("uploads", "staged", "waits"))
