"""Slow work of a controller as a task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forethought.scaffolding.task.task import Task


class ComputeTask(Task):
    """Slow work of a controller, done beside the event loop: ``yield [ComputeTask(f, args)]``.

    No worker is needed: the driver calls ``function(*args, **kwargs)`` in a thread; a coroutine
    function is awaited on the event loop instead, and cancelled when the request ends. The return
    value lands in ``result``; what it raises is raised at the ``yield`` as it is.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.function, self.args, self.kwargs = function, args, kwargs
        self.result: Any = None
