"""``tensorrt_llm.scaffolding``'s name for ``scope``."""

from forethought.scaffolding.scope import ExecutionScope, current_scope

__all__ = ["ExecutionScope", "current_scope"]
