"""Multi-token prediction: further layers of the target's architecture draft.

DeepSeek-V3 (2024, arXiv 2412.19437, section 2.2). The modules are used in one of two ways.

*Replay*: a single module predicts one token after the other, as EAGLE's head does; behind the known
tokens its input is its own hidden state and the token that it has drafted.

*Vanilla*: one module per level of the draft. Module k reads the hidden states of module k - 1 (of
the target for k = 1), each with the token k positions further on. With the text ABCD, the token E
that the target has sampled, and the target's hidden states H::

    module 1    (H_A, B) (H_B, C) (H_C, D) (H_D, E)  -> F
    module 2    (1_A, C) (1_B, D) (1_C, E) (1_D, F)  -> G
    module 3    (2_A, D) (2_B, E) (2_C, F) (2_D, G)  -> H

If a draft has more levels than there are modules, the modules are used in turn, each level with a
KV cache of its own. Entries of drafted tokens are marked as stored: where the token is accepted,
the entry is right; where it is not, the target writes another token to its slot, which invalidates
the entry. Tokens stay on the device until the drafts are complete, on a GPU until they are
verified; there all levels are one CUDA graph, where the modules are but a few tokens behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from forethought.backends.cuda.draft_graph import MAX_DRAFT_GRAPHS, known_bucket, state_slots
from forethought.backends.cuda.graphs import (
    Bucket,
    Graph,
    GraphCapturer,
    StaticBatch,
    padded_tokens,
)
from forethought.backends.cuda.paged_layout import Integers
from forethought.config.drafters import MTPDecodingConfig
from forethought.config.tree import TreeChoices
from forethought.errors import ParameterError
from forethought.kv.staging import upload
from forethought.kv.storage import DraftKvCache, HiddenStateCache
from forethought.model.batch import Batch, PackedRows
from forethought.model.causal_lm import FINAL, CausalLM
from forethought.speculative.chain_source import GreedyChains
from forethought.speculative.draft_module import (
    DraftModuleRunner,
    TokenRange,
    compute_in_chunks,
)
from forethought.speculative.drafter import (
    Draft,
    Drafter,
    DraftRequest,
    ResourceManager,
    ScheduledRequests,
    readable,
    table_of,
)
from forethought.speculative.heads.mtp import (
    MtpNetwork,
    NativeMtpNetwork,
    load_modules,
    mtp_network,
)
from forethought.speculative.registry import Target
from forethought.speculative.tree import StaticTreeBuilder, drafted_tokens


class MTPDrafter(Drafter):
    """Drafts with MTP modules.

    Args:
        runners: one, which is replayed, or module k with offset k for each level of a draft.
        hidden_states: of the target, behind its final norm.
        max_num_tokens: entries in one forward.
        max_draft_len: levels of the longest draft.
    """

    def __init__(
        self,
        runners: Sequence[DraftModuleRunner],
        hidden_states: HiddenStateCache,
        max_num_tokens: int,
        max_draft_len: int,
    ) -> None:
        assert hidden_states.layer_ids == (FINAL,)
        self._runners, self._hidden_states = list(runners), hidden_states
        self._max_num_tokens = max_num_tokens
        graphs = runners[0].graphs
        self._graphs = (
            None if graphs is None or len(runners) == 1 else ModuleGraphs(runners, graphs)
        )
        chain = TreeChoices.chain(max_draft_len)
        self._replayed = StaticTreeBuilder(chain, hidden_states.storage.device)

    @classmethod
    def build(cls, config: MTPDecodingConfig, target: Target) -> MTPDrafter:
        """Load the modules.

        Raises:
            ModelError: there are none, or they do not fit the target.
            ParameterError: the tokens around its thinking are not in its vocabulary.
        """
        _check_thinking(config, target.runner.lm)
        lm, storage = target.runner.lm, target.runner.storage
        directory = config.speculative_model or Path(lm.config.name_or_path)
        modules = load_modules(
            directory, lm, config.num_nextn_predict_layers, config.fed_back_state
        )
        networks = [mtp_network(module, lm) for module in modules]
        vanilla = config.use_mtp_vanilla or len(networks) > 1
        hidden_states = HiddenStateCache([FINAL], lm.hidden_size, storage)
        runners = [
            DraftModuleRunner.of_module(
                networks[level % len(networks)], hidden_states, target, offset=1 + level
            )
            for level in range(config.max_draft_len if vanilla else 1)
        ]
        return cls(runners, hidden_states, target.max_num_tokens, config.max_draft_len)

    @property
    @override
    def forward_path(self) -> str:
        return self._runners[0].network.forward_path

    @property
    def draft_caches(self) -> Sequence[DraftKvCache]:
        """The target's hidden states, and the KV cache of each module."""
        return (self._hidden_states, *(runner.cache for runner in self._runners))

    @cached_property
    @override
    def chain_source(self) -> GreedyChains | None:
        if len(self._runners) > 1:
            return None
        return GreedyChains(self._runners[0], self._replayed)

    @override
    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        requests = readable(scheduled_requests.generation_requests, self._hidden_states)
        if not requests:
            return
        if len(self._runners) == 1:
            self._replayed.grow(self._runners[0], requests)
            return
        requests.sort(key=_depth, reverse=True)  # so that complete drafts are the last rows
        sizes = list(map(_depth, requests))
        ranges = [self._missing(request) for request in requests]
        with torch.inference_mode():
            by_graph = None if self._graphs is None else self._graphs.draft(ranges)
            levels = self._levels(ranges) if by_graph is None else [by_graph]
            tokens = drafted_tokens(levels, sizes)
        for request, own in zip(requests, tokens, strict=True):
            request.draft = Draft(own)

    def _levels(self, ranges: Sequence[TokenRange]) -> list[Tensor]:
        """For each level, the tokens int64 ``[n, 1]`` of the first n drafts."""
        levels = compute_in_chunks(
            ranges,
            self._max_num_tokens,
            self._forward,
            held_back=len(self._runners),  # their tokens are drafted ones for some modules
        )
        return [tokens.unsqueeze(1) for tokens in levels]

    def _missing(self, request: DraftRequest) -> TokenRange:
        """What some module has not read, by the entries of the first module; the root's at least.

        Module k computes the entries k - 1 positions further on, for the same hidden states.
        """
        depth, stop = _depth(request), len(request.tokens)
        starts = [
            runner.missing_from(request) - level
            for level, runner in enumerate(self._runners[:depth])
        ]
        return TokenRange(request.tokens, table_of(request), min(stop - 1, *starts), stop, depth)

    def _forward(self, ranges: Sequence[TokenRange], num_logits: int) -> list[Tensor]:
        """Take ranges through all modules.

        Args:
            ranges: the deepest drafts first.
            num_logits: 0: these are not the last entries, and nothing is drafted.

        Returns:
            If drafting, for each level the tokens int64 ``[n]`` of the first n drafts.
        """
        levels: list[Tensor] = []
        states = self._runners[0].input_states(ranges)
        runners = self._runners[: ranges[0].depth]
        for level, runner in enumerate(runners):
            read = _of_level(ranges, level)
            is_last = level + 1 == len(runners)
            batch = runner.pack(read, num_logits if is_last else None)
            if num_logits and level:
                drafted = [tokens[: len(read)] for tokens in levels]
                batch = replace(batch, token_ids=_completed(batch, drafted))
            module: MtpNetwork | NativeMtpNetwork = runner.network  # type: ignore[assignment]
            left = module.read(states[: len(batch.token_ids)], runner.paged_pass(batch))
            runner.mark(read)
            states = left.states
            if num_logits:
                normed = left.normed if is_last else left.normed[_ends(batch)]
                levels.append(module.logits(normed).argmax(-1))
        return levels


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
        """Draft behind B ranges, the deepest drafts first; what is computed is stored.

        Returns:
            int64 ``[B, levels]``, overwritten by the next draft, with anything behind the depth of
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
            runner.mark(_of_level(ranges, level))
        return drafts[: len(ranges)]

    def _capture(
        self, bucket: Bucket, num_rows: int, depth: int
    ) -> tuple[Graph, list[StaticBatch]] | None:
        inputs = [self._inputs(bucket, num_rows, level, depth) for level in range(depth)]
        for each in inputs:
            each.clear()
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
        """Queue the copies of the inputs of all levels."""
        for level, (runner, batch) in enumerate(zip(self._runners, inputs, strict=False)):
            read = _of_level(ranges, level)
            num_outputs = 1 if level + 1 == len(inputs) else None
            packed = PackedRows.of([each.row(num_outputs) for each in read], runner.offset)
            sizes = [each.stop - each.start for each in read]
            if level:
                further = {"sources": _sources(sizes, level, num_rows)}
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
                sources, known = static.tensors["sources"], torch.cat(drawn)
                token_ids = known[sources.clamp(min=0)]
                token_ids = torch.where(sources < 0, batch.token_ids, token_ids)
                batch = replace(batch, token_ids=token_ids)
            module: MtpNetwork | NativeMtpNetwork = runner.network  # type: ignore[assignment]
            left = module.read(states, runner.paged_pass(batch))
            states, is_last = left.states, level + 1 == len(inputs)
            normed = left.normed if is_last else left.normed[first.tensors["ends"]]
            drawn.append(module.logits(normed).argmax(-1))
        return torch.stack(drawn, 1)


def _of_level(ranges: Sequence[TokenRange], level: int) -> list[TokenRange]:
    """What the module of a level reads, of the drafts that go as deep."""
    return [
        each._replace(start=each.start + level, stop=each.stop + level)
        for each in ranges
        if each.depth > level
    ]


def _sources(sizes: Sequence[int], level: int, num_rows: int) -> list[int]:
    """For each token of the rows of a level, which drafted one it is; -1: it is known.

    Args:
        sizes: tokens of each row, of which the last ``level`` are drafted.
        level: levels that are drafted.
        num_rows: drafted tokens of each level; they are numbered level by level.
    """
    found: list[int] = []
    for row, size in enumerate(sizes):
        count = min(level, size)
        found += [-1] * (size - count)
        found += [each * num_rows + row for each in range(level - count, level)]
    return found


def _depth(request: DraftRequest) -> int:
    return min(request.max_draft_len, request.max_nodes)


def _check_thinking(config: MTPDecodingConfig, lm: CausalLM) -> None:
    if not config.use_relaxed_acceptance_for_thinking:
        return
    for name in ("begin_thinking_phase_token", "end_thinking_phase_token"):
        if getattr(config, name) >= lm.vocab_size:
            raise ParameterError(
                f"{name} {getattr(config, name)} is no token of the target",
                f"its vocabulary has {lm.vocab_size}",
                "Set it to the id that this model writes there",
            )


def _ends(batch: Batch) -> Tensor:
    """int64 ``[rows]``: index of the last token of each row in the packed batch."""
    return upload([span.stop - 1 for span in batch.spans], batch.token_ids.device)


def _completed(batch: Batch, drafted: Sequence[Tensor]) -> Tensor:
    """int64 ``[T]``: the batch's tokens, the last of each row replaced by ``drafted``.

    Args:
        batch: of n rows.
        drafted: int64 ``[n]`` of each level so far.
    """
    ends: list[int] = []
    source: list[int] = []
    for row, span in enumerate(batch.spans):
        count = min(len(drafted), span.length)
        ends += range(span.stop - count, span.stop)
        source += [level * len(batch.spans) + row for level in range(len(drafted))][-count:]
    known = torch.cat(list(drafted))
    if len(ends) == len(batch.token_ids):  # single steps
        return known[: len(ends)] if len(drafted) == 1 else known[_index(source, known)]
    return batch.token_ids.index_copy(0, _index(ends, known), known[_index(source, known)])


def _index(ends: list[int], like: Tensor) -> Tensor:
    return upload(ends, like.device)
