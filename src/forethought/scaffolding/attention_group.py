"""Generations that read each other while they write.

Each task of a group attends to the tokens of the others in the pages where their sequences have
computed them (``model.attention.concurrent``), so only workers that hold sequences can run them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from forethought.errors import BudgetExceeded, ModelError, UsageError

if TYPE_CHECKING:
    from forethought.scaffolding.task import GenerationTask


class AttentionGroup:
    """Tasks of one worker that read each other's KV; each gets the group as ``attention_group``.

    Tasks that have begun when the group is made are read up to their present length. The others
    have to be yielded together: they begin in the same step of the engine.

    Args:
        tasks: with one sample each.
        common: the text that all prompts begin with; the others' tokens are read after it.
        adds: to what the sequences of forks read already; else in place of it.

    Attributes:
        failure: why the group cannot begin; None while it can.
    """

    def __init__(self, tasks: Sequence[GenerationTask], common: str, *, adds: bool = False) -> None:
        self.tasks, self.common, self.adds = tuple(tasks), common, adds
        self._expected = {id(task) for task in tasks if task.request_handle is None}
        self._ready: dict[int, Any] = {}
        self.failure: Exception | None = None
        self._begun: asyncio.Future[None] | None = None
        for task in tasks:
            task.attention_group = self

    @property
    def earlier(self) -> list[GenerationTask]:
        """The tasks that had begun when the group was made."""
        return [task for task in self.tasks if id(task) not in self._expected]

    async def begin(
        self, task: GenerationTask, ready: Any, start: Callable[[list[Any]], Awaitable[None]]
    ) -> None:
        """Wait until the group begins.

        Args:
            task: one that has not begun.
            ready: what the worker starts it from.
            start: begins all tasks from their ``ready``; called for the last one that arrives.

        Raises:
            UsageError: the task is not one that has yet to begin, or another one failed before it
                began.
            BudgetExceeded: that one was refused, because the budget is spent.
        """
        if self.failure is not None:
            raise self.failure
        is_over = self._begun is not None and self._begun.done()
        if id(task) not in self._expected or is_over:
            raise UsageError(
                "the task cannot begin with its attention group",
                "the group has begun" if is_over else "it is a copy, or had begun before",
                "Make a new group of the tasks that are to begin together",
            )
        if self._begun is None:
            self._begun = asyncio.get_running_loop().create_future()
        self._ready[id(task)] = ready
        if self._ready.keys() != self._expected:
            await asyncio.shield(self._begun)
            return
        await start(list(self._ready.values()))
        if not self._begun.done():
            self._begun.set_result(None)

    def ended(self, task: GenerationTask, error: BaseException | None) -> None:
        """A task is over, so those that wait for it fail unless the group has begun."""
        has_begun = self._begun is not None and self._begun.done()
        if id(task) not in self._expected or self.failure is not None or has_begun:
            return
        if isinstance(error, BudgetExceeded | ModelError):
            self.failure = error  # of all of them
        else:
            self.failure = _not_together(error or asyncio.CancelledError())
        if self._begun is not None:
            self._begun.set_exception(self.failure)
            self._begun.exception()  # nobody may wait for it


def _not_together(error: BaseException) -> UsageError:
    return UsageError(
        "the tasks of an attention group begin together",
        f"another one has failed first: {type(error).__name__}: {error}",
        "See its error",
    )
