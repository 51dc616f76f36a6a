"""forethought: draft ahead, think deeper. Inference-time compute for LLMs.

The names below are loaded when first used, so that importing the package costs nothing and does
not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forethought.config import GuidedDecodingConfig, KvCacheConfig, LlmArgs
    from forethought.decoding import (
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
    from forethought.errors import ForethoughtError
    from forethought.guided import GuidedDecodingParams
    from forethought.outputs import (
        CompletionOutput,
        FinishReason,
        RequestOutput,
        SpeculationMetrics,
        Usage,
    )
    from forethought.params import SamplingParams, SpeculationParams
    from forethought.speculative.drafter import Drafter, ResourceManager
    from forethought.text.async_llm import AsyncLLM
    from forethought.text.llm import LLM
    from forethought.text.session import Session

__version__ = "0.1.0"

_HOMES = {
    "LLM": "text.llm",
    "AsyncLLM": "text.async_llm",
    "Session": "text.session",
    "SamplingParams": "params",
    "GuidedDecodingConfig": "config",
    "GuidedDecodingParams": "guided",
    "SpeculationParams": "params",
    "KvCacheConfig": "config",
    "LlmArgs": "config",
    "AutoDecodingConfig": "decoding",
    "DraftTargetDecodingConfig": "decoding",
    "EagleDecodingConfig": "decoding",
    "Eagle3DecodingConfig": "decoding",
    "MedusaDecodingConfig": "decoding",
    "MTPDecodingConfig": "decoding",
    "NGramDecodingConfig": "decoding",
    "PearlDecodingConfig": "decoding",
    "ReDrafterDecodingConfig": "decoding",
    "SuffixDecodingConfig": "decoding",
    "UserProvidedDecodingConfig": "decoding",
    "Drafter": "speculative.drafter",
    "ResourceManager": "speculative.drafter",
    "CompletionOutput": "outputs",
    "FinishReason": "outputs",
    "RequestOutput": "outputs",
    "SpeculationMetrics": "outputs",
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
