"""How the rows of a batch attend through torch's kernels: chosen once, for all layers of a window.

A row attends in one of three ways:

- *view*: one new token, pages side by side: a view of the cache, nothing is copied;
- *group*: one new token each, or a few (drafts): their pages are copied together and attended in
  one padded call;
- *piece*: several new tokens (a prefill chunk, a large tree): one call with its own mask.

Knows nothing about how a call is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from forethought.kv.storage import KvStorage
from forethought.model.batch import Batch, Span

# On a CPU. A row with fewer bytes of keys and values per layer than SMALL_ROW_BYTES is copied and
# attended in a group, if there are enough such rows: that costs less than a call of its own. The
# copies of a group should not leave the caches: past GROUP_BYTES another group begins.
SMALL_ROW_BYTES = 320 * 1024
FEWEST_IN_GROUP = 4
GROUP_BYTES = 4 * 2**20
MAX_QUERIES = 32
"""New tokens that a row of a group may have; a row with more is a piece."""
EXACT_QUERIES, EXACT_UP_TO = 16, 512
"""torch's CPU kernel rounds a query's result by how many queries it is given at once, but not from
4 (with AMX: 1) to 16 of them, nor by how many keys, if these are a multiple of 16 (masked ones
count). So whole pages are attended, ``softmax`` fills fewer queries up to 4, and prefills go in
parts of 16 tokens: in bf16 and fp16 a token's keys and values are then the same in any company,
with pages of 16 tokens. In longer prefills it would cost too much. With softcap or sinks, which
are computed by hand, it is so but for rounding."""


class FoldedMask:
    """The mask of some tokens, for all layers of a plan.

    Args:
        mask: additive, ``[B, 1, n, L]``.
    """

    def __init__(self, mask: Tensor) -> None:
        self._folds = {1: mask}

    def fold(self, shared: int) -> Tensor:
        """``[B, 1, shared * n, L]``: for that many query heads side by side, each with n tokens."""
        if shared not in self._folds:
            self._folds[shared] = self._folds[1].repeat(1, 1, shared, 1)
        return self._folds[shared]


@dataclass(frozen=True, slots=True)
class View:
    """A decode row, packed token ``token``, that attends over ``length`` slots from ``first`` on.

    Attributes:
        mask: additive, ``[1, length]`` in the cache's dtype: the slots are those of whole pages.
    """

    token: int
    first: int
    length: int
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Group:
    """B rows that are attended together, padded to n new tokens and L stored ones, whole pages.

    Attributes:
        tokens: int64 ``[B * n]``, their places in the packed batch; a row with fewer repeats its
            last one.
        rows: B.
        pages: int64 ``[B * L / page_size]``, row by row.
        mask: additive, ``[B, 1, n, L]`` in the cache's dtype.
    """

    tokens: Tensor
    rows: int
    pages: Tensor
    mask: FoldedMask


@dataclass(frozen=True, slots=True)
class Piece:
    """A row of n > 1 new tokens that sees L stored ones.

    Attributes:
        start, stop: its tokens in the packed batch.
        pages: int64, the pages of the L tokens; None when they are the L slots from ``first`` on.
        first: the first of the L tokens: a slot, or with ``pages`` an index into their tokens.
        length: L.
        mask: additive, ``[1, 1, n, L]`` in the cache's dtype; None where query i sees the first
            i + 1.
    """

    start: int
    stop: int
    pages: Tensor | None
    first: int
    length: int
    mask: FoldedMask | None


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """What the layers of one window do with one batch."""

    page_size: int
    views: list[View]
    groups: list[Group]
    pieces: list[Piece]


class SdpaPlanner:
    """Makes the plans.

    Args:
        grouping: whether decode rows are copied together: "auto" by measured rule, "always", or
            "never" where their pages lie side by side.
    """

    def __init__(self, grouping: str = "auto") -> None:
        assert grouping in ("auto", "always", "never")
        self.grouping = grouping
        self._step = torch.empty(0)
        """Zeros, then a page of -inf: a view's mask is a slice of it."""

    def __call__(self, batch: Batch, storage: KvStorage, window: int | None) -> SdpaPlan:
        """Choose for every row how it attends, and build its masks and indices."""
        spans = [part for span in batch.spans for part in _parts(span, storage)]
        fitting = [span for span in spans if span.length <= MAX_QUERIES]
        alone = self._alone(fitting, window, storage)
        grouped = [span for span in fitting if span.start not in alone]
        others = [s for s in spans if s.start in alone or s.length > MAX_QUERIES]
        return SdpaPlan(
            page_size=storage.page_size,
            views=[self._view(span, window, storage) for span in others if _is_viewed(span)],
            groups=[_group(spans, window, storage) for spans in _alike(grouped, window, storage)],
            pieces=[_piece(span, window, storage) for span in others if not _is_viewed(span)],
        )

    def _alone(self, spans: Sequence[Span], window: int | None, storage: KvStorage) -> set[int]:
        """Those, by their first packed token, that attend in a call of their own."""
        willing = {s.start for s in spans if s.first_slot is not None or not _sees_all(s)}
        if self.grouping == "never":
            return willing
        if self.grouping == "always" or storage.device.type != "cpu":
            return set()  # on a GPU a call per row is a launch per row
        token_bytes = storage.layers[0].elements * storage.dtype.itemsize
        small = {
            span.start
            for span in spans
            if (span.kv_length - _skipped(span, window)) * token_bytes < SMALL_ROW_BYTES
        }
        return willing - small if len(small) >= FEWEST_IN_GROUP else willing

    def _view(self, span: Span, window: int | None, storage: KvStorage) -> View:
        assert span.first_slot is not None
        skipped = _whole_pages_skipped(span, window, storage)
        length = len(span.pages) * storage.page_size - skipped
        first = span.first_slot + skipped
        if skipped == _skipped(span, window):
            zeros = storage.num_pages * storage.page_size
            if len(self._step) != zeros + storage.page_size or self._step.dtype != storage.dtype:
                self._step = torch.zeros(
                    zeros + storage.page_size, dtype=storage.dtype, device=storage.device
                )
                self._step[zeros:] = float("-inf")
            mask = self._step.narrow(0, zeros - (span.kv_length - skipped), length)[None]
            return View(span.start, first, length, mask)
        bounds = torch.tensor(_seen(span, window, skipped, 1), device=storage.device)
        return View(span.start, first, length, additive(_between(bounds, length), storage.dtype))


def _skipped(span: Span, window: int | None) -> int:
    """How many of the first stored tokens none of the row's new tokens sees."""
    if window is None:
        return span.seen_from
    return max(span.seen_from, span.kv_length - span.length - window + 1)


def _sees_all(span: Span) -> bool:
    """Whether it is one new token that sees all before it."""
    return span.length == 1 and (span.tree is None or span.tree.shape[1] == 1)


def _is_viewed(span: Span) -> bool:
    """Whether it needs neither copies nor a mask."""
    return _sees_all(span) and span.first_slot is not None


def _piece(span: Span, window: int | None, storage: KvStorage) -> Piece:
    skipped = _whole_pages_skipped(span, window, storage)
    length = len(span.pages) * storage.page_size - skipped
    mask = None
    fits = window is None or span.kv_length <= window
    if span.tree is not None or span.kv_length > span.length or span.seen_from or not fits:
        seen = _mask(span, window, storage)[:, skipped:]
        seen = F.pad(seen, (0, length - seen.shape[1]), value=float("-inf"))
        mask = FoldedMask(seen[None, None])
    if span.first_slot is not None:
        return Piece(span.start, span.stop, None, span.first_slot + skipped, length, mask)
    pages = torch.tensor(span.pages[skipped // storage.page_size :], device=storage.device)
    return Piece(span.start, span.stop, pages, 0, length, mask)


def _whole_pages_skipped(span: Span, window: int | None, storage: KvStorage) -> int:
    """Tokens of the first pages that none of the row's new tokens sees."""
    return _skipped(span, window) // storage.page_size * storage.page_size


def _parts(span: Span, storage: KvStorage) -> Iterator[Span]:
    """The span, or on a CPU in 16 bits a prefill in parts, for ``EXACT_QUERIES``' sake."""
    wide = storage.device.type != "cpu" or storage.dtype.itemsize != 2
    if wide or span.tree is not None or span.kv_length > EXACT_UP_TO:
        yield span
        return
    for start in range(span.start, span.stop, EXACT_QUERIES):
        stop = min(start + EXACT_QUERIES, span.stop)
        kv_length = span.kv_length - (span.stop - stop)
        pages = span.pages[: -(-kv_length // storage.page_size)]
        yield replace(span, start=start, stop=stop, kv_length=kv_length, pages=pages)


def _mask(span: Span, window: int | None, storage: KvStorage) -> Tensor:
    """Additive ``[n, kv_length]``: 0 where a new token sees a stored one, -inf elsewhere."""
    size, device, tree = span.length, storage.device, span.tree
    if tree is None:
        tree = torch.ones(size, size, dtype=torch.bool, device=device).tril_()
    prefix = span.kv_length - tree.shape[1]
    seen = torch.cat([tree.new_ones(size, prefix), tree], 1)
    seen[:, : span.seen_from] = False
    if window is not None:
        assert tree.shape[1] == size, "what is stored of a tree has no positions here"
        new_positions = prefix + tree.sum(1) - 1
        positions = torch.cat([torch.arange(prefix, device=device), new_positions])
        seen &= new_positions[:, None] - positions < window
    return additive(seen, storage.dtype)


def _alike(spans: Sequence[Span], window: int | None, storage: KvStorage) -> list[list[Span]]:
    """Spans of similar sizes together, so that padding never costs more than the rows do.

    On a CPU a group is small enough for its copied pages to stay in the caches.
    """
    token_bytes = storage.layers[0].elements * storage.dtype.itemsize
    limit = GROUP_BYTES if storage.device.type == "cpu" else math.inf
    groups: list[list[Span]] = []
    longest = widest = 0
    for span in sorted(spans, key=lambda span: (_width(span), span.kv_length), reverse=True):
        length = span.kv_length - _skipped(span, window)
        full = groups and (len(groups[-1]) + 1) * longest * token_bytes > limit
        if not groups or full or 2 * length < longest or _width(span) < widest:
            groups.append([])
            longest, widest = length, _width(span)
        groups[-1].append(span)
    return groups


def _width(span: Span) -> int:
    """New tokens by powers of two: 0 for 1, 1 for 2, 2 for 3 and 4, ..."""
    return (span.length - 1).bit_length()


def _group(spans: Sequence[Span], window: int | None, storage: KvStorage) -> Group:
    page_size, device = storage.page_size, storage.device
    size = max(span.length for span in spans)
    pages: list[tuple[int, ...]] = []
    bounds: list[list[tuple[int, int]]] = []  # for each new token, which of the tokens are seen
    tokens: list[int] = []
    for span in spans:
        skipped = _whole_pages_skipped(span, window, storage)
        pages.append(span.pages[skipped // page_size :])
        bounds.append(_seen(span, window, skipped, size))
        tokens += range(span.start, span.stop)
        tokens += [span.stop - 1] * (size - span.length)
    most = max(map(len, pages))
    # A shorter row is filled up with its own last page, which the mask hides.
    filled = [row + row[-1:] * (most - len(row)) for row in pages]
    seen = _between(torch.tensor(bounds, device=device), most * page_size)
    for row, span in enumerate(spans):
        if not _is_chain(span):
            skipped = _whole_pages_skipped(span, window, storage)
            mask = _mask(span, window, storage)[:, skipped:] == 0
            seen[row, : span.length] = False
            seen[row, : span.length, : mask.shape[1]] = mask
            seen[row, span.length :] = seen[row, span.length - 1]
    return Group(
        tokens=torch.tensor(tokens, device=device),
        rows=len(spans),
        pages=torch.tensor(filled, device=device).view(-1),
        mask=FoldedMask(additive(seen, storage.dtype)[:, None]),
    )


def _is_chain(span: Span) -> bool:
    """Whether each new token sees all before it, or all that the window leaves of that."""
    return span.tree is None or _sees_all(span)


def _seen(span: Span, window: int | None, skipped: int, size: int) -> list[tuple[int, int]]:
    """For ``size`` new tokens of a chain, the last one repeated: the first and the last one seen.

    Counted from ``skipped`` on, the second one exclusive.
    """
    seen = []
    for place in range(size):
        stop = span.kv_length - span.length + min(place, span.length - 1) + 1
        start = span.seen_from if window is None else max(span.seen_from, stop - window)
        seen.append((start - skipped, stop - skipped))
    return seen


def _between(bounds: Tensor, length: int) -> Tensor:
    """bool ``[..., length]``: which places lie within ``bounds`` ``[..., 2]``, ends exclusive."""
    low, high = bounds[..., None].unbind(-2)
    places = torch.arange(length, device=bounds.device)
    return (places >= low) & (places < high)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where something is seen, -inf elsewhere; ``seen`` is boolean, of any shape."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, float("-inf"))
