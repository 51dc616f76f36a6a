"""A head that reads the target's hidden states drafts: EAGLE-1, 2 and 3.

Li et al., 2024 to 2025 (arXiv 2401.15077, 2406.16858, 2503.01840). The head catches up on what the
target has computed since the last draft, over all requests in one forward, and goes on from its own
guess: a chain, a static tree or EAGLE-2's dynamic tree. What is accepted it reads again, from the
target's states. Its drafts are its likeliest tokens, so they are verified as points. Knows nothing
about acceptance.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from forethought.config.drafters import EagleDecodingConfig
from forethought.errors import ModelError, ParameterError
from forethought.kv.draft_cache import DraftKvCache, HiddenStateCache
from forethought.model.causal_lm import FINAL, CausalLM
from forethought.speculative.draft_module import DraftModule, DraftModuleRunner
from forethought.speculative.drafter import Drafter, ResourceManager, ScheduledRequests
from forethought.speculative.dynamic_tree import DynamicTreeBuilder, StaticTreeBuilder, TreeBuilder
from forethought.speculative.heads.checkpoint import Checkpoint
from forethought.speculative.heads.eagle import EagleHead, EagleNetwork
from forethought.speculative.heads.eagle3 import Eagle3Head, Eagle3Network, Eagle3Traits
from forethought.speculative.registry import Target
from forethought.speculative.tree import TreeChoices

log = logging.getLogger(__name__)


class EagleDrafter(Drafter):
    """Drafts with a head that reads hidden states.

    Args:
        runner: of the head.
        trees: builds its drafts.
    """

    def __init__(self, runner: DraftModuleRunner, trees: TreeBuilder) -> None:
        self._runner, self._trees = runner, trees

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
        return cls(runner, _tree_builder(config, target, head.vocab_size))

    @property
    def draft_caches(self) -> Sequence[DraftKvCache]:
        """The target's states, and the head's keys and values."""
        return self._runner.draft_caches

    def nodes(self, depth: int) -> int:
        """Room that a draft of ``depth`` levels takes."""
        return self._trees.nodes(depth)

    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        """See :class:`Drafter`."""
        requests = [
            request
            for request in scheduled_requests.generation_requests
            if request.max_nodes > 0 and self._runner.can_read(request)
        ]
        if requests:
            self._trees.grow(self._runner, requests)


def _tree_builder(config: EagleDecodingConfig, target: Target, vocab_size: int) -> TreeBuilder:
    if config.use_dynamic_tree:
        assert config.dynamic_tree_max_topK is not None
        return DynamicTreeBuilder(config.dynamic_tree_max_topK, config.max_total_draft_tokens)
    choices = TreeChoices.parse(config.eagle_choices or [[0] * config.max_draft_len])
    choices.expect_ranks_below(vocab_size, "eagle_choices")
    return StaticTreeBuilder(choices, target.runner.lm.device)


def _load(
    directory: Path, config: EagleDecodingConfig, lm: CausalLM
) -> tuple[DraftModule, tuple[int, ...]]:
    """The head over pages, and where the states are taken that it reads.

    It runs in float32 if its config says so, otherwise in the target's dtype.
    """
    stored = Checkpoint.read(directory)
    said = stored.config.get("torch_dtype", stored.config.get("dtype"))
    dtype = torch.float32 if said == "float32" else lm.dtype
    if any("hidden_norm" in name for name in stored.tensors):
        third = Eagle3Head.load(directory)
        traits = third.traits
        _compare(directory, lm, vocab=third.config.vocab_size, hidden=traits.target_hidden_size)
        embedded = lm.embed(torch.zeros(1, dtype=torch.int64, device=lm.device))
        if not traits.own_embedding and third.config.hidden_size != embedded.shape[-1]:
            raise _misfit(directory, "it has no embedding of its own width")
        places = _places(directory, config, lm, traits)
        if len(places) != traits.captures:
            raise ParameterError(
                f"the head in {directory} reads {traits.captures} of the target's states",
                f"{len(places)} places are given: those entering layers {places}",
                "Set eagle3_layers_to_capture to the layers that it was trained with",
            )
        return Eagle3Network(third.to(lm.device, dtype).requires_grad_(False), lm), places
    if config.eagle3_layers_to_capture is not None:
        raise ParameterError(
            "eagle3_layers_to_capture has no meaning for this head",
            f"{directory} holds EAGLE-1's, which reads what leaves the final norm",
            "Leave it out",
        )
    first = EagleHead.load(directory)
    _compare(directory, lm, vocab=first.config.vocab_size, hidden=first.config.hidden_size)
    return EagleNetwork(first.to(lm.device, dtype).requires_grad_(False), lm), (FINAL,)


def _places(
    directory: Path, config: EagleDecodingConfig, lm: CausalLM, traits: Eagle3Traits
) -> tuple[int, ...]:
    """Places of ``model.taps``: a layer's output is what enters the next one."""
    found = traits.places_in(lm.num_layers)
    if config.eagle3_layers_to_capture is not None:
        outputs = config.eagle3_layers_to_capture
        found = tuple(FINAL if layer == -1 else layer + 1 for layer in outputs)
    if found is None:
        raise ParameterError(
            f"which of the target's states the head in {directory} reads is not known",
            "its config.json does not say, and the layers that the authors' code captures, 2, "
            f"L // 2 and L - 3, are not three different ones of L = {lm.num_layers}",
            "Set eagle3_layers_to_capture to the layers that it was trained with",
        )
    places = found
    log.info("the head in %s reads the states entering layers %s", directory, places)
    if max(places) > lm.num_layers:
        raise ParameterError(
            "the target has not the layers whose states are to be captured",
            f"it has {lm.num_layers}, and states entering layers {places} are wanted",
            "Set eagle3_layers_to_capture to layers of the target, or take its own head",
        )
    return places


def _compare(directory: Path, lm: CausalLM, vocab: int, hidden: int) -> None:
    if vocab > lm.vocab_size:
        raise _misfit(directory, f"it has {vocab} tokens, the target {lm.vocab_size}")
    if hidden != lm.hidden_size:
        raise _misfit(directory, f"it reads states of {hidden}, the target's are {lm.hidden_size}")


def _misfit(directory: Path, why: str) -> ModelError:
    return ModelError(
        f"the head in {directory} is another target's", why, "Use a head trained for this target"
    )
