"""What ends a task, a branch or a request without a result, as an error that tells the user."""

from __future__ import annotations

import asyncio
from typing import Any

from forethought.errors import BudgetExceeded, TaskError, UsageError
from forethought.scaffolding.base_task import Task, TaskStatus
from forethought.scaffolding.parallel import Item
from forethought.scaffolding.task import GenerationTask
from forethought.scaffolding.worker import Worker


def controller_quit(error: BaseException) -> UsageError:
    """The error of a request whose controller raises a ``BaseException``, such as ``SystemExit``.

    Raised as it is, it would end the event loop, or look like the cancellation of the request.
    """
    if isinstance(error, SystemExit):
        return UsageError("a controller called sys.exit()", f"code {error.code}")
    return UsageError(
        f"a controller raised {type(error).__name__}",
        str(error) or "it is no Exception, and ends more than the request",
        "Raise an Exception to fail the request",
    )


def is_cancelled(error: BaseException) -> bool:
    """Whether ``error`` was raised because the running asyncio task is being cancelled.

    A worker may raise the same exceptions itself, such as when a task of its own was cancelled.
    """
    try:
        current = asyncio.current_task()
    except RuntimeError:  # the event loop is gone, and its coroutines are closed
        return True
    cancelling = current is not None and current.cancelling() > 0
    return cancelling and isinstance(error, asyncio.CancelledError)


def failure_of(item: Item, error: BaseException) -> TaskError:
    """The error of a task or branch that failed with ``error``."""
    failed = TaskStatus.WORKER_EXECEPTION
    why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    failure = TaskError(f"{type(item).__name__} failed", why, task=item, status=failed)
    failure.__cause__ = error
    return failure


def is_of_group(error: BudgetExceeded, task: Task) -> bool:
    """Whether the error refused another task of the group with which this one was to begin."""
    group = task.attention_group if isinstance(task, GenerationTask) else None
    return group is not None and group.failure is error


def unsuccessful(task: Task, status: Any, worker: Worker) -> TaskError:
    """The error of a task whose worker returned another status than success."""
    kind, name = type(task).__name__, type(worker).__name__
    if not isinstance(status, TaskStatus):
        why, fix = f"{name} returned {status!r}", "Return a TaskStatus, or None for success"
        status = TaskStatus.WORKER_EXECEPTION
    elif status is TaskStatus.WORKER_NOT_SUPPORTED:
        why, fix = f"{name} has no handler for it", f"Register one: {name}.task_handlers"
    else:
        why, fix = f"{name} reports {status.value}", ""
    return TaskError(f"{kind} failed", why, fix, task=task, status=status)
