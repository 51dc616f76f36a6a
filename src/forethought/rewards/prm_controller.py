"""``PRMController``: scores the steps of answers with a process reward model.

It writes the model's input in the model's format (``step_format``); a worker runs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any, Literal, Self

from forethought.errors import ParameterError
from forethought.rewards.step_format import STEP_FORMATS, ChatSteps, StepFormat
from forethought.scaffolding.base_task import ComputeTask, RewardTask
from forethought.scaffolding.controller import refuse_arguments
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.reward_controller import NativeRewardController, has_failed
from forethought.scaffolding.settings import required, setting, with_settings
from forethought.scaffolding.task import GenerationTask

StepAggregation = Literal["product", "min", "mean", "last"]
AGGREGATIONS: Mapping[StepAggregation, Callable[[Sequence[float]], float]] = {
    "product": math.prod,
    "min": min,
    "mean": lambda scores: math.fsum(scores) / len(scores),
    "last": lambda scores: scores[-1],
}
"""The score of an answer from those of its steps, of which there is at least one."""


@with_settings
class PRMController(NativeRewardController):
    """Scores answers step by step: ``scores`` holds one per task, in their order.

    The score of a step is the probability that it is good; ``step_scores`` holds them, one list per
    task. The worker of the tag ``REWARD``, such as ``RewardWorker``, reads the token ids and the
    positions of the scores from a ``RewardTask``. Texts are tokenised in a thread.

    Raises:
        UsageError, ParameterError: as ``ChatSteps``, if there is no other format; or
            ``aggregation`` is none of the four.
    """

    tokenizer: Any = required("The reward model's; shared by all clones.")
    split_steps: bool = setting(True, "See `ChatSteps`.")
    step_token: str = setting("\n\n", "See `ChatSteps`.")
    separate_token: str = setting("<extra_0>", "See `ChatSteps`.")
    _: KW_ONLY
    step_format: StepFormat | None = setting(
        None, "How the model reads an answer, in place of a chat with separators."
    )
    aggregation: StepAggregation = setting(
        "product",
        'What makes one score of those of the steps: `"product"`, `"min"`, `"mean"` or `"last"`.',
    )

    def __post_init__(self) -> None:
        self.format: StepFormat = self.step_format or ChatSteps(
            self.tokenizer, self.split_steps, self.step_token, self.separate_token
        )
        self.step_scores: list[list[float] | None] | None = None

    @classmethod
    def of(cls, worker: Any, aggregation: StepAggregation = "product") -> Self:
        """The controller for the model of a ``RewardWorker``, in the format that this reads."""
        step_format = STEP_FORMATS[worker.step_format](worker.tokenizer)
        return cls(worker.tokenizer, step_format=step_format, aggregation=aggregation)

    def process(self, tasks: Sequence[GenerationTask | RewardTask], **kwargs: Any) -> Process:
        """Score all tasks at once; questions and answers have to be text."""
        refuse_arguments(self, kwargs)
        tokenising = ComputeTask(self._rewards, list(tasks))
        yield [tokenising]
        yield from self._score(tokenising.result)

    def _score(self, rewards: Sequence[RewardTask | None]) -> Process:
        """Run the reward tasks; a worker that scores no steps scores the answers."""
        yield from super()._score(rewards)
        combine = AGGREGATIONS[self.aggregation]
        self.step_scores = [None if task is None else task.step_scores for task in rewards]
        self.scores = [
            combine(task.step_scores) if task is not None and task.step_scores else score
            for task, score in zip(rewards, self.scores or (), strict=True)
        ]

    def _rewards(self, tasks: Sequence[GenerationTask | RewardTask]) -> list[RewardTask | None]:
        return [None if has_failed(task) else self._encoded(self._reward(task)) for task in tasks]

    def _encoded(self, task: RewardTask) -> RewardTask:
        if task.input_str is None or task.output_str is None:
            raise ParameterError(
                "a process reward model scores text",
                "the task lacks input_str or output_str",
                "Give the prompt as text, and do not skip the detokenizer",
            )
        encoded = self.format.encode(task.input_str, task.output_str)
        task.input_tokens, task.step_positions = encoded
        return task
