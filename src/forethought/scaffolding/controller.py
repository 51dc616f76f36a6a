"""Controllers: an inference-time method is a generator that yields the work it needs done.

``process`` yields lists of tasks or the objects of ``parallel``, and resumes when they are done,
with the results on the tasks. It never awaits; the driver runs the tasks on workers.

Each request runs on a clone of a prototype controller (``Cloneable``), so that requests share no
state that they write to.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import KW_ONLY
from enum import Enum, StrEnum
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar

from pydantic_core import core_schema

from forethought.config.sampling import SamplingParams
from forethought.errors import BudgetExceeded, ParameterError
from forethought.moved_modules import former_name
from forethought.scaffolding import sampling
from forethought.scaffolding.base_task import Task
from forethought.scaffolding.execution_scope import current_scope
from forethought.scaffolding.messages import RoleMessage, SystemMessage
from forethought.scaffolding.parallel import (
    AsCompleted,
    Branch,
    FirstDone,
    ParallelProcess,
    Process,
    TaskProcessor,
    checked_process,
)
from forethought.scaffolding.result import ScaffoldingOutput
from forethought.scaffolding.settings import (
    ANY_TEXT,
    OnFailure,
    setting,
    validated,
    with_settings,
)
from forethought.scaffolding.task import ChatTask, GenerationTask
from forethought.scaffolding.thinking import ThinkingUse

_C = TypeVar("_C", bound="Cloneable")


class Cloneable:
    """Base of objects that are cloned for each request: controllers and task collections.

    Cloning is cheap: containers and cloneable attributes are copied, everything else (tokenizers,
    models, clients, functions) is shared.

    Attributes:
        clone_shares: names of attributes that clones share although they are containers.
        clone_copies: names of attributes that each clone gets a deep copy of.
    """

    clone_shares: ClassVar[tuple[str, ...]] = ()
    clone_copies: ClassVar[tuple[str, ...]] = ()

    def clone(self) -> Self:
        """A new object of the same class, made without calling ``__init__``.

        Containers and cloneable attributes are copied recursively, everything else is shared,
        unless ``clone_shares`` or ``clone_copies`` say otherwise.
        """
        return _clone(self, {})


def _clone(source: _C, memo: dict[int, Any]) -> _C:
    kind = type(source)
    clone = object.__new__(kind)
    memo[id(source)] = clone
    for name, value in vars(source).items():
        if name in kind.clone_shares:
            vars(clone)[name] = value
        elif name in kind.clone_copies:
            vars(clone)[name] = copy.deepcopy(value)
        else:
            vars(clone)[name] = _cloned(value, memo)
    return clone


def _cloned(value: Any, memo: dict[int, Any]) -> Any:
    """The clone's ``value``; an object that occurs twice is cloned once."""
    if id(value) not in memo:
        memo[id(value)] = _copy_of(value, memo)
    return memo[id(value)]


def _copy_of(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, Cloneable):
        overridden = type(value).clone is not Cloneable.clone
        return value.clone() if overridden else _clone(value, memo)
    if isinstance(value, dict):
        clone = memo[id(value)] = copy.copy(value)
        for key, item in value.items():
            clone[key] = _cloned(item, memo)
        return clone
    if isinstance(value, list | deque):
        sequence = memo[id(value)] = copy.copy(value)
        for index, item in enumerate(value):
            sequence[index] = _cloned(item, memo)
        return sequence
    if type(value) is tuple:
        return tuple(_cloned(item, memo) for item in value)
    return copy.copy(value) if isinstance(value, set | bytearray) else value


_COPIED_FIELDS = (
    "streaming_output_flag",
    "stream_fields",
    "streams_beside",
    "on_failure",
    "priority",
    "question",
    "skip_detokenizer",
)


class ConversationForm(StrEnum):
    """How a method answers a conversation."""

    MESSAGES = "messages"
    """As a ``ChatTask``: everything that it asks the model is a message after the others."""
    TEXT = "text"
    """As the text that a chat template makes of it, which the method continues."""
    NONE = "none"
    """Not at all."""


class Controller(Cloneable):
    """Base of all methods. Override ``process``; perhaps ``generate``; rarely ``clone``.

    Attributes:
        conversation: how it answers conversations.
        task_collections: collections attached by ``with_task_collection``, by name.
    """

    uses_thinking: ClassVar[ThinkingUse] = "unused"
    """What the thoughts of models are to it."""

    class WorkerTag(Enum):
        """The worker tags of this controller class."""

    task_collections: Mapping[str, Any] = MappingProxyType({})
    conversation: ClassVar[ConversationForm] = ConversationForm.MESSAGES
    draws_samples: ClassVar[bool] = False
    """Whether its samples have to differ, where no ``default_sample_num`` says so: an evaluation
    decodes greedily else."""
    joins_texts: ClassVar[bool] = False
    """Whether it puts texts together, so that its prompt has to be text: a server gives it the text
    of what a chat template has made."""
    paper: ClassVar[str] = ""
    """The paper that it follows: authors, title and year."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse ``async def`` generators, which the driver cannot run."""
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

    def __post_init__(self) -> None:
        """Check settings against each other and derive attributes; see ``with_settings``."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        """A setting of this type is a controller."""
        return core_schema.with_info_plain_validator_function(
            lambda value, info: expect_controller(info.context, value)
        )

    def generate(
        self,
        prompt: Any,
        *,
        sampling_params: Mapping[str, Any] | SamplingParams | None = None,
        question: str | None = None,
        history: Sequence[RoleMessage] = (),
        **kwargs: Any,
    ) -> Process:
        """Answer one prompt: make a task of it, process it, return its output.

        Args:
            prompt: text, token ids, or a ``ChatTask``.
            sampling_params: fields that the caller of the method sets on that task.
            question: the user's question as text, for verifiers and reward models, where ``prompt``
                is token ids or went through a chat template.
            history: messages before the question, for judges, where ``prompt`` went through a chat
                template.
            **kwargs: passed on to ``process``.
        """
        task = GenerationTask.create_from_prompt(prompt)
        task.question = None if question is None else validated("question", question, ANY_TEXT)
        task.history = list(history)
        sampling.choose(task, sampling.checked("sampling_params", sampling_params))
        try:
            yield from checked_process(self, "process", self.process([task], **kwargs))
        except BudgetExceeded:
            answer = task.result or _answer_so_far(task)
            if answer is None:
                raise
            return answer
        return task.samples if len(task.samples) > 1 else task.create_scaffolding_output()

    def fan_out(self) -> int:
        """At most how many times it calls each controller inside it, or the model, for a task."""
        return 1

    def num_generations(self) -> int:
        """At most how many generations it and its inner controllers begin for a task."""
        inner = sum(controller.num_generations() for controller in self.inner_controllers())
        return self.fan_out() * max(1, inner)

    def inner_controllers(self) -> list[Controller]:
        """The controllers among its attributes, also within lists and mappings, each once."""
        controllers: dict[int, Controller] = {}
        for value in vars(self).values():
            items = value.values() if isinstance(value, dict) else value
            for item in items if isinstance(value, list | tuple | dict) else [value]:
                if isinstance(item, Controller):
                    controllers[id(item)] = item
        return list(controllers.values())

    def process(self, tasks: Sequence[Any], **kwargs: Any) -> Generator[Any, Any, Any]:
        """Work on ``tasks``, leaving the results on them.

        Every method raises ``ParameterError`` for keyword arguments that it does not take and for
        tasks that it cannot honour. One that combines texts raises ``BudgetExceeded`` only if the
        budget is spent before there is a text; else it answers with the texts so far.
        """
        raise NotImplementedError(f"{type(self).__name__} does not override process")


def _answer_so_far(task: GenerationTask) -> ScaffoldingOutput | None:
    """The longest text that this scope has generated after the prompt; None: there is none.

    Of a fork, that includes the text that it continues. Asides do not count. Where there is no text
    yet, it is the longest thought that a server has sent separately.
    """
    scope = current_scope()
    generations = [] if scope is None else scope.account.generated_in(scope.path)
    outputs = [_continuation(task, other) for other in generations]
    longest = max((output for output in outputs if output is not None), key=_lengths, default=None)
    if longest is None or not any(_lengths(longest)):
        return None
    return dataclasses.replace(longest, finish_reason="length", stop_reason=None)


def _lengths(output: ScaffoldingOutput) -> tuple[int, int]:
    return len(output.text or ""), len(output.meta.get("reasoning") or "")


def _continuation(task: GenerationTask, other: GenerationTask) -> ScaffoldingOutput | None:
    """The output of ``other`` after the prompt of ``task``; None if its prompt is another one."""
    if other.is_aside:
        return None
    if isinstance(task, ChatTask):
        is_answer = isinstance(other, ChatTask) and other.answers(task.messages)
        return other.result if is_answer else None
    if other.fork_point is not None or isinstance(other, ChatTask):
        return other.joined
    if task.input_str is None:
        return other.result if other.input_tokens == task.input_tokens else None
    prompt = other.input_str or ""
    if other.result is None or not prompt.startswith(task.input_str):
        return None
    if prompt == task.input_str:
        return other.result
    before = ScaffoldingOutput.inserted(prompt[len(task.input_str) :])
    return ScaffoldingOutput.join([before, other.result])


@with_settings
class NativeGenerationController(Controller):
    """One plain generation per task."""

    class WorkerTag(Enum):
        """The worker that generates."""

        GENERATION = "generation"

    sampling_params: Mapping[str, Any] | SamplingParams | None = setting(
        None, "Sampling fields for tasks that do not set them themselves."
    )
    streaming: bool = setting(False, "Stream tokens to the caller as they come.")
    _: KW_ONLY
    custom_sampling_params: Mapping[str, Any] | SamplingParams | None = setting(
        None, "An older name of `sampling_params`."
    )

    def __post_init__(self) -> None:
        params = self.sampling_params
        if self.custom_sampling_params is not None:
            if params is not None:
                raise ParameterError(
                    f"{type(self).__name__} is given its sampling parameters twice",
                    "custom_sampling_params is an older name of sampling_params",
                    "Give sampling_params alone",
                )
            params = self.custom_sampling_params
        self.sampling_params = sampling.checked(type(self).__name__, params)

    def process(self, tasks: Sequence[GenerationTask], **kwargs: Any) -> Process:
        """Generate for all tasks at once; it takes no keyword arguments."""
        refuse_arguments(self, kwargs)
        params: Any = self.sampling_params
        for task in tasks:
            task.worker_tag = self.WorkerTag.GENERATION
            sampling.fill(task, params)
            task.streaming_output_flag = task.streaming_output_flag or self.streaming
        yield list(tasks)


@with_settings
class NativeChatController(NativeGenerationController):
    """One turn of chat per task: a plain task's prompt becomes the user's message.

    The answer is stored on the task and in the chat.
    """

    _: KW_ONLY
    system: str | None = setting(
        None, "A system prompt, to open the chats that are made of plain tasks."
    )

    def process(self, tasks: Sequence[GenerationTask], **kwargs: Any) -> Process:
        """Generate the assistant's next message in all chats at once; prompts have to be text."""
        chats = [self._chat(task) for task in tasks]
        try:
            yield from super().process(chats, **kwargs)
        finally:
            for task, chat in zip(tasks, chats, strict=True):
                if chat is not task:
                    task.take_answer(chat)
                    task.chat, task.samples = chat, chat.samples
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
        chat = ChatTask.create_from_prompt(task.input_str, [*opening, *task.history])
        sampling.carry(task, chat)
        for name in _COPIED_FIELDS:
            setattr(chat, name, getattr(task, name))
        return chat


def expect_controller(name: str, value: Any) -> Any:
    """Return ``value`` if it is a controller; else raise ``ParameterError``."""
    if not isinstance(value, Controller):
        raise ParameterError(
            f"invalid {name}",
            f"got {value!r}",
            "Give a controller; forethought.methods.create makes one of a name",
        )
    return value


def expect_generation(value: Any) -> Any:
    """``value``, the controller that generates for another one; raises as ``expect_controller``."""
    return expect_controller("generation_controller", value)


def first_tag(controller: Controller) -> Any:
    """The worker tag that the controller's class declares for its tasks."""
    tags: list[Any] = list(type(controller).WorkerTag)
    return tags[0] if tags else NativeGenerationController.WorkerTag.GENERATION


def expect_streams(method: str, controller: Controller) -> None:
    """Raise ``ParameterError`` unless the controller generates its task itself, so that it can
    stream.
    """
    plain = isinstance(controller, NativeGenerationController)
    if not plain or isinstance(controller, NativeChatController):
        raise ParameterError(
            f"{method} cannot stop the samples of another method",
            f"{type(controller).__name__} does not generate one stream",
            "Give a NativeGenerationController",
        )


def expect_prompt(method: str, tasks: Sequence[GenerationTask]) -> GenerationTask:
    """Return the only task, which has to be text to continue; else raise ``ParameterError``."""
    if len(tasks) != 1 or isinstance(tasks[0], ChatTask) or tasks[0].skip_detokenizer:
        raise ParameterError(
            f"{method} takes one prompt, and gives text",
            f"got {len(tasks)} tasks, a chat, or skip_detokenizer",
            "Give prompts apart, and a chat as llm.chat_prompt(messages)",
        )
    return tasks[0]


def expect_one(method: str, tasks: Sequence[Any]) -> Any:
    """Return the one task of a method; raise ``ParameterError`` if there is not exactly one."""
    if len(tasks) != 1:
        raise ParameterError(f"{method} takes one task", f"got {len(tasks)}", "Give them apart")
    return tasks[0]


def expect_one_text(method: str, tasks: Sequence[GenerationTask]) -> GenerationTask:
    """Return the one task of a method if its output is wanted as text; else raise
    ``ParameterError``.
    """
    if len(tasks) != 1 or tasks[0].skip_detokenizer:
        raise ParameterError(
            f"{method} takes one task, with text",
            f"got {len(tasks)}, or skip_detokenizer",
            "Give them apart",
        )
    return tasks[0]


def expect_text(method: str, task: GenerationTask, why: str, fix: str = "Leave it out") -> None:
    """Raise ``ParameterError`` unless the output of a task is wanted as text.

    Args:
        method: for the error.
        task: of the request.
        why: what the method needs the text for.
        fix: what the caller can do.
    """
    if task.skip_detokenizer:
        raise ParameterError(f"{method} cannot honour skip_detokenizer", why, fix)


def sampled(
    controller: Controller,
    tasks: Sequence[Task],
    num_samples: int,
    options: Mapping[str, Any] | None = None,
    on_failure: OnFailure = "raise",
) -> list[Branch]:
    """Branches that draw samples: each runs a clone of a controller on copies of the tasks.

    Both are made when a branch begins, so that branches that never begin cost nothing.

    Args:
        controller: generates one sample.
        tasks: of the request; the copies of each sample differ in what they draw, under a seed too.
        num_samples: at least one.
        options: keyword arguments of its ``process``.
        on_failure: see ``Branch``.
    """

    def sample(number: int) -> tuple[Controller, list[Any]]:
        copies = [task.copy() for task in tasks]
        for task in copies:
            sampling.vary(task, number)
        return controller.clone(), copies

    return [
        Branch.later(partial(sample, number), options, on_failure) for number in range(num_samples)
    ]


def answer_by(controller: Controller, task: GenerationTask, replacement: GenerationTask) -> Process:
    """Answer ``replacement`` with a clone of the controller, and leave its results on ``task``.

    The results so far are left where the budget ends it, too.
    """
    try:
        yield from controller.clone().process([replacement])
    finally:
        task.result, task.samples = replacement.result, replacement.samples
        task.request_handle = replacement.request_handle
        task.status, task.error = replacement.status, replacement.error


def side_by_side(
    controller: TaskProcessor,
    tasks: Sequence[GenerationTask],
    solve: Callable[[Any], Process],
    options: Mapping[str, Any] | None = None,
) -> Process:
    """The ``process`` of a method that solves each task alone, several of them in branches."""
    if len(tasks) == 1:
        yield from solve(tasks[0])
    else:
        tasks_list = [[task] for task in tasks]
        yield ParallelProcess(
            [controller] * len(tasks_list), tasks_list, [options or {}] * len(tasks_list)
        )


def refuse_arguments(
    controller: Controller, kwargs: Mapping[str, Any], method: str = "process"
) -> None:
    """Refuse arguments of ``method`` that would change nothing, such as single sampling fields."""
    if kwargs:
        owner, name = type(controller).__name__, next(iter(kwargs))
        raise ParameterError(
            f"{owner} takes no argument {name!r}",
            f"its {method} has no keyword arguments",
            f"Give sampling_params={{{name!r}: ...}}"
            if name in sampling.FIELDS
            else "Leave it out",
        )


def __getattr__(name: str) -> Any:
    return former_name(__name__, name)


__all__ = [
    "AsCompleted",
    "Branch",
    "Controller",
    "FirstDone",
    "NativeChatController",
    "NativeGenerationController",
    "ParallelProcess",
    "ScaffoldingOutput",
    "Task",
]
