"""The portable backend: torch's scaled_dot_product_attention, on CPU and CUDA.

Rows whose pages lie side by side attend through a view of the cache; others gather their pages.
Decode rows (one new token) fold the query group of each key/value head into the query length, so
keys and values are never expanded. Small decode rows are attended together, padded: on CUDA
because each call costs a launch, on CPU where copying the keys costs less than the calls do.
Softcap and sinks, which torch's kernels do not know, are computed explicitly in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forethought.kv.storage import KvStorage
from forethought.model.attention.base import Capability, Scoring
from forethought.model.batch import Batch, Span

# A call on a view costs a CPU about as much as gathering this many bytes of keys and values.
BYTES_PER_CALL = 160 * 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """One row, or the part of it that a window leaves.

    Attributes:
        start, stop: its tokens in the packed batch, n = stop - start.
        place: where its L visible tokens are stored: a slice of slots, or int64 ``[L]``.
        mask: additive, ``[n, L]`` in the cache's dtype, or None when ``causal`` or n = 1 says all.
        causal: whether query i sees exactly the first i + 1 keys (then n = L).
    """

    start: int
    stop: int
    place: slice | Tensor
    mask: Tensor | None
    causal: bool


@dataclass(frozen=True, slots=True)
class Group:
    """Decode rows that are attended together, padded to the longest, L tokens.

    Attributes:
        tokens: int64 ``[B]``, their places in the packed batch; None when they are all of it.
        slots: int64 ``[B * L]``, padded with a slot of the row itself.
        mask: additive, ``[B, 1, 1, L]`` in the cache's dtype.
    """

    tokens: Tensor | None
    slots: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """What the layers of one window do with one batch."""

    pieces: list[Piece]
    group: Group | None


class SdpaAttention:
    """Attention through torch's own kernels.

    Args:
        grouping: attend decode rows together: "auto" by measured rule, "always" or "never".
    """

    name = "sdpa"
    capabilities = frozenset(Capability)

    def __init__(self, grouping: str = "auto") -> None:
        assert grouping in ("auto", "always", "never")
        self.grouping = grouping

    def plan(self, batch: Batch, storage: KvStorage, window: int | None) -> SdpaPlan:
        """Choose for every row how it attends, and build its masks and indices."""
        decodes = [span for span in batch.spans if span.length == 1]
        grouped = self._worth_grouping(decodes, storage, window)
        alone = batch.spans if not grouped else [s for s in batch.spans if s.length > 1]
        pieces = [_piece(span, window, storage) for span in alone]
        group = _group(decodes, window, storage, len(batch.token_ids)) if grouped else None
        return SdpaPlan(pieces, group)

    def _worth_grouping(
        self, decodes: Sequence[Span], storage: KvStorage, window: int | None
    ) -> bool:
        if self.grouping != "auto" or len(decodes) < 2:
            return self.grouping == "always" and len(decodes) > 0
        if storage.device.type != "cpu":
            return True
        longest = max(_visible(span, window) for span in decodes)
        layer = max(storage.layers, key=lambda shape: shape.elements)
        return bool(longest * layer.elements * storage.dtype.itemsize < BYTES_PER_CALL)

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, plan: SdpaPlan, scoring: Scoring
    ) -> Tensor:
        """See :class:`~forethought.model.attention.base.AttentionBackend`."""
        group = plan.group
        if group is not None and group.tokens is None:
            return _attend_group(q, keys, values, group, scoring)
        out = q.new_empty(q.shape[0], q.shape[1], values.shape[-1])
        for piece in plan.pieces:
            rows = slice(piece.start, piece.stop)
            out[rows] = _attend_piece(q[rows], keys, values, piece, scoring)
        if group is not None:
            decoded = _attend_group(q[group.tokens], keys, values, group, scoring)
            out[group.tokens] = decoded
        return out


def _attend_piece(
    q: Tensor, keys: Tensor, values: Tensor, piece: Piece, scoring: Scoring
) -> Tensor:
    """q ``[n, heads, key_dim]`` -> ``[n, heads, value_dim]``."""
    size, heads, _ = q.shape
    kv_heads = keys.shape[1]
    k = keys[piece.place].transpose(0, 1).unsqueeze(0)
    v = values[piece.place].transpose(0, 1).unsqueeze(0)
    if size == 1:
        folded = q.reshape(1, kv_heads, heads // kv_heads, -1)
        return _softmax_attention(folded, k, v, None, scoring).view(1, heads, -1)
    q = q.transpose(0, 1).unsqueeze(0)
    if scoring.softcap is not None or scoring.sinks is not None:
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        mask = piece.mask if not piece.causal else _causal(size, q)
        return _softmax_attention(q, k, v, mask, scoring)[0].transpose(0, 1)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=piece.mask,
        is_causal=piece.causal,
        scale=scoring.scale,
        enable_gqa=heads != kv_heads,
    )
    return out[0].transpose(0, 1)


def _attend_group(
    q: Tensor, keys: Tensor, values: Tensor, group: Group, scoring: Scoring
) -> Tensor:
    """q ``[B, heads, key_dim]`` -> ``[B, heads, value_dim]``."""
    rows, heads, _ = q.shape
    kv_heads = keys.shape[1]
    k = keys.index_select(0, group.slots).view(rows, -1, *keys.shape[1:]).transpose(1, 2)
    v = values.index_select(0, group.slots).view(rows, -1, *values.shape[1:]).transpose(1, 2)
    folded = q.reshape(rows, kv_heads, heads // kv_heads, -1)
    return _softmax_attention(folded, k, v, group.mask, scoring).reshape(rows, heads, -1)


def _softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring
) -> Tensor:
    """q ``[B, kv_heads, queries, key_dim]``, where the heads or the group are the queries."""
    if scoring.softcap is None and scoring.sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scoring.scale)
    sinks = scoring.sinks
    if sinks is not None:
        sinks = sinks.view(q.shape[1], -1, 1)
    hidden = None if mask is None else mask < 0
    scoring = Scoring(scoring.scale, scoring.softcap, sinks)
    return _explicit_attention(q, k, v, hidden, scoring).to(q.dtype)


def _visible(span: Span, window: int | None) -> int:
    """How many of the last stored tokens at least one of the row's new tokens sees."""
    if window is None:
        return span.kv_length
    return min(span.kv_length, window - 1 + span.length)


def _place(span: Span, window: int | None) -> slice | Tensor:
    skipped = span.kv_length - _visible(span, window)
    if span.slots is not None:
        return span.slots[skipped:]
    assert span.first_slot is not None
    return slice(span.first_slot + skipped, span.first_slot + span.kv_length)


def _piece(span: Span, window: int | None, storage: KvStorage) -> Piece:
    place = _place(span, window)
    if span.length == 1:
        return Piece(span.start, span.stop, place, None, False)
    fits = window is None or span.kv_length <= window
    if span.tree is None and span.kv_length == span.length and fits:
        return Piece(span.start, span.stop, place, None, True)
    return Piece(span.start, span.stop, place, _mask(span, window, storage), False)


def _mask(span: Span, window: int | None, storage: KvStorage) -> Tensor:
    """Additive ``[n, L]``: 0 where a new token sees a stored one, -inf elsewhere."""
    size, prefix, device = span.length, span.kv_length - span.length, storage.device
    tree = span.tree
    if tree is None:
        tree = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    seen = torch.cat([tree.new_ones(size, prefix), tree], 1)
    if window is not None:
        places = prefix + tree.sum(1) - 1  # position of each new token
        positions = torch.cat([torch.arange(prefix, device=device), places])
        seen &= places[:, None] - positions < window
        seen = seen[:, span.kv_length - _visible(span, window) :]
    return _additive(seen, storage.dtype)


def _group(
    spans: Sequence[Span], window: int | None, storage: KvStorage, batch_length: int
) -> Group:
    device = storage.device
    lengths = torch.tensor([_visible(span, window) for span in spans], device=device)
    places = [_place(span, window) for span in spans]
    longest = int(max(_visible(span, window) for span in spans))
    offsets = torch.arange(longest, device=device)
    slots = torch.empty(len(spans), longest, dtype=torch.int64, device=device)
    for row, place in enumerate(places):
        if isinstance(place, slice):
            # Past its end a row repeats its last slot, which the mask hides.
            slots[row] = (offsets + place.start).clamp_(max=place.stop - 1)
        else:
            slots[row] = place[offsets.clamp(max=len(place) - 1)]
    mask = _additive(offsets < lengths[:, None], storage.dtype)
    everything = len(spans) == batch_length
    tokens = torch.tensor([span.start for span in spans], device=device)
    return Group(None if everything else tokens, slots.view(-1), mask[:, None, None])


def _causal(size: int, like: Tensor) -> Tensor:
    seen = torch.ones(size, size, dtype=torch.bool, device=like.device).tril()
    return _additive(seen, like.dtype)


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(
        ~seen, float("-inf")
    )


def _explicit_attention(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scoring: Scoring
) -> Tensor:
    """Softmax attention written out in float32; broadcasts over leading dimensions.

    Args:
        q: ``[..., queries, key_dim]``.
        k: ``[..., keys, key_dim]``.
        v: ``[..., keys, value_dim]``.
        hidden: bool, broadcastable to ``[..., queries, keys]``: True where a key is not seen.
        scoring: scale, softcap, and sinks already shaped ``[..., queries or 1, 1]``.

    Returns:
        ``[..., queries, value_dim]`` float32.
    """
    scores = q.float() @ k.float().transpose(-1, -2) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    if scoring.sinks is None:
        return scores.softmax(-1) @ v.float()
    sinks = scoring.sinks.float().expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return weights @ v.float()
