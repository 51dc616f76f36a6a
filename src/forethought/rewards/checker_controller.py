"""``CheckerController``: scores answers by a function of question and answer, without a model.

An exact checker is the outcome reward of tasks whose answers can be checked, and a function that
reads a partial answer is a process reward for a search::

    BestOfNController(generation, CheckerController("countdown"))
    BeamSearchController(generation, CheckerController(lambda question, text: ...))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any

from forethought.errors import ParameterError
from forethought.rewards import verifier as verifiers
from forethought.scaffolding.base_task import ComputeTask, RewardTask
from forethought.scaffolding.controller import refuse_arguments
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.reward_controller import NativeRewardController, has_failed
from forethought.scaffolding.settings import required, with_settings
from forethought.scaffolding.task import GenerationTask

Checker = Callable[[str, str], float]
"""(text of the question, text of the answer) -> its score; True is 1 and False 0."""


@with_settings
class CheckerController(NativeRewardController):
    """Scores answers by a function of question and answer.

    ``scores`` holds one per task, None for one that failed.

    Raises:
        ParameterError: it is no function.
        UnknownNameError: there is no verifier of this name.
    """

    class WorkerTag(Enum):
        """None: nothing is run."""

    checker: Checker | str = required(
        "Of the question's text and the answer's, which runs in a thread; or the name of one in "
        "`rewards.verifier`, whose scores are 1 and 0."
    )

    def __post_init__(self) -> None:
        self.check: Checker = (
            verifiers.verifier(self.checker) if isinstance(self.checker, str) else self.checker
        )

    def process(self, tasks: Sequence[GenerationTask | RewardTask], **kwargs: Any) -> Process:
        """Score all tasks, whose questions and answers have to be text."""
        refuse_arguments(self, kwargs)
        pairs = [None if has_failed(task) else _texts(task) for task in tasks]
        scoring = ComputeTask(partial(_score_all, self.check), pairs)
        yield [scoring]
        self.scores = scoring.result


def _texts(task: GenerationTask | RewardTask) -> tuple[str, str]:
    question = task.input_str if isinstance(task, RewardTask) else task.question_text
    if question is None or task.output_str is None:
        raise ParameterError(
            "a checker reads text",
            "the task lacks its question or its answer in text",
            "Give the text as well: generate(prompt, question=...), and keep the detokenizer",
        )
    return question, task.output_str


def _score_all(checker: Checker, pairs: Sequence[tuple[str, str] | None]) -> list[float | None]:
    return [None if pair is None else _number(checker(*pair)) for pair in pairs]


def _number(score: Any) -> float:
    if not isinstance(score, int | float):
        raise ParameterError(
            "a checker scores with a number", f"it returned {score!r}", "Return a float or a bool"
        )
    return float(score)
