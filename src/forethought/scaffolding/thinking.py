"""How a model thinks, for methods: which markers open and close a thought.

A worker tells it for a prompt (``Worker.thinking``): the engine by its chat template and
vocabulary, ``OpenaiWorker`` by its arguments, or by what the server has sent. Where a worker does
not know, the text decides: what has an opening marker is a thought.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forethought.config.thoughts import MARKERS, markers_in
from forethought.errors import ParameterError
from forethought.scaffolding.execution_scope import current_scope
from forethought.scaffolding.task import GenerationTask

ThinkingUse = Literal["unused", "adapts", "required"]
"""What thoughts are to a method: it does not look at them; it does without where there are none;
or it is for models that think alone."""


@dataclass(frozen=True, slots=True)
class ThinkingProfile:
    """How a model thinks after a prompt."""

    markers: tuple[str, str] | None
    """What opens and closes a thought; None: the model does not think."""
    is_open: bool = False
    """The prompt ends within a thought."""
    is_known: bool = True
    """Told by the worker; else guessed by the text, with the markers of most models if it has
    none."""

    @classmethod
    def of_text(
        cls, text: str, markers: tuple[str, str] | None, is_known: bool = True
    ) -> ThinkingProfile:
        """The profile of a model with these markers after a text."""
        return cls(markers, markers is not None and is_within_thought(text, markers), is_known)

    @property
    def has_no_thoughts(self) -> bool:
        """Whether the model is known not to think."""
        return self.is_known and self.markers is None

    @property
    def think_end(self) -> str:
        """The closing marker of a thought; ``</think>`` where nothing is known."""
        return (self.markers or MARKERS[0])[1]

    def is_thinking(self, output: str) -> bool:
        """Whether an output after the prompt ends within a thought."""
        if self.markers is None:
            return False
        return is_within_thought(output, self.markers, self.is_open)


def is_within_thought(text: str, markers: Sequence[str], was_open: bool = False) -> bool:
    """Whether a text ends within a thought: its last marker decides, or else ``was_open``."""
    start, end = markers
    opened, closed = text.rfind(start), text.rfind(end)
    return was_open if opened == closed == -1 else opened > closed


def thinking_of(task: GenerationTask, tag: Any) -> ThinkingProfile:
    """How the model of the worker of ``tag`` thinks after the prompt of a task."""
    scope = current_scope()
    profile = None if scope is None or scope.thinking is None else scope.thinking(task, tag)
    text = task.input_str or ""
    return profile or ThinkingProfile.of_text(text, markers_in(text) or MARKERS[0], is_known=False)


def expect_thinking(method: str, profile: ThinkingProfile, why: str) -> None:
    """Refuse a method for models that think on one that is known not to.

    Args:
        method: its name.
        profile: of the model.
        why: what the method does with thoughts.
    """
    if profile.has_no_thoughts:
        raise ParameterError(
            f"{method} needs a model that thinks",
            f"{why}, and neither the vocabulary nor the chat template of this model has markers "
            f"such as {' '.join(MARKERS[0])}",
            "Use another method, or a reasoning model",
            param="method",
        )
