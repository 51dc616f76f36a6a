"""Public names for editors and type checkers; ``__init__.py`` loads them when first used."""

from forethought.answers.answer_extraction import (
    extract_answer_from_boxed as extract_answer_from_boxed,
)
from forethought.answers.answer_extraction import (
    extract_answer_with_regex as extract_answer_with_regex,
)
from forethought.answers.answers import MathEquivalence as MathEquivalence
from forethought.answers.answers import (
    get_digit_majority_vote_result as get_digit_majority_vote_result,
)
from forethought.compat.tensorrt_llm.benchmark import (
    ScaffoldingBenchRequest as ScaffoldingBenchRequest,
)
from forethought.compat.tensorrt_llm.benchmark import (
    async_scaffolding_benchmark as async_scaffolding_benchmark,
)
from forethought.compat.tensorrt_llm.task_collection import ChatTokenCounter as ChatTokenCounter
from forethought.compat.tensorrt_llm.task_collection import (
    GenerationTokenCounter as GenerationTokenCounter,
)
from forethought.compat.tensorrt_llm.task_collection import QueryCollector as QueryCollector
from forethought.compat.tensorrt_llm.task_collection import TaskCollection as TaskCollection
from forethought.compat.tensorrt_llm.task_collection import (
    TaskMetricsCollector as TaskMetricsCollector,
)
from forethought.compat.tensorrt_llm.task_collection import TaskTimer as TaskTimer
from forethought.compat.tensorrt_llm.task_collection import (
    with_task_collection as with_task_collection,
)
from forethought.methods.best_of_n import BestOfNController as BestOfNController
from forethought.methods.majority_vote import MajorityVoteController as MajorityVoteController
from forethought.methods.parts.tool_controller import ChatWithMCPController as ChatWithMCPController
from forethought.rewards.checker_controller import CheckerController as CheckerController
from forethought.rewards.confidence import ConfidenceRewardController as ConfidenceRewardController
from forethought.rewards.genrm_controller import GenRMController as GenRMController
from forethought.rewards.judge import CompareRewardController as CompareRewardController
from forethought.rewards.judge import JudgeRewardController as JudgeRewardController
from forethought.rewards.prm_controller import PRMController as PRMController
from forethought.scaffolding import sampling as sampling
from forethought.scaffolding.attention_group import AttentionGroup as AttentionGroup
from forethought.scaffolding.base_task import ComputeTask as ComputeTask
from forethought.scaffolding.base_task import MCPCallTask as MCPCallTask
from forethought.scaffolding.base_task import MCPToolListTask as MCPToolListTask
from forethought.scaffolding.base_task import RewardTask as RewardTask
from forethought.scaffolding.base_task import Task as Task
from forethought.scaffolding.base_task import TaskStatus as TaskStatus
from forethought.scaffolding.budget import Budget as Budget
from forethought.scaffolding.controller import Controller as Controller
from forethought.scaffolding.controller import NativeChatController as NativeChatController
from forethought.scaffolding.controller import (
    NativeGenerationController as NativeGenerationController,
)
from forethought.scaffolding.execution_scope import ExecutionScope as ExecutionScope
from forethought.scaffolding.execution_scope import current_scope as current_scope
from forethought.scaffolding.messages import AssistantMessage as AssistantMessage
from forethought.scaffolding.messages import OpenAIToolDescription as OpenAIToolDescription
from forethought.scaffolding.messages import RoleMessage as RoleMessage
from forethought.scaffolding.messages import SystemMessage as SystemMessage
from forethought.scaffolding.messages import ToolDescription as ToolDescription
from forethought.scaffolding.messages import ToolMessage as ToolMessage
from forethought.scaffolding.messages import UserMessage as UserMessage
from forethought.scaffolding.parallel import AsCompleted as AsCompleted
from forethought.scaffolding.parallel import Branch as Branch
from forethought.scaffolding.parallel import FirstDone as FirstDone
from forethought.scaffolding.parallel import ParallelProcess as ParallelProcess
from forethought.scaffolding.result import Delta as Delta
from forethought.scaffolding.result import ScaffoldingOutput as ScaffoldingOutput
from forethought.scaffolding.result import ScaffoldingResult as ScaffoldingResult
from forethought.scaffolding.result import Stage as Stage
from forethought.scaffolding.result import StreamEvent as StreamEvent
from forethought.scaffolding.reward_controller import (
    NativeRewardController as NativeRewardController,
)
from forethought.scaffolding.scaffolding_llm import ScaffoldingLlm as ScaffoldingLlm
from forethought.scaffolding.session_task import RestoreSessionTask as RestoreSessionTask
from forethought.scaffolding.session_task import SaveSessionTask as SaveSessionTask
from forethought.scaffolding.task import ChatTask as ChatTask
from forethought.scaffolding.task import GenerationTask as GenerationTask
from forethought.scaffolding.task import StreamGenerationTask as StreamGenerationTask
from forethought.scaffolding.trace import Prices as Prices
from forethought.scaffolding.trace import Trace as Trace
from forethought.scaffolding.worker import Worker as Worker
from forethought.tracing.trace_replay import replay as replay
from forethought.workers.local import EngineWorker as EngineWorker
from forethought.workers.local import TRTLLMWorker as TRTLLMWorker
from forethought.workers.mcp import MCPWorker as MCPWorker
from forethought.workers.openai import OpenaiWorker as OpenaiWorker
from forethought.workers.openai import TRTOpenaiWorker as TRTOpenaiWorker
from forethought.workers.reward import RewardWorker as RewardWorker
from forethought.workers.reward_server import RewardServerWorker as RewardServerWorker
from forethought.workers.scripted import Reply as Reply
from forethought.workers.scripted import ScriptedWorker as ScriptedWorker
from forethought.workers.upstream import UpstreamWorker as UpstreamWorker

__all__: list[str]
