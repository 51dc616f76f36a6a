"""Speculative decoding with a draft model: a smaller model of the same vocabulary drafts.

Leviathan et al., 2023 (arXiv 2211.17192); Chen et al., 2023 (arXiv 2302.01318). The draft model has
a KV cache over the target's pages (``speculative.draft_module``), so that forks, prefix hits and
rewinds of the target are valid for both. Drafts are greedy or sampled chains, or static trees of
ranks, and are built level by level. For chains the entries of drafted tokens are stored, so that
accepted tokens are not computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from typing_extensions import override

from forethought.config.drafters import DraftTargetDecodingConfig
from forethought.config.tree import TreeChoices
from forethought.kv.storage import DraftKvCache
from forethought.model.graph_capturer import GraphCapturer
from forethought.speculative.chain_source import GreedyChains
from forethought.speculative.draft_model import DraftModel
from forethought.speculative.draft_module import DraftModuleRunner
from forethought.speculative.drafter import (
    Drafter,
    DraftRequest,
    ResourceManager,
    ScheduledRequests,
    Target,
)
from forethought.speculative.tree import StaticTreeBuilder


class DraftTargetDrafter(Drafter):
    """Drafts with a model.

    Args:
        model: the draft model over a storage with as many pages as the target's.
        choices: a tree, or a chain.
        sampled: sample drafts of sampled requests from the draft model's distribution, under the
            request's own params, instead of taking the most probable token.
        graphs: captures CUDA graphs for it; None: it runs eagerly.
    """

    def __init__(
        self,
        model: DraftModel,
        choices: TreeChoices,
        *,
        sampled: bool = False,
        graphs: GraphCapturer | None = None,
    ) -> None:
        cache, backend = DraftKvCache(model.runner.storage), model.runner.lm.backend
        self._model = model
        self._runner = DraftModuleRunner(model, cache, None, backend, model.max_num_tokens, 0)
        self._runner.graphs = graphs
        self._sampled = sampled
        self._trees = StaticTreeBuilder(
            choices, model.runner.lm.device, self._is_sampled, stores_drafted=choices.is_chain
        )

    @classmethod
    def build(cls, config: DraftTargetDecodingConfig, target: Target) -> DraftTargetDrafter:
        """Load the draft model.

        Raises:
            ModelError: it cannot be loaded.
            ParameterError: its vocabulary is not the target's, or a rank is beyond it.
        """
        assert config.speculative_model is not None
        choices = TreeChoices.chain(config.max_draft_len)
        if config.draft_choices:
            choices = TreeChoices.parse(config.draft_choices)
            choices.expect_ranks_below(target.runner.lm.vocab_size, "draft_choices")
        model = DraftModel.load(config.speculative_model, target, quantization=config.quantization)
        is_sampled = config.draft_sampling == "sampled"
        has_graphs = model.runner.storage.has_scratch_page and model.forward_path == "fused"
        graphs = target.runner.graphs if has_graphs else None
        return cls(model, choices, sampled=is_sampled, graphs=graphs)

    @property
    @override
    def forward_path(self) -> str:
        return self._model.forward_path

    @property
    def draft_caches(self) -> Sequence[DraftKvCache]:
        """The draft model's keys and values."""
        return self._runner.draft_caches

    @cached_property
    @override
    def chain_source(self) -> GreedyChains | None:
        if not self._trees.is_chain:
            return None
        return GreedyChains(self._runner, self._trees, self._model.max_positions)

    def nodes(self, depth: int) -> int:
        """Nodes of the tree down to ``depth``."""
        return self._trees.nodes(depth)

    @override
    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        longest = self._model.max_positions
        requests = [
            request
            for request in scheduled_requests.generation_requests
            if request.max_nodes > 0 and len(request.tokens) + request.max_draft_len <= longest
        ]
        if requests:
            self._trees.grow(self._runner, requests)

    def _is_sampled(self, request: DraftRequest) -> bool:
        return self._sampled and not request.params.greedy
