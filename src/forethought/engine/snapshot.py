"""A sequence outside of the engine: its token ids and the KV that was computed for them.

Keys and values are copied token by token, in the order of the positions, so that a snapshot does
not depend on the pages that held them, nor on their size. It may be a part of the sequence, from
``start`` on: what has been computed since the part before was taken. The hidden states of the
target that drafters read are in it, as they cannot be computed without another forward of the
target. Draft KV is not: drafters compute it from these before their next draft.
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
    """In CPU memory, as ``KvStorage.read_slots`` returns it: ``num_stored`` tokens."""
    hidden_states: Mapping[tuple[int, ...], Tensor] = field(default_factory=dict)
    """By the ids of the layers: ``[num_stored, width]`` in the model's dtype."""
    adapter: str = ""
    """The name of the adapter that it was computed with; empty: the model alone."""
    adapter_digest: bytes = b""
    """A hash of that one's weights, which are not here."""
    state: Mapping[str, Tensor] = field(default_factory=dict)
    """In CPU memory, as ``KvStorage.read_state`` returns it."""
    start: int = 0
    """The first token whose keys and values are here."""
    cache_salt: str | None = None
    """Under which its pages are found in the prefix cache, and published; None: they are not."""

    @property
    def num_stored(self) -> int:
        """Tokens whose keys and values are here."""
        return int(self.kv[0].shape[1])

    @property
    def stop(self) -> int:
        """The token after the last whose keys and values are here."""
        return self.start + self.num_stored

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        tensors = (*self.kv, *self.hidden_states.values(), *self.state.values())
        return sum(tensor.nbytes for tensor in tensors)


def capture(
    table: PageTable,
    token_ids: Sequence[int],
    storage: KvStorage,
    hidden_state_caches: Sequence[HiddenStateCache],
    start: int = 0,
) -> SequenceSnapshot:
    """Copy what is stored of the tokens of a sequence from ``start`` on, in ``table``. Hidden-state
    caches that lack a state are left out.
    """
    table = table.prefix(min(table.length, len(token_ids)))
    length, start = table.length, min(start, table.length)
    states = {
        cache.layer_ids: cache.read(table, start, length).clone().cpu()
        for cache in hidden_state_caches
        if cache.covers(table, length)
    }
    kv, state = storage.read_slots(table.slots(start, length)), storage.read_state(table)
    return SequenceSnapshot(list(token_ids), kv, states, state=state, start=start)


def write(
    saved: SequenceSnapshot,
    table: PageTable,
    storage: KvStorage,
    draft_caches: Sequence[DraftKvCache],
    first: int = 0,
) -> None:
    """Store the tokens of a snapshot from ``first`` on in a table that ends with them."""
    slots, skipped = table.slots(first, saved.stop), first - saved.start
    storage.write_slots(slots, [stack[:, skipped:] for stack in saved.kv])
    storage.write_state(table, saved.state)
    for cache in draft_caches:
        cache.invalidate(table, first, saved.stop)
        if isinstance(cache, HiddenStateCache) and cache.layer_ids in saved.hidden_states:
            states = saved.hidden_states[cache.layer_ids][skipped:]
            cache.storage.write_slots(slots, _as_stacks(states))
            cache.mark(table, first, saved.stop)


def _as_stacks(states: Tensor) -> list[Tensor]:
    """States ``[T, width]`` in the layout of a storage with one layer of keys and no values."""
    keys = states[None, :, None, :]
    return [keys, keys[..., :0]]
