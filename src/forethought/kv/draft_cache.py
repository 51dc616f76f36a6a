"""What drafters keep of the target's tokens: KV of a draft model, hidden states of the target.

A ``DraftKvCache`` is a second storage addressed by the target's page tables: a token's entry is at
the token's slot, so forks, prefix hits, rewinds and preemptions apply to it, too. It may be behind
the target: a flag per slot says whether its entry is that of the token stored there now. Before the
target computes a slot again, ``invalidate`` clears the flag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from forethought.kv.storage import KvStorage, LayerShape
from forethought.kv.table import PageCopy, ReadableTable, SlotMove


class DraftKvCache:
    """A storage over the pages of a target, with a flag per slot.

    Args:
        storage: with the target's number of pages and page size.
    """

    def __init__(self, storage: KvStorage) -> None:
        self.storage = storage
        self.resize(storage.num_pages)

    def resize(self, num_pages: int) -> None:
        """Set the target's number of pages. Everything stored is lost."""
        if num_pages != self.storage.num_pages:
            self.storage.resize(num_pages)
        self._ready = np.zeros((num_pages, self.storage.page_size), dtype=bool)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy whole pages, as the target does."""
        if copies:
            self.storage.copy_pages(copies)
            src, dst = [copy.src for copy in copies], [copy.dst for copy in copies]
            self._ready[dst] = self._ready[src]

    def move_slots(self, moves: Sequence[SlotMove]) -> None:
        """Copy single tokens, as the target does with the accepted path of a draft tree."""
        if moves:
            self.storage.move_slots(moves)
            flat = self._ready.reshape(-1)
            src, dst = [move.src for move in moves], [move.dst for move in moves]
            flat[dst] = flat[src]

    def invalidate(self, table: ReadableTable, start: int, stop: int) -> None:
        """The target is about to write other tokens at positions ``[start, stop)``."""
        self._set(table, start, stop, False)

    def mark(self, table: ReadableTable, start: int, stop: int) -> None:
        """The entries of positions ``[start, stop)`` have been computed."""
        self._set(table, start, stop, True)

    def ready_length(self, table: ReadableTable, length: int) -> int:
        """Number of leading positions, up to ``length``, whose entries are all there."""
        size = self.storage.page_size
        pages = table.pages[: -(-length // size)]
        ready = self._ready[pages].reshape(-1)[:length]
        first_gap = int(ready.argmin()) if ready.size else 0
        return first_gap if ready.size and not ready[first_gap] else length

    def _set(self, table: ReadableTable, start: int, stop: int, value: bool) -> None:
        if start < stop:
            self._ready.reshape(-1)[table.slots(start, stop)] = value


class HiddenStateCache(DraftKvCache):
    """The target's hidden states of every stored token, those of some layers concatenated.

    Args:
        layer_ids: the layers captured, in the order of concatenation; see ``model.causal_lm``.
        hidden_size: of the target.
        like: the target's storage: its pages, dtype and device.
    """

    def __init__(self, layer_ids: Sequence[int], hidden_size: int, like: KvStorage) -> None:
        self.layer_ids, self.width = tuple(layer_ids), hidden_size * len(layer_ids)
        shape = LayerShape(kv_heads=1, key_dim=self.width, value_dim=0)
        super().__init__(
            KvStorage([shape], like.num_pages, like.page_size, like.dtype, like.device)
        )

    def write(self, slots: Tensor, states: Mapping[int, Tensor]) -> None:
        """Store the states of the tokens at ``slots`` int64 [T]: by layer index, [T, hidden]."""
        wide = torch.cat([states[layer_id] for layer_id in self.layer_ids], dim=-1)
        self.storage.keys[0].index_copy_(0, slots, wide.unsqueeze(1))
        self._ready.reshape(-1)[slots.cpu().numpy()] = True

    def read(self, table: ReadableTable, start: int, stop: int) -> Tensor:
        """The states of positions ``[start, stop)``: [stop - start, width] in the model's dtype."""
        first = table.first_slot()
        stored = self.storage.keys[0]
        if first is not None:
            return stored[first + start : first + stop, 0]
        slots = torch.tensor(table.slots(start, stop), device=stored.device)
        return stored[slots, 0]
