"""How the prototype of something becomes the one of a single request.

Cloning must be cheap (once per request and per sample) and must not let requests share what they
write to. So containers and cloneable things are copied, and everything else is shared: tokenizers,
models, clients, functions.

[controller] Controllers: an inference-time method is a generator that yields what it wants done.

``process`` yields lists of tasks or the things of ``parallel``; it resumes when they are done, with
the results on the tasks. It never awaits, and knows nothing about workers, loops or threads.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar

from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError
from forethought.scaffolding import sampling
from forethought.scaffolding.parallel import (
    AsCompleted,
    Branch,
    FirstDone,
    ParallelProcess,
    Process,
)
from forethought.scaffolding.result import ScaffoldingOutput
from forethought.scaffolding.settings import BOOL, validated
from forethought.scaffolding.task import ChatTask, GenerationTask, RewardTask, SystemMessage, Task

_C = TypeVar("_C", bound="Cloneable")


class Cloneable:
    """Something of which every request gets its own.

    Attributes:
        clone_shares: names of attributes that clones share although they are containers.
        clone_copies: names of attributes that each clone gets a deep copy of.
    """

    clone_shares: ClassVar[tuple[str, ...]] = ()
    clone_copies: ClassVar[tuple[str, ...]] = ()

    def clone(self) -> Self:
        """One for a request: the same class, attributes of its own, ``__init__`` not called.

        Containers and cloneable things among the attributes are copied, recursively; everything
        else is shared, unless ``clone_shares`` or ``clone_copies`` say otherwise.
        """
        return _clone(self, {})


def _clone(original: _C, memo: dict[int, Any]) -> _C:
    kind = type(original)
    sibling = object.__new__(kind)
    memo[id(original)] = sibling
    for name, value in vars(original).items():
        if name in kind.clone_shares:
            vars(sibling)[name] = value
        elif name in kind.clone_copies:
            vars(sibling)[name] = copy.deepcopy(value)
        else:
            vars(sibling)[name] = _own(value, memo)
    return sibling


def _own(value: Any, memo: dict[int, Any]) -> Any:
    """What a clone has in place of ``value``; the same thing twice stays the same thing twice."""
    if id(value) not in memo:
        memo[id(value)] = _copied(value, memo)
    return memo[id(value)]


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, Cloneable):
        overridden = type(value).clone is not Cloneable.clone
        return value.clone() if overridden else _clone(value, memo)
    if isinstance(value, dict):
        sibling = memo[id(value)] = copy.copy(value)
        for key, item in value.items():
            sibling[key] = _own(item, memo)
        return sibling
    if isinstance(value, list | deque):
        sequence = memo[id(value)] = copy.copy(value)
        for index, item in enumerate(value):
            sequence[index] = _own(item, memo)
        return sequence
    if type(value) is tuple:
        return tuple(_own(item, memo) for item in value)
    return copy.copy(value) if isinstance(value, set | bytearray) else value


_CARRIED = ("streaming_output_flag", "on_failure", "priority", "skip_detokenizer")


class Controller(Cloneable):
    """Base of all methods. Override ``process``; perhaps ``generate``; rarely ``clone``.

    Attributes:
        task_collections: what ``with_task_collection`` has attached, by name.
    """

    class WorkerTag(Enum):
        """The kinds of worker that a controller needs; each controller class has its own."""

    task_collections: Mapping[str, Any] = MappingProxyType({})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a class whose generators are coroutines: nothing could drive them.

        Raises:
            ParameterError: ``process`` or ``generate`` is an ``async def``.
        """
        super().__init_subclass__(**kwargs)
        for name in ("process", "generate"):
            method = vars(cls).get(name)
            if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
                raise ParameterError(
                    f"{cls.__name__}.{name} is an async def",
                    "a controller is a plain generator; it yields tasks and never awaits",
                    f"Write def {name}(...), 'yield [task]' instead of await, and put slow work "
                    "into a ComputeTask",
                )

    def __init__(self) -> None:
        self.task_collections = {}

    def generate(
        self,
        prompt: Any,
        *,
        sampling_params: Mapping[str, Any] | SamplingParams | None = None,
        **kwargs: Any,
    ) -> Process:
        """Answer one prompt: make a task of it, process it, return its output.

        Args:
            prompt: text or token ids.
            sampling_params: fields that the caller of the method sets on that task.
            **kwargs: handed on to ``process``.
        """
        task = GenerationTask.create_from_prompt(prompt)
        sampling.choose(task, sampling.checked("sampling_params", sampling_params))
        yield from self.process([task], **kwargs)
        return task.samples if len(task.samples) > 1 else task.create_scaffolding_output()

    def process(self, tasks: Sequence[Any], **kwargs: Any) -> Generator[Any, Any, Any]:
        """Work on ``tasks``, leaving the results on them."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it processes tasks")


class NativeGenerationController(Controller):
    """One plain generation per task.

    Args:
        sampling_params: sampling fields for tasks that do not set them themselves.
        streaming: stream tokens to the caller as they come.
        custom_sampling_params: an older name of ``sampling_params``.

    Raises:
        ParameterError: a sampling parameter that does not exist, both names of them, or
            ``streaming`` is not a bool.
    """

    class WorkerTag(Enum):
        """The worker that generates."""

        GENERATION = "generation"

    def __init__(
        self,
        sampling_params: Mapping[str, Any] | SamplingParams | None = None,
        streaming: bool = False,
        *,
        custom_sampling_params: Mapping[str, Any] | SamplingParams | None = None,
    ) -> None:
        super().__init__()
        if sampling_params is not None and custom_sampling_params is not None:
            raise ParameterError(
                f"{type(self).__name__} is given its sampling parameters twice",
                "custom_sampling_params is an older name of sampling_params",
                "Give sampling_params alone",
            )
        given = custom_sampling_params if sampling_params is None else sampling_params
        self.sampling_params = sampling.checked(type(self).__name__, given)
        self.streaming = validated("streaming", streaming, BOOL)

    def process(self, tasks: Sequence[GenerationTask], **kwargs: Any) -> Process:
        """Generate for all tasks at once.

        Raises:
            ParameterError: keyword arguments; there are none.
        """
        refuse_arguments(self, kwargs)
        for task in tasks:
            task.worker_tag = self.WorkerTag.GENERATION
            sampling.fill(task, self.sampling_params)
            task.streaming_output_flag = task.streaming_output_flag or self.streaming
        yield list(tasks)


class NativeChatController(NativeGenerationController):
    """One turn of chat per task: a plain task's prompt becomes the user's message.

    The answer is left on the task that was given, as well as in the chat.

    Args:
        sampling_params: sampling fields for tasks that do not set them themselves.
        streaming: stream tokens to the caller as they come.
        system: a system prompt, to open the chats that are made of plain tasks.
        custom_sampling_params: an older name of ``sampling_params``.

    Raises:
        ParameterError: as ``NativeGenerationController``.
    """

    def __init__(
        self,
        sampling_params: Mapping[str, Any] | SamplingParams | None = None,
        streaming: bool = False,
        *,
        system: str | None = None,
        custom_sampling_params: Mapping[str, Any] | SamplingParams | None = None,
    ) -> None:
        super().__init__(sampling_params, streaming, custom_sampling_params=custom_sampling_params)
        self.system = system

    def process(self, tasks: Sequence[GenerationTask], **kwargs: Any) -> Process:
        """Let the assistant answer in all chats at once.

        Raises:
            ParameterError: keyword arguments, or a task whose prompt is not text.
        """
        chats = [self._chat(task) for task in tasks]
        yield from super().process(chats, **kwargs)
        for task, chat in zip(tasks, chats, strict=True):
            if chat is not task:
                task.result, task.samples = chat.result, chat.samples
                task.status, task.error = chat.status, chat.error

    def _chat(self, task: GenerationTask) -> ChatTask:
        if isinstance(task, ChatTask):
            return task
        if task.input_str is None:
            raise ParameterError(
                "a chat needs text",
                "the task has no input_str; token ids cannot be put into a message",
                "Give text, or use NativeGenerationController",
            )
        opening = [] if self.system is None else [SystemMessage(self.system)]
        chat = ChatTask.create_from_prompt(task.input_str, opening)
        sampling.carry(task, chat)
        for name in _CARRIED:
            setattr(chat, name, getattr(task, name))
        return chat


class NativeRewardController(Controller):
    """Judges answers: ``scores`` holds one per task, in their order.

    A generation task that has run is judged by its prompt and its output; reward tasks as they are.
    One that failed, and says that this is only to be noted, is not judged: its score is None.
    """

    class WorkerTag(Enum):
        """The worker that judges."""

        REWARD = "reward"

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[float | None] | None = None

    def process(self, tasks: Sequence[GenerationTask | RewardTask], **kwargs: Any) -> Process:
        """Judge all tasks at once.

        Raises:
            ParameterError: keyword arguments; there are none.
        """
        refuse_arguments(self, kwargs)
        judged = [None if has_failed(task) else self._reward(task) for task in tasks]
        yield from self._judge(judged)

    def _judge(self, judged: Sequence[RewardTask | None]) -> Process:
        """Have the tasks judged that there are, and keep the scores of all."""
        yield [task for task in judged if task is not None]
        self.scores = [None if task is None else task.score for task in judged]

    def _reward(self, task: GenerationTask | RewardTask) -> RewardTask:
        if not isinstance(task, RewardTask):
            task = RewardTask(input_str=task.input_str, output_str=task.output_str)
        task.worker_tag = self.WorkerTag.REWARD
        return task


def has_failed(task: GenerationTask | RewardTask) -> bool:
    """Whether there is no answer to judge."""
    return isinstance(task, GenerationTask) and task.error is not None


def expect_controller(name: str, value: Any) -> Any:
    """``value``, a controller.

    Raises:
        ParameterError: it is anything else.
    """
    if not isinstance(value, Controller):
        raise ParameterError(
            f"invalid {name}",
            f"got {value!r}",
            "Give a controller; forethought.methods.create makes one of a name",
        )
    return value


def refuse_arguments(
    controller: Controller, kwargs: Mapping[str, Any], method: str = "process"
) -> None:
    """Refuse arguments that would change nothing, such as sampling fields given one by one.

    Args:
        controller: who was given them.
        kwargs: the arguments.
        method: which of its methods.

    Raises:
        ParameterError: there are any.
    """
    if kwargs:
        owner, name = type(controller).__name__, next(iter(kwargs))
        raise ParameterError(
            f"{owner} takes no argument {name!r}",
            f"its {method} has no keyword arguments",
            f"Give sampling_params={{{name!r}: ...}}"
            if name in sampling.FIELDS
            else "Leave it out",
        )


_METHODS = {
    "MajorityVoteController": "forethought.methods.majority_vote",
    "BestOfNController": "forethought.methods.best_of_n",
    "PRMController": "forethought.scaffolding.prm_controller",
}


def __getattr__(name: str) -> Any:
    """Methods that code written for ``tensorrt_llm.scaffolding`` looks for in this module."""
    if name not in _METHODS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_METHODS[name]), name)


__all__ = [
    "AsCompleted",
    "Branch",
    "Controller",
    "FirstDone",
    "NativeChatController",
    "NativeGenerationController",
    "NativeRewardController",
    "ParallelProcess",
    "ScaffoldingOutput",
    "Task",
]
