"""Adaptive inference-time compute: the model says whether a new start would do better.

A fork of a sample is asked whether a new answer would be better, and generates one token; nothing
else reads the sample. The score is the probability of "No", which means: keep it::

    round 1   sample 0   ====[.31]  pruned          [ ] a probe: one token of a fork, in the middle
              sample 1   ====[.74]==========(.62)   ( ) a probe of the whole answer
    round 2   sample 2   ====[.66]======(.93)       .93 reaches the threshold: no third round

* Adaptive sampling: rounds go on until an answer reaches ``threshold``, so that an easy question
  costs one sample and a hard one up to ``default_sample_num``.
* Pruning: after ``prune_after`` tokens the samples of a round that score lowest are cancelled, and
  those below ``restart_below`` too; the next round starts over.
* Best of N: the answer with the highest score is returned. There is no other reward model.
* Annealing: sample n has the temperature ``T * (1 - 2**-n)``. The first is greedy, later ones
  explore.

The paper trains the model to predict this; any model can be asked, and its calibration is to be
measured. The text of the question, the form of the annealing and the defaults are ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Any

from forethought.errors import BudgetExceeded
from forethought.rewards.confidence import NUM_LOGPROBS, word_probability
from forethought.scaffolding import sampling
from forethought.scaffolding.controller import (
    Controller,
    ConversationForm,
    expect_prompt,
    expect_streams,
    refuse_arguments,
)
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.result import Stage
from forethought.scaffolding.settings import (
    POSITIVE_INT,
    PositiveInt,
    Probability,
    Text,
    required,
    setting,
    validated,
    with_settings,
)
from forethought.scaffolding.task import GenerationTask, StreamGenerationTask

RESTART_PROMPT = "\n\nWould a new answer, written from the start, be better? (Yes/No) "
_TO_THE_END = 2**31
"""Tokens of a step that has no other end than that of the sample."""


@with_settings
class AdaptiveComputeController(Controller):
    """Samples until the model itself says that a new start would not be better.

    The output is the sample with the highest score. ``customized_result_fields`` has, under
    ``adaptive_compute``, the ``index`` of that sample, the ``scores`` of the finished samples and
    the ``partial_scores`` in the middle of each (None: there is none), and which were ``pruned``.

    Raises:
        ParameterError: a setting of the wrong kind, or another method inside.
    """

    paper = (
        'Manvi, Singh and Ermon, "Adaptive Inference-Time Compute: LLMs Can Predict if They Can '
        'Do Better, Even Mid-Generation", 2024. arXiv 2410.02725'
    )

    conversation = ConversationForm.TEXT

    generation_controller: Controller = required(
        "Generates the samples; a plain generation, whose tasks can be streams."
    )
    default_sample_num: PositiveInt = setting(
        16, "Samples at most, unless `process` gets `sample_num`."
    )
    _: KW_ONLY
    threshold: Probability = setting(
        0.8, "Score of a finished sample that ends the sampling; 1.0: draw all."
    )
    round_size: PositiveInt = setting(
        1, "Samples that run side by side before the threshold is looked at."
    )
    prune_after: PositiveInt | None = setting(
        64, "Tokens after which a sample is probed while it runs; None: never."
    )
    prune_share: Probability = setting(
        0.5,
        "Share of a round's samples that is then cancelled, those with the lowest scores; at "
        "least one sample goes on.",
    )
    restart_below: Probability = setting(
        0.0,
        "Score in the middle below which a sample is cancelled in any case, unless it is the "
        "last chance for an answer.",
    )
    annealing: bool = setting(True, "Raise the temperature from 0 with the number of the sample.")
    restart_prompt: Text = setting(
        RESTART_PROMPT, 'Text after a sample, to which "Yes" means that a new start is better.'
    )

    def __post_init__(self) -> None:
        expect_streams("adaptive_compute", self.generation_controller)

    def fan_out(self) -> int:
        """The samples, each of which may begin again."""
        return 2 * self.default_sample_num

    def process(
        self, tasks: Sequence[GenerationTask], sample_num: int | None = None, **kwargs: Any
    ) -> Process:
        """Sample in rounds, ``sample_num`` at most, and leave the best sample on the task."""
        refuse_arguments(self, kwargs)
        task = expect_prompt("adaptive_compute", tasks)
        sampling.refuse(task, ["n"], "adaptive_compute", "Use default_sample_num")
        count = self.default_sample_num if sample_num is None else sample_num
        validated("sample_num", count, POSITIVE_INT)
        samples: list[_Sample] = []
        try:
            while len(samples) < count and max(map(_rank, samples), default=-1) < self.threshold:
                numbers = range(len(samples), min(count, len(samples) + self.round_size))
                group = [_Sample(self, task, number) for number in numbers]
                samples += group
                is_last = len(samples) == count and not any(sample.has_ended for sample in samples)
                yield from self._round(group, is_last)
        except BudgetExceeded:
            if not any(sample.has_ended for sample in samples):
                raise
        yield from _finish(task, samples, count)

    def _round(self, group: Sequence[_Sample], is_last_chance: bool) -> Process:
        if self.prune_after is not None:
            yield from self._advance(group, self.prune_after)
            yield from self._prune(group, is_last_chance)
        yield from self._advance(group, _TO_THE_END)
        ended = [sample for sample in group if sample.has_ended]
        for sample, score in zip(ended, (yield from self._probe(ended)), strict=True):
            sample.score = score
            yield Stage("scored", fields={"sample": sample.number, "score": score})

    def _advance(self, group: Sequence[_Sample], num_tokens: int) -> Process:
        """Generate ``num_tokens`` further tokens of all running samples."""
        going = [sample for sample in group if not sample.stream.end_flag]
        for sample in going:
            sample.stream.streaming_step = num_tokens
        if going:
            yield from self.generation_controller.process([sample.stream for sample in going])

    def _prune(self, group: Sequence[_Sample], is_last_chance: bool) -> Process:
        """Cancel the running samples that score lowest."""
        going = [sample for sample in group if not sample.stream.end_flag]
        for sample, score in zip(going, (yield from self._probe(going)), strict=True):
            sample.partial_score = score
            fields = {"sample": sample.number, "score": score, "at": sample.stream.num_generated}
            yield Stage("probed", fields=fields)
        num_pruned = math.floor(self.prune_share * len(group))
        worst = sorted(going, key=lambda sample: (sample.partial_score or 0.0, -sample.number))
        num_low = sum((sample.partial_score or 0.0) < self.restart_below for sample in worst)
        spared = int(is_last_chance and len(going) == len(group))
        num_pruned = min(max(num_low, min(num_pruned, len(group) - 1)), len(going) - spared)
        for sample in worst[:num_pruned]:
            sample.is_pruned = sample.stream.cancel_flag = True
            fields = {"sample": sample.number, "score": sample.partial_score}
            yield Stage("pruned", "a new start is likely to be better", fields=fields)
        if num_pruned:
            yield [sample.stream for sample in worst[:num_pruned]]

    def _probe(self, samples: Sequence[_Sample]) -> Process:
        """For each sample, the probability that a new start is not better than its text so far."""
        probes: list[GenerationTask] = [
            sample.stream.fork(
                self.restart_prompt,
                GenerationTask,
                inherit=False,
                is_aside=True,
                temperature=0.0,
                max_tokens=1,
                num_logprobs=NUM_LOGPROBS,
            )
            for sample in samples
        ]
        if probes:
            yield probes
        return [_score(probe) for probe in probes]


class _Sample:
    """One sample.

    Attributes:
        stream: generates it.
        partial_score: of its beginning; None: it was not probed while it ran.
        score: of the whole; None: it has not ended, or was not probed.
        is_pruned: whether it was cancelled.
    """

    def __init__(
        self, method: AdaptiveComputeController, task: GenerationTask, number: int
    ) -> None:
        self.number, self.is_pruned = number, False
        self.partial_score: float | None = None
        self.score: float | None = None
        self.stream = StreamGenerationTask.create_from_generation_task(task)
        self.stream.streaming_output_flag = False
        self.stream.stream_fields = {"sample": number}
        sampling.vary(self.stream, number)
        if method.annealing:
            sampling.fill(self.stream, getattr(method.generation_controller, "sampling_params", {}))
            temperature = self.stream.temperature
            highest = 1.0 if temperature is None else temperature
            sampling.choose(self.stream, {"temperature": highest * (1.0 - 0.5**number)})

    @property
    def has_ended(self) -> bool:
        return self.stream.end_flag and not self.is_pruned


def _finish(task: GenerationTask, samples: Sequence[_Sample], count: int) -> Process:
    best = max((sample for sample in samples if sample.has_ended), key=_rank)
    yield Stage("selected", fields={"sample": best.number, "score": best.score})
    task.result, task.request_handle = best.stream.result, best.stream.request_handle
    ended = [sample.stream if sample.has_ended else None for sample in samples]
    task.keep_candidates(ended + [None] * (count - len(samples)))
    task.customized_result_fields["adaptive_compute"] = {
        "index": best.number,
        "scores": [sample.score for sample in samples],
        "partial_scores": [sample.partial_score for sample in samples],
        "pruned": [sample.number for sample in samples if sample.is_pruned],
    }


def _rank(sample: _Sample) -> float:
    return -1.0 if sample.score is None else sample.score


def _score(probe: GenerationTask) -> float:
    """The probability of "No" relative to both words; 0.5 if neither is probable."""
    keep, restart = word_probability(probe, "no"), word_probability(probe, "yes")
    return keep / (keep + restart) if keep + restart > 0 else 0.5
