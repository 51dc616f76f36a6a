"""A sequence outside of the engine: its token ids and the KV that was computed for them.

Keys and values are copied token by token, in the order of the positions, so that a snapshot does
not depend on the pages that held them, nor on their size. The hidden states of the target that
drafters read are part of it, as they cannot be computed without another forward of the target.
Draft KV is not: drafters compute it from these before their next draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from forethought.kv.storage import DraftKvCache, KvStorage
from forethought.kv.table import PageTable
from forethought.model.hidden_states import HiddenStateCache


@dataclass(frozen=True, slots=True)
class SequenceSnapshot:
    """What a sequence is continued from."""

    token_ids: list[int]
    kv: list[Tensor]
    """In CPU memory, as ``KvStorage.read_slots`` returns it: the first ``num_stored`` tokens."""
    hidden_states: Mapping[tuple[int, ...], Tensor] = field(default_factory=dict)
    """By the ids of the layers: ``[num_stored, width]`` in the model's dtype."""
    adapter: str = ""
    """The name of the adapter that it was computed with; empty: the model alone."""
    adapter_digest: bytes = b""
    """A hash of that one's weights, which are not here."""
    state: Mapping[str, Tensor] = field(default_factory=dict)
    """In CPU memory, as ``KvStorage.read_state`` returns it."""

    @property
    def num_stored(self) -> int:
        """Tokens whose keys and values are here."""
        return int(self.kv[0].shape[1])


def capture(
    table: PageTable,
    token_ids: Sequence[int],
    storage: KvStorage,
    hidden_state_caches: Sequence[HiddenStateCache],
) -> SequenceSnapshot:
    """Copy what is stored of a sequence, whose ``table`` is at most as long as ``token_ids``.
    Hidden-state caches that lack a state are left out.
    """
    length = table.length
    assert length <= len(token_ids)
    states = {
        cache.layer_ids: cache.read(table, 0, length).clone().cpu()
        for cache in hidden_state_caches
        if cache.covers(table, length)
    }
    kv = storage.read_slots(table.slots(0, length))
    return SequenceSnapshot(list(token_ids), kv, states, state=storage.read_state(table))


def write(
    saved: SequenceSnapshot,
    table: PageTable,
    storage: KvStorage,
    draft_caches: Sequence[DraftKvCache],
) -> None:
    """Store a snapshot in the slots of a table of ``num_stored`` tokens."""
    slots = table.slots(0, saved.num_stored)
    storage.write_slots(slots, saved.kv)
    storage.write_state(table, saved.state)
    for cache in draft_caches:
        cache.invalidate(table, 0, saved.num_stored)
        if isinstance(cache, HiddenStateCache) and cache.layer_ids in saved.hidden_states:
            cache.storage.write_slots(slots, _as_stacks(saved.hidden_states[cache.layer_ids]))
            cache.mark(table, 0, saved.num_stored)


def _as_stacks(states: Tensor) -> list[Tensor]:
    """States ``[T, width]`` in the layout of a storage with one layer of keys and no values."""
    keys = states[None, :, None, :]
    return [keys, keys[..., :0]]
