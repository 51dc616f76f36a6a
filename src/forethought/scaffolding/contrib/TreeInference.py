"""The searches of ``tensorrt_llm.scaffolding.contrib.TreeInference``, under their names."""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = ("MCTSController", "TOTController")


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("forethought.methods.tree_inference"), name)
