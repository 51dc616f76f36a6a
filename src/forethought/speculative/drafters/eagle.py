"""EAGLE-1, 2 and 3: a head that reads the target's hidden states drafts.

Li et al., 2024 to 2025 (arXiv 2401.15077, 2406.16858, 2503.01840). The head reads what the target
has computed since the last draft, over all requests in one forward, and continues with its own
hidden states (``speculative.draft_module``): as a chain, a static tree or EAGLE-2's dynamic tree
(``speculative.dynamic_tree``). Drafts are the most probable tokens and verified as point masses.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from typing_extensions import override

from forethought.config.drafters import EagleDecodingConfig
from forethought.config.tree import TreeChoices
from forethought.errors import ModelError, ParameterError
from forethought.kv.storage import DraftKvCache
from forethought.model.causal_lm import CausalLM
from forethought.model.hidden_states import FINAL, HiddenStateCache
from forethought.speculative.chain_source import GreedyChains
from forethought.speculative.draft_module import DraftModule, DraftModuleRunner
from forethought.speculative.drafter import (
    Drafter,
    ResourceManager,
    ScheduledRequests,
    Target,
    readable,
)
from forethought.speculative.dynamic_tree import DynamicTreeBuilder
from forethought.speculative.heads.checkpoint import Checkpoint
from forethought.speculative.heads.eagle import EagleHead, eagle_network
from forethought.speculative.heads.eagle3 import Eagle3Head, Eagle3Traits, eagle3_network
from forethought.speculative.tree import StaticTreeBuilder, TreeBuilder

log = logging.getLogger(__name__)


class EagleDrafter(Drafter):
    """Drafts with a head that reads hidden states.

    Args:
        runner: of the head.
        hidden_states: of the target, as the head reads them.
        trees: builds its drafts.
    """

    def __init__(
        self, runner: DraftModuleRunner, hidden_states: HiddenStateCache, trees: TreeBuilder
    ) -> None:
        self._runner, self._hidden_states, self._trees = runner, hidden_states, trees

    @classmethod
    def build(cls, config: EagleDecodingConfig, target: Target) -> EagleDrafter:
        """Load the head.

        Raises:
            ModelError: it cannot be loaded, or is another target's.
            ParameterError: the layers to capture are not as many as it reads, or not the target's.
        """
        assert config.speculative_model is not None
        head, layers = _load(config.speculative_model, config, target.runner.lm)
        lm, pages = target.runner.lm, target.runner.storage
        hidden_states = HiddenStateCache(layers, lm.hidden_size, pages)
        runner = DraftModuleRunner.of_module(head, hidden_states, target)
        return cls(runner, hidden_states, _tree_builder(config, target, head.vocab_size))

    @property
    @override
    def forward_path(self) -> str:
        return self._runner.network.forward_path

    @property
    def draft_caches(self) -> Sequence[DraftKvCache]:
        """The target's states, and the head's keys and values."""
        return self._runner.draft_caches

    @cached_property
    @override
    def chain_source(self) -> GreedyChains | None:
        if not isinstance(self._trees, StaticTreeBuilder) or not self._trees.is_chain:
            return None
        return GreedyChains(self._runner, self._trees)

    def nodes(self, depth: int) -> int:
        """KV slots that a draft of ``depth`` levels needs."""
        return self._trees.nodes(depth)

    @override
    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        requests = readable(scheduled_requests.generation_requests, self._hidden_states)
        if requests:
            self._trees.grow(self._runner, requests)


def _tree_builder(config: EagleDecodingConfig, target: Target, vocab_size: int) -> TreeBuilder:
    if config.use_dynamic_tree:
        assert config.dynamic_tree_max_topK is not None
        return DynamicTreeBuilder(config.dynamic_tree_max_topK, config.max_total_draft_tokens)
    chain = TreeChoices.chain(config.max_draft_len)
    choices = TreeChoices.parse(config.eagle_choices) if config.eagle_choices else chain
    choices.expect_ranks_below(vocab_size, "eagle_choices")
    return StaticTreeBuilder(choices, target.runner.lm.device)


def _load(
    directory: Path, config: EagleDecodingConfig, lm: CausalLM
) -> tuple[DraftModule, tuple[int, ...]]:
    """The head, and the indices of the target's layers whose input states it reads.

    It runs in float32 if its config asks for that, otherwise in the target's dtype.
    """
    stored = Checkpoint.read(directory)
    stated = stored.config.get("torch_dtype", stored.config.get("dtype"))
    dtype = torch.float32 if stated == "float32" else lm.dtype
    if any("hidden_norm" in name for name in stored.tensors):
        third = Eagle3Head.load(directory)
        traits = third.traits
        _compare(directory, lm, vocab=third.config.vocab_size, hidden=traits.target_hidden_size)
        embedded = lm.embed(torch.zeros(1, dtype=torch.int64, device=lm.device))
        if not traits.own_embedding and third.config.hidden_size != embedded.shape[-1]:
            raise _misfit(directory, "it has no embedding of its own width")
        layers = _layers(directory, config, lm, traits)
        if len(layers) != traits.captures:
            raise ParameterError(
                f"the head in {directory} reads {traits.captures} of the target's states",
                f"{len(layers)} are given: those entering layers {layers}",
                "Set eagle3_layers_to_capture to the layers that it was trained with",
            )
        return eagle3_network(third.to(lm.device, dtype).requires_grad_(False), lm), layers
    if config.eagle3_layers_to_capture is not None:
        raise ParameterError(
            "eagle3_layers_to_capture has no meaning for this head",
            f"{directory} holds an EAGLE-1 head, which reads the output of the final norm",
            "Leave it out",
        )
    first = EagleHead.load(directory)
    _compare(directory, lm, vocab=first.config.vocab_size, hidden=first.config.hidden_size)
    return eagle_network(first.to(lm.device, dtype).requires_grad_(False), lm), (FINAL,)


def _layers(
    directory: Path, config: EagleDecodingConfig, lm: CausalLM, traits: Eagle3Traits
) -> tuple[int, ...]:
    """Indices of the layers whose input is read; FINAL: the output of the final norm."""
    layer_ids = traits.layer_ids_in(lm.num_layers)
    if config.eagle3_layers_to_capture is not None:
        outputs = config.eagle3_layers_to_capture
        layer_ids = tuple(FINAL if layer == -1 else layer + 1 for layer in outputs)
    if layer_ids is None:
        raise ParameterError(
            f"which of the target's states the head in {directory} reads is not known",
            "its config.json does not say, and the layers that the authors' code captures, 2, "
            f"L // 2 and L - 3, are not three different ones of L = {lm.num_layers}",
            "Set eagle3_layers_to_capture to the layers that it was trained with",
        )
    log.info("the head in %s reads the states entering layers %s", directory, layer_ids)
    if max(layer_ids) > lm.num_layers:
        raise ParameterError(
            "the target lacks layers whose states are to be captured",
            f"it has {lm.num_layers}, and the head reads the states entering layers {layer_ids}",
            "Set eagle3_layers_to_capture to layers of the target, or take its own head",
        )
    return layer_ids


def _compare(directory: Path, lm: CausalLM, vocab: int, hidden: int) -> None:
    if vocab > lm.vocab_size:
        raise _misfit(directory, f"it has {vocab} tokens, the target {lm.vocab_size}")
    if hidden != lm.hidden_size:
        raise _misfit(
            directory, f"it reads states of width {hidden}, the target's have {lm.hidden_size}"
        )


def _misfit(directory: Path, why: str) -> ModelError:
    return ModelError(
        f"the head in {directory} is another target's", why, "Use a head trained for this target"
    )
