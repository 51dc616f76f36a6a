"""Attention over pages in place: chains and trees of any size, read where they lie.

Nothing is gathered and no mask is written: the page table, ancestors and positions of a batch are a
few integers (``backends.cuda.paged_layout``) that all layers share. One operation,
``forethought::paged_attention``, computes it: on CUDA by the Triton kernels of ``paged_triton.py``,
two launches at most; on a CPU row by row in plain torch, for tests. Compilers see one operation.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from forethought.kv.storage import KvStorage
from forethought.model.attention.base import AttentionBackend, Capability, Scoring
from forethought.model.attention.paged_layout import CHAIN, WORD_BITS, PagedLayout, words_per_node
from forethought.model.attention.window import is_seen
from forethought.model.batch import Batch


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """How the layers of one window attend.

    Attributes:
        layout: of the batch.
        window: see ``model.attention.window``.
        page_size: tokens of a page.
    """

    layout: PagedLayout
    window: int | None
    page_size: int


class PagedAttention(AttentionBackend):
    """Attention over pages in place; Triton kernels on CUDA."""

    name = "triton"
    capabilities = frozenset(Capability)

    @override
    def plan(self, batch: Batch, storage: KvStorage, window: int | None) -> PagedPlan:
        layout = batch.layout
        if layout is None:
            layout = PagedLayout.of(batch.spans, storage.device)
        return PagedPlan(layout, window, storage.page_size)

    @override
    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, plan: PagedPlan, scoring: Scoring
    ) -> Tensor:
        layout = plan.layout
        result: Tensor = paged_attention(
            q if q.stride(-1) == 1 else q.contiguous(),
            keys,
            values,
            [layout.rows, layout.tokens, layout.tiles, layout.pages, layout.words, layout.partials],
            scoring.sinks,
            [plan.page_size, layout.tile_tokens, layout.num_splits, plan.window or 0],
            [scoring.scale, scoring.softcap or 0.0],
        )
        return result


class Operands(NamedTuple):
    """The arguments of ``forethought::paged_attention``, in the order of its schema."""

    q: Tensor
    """``[T, heads, key_dim]`` of T new tokens, the last dimension contiguous."""
    keys: Tensor
    """``[slots, kv_heads, key_dim]``, contiguous."""
    values: Tensor
    """``[slots, kv_heads, value_dim]``, contiguous."""
    layout: list[Tensor]
    """The tensors of ``PagedLayout``, in order."""
    sinks: Tensor | None
    """``[heads]``."""
    sizes: list[int]
    """Tokens of a page and of a tile, splits, the window or 0."""
    scores: list[float]
    """The scale, and the softcap or 0."""


def _attend_on_cuda(*operands: Any) -> Tensor:
    from forethought.backends.cuda.paged_triton import launch

    call = Operands(*operands)
    with torch.cuda.device_of(call.q):  # Triton launches on the current device
        return launch(call)


def _attend_on_cpu(*operands: Any) -> Tensor:
    if os.environ.get("TRITON_INTERPRET") == "1":
        from forethought.backends.cuda.paged_triton import launch

        return launch(Operands(*operands))
    return attend_rows(Operands(*operands))


def attend_rows(call: Operands) -> Tensor:
    """The operation in plain torch, one row after the other, in float32."""
    q, keys, values, layout, sinks, sizes, scores = call
    rows, tokens, _, pages, words, _ = layout
    page_size, _, _, window = sizes
    scale, softcap = scores
    out = q.new_empty(*q.shape[:2], values.shape[2])
    group = q.shape[1] // keys.shape[1]
    for number, (start, size, length, seen_from, _, at) in enumerate(rows.tolist()):
        if not length:  # no row: padding
            continue
        n, prefix = torch.arange(length), length - size
        slots = pages[number, n // page_size] * page_size + n % page_size
        new, positions = slice(start, start + size), tokens[start : start + size, 0]
        mask = n <= positions[:, None]
        if at != CHAIN:
            own_keys, width = torch.arange(size), words_per_node(size)
            bits = words[at : at + size * width].view(size, width)[:, own_keys // WORD_BITS]
            mask = torch.cat([mask[:, :prefix], (bits >> own_keys % WORD_BITS) % 2 != 0], 1)
        stored_at = torch.cat([n[:prefix], positions])
        mask = mask & (n >= seen_from)
        if window:
            mask = mask & is_seen(positions[:, None], stored_at, window)
        k, v = (x[slots].float().repeat_interleave(group, 1) for x in (keys, values))
        score = torch.einsum("qhd,khd->hqk", q[new].float(), k) * scale
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        score = score.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            column = sinks.float()[:, None, None].expand(-1, size, 1)
            score = torch.cat([score, column], -1)
        weights = score.softmax(-1)[..., :length]
        out[new] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out


def _shape_of_result(*operands: Any) -> Tensor:
    """The result's shape and dtype alone, for compilers and for counting launches."""
    call = Operands(*operands)
    return call.q.new_empty(*call.q.shape[:2], call.values.shape[2])


_LIBRARY = torch.library.Library("forethought", "FRAGMENT")
_LIBRARY.define(
    "paged_attention(Tensor q, Tensor keys, Tensor values, Tensor[] layout, Tensor? sinks, "
    "int[] sizes, float[] scores) -> Tensor"
)
_LIBRARY.impl("paged_attention", _attend_on_cuda, "CUDA")
_LIBRARY.impl("paged_attention", _attend_on_cpu, "CPU")
torch.library.register_fake("forethought::paged_attention", _shape_of_result, lib=_LIBRARY)

paged_attention = torch.ops.forethought.paged_attention.default
"""Attention of T new tokens over pages, of ``Operands``.

Returns:
    ``[T, heads, value_dim]`` in the dtype of ``q``, contiguous.
"""
