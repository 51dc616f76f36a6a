"""Layers in a file, and a few of them in memory, for models that memory has no room for.

Of ``size`` layers in memory all but two stay there, as every forward uses each layer once and in
the same order: a window that slid over all of them (TPI-LLM, arXiv 2410.00531) would
read all of them in each step. The others are packed into a file and read by ``layer_window.h``, one
while the one before it computes. Those that stay are spread evenly among them, so that the disk
rests as little as possible.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from forethought.backends.cpu.library import load_library
from forethought.backends.cpu.structures import (
    LinearStruct,
    StoredLayerStruct,
    WeightPlaceStruct,
)
from forethought.backends.cpu.weight_file import WeightFile, aligned, take_tensors
from forethought.errors import ModelError, RequestError
from forethought.model.device import return_freed_memory

logger = logging.getLogger(__name__)

_NUM_SLOTS = 2
"""Layers in memory that are read in turn: one computes, and the next one is read meanwhile."""


class LayerCounts(NamedTuple):
    """Of a window, since it was opened."""

    num_read: int
    """Layers."""
    waited: float
    """Seconds in which forwards waited for them."""


class LayerWindow:
    """Takes layers of a network; ``open`` it before they are used.

    Args:
        num_layers: of the network.
        size: layers in memory, fewer than there are.
    """

    def __init__(self, num_layers: int, size: int) -> None:
        assert 1 <= size < num_layers
        self._streamed = streamed_layers(num_layers, size)
        self._num_slots = min(size, _NUM_SLOTS)
        self._file = WeightFile("layers", "layer_window")
        self._layers: list[StoredLayerStruct] = []
        self._structs: list[LinearStruct] = []
        """Those that the reader points to its slots: they live until it has ended."""
        self._memory: Tensor | None = None
        self._address: int | None = None
        self._uncached: int | None = None

    def __contains__(self, index: int) -> bool:
        """Whether a layer is one of those in the file."""
        return index in self._streamed

    def put(self, index: int, linears: Iterable[tuple[LinearStruct, list[Tensor]]]) -> None:
        """Write a layer's linears to the file, with the tensors that they point into, which are
        freed. They point nowhere then, until the layer is read. Raises ModelError where the file
        cannot take it.
        """
        tensors, pointers = list[Tensor](), list[int]()
        for struct, linear_tensors in linears:
            for field, tensor in take_tensors(struct, linear_tensors).items():
                tensors.append(tensor)
                pointers.append(ctypes.addressof(struct) + getattr(LinearStruct, field).offset)
            linear_tensors.clear()
            self._structs.append(struct)
        if not self._layers:
            self._file.check_room(len(self._streamed) * sum(tensor.nbytes for tensor in tensors))
        stored, checksum = self._file.add(tensors), 0
        for tensor in tensors:
            checksum = load_library().checksum(checksum, tensor.data_ptr(), tensor.nbytes)
        places = [
            WeightPlaceStruct(place=start, size=tensor.nbytes, pointer=pointer)
            for start, tensor, pointer in zip(stored.starts, tensors, pointers, strict=True)
        ]
        self._file.leave_cache(stored)
        self._layers.append(
            StoredLayerStruct(
                offset=stored.offset,
                size=stored.size,
                checksum=checksum,
                weights=(WeightPlaceStruct * len(places))(*places),
                num_weights=len(places),
                index=index,
            )
        )

    def open(self) -> int:
        """Begin to read layers; returns the address for ``ModelStruct.stored``."""
        slot_bytes = max(layer.size for layer in self._layers)
        return_freed_memory()  # what layers were packed from: as much as what comes now
        self._memory = aligned(self._num_slots * slot_bytes)
        self._uncached = self._file.uncached_descriptor()
        weakref.finalize(self, os.close, self._uncached)  # after what reads by it is closed
        library = load_library()
        address: int | None = library.open_layers(
            self._uncached,
            (StoredLayerStruct * len(self._layers))(*self._layers),
            len(self._layers),
            ctypes.c_void_p(self._memory.data_ptr()),
            self._num_slots,
            ctypes.c_int64(slot_bytes),
        )
        if address is None:
            raise ModelError("layers cannot be read ahead", "no thread can be started")
        weakref.finalize(self, library.close_layers, ctypes.c_void_p(address))
        self._address = address
        logger.info(
            "%d layers (%.0f MiB) are read from a file in every step",
            len(self._layers),
            self.file_bytes / 2**20,
        )
        return address

    def check(self) -> None:
        """Raise RequestError if a layer was used that could not be read."""
        layer = load_library().broken_layer(ctypes.c_void_p(self._address))
        if layer >= 0:
            raise RequestError(
                f"layer {layer} could not be read from the file of packed layers",
                "the disk has failed, or something has changed the file",
                "Check the disk and start again",
            )

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory for the layers that are read in turn."""
        assert self._memory is not None, "it is open"
        return self._memory.nbytes

    @property
    def file_bytes(self) -> int:
        """Bytes that every forward reads."""
        return self._file.num_bytes

    def read_speed(self) -> float:
        """Bytes per second at which layers are read, one after the other."""
        return self._file.read_speed(self._uncached)

    @property
    def descriptor(self) -> int:
        """Of the file, which is open for reading and writing."""
        return self._file.descriptor

    @property
    def counts(self) -> LayerCounts:
        """What has been read so far."""
        counts = (ctypes.c_int64 * 2)()
        load_library().count_layers(ctypes.c_void_p(self._address), counts)
        return LayerCounts(counts[0], counts[1] / 1e9)


def streamed_layers(num_layers: int, size: int) -> frozenset[int]:
    """Indices of the layers in the file: all but the ``size - _NUM_SLOTS`` that stay in memory."""
    num_resident = max(0, size - _NUM_SLOTS)
    return frozenset(
        index
        for index in range(num_layers)
        if index * num_resident // num_layers == (index + 1) * num_resident // num_layers
    )
