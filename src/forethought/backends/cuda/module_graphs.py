"""Drafts of several MTP modules as CUDA graphs: all levels are one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from forethought.backends.cuda.draft_graph import MAX_DRAFT_GRAPHS, known_bucket, state_slots
from forethought.backends.cuda.graphs import Bucket, StaticBatch, padded_tokens
from forethought.model.attention.paged_layout import Integers
from forethought.model.batch import PackedRows
from forethought.model.graph_capturer import Graph, GraphCapturer
from forethought.speculative.draft_module import DraftModuleRunner, TokenRange
from forethought.speculative.drafters.mtp import entries_of_level
from forethought.speculative.heads.mtp import MtpDraftModule


class ModuleGraphs:
    """Drafts of several modules as CUDA graphs: all levels are one launch.

    What changes from step to step, beside the batch of each level: where the target's states lie,
    the last token of each row, and which tokens of a level are drafted ones; padding is that of
    ``backends.cuda.graphs``.

    Args:
        runners: module k with offset k for each level of a draft.
        graphs: of the engine.
    """

    def __init__(self, runners: Sequence[DraftModuleRunner], graphs: GraphCapturer) -> None:
        self._runners, self._graphs = list(runners), graphs.split(MAX_DRAFT_GRAPHS)
        self._captured: dict[tuple[Bucket, int, int], tuple[Graph, list[StaticBatch]] | None] = {}

    def draft(self, ranges: Sequence[TokenRange]) -> Tensor | None:
        """Draft after B ranges, the deepest drafts first; what is computed is stored.

        Returns:
            int64 ``[B, levels]``, overwritten by the next draft, with anything after the depth of
            a draft. None: there is no graph for these.
        """
        depth, bucket = ranges[0].depth, known_bucket(ranges, ranges[0].depth)
        if bucket is None:
            return None
        shape = bucket, padded_tokens(len(ranges)), depth
        if shape not in self._captured:
            self._captured[shape] = self._capture(*shape)
        captured = self._captured[shape]
        if captured is None:
            return None
        graph, inputs = captured
        self._fill(inputs, ranges, shape[1])
        drafts = self._graphs.replay(graph)
        for level, runner in enumerate(self._runners[:depth]):
            runner.mark(entries_of_level(ranges, level))
        return drafts[: len(ranges)]

    def _capture(
        self, bucket: Bucket, num_rows: int, depth: int
    ) -> tuple[Graph, list[StaticBatch]] | None:
        inputs = [self._inputs(bucket, num_rows, level, depth) for level in range(depth)]
        for buffer in inputs:
            buffer.clear()
        graph = self._graphs.try_capture(
            (bucket, num_rows, depth), lambda: self._compute(inputs, num_rows)
        )
        return None if graph is None else (graph, inputs)

    def _inputs(self, bucket: Bucket, num_rows: int, level: int, depth: int) -> StaticBatch:
        """The batch of a level; the last one's has one output of each row, the others' all."""
        runner, further = self._runners[level], dict[str, Integers]()
        if level:
            further["sources"] = np.full(bucket.num_tokens, -1, np.int64)
        else:
            assert runner.hidden_states is not None
            no_state = runner.hidden_states.storage.scratch_slot
            further["states"] = np.full(bucket.num_tokens, no_state, np.int64)
            further["ends"] = np.zeros(num_rows, np.int64)
        num_outputs = num_rows if level + 1 == depth else None
        return StaticBatch(bucket, runner.cache.storage, num_outputs, further)

    def _fill(
        self, inputs: Sequence[StaticBatch], ranges: Sequence[TokenRange], num_rows: int
    ) -> None:
        for level, (runner, batch) in enumerate(zip(self._runners, inputs, strict=False)):
            read = entries_of_level(ranges, level)
            num_outputs = 1 if level + 1 == len(inputs) else None
            packed = PackedRows.of([row.row(num_outputs) for row in read], runner.offset)
            sizes = [row.stop - row.start for row in read]
            if level:
                further = {"sources": drafted_sources(sizes, level, num_rows)}
            else:
                ends = [stop - 1 for stop in accumulate(sizes)]
                further = {"states": state_slots(ranges, runner.offset), "ends": ends}
            batch.fill(packed, further)

    def _compute(self, inputs: Sequence[StaticBatch], num_rows: int) -> Tensor:
        """int64 ``[num_rows, levels]``: what is captured."""
        first, drawn = inputs[0], list[Tensor]()
        states = self._runners[0].states_at(first.tensors["states"], first.bucket.num_tokens)
        for level, (runner, static) in enumerate(zip(self._runners, inputs, strict=False)):
            batch = static.batch
            if level:
                sources, all_drawn = static.tensors["sources"], torch.cat(drawn)
                token_ids = all_drawn[sources.clamp(min=0)]
                token_ids = torch.where(sources < 0, batch.token_ids, token_ids)
                batch = replace(batch, token_ids=token_ids)
            module: MtpDraftModule = runner.network  # type: ignore[assignment]
            output = module.read(states, runner.paged_pass(batch))
            states, is_last = output.states, level + 1 == len(inputs)
            normed = output.normed if is_last else output.normed[first.tensors["ends"]]
            drawn.append(module.most_probable(normed))
        return torch.stack(drawn, 1)


def drafted_sources(sizes: Sequence[int], level: int, num_rows: int) -> list[int]:
    """For each token of the rows of a level, which drafted one it is; -1: it is known.

    Args:
        sizes: tokens of each row, of which the last ``level`` are drafted.
        level: levels that are drafted.
        num_rows: drafted tokens of each level; they are numbered level by level.
    """
    index: list[int] = []
    for row, size in enumerate(sizes):
        count = min(level, size)
        index += [-1] * (size - count)
        index += [source_level * num_rows + row for source_level in range(level - count, level)]
    return index
