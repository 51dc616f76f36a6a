"""A contiguous KV workspace in which the drafts of some sequences grow level by level.

A draft is many small forwards over one prefix. The prefix's pages are gathered once; the keys and
values of each level are then written after them, and attention reads all of it without a copy::

    columns   [ prefix ............ | padding | level 0 | level 1 | ... ]   one row per sequence

Entries that are to be kept are stored in the pages on request; the rest is dropped with the
workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from forethought.kv.staging import upload
from forethought.kv.storage import KvStorage, addresses_of
from forethought.kv.table import ReadableTable
from forethought.model.attention.base import ForwardPass, KvLayout, KvRow, Scoring
from forethought.model.attention.sdpa import softmax_attention
from forethought.model.attention.window import is_seen, most_seen
from forethought.model.batch import Batch

MAX_CATCH_UP = 16
"""Tokens that a drafter is behind the target, up to which it catches up in a workspace."""


def catch_up_start(
    starts: Sequence[int], stops: Sequence[int], first: int = 0
) -> Sequence[int] | None:
    """Where to start so that all sequences catch up from ``starts`` to ``stops`` by the same number
    of tokens in a workspace, not before ``first``; some tokens may be computed again.

    None: more than ``MAX_CATCH_UP`` are missing, or one is too short.
    """
    missing = max(stop - start for start, stop in zip(starts, stops, strict=True))
    if missing > min(MAX_CATCH_UP, min(stops) - first):
        return None
    return [stop - missing for stop in stops]


class KvWorkspace:
    """Keys and values of the prefixes of B sequences, with capacity for draft tokens after them.

    Args:
        storage: of the prefixes.
        tables: one per sequence.
        lengths: tokens of each prefix. Shorter ones are padded; the padding is masked.
        capacity: maximum number of tokens added to each sequence.
        windows: each layer's sliding window, the token itself included; None: all is attended to.
        seen_from: the first position that is attended to.

    Attributes:
        is_stored: whether what ``store`` would write is in the pages.
    """

    is_stored = False

    def __init__(
        self,
        storage: KvStorage,
        tables: Sequence[ReadableTable],
        lengths: Sequence[int],
        capacity: int,
        windows: Sequence[int | None] = (None,),
        seen_from: int = 0,
    ) -> None:
        self._storage, self._tables, self._lengths = storage, list(tables), list(lengths)
        self._windows, self._begin, self._dtype = windows, seen_from, storage.dtype
        size, device = storage.page_size, storage.device
        needed = [-(-length // size) for length in lengths]
        self._prefix = lengths[0] if len(tables) == 1 else max(needed) * size
        self.added = 0
        """Number of tokens added to each sequence."""
        self._depths: list[int] = []
        """Of each added token, after the prefix."""
        num_pages = -(-(self._prefix + capacity) // size)
        pages = [  # any page does as padding and as space after the prefixes
            table.pages[:count] + table.pages[:1] * (num_pages - count)
            for table, count in zip(tables, needed, strict=True)
        ]
        gathered = storage.gather(upload(pages, device).view(-1))
        self._keys, self._values = (
            [layer.view(len(tables), num_pages * size, *layer.shape[1:]) for layer in layers]
            for layers in gathered
        )
        self._ends: Tensor | None = None
        """int64 [B, 1]: lengths of the prefixes."""
        self._positions: Tensor | None = None
        """int64 [B, columns]: position of each column in its sequence; None: no window matters."""
        self._mask: Tensor | None = None
        """[B, 1, 1, columns], additive, from column ``seen_from`` on: masks the padding; None:
        there is none. As wide as the pages, so that its rows begin where CUDA kernels can read."""
        narrowest = min((most_seen(w) for w in windows if w is not None), default=None)
        bounded = narrowest is not None and max(lengths) + capacity > narrowest
        padded = any(length != self._prefix for length in lengths)
        if bounded or padded:
            self._ends = upload(lengths, device)[:, None]
            width = num_pages * size
            if padded:
                columns = torch.arange(seen_from, seen_from + width, device=device)
                hidden = (columns >= self._ends) & (columns < self._prefix)
                mask = torch.zeros(hidden.shape, dtype=self._dtype, device=device)
                self._mask = mask.masked_fill_(hidden, -torch.inf)[:, None, None]
            if bounded:
                self._positions = torch.arange(width, device=device).repeat(len(tables), 1)

    @property
    def rows(self) -> int:
        """Number of sequences B."""
        return len(self._tables)

    def keep(self, rows: int) -> None:
        """Continue with the first ``rows`` sequences only."""
        if rows == self.rows:
            return
        self._tables, self._lengths = self._tables[:rows], self._lengths[:rows]
        self._keys = [layer[:rows] for layer in self._keys]
        self._values = [layer[:rows] for layer in self._values]
        for name in ("_ends", "_positions", "_mask"):
            tensor: Tensor | None = getattr(self, name)
            setattr(self, name, None if tensor is None else tensor[:rows])

    def chain(self, token_ids: Tensor, positions: Tensor) -> WorkspacePass:
        """A forward pass over the next tokens of each sequence, a chain; see :meth:`level`. Only
        the logits of the last token of each sequence are computed.
        """
        size = len(token_ids) // self.rows
        last = torch.arange(size - 1, len(token_ids), size, device=token_ids.device)
        depths, visible = range(self.added, self.added + size), None
        if size > 1:
            visible = torch.ones(size, size, dtype=torch.bool, device=token_ids.device)
            visible = visible.tril_().expand(self.rows, -1, -1)
        return self._pass(token_ids, positions, depths, visible, last)

    def level(
        self, token_ids: Tensor, positions: Tensor, depth: int, visible: Tensor | None = None
    ) -> WorkspacePass:
        """A forward pass over the n next tokens of each sequence, all of one depth of its tree.

        Args:
            token_ids: int64 ``[B * n]``, sequence by sequence.
            positions: int64 ``[B * n]``, for the network.
            depth: of these tokens after the prefix, from 0; sliding windows count it.
            visible: bool ``[B, n, m]``, which of the last m added tokens, these included, each one
                attends to; None: all.
        """
        size = len(token_ids) // self.rows
        every_token = torch.arange(len(token_ids), device=token_ids.device)
        return self._pass(token_ids, positions, [depth] * size, visible, every_token)

    def store(self, counts: Sequence[int]) -> None:
        """Write the first ``counts`` added tokens of each sequence into the pages of its table."""
        slots: list[int] = []
        for table, length, count in zip(self._tables, self._lengths, counts, strict=True):
            slots += table.slots(length, length + count)
        device, longest = self._storage.device, max(counts)
        index, chosen = upload(slots, device), None
        if min(counts) < longest:
            indices = [row * longest + n for row, count in enumerate(counts) for n in range(count)]
            chosen = upload(indices, device)
        for layer, pair in enumerate(zip(self._keys, self._values, strict=True)):
            k, v = (x.narrow(1, self._prefix, longest).flatten(0, 1) for x in pair)
            if chosen is not None:
                k, v = k[chosen], v[chosen]
            self._storage.write(layer, index, k, v)

    def put(self, layer: int, begin: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write a level's keys and values ``[B * n, kv_heads, dim]`` after ``begin`` added tokens;
        returns all keys and values up to there, ``[B, kv_heads, columns, dim]``.
        """
        at, size = self._prefix + begin, len(k) // self.rows
        keys, values = self._keys[layer], self._values[layer]
        keys.narrow(1, at, size).copy_(k.view(self.rows, size, *k.shape[1:]))
        values.narrow(1, at, size).copy_(v.view(self.rows, size, *v.shape[1:]))
        count = at + size - self._begin
        return (
            keys.narrow(1, self._begin, count).transpose(1, 2),
            values.narrow(1, self._begin, count).transpose(1, 2),
        )

    def _pass(
        self,
        token_ids: Tensor,
        positions: Tensor,
        depths: Sequence[int],
        visible: Tensor | None,
        logit_index: Tensor,
    ) -> WorkspacePass:
        begin = self.added
        self.added += len(depths)
        self._depths += depths
        no_slots = token_ids.new_empty(0)  # its tokens have columns
        batch = Batch(token_ids, positions, no_slots, logit_index, ())
        return WorkspacePass(self, batch, begin, depths, visible)

    def layout(self, size: int, visible: Tensor | None) -> KvLayout:
        """Where keys and values are, for a pass over the ``size`` tokens that were added last;
        ``visible`` is as of :meth:`level`.
        """
        added, columns = self.added, self._keys[0].shape[1]
        firsts = np.arange(self.rows)[:, None] * columns
        slots = firsts + np.arange(self._prefix, self._prefix + added)
        positions = np.array(self._lengths)[:, None] + np.array(self._depths)
        rows = [
            KvRow(
                start=row * size,
                num_tokens=size,
                prefix=length,
                first_slot=row * columns,
                pages=None,
                recent=range(row * added, (row + 1) * added),
                visible=self._visible(row, size, visible),
                seen_from=self._begin,
            )
            for row, length in enumerate(self._lengths)
        ]
        return KvLayout(
            addresses=addresses_of(self._keys, self._values),
            dtype=self._dtype,
            slots=torch.from_numpy(slots[:, added - size :].flatten()),  # a copy: no strides
            recent_slots=torch.from_numpy(slots.reshape(-1)),
            recent_positions=torch.from_numpy(positions.reshape(-1)),
            page_size=columns,
            rows=rows,
        )

    def _visible(self, row: int, size: int, visible: Tensor | None) -> Tensor | None:
        """The new tokens that each new token attends to, bool ``[size, added]``; None: a chain."""
        if visible is None and size == 1:
            return None
        of_added = torch.ones(size, self.added, dtype=torch.bool)
        if visible is not None:
            of_added[:, -visible.shape[2] :] = visible[row]
        return of_added

    def masks(self, depths: Sequence[int], visible: Tensor | None) -> list[Tensor | None]:
        """Of a pass over the tokens that were added last, for each layer: additive
        ``[B, 1, n or 1, columns]``, or None.
        """
        stop, size = self._prefix + self.added, len(depths)
        mask = None if self._mask is None else self._mask[..., : stop - self._begin]
        if visible is not None:
            shape = (self.rows, 1, size, stop - self._begin)
            tree = torch.zeros(shape, dtype=self._dtype, device=visible.device)
            tree[..., -visible.shape[2] :].masked_fill_(~visible[:, None], -torch.inf)
            mask = tree if mask is None else tree + mask
        if self._positions is None:
            return [mask] * len(self._keys)
        assert self._ends is not None
        positions = self._ends + upload(depths, self._ends.device)
        self._positions[:, stop - size : stop] = positions
        earlier = self._positions[:, None, self._begin : stop]
        masks: dict[int | None, Tensor | None] = {None: mask}
        for window in {window for window in self._windows if window is not None}:
            seen = is_seen(positions[:, :, None], earlier, window)
            far = torch.zeros(seen.shape, dtype=self._dtype, device=seen.device)
            far = far.masked_fill_(~seen, -torch.inf)[:, None]
            masks[window] = far if mask is None else far + mask
        return [masks[window] for window in self._windows]


class WorkspacePass(ForwardPass):
    """A forward pass over the n tokens of each sequence, of some depths, that were added to a
    workspace last, after ``begin`` others. ``visible`` is as of :meth:`KvWorkspace.level`.
    """

    def __init__(
        self,
        workspace: KvWorkspace,
        batch: Batch,
        begin: int,
        depths: Sequence[int],
        visible: Tensor | None,
    ) -> None:
        super().__init__(batch)
        self._workspace, self._begin, self._depths, self._visible = (
            workspace,
            begin,
            depths,
            visible,
        )

    @cached_property
    def _masks(self) -> list[Tensor | None]:
        return self._workspace.masks(self._depths, self._visible)

    @override
    def layout(self) -> KvLayout:
        return self._workspace.layout(len(self._depths), self._visible)

    @override
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        keys, values = self._workspace.put(layer, self._begin, k, v)
        rows, kv_heads, mask = keys.shape[0], keys.shape[1], self._masks[layer]
        tokens, heads, dim = q.shape
        shared, size = heads // kv_heads, tokens // rows
        if size == 1:
            folded = q.reshape(rows, kv_heads, shared, dim)
            out = softmax_attention(folded, keys, values, mask, scoring, batch_invariant=False)
            return out.reshape(rows, heads, -1).contiguous()
        # The heads of one key, each with all new tokens of the sequence, become queries.
        folded = q.reshape(rows, size, kv_heads, shared, dim).permute(0, 2, 3, 1, 4)
        folded = folded.reshape(rows, kv_heads, shared * size, dim)
        if mask is not None and mask.shape[2] > 1:
            mask = mask.repeat(1, 1, shared, 1)
        out = softmax_attention(folded, keys, values, mask, scoring, batch_invariant=False)
        out = out.reshape(rows, kv_heads, shared, size, -1).permute(0, 3, 1, 2, 4)
        return out.reshape(tokens, heads, -1).contiguous()
