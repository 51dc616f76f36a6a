"""Chains of a draft module as CUDA graphs: all levels of a draft are one launch.

The first level reads the known tokens that the module has not read, a few of each request; each
further one reads the token that the one before has drawn. All of them attend over pages, where the
eager way copies the prefix into a workspace once per draft. Padding is that of ``model.graphs``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forethought.model.attention.workspace import MAX_CATCH_UP
from forethought.model.batch import PackedRows, Row
from forethought.model.graphs import (
    MAX_GRAPH_TOKENS,
    Bucket,
    Graph,
    GraphCapturer,
    StaticBatch,
    capacity_of,
    padded_tokens,
)
from forethought.speculative.draft_module import DraftModule, DraftModuleRunner, TokenRange
from forethought.speculative.drafter import DraftRequest

MAX_CHAIN_GRAPHS = 24
"""Graphs of an engine's that are chains of a drafter."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of a graph.

    Attributes:
        first: bucket of the known tokens.
        num_rows: requests, with padding.
        depth: levels.
    """

    first: Bucket
    num_rows: int
    depth: int

    @classmethod
    def of(cls, ranges: Sequence[TokenRange], depth: int) -> _Shape | None:
        """The smallest one that holds the ranges; None: there is none."""
        sizes = [each.stop - each.start for each in ranges]
        total, longest = sum(sizes), max(sizes)
        if longest > MAX_CATCH_UP or total > MAX_GRAPH_TOKENS:
            return None
        num_rows, num_tokens = padded_tokens(len(ranges)), padded_tokens(total)
        if num_rows == num_tokens and total > len(ranges):
            # With as many rows as tokens a network takes each token for the last of its row.
            num_tokens = padded_tokens(num_tokens + 1)
        capacity = capacity_of(max(each.stop for each in ranges) + depth)
        return cls(Bucket(num_tokens, Bucket.tile_of(longest), capacity), num_rows, depth)


class _Inputs:
    """What a graph reads: the batches of its levels, and where the target's states lie."""

    def __init__(self, shape: _Shape, runner: DraftModuleRunner) -> None:
        assert runner.hidden_states is not None
        storage, states = runner.cache.storage, runner.hidden_states.storage
        no_state = np.full(shape.first.num_tokens, states.scratch_slot, np.int64)
        self.first = StaticBatch(shape.first, storage, shape.num_rows, {"states": no_state})
        level = Bucket(shape.num_rows, 1, shape.first.capacity)
        self.levels = [StaticBatch(level, storage) for _ in range(shape.depth - 1)]

    def clear(self) -> None:
        """Queue padding alone."""
        for batch in (self.first, *self.levels):
            batch.clear()

    def fill(self, ranges: Sequence[TokenRange], sizes: Sequence[int], offset: int) -> None:
        """Queue the copies of the ranges, with drafts of ``sizes`` tokens, falling."""
        rows = [each.row(1) for each in ranges]
        states: list[int] = []
        for each in ranges:
            states += each.table.slots(each.start - offset, each.stop - offset)
        self.first.fill(PackedRows.of(rows, offset), {"states": states})
        for depth, batch in enumerate(self.levels, start=1):
            rows = [
                Row([0], each.stop + depth - 1, each.table.prefix(each.stop + depth))
                for each, size in zip(ranges, sizes, strict=True)
                if size > depth
            ]
            batch.fill(PackedRows.of(rows, offset))


class ChainGraphs:
    """Drafts chains of the most probable tokens.

    Args:
        runner: of a module that reads the target's states, whose storages have a scratch page.
        graphs: of the engine.
    """

    def __init__(self, runner: DraftModuleRunner, graphs: GraphCapturer) -> None:
        self._runner, self._graphs = runner, graphs.split(MAX_CHAIN_GRAPHS)
        self._captured: dict[_Shape, tuple[Graph, _Inputs] | None] = {}

    def draft(self, requests: Sequence[DraftRequest], sizes: Sequence[int]) -> Tensor | None:
        """Draft; what the module had not read is stored.

        Args:
            requests: B of them.
            sizes: tokens of each request's draft, falling.

        Returns:
            int64 ``[sizes[0], B]``, ids of the target, overwritten by the next draft; a column has
            anything behind its size. None: there is no graph for these.
        """
        ranges = list(map(self._runner.missing, requests))
        shape = _Shape.of(ranges, sizes[0])
        if shape is None:
            return None
        if shape not in self._captured:
            self._captured[shape] = self._capture(shape)
        captured = self._captured[shape]
        if captured is None:
            return None
        graph, inputs = captured
        inputs.fill(ranges, sizes, self._runner.offset)
        tokens = self._graphs.replay(graph)
        self._runner.mark(ranges)
        return tokens[:, : len(requests)]

    def _capture(self, shape: _Shape) -> tuple[Graph, _Inputs] | None:
        inputs = _Inputs(shape, self._runner)
        inputs.clear()
        graph = self._graphs.try_capture(shape, lambda: self._compute(inputs))
        return None if graph is None else (graph, inputs)

    def _compute(self, inputs: _Inputs) -> Tensor:
        """All levels: int64 ``[depth, rows]``."""
        runner = self._runner
        assert runner.hidden_states is not None
        module: DraftModule = runner.network  # type: ignore[assignment]  # it reads hidden states
        stored = runner.hidden_states.storage.keys[0]
        states = module.enter(stored[inputs.first.tensors["states"], 0])
        output, drawn = module(states, runner.paged_pass(inputs.first.batch)), list[Tensor]()
        for level in inputs.levels:
            drawn.append(self._most_probable(output.logits))
            level.batch.token_ids.copy_(drawn[-1])
            output = module(output.states, runner.paged_pass(level.batch))
        return torch.stack([*drawn, self._most_probable(output.logits)])

    def _most_probable(self, logits: Tensor) -> Tensor:
        """``[rows, D]`` -> int64 ``[rows]``, ids of the target."""
        tokens, ids = logits.argmax(-1), self._runner.network.ids
        return tokens if ids is None else ids[tokens]
