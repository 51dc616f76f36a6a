"""Drafts of a draft network as CUDA graphs: all levels of a chain or a tree are one launch.

The network is a module that reads the target's states, or a draft model. The first forward reads
the known tokens that it has not read, a few of each request; each further one reads the drafted
nodes of a level that go on. All of them attend over pages, where the eager way copies the prefix
into a workspace once per draft. A node of a tree sees its ancestors
alone, so the nodes of the levels above are read again beside it, as one row with ancestor bits; in
a chain everything is visible, and a forward reads one token. ``backends.cuda.graphs`` pads rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from forethought.backends.cuda.graphs import (
    MAX_GRAPH_TOKENS,
    Bucket,
    StaticBatch,
    capacity_of,
    padded_tokens,
)
from forethought.model.attention.paged_layout import WORD_BITS, Integers, words_per_node
from forethought.model.attention.workspace import MAX_CATCH_UP
from forethought.model.batch import PackedRows
from forethought.model.graph_capturer import Graph, GraphCapturer
from forethought.speculative import tree
from forethought.speculative.draft_module import DraftModuleRunner, ModuleOutput, TokenRange
from forethought.speculative.drafter import DraftRequest
from forethought.speculative.tree import Grow, ReadNodes

MAX_DRAFT_GRAPHS = 24
"""Graphs of an engine's that are drafts of a drafter."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of a graph.

    Attributes:
        first: bucket of the known tokens.
        num_rows: requests, with padding.
        read: the drafted nodes.
    """

    first: Bucket
    num_rows: int
    read: ReadNodes

    @classmethod
    def of(cls, ranges: Sequence[TokenRange], read: ReadNodes) -> _Shape | None:
        """The smallest one that holds the ranges; None: there is none."""
        first = known_bucket(ranges, max(read.ends, default=0))
        num_rows = padded_tokens(len(ranges))
        largest = max((read.count(depth) for depth in range(1, len(read.ends) + 1)), default=0)
        if first is None or num_rows * largest > MAX_GRAPH_TOKENS:
            return None
        return cls(first, num_rows, read)


def known_bucket(ranges: Sequence[TokenRange], num_behind: int) -> Bucket | None:
    """The smallest one for the known tokens of ranges; None: there is none.

    Args:
        ranges: one per request.
        num_behind: tokens that are stored after each of them.
    """
    sizes = [read.stop - read.start for read in ranges]
    total, longest = sum(sizes), max(sizes)
    if longest > MAX_CATCH_UP or total > MAX_GRAPH_TOKENS:
        return None
    num_tokens = padded_tokens(total)
    if padded_tokens(len(ranges)) == num_tokens and total > len(ranges):
        # With as many rows as tokens a network takes each token for the last of its row.
        num_tokens = padded_tokens(num_tokens + 1)
    capacity = capacity_of(max(read.stop for read in ranges) + num_behind)
    return Bucket(num_tokens, Bucket.tile_of(longest), capacity)


def state_slots(ranges: Sequence[TokenRange], offset: int) -> list[int]:
    """The slots of the target's states that the entries of ranges read."""
    slots: list[int] = []
    for read in ranges:
        slots += read.table.slots(read.start - offset, read.stop - offset)
    return slots


class _Inputs:
    """The inputs of a graph: the batches of its forwards, and the places of the target's states."""

    def __init__(self, shape: _Shape, runner: DraftModuleRunner) -> None:
        storage, further = runner.cache.storage, dict[str, Integers]()
        if runner.hidden_states is not None:
            no_state = runner.hidden_states.storage.scratch_slot
            further["states"] = np.full(shape.first.num_tokens, no_state, np.int64)
        self.num_rows, self._read = shape.num_rows, shape.read
        self.first = StaticBatch(shape.first, storage, shape.num_rows, further)
        self.levels: list[StaticBatch] = []
        for depth in range(1, len(shape.read.ends) + 1):
            size, num_new = shape.read.count(depth), shape.read.num_new(depth)
            tile_tokens, num_tokens = Bucket.tile_of(size), shape.num_rows * size
            bucket = Bucket(num_tokens, tile_tokens, shape.first.capacity)
            num_logits = None if num_new == size else shape.num_rows * num_new
            self.levels.append(StaticBatch(bucket, storage, num_logits))

    def clear(self) -> None:
        for batch in (self.first, *self.levels):
            batch.clear()

    def fill(self, ranges: Sequence[TokenRange], num_deeper: Sequence[int], offset: int) -> None:
        """Queue the copies of the ranges; ``num_deeper`` have a draft deeper than 1, 2, ..."""
        rows, further = [read.row(1) for read in ranges], dict[str, list[int]]()
        if "states" in self.first.tensors:
            further["states"] = state_slots(ranges, offset)
        self.first.fill(PackedRows.of(rows, offset), further)
        for depth, (batch, number) in enumerate(zip(self.levels, num_deeper, strict=True), start=1):
            rows = [self._read.row(read, depth) for read in ranges[:number]]
            batch.fill(PackedRows.of(rows, offset))


class DraftGraphs(tree.DraftGraphs):
    """Drafts chains and trees of one builder by graphs.

    Args:
        runner: of the network; its storages have a scratch page.
        graphs: of the engine.
    """

    def __init__(self, runner: DraftModuleRunner, graphs: GraphCapturer) -> None:
        self._runner, self._graphs = runner, graphs.split(MAX_DRAFT_GRAPHS)
        self._captured: dict[_Shape, tuple[Graph, _Inputs] | None] = {}

    @override
    def draft(
        self,
        requests: Sequence[DraftRequest],
        read: ReadNodes,
        num_deeper: Sequence[int],
        grow: Grow,
    ) -> Tensor | None:
        ranges = list(map(self._runner.missing, requests))
        shape = _Shape.of(ranges, read)
        if shape is None:
            return None
        if shape not in self._captured:
            self._captured[shape] = self._capture(shape, grow)
        captured = self._captured[shape]
        if captured is None:
            return None
        graph, inputs = captured
        inputs.fill(ranges, num_deeper, self._runner.offset)
        drafts = self._graphs.replay(graph)
        self._runner.mark(ranges)
        return drafts[: len(requests)]

    def _capture(self, shape: _Shape, grow: Grow) -> tuple[Graph, _Inputs] | None:
        inputs = _Inputs(shape, self._runner)
        inputs.clear()
        graph = self._graphs.try_capture(shape, lambda: self._compute(inputs, grow))
        return None if graph is None else (graph, inputs)

    def _compute(self, inputs: _Inputs, grow: Grow) -> Tensor:
        runner, first = self._runner, inputs.first
        states = runner.states_at(first.tensors.get("states"), first.bucket.num_tokens)
        output = runner.network(states, runner.paged_pass(first.batch))
        return grow(output, _PagedLevels(runner, inputs).advance)


class _PagedLevels:
    """The levels of the drafts of a graph, as they grow."""

    def __init__(self, runner: DraftModuleRunner, inputs: _Inputs) -> None:
        self._runner, self._inputs = runner, inputs
        self._token_ids, self._states, self._words = list[Tensor](), list[Tensor](), list[Tensor]()

    def advance(
        self, depth: int, token_ids: Tensor, states: Tensor, visible: Tensor | None
    ) -> ModuleOutput:
        """One level of the draft trees, as in ``DraftModuleRunner.advance``."""
        rows, inputs = self._inputs.num_rows, self._inputs.levels[depth - 1]
        self._token_ids.append(token_ids.view(rows, -1))
        self._states.append(states.view(rows, len(states) // rows, states.shape[-1]))
        if inputs.bucket.num_tokens > len(token_ids):
            token_ids = torch.cat(self._token_ids, 1).flatten()
            states = torch.cat(self._states, 1).flatten(0, 1)
        inputs.batch.token_ids.copy_(token_ids)
        if visible is not None:
            width = words_per_node(inputs.bucket.num_tokens // rows)
            self._words.append(ancestor_words(visible))
            nodes = [pad(words, (0, width - words.shape[-1])) for words in self._words]
            words = torch.cat(nodes, 1).flatten()
            inputs.tensors["words"][: len(words)] = words
        return self._runner.network(states, self._runner.paged_pass(inputs.batch))


def ancestor_words(visible: Tensor) -> Tensor:
    """bool ``[rows, new, n]`` -> int64 ``[rows, new, ceil(n / 64)]``, as in ``PagedLayout``."""
    width = words_per_node(visible.shape[-1])
    padded = pad(visible.long(), (0, width * WORD_BITS - visible.shape[-1]))
    bits = torch.arange(WORD_BITS, device=visible.device)
    return (padded.unflatten(-1, (width, WORD_BITS)) << bits).sum(-1)
