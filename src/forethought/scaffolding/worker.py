"""Workers: they execute tasks on a backend, such as the engine or a server."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Self

from forethought.scaffolding.task import Task, TaskStatus

TaskHandler = Callable[[Any, Any], Awaitable[TaskStatus | None]]
"""``async def handler(worker, task)``; fills the task; returns its status, or None for success."""


class _HandlerRegistration:
    """``register_task_handler(task_class, handler)`` of a worker class, or of one worker."""

    def __get__(
        self, worker: Worker | None, worker_class: type[Worker]
    ) -> Callable[[type[Any], TaskHandler], None]:
        owner: Any = worker_class if worker is None else worker

        def register_task_handler(task_class: type[Any], handler: TaskHandler) -> None:
            """Handle ``task_class`` with ``handler``, in this class or in this worker alone."""
            owner.task_handlers = {**owner.task_handlers, task_class: handler}

        return register_task_handler


class Worker:
    """Base of all workers: a table of task classes and the handlers for them.

    A task goes to the handler of its own class, or else to that of the nearest class it inherits
    from. A handler may raise: the controller gets a ``TaskError`` with the cause.
    """

    task_handlers: Mapping[type[Any], TaskHandler] = MappingProxyType({})
    """Task class -> ``async def handler(worker, task)``; set by subclasses."""

    register_task_handler = _HandlerRegistration()

    async def run_task(self, task: Any) -> TaskStatus:
        """Execute ``task`` in place.

        Returns:
            ``WORKER_NOT_SUPPORTED`` if there is no handler for it, else what the handler returns.
        """
        handler = self._handler(type(task))
        if handler is None:
            return TaskStatus.WORKER_NOT_SUPPORTED
        return await handler(self, task) or TaskStatus.SUCCESS

    def _handler(self, kind: type[Task]) -> TaskHandler | None:
        found = (self.task_handlers.get(ancestor) for ancestor in kind.__mro__)
        return next((handler for handler in found if handler is not None), None)

    def thinking(self, task: Any) -> Any:
        """How the model thinks after the prompt of a task, a ``ThinkingProfile``; None: unknown.

        Called on the event loop before the task runs; it computes nothing that takes long.
        """
        return None

    async def on_scope_end(self, scope_id: str) -> None:
        """A request, or one of its parallel branches, is over: let go of what was kept for it."""

    async def on_loop_end(self) -> None:
        """A ``ScaffoldingLlm`` on the running event loop has ended, and the loop may end with it.

        What belongs to the loop, such as idle connections, is to be closed here.
        """

    def shutdown(self) -> None:
        """Let go of everything. Called by the owner, from any thread."""

    async def async_shutdown(self) -> None:
        """The part of ``shutdown`` that has to happen on the event loop; called before it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()


_WORKERS = (
    "EngineWorker",
    "MCPWorker",
    "OpenaiWorker",
    "RewardWorker",
    "TRTLLMWorker",
    "TRTOpenaiWorker",
)


def __getattr__(name: str) -> Any:
    """Workers that code written for ``tensorrt_llm.scaffolding`` looks for in this module."""
    if name not in _WORKERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("forethought.scaffolding"), name)
