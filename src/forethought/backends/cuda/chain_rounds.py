"""Greedy steps with chain drafts that follow each other on a GPU, without a wait between them.

A round is a draft, a forward of the target over the roots and their drafts, and acceptance, one
CUDA graph. How many tokens are accepted is known on the device alone. The numbers of round n + 1
come from round n like this, for each row, where K tokens are drafted::

    accepted   a: leading drafted tokens that are the target's most probable ones, at most its K
    position   of the root: p + a + 1; the root is the most probable token after the accepted ones
    known      the last W tokens up to the root, which the draft network reads again, as many as it
               may lack: 2 where the entries of drafted tokens are valid, else K + 1
    slots      ``pages[position // page_size] * page_size + position % page_size``, by its table
    lengths    of what attention reads: the last position of each forward, plus 1

The host lays out tiles, pages and splits once, for the longest that a row may become, and queues
all rounds. A row that has ended goes on, which nothing shows: what lies beyond its table is written
to the scratch page, and once its root is beyond it, nothing else is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from forethought.backends.cuda.graph_runner import GraphRunner
from forethought.backends.cuda.graphs import (
    MAX_GRAPH_TOKENS,
    Bucket,
    StaticBatch,
    capacity_of,
    padded_tokens,
)
from forethought.kv.staging import StaticBuffer
from forethought.kv.storage import KvStorage
from forethought.kv.table import PageTable
from forethought.model.attention.paged_layout import WORD_BITS
from forethought.model.batch import Span
from forethought.model.graph_capturer import Graph
from forethought.model.hidden_states import HiddenStateCache
from forethought.model.runner import ModelRunner
from forethought.model.sampling.sampler import mark_not_finite
from forethought.speculative.chain_source import GreedyChains
from forethought.speculative.draft_module import DraftModuleRunner, ModuleOutput
from forethought.speculative.drafter import ChainSource
from forethought.speculative.step_runner import (
    Advance,
    DecodeRow,
    Interrupt,
    RowProgress,
    StepRunner,
)
from forethought.speculative.tree import StaticTreeBuilder
from forethought.speculative.verify.accept import num_accepted

MAX_ROUND_GRAPHS = 16
"""Graphs of an engine's that are rounds of a drafter."""


def next_known(known_tokens: Tensor, decoded: Tensor, accepted: Tensor) -> Tensor:
    """The last W tokens up to the next root, int64 ``[B, W]``.

    Args:
        known_tokens: int64 ``[B, W]``, those up to the root of this round.
        decoded: int64 ``[B, K + 1]``.
        accepted: int64 ``[B]``, from :func:`num_accepted`.
    """
    offsets = torch.arange(1, 1 + known_tokens.shape[1], device=known_tokens.device)
    tokens = torch.cat(
        [known_tokens, decoded.clamp(min=0)], dim=1
    )  # those after NO_TOKEN are unused
    return tokens.gather(1, accepted[:, None] + offsets)


class Places(NamedTuple):
    """Consecutive positions of B rows and where they lie, int64 ``[B, n]`` each.

    Attributes:
        positions: as attention counts them; those of rows that have ended are of any tokens.
        inside: the same where the row's table reaches, else the nearest such position.
        slots: of ``inside``.
        exists: bool ``[B, n]``, whether the table reaches there, and the row has not ended.
    """

    positions: Tensor
    inside: Tensor
    slots: Tensor
    exists: Tensor

    @classmethod
    def of(cls, roots: Tensor, limits: Tensor, offsets: Tensor, pages: Tensor, size: int) -> Places:
        """Positions and slots relative to the roots.

        Args:
            roots: int64 ``[B]``, positions of the roots.
            limits: int64 ``[B]``, tokens that the row's table reaches to; 0: there is no row.
            offsets: int64 ``[n]``, added to the position of the root.
            pages: int64 ``[B, pages]``, the table.
            size: tokens of a page.
        """
        limits = limits[:, None]
        roots = roots[:, None]
        positions = torch.minimum(roots, limits) + offsets
        inside = torch.minimum(positions, limits - 1).clamp(min=0)
        slots = pages.gather(1, inside // size) * size + inside % size
        return cls(positions, inside, slots, (positions < limits) & (roots < limits))

    def columns(self, begin: int, stop: int) -> Places:
        """Those of some columns."""
        return Places(*(part[:, begin:stop] for part in self))


class PlacedBatch:
    """A batch of equally many consecutive tokens of each row, which are placed on the device.

    Args:
        num_rows: of the batch, padding included.
        size: tokens of a row.
        capacity: stored tokens that a row may have.
        storage: where they are stored, with a scratch page.
        offset: the first position that is attended to, from which the network counts.
        only_last: the logits of the last token of each row are wanted, not of all.
    """

    def __init__(
        self,
        num_rows: int,
        size: int,
        capacity: int,
        storage: KvStorage,
        *,
        offset: int = 0,
        only_last: bool = False,
    ) -> None:
        self._rows, self._size, self._offset = num_rows, size, offset
        self._scratch_slot = storage.scratch_slot
        self._page_size = storage.page_size
        bucket = Bucket(num_rows * size, Bucket.tile_of(size), capacity)
        self.static = StaticBatch(bucket, storage, num_rows if only_last else None)
        last = range(size - 1, num_rows * size, size)
        self._wanted = last if only_last else range(num_rows * size)

    @property
    def pages(self) -> Tensor:
        """int64 ``[B, pages]``: the tables of the rows."""
        return self.static.tensors["pages"][: self._rows]

    def lay_out(self, tables: Sequence[PageTable], num_further: int) -> None:
        """Queue the copy of where rows lie, the first ones; the rest is padding.

        What attention reads after a table, for tokens that are not used, is the row's first page.

        Args:
            tables: of the rows.
            num_further: tokens after the table of each that attention may read.
        """
        spans = []
        for row, table in enumerate(tables):
            length = max(table.length + num_further, self._size)
            further = -(-length // self._page_size) - len(table.pages)
            pages = (*table.pages, *table.pages[:1] * further)  # what padding stores may be NaN
            begin, stop = row * self._size, (row + 1) * self._size
            spans.append(Span(begin, stop, length, pages, None, None, self._offset))
        self.static.lay_out(spans, self._wanted)

    def clear(self) -> None:
        """Queue padding alone."""
        self.static.clear()

    def place(self, tokens: Tensor, at: Places, is_row: Tensor) -> None:
        """Write the numbers of the next forward.

        Args:
            tokens: int64 ``[B, size]``.
            at: of the same shape.
            is_row: bool ``[B]``, whether the row is laid out.
        """
        batch, layout = self.static.batch, self.static.tensors
        batch.token_ids.copy_(tokens.flatten())
        batch.positions.copy_((at.inside - self._offset).clamp(min=0).flatten())
        is_missing = ~(at.exists & is_row[:, None])
        batch.slots.copy_(at.slots.masked_fill(is_missing, self._scratch_slot).flatten())
        layout["tokens"][:, 0].copy_(at.positions.flatten())
        lengths = (at.positions[:, -1] + 1).masked_fill(~is_row, 0)
        layout["rows"][: self._rows, 2].copy_(lengths)
        self._count_splits(lengths)

    def _count_splits(self, lengths: Tensor) -> None:
        """Splits that have stored tokens: the others leave no partial results."""
        partials, rows = self.static.tensors["partials"], self.static.tensors["rows"]
        if len(partials):
            split = rows[: self._rows, 4]
            counts = (lengths + split - 1) // split
            num_tokens = counts[partials[:, 0] // self._size]
            partials[:, 1].copy_(num_tokens.masked_fill(partials[:, 1] == 0, 0))


@dataclass(frozen=True, slots=True)
class _Shape:
    num_rows: int
    draft_len: int
    capacity: int


def _can_run(runner: ModelRunner, chains: GreedyChains, num_rows: int) -> bool:
    drafting, builder = chains.runner, chains.builder
    return (
        type(runner) is GraphRunner
        and drafting.graphs is not None
        and drafting.cache.storage.has_scratch_page
        and drafting.cache.storage.device == runner.storage.device
        and builder.is_chain
        and padded_tokens(num_rows) * (1 + builder.depth) <= MAX_GRAPH_TOKENS
        and 1 + builder.depth <= WORD_BITS
    )


def num_known(builder: StaticTreeBuilder, draft_len: int) -> int:
    """Tokens up to the root that the draft network may lack after a round."""
    return 2 if builder.stores_drafted else draft_len + 1


class _State:
    """The inputs and outputs of a graph: its batches and the numbers of each row."""

    def __init__(
        self, shape: _Shape, runner: ModelRunner, drafting: DraftModuleRunner, known: int
    ) -> None:
        rows, draft_len, capacity = shape.num_rows, shape.draft_len, shape.capacity
        storage, offset = drafting.cache.storage, drafting.offset
        device, self.shape, self.known = runner.storage.device, shape, known
        self.first = PlacedBatch(rows, known, capacity, storage, offset=offset, only_last=True)
        self.level = PlacedBatch(rows, 1, capacity, storage, offset=offset)
        self.target = PlacedBatch(rows, 1 + draft_len, capacity, runner.storage)
        numbers = dict.fromkeys(("roots", "limits", "draft_lens"), np.zeros(rows, np.int64))
        self._buffer = StaticBuffer({"known": np.zeros((rows, known), np.int64), **numbers}, device)
        self.tensors = self._buffer.tensors
        self.offsets = torch.arange(1 - known - offset, 1 + draft_len, device=device)

    def clear(self) -> None:
        for batch in (self.first, self.level, self.target):
            batch.clear()
        self._buffer.fill({})

    def fill(self, rows: Sequence[DecodeRow]) -> None:
        """Queue the copies of rows, none of which has longer drafts than the one before it."""
        tables, num_further = [row.table for row in rows], 1 + self.shape.draft_len
        drafting = [row.table for row in rows if row.draft_len]
        self.first.lay_out(drafting, num_further)
        self.level.lay_out(drafting, num_further)
        self.target.lay_out(tables, num_further)
        lengths = [len(row.request.tokens) for row in rows]
        known = [list(row.request.tokens[-self.known :]) for row in rows]
        padding = [0] * (self.shape.num_rows - len(rows))
        self._buffer.fill(
            {
                "known": np.array([[0] * (self.known - len(own)) + own for own in known]),
                "roots": [length - 1 for length in lengths],
                "limits": [table.length for table in tables],
                "draft_lens": [row.draft_len for row in rows] + padding,
            }
        )


class ChainRounds(StepRunner):
    """Makes rounds with one target and one draft network, by graphs.

    Args:
        runner: of the target.
        chains: the draft network and the builder of its chains.
    """

    def __init__(self, runner: ModelRunner, chains: GreedyChains) -> None:
        assert chains.runner.graphs is not None
        self._runner, self._chains = runner, chains
        self._drafting, self._builder = chains.runner, chains.builder
        self._graphs = chains.runner.graphs.split(MAX_ROUND_GRAPHS)
        self._captured: dict[_Shape, tuple[_State, Graph | None]] = {}
        states = chains.runner.hidden_states
        self._readers: list[HiddenStateCache] = [] if states is None else [states]

    @classmethod
    def of(
        cls,
        runner: ModelRunner,
        chains: ChainSource | None,
        rows: Sequence[DecodeRow],
        caches: Sequence[HiddenStateCache] = (),
    ) -> Self | None:
        """Where both networks run by graphs, and all rows are greedy, without an adapter, and have
        what the draft network reads again.

        It is the same one, with its graphs, in all calls of an engine.
        """
        if not isinstance(chains, GreedyChains) or chains.learns_from_ends:
            return None
        if any(row.sampled is not None or row.adapter is not None for row in rows):
            return None
        if not _can_run(runner, chains, len(rows)):
            return None
        num_again = num_known(chains.builder, chains.builder.depth) + chains.runner.offset
        if any(row.draft_len and len(row.request.tokens) < num_again for row in rows):
            return None
        if runner not in chains.step_runners:
            chains.step_runners[runner] = cls(runner, chains)
        step_runner = chains.step_runners[runner]
        assert isinstance(step_runner, cls)
        return step_runner

    @override
    def advance(
        self, rows: Sequence[DecodeRow], num_steps: int, interrupt: Interrupt | None = None
    ) -> Advance:
        """All rows make all rounds, also those that have ended."""
        num_steps, draft_len = min(num_steps, max(row.num_left for row in rows)), rows[0].draft_len
        progress = list(map(RowProgress.of, rows))
        for tokens in self._run(rows, num_steps).tolist():
            for row, numbers in zip(progress, tokens, strict=True):
                row.take_queued(numbers[:draft_len], numbers[draft_len:])
        for row in progress:
            self._chains.mark(row.row.position, row.row.table, row.results)
        return Advance([row.results for row in progress], num_steps)

    def _run(self, rows: Sequence[DecodeRow], num_rounds: int) -> Tensor:
        """Make ``num_rounds`` rounds.

        The draft network's entries of known tokens are marked as stored, nothing after them.

        Returns:
            int64 ``[rounds, B, 2 K + 1]``, on the device: K drafted tokens, then the most probable
            token after the root and each of them, or ``NO_TOKEN``.
        """
        state, graph = self._find(rows)
        drafting = [row.request for row in rows if row.draft_len]
        self._drafting.catch_up(drafting, held_back=state.known)
        missing = list(map(self._drafting.missing, drafting))
        state.fill(rows)
        rounds = []
        for _ in range(num_rounds):
            with torch.inference_mode():
                numbers = self._compute(state) if graph is None else self._graphs.replay(graph)
                rounds.append(numbers[: len(rows)].clone())
        self._drafting.mark(missing)
        return torch.stack(rounds)

    def _find(self, rows: Sequence[DecodeRow]) -> tuple[_State, Graph | None]:
        draft_len = rows[0].draft_len
        longest = max(row.table.length for row in rows) + 1 + draft_len
        shape = _Shape(padded_tokens(len(rows)), draft_len, capacity_of(longest))
        if shape not in self._captured:
            self._captured[shape] = self._capture(shape)
        return self._captured[shape]

    def _capture(self, shape: _Shape) -> tuple[_State, Graph | None]:
        known = num_known(self._builder, shape.draft_len)
        state = _State(shape, self._runner, self._drafting, known)
        state.clear()
        return state, self._graphs.try_capture(shape, lambda: self._compute(state))

    def _compute(self, state: _State) -> Tensor:
        """A round: int64 ``[B, 2 K + 1]``, drafted and decoded tokens."""
        of = state.tensors
        pages, size = state.target.pages, self._runner.storage.page_size
        places = Places.of(of["roots"], of["limits"], state.offsets, pages, size)
        drafted = self._draft(state, places)
        root = self._drafting.offset + state.known - 1
        tokens = torch.cat([of["known"][:, -1:], drafted], dim=1)
        at = places.columns(root, root + 1 + state.shape.draft_len)
        state.target.place(tokens, at, of["limits"] > 0)
        logits = self._runner.compute(state.target.static.batch, self._readers)
        largest, ids = logits.max(dim=-1)
        decoded = mark_not_finite(ids, largest).view(state.shape.num_rows, -1)
        accepted = num_accepted(drafted, decoded, of["draft_lens"])
        of["known"].copy_(next_known(of["known"], decoded, accepted))
        of["roots"].add_(accepted + 1)
        return torch.cat([drafted, decoded], dim=1)

    def _states(self, at: Places) -> Tensor:
        """What the entries read that are ``offset`` after these places; see ``states_at``."""
        states, slots = self._drafting.hidden_states, at.slots
        if states is None:
            return self._drafting.states_at(None, slots.numel())
        slots = slots.masked_fill(~at.exists, states.storage.scratch_slot)
        return self._drafting.states_at(slots.flatten(), slots.numel())

    def _draft(self, state: _State, places: Places) -> Tensor:
        """The drafts, int64 ``[B, K]``."""
        runner, of, known = self._drafting, state.tensors, state.known
        offset, drafts = runner.offset, of["draft_lens"] > 0
        root = offset + known - 1
        state.first.place(of["known"], places.columns(offset, offset + known), drafts)
        states = self._states(places.columns(0, known))
        output = runner.network(states, runner.paged_pass(state.first.static.batch))

        def advance(
            depth: int, token_ids: Tensor, states: Tensor, visible: Tensor | None
        ) -> ModuleOutput:
            at = places.columns(root + depth, root + depth + 1)
            state.level.place(token_ids[:, None], at, drafts)
            return runner.network(states, runner.paged_pass(state.level.static.batch))

        size = state.shape.draft_len
        return self._builder.draft_levels(runner.network.ids, size, output, advance)
