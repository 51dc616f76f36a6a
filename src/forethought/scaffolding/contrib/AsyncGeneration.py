"""``tensorrt_llm.scaffolding.contrib``'s name for streams that come back to their controller.

Every worker executes them by itself; the handler is there for code that registers it.
"""

from __future__ import annotations

from forethought.scaffolding.task import StreamGenerationTask, TaskStatus
from forethought.scaffolding.worker import Worker

__all__ = ["StreamGenerationTask", "stream_generation_handler"]


async def stream_generation_handler(worker: Worker, task: StreamGenerationTask) -> TaskStatus:
    """What the worker's class does with a stream: bring ``streaming_step`` tokens more.

    Returns:
        ``WORKER_NOT_SUPPORTED`` if the class has no handler for streams.
    """
    handler = type(worker).task_handlers.get(StreamGenerationTask)
    if handler is None:
        return TaskStatus.WORKER_NOT_SUPPORTED
    return await handler(worker, task) or TaskStatus.SUCCESS
