"""The Triton kernels of ``paged.py``: attention over pages, split over keys, and the merge.

After FlashDecoding (Dao et al., 2023) and FlashAttention-2 (Dao, 2023). ``TRITON_INTERPRET=1`` runs
the kernels in Python on a CPU, which the tests do where triton is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forethought.model.attention.paged_layout import (
    PARTIAL_FIELDS,
    ROW_FIELDS,
    TILE_FIELDS,
    TOKEN_FIELDS,
    WORD_BITS,
    next_power_of_2,
)

if TYPE_CHECKING:
    from forethought.backends.cuda.paged import Operands

MIN_DOT = 16
"""Rows and columns that a matrix product of Triton has at least."""
MAX_QUERIES = 64
"""Queries of a program, tokens times heads; with more, its registers do not hold them."""


class LaunchSettings(NamedTuple):
    """How the kernels run, which changes the time they take and the order of their sums only."""

    warps: int
    """Of a program."""
    stages: int
    """Blocks of keys that a program has in flight."""
    keys: int
    """Of a block, a power of two from ``MIN_DOT`` on."""


def settings_of(call: Operands) -> LaunchSettings:
    """The settings for operands, by shape and dtype: blocks as large as shared memory holds."""
    dim = max(call.q.shape[2], call.values.shape[2])
    is_wide = call.q.dtype.itemsize > 2 or dim > 128
    return LaunchSettings(warps=4, stages=2, keys=32 if is_wide else 64)


@triton.jit(do_not_specialize=["pages_per_row", "window"])
def _attend_tiles(
    q_ptr,
    k_ptr,
    v_ptr,
    rows_ptr,
    tokens_ptr,
    tiles_ptr,
    pages_ptr,
    words_ptr,
    sinks_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    scale,
    softcap,
    window,
    pages_per_row,
    q_token_stride,
    q_head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ROW: tl.constexpr,
    TOKEN: tl.constexpr,
    TILE_RECORD: tl.constexpr,
    BITS: tl.constexpr,
):
    """One tile, some heads of one key head, one split; see ``PagedLayout`` for the records."""
    tile, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    kv_head = part // parts
    row = tl.load(tiles_ptr + tile * TILE_RECORD).to(tl.int32)
    first = tl.load(tiles_ptr + tile * TILE_RECORD + 1).to(tl.int32)
    record = rows_ptr + row * ROW
    start = tl.load(record).to(tl.int32)
    size = tl.load(record + 1).to(tl.int32)
    length = tl.load(record + 2).to(tl.int32)
    seen_from = tl.load(record + 3).to(tl.int32)
    split_size = tl.load(record + 4).to(tl.int32)
    words = tl.load(record + 5)
    if split * split_size >= length:
        return
    prefix = length - size

    # 1. The queries: m is a token of the tile and a head of the group.
    m = tl.arange(0, QUERIES)
    own = first + m // TILE_HEADS
    in_group = (part % parts) * TILE_HEADS + m % TILE_HEADS
    alive = (m < TILE * TILE_HEADS) & (own < size) & (in_group < GROUP)
    token = (start + own).to(tl.int64)
    head = kv_head * GROUP + in_group
    position = tl.load(tokens_ptr + token * TOKEN, mask=alive, other=0).to(tl.int32)
    partial = tl.load(tokens_ptr + token * TOKEN + 1, mask=alive, other=-1)
    kd = tl.arange(0, KEY_BLOCK)
    vd = tl.arange(0, VALUE_BLOCK)
    q = tl.load(
        q_ptr + token[:, None] * q_token_stride + head[:, None] * q_head_stride + kd[None],
        mask=alive[:, None] & (kd < KEY_DIM)[None],
        other=0.0,
    )

    # 2. The stored tokens that any of them attends to, within the split.
    low = tl.maximum(split * split_size, seen_from)
    high = tl.minimum(split * split_size + split_size, length)
    if words < 0:
        high = tl.minimum(high, prefix + tl.minimum(first + TILE, size))
    if HAS_WINDOW:
        # A stored token's index is never below its position, so what lies before is hidden.
        nearest = tl.min(tl.where(alive, position, length), 0)
        chunk = tl.maximum(-window, 1)
        low = tl.maximum(low, tl.where(window > 0, nearest + 1 - window, nearest // chunk * chunk))

    # 3. Softmax over them, block by block.
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, VALUE_BLOCK], tl.float32)
    for begin in range(low // KEYS * KEYS, high, KEYS):
        n = begin + tl.arange(0, KEYS)
        inside = (n >= low) & (n < high)
        page = tl.load(pages_ptr + row * pages_per_row + n // PAGE, mask=inside, other=0)
        entry = (page * PAGE + n % PAGE) * (HEADS // GROUP) + kv_head
        k = tl.load(
            k_ptr + entry[None] * KEY_DIM + kd[:, None],
            mask=inside[None] & (kd < KEY_DIM)[:, None],
            other=0.0,
        )
        score = tl.dot(q, k, input_precision="ieee") * scale
        if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            score = softcap * (1.0 - 2.0 / (tl.exp(score * (2.0 / softcap)) + 1.0))
        own_key = tl.maximum(n - prefix, 0)
        is_own = inside & (n >= prefix)
        mask = n[None] <= (prefix + own)[:, None]
        at = n
        if words >= 0:
            width = (size + BITS - 1) // BITS
            bits = tl.load(
                words_ptr + words + own[:, None] * width + (own_key // BITS)[None],
                mask=alive[:, None] & is_own[None],
                other=0,
            )
            is_ancestor = ((bits >> (own_key % BITS)[None].to(tl.int64)) & 1) != 0
            mask = (n < prefix)[None] | is_ancestor
            if HAS_WINDOW:
                at = tl.load(tokens_ptr + (start + own_key) * TOKEN, mask=is_own, other=0)
                at = tl.where(is_own, at.to(tl.int32), n)
        if HAS_WINDOW:
            slides = position[:, None] - at[None] < window
            mask = mask & tl.where(
                window > 0, slides, position[:, None] // chunk == at[None] // chunk
            )
        score = tl.where(mask & inside[None], score, float("-inf"))
        new = tl.maximum(top, tl.max(score, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp(score - safe[:, None])
        fade = tl.exp(top - safe)
        v = tl.load(
            v_ptr + entry[:, None] * VALUE_DIM + vd[None],
            mask=inside[:, None] & (vd < VALUE_DIM)[None],
            other=0.0,
        )
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        total = total * fade + tl.sum(p, 1)
        top = new

    # 4. The result, or a part of it for the second kernel.
    is_part = alive & (partial >= 0)
    offset = (tl.maximum(partial, 0) * HEADS + head) * SPLITS + split
    lse = tl.where(total > 0.0, top + tl.log(tl.where(total > 0.0, total, 1.0)), float("-inf"))
    tl.store(lse_ptr + offset, lse, mask=is_part)
    mean = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    inner = (vd < VALUE_DIM)[None]
    tl.store(
        partial_ptr + offset[:, None] * VALUE_DIM + vd[None], mean, mask=is_part[:, None] & inner
    )
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=alive, other=0.0).to(tl.float32)
        mean = mean / (1.0 + tl.exp(sink - lse))[:, None]
    tl.store(
        out_ptr + (token * HEADS + head)[:, None] * VALUE_DIM + vd[None],
        mean.to(out_ptr.dtype.element_ty),
        mask=(alive & (partial < 0))[:, None] & inner,
    )


@triton.jit
def _merge_splits(
    partials_ptr,
    partial_ptr,
    lse_ptr,
    sinks_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """The parts of one token and head, weighted by their sums of exponentials."""
    number, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(partials_ptr + number * PARTIAL)
    count = tl.load(partials_ptr + number * PARTIAL + 1)
    if count == 0:
        return
    split, vd = tl.arange(0, SPLITS), tl.arange(0, VALUE_BLOCK)
    offset = (number.to(tl.int64) * HEADS + head) * SPLITS + split
    lse = tl.load(lse_ptr + offset, mask=split < count, other=float("-inf"))
    top = tl.max(lse, 0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        top = tl.maximum(top, sink)
    weight = tl.exp(lse - top)
    total = tl.sum(weight, 0)
    if HAS_SINKS:
        total += tl.exp(sink - top)
    inner = vd < VALUE_DIM
    part = tl.load(
        partial_ptr + offset[:, None] * VALUE_DIM + vd[None],
        mask=(split < count)[:, None] & inner[None],
        other=0.0,
    )
    mean = tl.sum(part * weight[:, None], 0) / total
    tl.store(
        out_ptr + (token * HEADS + head) * VALUE_DIM + vd,
        mean.to(out_ptr.dtype.element_ty),
        mask=inner,
    )


def launch(call: Operands, settings: LaunchSettings | None = None) -> Tensor:
    """Launch the kernels: one, and the second where a row is split.

    Args:
        call: see ``paged.Operands``.
        settings: None: those of ``settings_of``.
    """
    settings = settings or settings_of(call)
    q, values, sinks = call.q, call.values, call.sinks
    *first, partials = call.layout
    _, _, tiles, pages, _ = first
    *_, num_splits, window = call.sizes
    (num_tokens, heads, _), value_dim = q.shape, values.shape[2]
    splits = next_power_of_2(num_splits)
    out = q.new_empty(num_tokens, heads, value_dim)
    parts = q.new_empty(len(partials), heads, splits, value_dim, dtype=torch.float32)
    lse = q.new_empty(len(partials), heads, splits, dtype=torch.float32)
    shared: dict[str, Any] = {
        "HEADS": heads,
        "VALUE_DIM": value_dim,
        "VALUE_BLOCK": max(MIN_DOT, next_power_of_2(value_dim)),
        "SPLITS": splits,
        "HAS_SINKS": sinks is not None,
        "num_warps": settings.warps,
    }
    if sinks is None:
        sinks = lse  # any pointer: it is not read
    results = (out, parts, lse)
    strides = (pages.shape[1], q.stride(0), q.stride(1))
    constants, programs_per_tile = _tile_constants(call)
    _attend_tiles[(len(tiles), programs_per_tile, num_splits)](
        *(q, call.keys, values, *first, sinks, *results, *call.scores, window, *strides),
        **constants,
        **shared,
        KEYS=settings.keys,
        num_stages=settings.stages,
    )
    if len(partials):
        _merge_splits[(len(partials), heads)](
            *(partials, parts, lse, sinks, out), PARTIAL=PARTIAL_FIELDS, **shared
        )
    return out


def _tile_constants(call: Operands) -> tuple[dict[str, Any], int]:
    """Constants that ``_attend_tiles`` is compiled for, and its programs per tile and split.

    A program has a tile's tokens times some query heads of one key head, at most ``MAX_QUERIES``.
    """
    page_size, tile_tokens, _, window = call.sizes
    (_, heads, key_dim), kv_heads = call.q.shape, call.values.shape[1]
    group = heads // kv_heads
    tile_heads = min(next_power_of_2(group), max(1, MAX_QUERIES // tile_tokens))
    constants = {
        "GROUP": group,
        "KEY_DIM": key_dim,
        "PAGE": page_size,
        "TILE": tile_tokens,
        "TILE_HEADS": tile_heads,
        "KEY_BLOCK": max(MIN_DOT, next_power_of_2(key_dim)),
        "QUERIES": max(MIN_DOT, tile_tokens * tile_heads),
        "HAS_WINDOW": window != 0,
        "HAS_SOFTCAP": call.scores[1] > 0,
        "ROW": ROW_FIELDS,
        "TOKEN": TOKEN_FIELDS,
        "TILE_RECORD": TILE_FIELDS,
        "BITS": WORD_BITS,
    }
    return constants, kv_heads * -(-group // tile_heads)
