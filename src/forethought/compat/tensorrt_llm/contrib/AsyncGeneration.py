"""``StreamGenerationTask`` under its name in ``tensorrt_llm.scaffolding.contrib``.

Every worker handles streams; ``stream_generation_handler`` is there for code that registers it.
"""

from __future__ import annotations

from forethought.scaffolding.base_task import TaskStatus
from forethought.scaffolding.task import StreamGenerationTask
from forethought.scaffolding.worker import Worker

__all__ = ["StreamGenerationTask", "stream_generation_handler"]


async def stream_generation_handler(worker: Worker, task: StreamGenerationTask) -> TaskStatus:
    """Run the handler that the worker's class defines for streams, or return
    ``WORKER_NOT_SUPPORTED``.
    """
    for ancestor in type(worker).__mro__:
        handler = vars(ancestor).get("task_handlers", {}).get(StreamGenerationTask)
        if handler not in (None, stream_generation_handler):
            return await handler(worker, task) or TaskStatus.SUCCESS
    return TaskStatus.WORKER_NOT_SUPPORTED
