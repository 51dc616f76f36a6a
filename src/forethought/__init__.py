"""forethought: draft ahead, think deeper. Inference-time compute for LLMs.

The names below are loaded when first used, so that importing the package costs nothing and does
not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from forethought.lazy_names import LazyNames
from forethought.moved_modules import MovedModules

__version__ = "0.1.0"

_HOMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "config.drafters": (
            "AutoDecodingConfig",
            "DraftTargetDecodingConfig",
            "Eagle3DecodingConfig",
            "EagleDecodingConfig",
            "MTPDecodingConfig",
            "NGramDecodingConfig",
            "PearlDecodingConfig",
            "ReDrafterDecodingConfig",
            "SuffixDecodingConfig",
            "UserProvidedDecodingConfig",
        ),
        "config.medusa": ("MedusaDecodingConfig",),
        "config.engine": (
            "GuidedDecodingConfig",
            "KvCacheConfig",
            "LlmArgs",
        ),
        "config.guided": ("GuidedDecodingParams",),
        "config.sampling": (
            "SamplingParams",
            "SpeculationParams",
        ),
        "errors": ("ForethoughtError",),
        "llm.async_llm": ("AsyncLLM",),
        "llm.llm": (
            "LLM",
            "Session",
        ),
        "outputs": (
            "CompletionOutput",
            "FinishReason",
            "RequestOutput",
            "SpeculationMetrics",
            "ThinkingOutput",
            "ThoughtEnd",
            "Usage",
        ),
        "speculative.drafter": (
            "Drafter",
            "ResourceManager",
        ),
    }
)
"""Module below ``forethought`` -> its names that this package exports."""

_NAMES = LazyNames(__name__, _HOMES)
__all__ = _NAMES.public
sys.meta_path.insert(0, MovedModules())


def __getattr__(name: str) -> Any:
    return _NAMES.load(name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
