"""The tensors of the KV cache: one key and one value tensor per layer, addressed by slot.

A slot holds one token: ``slot = page * page_size + offset``. Layers of one shape share one
allocation, so that copying a page costs two tensor operations however many layers there are.

What drafters keep of the target's tokens, KV of a draft model or hidden states of the target, is a
``DraftKvCache``: a second storage addressed by the target's page tables. A token's entry is at the
token's slot, so forks, prefix hits, rewinds and preemptions apply to it, too. It may lag behind the
target: a flag per slot says whether its entry is that of the token stored there now. Before the
target computes a slot again, ``invalidate`` clears the flag.
"""

from __future__ import annotations

import math
import mmap
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forethought.kv.entries import from_entries, stored_dim, to_entries
from forethought.kv.staging import upload
from forethought.kv.table import PageCopy, ReadableTable, SlotMove


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores per token, in elements."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        """Elements stored per token: keys and values together."""
        return self.kv_heads * (self.key_dim + self.value_dim)


class KvStorage:
    """Keys and values of every layer for a fixed number of pages.

    ``has_scratch_page``: there is a further page, which no table has, for what the padding of a
    CUDA graph writes.

    Attributes:
        dtype: of keys and values as they are computed.
        stored_dtype: as they are held; int8 has a scale per token and head (``kv.entries``).
        keys: per layer, ``[slots, kv_heads, key_dim]`` in ``stored_dtype``; in int8 the last
            dimension has four bytes more.
        values: per layer, ``[slots, kv_heads, value_dim]``, as the keys.
        bytes_per_page: bytes that one page takes over all layers.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        has_scratch_page: bool = False,
        stored_dtype: torch.dtype | None = None,
    ) -> None:
        assert layers
        assert num_pages > 0
        assert page_size > 0
        self.layers, self.page_size = tuple(layers), page_size
        self.dtype, self.device = dtype, torch.device(device)
        self.stored_dtype = stored_dtype or dtype
        self.has_scratch_page = has_scratch_page
        self.bytes_per_page = self.page_bytes(layers, page_size, self.stored_dtype)
        self._members = [  # layer indices by distinct shape
            [index for index, other in enumerate(self.layers) if other == shape]
            for shape in dict.fromkeys(self.layers)
        ]
        self.resize(num_pages)

    def resize(self, num_pages: int) -> None:
        """Allocate ``num_pages`` pages. Everything stored is lost."""
        # One stack per distinct shape: [layers of that shape, slots, kv_heads, dim].
        slots = (num_pages + self.has_scratch_page) * self.page_size
        key_stacks: list[Tensor] = []
        value_stacks: list[Tensor] = []
        for members in self._members:
            shape = self.layers[members[0]]
            size = (len(members), slots, shape.kv_heads)
            for stacks, dim in ((key_stacks, shape.key_dim), (value_stacks, shape.value_dim)):
                width = stored_dim(dim, self.stored_dtype)
                stacks.append(_zeros((*size, width), self.stored_dtype, self.device))
        self.num_pages = num_pages  # only now: there may have been too little memory
        self._stacks = [*key_stacks, *value_stacks]
        self.keys, self.values = self._by_layer(key_stacks), self._by_layer(value_stacks)
        self._addresses: array[int] | None = None

    @property
    def max_state_bytes(self) -> int:
        """Bytes that the states of recurrent layers may take."""
        return 0

    @property
    def device_bytes_per_page(self) -> int:
        """Bytes that a page takes on the device, with what other processes store there."""
        return self.bytes_per_page

    def free_memory_elsewhere(self) -> list[int]:
        """Free bytes of each other GPU that stores a part of the model's keys and values."""
        return []

    def limit_states(self, tables: Iterable[ReadableTable]) -> None:
        """A step begins in which the rows of ``tables`` run. Drop states of recurrent layers, if
        they are too many; more rows may be planned after this.
        """

    def resume(self, table: ReadableTable, length: int) -> int:
        """A row of which ``length`` tokens are stored is about to go on. Returns the tokens after
        which it can: all of them.
        """
        return length

    def read_state(self, table: ReadableTable) -> dict[str, Tensor]:
        """Copies in CPU memory of what recurrent layers keep after the last token of a row, by
        name.
        """
        return {}

    def write_state(self, table: ReadableTable, state: Mapping[str, Tensor]) -> None:
        """Keep what ``read_state`` of a storage of the same model has returned."""
        assert not state

    @property
    def whole_layers(self) -> tuple[LayerShape, ...]:
        """The layers with all their KV heads, of which a shard of the model stores a part."""
        return self.layers

    @property
    def addresses(self) -> array[int]:
        """In memory, of each layer's keys, then of each layer's values."""
        if self._addresses is None:
            self._addresses = addresses_of(self.keys, self.values)
        return self._addresses

    @property
    def _num_allocated(self) -> int:
        return self.num_pages + self.has_scratch_page

    @property
    def scratch_slot(self) -> int:
        """A slot of the scratch page."""
        assert self.has_scratch_page
        return self.num_pages * self.page_size

    def _by_layer(self, stacks: Sequence[Tensor]) -> list[Tensor]:
        """The tensor of each layer, in the order of the layers."""
        tensors: dict[int, Tensor] = {}
        for members, stack in zip(self._members, stacks, strict=True):
            tensors.update(zip(members, stack, strict=True))
        return [tensors[index] for index in range(len(self.layers))]

    @staticmethod
    def page_bytes(layers: Sequence[LayerShape], page_size: int, dtype: torch.dtype) -> int:
        """Bytes that one page of ``page_size`` tokens takes over ``layers``, held in ``dtype``."""
        elements = sum(
            shape.kv_heads * stored_dim(dim, dtype)
            for shape in layers
            for dim in (shape.key_dim, shape.value_dim)
        )
        return elements * page_size * int(dtype.itemsize)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k ``[T, kv_heads, key_dim]``, v ``[T, kv_heads, value_dim]`` at slots ``[T]``."""
        self.keys[layer].index_copy_(0, slots, to_entries(k, self.stored_dtype))
        self.values[layer].index_copy_(0, slots, to_entries(v, self.stored_dtype))

    def gather(self, pages: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Copies of the tokens of pages int64 ``[P]``: keys and values of each layer, each
        ``[P * page_size, kv_heads, dim]`` in ``dtype``.
        """
        gathered = []
        for stack in self._stacks:
            paged = stack.view(len(stack), self._num_allocated, -1).index_select(1, pages)
            entries = paged.view(len(stack), -1, *stack.shape[2:])
            gathered.append(from_entries(entries, self.dtype))
        num_shapes = len(self._members)
        return self._by_layer(gathered[:num_shapes]), self._by_layer(gathered[num_shapes:])

    def read_slots(self, slots: Sequence[int]) -> list[Tensor]:
        """Copies in CPU memory of the tokens at these slots, as they are held.

        One tensor ``[layers, len(slots), kv_heads, dim]`` per distinct layer shape, in their order:
        first the keys of each, then the values of each.
        """
        indices = self._indices(list(slots))
        return [stack.index_select(1, indices).cpu() for stack in self._stacks]

    def write_slots(self, slots: Sequence[int], stacks: Sequence[Tensor]) -> None:
        """Store at these slots what ``read_slots`` of a storage of the same layers has returned."""
        assert [stack.shape for stack in stacks] == self.stack_shapes(len(slots))
        indices = self._indices(list(slots))
        for stack, written in zip(self._stacks, stacks, strict=True):
            stack.index_copy_(1, indices, written.to(self.device))

    def stack_shapes(self, num_tokens: int) -> list[torch.Size]:
        """The shapes of what ``read_slots`` returns for this many tokens."""
        return [torch.Size((len(s), num_tokens, *s.shape[2:])) for s in self._stacks]

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy whole pages, all layers; every source is read before anything is written."""
        if not copies:
            return
        sources, targets = [copy.src for copy in copies], [copy.dst for copy in copies]
        views = [
            stack.view(len(stack), self._num_allocated, self.page_size, *stack.shape[2:])
            for stack in self._stacks
        ]
        if self.device.type == "cpu" and not {*sources} & {*targets}:
            for pages in views:  # one by one: an index of torch's takes several times as long
                for src, dst in zip(sources, targets, strict=True):
                    pages[:, dst] = pages[:, src]
            return
        read, written = self._indices(sources), self._indices(targets)
        for pages in views:
            pages[:, written] = pages[:, read]

    def move_slots(self, moves: Sequence[SlotMove]) -> None:
        """Copy single tokens, all layers; every source is read before anything is written."""
        if not moves:
            return
        src = self._indices([move.src for move in moves])
        dst = self._indices([move.dst for move in moves])
        for stack in self._stacks:
            stack.index_copy_(1, dst, stack.index_select(1, src))

    def clear_slots(self, slots: Sequence[int]) -> None:
        """Overwrite single tokens with zeros, all layers."""
        if slots:
            cleared = self._indices(list(slots))
            for stack in self._stacks:
                stack[:, cleared] = 0

    def _indices(self, numbers: list[int]) -> Tensor:
        return upload(numbers, self.device)


def addresses_of(keys: Sequence[Tensor], values: Sequence[Tensor]) -> array[int]:
    """In memory, of the keys of each layer, then of the values of each layer."""
    return array("q", [tensor.data_ptr() for tensor in (*keys, *values)])


def _zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU the system gives memory to a page of them when it is first written.
    ``torch.zeros`` writes them all, so that a cache takes its whole size before it is used.
    """
    if device.type != "cpu":
        return torch.zeros(*size, dtype=dtype, device=device)
    num_bytes = math.prod(size) * dtype.itemsize
    memory = torch.frombuffer(_unwritten(max(num_bytes, 1)), dtype=torch.uint8)
    return memory[:num_bytes].view(dtype).view(*size)


def _unwritten(num_bytes: int) -> mmap.mmap:
    """Zeros that the system clears when they are first used, in pages of its smallest size.

    In huge ones, which NumPy asks for, the first token of a sequence would wait until all of those
    that its keys and values lie in are cleared: several in each layer. Raises MemoryError.
    """
    try:
        if sys.platform != "linux":
            return mmap.mmap(-1, num_bytes)
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes of the KV cache cannot be allocated") from error
    with suppress(OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


class DraftKvCache:
    """A storage over the pages of a target, with its number of pages and page size, and a flag per
    slot.
    """

    def __init__(self, storage: KvStorage) -> None:
        self.storage = storage
        self.resize(storage.num_pages)

    def resize(self, num_pages: int) -> None:
        """Set the target's number of pages. Everything stored is lost."""
        if num_pages != self.storage.num_pages:
            self.storage.resize(num_pages)
        self._ready = np.zeros((num_pages, self.storage.page_size), dtype=bool)

    def limit_states(self, tables: Iterable[ReadableTable]) -> None:
        """As the target does."""
        self.storage.limit_states(tables)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy whole pages, as the target does."""
        if copies:
            self.storage.copy_pages(copies)
            src, dst = [copy.src for copy in copies], [copy.dst for copy in copies]
            self._ready[dst] = self._ready[src]

    def move_slots(self, moves: Sequence[SlotMove]) -> None:
        """Copy single tokens, as the target does with the accepted path of a draft tree."""
        if moves:
            self.storage.move_slots(moves)
            flat = self._ready.reshape(-1)
            src, dst = [move.src for move in moves], [move.dst for move in moves]
            flat[dst] = flat[src]

    def invalidate(self, table: ReadableTable, start: int, stop: int) -> None:
        """The target is about to write other tokens at positions ``[start, stop)``."""
        self._set(table, start, stop, False)

    def mark(self, table: ReadableTable, start: int, stop: int) -> None:
        """The entries of positions ``[start, stop)`` have been computed."""
        self._set(table, start, stop, True)

    def ready_length(self, table: ReadableTable, length: int) -> int:
        """Number of leading positions, up to ``length``, whose entries are all there, and after
        which a row can go on."""
        size = self.storage.page_size
        pages = table.pages[: -(-length // size)]
        ready = self._ready[pages].reshape(-1)[:length]
        first_gap = int(ready.argmin()) if ready.size else 0
        is_whole = not ready.size or ready[first_gap]
        return self.storage.resume(table, length if is_whole else first_gap)

    def _set(self, table: ReadableTable, start: int, stop: int, value: bool) -> None:
        if start < stop:
            self._ready.reshape(-1)[table.slot_index(start, stop)] = value
