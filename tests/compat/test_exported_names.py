"""The names that ``tensorrt_llm.scaffolding`` exports: which are here, and what others became."""

import pytest

import forethought.scaffolding as scaffolding
from forethought.compat.tensorrt_llm import benchmark
from forethought.scaffolding import Trace

NAMES = [
    "ScaffoldingLlm",
    "ExecutionScope",
    "current_scope",
    "Controller",
    "ParallelProcess",
    "NativeGenerationController",
    "NativeChatController",
    "NativeRewardController",
    "PRMController",
    "MajorityVoteController",
    "BestOfNController",
    "ChatWithMCPController",
    "Task",
    "TaskStatus",
    "GenerationTask",
    "StreamGenerationTask",
    "RewardTask",
    "ChatTask",
    "MCPCallTask",
    "SystemMessage",
    "UserMessage",
    "AssistantMessage",
    "OpenAIToolDescription",
    "Worker",
    "OpenaiWorker",
    "TRTOpenaiWorker",
    "TRTLLMWorker",
    "MCPWorker",
    "TaskCollection",
    "with_task_collection",
    "GenerationTokenCounter",
    "ChatTokenCounter",
    "TaskTimer",
    "QueryCollector",
    "TaskMetricsCollector",
    "async_scaffolding_benchmark",
    "ScaffoldingBenchRequest",
    "extract_answer_from_boxed",
    "extract_answer_with_regex",
    "get_digit_majority_vote_result",
    "ScaffoldingOutput",
]
INSTEAD = {
    "ExecutionTracer": "ScaffoldingLlm(trace=True) records, Trace holds",
    "with_execution_tracing": "ScaffoldingLlm(trace=True)",
    "ExecutionTrace": "Trace",
    "TraceEvent": "the entries of Trace",
    "sub_request_node": "branches are in every Trace",
    "ReplayEngine": "replay",
    "QueueManager": "replay: its queues are those of a load generator, forethought bench serving",
    "QueueExecutor": "as QueueManager",
    "ReplayGenerationStats": "as QueueManager",
    "DropKVCacheTask": "sequences of a request are closed at its end, pages are evicted by age",
    "drop_kv_cache_scope": "as DropKVCacheTask",
    "DropKVCacheWorkerTag": "as DropKVCacheTask",
    "TokenizeTask": "workers fill in the usage of every task",
    "tokenize_trace_scope": "as TokenizeTask",
    "TokenizeWorkerTag": "as TokenizeTask",
    "ApiaryMCPWorker": "a worker of one sandbox service; MCPWorker takes any server",
    "system_prompt": "a SystemMessage",
}
"""Names that are not here -> what does their work."""
CONTRIB = {
    "Dynasor": ["DynasorGenerationController"],
    "AsyncGeneration": ["StreamGenerationTask", "stream_generation_handler"],
    "DeepConf": [
        "DeepConfOfflineController",
        "DeepConfOnlineController",
        "DeepConfOfflineMajorityVoteController",
        "DeepConfOnlineMajorityVoteController",
    ],
    "TreeInference": ["MCTSController", "TOTController"],
}
"""Modules of ``contrib`` -> their names that are here, under the same module name."""


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_imported_from_the_package(name):
    assert getattr(scaffolding, name) is not None


def test_names_that_are_not_here_have_something_in_their_place():
    assert not [name for name in INSTEAD if hasattr(scaffolding, name)]
    assert not set(INSTEAD) & set(NAMES)
    assert scaffolding.Trace is Trace
    assert scaffolding.async_scaffolding_benchmark is benchmark.async_scaffolding_benchmark


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in CONTRIB.items() for name in names]
)
def test_a_name_of_contrib_is_imported_from_the_module_of_its_name(module, name):
    made = __import__(f"forethought.compat.tensorrt_llm.contrib.{module}", fromlist=[name])
    assert getattr(made, name) is not None
