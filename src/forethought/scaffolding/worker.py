"""Workers: they execute tasks on a backend, such as the engine or a server."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum
from types import MappingProxyType, TracebackType
from typing import Any, Self

from forethought.errors import ParameterError, WorkerTagError
from forethought.scaffolding.base_task import Task, TaskStatus

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
        handlers = (self.task_handlers.get(ancestor) for ancestor in kind.__mro__)
        return next((handler for handler in handlers if handler is not None), None)

    def thinking(self, task: Any) -> Any:
        """The ``ThinkingProfile`` after the prompt of a task; None: unknown.

        Called on the event loop before the task runs; it must not compute for long.
        """
        return None

    async def on_scope_end(self, scope_id: str) -> None:
        """Free the state of a request, or of one of its parallel branches, that is over."""

    async def on_loop_end(self) -> None:
        """Close what belongs to the running event loop, such as idle connections: it may end."""

    def shutdown(self) -> None:
        """Free all resources. Called by the owner, from any thread."""

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


class Routes:
    """Which worker serves which tag.

    Args:
        workers: by tag: enum members or plain strings. A tag is looked up as it is, then by value.
            Or one worker, for every tag.

    Attributes:
        by_tag: the workers as they were given.

    Raises:
        ParameterError: they are neither a mapping nor a worker, or a value is no worker.
    """

    def __init__(self, workers: Mapping[Any, Worker] | Worker) -> None:
        self._only = workers if isinstance(workers, Worker) else None
        if isinstance(workers, Worker):
            workers = {"every tag": workers}
        if not isinstance(workers, Mapping):
            raise ParameterError(
                "invalid workers",
                f"got {workers!r}",
                "Give a worker, or a dictionary of workers by tag",
            )
        for tag, worker in workers.items():
            if not isinstance(worker, Worker):
                raise ParameterError(
                    f"the worker for {tag!r} is none", f"got {worker!r}", "Give a Worker"
                )
        self.by_tag = dict(workers)
        self._by_value = {_value(tag): worker for tag, worker in workers.items()}

    def find(self, tag: Any) -> Worker:
        """The worker for ``tag``; raises ``WorkerTagError`` if there is none."""
        worker = self._only or self.by_tag.get(tag) or self._by_value.get(_value(tag))
        if worker is None and tag is None:
            raise WorkerTagError(
                "a task has no worker_tag",
                "its worker is chosen by that",
                "Set task.worker_tag, such as NativeGenerationController.WorkerTag.GENERATION",
            )
        if worker is None:
            tags = ", ".join(sorted(repr(value) for value in self._by_value))
            raise WorkerTagError(
                f"no worker serves {tag!r}",
                f"the workers are those of {tags}" if tags else "there are no workers",
                "Give ScaffoldingLlm workers={tag: worker} with this tag",
            )
        return worker

    @property
    def workers(self) -> list[Worker]:
        """Every worker once."""
        return list({id(worker): worker for worker in self.by_tag.values()}.values())


def _value(tag: Any) -> Any:
    return tag.value if isinstance(tag, Enum) else tag


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
