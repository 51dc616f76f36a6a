"""Collections: observers of the tasks that a controller yields, one set per request.

``with_task_collection`` attaches one to a controller class. It sees every task before and after
its execution, those of parallel branches included. Nothing here is shared between requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from forethought.scaffolding.clone import Cloneable
from forethought.scaffolding.parallel import (
    AsCompleted,
    Branch,
    FirstDone,
    ParallelProcess,
    Process,
)
from forethought.scaffolding.task import Task

if TYPE_CHECKING:
    from forethought.scaffolding.controller import Controller

_ControllerClass = TypeVar("_ControllerClass", bound="type[Controller]")


class TaskCollection(Cloneable):
    """Base of all collections: hooks around the execution of tasks."""

    def before_yield(self, tasks: Sequence[Any]) -> None:
        """``tasks`` are about to be executed."""

    def after_yield(self, tasks: Sequence[Any]) -> None:
        """``tasks`` have been executed. A stream comes here after each of its steps."""

    def on_parallel_start(self, count: int) -> None:
        """``count`` branches are about to run side by side."""

    def on_parallel_end(self, count: int) -> None:
        """``count`` branches are over."""


def with_task_collection(
    name: str, collection: Callable[..., TaskCollection], /, **settings: Any
) -> Callable[[_ControllerClass], _ControllerClass]:
    """Class decorator: give each controller ``self.task_collections[name]``, and let it watch.

    Args:
        name: the key in ``task_collections``, and in those of the result.
        collection: class of the collection.
        **settings: arguments of that class.
    """

    def decorate(controller_class: _ControllerClass) -> _ControllerClass:
        base: Any = controller_class

        class Watched(base):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                attached: dict[str, TaskCollection] = dict(vars(self).get("task_collections", {}))
                self.task_collections = {**attached, name: collection(**settings)}

            def process(self, tasks: Sequence[Any], **kwargs: Any) -> Process:
                watcher = self.task_collections[name]
                return (yield from observed(super().process(tasks, **kwargs), watcher))

        for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(Watched, attribute, getattr(base, attribute))
        return Watched  # type: ignore[return-value]

    return decorate


def observed(process: Process, collection: TaskCollection) -> Process:
    """``process`` itself, with all that it yields shown to ``collection``."""
    resume = partial(process.send, None)
    try:
        while True:
            try:
                wanted = resume()
            except StopIteration as stop:
                return stop.value
            _before(wanted, collection)
            try:
                value = yield wanted
            except Exception as error:
                resume = partial(process.throw, error)
            else:
                _after(wanted, value, collection)
                resume = partial(process.send, value)
    finally:
        process.close()


def _before(wanted: Any, collection: TaskCollection) -> None:
    if isinstance(wanted, ParallelProcess):
        _watch_branches(wanted.branches, collection)
        collection.on_parallel_start(len(wanted.branches))
    elif isinstance(wanted, AsCompleted | FirstDone):
        new = (wanted.race if isinstance(wanted, FirstDone) else wanted).new
        _watch_branches([item for item in new if isinstance(item, Branch)], collection)
        tasks = [item for item in new if isinstance(item, Task)]
        if tasks:
            collection.before_yield(tasks)
    elif isinstance(wanted, list):
        collection.before_yield(wanted)


def _after(wanted: Any, value: Any, collection: TaskCollection) -> None:
    if isinstance(wanted, ParallelProcess):
        collection.on_parallel_end(len(wanted.branches))
    elif isinstance(wanted, AsCompleted | FirstDone) and isinstance(value, Task):
        collection.after_yield([value])
    elif isinstance(wanted, list):
        collection.after_yield(wanted)


def _watch_branches(branches: Sequence[Branch], collection: TaskCollection) -> None:
    for branch in branches:
        branch.process = observed(branch.process, collection)
