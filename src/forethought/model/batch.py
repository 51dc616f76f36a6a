"""Rows of tokens packed into one batch: every index tensor, built once per forward.

A row is a run of new tokens of one page table: a decode step, a chunk of a prefill, or a draft
tree. There is no padding: T is the sum of the rows' tokens.

On CUDA all integers of a batch, and where its rows lie in the pages, go to the device in one copy
from pinned memory that nothing waits for.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forethought.config.tree import node_depths
from forethought.kv.staging import StagingBuffer
from forethought.kv.table import ReadableTable
from forethought.model.attention.paged_layout import LayoutArrays, PagedLayout
from forethought.model.token_adapters import Adapt, PlacedAdapter, TokenAdapters, no_addition


def ancestors(parents: Sequence[int]) -> Tensor:
    """Ancestor-or-self of n tree nodes: bool ``[n, n]`` on the host, True where the column is the
    row's node or one of its ancestors. Parents, negative for none, come before their children.
    """
    size = len(parents)
    if not size:  # frombuffer refuses none
        return torch.empty(0, 0, dtype=torch.bool)
    is_ancestor = bytearray(size * size)  # a byte per node and node
    for node, parent in enumerate(parents):
        begin = node * size
        if parent >= 0:
            is_ancestor[begin : begin + node] = is_ancestor[parent * size : parent * size + node]
        is_ancestor[begin + node] = 1
    return torch.frombuffer(is_ancestor, dtype=torch.bool).view(size, size)


@dataclass(frozen=True, slots=True)
class ConcurrentTokens:
    """Stored tokens of other sequences that a row attends to, in place.

    Each has tokens in common with the row's sequence, and what follows them comes after these::

        row's view   [ own tokens | first other | own | second other | own tokens ]

    Keys are stored as they were rotated in the sequence that computed them, so queries are rotated
    further for each part of the view; see :meth:`segments`. Rodionov et al., "Hogwild! Inference",
    2025, section 3.

    Attributes:
        starts: tokens that each has in common with the row's sequence, rising.
        stops: tokens of each that are stored, not fewer than ``starts``.
        pages: of each, in order.
    """

    starts: list[int]
    stops: list[int]
    pages: list[Sequence[int]]

    @property
    def counts(self) -> list[int]:
        """The tokens of each that are seen."""
        return [stop - start for start, stop in zip(self.starts, self.stops, strict=True)]

    def segments(self) -> list[tuple[int, int]]:
        """The parts of the view before the last own ones: number of tokens, and further rotation in
        positions: by how much farther a query is from the part's keys in the view than its own
        position says.
        """
        rotation, begin, segments = sum(self.counts), 0, list[tuple[int, int]]()
        for start, count in zip(self.starts, self.counts, strict=True):
            segments += [(start - begin, rotation), (count, rotation)]
            rotation, begin = rotation - count, start
        return segments

    def view(self, own_pages: Sequence[int], length: int, page_size: int) -> NDArray[np.int64]:
        """The slots of all that is attended to, in order; ``length`` tokens are in the sequence's
        ``own_pages``.
        """
        parts, begin, own_slots = [], 0, _slots(own_pages, page_size)
        for start, stop, pages in zip(self.starts, self.stops, self.pages, strict=True):
            parts += [own_slots[begin:start], _slots(pages, page_size)[start:stop]]
            begin = start
        return np.concatenate([*parts, own_slots[begin:length]])


def _slots(pages: Sequence[int], page_size: int) -> NDArray[np.int64]:
    return (np.array(pages, np.int64)[:, None] * page_size + np.arange(page_size)).ravel()


@dataclass(slots=True, eq=False)
class Row:
    """New tokens of one sequence, whose table already reaches to their end.

    Like :class:`Span` and :class:`Batch` it is not frozen, as there is one per row and step, and
    freezing takes most of making one. None of them is changed.

    Attributes:
        tokens: the new token ids, at least one.
        start: tokens of this sequence that are stored already: the position of ``tokens[0]``.
        table: page table with ``table.length == start + len(tokens)``.
        parents: None for a chain. For a tree, the index in this row of each token's parent, -1 for
            the stored prefix; parents come before their children. A token's position is then
            ``start`` plus its depth, and it attends to the prefix, its ancestors and itself.
        logits_from: index in this row of the first token whose logits are computed, with those of
            all later ones; ``len(tokens)``: none.
        drafted: int64 ``[k]`` on the model's device, the last k tokens, of which the host has no
            more than the number: ``tokens`` has any ids in their place; None: it has all of them.
        concurrent: tokens of other sequences that a chain attends to, too, none after ``start``;
            None: there are none.
        adapter: that adds to the products of its tokens; None: none does.
        num_nodes: tokens at the end that are a draft, of which all, some or none will be kept.
    """

    tokens: list[int]
    start: int
    table: ReadableTable
    parents: tuple[int, ...] | None = None
    logits_from: int = 0
    drafted: Tensor | None = None
    concurrent: ConcurrentTokens | None = None
    adapter: PlacedAdapter | None = None
    num_nodes: int = 0

    def depths(self) -> list[int]:
        """Distance of each token from the first new position: ``position - start``."""
        if self.parents is None:
            return list(range(len(self.tokens)))
        return [depth - 1 for depth in node_depths(self.parents)]

    def visible(self) -> Tensor:
        """bool ``[n, n]`` on the host: new tokens (columns) that each new token attends to."""
        size = len(self.tokens)
        if self.parents is None:
            return torch.ones(size, size, dtype=torch.bool).tril()
        return ancestors(self.parents)


@dataclass(slots=True, eq=False)
class Span:
    """The tokens of one row in the packed batch and in the cache.

    Attributes:
        start, stop: the row's tokens are ``[start, stop)`` of the packed batch.
        kv_length: tokens of the sequence in the cache, these new ones included.
        pages: the pages that hold them, in order.
        first_slot: the slot of position 0 if the pages are contiguous, else None.
        tree: bool ``[n, n]`` on the host: which new tokens (columns) each new token (rows) attends
            to, its ancestors and itself; None for a chain.
        seen_from: the first position that is attended to.
        concurrent: tokens of other sequences that are attended to; None: there are none.
        adapter: of its tokens; None: they have none.
        num_nodes: new tokens at the end that are a draft.
    """

    start: int
    stop: int
    kv_length: int
    pages: tuple[int, ...]
    first_slot: int | None
    tree: Tensor | None
    seen_from: int = 0
    concurrent: ConcurrentTokens | None = None
    adapter: PlacedAdapter | None = None
    num_nodes: int = 0

    @property
    def length(self) -> int:
        """Number of new tokens."""
        return self.stop - self.start


@dataclass(slots=True, eq=False)
class PackedRows:
    """Rows one after the other, as lists on the host.

    Attributes:
        tokens, positions, slots: of T tokens.
        logit_index: packed indices of the tokens whose logits are computed.
        spans: one per row.
        rows: what was packed.
    """

    tokens: list[int]
    positions: list[int]
    slots: list[int]
    logit_index: list[int]
    spans: list[Span]
    rows: Sequence[Row]

    @classmethod
    def of(cls, rows: Sequence[Row], offset: int = 0) -> PackedRows:
        """Pack rows; ``offset`` is that of :meth:`Batch.build`."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logit_index: list[int] = []
        spans: list[Span] = []
        for row in rows:
            begin, size = len(tokens), len(row.tokens)
            assert size > 0
            assert row.table.length == row.start + size
            assert row.parents is None or len(row.parents) == size
            assert row.concurrent is None or row.parents is None
            assert row.concurrent is None or row.start >= row.concurrent.starts[-1]
            tokens += row.tokens
            first = row.start - offset
            if row.parents is None:
                positions += range(first, first + size)
            else:
                positions += [first + depth for depth in row.depths()]
            slots += row.table.slots(row.start, row.start + size)
            logit_index += range(begin + row.logits_from, begin + size)
            spans.append(_span(row, begin, offset))
        return cls(tokens, positions, slots, logit_index, spans, rows)

    def token_adapters(self, device: torch.device | str) -> TokenAdapters | None:
        """The adapters of the tokens; None: none has one."""
        if all(row.adapter is None for row in self.rows):
            return None
        adapters = [row.adapter for row in self.rows for _ in row.tokens]
        return TokenAdapters.of(adapters, self.logit_index, device)

    def drafted_index(self) -> list[int]:
        """Packed indices of the tokens that are on the device."""
        index: list[int] = []
        for span, row in zip(self.spans, self.rows, strict=True):
            if row.drafted is not None:
                index += range(span.stop - len(row.drafted), span.stop)
        return index

    def insert_drafted(self, token_ids: Tensor, index: Tensor) -> None:
        """Write the tokens that are on the device into ``token_ids``, at ``drafted_index``."""
        drafted = [row.drafted for row in self.rows if row.drafted is not None]
        if drafted:
            together = drafted[0] if len(drafted) == 1 else torch.cat(drafted)
            token_ids.index_copy_(0, index, together)


def _span(row: Row, begin: int, offset: int) -> Span:
    table = row.table
    is_tree = row.parents is not None and len(row.tokens) > 1
    tree = row.visible() if is_tree else None
    stop, pages = begin + len(row.tokens), tuple(table.pages)
    first = table.first_slot()
    return Span(
        begin,
        stop,
        table.length,
        pages,
        first,
        tree,
        offset,
        row.concurrent,
        row.adapter,
        row.num_nodes,
    )


@dataclass(slots=True, eq=False)
class Batch:
    """Packed rows: T new tokens, R of them with logits. All tensors are on the model's device.

    Attributes:
        token_ids: int64 ``[T]``.
        positions: int64 ``[T]``.
        slots: int64 ``[T]``, where each new token's keys and values are written.
        logit_index: int64 ``[R]``, packed indices of the tokens whose logits are computed.
        spans: one per row, in order.
        layout: where the rows lie in the pages, for kernels; on CUDA only.
        host_slots: ``slots`` on the host, int64 ``[T]``; on CUDA only.
        adapters: of the tokens; None: none has one.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    logit_index: Tensor
    spans: tuple[Span, ...]
    layout: PagedLayout | None = None
    host_slots: NDArray[np.int64] | None = None
    adapters: TokenAdapters | None = None

    def adapt(self, layer: int, *, are_outputs: bool = False) -> Adapt:
        """What adds to the products of a Llama-like layer: ``adapt(product, x, y)``.
        ``are_outputs``: of the tokens with logits alone.
        """
        adapters = self.adapters
        if adapters is None:
            return no_addition
        return lambda product, x, y: adapters.add((layer, product), x, y, are_outputs=are_outputs)

    @property
    def slot_numbers(self) -> NDArray[np.int64]:
        """``slots`` on the host, int64 ``[T]``: nothing waits for a GPU."""
        return self.slots.numpy() if self.host_slots is None else self.host_slots

    @classmethod
    def build(
        cls, rows: Sequence[Row], device: torch.device | str = "cpu", offset: int = 0
    ) -> Batch:
        """Pack ``rows`` on ``device``. ``positions`` count from ``offset``, the first position that
        is attended to.
        """
        packed = PackedRows.of(rows, offset)
        if (device if isinstance(device, str) else device.type).startswith("cuda"):
            return cls._staged(packed, device)
        return cls(
            _tensor(packed.tokens, device),
            _tensor(packed.positions, device),
            _tensor(packed.slots, device),
            _tensor(packed.logit_index, device),
            tuple(packed.spans),
            adapters=packed.token_adapters(device),
        )

    def indices(self) -> Tensor:
        """Its index tensors as one, int64 ``[3 T + R]``, for ``of_indices``."""
        return torch.cat([self.token_ids, self.positions, self.slots, self.logit_index])

    @classmethod
    def of_indices(cls, indices: Tensor, spans: tuple[Span, ...], num_logits: int) -> Batch:
        """The batch that another process has built, from its ``indices``, but for
        ``host_slots``.
        """
        size, layout = (len(indices) - num_logits) // 3, None
        token_ids, positions, slots, logit_index = indices.split([size, size, size, num_logits])
        if indices.device.type == "cuda":
            staging, arrays = StagingBuffer(), LayoutArrays.of(spans)
            for part in arrays.parts:
                staging.add(part)
            layout = arrays.layout(staging.upload(indices.device))
        return cls(token_ids, positions, slots, logit_index, spans, layout)

    @classmethod
    def _staged(cls, packed: PackedRows, device: torch.device | str) -> Batch:
        """A batch whose integers reach the device in one copy."""
        staging, arrays = StagingBuffer(), LayoutArrays.of(packed.spans)
        lists = packed.tokens, packed.positions, packed.slots, packed.logit_index
        for values in (*lists, packed.drafted_index()):
            staging.add(values)
        for part in arrays.parts:
            staging.add(part)
        token_ids, positions, slots, logit_index, index, *parts = staging.upload(device)
        packed.insert_drafted(token_ids, index)
        host_slots, layout = np.array(packed.slots, np.int64), arrays.layout(parts)
        return cls(
            token_ids,
            positions,
            slots,
            logit_index,
            tuple(packed.spans),
            layout,
            host_slots,
            packed.token_adapters(device),
        )


def _tensor(values: list[int], device: torch.device | str) -> Tensor:
    """int64; on the host in a fifth of the time of ``torch.tensor``."""
    if not values:  # frombuffer refuses none
        return torch.empty(0, dtype=torch.int64, device=device)
    tensor = torch.frombuffer(array("q", values), dtype=torch.int64)
    return tensor if tensor.device == device else tensor.to(device)
