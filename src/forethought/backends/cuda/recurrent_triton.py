"""The Triton kernels of recurrent layers: a causal convolution, and a linear recurrence.

Both compute the tokens of the rows of a batch in order. A token continues from the one before it,
or from a stored state, which may be one that an earlier token of the row has stored: chains,
prompts and draft trees are one kernel. Addresses of states are in a table int64 ``[T, 3]``,
``TokenState`` of structures.h: of the float32 state before the token on the device (0: zeros), of
that after it (0: not stored), and whether the token continues from the one before it.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from forethought.model.attention.paged_layout import next_power_of_2

CHANNELS_AT_ONCE = 256
STATE_FLOATS = 4096
"""Floats of a state that a program keeps in registers."""


class TableTensors(NamedTuple):
    """A ``TokenTable`` on the device."""

    fields: Tensor
    """int64 ``[T, 3]``: the table described above."""
    row_starts: Tensor
    """int32 ``[R + 1]``: the packed index at which each row begins, and T."""


@triton.jit
def _convolution(
    x_ptr,
    taps_ptr,
    bias_ptr,
    y_ptr,
    states_ptr,
    rows_ptr,
    offset,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some channels of a row."""
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < CHANNELS
    bias = tl.load(bias_ptr + n, mask=inside, other=0.0)
    begin, end = tl.load(rows_ptr + row), tl.load(rows_ptr + row + 1)
    first, before = begin, tl.load(states_ptr + begin * 3)  # of the run of the token
    for t in range(begin, end):
        after, follows = tl.load(states_ptr + t * 3 + 1), tl.load(states_ptr + t * 3 + 2)
        first = tl.where(follows != 0, first, t)
        before = tl.where(follows != 0, before, tl.load(states_ptr + t * 3))
        stored_ptr = before.to(tl.pointer_type(tl.float32)) + offset
        after_ptr = after.to(tl.pointer_type(tl.float32)) + offset
        y = bias
        for j in tl.static_range(KERNEL):
            at = t - (KERNEL - 1) + j  # before the run: stored
            is_stored = (at < first) & (before != 0)
            x = tl.load(x_ptr + at * CHANNELS + n, mask=inside & (at >= first), other=0.0)
            stored_at = (KERNEL + at - first) * CHANNELS + n
            x += tl.load(stored_ptr + stored_at, mask=inside & is_stored, other=0.0)
            y += x * tl.load(taps_ptr + j * CHANNELS + n, mask=inside, other=0.0)
            tl.store(after_ptr + j * CHANNELS + n, x, mask=inside & (after != 0))
        tl.store(y_ptr + t * CHANNELS + n, y / (1.0 + tl.exp(-y)), mask=inside)
        tl.debug_barrier()  # the next token may read what this one has stored


def convolution(x: Tensor, taps: Tensor, bias: Tensor, table: TableTensors, offset: int) -> Tensor:
    """SiLU of the causal convolutions of channels.

    Args:
        x: float32 ``[T, channels]``.
        taps: ``[kernel, channels]``.
        bias: ``[channels]``.
        table: of the batch.
        offset: of the last inputs ``[kernel, channels]`` in a state.

    Returns:
        float32 ``[T, channels]``.
    """
    x = x.contiguous()
    kernel, channels = taps.shape
    grid = (len(table.row_starts) - 1, triton.cdiv(channels, CHANNELS_AT_ONCE))
    y = x.new_empty(x.shape)
    _convolution[grid](x, taps, bias, y, *table, offset, channels, kernel, CHANNELS_AT_ONCE)
    return y


@triton.jit
def _recurrence(
    q_ptr,
    k_ptr,
    v_ptr,
    decays_ptr,
    betas_ptr,
    y_ptr,
    states_ptr,
    rows_ptr,
    offset,
    key_stride,
    value_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    STEPS: tl.constexpr,
    CORRECTS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """Some values of a head of a row."""
    row, head = tl.program_id(0), tl.program_id(1)
    group = head // (HEADS // GROUPS)
    n = tl.arange(0, KEY_BLOCK)
    m = tl.program_id(2) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    has_key, has_value = n < KEYS, m < VALUES
    inside = has_key[:, None] & has_value[None, :]
    at = offset + head * KEYS * VALUES + n[:, None] * key_stride + m[None, :] * value_stride
    state = tl.zeros((KEY_BLOCK, VALUE_BLOCK), tl.float32)
    for t in range(tl.load(rows_ptr + row), tl.load(rows_ptr + row + 1)):
        before, after = tl.load(states_ptr + t * 3), tl.load(states_ptr + t * 3 + 1)
        follows = tl.load(states_ptr + t * 3 + 2)
        is_read = inside & (follows == 0) & (before != 0)
        stored_ptr = before.to(tl.pointer_type(tl.float32)) + at
        state = tl.where(follows != 0, state, tl.load(stored_ptr, mask=is_read, other=0.0))
        q = tl.load(q_ptr + (t * GROUPS + group) * KEYS + n, mask=has_key, other=0.0)
        k = tl.load(k_ptr + (t * GROUPS + group) * KEYS + n, mask=has_key, other=0.0)
        v = tl.load(v_ptr + (t * HEADS + head) * VALUES + m, mask=has_value, other=0.0)
        if STEPS == 1:
            state *= tl.load(decays_ptr + t * HEADS + head)
        else:
            decays_at = (t * HEADS + head) * KEYS + n
            state *= tl.load(decays_ptr + decays_at, mask=has_key, other=0.0)[:, None]
        if CORRECTS:
            beta = tl.load(betas_ptr + t * HEADS + head)
            v = (v - tl.sum(k[:, None] * state, 0)) * beta
        state += k[:, None] * v[None, :]
        y = tl.sum(q[:, None] * state, 0)
        tl.store(y_ptr + (t * HEADS + head) * VALUES + m, y, mask=has_value)
        after_ptr = after.to(tl.pointer_type(tl.float32)) + at
        tl.store(after_ptr, state, mask=inside & (after != 0))
        tl.debug_barrier()


class RecurrenceTerms(NamedTuple):
    """Of H heads with states S, whose G groups have keys and queries in common:
    S = decay S + k u^T, y = q S.
    """

    q: Tensor
    """float32 [T, G, keys]."""
    k: Tensor
    """float32 [T, G, keys]."""
    v: Tensor
    """float32 [T, H, values]."""
    decays: Tensor
    """float32 [T, H, 1], or one for each key."""
    betas: Tensor | None
    """float32 [T, H]: of the delta rule, u = beta (v - decay k S); None: u = v."""


def recurrence(
    terms: RecurrenceTerms, table: TableTensors, offset: int, strides: tuple[int, int]
) -> Tensor:
    """The outputs float32 ``[T, H, values]``.

    Args:
        terms: of the tokens.
        table: of the batch.
        offset: of the heads in a state, one after the other.
        strides: of keys and values in a head's state.
    """
    q, k, v, decays = (x.contiguous() for x in terms[:4])
    (_, heads, values), (_, groups, keys) = v.shape, k.shape
    key_block = next_power_of_2(keys)
    value_block = min(next_power_of_2(values), max(1, STATE_FLOATS // key_block))
    betas = decays if terms.betas is None else terms.betas.contiguous()
    y = v.new_empty(v.shape)
    _recurrence[len(table.row_starts) - 1, heads, triton.cdiv(values, value_block)](
        *(q, k, v, decays, betas, y, *table, offset, *strides),
        *(heads, groups, keys, values, decays.shape[2]),
        *(terms.betas is not None, key_block, value_block),
    )
    return y
