"""Multi-token prediction: further layers of the target's architecture draft.

DeepSeek-V3 (2024, arXiv 2412.19437, section 2.2). The modules are used in one of two ways.

*Replay*: a single module predicts one token after the other, as EAGLE's head does; after the known
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
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from forethought.config.drafters import MTPDecodingConfig
from forethought.config.tree import TreeChoices
from forethought.errors import ParameterError
from forethought.kv.staging import upload
from forethought.kv.storage import DraftKvCache
from forethought.model import backends
from forethought.model.batch import Batch
from forethought.model.causal_lm import CausalLM
from forethought.model.hidden_states import FINAL, HiddenStateCache
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
    Target,
    readable,
    table_of,
)
from forethought.speculative.heads.mtp import (
    MtpDraftModule,
    load_modules,
    mtp_network,
)
from forethought.speculative.tree import StaticTreeBuilder, drafted_tokens


class MTPDrafter(Drafter):
    """Drafts with MTP modules.

    Args:
        runners: one, which is replayed, or module k with offset k for each level of a draft.
        hidden_states: of the target, after its final norm.
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
        by_graph = runners[0].graphs is not None and len(runners) > 1
        self._graphs = backends.cuda().module_graphs(runners) if by_graph else None
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
        for request, draft_tokens in zip(requests, tokens, strict=True):
            request.draft = Draft(draft_tokens)

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
        """The entries that some module has not read, as those of the first module; the root's at
        least.

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
            read = entries_of_level(ranges, level)
            is_last = level + 1 == len(runners)
            batch = runner.pack(read, num_logits if is_last else None)
            if num_logits and level:
                drafted = [tokens[: len(read)] for tokens in levels]
                batch = replace(batch, token_ids=_completed(batch, drafted))
            module: MtpDraftModule = runner.network  # type: ignore[assignment]
            outputs = module.read(states[: len(batch.token_ids)], runner.paged_pass(batch))
            runner.mark(read)
            states = outputs.states
            if num_logits:
                normed = outputs.normed if is_last else outputs.normed[_ends(batch)]
                levels.append(module.most_probable(normed))
        return levels


def entries_of_level(ranges: Sequence[TokenRange], level: int) -> list[TokenRange]:
    """The entries that the module of a level reads, of the drafts that are deep enough."""
    return [
        read._replace(start=read.start + level, stop=read.stop + level)
        for read in ranges
        if read.depth > level
    ]


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
    all_drafted = torch.cat(list(drafted))
    if len(ends) == len(batch.token_ids):  # single steps
        return (
            all_drafted[: len(ends)]
            if len(drafted) == 1
            else all_drafted[_index(source, all_drafted)]
        )
    return batch.token_ids.index_copy(
        0, _index(ends, all_drafted), all_drafted[_index(source, all_drafted)]
    )


def _index(ends: list[int], like: Tensor) -> Tensor:
    return upload(ends, like.device)
