"""Confidence of a sample from that of its tokens: a reward that no model has to be run for.

``SamplingParams(confidence=20)`` lets the decode step compute a ``TokenConfidence`` per token. Here
they are put together, as DeepConf does (Fu et al. 2025, "Deep Think with Confidence", arXiv
2508.15260)::

    token confidences   c1 c2 c3 c4 c5 c6 ...
    groups of 3         [......]                their means, one per token from the third on
                           [......]
                              [......]

``lowest_group``, ``bottom_groups`` and ``tail_mean`` see a passage of doubt that ``mean`` over a
long sample hides. ``ConfidenceRewardController`` scores samples by one of them, in place of a
reward model: ``BestOfNController(generation, ConfidenceRewardController())``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import Field

from forethought.config.sampling import MAX_LOGPROBS
from forethought.errors import ParameterError
from forethought.outputs import TokenConfidence, TokenLogprobs
from forethought.scaffolding.base_task import RewardTask
from forethought.scaffolding.controller import Controller, refuse_arguments
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.result import Stage
from forethought.scaffolding.reward_controller import NativeRewardController, has_failed
from forethought.scaffolding.settings import PositiveInt, setting, with_settings
from forethought.scaffolding.task import GenerationTask, StreamGenerationTask

TOP_K = 20
"""Most probable tokens that a token's confidence is taken over."""
WINDOW = 2048
"""Tokens of a group, and of the tail."""

NUM_LOGPROBS = 20
"""Most probable tokens among which a word is looked for; servers give no more."""

Measure = Literal["confidence", "logprob", "entropy", "self_certainty"]
TopK = Annotated[int, Field(ge=1, le=MAX_LOGPROBS)]
Aggregation = Literal["mean", "tail_mean", "lowest_group", "bottom_groups"]


def confidence_of(entries: TokenLogprobs, k: int) -> TokenConfidence:
    """The confidence in a token of which only the top log-probabilities are known.

    Args:
        entries: the chosen token first; those with a rank are among the most probable.
        k: how many of the most probable tokens count, where they are present.
    """
    ranked = sorted(-entry.logprob for entry in entries.values() if entry.rank is not None)
    finite = [value for value in ranked[:k] if value < math.inf]
    chosen = next(iter(entries.values())).logprob
    return TokenConfidence(mean(finite) if finite else -chosen, chosen)


def word_probability(task: GenerationTask, word: str) -> float:
    """The probability that a generation begins with a word, over all tokens that spell it.

    0 if none of them is among the most probable. Where there are no log-probabilities, 0 or 1 by
    the generated text.

    Args:
        task: generated with ``num_logprobs``.
        word: in any case, without blanks.
    """
    target, entries = word.lower(), (task.logprobs or [{}])[0]
    if not entries:
        return float((task.output_str or "").strip().lower() == target)
    return math.fsum(
        math.exp(entry.logprob)
        for entry in entries.values()
        if entry.token is not None and entry.token.strip().lower() == target
    )


def mean(values: Sequence[float]) -> float:
    """The mean over all tokens."""
    return math.fsum(values) / len(values)


def tail_mean(values: Sequence[float], window: int = WINDOW) -> float:
    """The mean over the last ``window`` tokens."""
    return mean(values[-window:])


def group_means(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """The means of all groups of ``window`` tokens in a row; of all tokens, if there are fewer."""
    size = min(window, len(values))
    sums = [0.0, *accumulate(values)]
    return [(end - begin) / size for begin, end in zip(sums, sums[size:], strict=False)]


def lowest_group(values: Sequence[float], window: int = WINDOW) -> float:
    """The mean of the least confident group."""
    return min(group_means(values, window))


def bottom_groups(values: Sequence[float], window: int = WINDOW, share: float = 0.1) -> float:
    """The mean over the least confident ``share`` of the groups, at least one."""
    groups = sorted(group_means(values, window))
    return mean(groups[: max(1, int(share * len(groups)))])


def stop_threshold(lowest: Sequence[float], share: float) -> float:
    """The group confidence below which online DeepConf stops a sample.

    Args:
        lowest: the ``lowest_group`` of each warm-up sample, at least one.
        share: of the warm-up samples that lie at or above it: 0.1 ("low") to 0.9 ("high").

    Returns:
        Their percentile ``100 (1 - share)``, between two of them by linear interpolation.
    """
    ordered = sorted(lowest)
    rank = (1.0 - share) * (len(ordered) - 1)
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (rank - below) * (ordered[above] - ordered[below])


def watch_groups(
    controller: Controller,
    stream: StreamGenerationTask,
    values: Callable[[Any], list[float]],
    groups: tuple[int, float],
    options: Mapping[str, Any] | None = None,
) -> Process:
    """Draw a stream to its end, or cancel it once a whole group of its tokens lacks confidence.

    Args:
        controller: generates it, a step at a time.
        stream: however many tokens a step brings, the same group ends it.
        values: the confidences of its tokens so far.
        groups: tokens of a group, and the threshold of their mean.
        options: of the controller's ``process``.

    Returns:
        Whether a group fell below the threshold.
    """
    (window, threshold), num_checked = groups, 0
    while not stream.end_flag and stream.error is None:
        yield from controller.process([stream], **options or {})
        confidences = [] if stream.error is not None else values(stream)
        new = confidences[max(0, num_checked - window + 1) :]  # groups that end in new tokens
        num_checked = len(confidences)
        if len(new) < window or (lowest := lowest_group(new, window)) >= threshold:
            continue
        fields = {"score": lowest, "threshold": threshold}
        yield Stage("pruned", "a group of its tokens is below the threshold", None, fields)
        if not stream.end_flag:
            stream.cancel_flag = True
            yield [stream]
        return True
    return False


_MEASURES: Mapping[Measure, Callable[[TokenConfidence], float | None]] = {
    "confidence": lambda token: token.value,
    "logprob": lambda token: token.logprob,
    "entropy": lambda token: None if token.entropy is None else -token.entropy,
    "self_certainty": lambda token: token.self_certainty,
}
_AGGREGATIONS: Mapping[Aggregation, Callable[[Sequence[float], int], float]] = {
    "mean": lambda values, window: mean(values),
    "tail_mean": tail_mean,
    "lowest_group": lowest_group,
    "bottom_groups": bottom_groups,
}


@with_settings
class ConfidenceRewardController(NativeRewardController):
    """Scores samples by the model's own confidence in their tokens, which costs no model call.

    ``scores`` holds one per task, in their order; None for one that failed or has no tokens. The
    samples have to be generated with ``confidence``, which ``BestOfNController`` sets for them.
    """

    paper = 'Fu et al., "Deep Think with Confidence", 2025. arXiv 2508.15260'

    class WorkerTag(Enum):
        """None: nothing is run."""

    aggregation: Aggregation = setting(
        "bottom_groups",
        '`"mean"`, `"tail_mean"`, `"lowest_group"` or `"bottom_groups"` (the lowest tenth).',
    )
    measure: Measure = setting(
        "confidence",
        'Of a token: `"confidence"` (of the top k), `"logprob"` of the token itself, '
        '`"entropy"` (its negative), or `"self_certainty"` (Kang et al. 2025, arXiv '
        "2502.18581); the last two are not known on servers.",
    )
    window: PositiveInt = setting(WINDOW, "Tokens of a group, and of the tail.")
    top_k: TopK = setting(
        TOP_K, "Most probable tokens that the confidence of a token is taken over."
    )

    def __post_init__(self) -> None:
        self.sample_params = {"confidence": self.top_k}

    def fan_out(self) -> int:
        """None: it calls no model."""
        return 0

    def process(self, tasks: Sequence[GenerationTask | RewardTask], **kwargs: Any) -> Process:
        """Score all tasks, whose workers have to give confidences."""
        refuse_arguments(self, kwargs)
        self.scores = [None if has_failed(task) else self.score(task) for task in tasks]
        yield from ()

    def score(self, task: Any) -> float | None:
        """The confidence in a finished or running generation; None without tokens."""
        values = self.values(task)
        return _AGGREGATIONS[self.aggregation](values, self.window) if values else None

    def values(self, task: Any) -> list[float]:
        """The measure of each generated token; ``ParameterError`` if the worker gave none."""
        if getattr(task, "confidences", None) is None:
            if getattr(task, "output_str", None) == "":
                return []
            raise ParameterError(
                "a sample has no confidences",
                "it was generated without the sampling field confidence, or its server gives no "
                "log-probabilities",
                f"Generate with sampling_params={{'confidence': {self.top_k}}}",
            )
        read = _MEASURES[self.measure]
        values = [read(token) for token in task.confidences if token is not None]
        measured = [value for value in values if value is not None]
        if len(measured) < len(values):
            raise ParameterError(
                f"{self.measure} is not known for this sample",
                "its server gives the most probable tokens only",
                "Use the measure confidence or logprob",
            )
        return measured
