"""Inference-time methods as controllers, and the machinery that runs them on workers.

The names are those of ``tensorrt_llm.scaffolding`` and some of our own. They are loaded when first
used; none but ``EngineWorker`` and ``RewardWorker`` needs torch, and without it ``import *`` leaves
those out.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forethought.methods.best_of_n import BestOfNController
    from forethought.methods.majority_vote import MajorityVoteController
    from forethought.scaffolding import sampling
    from forethought.scaffolding.answer_extraction import (
        extract_answer_from_boxed,
        extract_answer_with_regex,
    )
    from forethought.scaffolding.answers import (
        MathEquivalence,
        get_digit_majority_vote_result,
    )
    from forethought.scaffolding.attention_group import AttentionGroup
    from forethought.scaffolding.benchmark import (
        ScaffoldingBenchRequest,
        async_scaffolding_benchmark,
    )
    from forethought.scaffolding.budget import Budget
    from forethought.scaffolding.checker_controller import CheckerController
    from forethought.scaffolding.confidence import ConfidenceRewardController
    from forethought.scaffolding.controller import (
        Controller,
        NativeChatController,
        NativeGenerationController,
        NativeRewardController,
    )
    from forethought.scaffolding.execution_scope import ExecutionScope, current_scope
    from forethought.scaffolding.genrm_controller import GenRMController
    from forethought.scaffolding.judge import CompareRewardController, JudgeRewardController
    from forethought.scaffolding.messages import (
        AssistantMessage,
        OpenAIToolDescription,
        RoleMessage,
        SystemMessage,
        ToolDescription,
        ToolMessage,
        UserMessage,
    )
    from forethought.scaffolding.parallel import AsCompleted, Branch, FirstDone, ParallelProcess
    from forethought.scaffolding.prm_controller import PRMController
    from forethought.scaffolding.result import (
        Delta,
        ScaffoldingOutput,
        ScaffoldingResult,
        Stage,
        StreamEvent,
    )
    from forethought.scaffolding.scaffolding_llm import ScaffoldingLlm
    from forethought.scaffolding.task import (
        ChatTask,
        ComputeTask,
        GenerationTask,
        MCPCallTask,
        MCPToolListTask,
        RestoreSessionTask,
        RewardTask,
        SaveSessionTask,
        StreamGenerationTask,
        Task,
        TaskStatus,
    )
    from forethought.scaffolding.task_collection import (
        ChatTokenCounter,
        GenerationTokenCounter,
        QueryCollector,
        TaskCollection,
        TaskMetricsCollector,
        TaskTimer,
        with_task_collection,
    )
    from forethought.scaffolding.tool_controller import ChatWithMCPController
    from forethought.scaffolding.trace import Prices, Trace
    from forethought.scaffolding.trace_replay import replay
    from forethought.scaffolding.worker import Worker
    from forethought.scaffolding.workers.local import EngineWorker, TRTLLMWorker
    from forethought.scaffolding.workers.mcp import MCPWorker
    from forethought.scaffolding.workers.openai import OpenaiWorker, TRTOpenaiWorker
    from forethought.scaffolding.workers.reward import RewardWorker
    from forethought.scaffolding.workers.reward_server import RewardServerWorker
    from forethought.scaffolding.workers.scripted import Reply, ScriptedWorker
    from forethought.scaffolding.workers.upstream import UpstreamWorker

_HOMES = {
    "ScaffoldingLlm": "scaffolding_llm",
    "ScaffoldingResult": "result",
    "ScaffoldingOutput": "result",
    "StreamEvent": "result",
    "Delta": "result",
    "Stage": "result",
    "Prices": "trace",
    "Trace": "trace",
    "replay": "trace_replay",
    "Budget": "budget",
    "ScaffoldingBenchRequest": "benchmark",
    "async_scaffolding_benchmark": "benchmark",
    "ExecutionScope": "execution_scope",
    "current_scope": "execution_scope",
    "Controller": "controller",
    "NativeGenerationController": "controller",
    "NativeChatController": "controller",
    "NativeRewardController": "controller",
    "PRMController": "prm_controller",
    "ConfidenceRewardController": "confidence",
    "JudgeRewardController": "judge",
    "CompareRewardController": "judge",
    "MajorityVoteController": "controller",
    "BestOfNController": "controller",
    "ParallelProcess": "parallel",
    "Branch": "parallel",
    "AsCompleted": "parallel",
    "FirstDone": "parallel",
    "AttentionGroup": "attention_group",
    "Task": "task",
    "TaskStatus": "task",
    "CheckerController": "checker_controller",
    "GenRMController": "genrm_controller",
    "GenerationTask": "task",
    "StreamGenerationTask": "task",
    "ChatTask": "task",
    "RewardTask": "task",
    "ComputeTask": "task",
    "MCPCallTask": "task",
    "MCPToolListTask": "task",
    "ChatWithMCPController": "tool_controller",
    "MCPWorker": "workers.mcp",
    "SaveSessionTask": "task",
    "RestoreSessionTask": "task",
    "RoleMessage": "messages",
    "SystemMessage": "messages",
    "UserMessage": "messages",
    "AssistantMessage": "messages",
    "ToolMessage": "messages",
    "ToolDescription": "messages",
    "OpenAIToolDescription": "messages",
    "Worker": "worker",
    "ScriptedWorker": "workers.scripted",
    "Reply": "workers.scripted",
    "OpenaiWorker": "workers.openai",
    "TRTOpenaiWorker": "workers.openai",
    "UpstreamWorker": "workers.upstream",
    "EngineWorker": "workers.local",
    "TRTLLMWorker": "workers.local",
    "RewardWorker": "workers.reward",
    "RewardServerWorker": "workers.reward_server",
    "TaskCollection": "task_collection",
    "with_task_collection": "task_collection",
    "GenerationTokenCounter": "task_collection",
    "ChatTokenCounter": "task_collection",
    "TaskTimer": "task_collection",
    "QueryCollector": "task_collection",
    "TaskMetricsCollector": "task_collection",
    "MathEquivalence": "answers",
    "extract_answer_from_boxed": "answer_extraction",
    "extract_answer_with_regex": "answer_extraction",
    "get_digit_majority_vote_result": "answers",
}

__all__ = [
    "AsCompleted",
    "AssistantMessage",
    "AttentionGroup",
    "BestOfNController",
    "Branch",
    "Budget",
    "ChatTask",
    "ChatTokenCounter",
    "ChatWithMCPController",
    "CheckerController",
    "CompareRewardController",
    "ComputeTask",
    "ConfidenceRewardController",
    "Controller",
    "Delta",
    "ExecutionScope",
    "FirstDone",
    "GenRMController",
    "GenerationTask",
    "GenerationTokenCounter",
    "JudgeRewardController",
    "MCPCallTask",
    "MCPToolListTask",
    "MCPWorker",
    "MajorityVoteController",
    "MathEquivalence",
    "NativeChatController",
    "NativeGenerationController",
    "NativeRewardController",
    "OpenAIToolDescription",
    "OpenaiWorker",
    "PRMController",
    "ParallelProcess",
    "Prices",
    "QueryCollector",
    "Reply",
    "RestoreSessionTask",
    "RewardServerWorker",
    "RewardTask",
    "RoleMessage",
    "SaveSessionTask",
    "ScaffoldingBenchRequest",
    "ScaffoldingLlm",
    "ScaffoldingOutput",
    "ScaffoldingResult",
    "ScriptedWorker",
    "Stage",
    "StreamEvent",
    "StreamGenerationTask",
    "SystemMessage",
    "TRTOpenaiWorker",
    "Task",
    "TaskCollection",
    "TaskMetricsCollector",
    "TaskStatus",
    "TaskTimer",
    "ToolDescription",
    "ToolMessage",
    "Trace",
    "UpstreamWorker",
    "UserMessage",
    "Worker",
    "async_scaffolding_benchmark",
    "current_scope",
    "extract_answer_from_boxed",
    "extract_answer_with_regex",
    "get_digit_majority_vote_result",
    "replay",
    "sampling",
    "with_task_collection",
]
if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
    __all__ += ["EngineWorker", "RewardWorker", "TRTLLMWorker"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f".{_HOMES[name]}", __name__)
    except ModuleNotFoundError as error:
        from forethought.errors import DependencyError

        raise DependencyError.missing(error.name or "torch", name, "local") from error
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
