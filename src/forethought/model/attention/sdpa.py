"""Attention of queries over keys that lie before them: torch's kernel; softcap and sinks by hand.

Knows nothing about pages, rows and batches.

[sdpa] The portable backend: torch's scaled_dot_product_attention, on CPU and CUDA.

Which rows attend together, and over which pages, is planned once per batch: see ``sdpa_plan.py``.
The query heads that share a key/value head are folded into the query length, so keys and values
are never expanded for one new token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from forethought.kv.storage import KvStorage
from forethought.model.attention.base import Capability, Scoring
from forethought.model.attention.sdpa_plan import (
    EXACT_QUERIES,
    MAX_QUERIES,
    FoldedMask,
    SdpaPlan,
    SdpaPlanner,
    View,
    additive,
)
from forethought.model.batch import Batch

MIN_QUERIES_WITH_AMX, MIN_QUERIES_WITHOUT_AMX = 1, 4
MIN_QUERIES = (
    MIN_QUERIES_WITH_AMX if torch.cpu._is_amx_tile_supported() else MIN_QUERIES_WITHOUT_AMX
)
"""Below so many torch's CPU kernel rounds a query otherwise, in 16 bits."""


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scoring: Scoring,
    *,
    batch_invariant: bool = True,
) -> Tensor:
    """Attention of the queries that share keys.

    Args:
        q: ``[B, kv_heads, queries, key_dim]``: the queries are a head's tokens or a group's heads.
        k: ``[B, kv_heads, L, key_dim]``.
        v: ``[B, kv_heads, L, value_dim]``.
        mask: additive, broadcast to ``[B, kv_heads, queries, L]``; None: all is seen.
        scoring: scale, softcap and sinks.
        steady: round a query the same in any company, as far as that goes: see
            ``sdpa_plan.EXACT_QUERIES``.

    Returns:
        ``[B, kv_heads, queries, value_dim]``.
    """
    if scoring.softcap is None and scoring.sinks is None:
        if not batch_invariant:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scoring.scale)
        return batch_invariant_attention(q, k, v, mask, scoring)
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


def batch_invariant_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring, causal: bool = False
) -> Tensor:
    """torch's own attention; in 16 bits on a CPU with at least ``MIN_QUERIES``.

    Shapes as of :func:`softmax_attention`, but for heads that share keys: these may be apart.

    Args:
        q: ``[B, heads, queries, key_dim]``.
        k: ``[B, kv_heads, L, key_dim]``.
        v: ``[B, kv_heads, L, value_dim]``.
        mask: additive, or None.
        scoring: its scale alone counts.
        causal: query i sees the first i + 1 keys; without a mask.
    """
    size, scale, gqa = q.shape[2], scoring.scale, q.shape[1] != k.shape[1]
    if size >= MIN_QUERIES or causal or q.device.type != "cpu" or q.dtype.itemsize != 2:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=gqa
        )
    more = (0, 0, 0, MIN_QUERIES - size)
    if mask is not None and mask.shape[-2] > 1:
        mask = F.pad(mask, more)
    out = F.scaled_dot_product_attention(
        F.pad(q, more), k, v, attn_mask=mask, scale=scale, enable_gqa=gqa
    )
    return out.narrow(2, 0, size)


FOLDED_FROM = 2048
"""Heads times stored tokens from which a piece of few queries is folded whatever that rounds."""


class SdpaAttention:
    """Attention through torch's own kernels.

    Args:
        grouping: see :class:`~forethought.model.attention.sdpa_plan.SdpaPlanner`.
    """

    name = "sdpa"
    capabilities = frozenset(Capability)

    def __init__(self, grouping: str = "auto") -> None:
        self._planner = SdpaPlanner(grouping)

    def plan(self, batch: Batch, storage: KvStorage, window: int | None) -> SdpaPlan:
        """Choose for every row how it attends, and build its masks and indices."""
        return self._planner(batch, storage, window)

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, plan: SdpaPlan, scoring: Scoring
    ) -> Tensor:
        """See :class:`~forethought.model.attention.base.AttentionBackend`."""
        if len(plan.views) == q.shape[0]:
            return _attend_views(q, keys, values, plan.views, scoring)
        out = q.new_empty(*q.shape[:2], values.shape[-1])
        if plan.views:
            tokens = [view.token for view in plan.views]
            out[tokens] = _attend_views(q[tokens], keys, values, plan.views, scoring)
        for group in plan.groups:
            chosen = q.index_select(0, group.tokens).view(group.rows, -1, *q.shape[1:])
            k = _pages(keys, group.pages, plan.page_size).view(group.rows, -1, *keys.shape[1:])
            v = _pages(values, group.pages, plan.page_size).view(group.rows, -1, *values.shape[1:])
            out.index_copy_(0, group.tokens, _attend_group(chosen, k, v, group.mask, scoring))
        for piece in plan.pieces:
            place = slice(piece.start, piece.stop)
            k, v = keys, values
            if piece.pages is not None:
                k = _pages(keys, piece.pages, plan.page_size)
                v = _pages(values, piece.pages, plan.page_size)
            k, v = (x.narrow(0, piece.first, piece.length) for x in (k, v))
            attended = _attend_piece(q[place], k, v, piece.mask, scoring)
            if len(attended) == len(q):
                return attended.contiguous()
            out[place] = attended
        return out


def _attend_views(
    q: Tensor, keys: Tensor, values: Tensor, views: Sequence[View], scoring: Scoring
) -> Tensor:
    """q ``[views, heads, key_dim]`` -> ``[views, heads, value_dim]``, contiguous."""
    rows, heads, _ = q.shape
    kv_heads = keys.shape[1]
    folded = q.reshape(rows, 1, kv_heads, heads // kv_heads, -1).unbind(0)
    k, v = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    attended = [
        softmax_attention(
            folded[row],
            k.narrow(2, view.first, view.length),
            v.narrow(2, view.first, view.length),
            view.mask,
            scoring,
        )
        for row, view in enumerate(views)
    ]
    together = attended[0] if rows == 1 else torch.cat(attended)
    return together.reshape(rows, heads, -1).contiguous()


def _attend_group(q: Tensor, k: Tensor, v: Tensor, mask: FoldedMask, scoring: Scoring) -> Tensor:
    """q ``[B, n, heads, key_dim]``, k and v ``[B, L, kv_heads, dim]``.

    Returns ``[B * n, heads, value_dim]``.
    """
    rows, size, heads, _ = q.shape
    kv_heads, shared = k.shape[2], heads // k.shape[2]
    if size > 1:  # heads of one key are queries side by side, each with all of the row's tokens
        q = q.view(rows, size, kv_heads, shared, -1).permute(0, 2, 3, 1, 4)
    folded = q.reshape(rows, kv_heads, shared * size, -1)
    seen = mask.fold(shared if size > 1 else 1)
    out = softmax_attention(folded, k.transpose(1, 2), v.transpose(1, 2), seen, scoring)
    if size > 1:
        out = out.reshape(rows, kv_heads, shared, size, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(rows * size, heads, -1)


def _attend_piece(
    q: Tensor, k: Tensor, v: Tensor, folded: FoldedMask | None, scoring: Scoring
) -> Tensor:
    """q ``[n, heads, key_dim]``, k and v ``[L, kv_heads, dim]``, the mask or None."""
    (size, heads, _), (length, kv_heads, _) = q.shape, k.shape
    if folded is not None and size <= MAX_QUERIES and heads > kv_heads:
        exact = size * (heads // kv_heads) <= EXACT_QUERIES
        if exact or heads * length >= FOLDED_FROM:
            return _attend_group(q[None], k[None], v[None], folded, scoring)
    mask = None if folded is None else folded.fold(1)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if scoring.softcap is None and scoring.sinks is None:
        out = batch_invariant_attention(q, k, v, mask, scoring, causal=mask is None)
    else:
        if mask is None:
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
            mask = additive(seen.tril_(), k.dtype)
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        out = softmax_attention(q, k, v, mask, scoring)
    return out[0].transpose(0, 1)


def _pages(stored: Tensor, pages: Tensor, page_size: int) -> Tensor:
    """``[slots, kv_heads, dim]`` -> the tokens of the pages, ``[pages * page_size, ...]``."""
    width = page_size * stored.shape[1] * stored.shape[2]
    return stored.view(-1, width).index_select(0, pages).view(-1, *stored.shape[1:])
