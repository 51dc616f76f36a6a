"""The task to judge an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from forethought.scaffolding.task.task import Task


@dataclass(eq=False)
class RewardTask(Task):
    """Judge an answer.

    ``score`` is the result. Judging several steps of one answer gives ``step_scores`` too, and
    their product as ``score``.
    """

    input_tokens: list[int] | None = None
    input_str: str | None = None
    """The question."""
    output_str: str | None = None
    """The answer to judge."""
    step_positions: list[int] | None = None
    """Where steps end: places in ``input_tokens`` at which a process reward model is read."""
    score: float | None = field(default=None, init=False)
    step_scores: list[float] = field(default_factory=list, init=False)

    def copy(self) -> Self:
        """The same request with its results blank."""
        twin = super().copy()
        twin.score, twin.step_scores = None, []
        return twin
