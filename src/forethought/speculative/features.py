"""The target's hidden states of every stored token, for heads that draft from them.

They lie at the slots of the target's pages, so that forks, prefix hits and rewinds serve them too.
Knows nothing about what heads make of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from forethought.kv.companion import Companion
from forethought.kv.storage import KvStorage, LayerShape
from forethought.kv.table import ReadableTable


class Features(Companion):
    """Keeps the states of some places of the network side by side.

    Args:
        places: where they are taken, in this order; see ``model.taps``.
        hidden_size: of the target.
        like: the target's storage, whose pages these follow.
    """

    def __init__(self, places: Sequence[int], hidden_size: int, like: KvStorage) -> None:
        self.places, self.width = tuple(places), hidden_size * len(places)
        shape = LayerShape(kv_heads=1, key_dim=self.width, value_dim=0)
        super().__init__(
            KvStorage([shape], like.num_pages, like.page_size, like.dtype, like.device)
        )

    def write(self, slots: Tensor, states: Mapping[int, Tensor]) -> None:
        """The target has computed the tokens at ``slots`` int64 [T]: states are [T, hidden]."""
        wide = torch.cat([states[place] for place in self.places], dim=-1)
        self.storage.keys[0].index_copy_(0, slots, wide.unsqueeze(1))
        self._ready.reshape(-1)[slots.cpu().numpy()] = True

    def read(self, table: ReadableTable, start: int, stop: int) -> Tensor:
        """[stop - start, width] in the model's dtype: those of positions ``start`` to ``stop``."""
        first = table.run()
        stored = self.storage.keys[0]
        if first is not None:
            return stored[first + start : first + stop, 0]
        slots = torch.tensor(table.slots(start, stop), device=stored.device)
        return stored[slots, 0]
