"""``DynasorGenerationController`` under its name in ``tensorrt_llm.scaffolding.contrib``."""

from forethought.methods.dynasor import DynasorGenerationController

__all__ = ["DynasorGenerationController"]
