"""Attention of queries over keys that lie before them: torch's kernel; softcap and sinks by hand.

Knows nothing about pages, rows and batches.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forethought.model.attention.base import Scoring

FEWEST_QUERIES_WITH_AMX, FEWEST_QUERIES_WITHOUT_AMX = 1, 4
FEWEST_QUERIES = (
    FEWEST_QUERIES_WITH_AMX if torch.cpu._is_amx_tile_supported() else FEWEST_QUERIES_WITHOUT_AMX
)
"""Below so many torch's CPU kernel rounds a query otherwise, in 16 bits."""


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scoring: Scoring,
    *,
    steady: bool = True,
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
        if not steady:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scoring.scale)
        return steady_attention(q, k, v, mask, scoring)
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


def steady_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring, causal: bool = False
) -> Tensor:
    """torch's own attention; in 16 bits on a CPU with at least ``FEWEST_QUERIES``.

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
    if size >= FEWEST_QUERIES or causal or q.device.type != "cpu" or q.dtype.itemsize != 2:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=gqa
        )
    more = (0, 0, 0, FEWEST_QUERIES - size)
    if mask is not None and mask.shape[-2] > 1:
        mask = F.pad(mask, more)
    out = F.scaled_dot_product_attention(
        F.pad(q, more), k, v, attn_mask=mask, scale=scale, enable_gqa=gqa
    )
    return out.narrow(2, 0, size)
