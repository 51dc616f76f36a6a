"""Runs a draft network over a KV cache of its own on the target's pages.

The network is a draft model, an EAGLE head or an MTP module. Its entry for position p, the keys and
values of its layers, lies at the slot of position p of the target and is computed from token p and,
where it reads the target, from the hidden state at position p - ``offset``::

    offset    network               input of the entry at position p    predicts position
    0         draft model           token p                             p + 1
    1         EAGLE, MTP module 1   token p, target's state p - 1       p + 1
    k         MTP module k          token p, state p - k of module k-1  p + 1

An entry depends on no later position, so forks, prefix hits and rewinds of the target are valid for
the draft network as well. Before it drafts, the runner computes the entries that are missing
(``begin``): few of them in a contiguous workspace, many in paged forwards of at most
``max_num_tokens``. It then goes on from its own outputs, level by level (``advance``), in the
workspace; a network with recurrent layers does all that over the pages (``paged_draft``). Entries
that read a fed-back hidden state are not stored: once their tokens are accepted, they are computed
again from the target's states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from forethought.config.tree import TreeShape
from forethought.kv.recurrent import RecurrentStorage
from forethought.kv.staging import upload
from forethought.kv.storage import DraftKvCache, KvStorage, LayerShape
from forethought.kv.table import ReadableTable
from forethought.model.attention.base import AttentionBackend, ForwardPass, PagedPass
from forethought.model.attention.workspace import KvWorkspace, catch_up_start
from forethought.model.batch import Batch, Row
from forethought.model.graph_capturer import GraphCapturer
from forethought.model.hidden_states import HiddenStateCache
from forethought.speculative.drafter import DraftRequest, Target, table_of
from forethought.speculative.paged_draft import PagedDraft

T = TypeVar("T")


class ModuleOutput(NamedTuple):
    """Output of a draft network at R positions."""

    states: Tensor
    """[R, hidden]: fed back as input of the next positions; [R, 0] for a draft model."""
    logits: Tensor
    """[R, D]: of the next tokens."""


class ChainDrafter(Protocol):
    """Drafts whole chains in one call: each level's most probable token is the next one's input."""

    def __call__(
        self, states: Tensor, forward_pass: ForwardPass, slots: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """Compute known entries, then draft after the last one of each row.

        Args:
            states: ``[T, hidden]``, from ``enter``; ``[T, 0]`` for a draft model.
            forward_pass: over the pages of its storage; ``logit_index`` has the last token of each
                row.
            slots: of the tokens to draft after each row, the longest draft first. Entries of all
                but the last of them are written.

        Returns:
            The target's ids, as many for each row as it has slots.
        """
        ...


class TreeDrafter(Protocol):
    """Drafts whole dynamic trees in one call; see ``speculative.dynamic_tree``."""

    def __call__(
        self,
        states: Tensor,
        forward_pass: ForwardPass,
        slots: Sequence[Sequence[int]],
        shape: TreeShape,
    ) -> list[list[list[int]]]:
        """Compute known entries, then draft after the last one of each row.

        Args:
            states, forward_pass: as of :class:`ChainDrafter`.
            slots: of the nodes that are read after each row, ``width`` of each level but the last.
            shape: of the trees.

        Returns:
            The kept nodes of each row, best first: number, the target's id, and parent.
        """
        ...


class DraftNetwork(Protocol):
    """A draft network over pages.

    Attributes:
        vocab_size: D, tokens in its vocabulary.
        ids: int64 ``[D]``, the target's id of each; None: the same ids.
        forward_path: what computes its layers: ``native``, ``torch``, or as of a target.
    """

    vocab_size: int
    ids: Tensor | None
    forward_path: str

    @property
    def draft_chains(self) -> ChainDrafter | None:
        """Drafts chains in one call; None: they are drafted level by level."""
        ...

    @property
    def draft_trees(self) -> TreeDrafter | None:
        """Drafts dynamic trees in one call; None: they are drafted level by level."""
        ...

    windows: Sequence[int | None]
    """Attention window of each layer; None: all positions are visible."""

    def __call__(self, states: Tensor, forward_pass: ForwardPass) -> ModuleOutput:
        """Compute T entries, and the output at the R positions in the batch's ``logit_index``.

        Args:
            states: ``[T, hidden]``, from ``enter`` or fed back; ``[T, 0]`` for a draft model.
            forward_pass: over its storage; the batch has the entries' tokens and, as positions,
                those of the states.
        """
        ...


class DraftModule(DraftNetwork, Protocol):
    """A draft network of one layer that reads hidden states of the target.

    Attributes:
        dtype: of its weights, states and entries; may differ from the target's.
        shape: of its layer's keys and values.
    """

    dtype: torch.dtype
    shape: LayerShape

    def enter(self, states: Tensor) -> Tensor:
        """Concatenated hidden states of the target ``[T, width]`` -> ``[T, hidden]``."""
        ...


class TokenRange(NamedTuple):
    """Entries ``start`` to ``stop`` of one sequence, which are to be computed."""

    tokens: Sequence[int]
    """Tokens of the sequence from position 0 on; those up to ``stop`` that are missing are not
    known on the host."""
    table: ReadableTable
    """Reaches to ``stop`` or further."""
    start: int
    stop: int
    depth: int = 1
    """Levels of the draft that follows: MTP modules that read the range."""

    def row(self, num_logits: int | None) -> Row:
        """As a row of a batch, with the logits of the last ``num_logits`` entries; None: of all."""
        tokens = list(self.tokens[self.start : self.stop])
        size = self.stop - self.start
        tokens += [0] * (size - len(tokens))
        first = 0 if num_logits is None else size - num_logits
        return Row(tokens, self.start, self.table.prefix(self.stop), logits_from=first)


def compute_in_chunks(
    ranges: Sequence[TokenRange],
    max_num_tokens: int,
    forward: Callable[[Sequence[TokenRange], int], T],
    held_back: int = 1,
) -> T:
    """Compute ranges in forwards of at most ``max_num_tokens``, or of ``held_back`` entries each.

    Args:
        ranges: each at least one entry.
        max_num_tokens: in one forward.
        forward: computes parts of some ranges, with that many logits at the end of each.
        held_back: last entries of a range that are computed together, in the last forward.

    Returns:
        The result of the last forward, with one row of logits per range.
    """
    remaining = list(ranges)
    while True:
        early = [max(0, read.stop - read.start - held_back) for read in remaining]
        if sum(read.stop - read.start for read in remaining) <= max_num_tokens or not any(early):
            return forward(remaining, 1)
        capacity, chunk = max_num_tokens, list[TokenRange]()
        for index, count in enumerate(early):
            num_taken = min(capacity, count)
            if num_taken:
                read, capacity = remaining[index], capacity - num_taken
                chunk.append(read._replace(stop=read.start + num_taken))
                remaining[index] = read._replace(start=read.start + num_taken)
        forward(chunk, 0)


class RootOutput(NamedTuple):
    """B requests whose known tokens, up to the root, the network has read."""

    workspace: KvWorkspace | PagedDraft
    known: int
    """Known tokens of each that lie in the workspace only, in front of the draft."""
    positions: Tensor
    """int64 [B]: what the network takes as position of the draft's first tokens."""
    output: ModuleOutput
    """At the roots."""


class DraftModuleRunner:
    """Runs a draft network.

    Args:
        network: on the target's device.
        cache: its KV cache over the target's pages.
        hidden_states: of the target; None: ``network`` is a draft model, which reads none.
        backend: computes attention over pages.
        max_num_tokens: in one paged forward.
        offset: see the table above.

    Attributes:
        graphs: captures CUDA graphs for it; None: it runs eagerly.
    """

    graphs: GraphCapturer | None = None

    def __init__(
        self,
        network: DraftNetwork,
        cache: DraftKvCache,
        hidden_states: HiddenStateCache | None,
        backend: AttentionBackend,
        max_num_tokens: int,
        offset: int,
    ) -> None:
        self.network, self.cache, self.hidden_states = network, cache, hidden_states
        self._backend, self._max_num_tokens, self.offset = backend, max_num_tokens, offset
        self._device = cache.storage.device
        self._is_recurrent = isinstance(cache.storage, RecurrentStorage)

    @classmethod
    def of_module(
        cls, module: DraftModule, hidden_states: HiddenStateCache, target: Target, offset: int = 1
    ) -> DraftModuleRunner:
        """A module for ``target``, with a new KV cache."""
        pages, lm = target.runner.storage, target.runner.lm
        storage = KvStorage(
            [module.shape],
            pages.num_pages,
            pages.page_size,
            module.dtype,
            pages.device,
            has_scratch_page=pages.has_scratch_page,
        )
        cache = DraftKvCache(storage)
        runner = cls(module, cache, hidden_states, lm.backend, target.max_num_tokens, offset)
        runner.graphs = target.runner.graphs
        return runner

    @property
    def draft_caches(self) -> tuple[DraftKvCache, ...]:
        """The target's hidden states, if they are read, and the network's KV cache."""
        return (self.cache,) if self.hidden_states is None else (self.hidden_states, self.cache)

    def missing_from(self, request: DraftRequest) -> int:
        """The first entry of a request that is not stored."""
        stored = self.cache.ready_length(table_of(request), len(request.tokens))
        return max(self.offset, stored)

    def missing(self, request: DraftRequest) -> TokenRange:
        """The entries of known tokens that are not stored; the root's in any case."""
        stop = len(request.tokens)
        start = min(self.missing_from(request), stop - 1)
        return TokenRange(request.tokens, table_of(request), start, stop)

    def begin(self, requests: Sequence[DraftRequest], capacity: int) -> RootOutput:
        """Compute and store all missing entries of known tokens; the root's in any case.

        Args:
            requests: B of them.
            capacity: drafted tokens of each that ``advance`` is to read at most.
        """
        root = self.read_known(requests, capacity)
        self.store(requests, root, [0] * len(requests))
        return root

    def read_known(self, requests: Sequence[DraftRequest], capacity: int) -> RootOutput:
        """As ``begin``, but entries that are computed in the workspace are not stored; see
        ``store``.
        """
        ranges = list(map(self.missing, requests))
        stops = [read.stop for read in ranges]
        positions = upload([stop - self.offset for stop in stops], self._device)
        if self._is_recurrent:
            output = compute_in_chunks(ranges, self._max_num_tokens, self._forward_pages)
            return RootOutput(self._paged_draft(ranges), 0, positions, output)
        starts = catch_up_start([read.start for read in ranges], stops, first=1)
        if starts is None:
            output = compute_in_chunks(ranges, self._max_num_tokens, self._forward_pages)
            workspace, num_read = self._workspace(ranges, stops, capacity), 0
        else:
            num_read = stops[0] - starts[0]
            workspace = self._workspace(ranges, starts, num_read + capacity)
            ranges = [read._replace(start=at) for read, at in zip(ranges, starts, strict=True)]
            output = self._forward_workspace(workspace, ranges)
        return RootOutput(workspace, num_read, positions, output)

    def catch_up(self, requests: Sequence[DraftRequest], held_back: int) -> None:
        """Compute and store the missing entries of known tokens but the last ``held_back``."""
        ranges = list(map(self.missing, requests))
        ranges = [read._replace(stop=read.stop - held_back) for read in ranges]
        ranges = [read for read in ranges if read.start < read.stop]
        if ranges:
            compute_in_chunks(ranges, self._max_num_tokens, self._forward_pages)

    def draft_chains(
        self, requests: Sequence[DraftRequest], sizes: Sequence[int], stores_drafted: bool
    ) -> list[list[int]]:
        """Store all missing entries of known tokens and draft after them, in one call if they fit.

        The network must have ``draft_chains``. Entries of drafted tokens are written to the slots
        that are reserved for the drafts.

        Args:
            requests: B of them.
            sizes: tokens to draft for each, falling.
            stores_drafted: the entries of drafted tokens are valid: they read no fed-back states.
        """
        draft = self.network.draft_chains
        assert draft is not None

        def drafted(states: Tensor, step: PagedPass, slots: list[list[int]]) -> list[list[int]]:
            return draft(
                states, step, [[*row_slots, 0] for row_slots in slots]
            )  # the last token is not read

        drafts = self.draft_behind(requests, [size - 1 for size in sizes], drafted)
        if stores_drafted:
            self.mark_drafted(requests, sizes)
        return drafts

    def draft_trees(
        self, requests: Sequence[DraftRequest], shape: TreeShape
    ) -> list[list[list[int]]]:
        """Store missing entries and draft dynamic trees, as :class:`TreeDrafter`, which the network
        has.
        """
        draft = self.network.draft_trees
        assert draft is not None
        num_read = shape.width * (shape.depth - 1)
        return self.draft_behind(
            requests,
            [num_read] * len(requests),
            lambda states, step, slots: draft(states, step, slots, shape),
        )

    def draft_behind(
        self,
        requests: Sequence[DraftRequest],
        num_slots: Sequence[int],
        draft: Callable[[Tensor, PagedPass, list[list[int]]], list[T]],
    ) -> list[T]:
        """Store all missing entries of known tokens, and draft with the last forward.

        Args:
            requests: to draft for.
            num_slots: that each one's draft writes to, of those reserved after its root.
            draft: from input states, a pass over known tokens and the slots, to the drafts.
        """

        def forward(ranges: Sequence[TokenRange], num_logits: int) -> list[T]:
            if not num_logits:
                self._forward_pages(ranges, 0)
                return []
            slots = [
                list(read.table.slots(read.stop, read.stop + count))
                for read, count in zip(ranges, num_slots, strict=True)
            ]
            drafts = draft(self.input_states(ranges), self.paged_pass(self.pack(ranges, 1)), slots)
            self.mark(ranges)
            return drafts

        with torch.inference_mode():
            return compute_in_chunks(
                list(map(self.missing, requests)), self._max_num_tokens, forward
            )

    def advance(
        self,
        root: RootOutput,
        depth: int,
        token_ids: Tensor,
        states: Tensor,
        visible: Tensor | None = None,
    ) -> ModuleOutput:
        """Compute a level of the drafts, of as many requests as the workspace still has rows.

        Args:
            root: from ``begin``.
            depth: of the tokens; 1: directly after the root.
            token_ids: int64 ``[B * n]``, on the device, request by request.
            states: ``[B * n, hidden]``, the outputs at their parents.
            visible: bool ``[B, n, m]``, which of the last m tokens in the workspace each one sees,
                itself included; None: all.
        """
        workspace, size = root.workspace, len(token_ids) // root.workspace.rows
        positions = root.positions[: workspace.rows] + (depth - 1)
        if size > 1:
            positions = positions.repeat_interleave(size)
        distance = root.known + depth - 1
        with torch.inference_mode():
            step = workspace.level(token_ids, positions, distance, visible)
            return self.network(states, step)

    def store(
        self, requests: Sequence[DraftRequest], root: RootOutput, drafted: Sequence[int]
    ) -> None:
        """Store the known tokens in the workspace, and the first ``drafted`` after each root."""
        counts = [root.known + count for count in drafted]
        if not any(counts):
            return
        root.workspace.store(counts)
        for request, count in zip(requests, counts, strict=True):
            start = len(request.tokens) - root.known
            self._mark(table_of(request), start, start + count)

    def pack(self, ranges: Sequence[TokenRange], num_logits: int | None) -> Batch:
        """A paged batch of ranges; see :meth:`TokenRange.row`."""
        return Batch.build([read.row(num_logits) for read in ranges], self._device, self.offset)

    def paged_pass(self, batch: Batch) -> PagedPass:
        """A forward pass over a packed batch."""
        return PagedPass(batch, self.cache.storage, self._backend, self.network.windows)

    def mark(self, ranges: Sequence[TokenRange]) -> None:
        """Mark the entries of ranges as stored."""
        for read in ranges:
            self._mark(read.table, read.start, read.stop)

    def mark_drafted(self, requests: Sequence[DraftRequest], sizes: Sequence[int]) -> None:
        """Mark the entries of drafted chains of these sizes as stored: all but the last one's."""
        for request, size in zip(requests, sizes, strict=True):
            stop = len(request.tokens)
            self._mark(table_of(request), stop, stop + size - 1)

    def _mark(self, table: ReadableTable, start: int, stop: int) -> None:
        self.cache.mark(table, start if start > self.offset else 0, stop)  # no entries before it

    def _workspace(
        self, ranges: Sequence[TokenRange], lengths: Sequence[int], capacity: int
    ) -> KvWorkspace:
        tables, storage = [read.table for read in ranges], self.cache.storage
        return KvWorkspace(
            storage, tables, lengths, capacity, self.network.windows, seen_from=self.offset
        )

    def _paged_draft(self, ranges: Sequence[TokenRange]) -> PagedDraft:
        tables, stops = [read.table for read in ranges], [read.stop for read in ranges]
        return PagedDraft(self.cache.storage, tables, stops, self._backend, self.network.windows)

    def _forward_pages(self, ranges: Sequence[TokenRange], num_logits: int) -> ModuleOutput:
        with torch.inference_mode():
            step = self.paged_pass(self.pack(ranges, num_logits))
            output = self.network(self.input_states(ranges), step)
        self.mark(ranges)
        return output

    def _forward_workspace(
        self, workspace: KvWorkspace, ranges: Sequence[TokenRange]
    ) -> ModuleOutput:
        tokens, positions = list[int](), list[int]()
        for read in ranges:
            tokens += read.tokens[read.start : read.stop]
            positions += range(read.start - self.offset, read.stop - self.offset)
        index = upload([tokens, positions], self._device)
        with torch.inference_mode():
            return self.network(self.input_states(ranges), workspace.chain(index[0], index[1]))

    def input_states(self, ranges: Sequence[TokenRange]) -> Tensor:
        """[T, hidden]: of the target, for the entries of ranges; [T, 0] for a draft model."""
        if self.hidden_states is None:
            return self.states_at(None, sum(read.stop - read.start for read in ranges))
        states = [
            self.hidden_states.read(read.table, read.start - self.offset, read.stop - self.offset)
            for read in ranges
        ]
        return self._entered(states[0] if len(states) == 1 else torch.cat(states))

    def states_at(self, slots: Tensor | None, count: int) -> Tensor:
        """[T, hidden]: of the target, stored at slots int64 [T]; [T, 0] for a draft model.

        Args:
            slots: on the device; None for a draft model.
            count: T.
        """
        if self.hidden_states is None:
            return torch.empty(count, 0, device=self._device)
        return self._entered(self.hidden_states.storage.keys[0][slots, 0])

    def _entered(self, states: Tensor) -> Tensor:
        module: DraftModule = self.network  # type: ignore[assignment]  # it reads hidden states
        return module.enter(states)
