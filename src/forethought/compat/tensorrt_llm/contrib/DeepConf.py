"""The controllers of ``tensorrt_llm.scaffolding.contrib.DeepConf``, under their names.

For code that was written for them: one controller draws a sample and notes its confidence, a second
one cancels it where a group of its tokens lacks confidence, and two votes combine samples. The
methods ``deepconf`` and ``deepconf_online`` need no log-probabilities and end at a consensus.
Differences from ``tensorrt_llm``: a sample that is shorter than a group is one group, answers that
mean the same are one vote, and samples have seeds of their own.

Paper: Fu et al., "Deep Think with Confidence", 2025. arXiv 2508.15260.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from forethought.answers.answers import AnswerPool, extract_answer_from_boxed
from forethought.errors import ParameterError
from forethought.rewards.confidence import (
    WINDOW,
    bottom_groups,
    confidence_of,
    lowest_group,
    mean,
    stop_threshold,
    tail_mean,
    watch_groups,
)
from forethought.scaffolding.controller import Controller, expect_generation
from forethought.scaffolding.parallel import ParallelProcess, Process
from forethought.scaffolding.result import ScaffoldingOutput
from forethought.scaffolding.settings import POSITIVE_INT, validated
from forethought.scaffolding.task import GenerationTask, StreamGenerationTask

__all__ = [
    "ConfidenceInfo",
    "DeepConfOfflineController",
    "DeepConfOfflineMajorityVoteController",
    "DeepConfOnlineController",
    "DeepConfOnlineMajorityVoteController",
]

_NUMBER: TypeAdapter[float] = TypeAdapter(Annotated[float, Field(allow_inf_nan=False)])
_PERCENTILE: TypeAdapter[float] = TypeAdapter(Annotated[float, Field(ge=0, le=100)])
_TOP_SHARE = 0.1
"""Share of the samples that the policies ``top10_...`` keep."""


@dataclass
class ConfidenceInfo:
    """The confidence of a sample: minus the mean log-probability of the top k, token by token."""

    conf_group_size: int = 128
    conf_threshold: float = 0.0
    conf_list: list[float] = field(default_factory=list)
    """One entry per token."""

    @property
    def mean_conf(self) -> float:
        """The mean over all tokens; 0 without tokens."""
        return mean(self.conf_list) if self.conf_list else 0.0

    @property
    def tail_mean_conf(self) -> float:
        """The mean over the last 2048 tokens."""
        return tail_mean(self.conf_list, WINDOW) if self.conf_list else 0.0

    @property
    def bottom_window_mean_conf(self) -> float:
        """The mean over the least confident tenth of the groups."""
        return bottom_groups(self.conf_list, self.conf_group_size) if self.conf_list else 0.0

    @property
    def min_window_conf(self) -> float:
        """The mean of the least confident group."""
        return lowest_group(self.conf_list, self.conf_group_size) if self.conf_list else 0.0

    def get_min_conf_grouped(self) -> float:
        """``min_window_conf``; the threshold, if there are no tokens."""
        return self.min_window_conf if self.conf_list else self.conf_threshold


VOTE_POLICIES: Mapping[str, tuple[str | None, float]] = {
    "majority": (None, 1.0),
    "mean_confidence_weighted": ("mean_conf", 1.0),
    "tail_confidence_weighted": ("tail_mean_conf", 1.0),
    "bottom_window_weighted": ("bottom_window_mean_conf", 1.0),
    "min_window_weighted": ("min_window_conf", 1.0),
    "top10_tail_filtered": ("tail_mean_conf", _TOP_SHARE),
    "top10_bottom_window_filtered": ("bottom_window_mean_conf", _TOP_SHARE),
}
"""Name -> what a sample weighs (None: 1), and the share of the samples that votes."""


@dataclass(slots=True)
class VotedOutput(ScaffoldingOutput):
    """The output of a vote, with the winners under every policy."""

    vote_policy_to_voted_task: dict[str, GenerationTask] = field(default_factory=dict)
    output_token_num: int = 0
    """Generated tokens of all samples."""


class DeepConfOfflineController(Controller):
    """Draws a sample and leaves its confidence in ``customized_result_fields``.

    Args:
        generation_controller: generates it, with ``num_logprobs`` among its ``sampling_params``.
        conf_group_size: tokens of a group.
        conf_threshold: of the online controller; here it is noted only.

    Raises:
        ParameterError: a setting of the wrong kind.
    """

    def __init__(
        self, generation_controller: Controller, conf_group_size: int, conf_threshold: float
    ) -> None:
        super().__init__()
        self.generation_controller = expect_generation(generation_controller)
        self.conf_group_size = validated("conf_group_size", conf_group_size, POSITIVE_INT)
        self.conf_threshold = validated("conf_threshold", conf_threshold, _NUMBER)

    def process(self, tasks: Sequence[GenerationTask], **kwargs: Any) -> Process:
        """Draw the sample of exactly one task, with log-probabilities."""
        [task] = _expect_one(self, tasks)
        yield from self._draw(task, kwargs)
        if task.error is None:
            info = ConfidenceInfo(self.conf_group_size, self.conf_threshold, _confidences(task))
            task.customized_result_fields["confidence_info"] = info

    def _draw(self, task: GenerationTask, options: Mapping[str, Any]) -> Process:
        yield from self.generation_controller.process([task], **options)


class DeepConfOnlineController(DeepConfOfflineController):
    """Cancels the sample once a group of its tokens is below ``conf_threshold``.

    The task then has the text so far, and ``finish_reason`` ``"abort"``.
    """

    def _draw(self, task: GenerationTask, options: Mapping[str, Any]) -> Process:
        stream = StreamGenerationTask.create_from_generation_task(task, self.conf_group_size)
        groups = self.conf_group_size, self.conf_threshold
        yield from watch_groups(self.generation_controller, stream, _confidences, groups, options)
        task.result, task.status, task.error = stream.result, stream.status, stream.error


class DeepConfOfflineMajorityVoteController(Controller):
    """Draws samples and votes.

    ``customized_result_fields["vote_policy_to_voted_task"]`` holds the winner under every policy,
    each with its ``extracted_answer``; ``llm.generate(...).cur_output`` has it as an attribute, and
    ``output_token_num``.

    Args:
        generation_controller: a ``DeepConfOfflineController`` or ``DeepConfOnlineController``.
        sample_num: samples.
        vote_policy: one of ``VOTE_POLICIES``, by which the output is chosen.
        **online: the other arguments of the online vote, which have no effect here.

    Raises:
        ParameterError: a setting of the wrong kind, or one that neither vote has.
    """

    def __init__(
        self,
        generation_controller: Controller,
        sample_num: int,
        vote_policy: str = "majority",
        **online: Any,
    ) -> None:
        super().__init__()
        _expect_names(self, online, _OF_ONLINE)
        self.generation_controller = expect_generation(generation_controller)
        self.sample_num = validated("sample_num", sample_num, POSITIVE_INT)
        self.vote_policy = _policy(vote_policy)

    def generate(self, prompt: Any, **kwargs: Any) -> Process:
        """Answer one prompt; see ``Controller.generate``."""
        output = yield from super().generate(prompt, **kwargs)
        if not isinstance(output, ScaffoldingOutput):
            return output
        voted = VotedOutput(**{name: getattr(output, name) for name in _OUTPUT_FIELDS})
        voted.vote_policy_to_voted_task = output.meta["vote_policy_to_voted_task"]
        voted.output_token_num = output.meta["output_token_num"]
        return voted

    def process(self, tasks: Sequence[GenerationTask], **kwargs: Any) -> Process:
        """Draw the samples of exactly one task, and leave the winner's results on it."""
        [task] = _expect_one(self, tasks)
        samples = task.samples_of(self.sample_num)
        yield from self._sample(samples, kwargs)
        winners = yield from _vote(samples)
        task.result = winners[self.vote_policy].result
        task.keep_candidates(samples)
        task.customized_result_fields["vote_policy_to_voted_task"] = winners
        task.customized_result_fields["output_token_num"] = sum(map(_num_tokens, samples))

    def _sample(self, samples: Sequence[GenerationTask], options: Mapping[str, Any]) -> Process:
        controllers = [self.generation_controller.clone() for _ in samples]
        yield _side_by_side(controllers, samples, options)


class DeepConfOnlineMajorityVoteController(DeepConfOfflineMajorityVoteController):
    """Draws a warm-up, takes a threshold from it for the other samples, and all of them vote.

    Args:
        warmup_generation_controller: a ``DeepConfOfflineController``.
        final_generation_controller: a ``DeepConfOnlineController``.
        sample_num: samples, the warm-up included.
        vote_policy: as of the offline vote.
        warmup_sample_num: samples of the warm-up.
        confidence_percentile: p: the threshold is the percentile 100 - p of the lowest group
            confidences of the warm-up.
        generation_controller: of the offline vote; it has no effect here.

    Raises:
        ParameterError: a setting of the wrong kind, or more samples of the warm-up than samples.
    """

    def __init__(
        self,
        warmup_generation_controller: Controller,
        final_generation_controller: DeepConfOnlineController,
        sample_num: int,
        vote_policy: str = "majority",
        warmup_sample_num: int = 5,
        confidence_percentile: float = 90,
        **offline: Any,
    ) -> None:
        _expect_names(self, offline, ("generation_controller",))
        super().__init__(warmup_generation_controller, sample_num, vote_policy)
        if not isinstance(final_generation_controller, DeepConfOnlineController):
            raise ParameterError(
                "invalid final_generation_controller",
                f"got {type(final_generation_controller).__name__}",
                "Give a DeepConfOnlineController, which has a threshold",
            )
        self.final_generation_controller = final_generation_controller
        self.warmup_sample_num = validated("warmup_sample_num", warmup_sample_num, POSITIVE_INT)
        self.confidence_percentile = validated(
            "confidence_percentile", confidence_percentile, _PERCENTILE
        )
        if warmup_sample_num > sample_num:
            raise ParameterError(
                "invalid warmup_sample_num",
                f"got {warmup_sample_num} of {sample_num} samples",
                "Give at most sample_num",
            )

    def _sample(self, samples: Sequence[GenerationTask], options: Mapping[str, Any]) -> Process:
        warmup, others = samples[: self.warmup_sample_num], samples[self.warmup_sample_num :]
        yield from super()._sample(warmup, options)
        if not others:
            return
        lowest = [_info(sample).get_min_conf_grouped() for sample in warmup]
        controllers = [self.final_generation_controller.clone() for _ in others]
        for controller in controllers:
            controller.conf_threshold = stop_threshold(lowest, self.confidence_percentile / 100)
        yield _side_by_side(controllers, others, options)


_OF_ONLINE = (
    "warmup_generation_controller",
    "final_generation_controller",
    "warmup_sample_num",
    "confidence_percentile",
)
_OUTPUT_FIELDS = tuple(ScaffoldingOutput.__dataclass_fields__)


def _expect_one(controller: Controller, tasks: Sequence[GenerationTask]) -> Sequence[Any]:
    if len(tasks) != 1:
        name = type(controller).__name__
        raise ParameterError(f"{name} takes one task", f"got {len(tasks)}", "Give them apart")
    return tasks


def _expect_names(
    controller: Controller, settings: Mapping[str, Any], names: Sequence[str]
) -> None:
    if unknown := settings.keys() - set(names):
        raise ParameterError.unknown(type(controller).__name__, unknown, names)


def _policy(name: str) -> str:
    if name not in VOTE_POLICIES:
        raise ParameterError.unknown("the votes", {name}, VOTE_POLICIES)
    return name


def _side_by_side(
    controllers: Sequence[Controller], samples: Sequence[GenerationTask], options: Mapping[str, Any]
) -> ParallelProcess:
    return ParallelProcess(
        list(controllers), [[sample] for sample in samples], [dict(options) for _ in samples]
    )


def _confidences(task: GenerationTask) -> list[float]:
    if task.logprobs is None:
        if not task.output_str:
            return []
        raise ParameterError(
            "a sample has no log-probabilities",
            "it was generated without num_logprobs",
            "Set it in the sampling_params of the generation controller",
        )
    return [confidence_of(entries, len(entries)).value for entries in task.logprobs]


def _info(sample: GenerationTask) -> ConfidenceInfo:
    info: ConfidenceInfo = sample.customized_result_fields["confidence_info"]
    return info


def _num_tokens(sample: GenerationTask) -> int:
    return len(_info(sample).conf_list)


def _vote(samples: Sequence[GenerationTask]) -> Process:
    """The winning sample under each policy; the first sample, if none has an answer."""
    answers = {}
    for number, sample in enumerate(samples):
        answer = extract_answer_from_boxed(sample.output_str or "")
        sample.customized_result_fields["extracted_answer"] = answer
        if answer:
            answers[number] = answer
    pool = AnswerPool()
    yield from pool.adding(answers)
    return {
        policy: samples[_winner(pool, samples, [*answers], *how)]
        for policy, how in VOTE_POLICIES.items()
    }


def _winner(
    pool: AnswerPool,
    samples: Sequence[GenerationTask],
    voters: Sequence[int],
    weight: str | None,
    share: float,
) -> int:
    weights = {n: 1.0 if weight is None else getattr(_info(samples[n]), weight) for n in voters}
    voters_kept = sorted(voters, key=lambda n: (-weights[n], n))[: max(1, int(share * len(voters)))]
    group, _ = pool.heaviest({n: weights[n] for n in voters_kept})
    return 0 if group is None else min(n for n in group.members if n in voters_kept)
