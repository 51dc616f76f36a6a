"""Inference-time methods: one controller per file, found through a table of names.

A method is created by name, ``create("dynasor", certainty_threshold=2)``; one inside another is
given by name too, ``create("majority_vote", generation_controller="dynasor")``, or as a mapping
with its settings, or as a controller. Nothing here needs torch.

``create`` and ``describe`` are for Python and the command line: they take ``"module:Class"`` and
plug-ins too. Names in requests and files resolve in a ``closed`` table.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from forethought.config.registry import Registry
from forethought.methods.table import REWARDS, Method, MethodTable

if TYPE_CHECKING:
    from forethought.methods.adaptive_compute import AdaptiveComputeController
    from forethought.methods.archon import ArchonController
    from forethought.methods.beam_search import BeamSearchController
    from forethought.methods.best_of_n import BestOfNController
    from forethought.methods.budget_forcing import BudgetForcingController
    from forethought.methods.budget_vote import BudgetVoteController
    from forethought.methods.compute_optimal import ComputeOptimalController
    from forethought.methods.deepconf import DeepConfController, OnlineDeepConfController
    from forethought.methods.drag import DRAGController
    from forethought.methods.dvts import DVTSController
    from forethought.methods.dynasor import DynasorGenerationController
    from forethought.methods.fork_think import ForkThinkController
    from forethought.methods.hogwild import HogwildController, HogwildTurnsController
    from forethought.methods.iterdrag import IterDRAGController
    from forethought.methods.majority_vote import MajorityVoteController
    from forethought.methods.mcts import MCTSController
    from forethought.methods.no_thinking import NoThinkingController
    from forethought.methods.parallel_thinking import ParallelThinkingController
    from forethought.methods.particle_filtering import ParticleFilteringController
    from forethought.methods.particle_gibbs import ParticleGibbsController
    from forethought.methods.parts.threads import ThreadFormat
    from forethought.methods.repeated_sampling import RepeatedSamplingController
    from forethought.methods.self_refine import SelfRefineController
    from forethought.methods.sequential_revision import SequentialRevisionController
    from forethought.methods.sleep_time import SleepMemory, SleepTimeController
    from forethought.methods.spct import SPCTRewardController
    from forethought.methods.specreason import SpecReasonController
    from forethought.methods.tree_of_thoughts import TreeOfThoughtsController
    from forethought.scaffolding.controller import Controller

_REGISTRY = Registry(
    "method",
    {
        "plain": "forethought.scaffolding.controller:NativeGenerationController",
        "dynasor": "forethought.methods.dynasor:DynasorGenerationController",
        "majority_vote": "forethought.methods.majority_vote:MajorityVoteController",
        "best_of_n": "forethought.methods.best_of_n:BestOfNController",
        "repeated_sampling": "forethought.methods.repeated_sampling:RepeatedSamplingController",
        "budget_forcing": "forethought.methods.budget_forcing:BudgetForcingController",
        "no_thinking": "forethought.methods.no_thinking:NoThinkingController",
        "first_answer": "forethought.methods.first_answer:FirstAnswerController",
        "budget_vote": "forethought.methods.budget_vote:BudgetVoteController",
        "beam_search": "forethought.methods.beam_search:BeamSearchController",
        "dvts": "forethought.methods.dvts:DVTSController",
        "particle_filtering": "forethought.methods.particle_filtering:ParticleFilteringController",
        "particle_gibbs": "forethought.methods.particle_gibbs:ParticleGibbsController",
        "mcts": "forethought.methods.mcts:MCTSController",
        "tree_of_thoughts": "forethought.methods.tree_of_thoughts:TreeOfThoughtsController",
        "compute_optimal": "forethought.methods.compute_optimal:ComputeOptimalController",
        "deepconf": "forethought.methods.deepconf:DeepConfController",
        "deepconf_online": "forethought.methods.deepconf:OnlineDeepConfController",
        "self_refine": "forethought.methods.self_refine:SelfRefineController",
        "sequential_revision": (
            "forethought.methods.sequential_revision:SequentialRevisionController"
        ),
        "genrm": "forethought.rewards.genrm_controller:GenRMController",
        "checker": "forethought.rewards.checker_controller:CheckerController",
        "judge": "forethought.rewards.judge:JudgeRewardController",
        "compare": "forethought.rewards.judge:CompareRewardController",
        "confidence": "forethought.rewards.confidence:ConfidenceRewardController",
        "specreason": "forethought.methods.specreason:SpecReasonController",
        "adaptive_compute": "forethought.methods.adaptive_compute:AdaptiveComputeController",
        "fork_think": "forethought.methods.fork_think:ForkThinkController",
        "spct": "forethought.methods.spct:SPCTRewardController",
        "archon": "forethought.methods.archon:ArchonController",
        "drag": "forethought.methods.drag:DRAGController",
        "iterdrag": "forethought.methods.iterdrag:IterDRAGController",
        "hogwild": "forethought.methods.hogwild:HogwildController",
        "hogwild_turns": "forethought.methods.hogwild:HogwildTurnsController",
        "parallel_thinking": ("forethought.methods.parallel_thinking:ParallelThinkingController"),
        "sleep_time": "forethought.methods.sleep_time:SleepTimeController",
    },
)
_OPEN = MethodTable(_REGISTRY)

_HOMES = {
    "ParticleFilteringController": "particle_filtering",
    "ParticleGibbsController": "particle_gibbs",
    "MCTSController": "mcts",
    "TreeOfThoughtsController": "tree_of_thoughts",
    "BeamSearchController": "beam_search",
    "DVTSController": "dvts",
    "BestOfNController": "best_of_n",
    "BudgetForcingController": "budget_forcing",
    "BudgetVoteController": "budget_vote",
    "ComputeOptimalController": "compute_optimal",
    "DeepConfController": "deepconf",
    "DynasorGenerationController": "dynasor",
    "MajorityVoteController": "majority_vote",
    "RepeatedSamplingController": "repeated_sampling",
    "NoThinkingController": "no_thinking",
    "OnlineDeepConfController": "deepconf",
    "SelfRefineController": "self_refine",
    "SequentialRevisionController": "sequential_revision",
    "SpecReasonController": "specreason",
    "AdaptiveComputeController": "adaptive_compute",
    "FirstAnswerController": "first_answer",
    "ForkThinkController": "fork_think",
    "SPCTRewardController": "spct",
    "ArchonController": "archon",
    "DRAGController": "drag",
    "HogwildController": "hogwild",
    "HogwildTurnsController": "hogwild",
    "IterDRAGController": "iterdrag",
    "ParallelThinkingController": "parallel_thinking",
    "SleepMemory": "sleep_time",
    "SleepTimeController": "sleep_time",
    "ThreadFormat": "parallel_thinking",
}

__all__ = [
    "REWARDS",
    "AdaptiveComputeController",
    "ArchonController",
    "BeamSearchController",
    "BestOfNController",
    "BudgetForcingController",
    "BudgetVoteController",
    "ComputeOptimalController",
    "DRAGController",
    "DVTSController",
    "DeepConfController",
    "DynasorGenerationController",
    "FirstAnswerController",
    "ForkThinkController",
    "HogwildController",
    "HogwildTurnsController",
    "IterDRAGController",
    "MCTSController",
    "MajorityVoteController",
    "Method",
    "MethodTable",
    "NoThinkingController",
    "OnlineDeepConfController",
    "ParallelThinkingController",
    "ParticleFilteringController",
    "ParticleGibbsController",
    "RepeatedSamplingController",
    "SPCTRewardController",
    "SelfRefineController",
    "SequentialRevisionController",
    "SleepMemory",
    "SleepTimeController",
    "SpecReasonController",
    "ThreadFormat",
    "TreeOfThoughtsController",
    "closed",
    "create",
    "describe",
    "names",
    "open_table",
    "shipped",
    "tags",
    "with_inner",
    "worker_tags",
]


def open_table() -> MethodTable:
    """The methods that Python and the command line name: shipped ones, plug-ins, module:Class."""
    return _OPEN


def closed(allowed: Iterable[str] = ()) -> MethodTable:
    """The methods that are shipped and those that are allowed by name; no others have a name.

    All are imported now, and nothing is imported for a name later.

    Args:
        allowed: names of plug-ins, or ``"module:Class"``, which then serves as the name.

    Raises:
        UnknownNameError: an allowed name does not exist.
        UsageError: one cannot be imported.
    """
    return MethodTable(_REGISTRY.closed(allowed))


@functools.cache
def shipped() -> MethodTable:
    """The closed table of the methods that are shipped."""
    return closed()


def names() -> list[str]:
    """The names of all methods, those of plug-ins included."""
    return _OPEN.names()


def describe(name: str) -> Method:
    """What a method does and its settings; raises ``UnknownNameError`` for an unknown name."""
    return _OPEN.describe(name)


def create(spec: str | Controller, **settings: Any) -> Controller:
    """A controller.

    Args:
        spec: the name of a method, ``"module:Class"``, or a controller, which is returned
            unchanged.
        **settings: parameters of its class; ``generation_controller`` may be a name, or a mapping
            of ``method`` and its settings.

    Raises:
        UnknownNameError: there is no such method.
        ParameterError: a setting that the method does not have, or one that is missing.
    """
    return _OPEN.create(spec, **settings)


def worker_tags(controller: Controller) -> list[Any]:
    """The worker tags of a controller and of those inside it.

    For workers of some tasks alone; ``ScaffoldingLlm(controller, worker)`` gives all to one.
    """
    tags: list[Any] = []
    for member in with_inner(controller):
        tags += [*type(member).WorkerTag, *getattr(member, "worker_tags", ())]
    return tags


def with_inner(controller: Controller) -> Iterator[Controller]:
    """A controller and those inside it, at any depth."""
    yield controller
    for inner in controller.inner_controllers():
        yield from with_inner(inner)


def tags() -> list[str]:
    """The worker tags of all methods, by value."""
    return _OPEN.tags()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
