"""``DynasorGenerationController`` under its name in ``tensorrt_llm.scaffolding.contrib``."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "DynasorGenerationController":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("forethought.methods.dynasor").DynasorGenerationController
