"""CUDA graphs: what a device does in a forward, captured once and replayed by one launch.

A graph repeats the same kernels on the same memory, so its shapes are fixed, and what changes from
step to step is written into tensors that it reads (``StaticBatch``). Rows are padded to a
*bucket*::

    num_tokens   1, 2, 4, 8, then multiples of 8, 16, 32: at most an eighth is padding
    tile_tokens  1 where every row has one token, else 8 or 16: see ``backends.cuda.paged_layout``
    capacity     256, 1024, 4096, ...: stored tokens that a row may have

Padding tokens belong to no row, so nothing attends for them; their keys and values go to the
scratch page of the storage. A bucket's graph is captured when it is first needed, after one run
on padding alone, in which kernels are compiled and workspaces allocated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from forethought.kv.staging import StaticBuffer
from forethought.kv.storage import KvStorage
from forethought.model.attention.paged_layout import (
    CHAIN,
    DIRECT,
    MAX_SPLITS,
    MAX_TILE_TOKENS,
    PARTIAL_FIELDS,
    ROW_FIELDS,
    SPLIT_TOKENS,
    TILE_FIELDS,
    TOKEN_FIELDS,
    Integers,
    LayoutArrays,
    PagedLayout,
    next_power_of_2,
    words_per_node,
)
from forethought.model.batch import Batch, PackedRows, Row, Span
from forethought.model.graph_capturer import Graph

log = logging.getLogger(__name__)

GRAPH_BYTES = 4 * 2**20
"""Estimate of what a captured graph takes on the device beside the tensors that all share."""
MAX_GRAPH_TOKENS = 256
"""Tokens of the largest bucket: with more, the GPU computes longer than the host launches."""
_MIN_CAPACITY, _CAPACITY_FACTOR = SPLIT_TOKENS, 4


class CudaGraph(Graph):
    """A graph of torch.

    Args:
        compute: queues the kernels and returns the output.
        stream: of the capture, on the graph's device.
        pool: memory that graphs share which never run at the same time.
    """

    def __init__(
        self, compute: Callable[[], Tensor], stream: torch.cuda.Stream, pool: tuple[int, int]
    ) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may go on to allocate meanwhile.
        with torch.cuda.graph(self._graph, pool, stream, capture_error_mode="thread_local"):
            self.output = compute()

    @override
    def replay(self) -> None:
        self._graph.replay()


class CudaCapture:
    """Captures the graphs of an engine, which share one pool of memory.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> CudaGraph:
        """Capture the kernels that ``compute`` launches."""
        with torch.cuda.device(self._stream.device):
            return CudaGraph(compute, self._stream, self._pool)


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a graph's batch; see ``backends.cuda.graphs``."""

    num_tokens: int
    tile_tokens: int
    capacity: int

    @classmethod
    def of(cls, rows: Sequence[Row], max_tokens: int) -> Bucket | None:
        """The smallest one that holds the rows; None: there is none."""
        num_tokens = longest = stored = 0
        for row in rows:
            size = len(row.tokens)
            num_tokens += size
            longest = max(longest, size)
            stored = max(stored, row.table.length)
        if num_tokens > max_tokens:
            return None
        return cls(padded_tokens(num_tokens), cls.tile_of(longest), capacity_of(stored))

    @staticmethod
    def tile_of(longest: int) -> int:
        """Tokens of a tile, for the length of the longest row."""
        if longest == 1:
            return 1
        return MAX_TILE_TOKENS // 2 if longest <= MAX_TILE_TOKENS // 2 else MAX_TILE_TOKENS

    @property
    def num_splits(self) -> int:
        """Splits that a row has at most."""
        return min(MAX_SPLITS, self.capacity // SPLIT_TOKENS)


def padded_tokens(number: int) -> int:
    """The number of tokens of a bucket for ``number`` tokens."""
    if number <= 8:
        return next_power_of_2(number)
    step = max(8, next_power_of_2(number) // 8)
    return -(-number // step) * step


def capacity_of(stored: int) -> int:
    """Stored tokens that a bucket has capacity for, if a row has ``stored``."""
    capacity = _MIN_CAPACITY
    while capacity < stored:
        capacity *= _CAPACITY_FACTOR
    return capacity


_LAYOUT = ("rows", "tokens", "tiles", "pages", "words", "partials")
"""The tensors of a ``PagedLayout``, in order."""


class StaticBatch:
    """A batch of a bucket's shape, of which each row's integers are overwritten in every step.

    Args:
        bucket: its shape.
        storage: where its tokens are stored.
        num_logits: tokens whose logits are computed: the number; None: all.
        further: defaults of further arrays that the graph reads, by name.

    Attributes:
        batch: for the network; it has no spans.
        tensors: all arrays by name.
    """

    def __init__(
        self,
        bucket: Bucket,
        storage: KvStorage,
        num_logits: int | None = None,
        further: Mapping[str, Integers] | None = None,
    ) -> None:
        self.bucket = bucket
        size = bucket.num_tokens
        self._pages_per_row = -(-bucket.capacity // storage.page_size)
        rows = np.zeros((size + 1, ROW_FIELDS), np.int64)  # the last one is empty: that of padding
        rows[:, -2:] = 1, CHAIN
        has_splits = bucket.num_splits > 1
        tokens = np.zeros((size, TOKEN_FIELDS), np.int64)
        tokens[:, 1] = DIRECT
        tiles = np.zeros((size, TILE_FIELDS), np.int64)
        tiles[:, 0] = size
        self._buffer = StaticBuffer(
            {
                "token_ids": np.zeros(size, np.int64),
                "positions": np.zeros(size, np.int64),
                "slots": np.full(size, storage.scratch_slot, np.int64),
                "logit_index": np.arange(size)
                if num_logits is None
                else np.zeros(num_logits, np.int64),
                "drafted": np.zeros(size, np.int64),
                **(further or {}),
                "rows": rows,
                "tokens": tokens,
                "tiles": tiles,
                "words": np.zeros(size * words_per_node(size), np.int64),  # of one row, at most
                "partials": np.zeros((size * has_splits, PARTIAL_FIELDS), np.int64),
                "pages": np.zeros((size, self._pages_per_row), np.int64),
            },
            storage.device,
        )
        of = self.tensors = self._buffer.tensors
        layout = PagedLayout(
            **{name: of[name] for name in _LAYOUT},
            tile_tokens=bucket.tile_tokens,
            num_splits=bucket.num_splits,
        )
        self.batch = Batch(
            of["token_ids"], of["positions"], of["slots"], of["logit_index"], (), layout
        )

    def fill(self, packed: PackedRows, further: Mapping[str, Sequence[int]] | None = None) -> None:
        """Queue the copy of packed rows that fit into the bucket; the rest becomes padding."""
        index = packed.drafted_index()
        values: dict[str, Integers | Sequence[int]] = {
            "token_ids": packed.tokens,
            "positions": packed.positions,
            "slots": packed.slots,
            "logit_index": packed.logit_index,
            "drafted": index,
            **(further or {}),
            **self._layout(packed.spans),
        }
        self._buffer.fill(values)
        packed.insert_drafted(self.batch.token_ids, self._buffer.tensors["drafted"][: len(index)])

    def lay_out(self, spans: Sequence[Span], logit_index: Sequence[int]) -> None:
        """Queue the copy of where rows lie whose tokens, positions and slots the graph writes."""
        self._buffer.fill({"logit_index": logit_index, **self._layout(spans)})

    def _layout(self, spans: Sequence[Span]) -> dict[str, Integers]:
        if not spans:
            return {}
        arrays = LayoutArrays.of(spans, self.bucket.tile_tokens)
        return dict(zip(_LAYOUT, arrays.parts, strict=True))

    def clear(self) -> None:
        """Queue padding alone."""
        self._buffer.fill({})
