"""Where the rows of a batch are in the paged cache, in integers that an attention kernel reads.

A kernel runs one program per *tile* (up to ``tile_tokens`` new tokens of one row), key/value head
and *split* (a range of the row's stored tokens). A row of few new tokens over many stored ones is
split, so that one long sequence occupies the whole GPU; the parts are merged afterwards. The size
of a split depends on the row's length alone: a row is computed the same way in any batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from forethought.model.batch import Span

Integers = NDArray[np.int64]
Splitting = Callable[[int, int], tuple[int, int]]
"""From a row's new and stored tokens to the stored tokens of a split, and the number of splits."""

SPLIT_TOKENS, MAX_SPLITS = 256, 32
"""Stored tokens of a split, up to ``MAX_SPLITS`` of them; longer rows have larger splits."""
MAX_SPLIT_QUERIES = 32
"""New tokens of a row up to which it is split; a row with more occupies the GPU by its tiles."""
MAX_TILE_TOKENS = 16
"""New tokens of a tile."""
WORD_BITS = 64
"""Draft nodes in one word of ancestor bits."""
ROW_FIELDS, TOKEN_FIELDS, TILE_FIELDS, PARTIAL_FIELDS = 6, 2, 2, 2
CHAIN = -1
"""In place of the offset of a row's ancestor bits: it is a chain and has none."""
DIRECT = -1
"""In place of the number of a token's partial results: it has none, its row is not split."""


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """The rows of a batch of B rows and T new tokens. All tensors are int64, on one device.

    Attributes:
        rows: ``[B, ROW_FIELDS]``: first packed token, number of new tokens, tokens stored with
            these (0: the row is padding, and nothing attends), first position that is attended to,
            stored tokens of a split, and where the row's ancestor bits begin in ``words`` or
            ``CHAIN``.
        tokens: ``[T, TOKEN_FIELDS]``: position in the sequence, and the index of its partial
            results or ``DIRECT``.
        tiles: ``[tiles, TILE_FIELDS]``: row, and the first new token of the row.
        pages: ``[B, pages]``, padded with 0.
        words: ``[words]``: for each node of a tree, ceil(n / 64) words; bit i % 64 of word i // 64
            says whether node i is an ancestor or the node itself.
        partials: ``[partials, PARTIAL_FIELDS]``: packed token, and splits of its row; 0 splits:
            nothing is merged.
        tile_tokens: new tokens of a tile, a power of two.
        num_splits: greatest number of splits of a row.
    """

    rows: Tensor
    tokens: Tensor
    tiles: Tensor
    pages: Tensor
    words: Tensor
    partials: Tensor
    tile_tokens: int
    num_splits: int

    @classmethod
    def of(
        cls, spans: Sequence[Span], device: torch.device | str, split: Splitting | None = None
    ) -> PagedLayout:
        """The layout of rows, in order of their packed tokens, by one copy per array. Rows are
        split by ``split``, by default ``split_of``.
        """
        arrays = LayoutArrays.of(spans, split=split)
        return arrays.layout([torch.from_numpy(part).to(device) for part in arrays.parts])


@dataclass(frozen=True, slots=True)
class LayoutArrays:
    """A layout on the host: ``parts`` are its arrays, in the order of the tensors of
    :class:`PagedLayout`.
    """

    parts: list[Integers]
    tile_tokens: int
    num_splits: int

    def layout(self, tensors: Sequence[Tensor]) -> PagedLayout:
        """The layout whose arrays were uploaded as ``tensors``."""
        rows, tokens, tiles, pages, words, partials = tensors
        sizes = self.tile_tokens, self.num_splits
        return PagedLayout(rows, tokens, tiles, pages, words, partials, *sizes)

    @classmethod
    def of(
        cls, spans: Sequence[Span], tile_tokens: int = 0, split: Splitting | None = None
    ) -> LayoutArrays:
        """Lay out rows, in order of their packed tokens, in tiles of ``tile_tokens`` new tokens; 0:
        by the longest row. Rows are split by ``split``, by default ``split_of``.
        """
        split = split or split_of
        rows, tiles, partials = list[int](), list[int](), list[int]()
        tokens, words = list[Integers](), list[Integers]()
        longest = max(span.length for span in spans)
        tile_tokens = tile_tokens or min(MAX_TILE_TOKENS, next_power_of_2(longest))
        num_splits, num_words, num_partials = 1, 0, 0
        for row, span in enumerate(spans):
            size, begin = span.length, span.start
            split_size, splits = split(size, span.kv_length)
            record = np.empty((size, TOKEN_FIELDS), np.int64)
            record[:, 0], record[:, 1] = positions_of(span), DIRECT
            if splits > 1:
                record[:, 1] = range(num_partials, num_partials + size)
                num_partials += size
                for token in range(begin, begin + size):
                    partials += (token, splits)
            tokens.append(record)
            at = CHAIN
            if span.tree is not None:
                at = num_words
                words.append(ancestor_words(span.tree.numpy()))
                num_words += words[-1].size
            rows += (begin, size, span.kv_length, span.seen_from, split_size, at)
            for first in range(0, size, tile_tokens):
                tiles += (row, first)
            num_splits = max(num_splits, splits)
        parts = [
            np.array(rows, np.int64).reshape(-1, ROW_FIELDS),
            np.concatenate(tokens),
            np.array(tiles, np.int64).reshape(-1, TILE_FIELDS),
            _pages(spans),
            np.concatenate(
                [np.zeros(0, np.int64), *(node_words.reshape(-1) for node_words in words)]
            ),
            np.array(partials, np.int64).reshape(-1, PARTIAL_FIELDS),
        ]
        return cls(parts, tile_tokens, num_splits)


def split_of(size: int, kv_length: int) -> tuple[int, int]:
    """Stored tokens of a split, and the number of splits, of a row of ``size`` new tokens."""
    if size > MAX_SPLIT_QUERIES:
        return kv_length, 1
    split = SPLIT_TOKENS * next_power_of_2(-(-kv_length // (SPLIT_TOKENS * MAX_SPLITS)))
    return split, -(-kv_length // split)


def positions_of(span: Span) -> Any:
    """``[n]``: the position of each new token of a row in its sequence."""
    prefix = span.kv_length - span.length
    if span.tree is None:
        return range(prefix, span.kv_length)
    return prefix - 1 + span.tree.numpy().sum(1)


def words_per_node(num_nodes: int) -> int:
    """Words of the ancestor bits of a node of a tree."""
    return -(-num_nodes // WORD_BITS)


def ancestor_words(tree: NDArray[np.bool_]) -> Integers:
    """bool ``[n, n]`` -> ``[n, ceil(n / 64)]``: bit i of a row's words is its column i."""
    size = len(tree)
    padded = np.zeros((size, words_per_node(size) * WORD_BITS), np.bool_)
    padded[:, :size] = tree
    return np.packbits(padded, axis=1, bitorder="little").view("<i8").astype(np.int64, copy=False)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below ``number``, at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def _pages(spans: Sequence[Span]) -> Integers:
    pages = np.zeros((len(spans), max(len(span.pages) for span in spans)), np.int64)
    for row, span in enumerate(spans):
        pages[row, : len(span.pages)] = array("q", span.pages)
    return pages
