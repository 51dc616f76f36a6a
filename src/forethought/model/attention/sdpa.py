"""The portable attention backend: torch's scaled_dot_product_attention, on CPU and CUDA.

``sdpa_plan.py`` plans once per batch which rows attend together and over which pages. The query
heads that share a key/value head are folded into the query length, ``[B, kv_heads, shared * n,
dim]``, so keys and values are never expanded for a few new tokens. Softcap and attention sinks,
which torch's kernel lacks, are computed by hand.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from forethought.kv.storage import KvStorage
from forethought.model.attention.base import Capability, Scoring
from forethought.model.attention.sdpa_plan import (
    BATCH_INVARIANT_QUERIES,
    MAX_GROUP_QUERIES,
    DecodeView,
    FoldedMask,
    SdpaPlan,
    SdpaPlanner,
    additive,
)
from forethought.model.batch import Batch

MIN_QUERIES_WITH_AMX, MIN_QUERIES_WITHOUT_AMX = 1, 4
MIN_QUERIES = (
    MIN_QUERIES_WITH_AMX if torch.cpu._is_amx_tile_supported() else MIN_QUERIES_WITHOUT_AMX
)
"""With fewer queries torch's CPU kernel rounds a query differently, in 16 bits."""


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

    Args:
        q: ``[B, kv_heads, queries, key_dim]``: the queries are a head's tokens or a group's heads.
        k: ``[B, kv_heads, L, key_dim]``.
        v: ``[B, kv_heads, L, value_dim]``.
        mask: additive, broadcast to ``[B, kv_heads, queries, L]``; None: every key is attended to.
        scoring: scale, softcap and sinks.
        batch_invariant: round a query the same whatever the number of queries; see
            ``sdpa_plan.BATCH_INVARIANT_QUERIES``.

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
    """torch's kernel; in 16 bits on a CPU queries are padded to at least ``MIN_QUERIES``.

    Unlike in :func:`softmax_attention`, the heads that share keys need not be folded.

    Args:
        q: ``[B, heads, queries, key_dim]``.
        k: ``[B, kv_heads, L, key_dim]``.
        v: ``[B, kv_heads, L, value_dim]``.
        mask: additive, or None.
        scoring: only its scale is used.
        causal: query i attends to the first i + 1 keys; without a mask.
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
"""heads * L from which few queries of a row are folded even if that is not batch-invariant."""


class SdpaAttention:
    """Attention through torch's kernels.

    Args:
        grouping: see :class:`~forethought.model.attention.sdpa_plan.SdpaPlanner`.
    """

    name = "sdpa"
    capabilities = frozenset(Capability)

    def __init__(self, grouping: str = "auto") -> None:
        self._planner = SdpaPlanner(grouping)

    def plan(self, batch: Batch, storage: KvStorage, window: int | None) -> SdpaPlan:
        """See :class:`~forethought.model.attention.base.AttentionBackend`."""
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
            chosen = q.index_select(0, group.tokens).view(group.num_rows, -1, *q.shape[1:])
            k = _gather(keys, group.pages, plan.page_size).view(group.num_rows, -1, *keys.shape[1:])
            v = _gather(values, group.pages, plan.page_size).view(
                group.num_rows, -1, *values.shape[1:]
            )
            out.index_copy_(0, group.tokens, _attend_group(chosen, k, v, group.mask, scoring))
        for row in plan.masked_rows:
            tokens_of_row = slice(row.start, row.stop)
            k, v = keys, values
            if row.pages is not None:
                k = _gather(keys, row.pages, plan.page_size)
                v = _gather(values, row.pages, plan.page_size)
            k, v = (x.narrow(0, row.first, row.length) for x in (k, v))
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
    if size > 1:  # the heads of one key, each with all tokens of the row, become queries
        q = q.view(rows, size, kv_heads, shared, -1).permute(0, 2, 3, 1, 4)
    folded = q.reshape(rows, kv_heads, shared * size, -1)
    seen = mask.fold(shared if size > 1 else 1)
    out = softmax_attention(folded, k.transpose(1, 2), v.transpose(1, 2), seen, scoring)
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
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
            mask = additive(seen.tril_(), k.dtype)
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        out = softmax_attention(q, k, v, mask, scoring)
    return out[0].transpose(0, 1)


def _gather(stored: Tensor, pages: Tensor, page_size: int) -> Tensor:
    """``[slots, kv_heads, dim]`` -> the tokens of the pages, ``[pages * page_size, ...]``."""
    width = page_size * stored.shape[1] * stored.shape[2]
    return stored.view(-1, width).index_select(0, pages).view(-1, *stored.shape[1:])
