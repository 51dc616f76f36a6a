"""``tensorrt_llm.scaffolding``'s name for ``collections`` and ``collectors``."""

from forethought.scaffolding.collections import TaskCollection, with_task_collection
from forethought.scaffolding.collectors import (
    ChatTokenCounter,
    GenerationTokenCounter,
    QueryCollector,
    TaskMetricsCollector,
    TaskTimer,
)

__all__ = [
    "ChatTokenCounter",
    "GenerationTokenCounter",
    "QueryCollector",
    "TaskCollection",
    "TaskMetricsCollector",
    "TaskTimer",
    "with_task_collection",
]
