"""Inference-time methods as controllers, and the driver that runs them on workers.

The names are those of ``tensorrt_llm.scaffolding`` and some of our own, loaded at first use. Only
``EngineWorker`` and ``RewardWorker`` need torch; without it ``import *`` leaves them out.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from forethought.lazy_names import LazyNames

_HOMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "answers.answer_extraction": (
            "extract_answer_from_boxed",
            "extract_answer_with_regex",
        ),
        "answers.answers": (
            "MathEquivalence",
            "get_digit_majority_vote_result",
        ),
        "compat.tensorrt_llm.benchmark": (
            "ScaffoldingBenchRequest",
            "async_scaffolding_benchmark",
        ),
        "compat.tensorrt_llm.task_collection": (
            "ChatTokenCounter",
            "GenerationTokenCounter",
            "QueryCollector",
            "TaskCollection",
            "TaskMetricsCollector",
            "TaskTimer",
            "with_task_collection",
        ),
        "methods.best_of_n": ("BestOfNController",),
        "methods.majority_vote": ("MajorityVoteController",),
        "methods.parts.tool_controller": ("ChatWithMCPController",),
        "rewards.checker_controller": ("CheckerController",),
        "rewards.confidence": ("ConfidenceRewardController",),
        "rewards.genrm_controller": ("GenRMController",),
        "rewards.judge": (
            "CompareRewardController",
            "JudgeRewardController",
        ),
        "rewards.prm_controller": ("PRMController",),
        "scaffolding.attention_group": ("AttentionGroup",),
        "scaffolding.base_task": (
            "ComputeTask",
            "MCPCallTask",
            "MCPToolListTask",
            "RewardTask",
            "Task",
            "TaskStatus",
        ),
        "scaffolding.budget": ("Budget",),
        "scaffolding.controller": (
            "Controller",
            "NativeChatController",
            "NativeGenerationController",
        ),
        "scaffolding.execution_scope": (
            "ExecutionScope",
            "current_scope",
        ),
        "scaffolding.messages": (
            "AssistantMessage",
            "OpenAIToolDescription",
            "RoleMessage",
            "SystemMessage",
            "ToolDescription",
            "ToolMessage",
            "UserMessage",
        ),
        "scaffolding.parallel": (
            "AsCompleted",
            "Branch",
            "FirstDone",
            "ParallelProcess",
        ),
        "scaffolding.result": (
            "Delta",
            "ScaffoldingOutput",
            "ScaffoldingResult",
            "Stage",
            "StreamEvent",
        ),
        "scaffolding.reward_controller": ("NativeRewardController",),
        "scaffolding.scaffolding_llm": ("ScaffoldingLlm",),
        "scaffolding.session_task": (
            "RestoreSessionTask",
            "SaveSessionTask",
        ),
        "scaffolding.task": (
            "ChatTask",
            "GenerationTask",
            "StreamGenerationTask",
        ),
        "scaffolding.trace": (
            "Prices",
            "Trace",
        ),
        "scaffolding.worker": ("Worker",),
        "tracing.trace_replay": ("replay",),
        "workers.local": (
            "EngineWorker",
            "TRTLLMWorker",
        ),
        "workers.mcp": ("MCPWorker",),
        "workers.openai": (
            "OpenaiWorker",
            "TRTOpenaiWorker",
        ),
        "workers.reward": ("RewardWorker",),
        "workers.reward_server": ("RewardServerWorker",),
        "workers.scripted": (
            "Reply",
            "ScriptedWorker",
        ),
        "workers.upstream": ("UpstreamWorker",),
    }
)
"""Module below ``forethought`` -> its names that this package exports."""

_NAMES = LazyNames(__name__, _HOMES, submodules=("sampling",))
__all__ = _NAMES.public
if not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")):
    __all__ = [
        name for name in __all__ if name not in ("EngineWorker", "RewardWorker", "TRTLLMWorker")
    ]


def __getattr__(name: str) -> Any:
    return _NAMES.load(name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
