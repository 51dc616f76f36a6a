"""States of recurrent layers, beside the pages of keys and values.

A recurrent layer (gated delta rule, Mamba, short convolution) keeps a state of constant size where
attention keeps keys and values per token. Here a state belongs to the token after which it stands,
and is found by that token's slot::

    pages    [ 7        ][ 8        ][ 3        ]
    tokens     0 1 2 3     4 5 6 7     8 9 . .
    states           x           x     x x          after tokens 3, 7, 8 and 9

So pages carry them: a fork shares the states of the pages that it shares, a page that is copied on
write takes its states along, the accepted path of a draft tree moves them, and a prefix hit finds
the state of the last token of a page. States are never changed, so each of these is a matter of
references. They are kept after the last two tokens of a sequence, and after whole pages of some
``CHECKPOINT_TOKENS`` tokens. They may take as many bytes as keys and values; beyond that the ones
that were not used for longest are dropped, but for the last two of every row that runs.
Where the state after a token is missing, the tokens from the last one before it are computed again
(``resume``): a state that is dropped costs time and nothing else.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from typing_extensions import override

from forethought.kv.storage import KvStorage
from forethought.kv.table import PageCopy, ReadableTable, SlotMove

CHECKPOINT_TOKENS = 64
"""Positions between two states that are kept, at least: a chunk of the gated delta rule."""

NUM_DECODED = 3
"""States of a sequence that a step leaves beside those of pages: after its token, and after the two
before it."""

LayerState = dict[tuple[str, int], Tensor]
"""Of one layer after one token, by kind (``conv``, ``recurrent``) and number: ``[1, ...]``."""
State = Sequence[LayerState]
"""Of all recurrent layers after one token, in order. Neither it nor its tensors are changed."""


class StateView(NamedTuple):
    """Where a tensor of a layer's state is among the floats of all."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class PackedState(Sequence[LayerState]):
    """A state of all layers in one tensor, as the backend in C++ reads and writes it.

    Args:
        floats: float32 of all layers.
        views: of each layer.
    """

    def __init__(
        self, floats: Tensor, views: Sequence[Mapping[tuple[str, int], StateView]]
    ) -> None:
        self.floats, self._views = floats, views

    @classmethod
    def of(
        cls,
        state: State,
        size: int,
        views: Sequence[Mapping[tuple[str, int], StateView]],
        device: torch.device | None = None,
    ) -> PackedState:
        """A state of ``size`` floats on the device, such as one that a snapshot has brought."""
        if isinstance(state, cls):
            return state
        packed = cls(torch.empty(size, device=device), views)
        for layer, tensors in enumerate(state):
            for key, tensor in tensors.items():
                packed._view(views[layer][key]).copy_(tensor)
        return packed

    @override
    def __len__(self) -> int:
        return len(self._views)

    @override
    def __getitem__(self, layer: Any) -> Any:
        """Copies of the tensors of a layer."""
        if isinstance(layer, slice):
            return [self[index] for index in range(*layer.indices(len(self)))]
        views = self._views[layer]
        return {
            key: self._view(view).clone(memory_format=torch.contiguous_format)
            for key, view in views.items()
        }

    def _view(self, view: StateView) -> Tensor:
        return self.floats.as_strided(*view)


class DecodedStates(NamedTuple):
    """The states after tokens that a row decodes in several steps of one call.

    Those that further steps drop share memory. In the end the last ``NUM_DECODED`` hold,
    and those that are kept in any case; also where one more step has written a state but decoded
    nothing, as its logits are not finite.
    """

    table: ReadableTable
    start: int
    """The position of the first of these tokens."""
    states: list[PackedState]
    """One for each token that there may be."""

    @classmethod
    def of(
        cls,
        table: ReadableTable,
        start: int,
        stop: int,
        new_state: Callable[[], PackedState],
        checkpoint_tokens: int,
        draft_len: int = 0,
    ) -> Self:
        """Of tokens at positions ``[start, stop)``.

        Args:
            table: of the row.
            start, stop: see above.
            new_state: makes one, with any floats.
            checkpoint_tokens: that of the storage.
            draft_len: tokens that a step drafts at most. It leaves as many more states, and one
                more step writes as many more.
        """
        num_latest = min(NUM_DECODED + 1 + 2 * draft_len, stop - start)
        latest = itertools.cycle([new_state() for _ in range(num_latest)])
        lengths = range(start + 1, stop + 1)
        states = [new_state() if n % checkpoint_tokens == 0 else next(latest) for n in lengths]
        return cls(table, start, states)


class RecurrentStates:
    """States by the slots of their tokens."""

    def __init__(self, max_states: int) -> None:
        self.max_states = max_states
        self._by_slot: OrderedDict[int, State] = OrderedDict()
        """Least recently used first."""

    def __len__(self) -> int:
        return len(self._by_slot)

    def __contains__(self, slot: int) -> bool:
        return slot in self._by_slot

    def get(self, slot: int) -> State:
        """The state after the token at ``slot``."""
        self._by_slot.move_to_end(slot)
        return self._by_slot[slot]

    def peek(self, slot: int) -> State | None:
        """The same without counting as a use; None: there is none."""
        return self._by_slot.get(slot)

    def put(self, slot: int, state: State) -> None:
        """Keep a state."""
        self._by_slot[slot] = state
        self._by_slot.move_to_end(slot)

    @property
    def num_excess(self) -> int:
        """How many there are beyond ``max_states``; negative: there is room for others."""
        return len(self) - self.max_states

    def limit(self, spared: Collection[int]) -> None:
        """Drop the ones not used for longest, beyond ``max_states``, none of them ``spared``."""
        others = (slot for slot in list(self._by_slot) if slot not in spared)
        self.drop(itertools.islice(others, max(0, self.num_excess)))

    def drop(self, slots: Iterable[int]) -> None:
        """Other tokens are stored at these slots now."""
        for slot in slots:
            self._by_slot.pop(slot, None)

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Tokens were copied from the first slot of each pair to the second, all at once."""
        states = {dst: self._by_slot.get(src) for src, dst in pairs}
        self.drop(states)
        for dst, state in states.items():
            if state is not None:
                self.put(dst, state)


class RecurrentStorage(KvStorage):
    """Keys and values of the attention layers, and the states of the recurrent ones.

    Args:
        state_bytes: of one state.
        arguments: those of :class:`KvStorage`.

    Attributes:
        states: by slot.
        checkpoint_tokens: positions between two states that are kept: whole pages.
    """

    states: RecurrentStates

    def __init__(self, *arguments: Any, state_bytes: int, **settings: Any) -> None:
        self.state_bytes = state_bytes
        super().__init__(*arguments, **settings)
        self.checkpoint_tokens = self.page_size * -(-CHECKPOINT_TOKENS // self.page_size)

    @override
    def resize(self, num_pages: int) -> None:
        super().resize(num_pages)
        self.states = RecurrentStates(num_pages * self.bytes_per_page // self.state_bytes)
        self._resumed = set[int]()
        """Slots of the states from which rows go on in this step."""
        self._passed: dict[int, State] = {}
        """By slot, the states that rows have gone beyond, dropped after the forward."""

    @property
    @override
    def max_state_bytes(self) -> int:
        return self.states.max_states * self.state_bytes

    @property
    @override
    def device_bytes_per_page(self) -> int:
        return 2 * self.bytes_per_page

    @override
    def resume(self, table: ReadableTable, length: int) -> int:
        last = next(self._stored(table, length), 0)
        if last:
            self._resumed.add(table.slot(last - 1))
        self._pass_by(table, last - 2)
        return last

    @override
    def read_state(self, table: ReadableTable) -> dict[str, Tensor]:
        if not table.length or (slot := table.slot(table.length - 1)) not in self.states:
            return {}
        state = self.states.get(slot)
        return {
            f"{layer}.{kind}.{number}": tensor.cpu()
            for layer, tensors in enumerate(state)
            for (kind, number), tensor in tensors.items()
        }

    @override
    def write_state(self, table: ReadableTable, state: Mapping[str, Tensor]) -> None:
        layers: dict[int, LayerState] = {}
        for name, tensor in state.items():
            layer, kind, number = name.split(".")
            layers.setdefault(int(layer), {})[kind, int(number)] = tensor.to(self.device)
        if layers:
            slot = table.slot(table.length - 1)
            self.states.put(slot, [layers[layer] for layer in sorted(layers)])

    @override
    def limit_states(self, tables: Iterable[ReadableTable]) -> None:
        self.forget()
        self._resumed.clear()
        if self.states.num_excess > 0:
            self.states.limit(
                {
                    table.slot(length - 1)
                    for table in tables
                    for length in itertools.islice(self._stored(table, table.length), 2)
                }
            )

    def new_decoded(
        self,
        table: ReadableTable,
        positions: range,
        new_state: Callable[[], PackedState],
        draft_len: int,
    ) -> DecodedStates:
        """Where the states after tokens of a row are written; arguments as of ``DecodedStates``."""
        start, stop = positions.start, positions.stop
        return DecodedStates.of(table, start, stop, new_state, self.checkpoint_tokens, draft_len)

    def keep_decoded(self, rows: Sequence[DecodedStates], counts: Sequence[Sequence[int]]) -> None:
        """Keep the states that steps have left: by row, how many tokens each of its steps has
        stored, the first of which stored tokens before ``DecodedStates.start``, too. All rows that
        run are among them.
        """
        lengths = [row.start for row in rows]
        for step in range(max(map(len, counts), default=0)):
            going = [index for index, stored in enumerate(counts) if step < len(stored)]
            before = [rows[index].table.prefix(lengths[index]) for index in going]
            if step:
                self.limit_states(before)
            for table in before if step else ():
                self.resume(table, table.length)
                self.states.get(table.slot(table.length - 1))
            for index in going:
                row, count = rows[index], counts[index][step]
                for position in range(lengths[index], lengths[index] + count):
                    self.states.put(row.table.slot(position), row.states[position - row.start])
                lengths[index] += count
            self.forget()

    def _stored(self, table: ReadableTable, length: int) -> Iterator[int]:
        """The lengths of a row, from ``length`` down, after which there is a state."""
        return (n for n in range(length, 0, -1) if table.slot(n - 1) in self.states)

    def _pass_by(self, table: ReadableTable, length: int) -> None:
        """Note the states that a row has gone beyond, of its first ``length`` tokens, but for every
        ``checkpoint_tokens``; those of two more tokens are left by the caller, as logits of a last
        token are needed once more at times.
        """
        for number in range(length, 0, -1):
            if number % self.checkpoint_tokens == 0:
                continue
            slot = table.slot(number - 1)
            state = self.states.peek(slot)
            if state is None or slot in self._passed:
                return
            self._passed[slot] = state

    def forget(self) -> None:
        """After a forward, drop the states that rows have gone beyond, but for those from which
        others that share their pages go on.
        """
        self.states.drop(
            slot
            for slot, state in self._passed.items()
            if slot not in self._resumed and self.states.peek(slot) is state
        )
        self._passed.clear()

    @override
    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        super().copy_pages(copies)
        for offset in range(self.page_size):
            self.states.copy(
                (src * self.page_size + offset, dst * self.page_size + offset)
                for src, dst in copies
            )

    @override
    def move_slots(self, moves: Sequence[SlotMove]) -> None:
        super().move_slots(moves)
        self.states.copy(moves)

    @override
    def clear_slots(self, slots: Sequence[int]) -> None:
        super().clear_slots(slots)
        self.states.drop(slots)

    @override
    def write_slots(self, slots: Sequence[int], stacks: Sequence[Tensor]) -> None:
        super().write_slots(slots, stacks)
        self.states.drop(slots)
