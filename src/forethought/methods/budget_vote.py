r"""Token-budget vote: self-consistency with a fixed number of tokens for all samples together.

Each sample gets an equal share of the tokens. Where its thought has used up the share but for what
the answer takes, the thought is closed, so that every sample has an answer to vote with. What a
sample leaves of its share goes to further samples: one more begins whenever a whole share is left::

    total 400, four samples       share 100
    used by samples 0 to 3        40 + 100 + 30 + 70     left 160: sample 4 begins
    used by sample 4              90                     left  70: less than a share, the vote

A sample begins only with a whole share, so all together never take more than the total. Which
samples there are depends on their tokens alone, not on the order in which they end: the first k of
them, k the lowest number with total - sum of their tokens < share.
"""

from __future__ import annotations

import contextlib
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
from forethought.scaffolding import sampling
from forethought.scaffolding.controller import Controller, expect_text, first_tag
from forethought.scaffolding.parallel import AsCompleted, Branch, Process
from forethought.scaffolding.result import Stage
from forethought.scaffolding.settings import (
    POSITIVE_INT,
    PositiveInt,
    required,
    setting,
    validated,
    with_settings,
)
from forethought.scaffolding.task import GenerationTask
from forethought.scaffolding.thinking import thinking_of


@with_settings
class BudgetVoteController(Controller):
    """Votes among as many samples as a fixed number of tokens pays for.

    ``customized_result_fields["budget_vote"]`` holds the ``answer``, the number of ``samples``, the
    ``tokens`` that they took, and what else a ``majority_vote`` says of its voters.

    Raises:
        ParameterError: a setting of the wrong kind, or a share that leaves nothing to think with.
    """

    paper = (
        'Wang et al., "Reasoning in Token Economies: Budget-Aware Evaluation of LLM Reasoning '
        'Strategies", 2024'
    )

    uses_thinking = "adapts"

    generation_controller: Controller = required(
        "Cloned for each sample; generates it as one task."
    )
    total_tokens: PositiveInt = setting(8192, "Of all samples together; never exceeded.")
    default_sample_num: PositiveInt = setting(
        8,
        "Shares that the total is divided into, unless `process` gets `sample_num`; this many "
        "samples begin at once.",
    )
    _: KW_ONLY
    answer_tokens: PositiveInt | None = setting(
        64,
        "Of a share, left for the closing text and the answer; the rest is the sample's "
        "`thinking_budget`. None: no thought is closed, as for a model that is known not to "
        "think.",
    )
    max_sample_num: PositiveInt = setting(64, "Most samples, further ones included.")
    answer: AnswerRule = setting(
        "auto", "The rule that finds answers, see `answers.answer_extraction`."
    )
    extract_answer: Callable[[str], str | None] | None = setting(
        None, "In its place: finds the answer in a text; None: the sample does not vote."
    )
    equivalence: Equivalence | PairwiseEquivalence | None = setting(
        None, "Decides which answers mean the same, as in `majority_vote`."
    )

    def __post_init__(self) -> None:
        self.space = answer_spaces.answer_space("math", self.answer, self.extract_answer)
        self.equivalence = checked_equivalence(self.equivalence)

    def fan_out(self) -> int:
        """The samples, each with a thought and an answer."""
        return 2 * max(self.default_sample_num, self.max_sample_num)

    def process(
        self, tasks: Sequence[GenerationTask], sample_num: int | None = None, **kwargs: Any
    ) -> Process:
        """Sample, vote, and leave the winner on the only task.

        Args:
            tasks: exactly one, without other limits of its thought; copied for each sample.
            sample_num: shares; None: ``default_sample_num``.
            **kwargs: of the samples' ``process``.
        """
        if len(tasks) != 1:
            raise ParameterError("a budget vote takes one task", f"got {len(tasks)}", "Split them")
        [task] = tasks
        sampling.refuse(task, _REFUSED, "budget_vote", "Use total_tokens and answer_tokens")
        expect_text("budget_vote", task, "it finds the answers in the text of the samples")
        count = self.default_sample_num if sample_num is None else sample_num
        share = self.total_tokens // validated("sample_num", count, POSITIVE_INT)
        if share <= (self.answer_tokens or 0):
            raise ParameterError(
                f"{count} samples of {self.total_tokens} tokens have nothing to think with",
                f"a share is {share}, of which answer_tokens={self.answer_tokens} are left free",
                "Raise total_tokens, or lower answer_tokens or the number of samples",
            )
        samples = yield from self._run(task, share, kwargs)
        yield from self._vote(task, samples)

    def _run(self, task: GenerationTask, share: int, options: Mapping[str, Any]) -> Process:
        """Generate samples while a whole share is left; returns them, in their order.

        Beyond the budget of the request no sample begins; running ones keep their texts.
        """
        samples, tokens_left, most = list[GenerationTask](), self.total_tokens, self.max_sample_num
        spent: BudgetExceeded | None = None
        with AsCompleted() as running:
            while True:
                while tokens_left >= share and len(samples) < most:
                    tokens_left -= share
                    samples.append(self._sample(task, len(samples), share))
                    controller = self.generation_controller.clone()
                    running.add(Branch(controller, [samples[-1]], options))
                if not running:
                    break
                try:
                    done = yield running
                except BudgetExceeded as error:
                    most, spent = 0, error
                else:
                    tokens_left += share - _num_tokens(done.tasks[0])
        if spent is not None and not any(sample.output_str for sample in samples):
            raise spent
        return samples

    def _sample(self, task: GenerationTask, number: int, share: int) -> GenerationTask:
        sample = task.copy()
        sampling.vary(sample, number)
        limits = {"max_tokens": share}
        profile = thinking_of(task, first_tag(self.generation_controller))
        if self.answer_tokens is not None and not profile.has_no_thoughts:
            limits["thinking_budget"] = share - self.answer_tokens
        sampling.choose(sample, limits)
        return sample

    def _vote(self, task: GenerationTask, samples: Sequence[GenerationTask]) -> Process:
        pool, texts = AnswerPool(self.equivalence), [sample.output_str for sample in samples]
        answers = [self.space.answer_of(sample) for sample in samples]
        with contextlib.suppress(BudgetExceeded):  # of seconds
            yield from pool.adding(dict(enumerate(answers)))
        winner = pool.winner
        answer = None if winner is None else winner.answer
        yield Stage("voted", fields={"answer": answer, "tally": pool.tally})
        first = next((number for number, text in enumerate(texts) if text), 0)
        chosen = samples[first if winner is None else winner.first]
        task.take_answer(chosen)
        task.customized_result_fields["budget_vote"] = {
            **pool.info(answer_spaces.rule_of(self.space, chosen)),
            "samples": len(samples),
            "tokens": sum(map(_num_tokens, samples)),
        }


_REFUSED = ("n", "max_tokens", "thinking_budget")


def _num_tokens(sample: GenerationTask) -> int:
    return max(sample.usage.completion_tokens, sample.num_generated)
