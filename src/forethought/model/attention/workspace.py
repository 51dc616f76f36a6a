"""Strands: working copies of what some sequences have stored, where drafts grow level by level.

A draft is many small forwards over one past, whose pages are looked up and copied once; then each
level's keys and values are put behind them, and attention reads all of it where it lies. What is to
last is stored in the pages on request; the rest is thrown away with the strands.

Knows nothing about networks and tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forethought.kv.storage import KvStorage
from forethought.kv.table import ReadableTable
from forethought.model.attention.base import ForwardPass, Scoring
from forethought.model.attention.sdpa import softmax_attention
from forethought.model.batch import Batch

FEW = 16
"""Tokens of a sequence that a drafter has to catch up on, up to which that is done on strands."""


def catch_up_start(
    starts: Sequence[int], stops: Sequence[int], first: int = 0
) -> Sequence[int] | None:
    """Where reading on strands begins, if what is missing of some sequences is little.

    Equally many tokens of each are read, some of them again.

    Args:
        starts, stops: what is missing of each.
        first: where reading may begin at the earliest.

    Returns:
        One start per sequence; None: more than ``FEW`` are missing, or there are not so many.
    """
    missing = max(stop - start for start, stop in zip(starts, stops, strict=True))
    if missing > min(FEW, min(stops) - first):
        return None
    return [stop - missing for stop in stops]


class KvWorkspace:
    """The pasts of B sequences, and room behind them.

    Columns are the tokens of all strands, side by side: first the pasts, where a shorter one is
    filled up with what nobody sees, then what is put behind them.

    Args:
        storage: where they lie.
        tables: one per sequence.
        lengths: tokens of each past.
        room: most tokens put behind each.
        windows: how far each layer sees, its own token included; None: all.
        seen_from: the first position that anybody sees.
    """

    def __init__(
        self,
        storage: KvStorage,
        tables: Sequence[ReadableTable],
        lengths: Sequence[int],
        room: int,
        windows: Sequence[int | None] = (None,),
        seen_from: int = 0,
    ) -> None:
        self._storage, self._tables, self._lengths = storage, list(tables), list(lengths)
        self._windows, self._begin, self._dtype = windows, seen_from, storage.dtype
        size, device = storage.page_size, storage.device
        needed = [-(-length // size) for length in lengths]
        self._past = lengths[0] if len(tables) == 1 else max(needed) * size
        self.added = 0
        """Tokens put behind each past."""
        most = -(-(self._past + room) // size)  # the pages behind the pasts are only room
        pages = [
            table.pages[:count] + table.pages[:1] * (most - count)
            for table, count in zip(tables, needed, strict=True)
        ]
        gathered = storage.gather(torch.tensor(pages, device=device).view(-1))
        self._keys, self._values = (
            [layer.view(len(tables), most * size, *layer.shape[1:]) for layer in layers]
            for layers in gathered
        )
        self._ends: Tensor | None = None
        """int64 [B, 1]: lengths of the pasts."""
        self._places: Tensor | None = None
        """int64 [B, columns]: where in its sequence each column stands, if a window matters."""
        self._mask: Tensor | None = None
        """[B, 1, 1, columns], additive: hides what fills a past up; None: nothing does."""
        narrowest = min((window for window in windows if window is not None), default=None)
        bounded = narrowest is not None and max(lengths) + room > narrowest
        filled = any(length != self._past for length in lengths)
        if bounded or filled:
            self._ends = torch.tensor(lengths, device=device)[:, None]
            columns = torch.arange(most * size, device=device)
            if filled:
                hidden = (columns >= self._ends) & (columns < self._past)
                mask = torch.zeros(hidden.shape, dtype=self._dtype, device=device)
                self._mask = mask.masked_fill_(hidden, -torch.inf)[:, None, None]
            if bounded:
                self._places = columns.repeat(len(tables), 1)

    @property
    def rows(self) -> int:
        """B."""
        return len(self._tables)

    def keep(self, rows: int) -> None:
        """Go on with the first sequences alone."""
        if rows == self.rows:
            return
        self._tables, self._lengths = self._tables[:rows], self._lengths[:rows]
        self._keys = [layer[:rows] for layer in self._keys]
        self._values = [layer[:rows] for layer in self._values]
        for name in ("_ends", "_places", "_mask"):
            tensor: Tensor | None = getattr(self, name)
            setattr(self, name, None if tensor is None else tensor[:rows])

    def chain(self, token_ids: Tensor, positions: Tensor) -> WorkspacePass:
        """A pass over the next tokens of each, which follow each other; see :meth:`level`.

        Only the logits behind the last one of each are wanted.
        """
        size = len(token_ids) // self.rows
        last = torch.arange(size - 1, len(token_ids), size, device=token_ids.device)
        depths, seen = range(self.added, self.added + size), None
        if size > 1:
            seen = torch.ones(size, size, dtype=torch.bool, device=token_ids.device)
            seen = seen.tril_().expand(self.rows, -1, -1)
        return self._pass(token_ids, positions, depths, seen, last)

    def level(
        self, token_ids: Tensor, positions: Tensor, depth: int, seen: Tensor | None = None
    ) -> WorkspacePass:
        """A pass over the next tokens of each sequence, equally deep.

        Args:
            token_ids: int64 ``[B * n]``, sequence by sequence.
            positions: int64 ``[B * n]``, for the network.
            depth: of these tokens behind the pasts, from 0: how far apart windows see them.
            seen: bool ``[B, n, m]``, which of the last m tokens so far, these included, each one
                sees; None: all.
        """
        size = len(token_ids) // self.rows
        everything = torch.arange(len(token_ids), device=token_ids.device)
        return self._pass(token_ids, positions, [depth] * size, seen, everything)

    def store(self, counts: Sequence[int]) -> None:
        """Write the first tokens behind each past, so many of each, into the pages of its table."""
        slots: list[int] = []
        for table, length, count in zip(self._tables, self._lengths, counts, strict=True):
            slots += table.slots(length, length + count)
        device, most = self._storage.device, max(counts)
        index, chosen = torch.tensor(slots, device=device), None
        if min(counts) < most:
            places = [row * most + n for row, count in enumerate(counts) for n in range(count)]
            chosen = torch.tensor(places, device=device)
        for layer, pair in enumerate(zip(self._keys, self._values, strict=True)):
            k, v = (x.narrow(1, self._past, most).flatten(0, 1) for x in pair)
            if chosen is not None:
                k, v = k[chosen], v[chosen]
            self._storage.write(layer, index, k, v)

    def put(self, layer: int, begin: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put a level's keys and values ``[B * n, kv_heads, dim]`` behind ``begin`` others.

        Returns:
            Keys and values so far, ``[B, kv_heads, columns, dim]``.
        """
        at, size = self._past + begin, len(k) // self.rows
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
        seen: Tensor | None,
        wanted: Tensor,
    ) -> WorkspacePass:
        begin = self.added
        self.added += len(depths)
        nowhere = token_ids.new_empty(0)  # its tokens have columns, not slots
        batch = Batch(token_ids, positions, nowhere, wanted, ())
        return WorkspacePass(self, batch, begin, self._masks(depths, seen))

    def _masks(self, depths: Sequence[int], seen: Tensor | None) -> list[Tensor | None]:
        """For each layer, additive ``[B, 1, n or 1, columns]``; None: all is seen."""
        stop, size = self._past + self.added, len(depths)
        mask = None if self._mask is None else self._mask[..., self._begin : stop]
        if seen is not None:
            shape = (self.rows, 1, size, stop - self._begin)
            tree = torch.zeros(shape, dtype=self._dtype, device=seen.device)
            tree[..., -seen.shape[2] :].masked_fill_(~seen[:, None], -torch.inf)
            mask = tree if mask is None else tree + mask
        if self._places is None:
            return [mask] * len(self._keys)
        assert self._ends is not None
        positions = self._ends + torch.tensor(depths, device=self._ends.device)
        self._places[:, stop - size : stop] = positions
        distance = positions[:, :, None] - self._places[:, None, self._begin : stop]
        masks: dict[int | None, Tensor | None] = {None: mask}
        for window in {window for window in self._windows if window is not None}:
            far = torch.zeros(distance.shape, dtype=self._dtype, device=distance.device)
            far = far.masked_fill_(distance >= window, -torch.inf)[:, None]
            masks[window] = far if mask is None else far + mask
        return [masks[window] for window in self._windows]


class WorkspacePass(ForwardPass):
    """A pass over tokens behind strands.

    Args:
        strands: where it attends.
        batch: B * n tokens.
        begin: how many of each sequence were put there before.
        masks: for each layer.
    """

    def __init__(
        self, workspace: KvWorkspace, batch: Batch, begin: int, masks: Sequence[Tensor | None]
    ) -> None:
        super().__init__(batch)
        self._workspace, self._begin, self._masks = workspace, begin, masks

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """See ``ForwardPass``."""
        keys, values = self._workspace.put(layer, self._begin, k, v)
        rows, kv_heads, mask = keys.shape[0], keys.shape[1], self._masks[layer]
        tokens, heads, dim = q.shape
        shared, size = heads // kv_heads, tokens // rows
        if size == 1:
            folded = q.reshape(rows, kv_heads, shared, dim)
            out = softmax_attention(folded, keys, values, mask, scoring, batch_invariant=False)
            return out.reshape(rows, heads, -1).contiguous()
        # Heads of one key are queries side by side, each with all of the sequence's tokens.
        folded = q.reshape(rows, size, kv_heads, shared, dim).permute(0, 2, 3, 1, 4)
        folded = folded.reshape(rows, kv_heads, shared * size, dim)
        if mask is not None and mask.shape[2] > 1:
            mask = mask.repeat(1, 1, shared, 1)
        out = softmax_attention(folded, keys, values, mask, scoring, batch_invariant=False)
        out = out.reshape(rows, kv_heads, shared, size, -1).permute(0, 3, 1, 2, 4)
        return out.reshape(tokens, heads, -1).contiguous()
