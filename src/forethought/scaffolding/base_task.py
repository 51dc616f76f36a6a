"""``Task``, the base of all tasks, and the tasks that generate no text.

=================  ===========================================================================
``RewardTask``     scores an answer, or its steps
``MCPCallTask``    calls a tool; ``MCPToolListTask`` asks which tools there are
``ComputeTask``    runs a function of the controller beside the event loop
=================  ===========================================================================
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Self

from forethought.outputs import DraftSpan, Usage
from forethought.scaffolding.result import CallDelta, Delta, ScaffoldingOutput
from forethought.scaffolding.settings import OnFailure

_CONTAINERS = (list, dict, set)


class TaskStatus(Enum):
    """The outcome of a task."""

    SUCCESS = "success"
    WORKER_NOT_SUPPORTED = "worker_not_supported"
    WORKER_EXECEPTION = "worker_exception"
    """The misspelling is the established name."""
    WORKER_EXCEPTION = WORKER_EXECEPTION


@dataclass(eq=False)
class Task:
    """Base of all tasks.

    A subclass need not call ``super().__init__``: the class attributes are the defaults.

    Attributes:
        worker_tag: key of its worker, in ``ScaffoldingLlm``'s ``workers``.
        streaming_output_flag: whether what the worker produces is streamed to the caller.
        streaming_output_list: where a worker appends what it streams.
        stream_fields: what its streamed text is, for observers: plain values by name, as the fields
            of a ``Stage``. A search says the ``beam``, and what is an ``aside`` of it.
        streams_beside: whether what it streams is for observers alone (``events()``), and no part
            of the text of the request, as what a thread writes before it is joined.
        custom_input_params: for the user's own workers and collections; no built-in one reads it.
        custom_output_params: results of the user's own workers.
        on_failure: ``"raise"`` throws a failure into the controller at its ``yield``; ``"drop"``
            only records it in ``status`` and ``error``.
        priority: lower runs first where a worker has a queue; None: that of the request.
        status: the outcome; None before.
        error: why it failed.
        usage: tokens of the last execution, if its worker counts them.
    """

    worker_tag: Any = field(default=None)
    streaming_output_flag: bool = field(default=False)
    streaming_output_list: list[Any] = field(default_factory=list)
    custom_input_params: dict[str, Any] | None = field(default=None)
    custom_output_params: dict[str, Any] | None = field(default=None)
    stream_fields: Mapping[str, Any] | None = field(default=None, kw_only=True, repr=False)
    streams_beside: bool = field(default=False, kw_only=True, repr=False)
    on_failure: OnFailure = field(default="raise", kw_only=True)
    priority: int | None = field(default=None, kw_only=True)
    status: TaskStatus | None = field(default=None, init=False, repr=False)
    error: Exception | None = field(default=None, init=False, repr=False)
    usage: Usage = field(default_factory=Usage, init=False, repr=False)

    @staticmethod
    def create_from_prompt(prompt: Any) -> Task:
        """A task for a prompt; for subclasses to provide."""
        raise NotImplementedError

    def create_scaffolding_output(self) -> ScaffoldingOutput | None:
        """The output for the caller of the method; for subclasses to provide."""
        return None

    def create_scaffolding_output_stream(self) -> Any:
        """What the task streams; for subclasses to provide."""
        return None

    def copy(self) -> Self:
        """The same request without results: containers copied, contents shared."""
        duplicate = copy.copy(self)
        fields = vars(duplicate)
        for name, value in fields.items():
            if type(value) in _CONTAINERS:
                fields[name] = value.copy()
        duplicate.status = duplicate.error = None
        duplicate.usage, duplicate.streaming_output_list = Usage(), []
        return duplicate

    def emit(
        self,
        text: str,
        token_ids: Sequence[int] = (),
        source: str = "",
        drafts: Sequence[DraftSpan] = (),
        reasoning: str = "",
        calls: Sequence[CallDelta] = (),
    ) -> None:
        """For workers: stream new text and tokens to the caller, if the task is streamed."""
        if self.streaming_output_flag and (text or token_ids or reasoning or calls):
            delta = Delta(text, tuple(token_ids), source, tuple(drafts), reasoning, tuple(calls))
            self.streaming_output_list.append(delta)


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """The point at which another task's sequence is continued.

    A worker that holds the sequence forks it there, token for token; every other one uses
    ``input_str``, the whole as text.
    """

    handle: Any
    """The ``request_handle`` of the task that is continued."""
    num_kept: int | None
    """Generated tokens of it that are kept, however far it is; None: unknown to its worker."""
    suffix: str
    """Text appended to them."""
    input_str: str | None
    """The whole as text; once the task's ``input_str`` differs, the fork no longer applies."""
    output: ScaffoldingOutput | None = None
    """The output up to there, after the prompt of the first task of a chain of forks."""
    prompt_tokens: list[int] | None = None
    """That prompt, if it is token ids: a worker of an engine or a script that does not hold the
    sequence goes on from them, and from the output; others need a prompt in text."""

    def __reduce__(self) -> tuple[Any, ...]:
        kept = (self.num_kept, self.suffix, self.input_str, self.output, self.prompt_tokens)
        return type(self), (None, *kept)


class StreamedOutputs(list[Any]):
    """A ``streaming_output_list`` that passes each item on as soon as it is appended."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self._forward = forward

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ()  # a copy is a plain list and streams nothing

    def append(self, item: Any) -> None:
        """Pass ``item`` on; the list itself stays empty, so that a long stream costs nothing."""
        self._forward(item)

    def extend(self, items: Any) -> None:
        """Pass all ``items`` on, in order."""
        for item in items:
            self._forward(item)


@dataclass(eq=False)
class RewardTask(Task):
    """Score an answer.

    ``score`` is the result. Scoring several steps of one answer sets ``step_scores`` too, and
    their product as ``score``.
    """

    input_tokens: list[int] | None = None
    input_str: str | None = None
    """The question."""
    output_str: str | None = None
    """The answer to score."""
    step_positions: list[int] | None = None
    """Where steps end: positions in ``input_tokens`` at which a process reward model is read."""
    score: float | None = field(default=None, init=False)
    step_scores: list[float] = field(default_factory=list, init=False)

    def copy(self) -> Self:
        """The same request without results."""
        duplicate = super().copy()
        duplicate.score, duplicate.step_scores = None, []
        return duplicate


@dataclass(eq=False)
class MCPCallTask(Task):
    """Call a tool of an MCP server, or of whatever worker has the tag.

    ``result_str`` is what the model reads; with ``is_error`` it says what went wrong.
    """

    tool_call_id: str | None = None
    tool_name: str | None = None
    args: str | dict[str, Any] | None = None
    """The arguments: JSON as the model wrote it, or a dictionary; None: there are none."""
    result_str: str | None = field(default=None, init=False)
    result_stdout: str | None = field(default=None, init=False)
    """``stdout`` and ``stderr`` of a structured result that has them."""
    result_stderr: str | None = field(default=None, init=False)
    is_error: bool = field(default=False, init=False)

    @staticmethod
    def create_mcptask(
        tool_call_id: str | None, tool_name: str, args: Any, worker_tag: Any
    ) -> MCPCallTask:
        """A call of ``tool_name``, for the worker of ``worker_tag``."""
        return MCPCallTask(worker_tag, tool_call_id=tool_call_id, tool_name=tool_name, args=args)

    def copy(self) -> Self:
        """The same call without results."""
        duplicate = super().copy()
        duplicate.result_str = duplicate.result_stdout = duplicate.result_stderr = None
        duplicate.is_error = False
        return duplicate


@dataclass(eq=False)
class MCPToolListTask(Task):
    """Ask a worker for its tools."""

    tools: list[dict[str, Any]] = field(default_factory=list, init=False)
    """Their descriptions in OpenAI's form."""


class ComputeTask(Task):
    """A function of a controller, run beside the event loop: ``yield [ComputeTask(f, args)]``.

    No worker is needed: the driver calls ``function(*args, **kwargs)`` in a thread; a coroutine
    function is awaited on the event loop instead, and cancelled when the request ends. The return
    value lands in ``result``; what it raises is raised at the ``yield`` as it is.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.function, self.args, self.kwargs = function, args, kwargs
        self.result: Any = None
