"""Experts in a file, and a part of them in memory, for models that memory has no room for.

The experts of all layers are packed into one file, which has no name any more once it is open: it
is gone with the process. Which of them are in memory is up to ``expert_store.h``.
"""

from __future__ import annotations

import ctypes
import logging
import os
import tempfile
import time
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forethought.backends.cpu.library import load_library
from forethought.backends.cpu.structures import ExpertsStruct, LinearStruct, StoredExpertStruct
from forethought.errors import ModelError

logger = logging.getLogger(__name__)

_ALIGNMENT, _PAGE = 64, 4096
"""Of the tensors of an expert, and of experts in the file."""
_MEASURED = 100
"""Experts that are read to measure the speed of it."""
_TENSORS = ("weight", "scale", "zero")
"""Fields of a linear that point into its tensors; those of experts have no bias."""


_Linear = tuple[LinearStruct, Sequence[Tensor]]
"""With the tensors that it points into."""
_Array = ctypes.Array[LinearStruct]


class ExpertCounts(NamedTuple):
    """Of the store, since it was opened."""

    num_used: int
    """Experts that layers have used, each once in a step."""
    num_present: int
    """Those of them that were in memory."""
    num_read_ahead: int
    """Experts that were read before a layer asked for them."""


class ExpertStore:
    """Takes the experts of a network layer by layer; ``open`` it before they are used.

    Args:
        num_bytes: of memory for experts.

    Attributes:
        file_bytes: of all experts.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.file_bytes = num_bytes, 0
        try:
            self._file = tempfile.TemporaryFile(prefix="forethought-experts-")  # noqa: SIM115
        except OSError as error:
            raise _no_file(error) from error
        weakref.finalize(self, self._file.close)  # after what ``open`` leaves to be done
        self._stored: list[StoredExpertStruct] = []
        self._layers: list[ExpertsStruct] = []
        self._memory: Tensor | None = None
        self._address: int | None = None

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, gate_up: _Linear, down: _Linear) -> None:
        """Write an expert to the file. Its structs point nowhere then, until it is read. Raises
        ModelError where the file cannot take it.
        """
        places, chunks, size = dict[str, int](), list[Tensor](), 0
        for name, (struct, tensors) in (("gate_up", gate_up), ("down", down)):
            by_address = {tensor.data_ptr(): tensor for tensor in tensors}
            for field in _TENSORS:
                tensor = by_address.get(getattr(struct, field))
                places[f"{name}_{field}"] = -1 if tensor is None else size
                if tensor is not None:
                    chunks.append(tensor)
                    size += _rounded(tensor.nbytes, _ALIGNMENT)
                setattr(struct, field, None)
        self._write(chunks)
        size = _rounded(size, _PAGE)  # whole pages can be read past the system's cache, too
        self._stored.append(StoredExpertStruct(offset=self.file_bytes, size=size, **places))
        self.file_bytes += size

    def _write(self, chunks: Sequence[Tensor]) -> None:
        at = self.file_bytes
        try:
            for chunk in chunks:
                data = memoryview(chunk.reshape(-1).view(torch.uint8).numpy())
                for done in range(0, len(data), 2**30):  # a call writes less than 2 GiB
                    os.pwrite(self._file.fileno(), data[done : done + 2**30], at + done)
                at += _rounded(len(data), _ALIGNMENT)
        except OSError as error:
            raise _no_file(error) from error

    def add_layer(self, struct: ExpertsStruct, arrays: Sequence[_Array], first: int) -> None:
        """The layer whose experts were put from ``first`` on; ``arrays``: the linears that it
        computes with.
        """
        for index, stored in enumerate(self._stored[first:]):
            stored.gate_up, stored.down = (ctypes.pointer(array[index]) for array in arrays)
        struct.first_stored = first
        if self._layers:
            previous = self._layers[-1]
            previous.next_router, previous.next_stored = struct.router, first
        self._layers.append(struct)

    def open(self) -> None:
        """Begin to hold experts in memory.

        Raises ModelError where this is less than those of two layers: one computes, and the next
        one's are read meanwhile.
        """
        slot_bytes = max(stored.size for stored in self._stored)
        most = max(layer.num_experts for layer in self._layers)
        num_slots = min(self.num_bytes // slot_bytes, len(self._stored))
        if num_slots < min(2 * most, len(self._stored)):
            raise ModelError(
                f"{self.num_bytes / 2**30:.3g} GiB of memory for experts is too little",
                f"two layers have {2 * most} of {slot_bytes / 2**20:.3g} MiB",
                f"Give at least {2 * most * slot_bytes / 2**30:.3g} GiB by expert_memory",
            )
        os.ftruncate(self._file.fileno(), self.file_bytes)  # the last expert has a whole page
        self._memory = _aligned(num_slots * slot_bytes)
        library, array = load_library(), (StoredExpertStruct * len(self._stored))(*self._stored)
        self._address = library.open_experts(
            self._file.fileno(),
            array,
            len(self._stored),
            ctypes.c_void_p(self._memory.data_ptr()),
            num_slots,
            ctypes.c_int64(slot_bytes),
        )
        if self._address is None:
            raise ModelError("experts cannot be read ahead", "no thread can be started")
        weakref.finalize(self, library.close_experts, ctypes.c_void_p(self._address))
        for layer in self._layers:
            layer.store = self._address
        logger.info(
            "%d of %d experts (%.0f of %.0f MiB) are in memory at a time",
            num_slots,
            len(self._stored),
            num_slots * slot_bytes / 2**20,
            self.file_bytes / 2**20,
        )

    @property
    def memory_bytes(self) -> int:
        """Of the experts that are in memory at a time."""
        assert self._memory is not None, "it is open"
        return self._memory.nbytes

    @property
    def share_in_file(self) -> float:
        """Of the experts, that are not in memory at a time."""
        return 1 - self.memory_bytes / self.file_bytes

    def read_speed(self) -> float:
        """Bytes per second at which experts are read, one after the other."""
        buffer = memoryview(_aligned(max(stored.size for stored in self._stored)).numpy())
        began, size = time.perf_counter(), 0
        for stored in self._stored[:_MEASURED]:
            size += os.preadv(self.descriptor, [buffer[: stored.size]], stored.offset)
        return size / (time.perf_counter() - began)

    @property
    def descriptor(self) -> int:
        """Of the file, which is open for reading and writing."""
        return self._file.fileno()

    @property
    def counts(self) -> ExpertCounts:
        """What has been used and read so far."""
        counts = (ctypes.c_int64 * 3)()
        load_library().count_experts(ctypes.c_void_p(self._address), counts)
        return ExpertCounts(*counts)


def _aligned(num_bytes: int) -> Tensor:
    """Bytes that begin with a page."""
    memory = torch.empty(num_bytes + _PAGE, dtype=torch.uint8)
    return memory[-memory.data_ptr() % _PAGE :][:num_bytes]


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _no_file(error: OSError) -> ModelError:
    return ModelError(
        "experts cannot be stored in a file",
        f"{tempfile.gettempdir()}: {error.strerror or error}",
        "Make room there, choose another directory by TMPDIR, or leave expert_memory out",
    )
