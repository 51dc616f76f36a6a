"""Controllers that score answers, and how a method reads the scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any

from forethought.errors import ParameterError
from forethought.scaffolding.base_task import RewardTask
from forethought.scaffolding.controller import Controller, refuse_arguments
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.task import GenerationTask


class NativeRewardController(Controller):
    """Scores answers: ``scores`` holds one per task, in their order.

    A finished generation task is scored by its question (``GenerationTask.question_text``) and its
    output, a reward task as it is. A generation task that failed with ``on_failure="drop"`` scores
    None.

    Attributes:
        sample_params: sampling fields that the generation of the scored answers has to set.
    """

    sample_params: Mapping[str, Any] = MappingProxyType({})

    class WorkerTag(Enum):
        """The worker that scores."""

        REWARD = "reward"

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[float | None] | None = None

    def process(self, tasks: Sequence[GenerationTask | RewardTask], **kwargs: Any) -> Process:
        """Score all tasks at once; it takes no keyword arguments."""
        refuse_arguments(self, kwargs)
        rewards = [None if has_failed(task) else self._reward(task) for task in tasks]
        yield from self._score(rewards)

    def _score(self, rewards: Sequence[RewardTask | None]) -> Process:
        """Run the reward tasks, and keep one score per entry; None where there is no task."""
        yield [task for task in rewards if task is not None]
        self.scores = [None if task is None else task.score for task in rewards]

    def _reward(self, task: GenerationTask | RewardTask) -> RewardTask:
        if not isinstance(task, RewardTask):
            task = RewardTask(input_str=task.question_text, output_str=task.output_str)
        task.worker_tag = self.WorkerTag.REWARD
        return task


def scores_of(reward: Controller, count: int) -> list[float | None]:
    """What a reward controller has left in ``scores`` for ``count`` tasks; None: there is none.

    Raises ParameterError unless it is a score per task, none of them NaN: it would win or lose by
    the order of the tasks.
    """
    scores = _values_of(reward, "scores", count)
    for number, score in enumerate(scores):
        _check_number(reward, number, [] if score is None else [score])
    return scores


def step_scores_of(reward: Controller, count: int) -> list[Sequence[float] | None]:
    """As ``scores_of``, the scores of each task's steps, which not every controller has."""
    if getattr(reward, "step_scores", None) is None:
        return [None] * count
    step_scores = _values_of(reward, "step_scores", count)
    for number, scores in enumerate(step_scores):
        _check_number(reward, number, scores or ())
    return step_scores


def _values_of(reward: Controller, name: str, count: int) -> list[Any]:
    values: Any = getattr(reward, name, None)
    if values is None or len(values) != count:
        raise ParameterError(
            f"{type(reward).__name__} is no reward controller",
            f"it leaves {values!r} as {name} of {count} samples",
            "Its process has to leave one score per task in its attribute scores",
        )
    return list(values)


def _check_number(reward: Controller, number: int, scores: Sequence[float]) -> None:
    if any(map(math.isnan, scores)):
        raise ParameterError(
            f"{type(reward).__name__} gives a score that is no number",
            f"that of sample {number} is nan",
            "Leave None where there is no score; a reward model may need dtype float32",
        )


def has_failed(task: GenerationTask | RewardTask) -> bool:
    """Whether there is no answer to score."""
    return isinstance(task, GenerationTask) and task.error is not None
