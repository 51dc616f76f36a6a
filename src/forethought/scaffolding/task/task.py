"""What all tasks have in common: who executes them, how they fared, what they cost."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Self

from forethought.outputs import Usage
from forethought.scaffolding.output import Delta, ScaffoldingOutput

OnFailure = Literal["raise", "drop"]
"""What becomes of a failure: it is raised in the controller that waits, or only noted."""


class TaskStatus(Enum):
    """How a worker fared with a task."""

    SUCCESS = "success"
    WORKER_NOT_SUPPORTED = "worker_not_supported"
    WORKER_EXECEPTION = "worker_exception"
    """The misspelling is the established name."""
    WORKER_EXCEPTION = WORKER_EXECEPTION


@dataclass(eq=False)
class Task:
    """Base of all tasks.

    A subclass need not call ``super().__init__``: the class attributes stand in.

    Attributes:
        worker_tag: key of the worker that shall execute it, in ``ScaffoldingLlm``'s ``workers``.
        streaming_output_flag: whether what the worker produces is streamed to the caller.
        streaming_output_list: where a worker appends what it streams.
        custom_input_params: for the user's own workers and collections; no built-in one reads it.
        custom_output_params: the same, on the way back.
        on_failure: ``"raise"`` throws a failure into the controller at its ``yield``; ``"drop"``
            only notes it in ``status`` and ``error``.
        priority: lower runs first where a worker has a queue; None: that of the request.
        status: how the worker fared; None before.
        error: why it failed.
        usage: what the last execution cost, as far as its worker counts it.
    """

    worker_tag: Any = field(default=None)
    streaming_output_flag: bool = field(default=False)
    streaming_output_list: list[Any] = field(default_factory=list)
    custom_input_params: dict[str, Any] | None = field(default=None)
    custom_output_params: dict[str, Any] | None = field(default=None)
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
        """What the task gives back to the caller of the method; for subclasses to provide."""
        return None

    def create_scaffolding_output_stream(self) -> Any:
        """What the task streams; for subclasses to provide."""
        return None

    def copy(self) -> Self:
        """The same request with its results blank: containers copied, contents shared."""
        twin = copy.copy(self)
        for name, value in vars(twin).items():
            if isinstance(value, list | dict | set):
                setattr(twin, name, copy.copy(value))
        twin.status = twin.error = None
        twin.usage, twin.streaming_output_list = Usage(), []
        return twin

    def emit(self, text: str, token_ids: Sequence[int] = (), source: str = "") -> None:
        """For workers: stream new text and tokens to the caller, if the task is streamed."""
        if self.streaming_output_flag and (text or token_ids):
            self.streaming_output_list.append(Delta(text, tuple(token_ids), source))
