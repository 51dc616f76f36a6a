"""Experts in a file, and a part of them in memory, for models that memory has no room for.

The experts of all layers are packed into one file (``weight_file.py``). Which of them are in memory
is up to ``expert_store.h``.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from forethought.backends.cpu.library import load_library
from forethought.backends.cpu.structures import ExpertsStruct, LinearStruct, StoredExpertStruct
from forethought.backends.cpu.weight_file import TENSOR_FIELDS, WeightFile, aligned, take_tensors
from forethought.errors import ModelError

logger = logging.getLogger(__name__)

_START_FIELDS = tuple(
    f"{name}_{field}" for name in ("gate_up", "down") for field in TENSOR_FIELDS[:3]
)
"""Fields of ``StoredExpertStruct`` that say where a tensor is; the linears have no bias."""

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
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._file = WeightFile("experts", "expert_memory")
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
        tensors = dict[str, Tensor]()
        for name, (struct, linear_tensors) in (("gate_up", gate_up), ("down", down)):
            owned = take_tensors(struct, linear_tensors)
            tensors |= {f"{name}_{field}": tensor for field, tensor in owned.items()}
        stored = self._file.add([*tensors.values()])
        starts = dict.fromkeys(_START_FIELDS, -1) | dict(zip(tensors, stored.starts, strict=True))
        self._stored.append(StoredExpertStruct(offset=stored.offset, size=stored.size, **starts))

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
        max_experts = max(layer.num_experts for layer in self._layers)
        num_slots = min(self.num_bytes // slot_bytes, len(self._stored))
        if num_slots < min(2 * max_experts, len(self._stored)):
            raise ModelError(
                f"{self.num_bytes / 2**30:.3g} GiB of memory for experts is too little",
                f"two layers have {2 * max_experts} of {slot_bytes / 2**20:.3g} MiB",
                f"Give at least {2 * max_experts * slot_bytes / 2**30:.3g} GiB by expert_memory",
            )
        self._memory = aligned(num_slots * slot_bytes)
        library, array = load_library(), (StoredExpertStruct * len(self._stored))(*self._stored)
        self._address = library.open_experts(
            self._file.descriptor,
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
        return self._file.read_speed()

    @property
    def file_bytes(self) -> int:
        """Of all experts."""
        return self._file.num_bytes

    @property
    def descriptor(self) -> int:
        """Of the file, which is open for reading and writing."""
        return self._file.descriptor

    @property
    def counts(self) -> ExpertCounts:
        """What has been used and read so far."""
        counts = (ctypes.c_int64 * 3)()
        load_library().count_experts(ctypes.c_void_p(self._address), counts)
        return ExpertCounts(*counts)
