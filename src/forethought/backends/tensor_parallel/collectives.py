"""Sums and broadcasts among the ranks of one model: torch.distributed without global state.

Each model has a process group of its own, gloo on CPUs and NCCL on GPUs, whose members find each
other through a file in a private directory, or on several machines through a port of rank 0's. Two
models of one process know nothing of each other, nor of a default process group that the program
may have.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
    except (RuntimeError, OSError) as error:
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


class Meeting(Protocol):
    """Where the ranks of one model find each other; rank 0 sends it to the others."""

    def store(self, size: int) -> Any:
        """What ``size`` ranks have in common, for one of them. Raises CollectiveError."""


@dataclass(frozen=True, slots=True)
class FileMeeting:
    """A file that no other group has used, in a directory that is there until the end."""

    path: Path

    def store(self, size: int) -> Any:
        """The file, which the first rank makes."""
        return dist.FileStore(str(self.path), size)


@dataclass(frozen=True, slots=True)
class PortMeeting:
    """A port of rank 0's machine, for ranks on several ones."""

    host: str
    port: int

    def store(self, size: int) -> Any:
        """A connection to rank 0; raises CollectiveError."""
        with _translated():
            return dist.TCPStore(self.host, self.port, size, timeout=TIMEOUT)

    @classmethod
    def open(cls, host: str, size: int) -> tuple[PortMeeting, Any]:
        """Listen at an address of this machine, for all ranks, this one among them.

        Raises CollectiveError.
        """
        with _translated():
            listener = socket.create_server((host, 0))
            port = listener.getsockname()[1]
            store = dist.TCPStore(
                host,
                port,
                size,
                is_master=True,
                timeout=TIMEOUT,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),  # at this address alone, and no other process
            )
        return cls(host, port), store


class Collectives:
    """The process group of one rank.

    It is made when all ranks make theirs, and on CPUs waits for them.

    Args:
        store: of the ranks' ``Meeting``.
        host: the address at which the other ranks reach this one, on CPUs.
        shard: this rank, and how many there are.
        device: of the tensors.

    Raises:
        CollectiveError: a rank is missing.
    """

    def __init__(self, store: Any, host: str, shard: Shard, device: torch.device) -> None:
        self.shard, self.device, self._store = shard, device, store
        with _translated():
            self._group = self._connect(shard, host)

    def _connect(self, shard: Shard, host: str) -> Any:
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            return dist.ProcessGroupNCCL(self._store, shard.rank, shard.size, options)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
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
        """Close the group, and its store."""
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
