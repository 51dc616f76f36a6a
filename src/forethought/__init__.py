"""forethought: draft ahead, think deeper. Inference-time compute for LLMs.

The names below are loaded when first used, so that importing the package costs nothing and does
not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forethought.config.drafters import (
        AutoDecodingConfig,
        DraftTargetDecodingConfig,
        Eagle3DecodingConfig,
        EagleDecodingConfig,
        MedusaDecodingConfig,
        MTPDecodingConfig,
        NGramDecodingConfig,
        PearlDecodingConfig,
        ReDrafterDecodingConfig,
        SuffixDecodingConfig,
        UserProvidedDecodingConfig,
    )
    from forethought.config.engine import GuidedDecodingConfig, KvCacheConfig, LlmArgs
    from forethought.config.guided import GuidedDecodingParams
    from forethought.config.sampling import SamplingParams, SpeculationParams
    from forethought.errors import ForethoughtError
    from forethought.llm.async_llm import AsyncLLM
    from forethought.llm.llm import LLM, Session
    from forethought.outputs import (
        CompletionOutput,
        FinishReason,
        RequestOutput,
        SpeculationMetrics,
        ThinkingOutput,
        ThoughtEnd,
        Usage,
    )
    from forethought.speculative.drafter import Drafter, ResourceManager

__version__ = "0.1.0"

_HOMES = {
    "LLM": "llm.llm",
    "AsyncLLM": "llm.async_llm",
    "Session": "llm.llm",
    "SamplingParams": "config.sampling",
    "GuidedDecodingConfig": "config.engine",
    "GuidedDecodingParams": "config.guided",
    "SpeculationParams": "config.sampling",
    "KvCacheConfig": "config.engine",
    "LlmArgs": "config.engine",
    "AutoDecodingConfig": "config.drafters",
    "DraftTargetDecodingConfig": "config.drafters",
    "EagleDecodingConfig": "config.drafters",
    "Eagle3DecodingConfig": "config.drafters",
    "MedusaDecodingConfig": "config.drafters",
    "MTPDecodingConfig": "config.drafters",
    "NGramDecodingConfig": "config.drafters",
    "PearlDecodingConfig": "config.drafters",
    "ReDrafterDecodingConfig": "config.drafters",
    "SuffixDecodingConfig": "config.drafters",
    "UserProvidedDecodingConfig": "config.drafters",
    "Drafter": "speculative.drafter",
    "ResourceManager": "speculative.drafter",
    "CompletionOutput": "outputs",
    "FinishReason": "outputs",
    "RequestOutput": "outputs",
    "SpeculationMetrics": "outputs",
    "ThinkingOutput": "outputs",
    "ThoughtEnd": "outputs",
    "Usage": "outputs",
    "ForethoughtError": "errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "AutoDecodingConfig",
    "CompletionOutput",
    "DraftTargetDecodingConfig",
    "Drafter",
    "Eagle3DecodingConfig",
    "EagleDecodingConfig",
    "FinishReason",
    "ForethoughtError",
    "GuidedDecodingConfig",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "LlmArgs",
    "MTPDecodingConfig",
    "MedusaDecodingConfig",
    "NGramDecodingConfig",
    "PearlDecodingConfig",
    "ReDrafterDecodingConfig",
    "RequestOutput",
    "ResourceManager",
    "SamplingParams",
    "Session",
    "SpeculationMetrics",
    "SpeculationParams",
    "SuffixDecodingConfig",
    "ThinkingOutput",
    "ThoughtEnd",
    "Usage",
    "UserProvidedDecodingConfig",
]


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
