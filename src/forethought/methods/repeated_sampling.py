"""Repeated sampling: draw samples until a verifier accepts one.

Where answers can be checked, one right sample of many is enough. The share of problems with a right
sample among ``k`` is the *coverage*, or pass@k; it grows with ``k`` long after a vote has settled,
and a verifier turns it into accuracy. Sampling ends with the first sample that is accepted, so an
easy problem costs one sample and a hard one all of them.

``early_stop=False`` draws and verifies every sample. Their results give an unbiased estimate of
pass@k for every ``k`` up to their number; those of a run that ends with the first success do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any, Literal

from forethought.answers import answer_spaces
from forethought.answers.answer_extraction import AnswerRule
from forethought.answers.answers import AnswerPool
from forethought.errors import BudgetExceeded, ParameterError
from forethought.rewards import verifier as verifiers
from forethought.rewards.verifier import Verifier
from forethought.scaffolding import sampling
from forethought.scaffolding.base_task import ComputeTask
from forethought.scaffolding.controller import (
    Controller,
    expect_one,
    expect_text,
)
from forethought.scaffolding.parallel import AsCompleted, Branch, Process, num_to_begin
from forethought.scaffolding.result import Stage
from forethought.scaffolding.settings import (
    BOOL,
    FUNCTION,
    POSITIVE_INT,
    OnFailure,
    PositiveInt,
    required,
    setting,
    validated,
    with_settings,
)
from forethought.scaffolding.task import GenerationTask

Fallback = Literal["vote", "first"]


@with_settings
class RepeatedSamplingController(Controller):
    """Draws samples until a verifier accepts one, which is returned.

    Running samples with a higher number are then cancelled. Those with a lower one run on, and
    the lowest numbered one that is accepted is returned, however fast each of them is. If none is
    accepted, ``fallback`` chooses among those that have ended. Sample ``i`` draws with the same
    seed as sample ``i`` of a majority vote.

    ``customized_result_fields["repeated_sampling"]`` holds whether the returned sample was
    ``accepted``, its ``index``, the number of ``samples`` allowed, and ``verified``, for each that
    was begun: True, False, or None (cancelled, or the budget was spent). Where the samples have
    voted, ``vote`` has the fields of a ``majority_vote``.

    Raises:
        UnknownNameError: there is no verifier of this name.
    """

    paper = (
        'Brown et al., "Large Language Monkeys: Scaling Inference Compute with Repeated '
        'Sampling", 2024'
    )

    generation_controller: Controller = required("Cloned for each sample.")
    verifier: Verifier | str = required(
        "Whether a text answers a question, as a function of both, which runs in a thread (a "
        "coroutine function on the event loop); or the name of one in `rewards.verifier`."
    )
    default_sample_num: PositiveInt = setting(
        16, "Samples at most, unless `process` gets `sample_num`."
    )
    concurrency: PositiveInt | Literal["doubling"] = setting(
        1,
        'Samples running at once; or `"doubling"`: 1, then as many again as were rejected so '
        "far, so that 1, 2, 4, 8, ... are drawn.",
    )
    _: KW_ONLY
    early_stop: bool = setting(
        True, "Begin no further sample once one is accepted; False: draw and verify all."
    )
    fallback: Fallback = setting(
        "vote",
        'What is returned if none is accepted: the `"vote"` over the answers, as of a majority '
        'vote; or the `"first"` sample.',
    )
    answer: AnswerRule = setting(
        "auto",
        "The rule that finds the answers of that vote, see `answers.answer_extraction`.",
    )
    on_failure: OnFailure = setting(
        "raise",
        '`"raise"` fails if a sample does; `"drop"` counts it as rejected; a failure of the '
        "verifier is always raised.",
    )

    def __post_init__(self) -> None:
        self.verify = _verifier(self.verifier)
        self.space = answer_spaces.answer_space("math", self.answer)

    def fan_out(self) -> int:
        """The samples."""
        return self.default_sample_num

    def process(
        self,
        tasks: Sequence[GenerationTask],
        sample_num: int | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Process:
        """Sample and verify, and leave the chosen sample on the only task.

        If the budget ends the sampling, ``fallback`` chooses among the samples that have ended.

        Args:
            tasks: exactly one; copied for each sample.
            sample_num: samples at most; None: ``default_sample_num``.
            generation_kwargs: keyword arguments of the samples' ``process``.
            **kwargs: as ``generation_kwargs``.

        Raises:
            TaskError: every sample failed.
        """
        task: GenerationTask = expect_one("repeated sampling", tasks)
        _expect_texts(task)
        count = self.default_sample_num if sample_num is None else sample_num
        validated("sample_num", count, POSITIVE_INT)
        samples = yield from self._draw(task, count, {**kwargs, **(generation_kwargs or {})})
        accepted = [number for number, sample in enumerate(samples) if sample.verified]
        info: dict[str, Any] = {}
        index = accepted[0] if accepted else (yield from self._fall_back(samples, info))
        chosen = samples[index].task
        task.take_answer(chosen)
        ended = [sample.task if sample.has_ended else None for sample in samples]
        task.keep_candidates(ended + [None] * (count - len(samples)))
        task.customized_result_fields["repeated_sampling"] = {
            "accepted": bool(accepted),
            "index": index,
            "samples": count,
            "verified": [sample.verified for sample in samples],
            **info,
        }

    def _draw(self, task: GenerationTask, count: int, options: Mapping[str, Any]) -> Process:
        """Draw and verify, until a sample is accepted, there are ``count``, or the budget ends.

        Beyond the budget no sample begins; running ones that end nevertheless count.

        Returns:
            The samples that were begun, by number.

        Raises:
            BudgetExceeded: the budget is spent, and no sample has ended.
        """
        samples, limit, spent = list[_Sample](), count, None
        with AsCompleted() as running:
            while True:
                num_open = limit - len(samples), len(running)
                num_ended = len(samples) - len(running)
                for _ in range(num_to_begin(self.concurrency, *num_open, num_ended)):
                    samples.append(_Sample(self, task, len(samples)))
                    running.add(samples[-1].branch(options))
                if not running:
                    break
                try:
                    branch = yield running
                except BudgetExceeded as error:
                    limit, spent = len(samples), error
                    continue
                if branch.controller.ended(branch.error) and self.early_stop:
                    limit = len(samples)
                    _end_above(branch.controller.number, running)
        if spent is not None and not any(sample.has_ended for sample in samples):
            raise spent
        return samples

    def _fall_back(self, samples: Sequence[_Sample], info: dict[str, Any]) -> Process:
        """The number of the sample to return where none is accepted; ``info`` gets the vote."""
        ended = [number for number, sample in enumerate(samples) if sample.has_ended]
        if not ended:
            raise next(sample.error for sample in samples if sample.error)
        if self.fallback == "first":
            return ended[0]
        votes = {n: self.space.answer_of(samples[n].task) for n in ended}
        pool = AnswerPool(self.space.equivalence)
        try:
            yield from pool.adding(votes)
        except BudgetExceeded:
            return ended[0]
        index = ended[0] if pool.winner is None else pool.winner.first
        rule = answer_spaces.rule_of(self.space, samples[index].task)
        info["vote"] = pool.info(rule)
        return index


class _Sample:
    """One sample, which a branch draws and then verifies.

    Args:
        method: draws it with a clone of its controller.
        task: copied.
        number: of the sample.

    Attributes:
        has_ended: whether it was drawn without a failure.
        verified: whether it is accepted; None as long as that is unknown.
        error: why it failed; None if it did not.
    """

    def __init__(
        self, method: RepeatedSamplingController, task: GenerationTask, number: int
    ) -> None:
        self._method, self.task, self.number = method, task.copy(), number
        sampling.vary(self.task, number)
        self.has_ended = False
        self.verified: bool | None = None
        self.error: Exception | None = None

    def branch(self, options: Mapping[str, Any]) -> Branch:
        return Branch(self, [self.task], options, self._method.on_failure)

    def process(self, tasks: Sequence[GenerationTask], **options: Any) -> Process:
        task = self.task
        yield from self._method.generation_controller.clone().process(tasks, **options)
        self.has_ended, self.error = task.error is None, task.error
        if task.error is None and task.output_str is not None:
            check = ComputeTask(self._method.verify, task.question_text, task.output_str)
            yield [check]
            self.verified = validated("result of the verifier", check.result, BOOL)
            yield Stage("scored", fields={"accepted": self.verified})

    def ended(self, error: Exception | None) -> bool:
        """Note that its branch has ended; returns whether it is accepted: False without a text."""
        if error is not None and self.has_ended:
            raise error
        self.error = self.error or error
        self.verified = bool(self.verified)
        return self.verified


def _end_above(number: int, running: AsCompleted) -> None:
    """Cancel the running samples that come after an accepted one."""
    pending: list[Any] = running.pending
    above = [branch for branch in pending if branch.controller.number > number]
    if above:
        running.cancel(*above)


def _verifier(verifier: Any) -> Callable[[str, str], Any]:
    if isinstance(verifier, str):
        return verifiers.verifier(verifier)
    function: Callable[[str, str], Any] = validated("verifier", verifier, FUNCTION)
    return function


def _expect_texts(task: GenerationTask) -> None:
    """Raise ``ParameterError`` unless the verifier will have a question and an answer to read."""
    if task.question_text is None:
        raise ParameterError(
            "the verifier needs the question as text",
            "the prompt is token ids",
            "Give the text as well: generate(prompt, question=...)",
        )
    expect_text("repeated sampling", task, "the verifier reads the text of the samples")
