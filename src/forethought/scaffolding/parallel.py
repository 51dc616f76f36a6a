"""Objects that a controller yields to run several tasks or branches at once.

============================  ==================================================================
``yield [task, ...]``         resumes when all tasks are done
``yield ParallelProcess(..)`` resumes when all branches are done
``done = yield AsCompleted``  resumes with the first item to finish; the others go on
``done = yield FirstDone``    resumes with the first item to finish; the others are cancelled
============================  ==================================================================

They only describe the work; the driver starts, awaits and cancels it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Protocol, Self

from forethought.errors import BudgetExceeded, ParameterError, UsageError
from forethought.scaffolding.base_task import Task
from forethought.scaffolding.settings import ON_FAILURE, Concurrency, OnFailure, validated

Process = Generator[Any, Any, Any]
"""A running controller: what ``Controller.process`` returns."""


class TaskProcessor(Protocol):
    """What a branch runs: a ``Controller``, or anything else with its ``process``."""

    def process(self, tasks: Sequence[Any], **kwargs: Any) -> Process:
        """Work on ``tasks``, leaving the results on them."""


def checked_process(controller: Any, method: str, returned: Any) -> Process:
    """Return the generator of a controller's ``method``; raise ``UsageError`` if it is none."""
    if not isinstance(returned, Generator):
        raise UsageError(
            f"{type(controller).__name__}.{method} is no generator: it returned {returned!r}",
            "a controller yields its tasks, and the driver runs them",
            "Write 'yield [task]', or 'yield from' another controller's process",
        )
    return returned


class Branch:
    """A controller that runs on its own tasks, in parallel with others.

    Args:
        controller: its ``process`` is called at once, and begins when the branch is yielded.
        tasks: passed to ``process``.
        kwargs: keyword arguments of ``process``.
        on_failure: ``"raise"`` throws the branch's failure into the controller that waits for it;
            ``"drop"`` only notes it in ``error``.

    Attributes:
        process: the generator of the controller.
        result: the value that it returned in the end.
        error: why it failed; None if it did not.
        path: its place in the request, once it has begun: ``"2"``, or ``"2.0"`` inside of ``"2"``.
    """

    def __init__(
        self,
        controller: TaskProcessor,
        tasks: Sequence[Task],
        kwargs: Mapping[str, Any] | None = None,
        on_failure: OnFailure = "raise",
    ) -> None:
        self._expect(kwargs, on_failure)
        self.controller, self.tasks = controller, tasks
        self.process = self._checked(controller, tasks)

    @classmethod
    def later(
        cls,
        make: Callable[[], tuple[TaskProcessor, Sequence[Task]]],
        kwargs: Mapping[str, Any] | None = None,
        on_failure: OnFailure = "raise",
    ) -> Self:
        """A branch whose controller and tasks are made when it begins, or at their first use."""
        branch = cls.__new__(cls)
        branch._expect(kwargs, on_failure)
        branch._make = make
        return branch

    def _expect(self, kwargs: Mapping[str, Any] | None, on_failure: OnFailure) -> None:
        self._kwargs = kwargs or {}
        self._make: Callable[[], tuple[TaskProcessor, Sequence[Task]]] | None = None
        self.on_failure = validated("on_failure", on_failure, ON_FAILURE)
        self.observers: list[tuple[object, Callable[[Process], Process]]] = []
        self.result: Any = None
        self.error: Exception | None = None
        self.path: str | None = None

    def _checked(self, controller: TaskProcessor, tasks: Sequence[Task]) -> Process:
        process = controller.process(tasks, **self._kwargs)
        return checked_process(controller, "process", process)

    @cached_property
    def _made(self) -> tuple[TaskProcessor, Sequence[Any]]:
        assert self._make is not None, "without it, the attributes are set"
        return self._make()

    @cached_property
    def controller(self) -> TaskProcessor:
        """The controller; made at first use."""
        return self._made[0]

    @cached_property
    def tasks(self) -> Sequence[Any]:
        """The tasks; made at first use."""
        return self._made[1]

    @cached_property
    def process(self) -> Process:
        """The generator; made at first use."""
        return self._checked(self.controller, self.tasks)

    def observe(self, owner: object, wrap: Callable[[Process], Process]) -> None:
        """Wrap the process in ``wrap`` when it begins, once for each owner."""
        if all(other is not owner for other, _ in self.observers):
            self.observers.append((owner, wrap))

    def begin(self) -> Process:
        """The process, wrapped by all observers."""
        process = self.process
        for _, wrap in self.observers:
            process = wrap(process)
        return process


def num_to_begin(
    concurrency: Concurrency, num_waiting: int, num_running: int, num_ended: int, first: int = 1
) -> int:
    """How many branches may begin now.

    Args:
        concurrency: how many may run at once.
        num_waiting: how many have not begun.
        num_running: how many are running.
        num_ended: how many have ended.
        first: how many begin at first, where their number doubles.
    """
    if concurrency is None:
        return num_waiting
    if concurrency == "doubling":
        return 0 if num_running else min(num_waiting, max(first, num_ended))
    return max(0, min(num_waiting, concurrency - num_running))


Item = Task | Branch
"""A unit of work in flight."""


class ParallelProcess:
    """Branches that run concurrently; the controller resumes when all of them are done.

    If one fails, the others are cancelled and its error is raised at the ``yield``.

    Args:
        controllers: one per branch; one controller may run several.
        tasks_list: the tasks of each branch.
        kwargs_list: the keyword arguments of each branch; None: none.
        on_failure: see ``Branch``.
    """

    def __init__(
        self,
        controllers: Sequence[TaskProcessor],
        tasks_list: Sequence[Sequence[Task]],
        kwargs_list: Sequence[Mapping[str, Any]] | None = None,
        on_failure: OnFailure = "raise",
    ) -> None:
        kwargs_list = [{}] * len(controllers) if kwargs_list is None else kwargs_list
        if not len(controllers) == len(tasks_list) == len(kwargs_list):
            raise ParameterError(
                "the lists of a ParallelProcess differ in length",
                f"{len(controllers)} controllers, {len(tasks_list)} task lists and "
                f"{len(kwargs_list)} keyword arguments",
                "Give one of each per branch",
            )
        self.branches = [
            Branch(controller, tasks, kwargs, on_failure)
            for controller, tasks, kwargs in zip(controllers, tasks_list, kwargs_list, strict=True)
        ]

    @property
    def sub_gens(self) -> list[Process]:
        """The generators of the branches."""
        return [branch.process for branch in self.branches]


Job = asyncio.Future[None]
"""A running item."""


class AsCompleted:
    """Items in flight, returned one by one as they finish.

    ::

        with AsCompleted([main, probe]) as running:
            while running:
                done = yield running      # the first to finish; the others go on
                if done is main:
                    running.add(main)     # a stream goes on to its next step

    Leaving the ``with`` block cancels the remaining items; of a stream, the generation too. A
    failure is raised at the ``yield``; the other items run on, so that the controller can catch it.
    """

    def __init__(self, items: Iterable[Item] = ()) -> None:
        self._new: dict[int, Item] = {}
        self._running: dict[int, tuple[Item, Job]] = {}
        self._finished: deque[tuple[Item, Job]] = deque()
        self._cancelled: list[Item] = []
        self._stopped: list[Job] = []
        self.add(*items)

    def add(self, *items: Item) -> None:
        """Add items; they start at the next ``yield``."""
        for item in items:
            if id(item) in self._running or id(item) in self._new:
                raise UsageError(
                    "the same item is in flight twice",
                    f"{type(item).__name__} was added before it finished",
                    "Wait for it, or use a copy",
                )
            if self._cancelled:
                self._cancelled = [other for other in self._cancelled if other is not item]
            self._new[id(item)] = item

    def cancel(self, *items: Item) -> None:
        """Cancel the given items, or all; they are not returned any more."""
        pending = self.pending
        unwanted = {id(item) for item in items or pending}
        self._cancelled += [item for item in pending if id(item) in unwanted]
        for key in unwanted & self._new.keys():
            del self._new[key]
        self._finished = deque(done for done in self._finished if id(done[0]) not in unwanted)
        for key in unwanted & self._running.keys():
            self._stopped.append(self._running.pop(key)[1])

    @property
    def pending(self) -> list[Item]:
        """Items that have not been returned yet, in no particular order."""
        started = (*self._finished, *self._running.values())
        return [*(item for item, _ in started), *self._new.values()]

    def __len__(self) -> int:
        return len(self._finished) + len(self._running) + len(self._new)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    # ---- for the driver and the collections ---------------------------------------------------

    @property
    def new(self) -> tuple[Item, ...]:
        """Items that the next ``yield`` will start."""
        return tuple(self._new.values())

    def started(self, item: Item, job: Job) -> None:
        """Record the job of an item that the driver has started."""
        self._new.pop(id(item), None)
        self._running[id(item)] = item, job

    def finished(self, item: Item) -> None:
        """Record that an item is done, unless it was cancelled before."""
        done = self._running.pop(id(item), None)
        if done is not None:
            self._finished.append(done)

    @property
    def has_finished(self) -> bool:
        """Whether an item has finished that was not returned yet."""
        return bool(self._finished)

    def take_stopped(self) -> list[Job]:
        """The jobs of items cancelled since the last call, which the driver has yet to end."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def take_cancelled(self) -> list[Item]:
        """Items cancelled since the last call."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def take(self) -> tuple[Item, Job] | None:
        """The first item that finished and was not returned yet."""
        return self._finished.popleft() if self._finished else None


class FirstDone:
    """Items in flight, of which the first to finish is returned; the others are then cancelled.

    ``winner = yield FirstDone([a, b])``. A failure counts as finishing: it is raised, and the
    others are cancelled.
    """

    def __init__(self, items: Iterable[Item]) -> None:
        self.race = AsCompleted(items)


def run_until(
    branches: Iterable[Branch],
    decided: Callable[[Branch], Process] | None = None,
    concurrency: int | None = None,
) -> Process:
    """Run branches until enough have ended; the rest is cancelled.

    When the budget is spent no further branch begins, and those that end nevertheless are enough,
    if there are any: beyond the calls, those that have begun run to their end.

    Args:
        branches: in the order in which they begin; one is taken when it is to begin.
        decided: called for each that ends, as ``yield from decided(branch)``; True: it is enough.
            None: all are to end.
        concurrency: branches running at once; None: all.

    Returns:
        Those that have ended, in the order in which they did.

    Raises:
        BudgetExceeded: it is spent, and none has ended.
    """
    waiting, ended = iter(branches), list[Branch]()
    spent: BudgetExceeded | None = None
    with AsCompleted() as running:
        while True:
            num_free = None if concurrency is None else concurrency - len(running)
            running.add(*itertools.islice(waiting, num_free))
            if not running:
                break
            try:
                ended.append((yield running))
                if decided is not None and (yield from decided(ended[-1])):
                    break
            except BudgetExceeded as error:
                waiting, spent = iter(()), error
    if spent is not None and not ended:
        raise spent
    return ended
