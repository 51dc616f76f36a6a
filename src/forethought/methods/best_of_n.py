"""Best of N: sample several answers, score each, return the one with the highest score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forethought.errors import ParameterError
from forethought.scaffolding import sampling
from forethought.scaffolding.controller import Controller, expect_controller, refuse_arguments
from forethought.scaffolding.parallel import ParallelProcess, Process
from forethought.scaffolding.settings import ON_FAILURE, POSITIVE_INT, OnFailure, validated
from forethought.scaffolding.task import GenerationTask


class BestOfNController(Controller):
    """Runs a controller several times and returns the sample with the highest reward score.

    ``customized_result_fields["best_of_n"]`` holds the ``scores`` and the winner's ``index``.

    Args:
        generation_controller: cloned for each sample.
        reward_controller: its ``process`` scores the samples' tasks and sets ``scores``.
        default_sample_num: samples, unless ``process`` gets ``sample_num``.
        on_failure: ``"drop"`` leaves failed samples out, as long as one does not fail; a failure of
            the reward controller is always raised.

    Raises:
        ParameterError: fewer than one sample, or a setting of the wrong kind.
    """

    def __init__(
        self,
        generation_controller: Controller,
        reward_controller: Controller,
        default_sample_num: int = 4,
        *,
        on_failure: OnFailure = "raise",
    ) -> None:
        super().__init__()
        self.generation_controller = expect_controller(
            "generation_controller", generation_controller
        )
        self.reward_controller = expect_controller("reward_controller", reward_controller)
        self.default_sample_num = validated("default_sample_num", default_sample_num, POSITIVE_INT)
        self.on_failure = validated("on_failure", on_failure, ON_FAILURE)

    def process(
        self,
        tasks: Sequence[GenerationTask],
        sample_num: int | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
        reward_kwargs: Mapping[str, Any] | None = None,
        select_best_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Process:
        """Sample, score, and store the results of the best sample on the task.

        Args:
            tasks: exactly one; copied for each sample.
            sample_num: samples; None: ``default_sample_num``.
            generation_kwargs: keyword arguments of the samples' ``process``.
            reward_kwargs: keyword arguments of the reward controller's ``process``.
            select_best_kwargs: keyword arguments of ``select_best``.
            **kwargs: as ``generation_kwargs``.

        Raises:
            ParameterError: not exactly one task, ``select_best_kwargs`` that nothing reads, or the
                reward controller leaves no scores.
            TaskError: every sample failed, although one alone is only noted.
        """
        if len(tasks) != 1:
            raise ParameterError("best of N takes one task", f"got {len(tasks)}", "Give them apart")
        if type(self).select_best is BestOfNController.select_best:
            refuse_arguments(self, select_best_kwargs or {}, "select_best")
        task = tasks[0]
        count = self.default_sample_num if sample_num is None else sample_num
        validated("sample_num", count, POSITIVE_INT)
        samples = yield from self._sample(task, count, {**kwargs, **(generation_kwargs or {})})
        yield from self.reward_controller.process(samples, **(reward_kwargs or {}))
        scores: Any = getattr(self.reward_controller, "scores", None)
        if scores is None or len(scores) != count:
            raise ParameterError(
                f"{type(self.reward_controller).__name__} is no reward controller",
                f"it leaves {scores!r} as scores of {count} samples",
                "Its process has to leave one score per task in its attribute scores",
            )
        scored = [number for number, score in enumerate(scores) if score is not None]
        if not scored:
            raise _unscored(samples)
        best, index = self.select_best(
            [samples[number] for number in scored],
            [scores[number] for number in scored],
            **(select_best_kwargs or {}),
        )
        task.result, task.samples = best.result, []
        task.request_handle = best.request_handle
        task.customized_result_fields["best_of_n"] = {
            "scores": list(scores),
            "index": scored[index],
        }

    def _sample(self, task: GenerationTask, count: int, options: Mapping[str, Any]) -> Process:
        """Generate the samples; those that failed and are dropped have their ``error`` set."""
        samples = [task.copy() for _ in range(count)]
        for number, sample in enumerate(samples):
            sampling.vary(sample, number)
        controllers = [self.generation_controller.clone() for _ in samples]
        each = [[sample] for sample in samples]
        process = ParallelProcess(controllers, each, [options] * count, self.on_failure)
        yield process
        for sample, branch in zip(samples, process.branches, strict=True):
            sample.error = sample.error or branch.error
        failures = [sample.error for sample in samples if sample.error is not None]
        if len(failures) == count:
            raise failures[0]
        return samples

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
    """The error if no sample has a score."""
    errors = (sample.error for sample in samples if sample.error is not None)
    return next(errors, None) or ParameterError(
        "no sample has a score", "its worker gave none", "Use a worker that sets score"
    )
