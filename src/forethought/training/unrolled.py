"""Attention of a layer that learns on its own guesses: several depths over one text.

Row t of the first depth sees rows 0 to t, as ever. Row t of a later depth stands for what follows
row t of the depth before: it sees rows 0 to t of the first depth, and of each later one row t
alone, its own last. That is what a module sees when it is replayed behind a known text (the
"training-time test" of EAGLE-3, arXiv 2503.01840). :func:`attend_unrolled` computes one such depth;
:class:`UnrolledKeys` is registered with transformers, so that any architecture's layer can learn
so. Knows nothing about losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION = "forethought_unrolled"
KEYWORD = "forethought_unrolled"
"""The extra argument of a layer that carries the keys."""


Keys = tuple[Tensor, Tensor]
"""Keys ``[R, heads, rows, key_dim]``, and values ``[R, heads, rows, value_dim]``."""


def attend_unrolled(
    q: Tensor, past: Keys, own: Sequence[Keys], rows: Tensor, scale: float
) -> Tensor:
    """A later depth: query s sees rows 0 to ``rows[s]`` of the past, and row s of each of ``own``.

    On a CPU with torch's flash kernel, which never holds the scores of all pairs; elsewhere by
    :func:`attend_unrolled_reference`.

    Args:
        q: ``[R, heads, S, key_dim]``.
        past: of the first depth, W rows.
        own: of each later depth, this one included, S rows each.
        rows: int64 ``[S]``, rising, below W.
        scale: on the products.

    Returns:
        ``[R, heads, S, value_dim]``.
    """
    if q.device.type != "cpu" or q.shape[-1] != past[1].shape[-1]:
        return attend_unrolled_reference(q, past, own, rows, scale)
    flat = [tensor for pair in own for tensor in pair]
    mixed: Tensor = _FlashUnrolled.apply(q, *past, rows, scale, *flat)
    return mixed


def attend_unrolled_reference(
    q: Tensor, past: Keys, own: Sequence[Keys], rows: Tensor, scale: float
) -> Tensor:
    """The same with one softmax over all scores; see :func:`attend_unrolled`."""
    keys, values = past
    seen = torch.arange(keys.shape[2], device=q.device) <= rows[:, None]
    scores = [(q @ keys.transpose(-1, -2)).float().masked_fill(~seen, float("-inf"))]
    scores += [(q * k).sum(-1, keepdim=True).float() for k, _ in own]
    weights = (torch.cat(scores, -1) * scale).softmax(-1).to(values.dtype)
    mixed = weights[..., : keys.shape[2]] @ values
    for depth, (_, v) in enumerate(own, start=keys.shape[2]):
        mixed = mixed + weights[..., depth, None] * v
    return mixed


class _FlashUnrolled(torch.autograd.Function):
    """Blocks of the past through the flash kernel and ``own`` by hand, joined by log-sum-exp.

    With the joint log-sum-exp and output, the kernel's own backward gives a block's gradients of
    the joint softmax: it needs nothing else of the other scores (Dao et al., 2022, arXiv
    2205.14135, appendix B.2).
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, scale: float, *own: Tensor
    ) -> Tensor:
        blocks = _blocks(rows, k.shape[2], q.dtype)
        mixed, sums = [], []
        for block in blocks:
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *(q, *block.of(k, v), 0.0, block.causal), attn_mask=block.mask, scale=scale
            )
            mixed.append(out)
            sums.append(lse)
        scores = torch.stack([(q * key).sum(-1, dtype=torch.float32) for key in own[::2]]) * scale
        lse = torch.cat([torch.stack(sums), scores]).logsumexp(0)  # [R, heads, S]
        weights = (scores - lse).exp()  # [own, R, heads, S]
        shares = [*((each - lse).exp() for each in sums), *weights]
        out = torch.zeros_like(v[:, :, :1]).expand(*q.shape[:3], -1).contiguous()
        for share, value in zip(shares, [*mixed, *own[1::2]], strict=True):
            out.addcmul_(share.unsqueeze(-1).to(out.dtype), value)
        ctx.save_for_backward(q, k, v, out, lse, weights, *own)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, weights, *own = ctx.saved_tensors
        given, scale = gradients[0].contiguous(), ctx.scale
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for block in ctx.blocks:
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(given, q, *block.of(k, v), out, lse, 0.0, block.causal),
                attn_mask=block.mask,
                scale=scale,
            )
            for whole, part in zip((dq, *block.of(dk, dv)), parts, strict=True):
                whole.add_(part)
        delta = (given * out).sum(-1, dtype=torch.float32)
        found: list[Tensor] = []
        for weight, key, value in zip(weights, own[::2], own[1::2], strict=True):
            along = (given * value).sum(-1, dtype=torch.float32) - delta
            score = (scale * weight * along).unsqueeze(-1).to(q.dtype)
            dq.addcmul_(score, key)
            found += [score * q, weight.unsqueeze(-1).to(q.dtype) * given]
        return dq, dk, dv, None, None, *found


class _Block(NamedTuple):
    """Rows of the past that the kernel reads in one call."""

    start: int
    stop: int
    causal: bool = False
    mask: Tensor | None = None
    """``[S, stop - start]``, added to the scores."""

    def of(self, *tensors: Tensor) -> list[Tensor]:
        """The block of tensors ``[R, heads, W, dim]``."""
        return [tensor[:, :, self.start : self.stop] for tensor in tensors]


def _blocks(rows: Tensor, width: int, dtype: torch.dtype) -> list[_Block]:
    """What queries at ``rows`` see of ``width`` rows.

    Where these are the last ones: those before them, and a triangle, half of which is computed.
    """
    first = width - len(rows)
    if int(rows[0]) == first:
        triangle = _Block(first, width, causal=True)
        return [_Block(0, first), triangle] if first else [triangle]
    seen = torch.arange(width) <= rows[:, None]
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, float("-inf"))
    return [_Block(0, width, mask=mask)]


class UnrolledKeys:
    """Keys and values of the depths so far, of one text in each of R rows."""

    def __init__(self) -> None:
        self._past: Keys | None = None
        self._own: list[Keys] = []

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
        grouped, num_rows = q.shape[1] // k.shape[1], q.shape[2]
        if grouped > 1:
            k, v = (x.repeat_interleave(grouped, 1) for x in (k, v))
        if self._past is None:
            self._past = k, v
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        self._own.append((k, v))
        own = [(k[:, :, :num_rows], v[:, :, :num_rows]) for k, v in self._own]
        rows = torch.arange(num_rows, device=q.device)
        return attend_unrolled(q, self._past, own, rows, scale or q.shape[-1] ** -0.5)


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
