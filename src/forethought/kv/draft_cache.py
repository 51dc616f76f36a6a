"""A second storage over the same pages: keys and values of a draft model, states of a head.

The target's page tables say where a token lies; a companion keeps something else of that token at
the same slot. It may lag: which slots it has filled *for the tokens that lie there now* is all that
this file knows. Whoever computes the target's slot anew calls ``invalidate`` first, so a companion
never mistakes an old token's entry for a new one's, whatever forks, prefix hits, rewinds and
preemptions have done to the tables in between.

[features] The target's hidden states of every stored token, for heads that draft from them.

They lie at the slots of the target's pages, so that forks, prefix hits and rewinds serve them too.
Knows nothing about what heads make of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from forethought.kv.storage import KvStorage, LayerShape
from forethought.kv.table import PageCopy, ReadableTable, SlotMove


class DraftKvCache:
    """Follows the pages of a target.

    Args:
        storage: of as many pages, of the same size, as the target's.
    """

    def __init__(self, storage: KvStorage) -> None:
        self.storage = storage
        self.resize(storage.num_pages)

    def resize(self, num_pages: int) -> None:
        """Follow a target with so many pages. What was stored is lost: only before anything is."""
        if num_pages != self.storage.num_pages:
            self.storage.resize(num_pages)
        self._ready = np.zeros((num_pages, self.storage.page_size), dtype=bool)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """The target copies whole pages."""
        if copies:
            self.storage.copy_pages(copies)
            src, dst = [copy.src for copy in copies], [copy.dst for copy in copies]
            self._ready[dst] = self._ready[src]

    def move_slots(self, moves: Sequence[SlotMove]) -> None:
        """The target moves single tokens: an accepted path of a tree takes its place."""
        if moves:
            self.storage.move_slots(moves)
            flat = self._ready.reshape(-1)
            src, dst = [move.src for move in moves], [move.dst for move in moves]
            flat[dst] = flat[src]

    def invalidate(self, table: ReadableTable, start: int, stop: int) -> None:
        """The target is about to write other tokens at positions ``start`` to ``stop``."""
        self._set(table, start, stop, False)

    def mark(self, table: ReadableTable, start: int, stop: int) -> None:
        """The entries of positions ``start`` to ``stop`` have been computed."""
        self._set(table, start, stop, True)

    def ready_length(self, table: ReadableTable, length: int) -> int:
        """How many of the first ``length`` positions are filled without a gap."""
        size = self.storage.page_size
        pages = table.pages[: -(-length // size)]
        filled = self._ready[pages].reshape(-1)[:length]
        first_gap = int(filled.argmin()) if filled.size else 0
        return first_gap if filled.size and not filled[first_gap] else length

    def _set(self, table: ReadableTable, start: int, stop: int, value: bool) -> None:
        if start < stop:
            self._ready.reshape(-1)[table.slots(start, stop)] = value


class HiddenStateCache(DraftKvCache):
    """Keeps the states of some layer_ids of the network side by side.

    Args:
        layer_ids: where they are taken, in this order; see ``model.causal_lm``.
        hidden_size: of the target.
        like: the target's storage, whose pages these follow.
    """

    def __init__(self, layer_ids: Sequence[int], hidden_size: int, like: KvStorage) -> None:
        self.layer_ids, self.width = tuple(layer_ids), hidden_size * len(layer_ids)
        shape = LayerShape(kv_heads=1, key_dim=self.width, value_dim=0)
        super().__init__(
            KvStorage([shape], like.num_pages, like.page_size, like.dtype, like.device)
        )

    def write(self, slots: Tensor, states: Mapping[int, Tensor]) -> None:
        """The target has computed the tokens at ``slots`` int64 [T]: states are [T, hidden]."""
        wide = torch.cat([states[layer_id] for layer_id in self.layer_ids], dim=-1)
        self.storage.keys[0].index_copy_(0, slots, wide.unsqueeze(1))
        self._ready.reshape(-1)[slots.cpu().numpy()] = True

    def read(self, table: ReadableTable, start: int, stop: int) -> Tensor:
        """[stop - start, width] in the model's dtype: those of positions ``start`` to ``stop``."""
        first = table.first_slot()
        stored = self.storage.keys[0]
        if first is not None:
            return stored[first + start : first + stop, 0]
        slots = torch.tensor(table.slots(start, stop), device=stored.device)
        return stored[slots, 0]
