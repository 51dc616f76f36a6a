"""Task collections: observers of the tasks that a controller yields, one set per request.

``with_task_collection`` attaches one to a controller class. It sees every task before and after
its execution, also those of parallel branches, and is returned in ``task_collections`` of the
result. Built in are counters of tokens, timers, and collectors of queries and metrics.
"""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from forethought.outputs import Usage
from forethought.saved_file import save_text
from forethought.scaffolding.base_task import Task
from forethought.scaffolding.controller import Cloneable
from forethought.scaffolding.parallel import (
    AsCompleted,
    Branch,
    FirstDone,
    ParallelProcess,
    Process,
)
from forethought.scaffolding.task import ChatTask, GenerationTask, StreamGenerationTask

_ControllerClass = TypeVar("_ControllerClass", bound="type[Any]")


class TaskCollection(Cloneable):
    """Base of all collections: hooks around the execution of tasks."""

    def before_yield(self, tasks: Sequence[Any]) -> None:
        """Called before ``tasks`` are executed."""

    def after_yield(self, tasks: Sequence[Any]) -> None:
        """Called after ``tasks`` have been executed; for a stream after each of its steps."""

    def on_parallel_start(self, count: int) -> None:
        """Called before ``count`` branches run concurrently."""

    def on_parallel_end(self, count: int) -> None:
        """Called after ``count`` branches are over."""


def with_task_collection(
    name: str, collection: Callable[..., TaskCollection], /, **settings: Any
) -> Callable[[_ControllerClass], _ControllerClass]:
    """Class decorator: give each controller ``self.task_collections[name]``, which observes it.

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
    """``process`` itself, with ``collection`` observing all that it yields."""
    resume = partial(process.send, None)
    try:
        while True:
            try:
                request = resume()
            except StopIteration as stop:
                return stop.value
            _before(request, collection)
            try:
                value = yield request
            except Exception as error:
                resume = partial(process.throw, error)
            else:
                _after(request, value, collection)
                resume = partial(process.send, value)
    finally:
        process.close()


def _before(request: Any, collection: TaskCollection) -> None:
    if isinstance(request, ParallelProcess):
        _watch_branches(request.branches, collection)
        collection.on_parallel_start(len(request.branches))
    elif isinstance(request, AsCompleted | FirstDone):
        new = (request.race if isinstance(request, FirstDone) else request).new
        _watch_branches([item for item in new if isinstance(item, Branch)], collection)
        tasks = [item for item in new if isinstance(item, Task)]
        if tasks:
            collection.before_yield(tasks)
    elif isinstance(request, list):
        collection.before_yield(request)


def _after(request: Any, value: Any, collection: TaskCollection) -> None:
    if isinstance(request, ParallelProcess):
        collection.on_parallel_end(len(request.branches))
    elif isinstance(request, AsCompleted | FirstDone) and isinstance(value, Task):
        collection.after_yield([value])
    elif isinstance(request, list):
        collection.after_yield(request)


def _watch_branches(branches: Sequence[Branch], collection: TaskCollection) -> None:
    for branch in branches:
        branch.observe(collection, partial(observed, collection=collection))


_logger = logging.getLogger(__name__)


def _goes_on(task: Any) -> bool:
    """Whether the task is a stream that has begun, rather than something that starts."""
    return isinstance(task, StreamGenerationTask) and task.under_way


class GenerationTokenCounter(TaskCollection):
    """Counts generated tokens, also when many streams advance in parallel.

    They are the ``usage.completion_tokens`` of the tasks, including tokens that a worker had
    generated ahead when a stream was cancelled, as in the usage of the request.
    """

    def __init__(self) -> None:
        self._ended = 0
        # By id, with the usage of an earlier execution; holding the task keeps its id its own.
        self._watched: dict[int, tuple[GenerationTask, Usage | None]] = {}

    @property
    def generation_token_count(self) -> int:
        """Tokens generated so far by all tasks that were seen."""
        return self._ended + sum(map(self._count, self._watched))

    def before_yield(self, tasks: Sequence[Any]) -> None:
        """Observe each generation; a generation that restarts adds to its count."""
        for task in tasks:
            if not isinstance(task, GenerationTask):
                continue
            if not _goes_on(task):
                self._ended += self._count(id(task))
                self._watched[id(task)] = task, task.usage
            elif id(task) not in self._watched:
                self._watched[id(task)] = task, None

    def _count(self, key: int) -> int:
        """Tokens of the present execution of a task; the driver gives each its own usage."""
        if key not in self._watched:
            return 0
        task, earlier = self._watched[key]
        return 0 if task.usage is earlier else task.usage.completion_tokens


class ChatTokenCounter(TaskCollection):
    """Adds up the tokens of chat turns, as their workers count them.

    Args:
        statistics_name: name of the counter, where there are several.

    Attributes:
        prompt_tokens: tokens of all prompts.
        completion_tokens: tokens of all answers.
        turns: answers.
    """

    def __init__(self, statistics_name: str = "chat") -> None:
        self.statistics_name = statistics_name
        self.prompt_tokens = self.completion_tokens = self.turns = 0

    def after_yield(self, tasks: Sequence[Any]) -> None:
        """Count the turns that have ended."""
        for task in tasks:
            if isinstance(task, ChatTask) and task.end_flag:
                self.turns += 1
                self.prompt_tokens += task.usage_prompt_tokens or 0
                self.completion_tokens += task.usage_completion_tokens or 0


class _Clock(TaskCollection):
    """Measures each execution of a task, from the yield to its result.

    Args:
        task_types: classes to measure; None: all.
    """

    def __init__(self, task_types: Sequence[type] | None) -> None:
        self.task_types = None if task_types is None else tuple(task_types)
        self._began: dict[int, float] = {}

    def before_yield(self, tasks: Sequence[Any]) -> None:
        for task in tasks:
            if self.task_types is None or isinstance(task, self.task_types):
                self._began[id(task)] = time.perf_counter()

    def after_yield(self, tasks: Sequence[Any]) -> None:
        for task in tasks:
            began = self._began.pop(id(task), None)
            if began is not None:
                self._on_ended(task, time.perf_counter() - began)

    def _on_ended(self, task: Any, seconds: float) -> None:
        raise NotImplementedError


class TaskTimer(_Clock):
    """Seconds that tasks took, by class of task, from the yield to their results.

    Args:
        statistics_name: name of what is timed, where there are several timers.
        task_types: classes to time; None: all.

    Attributes:
        durations: class name -> seconds of each execution, in the order in which they ended.
    """

    def __init__(
        self, statistics_name: str = "tasks", task_types: Sequence[type] | None = None
    ) -> None:
        super().__init__(task_types)
        self.statistics_name = statistics_name
        self.durations: dict[str, list[float]] = {}

    def _on_ended(self, task: Any, seconds: float) -> None:
        self.durations.setdefault(type(task).__name__, []).append(seconds)

    @property
    def total_seconds(self) -> float:
        """All durations together; concurrent tasks count each."""
        return sum(sum(seconds) for seconds in self.durations.values())


class QueryCollector(TaskCollection):
    """Keeps all queries: prompts as text or ids, chats as lists of messages.

    Attributes:
        queries: in the order of execution.
    """

    def __init__(self) -> None:
        self.queries: list[Any] = []

    def before_yield(self, tasks: Sequence[Any]) -> None:
        """Record every query; further steps of a stream are not recorded."""
        for task in tasks:
            if isinstance(task, ChatTask):
                self.queries.append(task.messages_to_dict_content())
            elif isinstance(task, GenerationTask) and not _goes_on(task):
                self.queries.append(task.input_tokens or task.input_str)


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """One execution of one task."""

    controller_name: str
    task_type: str
    seconds: float
    status: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    finish_reason: str | None
    messages: list[dict[str, Any]] | None
    """The chat as it stood afterwards, if it was to be captured."""


class TaskMetricsCollector(_Clock):
    """A record of every execution, and statistics over them.

    Args:
        controller_name: put into each record.
        task_types: classes to record; None: all.
        enable_print: log each record, at level INFO.
        capture_messages: keep the messages of chats.
    """

    def __init__(
        self,
        controller_name: str,
        task_types: Sequence[type] | None = None,
        enable_print: bool = True,
        capture_messages: bool = False,
    ) -> None:
        super().__init__(task_types)
        self.controller_name, self.enable_print = controller_name, enable_print
        self.capture_messages = capture_messages
        self._records: list[TaskRecord] = []

    def _on_ended(self, task: Any, seconds: float) -> None:
        record = self._record(task, seconds)
        self._records.append(record)
        if self.enable_print:
            _logger.info("%s", record)

    def _record(self, task: Any, seconds: float) -> TaskRecord:
        chat = self.capture_messages and isinstance(task, ChatTask)
        status = getattr(task, "status", None)
        return TaskRecord(
            controller_name=self.controller_name,
            task_type=type(task).__name__,
            seconds=seconds,
            status=status.value if status else None,
            prompt_tokens=getattr(task, "usage_prompt_tokens", None),
            completion_tokens=getattr(task, "usage_completion_tokens", None),
            finish_reason=getattr(task, "finish_reason", None),
            messages=task.messages_to_dict_content() if chat else None,
        )

    def get_all_records(self) -> list[TaskRecord]:
        """The records so far, in the order in which the tasks ended."""
        return list(self._records)

    def get_statistics(self) -> dict[str, dict[str, float]]:
        """Per class of task: executions, seconds and tokens."""
        totals: dict[str, dict[str, float]] = defaultdict(
            lambda: {"count": 0, "seconds": 0.0, "prompt_tokens": 0, "completion_tokens": 0}
        )
        for record in self._records:
            row = totals[record.task_type]
            row["count"] += 1
            row["seconds"] += record.seconds
            row["prompt_tokens"] += record.prompt_tokens or 0
            row["completion_tokens"] += record.completion_tokens or 0
        return dict(totals)

    def print_summary(self) -> None:
        """Log the statistics, at level INFO."""
        for task_type, row in self.get_statistics().items():
            _logger.info("%s %s: %s", self.controller_name, task_type, row)

    def export_to_json(self, path: str | Path) -> None:
        """Write all records to a file."""
        records = [asdict(record) for record in self._records]
        save_text(path, json.dumps(records, indent=2), "statistics of tasks")

    def reset(self) -> None:
        """Remove all records."""
        self._records.clear()
