"""Sums and broadcasts among the ranks of one model: torch.distributed without global state.

Each model has a process group of its own, gloo on CPUs and NCCL on GPUs, whose members find each
other through a file in a private directory. Two models of one process know nothing of each other,
nor of a default process group that the program may have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from forethought.backends.tensor_parallel.shard import Shard
from forethought.model.llama.layers import Projection

TIMEOUT = timedelta(minutes=5)
"""After which a rank that does not take part in a collective is given up."""
LOOPBACK = "127.0.0.1"


class CollectiveError(Exception):
    """A collective failed: another rank has ended, or does not answer."""


@contextmanager
def _translated() -> Iterator[None]:
    """Raise what torch raises as CollectiveError."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(str(error).split("This is typically", 1)[0].strip()) from error


class Sums(Protocol):
    """Adds up the tensors of all ranks."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the ranks' x, in place of x."""
        ...


def missing_backend(device_type: str) -> str | None:
    """What torch lacks for collectives on a device; None: nothing."""
    if not dist.is_available():
        return "this torch is built without torch.distributed"
    if device_type == "cuda":
        return None if dist.is_nccl_available() else "this torch is built without NCCL"
    return None if dist.is_gloo_available() else "this torch is built without gloo"


class Collectives:
    """The process group of one rank.

    It is made when all ranks make theirs, and on CPUs waits for them.

    Args:
        path: of a file that no other group has used, in a directory that is there until the end.
        shard: this rank, and how many there are.
        device: of the tensors.

    Raises:
        CollectiveError: a rank is missing.
    """

    def __init__(self, path: Path, shard: Shard, device: torch.device) -> None:
        self.shard, self.device = shard, device
        self._store: Any = dist.FileStore(str(path), shard.size)
        with _translated():
            self._group = self._connect(shard)

    def _connect(self, shard: Shard) -> Any:
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            return dist.ProcessGroupNCCL(self._store, shard.rank, shard.size, options)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = TIMEOUT
        return dist.ProcessGroupGloo(self._store, shard.rank, shard.size, options)

    def meet(self) -> None:
        """Wait for the other ranks, on GPUs too; raises CollectiveError."""
        num_ranks = int(self.all_reduce(torch.ones(1, device=self.device)))
        assert num_ranks == self.shard.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the ranks' x, in place of x; raises CollectiveError."""
        with _translated():
            self._group.allreduce([x]).wait()
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrite the other ranks' x by that of rank 0; raises CollectiveError."""
        with _translated():
            self._group.broadcast(x, 0).wait()
        return x

    def abort(self) -> None:
        """End operations that wait on a GPU for a rank that has ended. On a CPU they end alone."""
        if self.device.type == "cuda":
            self._group.abort()

    def close(self) -> None:
        """Close the group and remove its file."""
        self._group = self._store = None


class ReducedProjection(Projection):
    """A product whose weight is cut by its inputs: the sum of the products of all ranks.

    Args:
        projection: this rank's product.
        sums: of the ranks.
    """

    def __init__(self, projection: Projection, sums: Sums) -> None:
        self._own, self._sums = projection, sums

    @override
    def __call__(self, x: Tensor) -> Tensor:
        return self._sums.all_reduce(self._own(x))

    @override
    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self(x).add_(other)

    @override
    def silu(self, x: Tensor) -> Tensor:
        return torch.nn.functional.silu(self(x))
