"""Attention of a layer that learns on its own guesses: several depths over one text.

Row t of the first depth sees rows 0 to t, as ever. Row t of a later depth stands for what follows
row t of the depth before: it sees rows 0 to t of the first depth, and of each later one row t
alone, its own last. That is what a module sees when it is replayed behind a known text (the
"training-time test" of EAGLE-3, arXiv 2503.01840). Registered with transformers, so that any
architecture's layer can learn so. Knows nothing about losses.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION = "forethought_unrolled"
KEYWORD = "forethought_unrolled"
"""The extra argument of a layer that carries the keys."""


class UnrolledKeys:
    """Keys and values of the depths so far, of one text in each of R rows."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """The next depth, of at most as many rows as the one before.

        Args:
            q: ``[R, heads, S, key_dim]``, rotated, as is k.
            k: ``[R, kv_heads, S, key_dim]``.
            v: ``[R, kv_heads, S, value_dim]``.
            scale: on the products.

        Returns:
            ``[R, heads, S, value_dim]``.
        """
        grouped = q.shape[1] != k.shape[1]
        self._keys.append(k)
        self._values.append(v)
        if len(self._keys) == 1:
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=grouped
            )
        rows = torch.arange(q.shape[2], device=q.device)[:, None]
        columns = [torch.arange(each.shape[2], device=q.device) for each in self._keys]
        seen = torch.cat([columns[0] <= rows, *(own == rows for own in columns[1:])], -1)
        keys, values = torch.cat(self._keys, 2), torch.cat(self._values, 2)
        return F.scaled_dot_product_attention(
            q, keys, values, attn_mask=seen, scale=scale, enable_gqa=grouped
        )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Serve one attention layer; see ``model.attention.interface.attend`` for the shapes."""
    keys: UnrolledKeys = kwargs[KEYWORD]
    return keys.attend(query, key, value, kwargs.get("scaling")).transpose(1, 2), None


AttentionInterface.register(ATTENTION, attend)
