"""Best of N: sample several answers, score each, return the one with the highest score.

``choice="weighted"`` adds the scores of samples whose answers mean the same, and returns the best
sample of the answer with the largest sum: a vote in which a sample weighs as much as its score::

    answer   7    5    7    5          7 has 0.5 + 0.4 = 0.9, 5 has 0.8 + 0.0
    score   .5   .8   .4   .0          best: sample 1     weighted: sample 0

The score comes from a reward model, outcome or process (``NativeRewardController``,
``PRMController``), from a judge (``rewards.judge``), or from the model's own confidence
(``ConfidenceRewardController``).

The weighted choice is its voting verifier (arXiv 2206.02336).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any, Literal

from forethought.answers import answer_spaces
from forethought.answers.answer_extraction import AnswerRule
from forethought.answers.answer_spaces import AnswerSpace
from forethought.answers.answers import AnswerPool
from forethought.errors import BudgetExceeded, ParameterError
from forethought.scaffolding import sampling
from forethought.scaffolding.controller import Controller, expect_one, refuse_arguments, sampled
from forethought.scaffolding.parallel import Process, run_until
from forethought.scaffolding.result import Stage
from forethought.scaffolding.reward_controller import scores_of
from forethought.scaffolding.settings import (
    POSITIVE_INT,
    OnFailure,
    PositiveInt,
    required,
    setting,
    validated,
    with_settings,
)
from forethought.scaffolding.task import GenerationTask

Choice = Literal["best", "weighted"]


@with_settings
class BestOfNController(Controller):
    """Runs a controller several times and returns the sample with the highest reward score.

    ``customized_result_fields["best_of_n"]`` holds the ``scores`` and the winner's ``index``,
    and of a weighted choice the ``answer``.

    Raises:
        ParameterError: fewer than one sample, or a setting of the wrong kind.
    """

    paper = (
        'Li et al., "Making Large Language Models Better Reasoners with Step-Aware Verifier", 2022'
    )

    generation_controller: Controller = required("Cloned for each sample.")
    reward_controller: Controller = required(
        "Its `process` scores the samples' tasks and sets `scores`."
    )
    default_sample_num: PositiveInt = setting(4, "Samples, unless `process` gets `sample_num`.")
    _: KW_ONLY
    on_failure: OnFailure = setting(
        "raise",
        '`"drop"` leaves failed samples out, as long as one does not fail; a failure of the '
        "reward controller is always raised.",
    )
    choice: Choice = setting(
        "best",
        '`"best"` returns the sample with the highest score; `"weighted"` that of the answer '
        "whose samples have the highest sum of scores.",
    )
    answer_space: AnswerSpace | str = setting(
        "math",
        "For the weighted choice: how the answer is extracted and which answers mean the same, as "
        "in `majority_vote`.",
    )
    answer: AnswerRule = setting(
        "auto", "The rule that finds answers, see `answers.answer_extraction`."
    )

    def __post_init__(self) -> None:
        self.space = self.answer_space = answer_spaces.answer_space(self.answer_space, self.answer)

    def fan_out(self) -> int:
        """The samples."""
        return self.default_sample_num

    def process(
        self,
        tasks: Sequence[GenerationTask],
        sample_num: int | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
        reward_kwargs: Mapping[str, Any] | None = None,
        select_best_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Process:
        """Sample, score, and leave the best sample on the only task.

        Args:
            tasks: exactly one; copied for each sample.
            sample_num: samples; None: ``default_sample_num``.
            generation_kwargs: keyword arguments of the samples' ``process``.
            reward_kwargs: keyword arguments of the reward controller's ``process``.
            select_best_kwargs: keyword arguments of ``select_best``.
            **kwargs: as ``generation_kwargs``.

        Raises:
            TaskError: every sample failed.
        """
        if type(self).select_best is BestOfNController.select_best:
            refuse_arguments(self, select_best_kwargs or {}, "select_best")
        task: GenerationTask = expect_one("best of N", tasks)
        count = self.default_sample_num if sample_num is None else sample_num
        validated("sample_num", count, POSITIVE_INT)
        options = {**kwargs, **(generation_kwargs or {})}
        samples, paths = yield from self._sample(task, count, options)
        scores = yield from self._score(samples, reward_kwargs or {})
        for path, score in zip(paths, scores, strict=True):
            if score is not None:
                yield Stage("scored", branch=path, fields={"score": score})
        scored = {number: score for number, score in enumerate(scores) if score is not None}
        info: dict[str, Any] = {"scores": scores}
        if self.choice == "weighted":
            vote, scored = yield from self._leading(samples, scored)
            info |= vote
        best, index = self.select_best(
            [samples[number] for number in scored], [*scored.values()], **(select_best_kwargs or {})
        )
        info["index"] = [*scored][index]
        task.take_answer(best)
        task.keep_candidates(None if sample.error is not None else sample for sample in samples)
        task.customized_result_fields["best_of_n"] = info
        fields = {"index": info["index"], "score": scores[info["index"]]}
        yield Stage("selected", branch=paths[info["index"]], fields=fields)

    def _sample(self, task: GenerationTask, count: int, options: Mapping[str, Any]) -> Process:
        branches = sampled(self.generation_controller, [task], count, options, self.on_failure)
        samples = [branch.tasks[0] for branch in branches]
        for sample in samples:
            sampling.fill(sample, getattr(self.reward_controller, "sample_params", {}))
        ended = yield from run_until(branches)
        for sample, branch in zip(samples, branches, strict=True):
            sample.error = sample.error or branch.error
            if branch not in ended:
                sample.error = BudgetExceeded("the sample was not finished", "the budget is spent")
        failures = [sample.error for sample in samples if sample.error is not None]
        if len(failures) == count:
            raise failures[0]
        return samples, [branch.path for branch in branches]

    def _score(self, samples: Sequence[GenerationTask], options: Mapping[str, Any]) -> Process:
        """The samples' scores; if the budget ends before, 0 for each finished sample."""
        try:
            yield from self.reward_controller.process(samples, **options)
        except BudgetExceeded:
            return [None if sample.error is not None else 0.0 for sample in samples]
        scores = scores_of(self.reward_controller, len(samples))
        if all(score is None for score in scores):
            raise _unscored(samples)
        return scores

    def _leading(self, samples: Sequence[GenerationTask], scored: Mapping[int, float]) -> Process:
        """The vote's result fields, and the scores of the samples of the answer with the largest
        sum.

        All scores, if no sample has an answer.
        """
        if min(scored.values()) < 0:
            raise ParameterError(
                "a weighted choice takes scores from 0 on",
                f"got {min(scored.values())}",
                'Use choice="best", or a reward that is not negative',
            )
        pool = AnswerPool(self.space.equivalence)
        answers = {number: self.space.answer_of(samples[number]) for number in scored}
        try:
            yield from pool.adding(answers)
        except BudgetExceeded:
            return {"answer": None}, scored
        winner, _ = pool.heaviest(scored)
        if winner is None:
            return pool.info(), scored
        rule = answer_spaces.rule_of(self.space, samples[winner.first])
        info = pool.info(rule) | {"answer": winner.answer}
        return info, {number: scored[number] for number in sorted(winner.members)}

    def select_best(
        self, tasks: Sequence[GenerationTask], reward_values: Sequence[float], **kwargs: Any
    ) -> tuple[GenerationTask, int]:
        """Choose among the samples; the first of those with the highest score.

        Args:
            tasks: the samples that have a score; none that failed has one.
            reward_values: their scores.
            **kwargs: ``select_best_kwargs``, for a choice that overrides this one.

        Returns:
            The chosen task and its index among them.
        """
        index = max(range(len(tasks)), key=lambda number: reward_values[number])
        return tasks[index], index


def _unscored(samples: Sequence[GenerationTask]) -> Exception:
    errors = (sample.error for sample in samples if sample.error is not None)
    return next(errors, None) or ParameterError(
        "no sample has a score", "its worker gave none", "Use a worker that sets score"
    )
