"""DeepConf: a vote in which samples weigh as much as the model was confident in them.

Offline, all samples are drawn. The most confident share of them votes, each with its confidence as
its weight::

    answer      7     7     5     7     5          kept 0.6: those from the 40th percentile on
    confidence  2.0   1.0   4.0   3.0   2.5        5: 4.0 + 2.5     7: 3.0     5 wins

Online, a warm-up of samples is drawn first. The percentile of their lowest group confidences that
keeps ``kept`` of them is a threshold. Each further sample is a stream, and it is cancelled once the
confidence of a group of ``window`` tokens falls below it::

    threshold 1.9, window 3    token confidences   4.0 3.0 2.0 1.0 2.5 ...
                                                   [....3.0..]
                                                       [....2.0..]
                                                           [...1.83.]   below: cancelled

Cancelled samples do not vote, nor do those of the warm-up that would have been. Sampling ends with
the first answer that has ``consensus`` of all weight; running samples are then cancelled.

The confidence of a token is computed in the decode step; servers are asked for log-probabilities.
Which samples are cancelled for their confidence is a function of the samples, whatever the order in
which they end and however many tokens come at once. Which have ended at a consensus is not.

Its runs draw up to 512 samples; the default number here is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any

from forethought.answers import answer_spaces
from forethought.answers.answer_extraction import AnswerRule
from forethought.answers.answers import (
    AnswerPool,
    Equivalence,
    PairwiseEquivalence,
    checked_equivalence,
)
from forethought.errors import BudgetExceeded, ParameterError
from forethought.rewards.confidence import (
    TOP_K,
    WINDOW,
    Aggregation,
    ConfidenceRewardController,
    TopK,
    stop_threshold,
    watch_groups,
)
from forethought.scaffolding import sampling
from forethought.scaffolding.controller import (
    Controller,
    ConversationForm,
    expect_one,
    expect_streams,
    expect_text,
)
from forethought.scaffolding.parallel import Branch, Process, run_until
from forethought.scaffolding.result import Stage
from forethought.scaffolding.settings import (
    POSITIVE_INT,
    OnFailure,
    PositiveInt,
    Share,
    required,
    setting,
    validated,
    with_settings,
)
from forethought.scaffolding.task import ChatTask, GenerationTask, StreamGenerationTask


@with_settings
class _ConfidenceVoteController(Controller):
    """Base of both methods."""

    paper = 'Fu et al., "Deep Think with Confidence", 2025. arXiv 2508.15260'

    generation_controller: Controller = required("Cloned for each sample.")
    default_sample_num: PositiveInt = setting(16, "Samples, unless `process` gets `sample_num`.")
    _: KW_ONLY
    kept: Share = setting(
        0.9,
        "Share of the samples with an answer that votes, the most confident ones; the paper's "
        "are 0.1 and 0.9.",
    )
    window: PositiveInt = setting(WINDOW, "Tokens of a group, and of the tail.")
    top_k: TopK = setting(
        TOP_K, "Most probable tokens that the confidence of a token is taken over."
    )
    answer: AnswerRule = setting(
        "auto", "The rule that finds answers, see `answers.answer_extraction`."
    )
    extract_answer: Callable[[str], str | None] | None = setting(
        None, "In its place: finds the answer in a text; None: the sample does not vote."
    )
    equivalence: Equivalence | PairwiseEquivalence | None = setting(
        None, "Decides which answers mean the same, as in `majority_vote`."
    )
    on_failure: OnFailure = setting(
        "raise", '`"raise"` fails if a sample does; `"drop"` votes without it.'
    )

    def __post_init__(self) -> None:
        self.reward = ConfidenceRewardController(
            "lowest_group", window=self.window, top_k=self.top_k
        )
        self.space = answer_spaces.answer_space("math", self.answer, self.extract_answer)
        self.equivalence = checked_equivalence(self.equivalence)

    def fan_out(self) -> int:
        """The samples."""
        return self.default_sample_num

    def process(
        self, tasks: Sequence[GenerationTask], sample_num: int | None = None, **kwargs: Any
    ) -> Process:
        """Sample, vote, and leave the winner's results on the only task.

        ``sample_num`` replaces the default; ``kwargs`` are those of the samples' ``process``.
        """
        self._check(tasks)
        count = self.default_sample_num if sample_num is None else sample_num
        validated("sample_num", count, POSITIVE_INT)
        vote = _Vote(self, tasks[0], count)
        yield from self._draw(vote, kwargs)
        yield from vote.count()
        yield from vote.stages()
        vote.finish()

    def _check(self, tasks: Sequence[GenerationTask]) -> None:
        task: GenerationTask = expect_one("DeepConf", tasks)
        expect_text("DeepConf", task, "it finds the answers in the text of the samples")

    def _draw(self, vote: _Vote, options: Mapping[str, Any]) -> Process:
        branches = (vote.begin(options) for _ in range(vote.num_samples))
        yield from run_until(branches, vote.on_end)

    def voters(self, confidences: Mapping[int, float], threshold: float | None) -> dict[int, float]:
        """The samples that vote, and their weights.

        Args:
            confidences: of the samples with an answer, by their numbers.
            threshold: None, as long as all samples are drawn whole.
        """
        if not confidences:
            return {}
        lowest = stop_threshold([*confidences.values()], self.kept)
        return {n: value for n, value in confidences.items() if value >= lowest}

    def details(self, vote: _Vote) -> dict[str, Any]:
        """Further fields of a vote for ``customized_result_fields``."""
        return {}


@with_settings
class DeepConfController(_ConfidenceVoteController):
    """Draws samples and lets the most confident ones vote, weighted by their confidence.

    The output is the sample of the winning answer with the highest confidence.
    ``customized_result_fields["deepconf"]`` holds the ``answer``, its ``share`` of the weight, the
    number of ``samples``, the ``confidences`` of all (None: it failed or did not end), and the
    numbers of the ``voters``.
    """

    _: KW_ONLY
    aggregation: Aggregation = setting(
        "bottom_groups",
        "The confidence of a sample: the mean over its tokens or over its last `window`, its "
        "lowest group, or the lowest tenth of its groups.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reward = ConfidenceRewardController(
            self.aggregation, window=self.window, top_k=self.top_k
        )


@with_settings
class OnlineDeepConfController(_ConfidenceVoteController):
    """Draws a warm-up, then samples that are cancelled when a group of tokens lacks confidence.

    ``customized_result_fields["deepconf"]`` holds what that of ``deepconf`` does, the ``threshold``
    (None: no sample of the warm-up has one), and the numbers of the samples ``stopped`` for it. A
    sample's weight is its lowest group confidence.
    """

    conversation = ConversationForm.TEXT

    generation_controller: Controller = required(
        "Generates one sample, cloned for each; a plain generation, whose tasks can be streams."
    )
    default_sample_num: PositiveInt = setting(
        64, "Samples at most, the warm-up included, unless `process` gets `sample_num`."
    )
    _: KW_ONLY
    num_warmup: PositiveInt = setting(16, "Samples that are drawn whole and set the threshold.")
    kept: Share = setting(
        0.9, "Share of the warm-up at or above the threshold; the paper's are 0.1 and 0.9."
    )
    consensus: Share | None = setting(
        0.95, "Share of the weight with which an answer ends the sampling; None: draw all."
    )
    concurrency: PositiveInt | None = setting(
        None, "Samples that run at once after the warm-up; None: all of them."
    )
    chunk_size: PositiveInt = setting(
        32, "Tokens of a sample between two checks of its groups; it changes no decision."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_streams("deepconf_online", self.generation_controller)

    def _check(self, tasks: Sequence[GenerationTask]) -> None:
        super()._check(tasks)
        if isinstance(tasks[0], ChatTask):
            raise ParameterError(
                "deepconf_online cannot stop a chat", "it is no stream", "Give a prompt"
            )

    def _draw(self, vote: _Vote, options: Mapping[str, Any]) -> Process:
        num_warmup = min(self.num_warmup, vote.num_samples)
        warmup = [vote.begin(options) for _ in range(num_warmup)]
        ended = yield from run_until(warmup, vote.on_end)
        lowest = [sample.confidence for sample in vote.samples if sample.confidence is not None]
        if len(ended) < num_warmup or not lowest:
            return  # the budget is spent, or all have failed
        vote.threshold = stop_threshold(lowest, self.kept)
        others = (vote.begin(options) for _ in range(num_warmup, vote.num_samples))
        try:
            if not (yield from vote.agrees(self.consensus)):
                yield from run_until(others, self._until(vote), self.concurrency)
        except BudgetExceeded:
            return  # those vote that have ended

    def _until(self, vote: _Vote) -> Callable[[Branch], Process]:
        """The condition that ends the sampling after the warm-up: a consensus."""

        def has_consensus(branch: Branch) -> Process:
            yield from vote.on_end(branch)
            return (yield from vote.agrees(self.consensus))

        return has_consensus

    def voters(self, confidences: Mapping[int, float], threshold: float | None) -> dict[int, float]:
        """The samples that reach the threshold, and their weights; all of them, if none does."""
        voters = {
            n: confidence
            for n, confidence in confidences.items()
            if confidence >= (threshold or 0.0)
        }
        return voters or dict(confidences)

    def details(self, vote: _Vote) -> dict[str, Any]:
        """The threshold, and the samples that were stopped."""
        stopped = [number for number, sample in enumerate(vote.samples) if sample.is_stopped]
        return {"threshold": vote.threshold, "stopped": stopped}


class _Vote:
    """The samples of one request, and what they say.

    Args:
        method: draws and weighs them.
        task: copied for each; gets the results.
        num_samples: samples at most.

    Attributes:
        samples: those that have begun, by their numbers.
        threshold: the group confidence below which a sample is stopped; None: none is.
    """

    def __init__(
        self, method: _ConfidenceVoteController, task: GenerationTask, num_samples: int
    ) -> None:
        self._method, self._task, self.num_samples = method, task, num_samples
        self.samples: list[_Sample] = []
        self.threshold: float | None = None
        self._pool, self._counted = AnswerPool(method.equivalence), set[int]()

    def begin(self, options: Mapping[str, Any]) -> Branch:
        sample = _Sample(self._method, self._task, len(self.samples), self.threshold)
        self.samples.append(sample)
        sample.branch = Branch(sample, [sample.task], options, self._method.on_failure)
        return sample.branch

    def on_end(self, branch: Any) -> Process:
        """Note that a sample has ended, which alone is never enough."""
        branch.controller.error = branch.error or branch.tasks[0].error
        yield from ()
        return False

    def count(self) -> Process:
        """Pool the answers of the samples that have ended, in the order of their numbers."""
        answers = {
            n: sample.answer for n, sample in enumerate(self.samples) if n not in self._counted
        }
        votes = {number: answer for number, answer in answers.items() if answer is not None}
        try:
            yield from self._pool.adding(votes)
        except BudgetExceeded:
            if not self._pool.groups:
                return  # the first sample is returned
        self._counted |= votes.keys()

    def agrees(self, consensus: float | None) -> Process:
        """Whether an answer has this share of the weight."""
        if consensus is None:
            return False
        yield from self.count()
        return self._pool.heaviest(self._voters())[1] >= consensus

    def _voters(self) -> dict[int, float]:
        confidences = {
            number: self.samples[number].confidence
            for group in self._pool.groups.values()
            for number in group.members
        }
        measured = {
            n: confidence for n, confidence in sorted(confidences.items()) if confidence is not None
        }
        return self._method.voters(measured, self.threshold)

    def stages(self) -> Process:
        """The stages that say which samples vote, and the weight of each answer."""
        voters, tally = self._voters(), dict[str, float]()
        for group in self._pool.groups.values():
            for number in sorted(group.members):
                path, weight = self.samples[number].branch.path, voters.get(number)
                if weight is None:
                    yield Stage("pruned", "the others are more confident", path)
                    continue
                tally[group.answer] = tally.get(group.answer, 0.0) + weight
                fields = {"answer": group.answer, "weight": weight}
                yield Stage("voted", branch=path, fields=fields)
        winner, _ = self._pool.heaviest(voters)
        answer = None if winner is None else winner.answer
        yield Stage("voted", fields={"answer": answer, "tally": tally})

    def finish(self) -> None:
        ended = [number for number, sample in enumerate(self.samples) if sample.has_ended]
        if not ended:
            raise next(sample.error for sample in self.samples if sample.error is not None)
        voters = self._voters()
        winner, share = self._pool.heaviest(voters)
        best = ended[:1] if winner is None else [n for n in winner.members if n in voters]
        chosen = self.samples[min(best, key=lambda number: (-voters.get(number, 0.0), number))]
        task, missing = self._task, [None] * (self.num_samples - len(self.samples))
        task.take_answer(chosen.task)
        ended_tasks = [sample.task if sample.has_ended else None for sample in self.samples]
        task.keep_candidates([*ended_tasks, *missing])
        rule = answer_spaces.rule_of(self._method.space, chosen.task)
        task.customized_result_fields["deepconf"] = {
            **self._pool.info(rule),
            "answer": None if winner is None else winner.answer,
            "share": share,
            "samples": self.num_samples,
            "confidences": [*(sample.confidence for sample in self.samples), *missing],
            "voters": [*voters],
            **self._method.details(self),
        }


class _Sample:
    """One sample, as a branch draws it.

    Args:
        method: draws it.
        task: copied.
        number: of the sample.
        threshold: group confidence below which it is stopped; None: it is drawn whole.

    Attributes:
        branch: that draws it.
        confidence: of its tokens; None before it has ended, and if it was stopped or failed.
        answer: likewise.
        is_stopped: whether a group of its tokens fell below the threshold.
        has_ended: whether it was drawn to its end.
        error: why it failed; None if it did not.
    """

    def __init__(
        self,
        method: _ConfidenceVoteController,
        task: GenerationTask,
        number: int,
        threshold: float | None,
    ) -> None:
        self._method, self._threshold = method, threshold
        self.task = task.copy()
        self.branch: Branch
        sampling.vary(self.task, number)
        sampling.fill(self.task, method.reward.sample_params)
        if threshold is not None:
            step: int = method.chunk_size  # type: ignore[attr-defined]  # the online method
            self.task = StreamGenerationTask.create_from_generation_task(self.task, step)
        self.confidence: float | None = None
        self.answer: str | None = None
        self.error: Exception | None = None
        self.is_stopped = self.has_ended = False

    def process(self, tasks: Sequence[GenerationTask], **options: Any) -> Process:
        task, controller = self.task, self._method.generation_controller.clone()
        if self._threshold is None:
            yield from controller.process(tasks, **options)
        else:
            stream: Any = tasks[0]
            reward = self._method.reward
            self.is_stopped = yield from watch_groups(
                controller, stream, reward.values, (reward.window, self._threshold), options
            )
        if task.error is None and not self.is_stopped:
            self.has_ended = True
            self.confidence = self._method.reward.score(task)
            self.answer = self._method.space.answer_of(task)
