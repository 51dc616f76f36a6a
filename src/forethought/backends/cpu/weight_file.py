"""Packed weights in a file that has no name: the system deletes it when the process ends."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor

from forethought.backends.cpu.cache import cache_directories
from forethought.backends.cpu.library import load_library
from forethought.backends.cpu.structures import LinearStruct
from forethought.errors import ModelError

_ALIGNMENT, _PAGE = 64, 4096
"""Of tensors, and of what ``add`` writes in one."""
TENSOR_FIELDS = ("weight", "scale", "zero", "bias")
"""Fields of a ``LinearStruct`` that point to its tensors."""
_MAX_WRITE = 2**30
"""Bytes that a call writes at most: the system takes less than 2 GiB."""


class Stored(NamedTuple):
    """Tensors that are stored together, in whole pages of the file."""

    offset: int
    size: int
    starts: list[int]
    """Of each tensor, in bytes from ``offset``."""


def take_tensors(struct: LinearStruct, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Those of ``tensors`` that the pointers of a linear point to, by field, in the order of
    ``TENSOR_FIELDS``; the pointers are null then.
    """
    by_address, owned = {tensor.data_ptr(): tensor for tensor in tensors}, dict[str, Tensor]()
    for field in TENSOR_FIELDS:
        tensor = by_address.get(getattr(struct, field))
        if tensor is not None:
            owned[field] = tensor
            setattr(struct, field, None)
    return owned


class WeightFile:
    """Takes tensors that are read together.

    Args:
        content: what messages call them.
        option: that asks for the file.

    Attributes:
        num_bytes: of what it has.
    """

    def __init__(self, content: str, option: str) -> None:
        self._content, self._option, self.num_bytes = content, option, 0
        self._directory = Path()
        try:
            self._file = self._opened()
        except OSError as error:
            raise self._refusal(error) from error
        weakref.finalize(self, self._file.close)
        self._stored: list[Stored] = []

    def add(self, tensors: Sequence[Tensor]) -> Stored:
        """Write tensors. Raises ModelError where the file cannot take them."""
        starts, end = list[int](), self.num_bytes
        try:
            for tensor in tensors:
                starts.append(end - self.num_bytes)
                data = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
                done = 0
                while done < len(data):  # the system may write less than it is given
                    part = data[done : done + _MAX_WRITE]
                    done += os.pwrite(self.descriptor, part, end + done)
                end += _rounded(len(data), _ALIGNMENT)
            # Whole pages can be read past the system's cache, too.
            stored = Stored(self.num_bytes, _rounded(end - self.num_bytes, _PAGE), starts)
            os.ftruncate(self.descriptor, stored.offset + stored.size)
        except OSError as error:
            raise self._refusal(error) from error
        self.num_bytes += stored.size
        self._stored.append(stored)
        return stored

    def leave_cache(self, stored: Stored) -> None:
        """Write what was added to the disk, and drop it from the system's cache. Raises ModelError
        where the disk cannot take it.
        """
        try:
            os.fsync(self.descriptor)
        except OSError as error:
            raise self._refusal(error) from error
        if hasattr(os, "posix_fadvise"):
            where = stored.offset, stored.size
            os.posix_fadvise(self.descriptor, *where, os.POSIX_FADV_DONTNEED)

    def check_room(self, num_bytes: int) -> None:
        """Raise ModelError where there is no room for them."""
        system = os.fstatvfs(self.descriptor)
        if system.f_bavail * system.f_frsize < num_bytes:
            raise self._refusal(OSError(0, f"it has no room for {num_bytes / 2**30:.3g} GiB"))

    def uncached_descriptor(self) -> int:
        """Of the same file, read past the system's cache where the system can do that; to be closed
        by the caller.
        """
        path = f"/proc/self/fd/{self.descriptor}"
        try:
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        except OSError:  # not of this file system, or there is no such path
            return os.dup(self.descriptor)
        try:
            os.preadv(descriptor, [memoryview(aligned(_PAGE).numpy())], 0)
        except OSError:
            os.close(descriptor)
            return os.dup(self.descriptor)
        return descriptor

    def read_speed(self, descriptor: int | None = None, max_parts: int = 100) -> float:
        """Bytes per second at which what was added is read, one after the other, at most
        ``max_parts`` additions; by another descriptor of the file, if there is one.
        """
        parts = self._stored[:max_parts]
        buffer = memoryview(aligned(max(part.size for part in parts)).numpy())
        began, size = time.perf_counter(), 0
        for part in parts:
            size += os.preadv(descriptor or self.descriptor, [buffer[: part.size]], part.offset)
        return size / (time.perf_counter() - began)

    @property
    def descriptor(self) -> int:
        """Of the file, which is open for reading and writing."""
        return self._file.fileno()

    def _opened(self) -> IO[bytes]:
        """A new file on a disk."""
        for directory in _directories():
            self._directory = directory
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = tempfile.TemporaryFile(prefix="forethought-weights-", dir=directory)  # noqa: SIM115
            if not load_library().is_in_memory(file.fileno()):
                return file
            file.close()
        raise OSError(0, "it is in the memory of the machine, as tmpfs is")

    def _refusal(self, error: OSError) -> ModelError:
        return ModelError(
            f"{self._content} cannot be stored in a file",
            f"{self._directory}: {error.strerror or error}",
            f"Make room there, choose another directory by TMPDIR, or leave {self._option} out",
        )


def _directories() -> Iterator[Path]:
    """That of temporary files, and the cache's, as the first one is in memory on many systems."""
    with contextlib.suppress(FileNotFoundError):  # none of those can be written
        yield Path(tempfile.gettempdir())
    yield from (directory.parent for directory in cache_directories()[:1])


def aligned(num_bytes: int) -> Tensor:
    """Bytes that begin with a page."""
    memory = torch.empty(num_bytes + _PAGE, dtype=torch.uint8)
    return memory[-memory.data_ptr() % _PAGE :][:num_bytes]


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
