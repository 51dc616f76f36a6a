"""The portable attention backend: torch's scaled_dot_product_attention, on CPU and CUDA.

How the rows of a batch attend is planned once per forward and window. A row attends in one of three
ways:

===============  ============================================  ====================================
``DecodeView``   one new token, contiguous pages               a view of the cache, nothing copied
``PaddedGroup``  a few new tokens each (decodes, draft trees)  pages gathered, one padded call
``MaskedRow``    many new tokens (prefill chunk, large tree)   a call with a mask of its own
===============  ============================================  ====================================

The query heads that share a key/value head are folded into the query length, ``[B, kv_heads, shared
* n, dim]``, so keys and values are never expanded for a few new tokens. Softcap and attention
sinks, which torch's kernel lacks, are computed by hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from forethought.kv.entries import from_entries
from forethought.kv.staging import upload
from forethought.kv.storage import KvStorage
from forethought.model.attention.base import AttentionBackend, Capability, Scoring
from forethought.model.attention.window import first_seen, is_seen, most_seen
from forethought.model.batch import Batch, Span

# On a CPU. A row with fewer bytes of keys and values per layer than SMALL_ROW_BYTES joins a group
# if there are at least MIN_GROUP_ROWS of them: gathering costs less than a call per row. The copies
# of a group should stay in the CPU's caches: past MAX_GROUP_BYTES another group begins.
SMALL_ROW_BYTES = 320 * 1024
MIN_GROUP_ROWS = 4
MAX_GROUP_BYTES = 4 * 2**20
MAX_GROUP_QUERIES = 32
"""New tokens that a row of a group may have; a row with more gets a call of its own."""
BATCH_INVARIANT_QUERIES, BATCH_INVARIANT_LENGTH = 16, 512
"""Queries per call, and stored tokens, up to which 16-bit attention on a CPU is batch-invariant.

torch's CPU kernel rounds a query's result by the number of queries in the call, but not from 4
(in bf16 with AMX: 1) to 16 of them, nor by the number of keys if that is a multiple of 16 (masked
ones count). So whole pages are attended to, queries are padded to the minimum, and prefills
are cut into parts of 16 tokens: with pages of 16 tokens, keys and values in bf16 and fp16 do not
depend on the batch. Longer prefills are not cut, it would cost too much. Softcap and sinks, which
are computed by hand, are batch-invariant up to rounding only."""


class FoldedMask:
    """The additive mask ``[B, 1, n, L]`` of some tokens, for all layers of a plan."""

    def __init__(self, mask: Tensor) -> None:
        self._folds = {1: mask}

    def fold(self, shared: int) -> Tensor:
        """``[B, 1, shared * n, L]``: for ``shared`` query heads of one key head, each n tokens."""
        if shared not in self._folds:
            self._folds[shared] = self._folds[1].repeat(1, 1, shared, 1)
        return self._folds[shared]


@dataclass(frozen=True, slots=True)
class DecodeView:
    """A decode row, packed token ``token``, over ``length`` slots from ``first`` on. ``mask`` is
    additive, ``[1, length]`` in the cache's dtype: the slots are those of whole pages.
    """

    token: int
    first: int
    length: int
    mask: Tensor


@dataclass(frozen=True, slots=True)
class PaddedGroup:
    """B rows in one call, padded to n new tokens and L stored ones, whole pages.

    Attributes:
        tokens: int64 ``[B * n]``, indices in the packed batch; padding repeats a row's last token.
        num_rows: B.
        pages: int64 ``[B * L / page_size]``, row by row.
        mask: additive, ``[B, 1, n, L]`` in the cache's dtype.
    """

    tokens: Tensor
    num_rows: int
    pages: Tensor
    mask: FoldedMask


@dataclass(frozen=True, slots=True)
class MaskedRow:
    """A row of n > 1 new tokens over L stored ones.

    Attributes:
        start, stop: its tokens in the packed batch.
        pages: int64, the pages of the L tokens; None when they are the L slots from ``first`` on.
        first: the first of the L tokens: a slot, or with ``pages`` an index into their tokens.
        length: L.
        mask: additive, ``[1, 1, n, L]`` in the cache's dtype; None: causal, query i attends to the
            first i + 1 keys.
    """

    start: int
    stop: int
    pages: Tensor | None
    first: int
    length: int
    mask: FoldedMask | None


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """The calls that each layer of one window makes for one batch."""

    page_size: int
    views: list[DecodeView]
    groups: list[PaddedGroup]
    masked_rows: list[MaskedRow]


class SdpaPlanner:
    """Makes the plans. Decode rows are gathered into groups by ``grouping``: "auto" by a measured
    rule, "always", or "never" where their pages are contiguous.
    """

    def __init__(self, grouping: str = "auto") -> None:
        assert grouping in ("auto", "always", "never")
        self.grouping = grouping
        self._step = torch.empty(0)
        """Zeros, then a page of -inf: a view's mask is a slice of it."""
        self._step_of: tuple[int, int, torch.dtype] | None = None
        """The number of zeros, the page size and the dtype."""

    def __call__(self, batch: Batch, storage: KvStorage, window: int | None) -> SdpaPlan:
        """Choose how each row attends, and build the masks and indices."""
        spans = [part for span in batch.spans for part in _parts(span, storage)]
        fitting = [span for span in spans if span.length <= MAX_GROUP_QUERIES]
        alone = self._alone(fitting, window, storage)
        grouped = [span for span in fitting if span.start not in alone]
        others = [s for s in spans if s.start in alone or s.length > MAX_GROUP_QUERIES]
        views = [span for span in others if _is_viewable(span)]
        return SdpaPlan(
            page_size=storage.page_size,
            views=[self._view(span, window, storage) for span in views],
            groups=[_group(spans, window, storage) for spans in _alike(grouped, window, storage)],
            masked_rows=[
                _masked_row(span, window, storage) for span in others if not _is_viewable(span)
            ],
        )

    def _alone(self, spans: Sequence[Span], window: int | None, storage: KvStorage) -> set[int]:
        """The rows, by their first packed token, that attend in a call of their own."""
        possible = {span.start for span in spans if span.first_slot is not None or span.length > 1}
        if self.grouping == "never":
            return possible
        if self.grouping == "always" or storage.device.type != "cpu":
            return set()  # on a GPU a call per row is a launch per row
        token_bytes = storage.layers[0].elements * storage.dtype.itemsize
        small = {
            span.start
            for span in spans
            if (span.kv_length - _skipped(span, window)) * token_bytes < SMALL_ROW_BYTES
        }
        return possible - small if len(small) >= MIN_GROUP_ROWS else possible

    def _view(self, span: Span, window: int | None, storage: KvStorage) -> DecodeView:
        assert span.first_slot is not None
        skipped = _skipped_in_pages(span, window, storage)
        length = len(span.pages) * storage.page_size - skipped
        first = span.first_slot + skipped
        if skipped == _skipped(span, window):
            zeros = storage.num_pages * storage.page_size
            made_for = (zeros, storage.page_size, storage.dtype)
            if self._step_of != made_for:
                self._step_of = made_for
                self._step = torch.zeros(
                    zeros + storage.page_size, dtype=storage.dtype, device=storage.device
                )
                self._step[zeros:] = float("-inf")
            mask = self._step.narrow(0, zeros - (span.kv_length - skipped), length)[None]
            return DecodeView(span.start, first, length, mask)
        bounds = upload(_bounds(span, window, skipped, 1), storage.device)
        mask = additive(_between(bounds, length), storage.dtype)
        return DecodeView(span.start, first, length, mask)


def _skipped(span: Span, window: int | None) -> int:
    """Number of first stored tokens that none of the row's new tokens attends to."""
    return max(span.seen_from, first_seen(span.kv_length - span.length, window))


def _skipped_in_pages(span: Span, window: int | None, storage: KvStorage) -> int:
    """``_skipped``, rounded down to whole pages."""
    return _skipped(span, window) // storage.page_size * storage.page_size


def _is_viewable(span: Span) -> bool:
    return span.length == 1 and span.first_slot is not None


def _masked_row(span: Span, window: int | None, storage: KvStorage) -> MaskedRow:
    skipped = _skipped_in_pages(span, window, storage)
    length = len(span.pages) * storage.page_size - skipped
    mask = None
    fits = window is None or span.kv_length <= most_seen(window)
    if span.tree is not None or span.kv_length > span.length or span.seen_from or not fits:
        visible = _visibility(span, window, storage.device)[:, skipped:]
        visible = F.pad(visible, (0, length - visible.shape[1]))
        mask = FoldedMask(additive(visible, storage.dtype)[None, None])
    if span.first_slot is not None:
        return MaskedRow(span.start, span.stop, None, span.first_slot + skipped, length, mask)
    pages = upload(span.pages[skipped // storage.page_size :], storage.device)
    return MaskedRow(span.start, span.stop, pages, 0, length, mask)


def _parts(span: Span, storage: KvStorage) -> Iterator[Span]:
    """The span, or on a CPU in 16 bits a prefill in parts: see ``BATCH_INVARIANT_QUERIES``."""
    wide = storage.device.type != "cpu" or storage.dtype.itemsize != 2
    if wide or span.tree is not None or span.kv_length > BATCH_INVARIANT_LENGTH:
        yield span
        return
    for start in range(span.start, span.stop, BATCH_INVARIANT_QUERIES):
        stop = min(start + BATCH_INVARIANT_QUERIES, span.stop)
        kv_length = span.kv_length - (span.stop - stop)
        pages = span.pages[: -(-kv_length // storage.page_size)]
        yield replace(span, start=start, stop=stop, kv_length=kv_length, pages=pages)


def _visibility(span: Span, window: int | None, device: torch.device) -> Tensor:
    """bool ``[n, kv_length]``: which stored tokens each new token attends to."""
    size = span.length
    if span.tree is None:
        tree = torch.ones(size, size, dtype=torch.bool, device=device).tril_()
    else:
        tree = span.tree.to(device)
    prefix = span.kv_length - size
    visible = torch.cat([tree.new_ones(size, prefix), tree], 1)
    visible[:, : span.seen_from] = False
    if window is not None:
        new_positions = prefix + tree.sum(1) - 1
        positions = torch.cat([torch.arange(prefix, device=device), new_positions])
        visible &= is_seen(new_positions[:, None], positions, window)
    return visible


def _alike(spans: Sequence[Span], window: int | None, storage: KvStorage) -> list[list[Span]]:
    """Groups of spans of similar sizes, so that padding never costs more than the rows do. On a CPU
    a group is small enough for its gathered pages to stay in the caches.
    """
    token_bytes = storage.layers[0].elements * storage.dtype.itemsize
    limit = MAX_GROUP_BYTES if storage.device.type == "cpu" else math.inf
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


def _group(spans: Sequence[Span], window: int | None, storage: KvStorage) -> PaddedGroup:
    page_size, device = storage.page_size, storage.device
    size = max(span.length for span in spans)
    skipped = [_skipped_in_pages(span, window, storage) for span in spans]
    pages = [s.pages[skip // page_size :] for s, skip in zip(spans, skipped, strict=True)]
    num_pages = max(map(len, pages))
    # A shorter row is padded with its own last page, which the mask hides.
    padded = [row + row[-1:] * (num_pages - len(row)) for row in pages]
    tokens: list[int] = []
    for span in spans:
        tokens += range(span.start, span.stop)
        tokens += [span.stop - 1] * (size - span.length)
    bounds = [_bounds(s, window, skip, size) for s, skip in zip(spans, skipped, strict=True)]
    visible = _between(upload(bounds, device), num_pages * page_size)
    for row, (span, skip) in enumerate(zip(spans, skipped, strict=True)):
        if span.tree is not None:
            mask = _visibility(span, window, device)[:, skip:]
            visible[row, : span.length] = False
            visible[row, : span.length, : mask.shape[1]] = mask
            visible[row, span.length :] = visible[row, span.length - 1]
    return PaddedGroup(
        tokens=upload(tokens, device),
        num_rows=len(spans),
        pages=upload(padded, device).view(-1),
        mask=FoldedMask(additive(visible, storage.dtype)[:, None]),
    )


def _bounds(span: Span, window: int | None, skipped: int, size: int) -> list[tuple[int, int]]:
    """For ``size`` new tokens of a chain, the last one repeated: the half-open range that each
    attends to, counted from stored token ``skipped`` on.
    """
    bounds = []
    for index in range(size):
        stop = span.kv_length - span.length + min(index, span.length - 1) + 1
        start = max(span.seen_from, first_seen(stop - 1, window))
        bounds.append((start - skipped, stop - skipped))
    return bounds


def _between(bounds: Tensor, length: int) -> Tensor:
    """bool ``[..., length]``: which indices lie within ``bounds`` ``[..., 2]``, half-open."""
    low, high = bounds[..., None].unbind(-2)
    indices = torch.arange(length, device=bounds.device)
    return (indices >= low) & (indices < high)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where ``visible`` (bool, any shape) is True, -inf elsewhere."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, float("-inf"))


class without_cudnn:  # a context, used like a function
    """Within this context torch's attention on CUDA does not use cuDNN.

    torch prefers cuDNN on recent GPUs, which builds a plan for every new shape of its input: the
    first call of a shape takes milliseconds, and while decoding the masks grow by a page at a time.
    The setting is torch's own and the process's; it is restored after each call of attention, so
    that other code in the process keeps its own. Nothing is done for a CPU.
    """

    __slots__ = ("_restored",)

    def __init__(self, device: torch.device) -> None:
        self._restored = device.type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled()

    def __enter__(self) -> None:
        if self._restored:
            torch.backends.cuda.enable_cudnn_sdp(False)

    def __exit__(self, *error: object) -> None:
        if self._restored:
            torch.backends.cuda.enable_cudnn_sdp(True)


MIN_QUERIES_WITH_AMX, MIN_QUERIES_WITHOUT_AMX = 1, 4
MIN_QUERIES = (
    MIN_QUERIES_WITH_AMX if torch.cpu._is_amx_tile_supported() else MIN_QUERIES_WITHOUT_AMX
)
"""With fewer queries torch's CPU kernel rounds a query differently, in bf16; in fp16, which AMX
does not multiply, with fewer than ``MIN_QUERIES_WITHOUT_AMX``."""


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scoring: Scoring,
    *,
    batch_invariant: bool = True,
) -> Tensor:
    """Attention where the queries of a key head are folded together.

    ``q`` is ``[B, kv_heads, queries, key_dim]``, the queries being a head's tokens or a group's
    heads, ``k`` and ``v`` ``[B, kv_heads, L, dim]``. ``mask`` is additive, broadcast to
    ``[B, kv_heads, queries, L]``; None: every key is attended to. ``batch_invariant``: round a
    query the same whatever the number of queries; see ``BATCH_INVARIANT_QUERIES``. Returns
    ``[B, kv_heads, queries, value_dim]``.
    """
    if scoring.softcap is None and scoring.sinks is None:
        if batch_invariant:
            return batch_invariant_attention(q, k, v, mask, scoring)
        return _scaled_dot_product(q, k, v, mask, scale=scoring.scale)
    scores = q.float() @ k.float().transpose(-1, -2) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if mask is not None:
        scores = scores + mask
    if scoring.sinks is not None:
        heads = scoring.sinks.float().view(q.shape[1], -1, 1)
        sinks = heads.expand(-1, -1, q.shape[2] // heads.shape[1]).reshape(1, q.shape[1], -1, 1)
        sinks = sinks.expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights @ v.float()).to(q.dtype)


def _scaled_dot_product(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **settings: Any
) -> Tensor:
    """torch's attention: without cuDNN, and with a mask that begins where CUDA kernels can read.
    The memory-efficient kernel raises where the mask is a slice that begins between multiples of
    ``MASK_ALIGNMENT``; strides torch pads itself.
    """
    if mask is not None and mask.storage_offset() * mask.element_size() % MASK_ALIGNMENT:
        mask = mask.clone() if mask.device.type == "cuda" else mask
    with without_cudnn(q.device):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **settings)


MASK_ALIGNMENT = 16
"""Bytes."""


def batch_invariant_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring, causal: bool = False
) -> Tensor:
    """torch's kernel; in 16 bits on a CPU few queries are padded, see ``MIN_QUERIES``.

    ``q`` is ``[B, heads, queries, key_dim]``, ``k`` and ``v`` ``[B, kv_heads, L, dim]``; unlike in
    :func:`softmax_attention`, the heads that share keys need not be folded. ``mask`` is additive;
    ``causal``, without a mask: query i attends to the first i + 1 keys. Of ``scoring`` only the
    scale is used.
    """
    size, scale, gqa = q.shape[2], scoring.scale, q.shape[1] != k.shape[1]
    fewest = MIN_QUERIES_WITHOUT_AMX if q.dtype == torch.float16 else MIN_QUERIES
    if size >= fewest or causal or q.device.type != "cpu" or q.dtype.itemsize != 2:
        return _scaled_dot_product(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=gqa)
    more = (0, 0, 0, fewest - size)
    if mask is not None and mask.shape[-2] > 1:
        mask = F.pad(mask, more)
    out = F.scaled_dot_product_attention(
        F.pad(q, more), k, v, attn_mask=mask, scale=scale, enable_gqa=gqa
    )
    return out.narrow(2, 0, size)


FOLDED_FROM = 2048
"""heads * L from which few queries of a row are folded even if that is not batch-invariant."""


class SdpaAttention(AttentionBackend):
    """Attention through torch's kernels; for ``grouping`` see :class:`SdpaPlanner`."""

    name = "sdpa"
    capabilities = frozenset(Capability)

    def __init__(self, grouping: str = "auto") -> None:
        self._planner = SdpaPlanner(grouping)

    @override
    def plan(self, batch: Batch, storage: KvStorage, window: int | None) -> SdpaPlan:
        return self._planner(batch, storage, window)

    @override
    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, plan: SdpaPlan, scoring: Scoring
    ) -> Tensor:
        if len(plan.views) == q.shape[0]:
            return _attend_views(q, keys, values, plan.views, scoring)
        value_dim = from_entries(values[:0], q.dtype).shape[-1]
        out = q.new_empty(*q.shape[:2], value_dim)
        if plan.views:
            tokens = [view.token for view in plan.views]
            out[tokens] = _attend_views(q[tokens], keys, values, plan.views, scoring)
        for group in plan.groups:
            chosen = q.index_select(0, group.tokens).view(group.num_rows, -1, *q.shape[1:])
            k, v = (
                from_entries(_gather(stored, group.pages, plan.page_size), q.dtype)
                for stored in (keys, values)
            )
            k, v = (x.view(group.num_rows, -1, *x.shape[1:]) for x in (k, v))
            out.index_copy_(0, group.tokens, _attend_group(chosen, k, v, group.mask, scoring))
        for row in plan.masked_rows:
            tokens_of_row = slice(row.start, row.stop)
            k, v = keys, values
            if row.pages is not None:
                k = _gather(keys, row.pages, plan.page_size)
                v = _gather(values, row.pages, plan.page_size)
            k, v = (from_entries(x.narrow(0, row.first, row.length), q.dtype) for x in (k, v))
            attended = _attend_row(q[tokens_of_row], k, v, row.mask, scoring)
            if len(attended) == len(q):
                return attended.contiguous()
            out[tokens_of_row] = attended
        return out


def _attend_views(
    q: Tensor, keys: Tensor, values: Tensor, views: Sequence[DecodeView], scoring: Scoring
) -> Tensor:
    """q ``[views, heads, key_dim]`` -> ``[views, heads, value_dim]``, contiguous."""
    rows, heads, _ = q.shape
    kv_heads = keys.shape[1]
    folded = q.reshape(rows, 1, kv_heads, heads // kv_heads, -1).unbind(0)
    attended = []
    for row, view in enumerate(views):
        k, v = (
            from_entries(stored.narrow(0, view.first, view.length), q.dtype).transpose(0, 1)[None]
            for stored in (keys, values)
        )
        attended.append(softmax_attention(folded[row], k, v, view.mask, scoring))
    together = attended[0] if rows == 1 else torch.cat(attended)
    return together.reshape(rows, heads, -1).contiguous()


def _attend_group(q: Tensor, k: Tensor, v: Tensor, mask: FoldedMask, scoring: Scoring) -> Tensor:
    """q ``[B, n, heads, key_dim]``, k and v ``[B, L, kv_heads, dim]`` ->
    ``[B * n, heads, value_dim]``.
    """
    rows, size, heads, _ = q.shape
    kv_heads, shared = k.shape[2], heads // k.shape[2]
    if size > 1:  # the heads of one key, each with all tokens of the row, become queries
        q = q.view(rows, size, kv_heads, shared, -1).permute(0, 2, 3, 1, 4)
    folded = q.reshape(rows, kv_heads, shared * size, -1)
    folded_mask = mask.fold(shared if size > 1 else 1)
    out = softmax_attention(folded, k.transpose(1, 2), v.transpose(1, 2), folded_mask, scoring)
    if size > 1:
        out = out.reshape(rows, kv_heads, shared, size, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(rows * size, heads, -1)


def _attend_row(
    q: Tensor, k: Tensor, v: Tensor, folded: FoldedMask | None, scoring: Scoring
) -> Tensor:
    """q ``[n, heads, key_dim]``, k and v ``[L, kv_heads, dim]``, the mask or None."""
    (size, heads, _), (length, kv_heads, _) = q.shape, k.shape
    if folded is not None and size <= MAX_GROUP_QUERIES and heads > kv_heads:
        exact = size * (heads // kv_heads) <= BATCH_INVARIANT_QUERIES
        if exact or heads * length >= FOLDED_FROM:
            return _attend_group(q[None], k[None], v[None], folded, scoring)
    mask = None if folded is None else folded.fold(1)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if scoring.softcap is None and scoring.sinks is None:
        out = batch_invariant_attention(q, k, v, mask, scoring, causal=mask is None)
    else:
        if mask is None:
            visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
            mask = additive(visible.tril_(), k.dtype)
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        out = softmax_attention(q, k, v, mask, scoring)
    return out[0].transpose(0, 1)


def _gather(stored: Tensor, pages: Tensor, page_size: int) -> Tensor:
    """``[slots, kv_heads, dim]`` -> the tokens of the pages, ``[pages * page_size, ...]``."""
    width = page_size * stored.shape[1] * stored.shape[2]
    return stored.view(-1, width).index_select(0, pages).view(-1, *stored.shape[1:])
