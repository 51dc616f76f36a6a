"""Former places of modules and names, which can still be imported for one release."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any

MOVED: Mapping[str, str] = MappingProxyType(
    {
        "engine.tensor_parallel": "backends.tensor_parallel.engine_ranks",
        "methods.archon_config": "methods.parts.archon_config",
        "methods.archon_prompts": "methods.parts.archon_prompts",
        "model.attention.paged": "backends.cuda.paged",
        "model.graph_runner": "backends.cuda.graph_runner",
        "model.graphs": "backends.cuda.graphs",
        "model.native": "backends.cpu",
        "model.native.cache": "backends.cpu.cache",
        "model.native.chain_steps": "backends.cpu.native_steps",
        "model.native.forward": "backends.cpu.forward",
        "model.native.heads": "backends.cpu.heads",
        "model.native.library": "backends.cpu.library",
        "model.native.module": "backends.cpu.module",
        "model.native.network": "backends.cpu.network",
        "model.native.weights": "backends.cpu.weights",
        "model.paged_layout": "model.attention.paged_layout",
        "model.parallel": "backends.tensor_parallel",
        "model.parallel.collectives": "backends.tensor_parallel.collectives",
        "model.parallel.process": "backends.tensor_parallel.process",
        "model.parallel.ranks": "backends.tensor_parallel.ranks",
        "model.parallel.shard": "backends.tensor_parallel.shard",
        "model.parallel.sharded": "backends.tensor_parallel.sharded",
        "scaffolding.answer_extraction": "answers.answer_extraction",
        "scaffolding.answer_spaces": "answers.answer_spaces",
        "scaffolding.answers": "answers.answers",
        "scaffolding.arithmetic": "answers.arithmetic",
        "scaffolding.benchmark": "compat.tensorrt_llm.benchmark",
        "scaffolding.bm25": "methods.parts.bm25",
        "scaffolding.canonical_form": "answers.canonical_form",
        "scaffolding.checker_controller": "rewards.checker_controller",
        "scaffolding.code_blocks": "answers.code_blocks",
        "scaffolding.confidence": "rewards.confidence",
        "scaffolding.contrib": "compat.tensorrt_llm.contrib",
        "scaffolding.contrib.AsyncGeneration": "compat.tensorrt_llm.contrib.AsyncGeneration",
        "scaffolding.contrib.DeepConf": "compat.tensorrt_llm.contrib.DeepConf",
        "scaffolding.contrib.Dynasor": "compat.tensorrt_llm.contrib.Dynasor",
        "scaffolding.contrib.TreeInference": "compat.tensorrt_llm.contrib.TreeInference",
        "scaffolding.difficulty": "methods.parts.difficulty",
        "scaffolding.exact_value": "answers.exact_value",
        "scaffolding.genrm_controller": "rewards.genrm_controller",
        "scaffolding.judge": "rewards.judge",
        "scaffolding.math_utils": "compat.tensorrt_llm.math_utils",
        "scaffolding.particles": "methods.parts.particles",
        "scaffolding.prm_controller": "rewards.prm_controller",
        "scaffolding.probe": "methods.parts.probe",
        "scaffolding.retrieval": "methods.parts.retrieval",
        "scaffolding.revision": "methods.parts.revision",
        "scaffolding.sandbox": "sandbox.sandbox",
        "scaffolding.sandbox_process": "sandbox.sandbox_process",
        "scaffolding.search": "methods.parts.search",
        "scaffolding.step_format": "rewards.step_format",
        "scaffolding.steps": "methods.parts.steps",
        "scaffolding.sympy_pool": "answers.sympy_pool",
        "scaffolding.sympy_process": "answers.sympy_process",
        "scaffolding.task_collection": "compat.tensorrt_llm.task_collection",
        "scaffolding.threads": "methods.parts.threads",
        "scaffolding.tool_controller": "methods.parts.tool_controller",
        "scaffolding.trace_html": "tracing.trace_html",
        "scaffolding.trace_mooncake": "tracing.trace_mooncake",
        "scaffolding.trace_otel": "tracing.trace_otel",
        "scaffolding.trace_replay": "tracing.trace_replay",
        "scaffolding.trace_requests": "tracing.trace_requests",
        "scaffolding.verifier": "rewards.verifier",
        "scaffolding.workers": "workers",
        "scaffolding.workers.clients": "workers.clients",
        "scaffolding.workers.concurrency": "workers.concurrency",
        "scaffolding.workers.live": "workers.live",
        "scaffolding.workers.local": "workers.local",
        "scaffolding.workers.mcp": "workers.mcp",
        "scaffolding.workers.openai": "workers.openai",
        "scaffolding.workers.openai_answer": "workers.openai_answer",
        "scaffolding.workers.openai_chunk": "workers.openai_chunk",
        "scaffolding.workers.openai_requests": "workers.openai_requests",
        "scaffolding.workers.reward": "workers.reward",
        "scaffolding.workers.reward_cache": "rewards.reward_cache",
        "scaffolding.workers.reward_forward": "rewards.reward_forward",
        "scaffolding.workers.reward_model": "rewards.reward_model",
        "scaffolding.workers.reward_server": "workers.reward_server",
        "scaffolding.workers.routing": "workers.routing",
        "scaffolding.workers.scripted": "workers.scripted",
        "scaffolding.workers.upstream": "workers.upstream",
        "server.catalog": "server.endpoints.catalog",
        "server.chat": "server.endpoints.chat",
        "server.completions": "server.endpoints.completions",
        "server.logprobs": "server.protocol.logprobs",
        "server.message": "server.endpoints.message",
        "server.protocol.reasoning": "llm.reasoning",
        "server.protocol.tool_messages": "llm.tool_messages",
        "server.reasoning": "llm.reasoning",
        "server.remote_backend": "server.backends.remote_backend",
        "server.responses": "server.endpoints.responses",
        "server.sampling": "server.protocol.sampling",
        "server.scripted_backend": "server.backends.scripted_backend",
        "server.tool_calls": "server.protocol.tool_calls",
        "server.tool_messages": "llm.tool_messages",
        "server.usage": "server.protocol.usage",
        "speculative.chain_rounds": "backends.cuda.chain_rounds",
        "speculative.chain_steps": "speculative.chain_source",
        "speculative.draft_graph": "backends.cuda.draft_graph",
        "speculative.heads.native": "backends.cpu.draft_module",
    }
)
"""Former path below ``forethought`` -> the path of today."""
FORMER_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "scaffolding.controller": {
            "BestOfNController": "methods.best_of_n",
            "ChatWithMCPController": "methods.parts.tool_controller",
            "MajorityVoteController": "methods.majority_vote",
            "NativeRewardController": "scaffolding.reward_controller",
            "PRMController": "rewards.prm_controller",
        },
        "scaffolding.task": {
            "ComputeTask": "scaffolding.base_task",
            "MCPCallTask": "scaffolding.base_task",
            "MCPToolListTask": "scaffolding.base_task",
            "OpenAIToolDescription": "scaffolding.messages",
            "RestoreSessionTask": "scaffolding.session_task",
            "RewardTask": "scaffolding.base_task",
            "SaveSessionTask": "scaffolding.session_task",
            "SystemMessage": "scaffolding.messages",
            "TaskStatus": "scaffolding.base_task",
            "ToolCall": "scaffolding.messages",
            "ToolDescription": "scaffolding.messages",
            "ToolFunction": "scaffolding.messages",
            "ToolMessage": "scaffolding.messages",
        },
    }
)
"""Module -> names that it once defined, or that it has in ``tensorrt_llm`` -> their module."""
_PREFIX = "forethought."


class MovedModules(MetaPathFinder, Loader):
    """Imports a former path as the module of today, with a ``DeprecationWarning``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a former path; None for any other."""
        if not fullname.startswith(_PREFIX) or fullname.removeprefix(_PREFIX) not in MOVED:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> None:
        """An empty module, which ``exec_module`` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of today in ``sys.modules`` under the former name."""
        moved = _PREFIX + MOVED[module.__name__.removeprefix(_PREFIX)]
        warnings.warn(f"{module.__name__} is now {moved}", DeprecationWarning, stacklevel=2)
        sys.modules[module.__name__] = importlib.import_module(moved)


def former_name(module: str, name: str) -> Any:
    """The object that a module once defined; for its ``__getattr__``, so it raises
    AttributeError.
    """
    home = FORMER_NAMES.get(module.removeprefix(_PREFIX), {}).get(name)
    if home is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PREFIX + home), name)
