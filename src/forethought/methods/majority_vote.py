"""Majority vote, also known as self-consistency: sample several answers, return the most frequent.

Answers are pooled by what they mean. A sample is ended as soon as it cannot change what is
returned.

What is returned is the lowest numbered sample of the largest group, a tie between groups going to
the one with the lowest number: a function of the samples alone, whatever the order in which they
finish. Early stop keeps it. Say that some samples have ended, P are pending, and W is the largest
group so far, w its lowest number:

1. Nothing is ended before W is settled: whatever all of P say, no other group wins
   (``AnswerPool.decided``). So W, with those of P that join it, wins the full vote.
2. Then only the samples of P above w are ended. A full vote returns the lowest number of W and
   those of P that join it, which is at most w: a sample above w is never the one.
3. Those of P below w run on, so whether they join W is known. If one does, w falls, and 2 holds
   anew. At the end none is left, and w is what a full vote returns.

This takes groups that later samples do not change. Canonical forms make such groups whatever the
order of arrival. A user's function of two answers need not be transitive: there an answer joins the
first group whose first member's answer it equals, and answers are counted in the order of their
numbers, one that has come too early waiting for those before it; then 1 to 3 hold for any function.
It also takes samples that do not fail: a failure that the vote did not wait for is not raised.

``statistical_stop`` is another, statistical, early stop, which may return another answer than the
full vote: it ends sampling as soon as the leading answer is ahead of the second with a given
probability, by a Beta posterior over the two (``answers.lead_probability``). That is adaptive
consistency (Aggarwal et al., "Let's Sample Step by Step: Adaptive-Consistency for Efficient
Reasoning and Coding with LLMs", 2023, arXiv 2305.11860), which draws one sample after the other
(``concurrency=1``), up to 40, and stops at 0.95. Here samples may run concurrently; running ones
are then cancelled.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Annotated, Any

from pydantic import Field

from forethought.answers import answer_spaces
from forethought.answers.answer_extraction import AnswerRule
from forethought.answers.answer_spaces import AnswerSpace
from forethought.answers.answers import (
    AnswerPool,
    Equivalence,
    PairwiseEquivalence,
    checked_equivalence,
)
from forethought.errors import BudgetExceeded, ParameterError
from forethought.scaffolding.base_task import ComputeTask
from forethought.scaffolding.controller import (
    Controller,
    expect_text,
    refuse_arguments,
    sampled,
)
from forethought.scaffolding.parallel import AsCompleted, Branch, Process, num_to_begin
from forethought.scaffolding.result import Stage
from forethought.scaffolding.settings import (
    POSITIVE_INT,
    Concurrency,
    OnFailure,
    PositiveInt,
    required,
    setting,
    validated,
    with_settings,
)
from forethought.scaffolding.task import GenerationTask

_Answers = dict[int, str | None]
"""Answers by the numbers of their samples; None: it does not vote."""
SampleTasks = list[list[GenerationTask]]


@with_settings
class MajorityVoteController(Controller):
    """Runs a controller several times and returns the sample with the most frequent answer.

    A tie goes to the answer of the sample with the lowest number. The output is the text and the
    tokens of the winning answer's lowest numbered sample.
    ``customized_result_fields["majority_vote"]`` holds the ``answer`` and the ``answer_rule`` that
    found it, the number of ``samples``, how many of them ``finished`` and how many have an answer
    (``num_voters``), or one that took too much work and was compared as text
    (``num_uncompared``); of either a ``warning``. With ``statistical_stop`` there is also the
    ``probability`` that the answer leads in the long run.

    To vote differently override ``majority_vote``; sampling then never stops early.

    Raises:
        ParameterError: fewer than one sample, or a setting of the wrong kind.
    """

    paper = (
        'Wang et al., "Self-Consistency Improves Chain of Thought Reasoning in Language '
        'Models", 2022'
    )

    generation_controller: Controller = required("Cloned for each sample.")
    default_sample_num: PositiveInt = setting(1, "Samples, unless `process` gets `sample_num`.")
    early_stop: bool = setting(
        True,
        "End each running sample once it cannot change the output, which is the same as "
        "without (see the module for the proof).",
    )
    _: KW_ONLY
    answer_space: AnswerSpace | str = setting(
        "math",
        'How the answer is extracted and which answers mean the same: `"math"`, `"choice"`, '
        '`"json"`, `"tool_calls"`, `"text"`, or an object, such as `CodeAnswers(inputs)`; see '
        "`answers.answer_spaces`.",
    )
    answer: AnswerRule = setting(
        "auto",
        'The rule by which the answer space `"math"` finds answers: `"boxed"`, `"hash"`, '
        '`"phrase"`, `"number"`, or `"auto"`: the first of these that finds one. See '
        "`answers.answer_extraction`.",
    )
    extract_answer: Callable[[str], str | None] | None = setting(
        None,
        "Finds the answer in a text, in the place of the answer space; it returns None for a "
        "sample that does not vote.",
    )
    equivalence: Equivalence | PairwiseEquivalence | None = setting(
        None,
        "Decides which answers mean the same, in the place of the answer space: an object with "
        "a method `canonical_form(answer)`, or a function of two answers, which is called in a "
        "thread.",
    )
    statistical_stop: Annotated[float, Field(gt=0.5, lt=1)] | None = setting(
        None,
        "End sampling once the leading answer is ahead of the second with this probability "
        "(0.95 in the paper); None: never. The output may differ from a full vote's.",
    )
    concurrency: Concurrency = setting(
        None,
        'Samples running at once; `"doubling"`: 2, then as many again as have ended, so that '
        "2, 4, 8, ... are drawn; None: all.",
    )
    on_failure: OnFailure = setting(
        "raise", '`"raise"` fails if a sample does; `"drop"` votes without it.'
    )

    def __post_init__(self) -> None:
        self.space = self.answer_space = answer_spaces.answer_space(
            self.answer_space, self.answer, self.extract_answer
        )
        rule = self.space.equivalence if self.equivalence is None else self.equivalence
        self.equivalence = checked_equivalence(rule)

    def fan_out(self) -> int:
        """The samples."""
        return self.default_sample_num

    def process(
        self,
        tasks: Sequence[GenerationTask],
        sample_num: int | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
        majority_vote_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Process:
        """Sample, vote, and leave the winner's results on ``tasks``.

        If the budget ends the sampling, samples that have ended vote; without any, the cut ones do.

        Args:
            tasks: copied for each sample; the answer is extracted from the first one.
            sample_num: samples; None: ``default_sample_num``.
            generation_kwargs: keyword arguments of the samples' ``process``.
            majority_vote_kwargs: keyword arguments of ``majority_vote``.
            **kwargs: as ``generation_kwargs``.
        """
        self._check(tasks, majority_vote_kwargs or {})
        count = self.default_sample_num if sample_num is None else sample_num
        validated("sample_num", count, POSITIVE_INT)
        options = {**kwargs, **(generation_kwargs or {})}
        branches = sampled(self.generation_controller, tasks, count, options, self.on_failure)
        pool = AnswerPool(self.equivalence)
        ended = yield from self._run(branches, pool)
        whole = {*ended}
        voters = [branch for branch in branches if branch in whole and branch.error is None]
        if not voters:
            voters = yield from self._cut_voters(branches, ended, pool)
        if self._overridden:
            chosen, answer = yield from self._own_vote(voters, majority_vote_kwargs or {})
        else:
            winner = pool.winner
            chosen = voters[0] if winner is None else branches[winner.first]
            answer = None if winner is None else winner.answer
        votes = {*voters}
        samples = [branch.tasks if branch in votes else None for branch in branches]
        _store(tasks, chosen.tasks, samples)
        yield Stage("voted", fields={"answer": answer, "tally": pool.tally})
        info = {"answer": answer, "samples": count, "finished": len(voters)}
        if not self._overridden:
            rule = answer_spaces.rule_of(self.space, chosen.tasks[0])
            info = pool.info(rule) | info
        if self.statistical_stop is not None:
            info["probability"] = pool.lead_probability
        tasks[0].customized_result_fields["majority_vote"] = info

    def _check(self, tasks: Sequence[GenerationTask], vote_kwargs: Mapping[str, Any]) -> None:
        """Refuse vote arguments and tasks that the vote cannot honour."""
        if not tasks:
            raise ParameterError("a vote takes a task", "got none", "Give at least one")
        if not self._overridden:
            why = "it finds the answers in the text of the samples"
            expect_text("a majority vote", tasks[0], why, "Leave it out, or override majority_vote")
            refuse_arguments(self, vote_kwargs, "majority_vote")

    def _own_vote(self, voters: Sequence[Branch], kwargs: Mapping[str, Any]) -> Process:
        vote = ComputeTask(self.majority_vote, [list(branch.tasks) for branch in voters], **kwargs)
        yield [vote]
        index, answer = vote.result
        return voters[index], answer

    def majority_vote(self, candidates_tasks: SampleTasks, **kwargs: Any) -> tuple[int, str | None]:
        """Choose among finished samples. A vote that overrides it runs in a thread.

        Args:
            candidates_tasks: the tasks of each sample, in the order of their numbers.
            **kwargs: ``majority_vote_kwargs``, for a vote that overrides this one.

        Returns:
            Number of the winner among them, and the answer; ``(0, None)`` if none has an answer.
        """
        pool = AnswerPool(self.equivalence)
        for number, tasks in enumerate(candidates_tasks):
            answer = self.space.answer_of(tasks[0])
            if answer is not None:
                pool.add(number, answer)
        return (0, None) if pool.winner is None else (pool.winner.first, pool.winner.answer)

    def _run(self, branches: list[Branch], pool: AnswerPool) -> Process:
        """Run the samples until all have ended, or the rest cannot change the output.

        Args:
            branches: the samples.
            pool: where the votes are counted, unless a subclass votes in its own way.

        Returns:
            Those that have ended.
        """
        numbers: dict[Any, int] = {branch: number for number, branch in enumerate(branches)}
        waiting, answers, ended = deque(branches), _Answers(), list[Branch]()
        with AsCompleted() as running:
            while waiting or running:
                num_open = len(waiting), len(running)
                num_new = num_to_begin(self.concurrency, *num_open, len(ended), first=2)
                running.add(*(waiting.popleft() for _ in range(num_new)))
                try:
                    branch = yield running
                except BudgetExceeded:
                    waiting.clear()  # running ones end alone, or are cut
                    continue
                ended.append(branch)
                answers[numbers[branch]] = self._answer(branch)
                pending = [numbers[other] for other in (*running.pending, *waiting)]
                try:
                    yield from self._count(pool, answers, branches, pending)
                except BudgetExceeded:
                    break  # vote with the samples that have ended
                if self.statistical_stop and pool.lead_probability >= self.statistical_stop:
                    break
                if self.early_stop and pool.decided([*pending, *answers]):
                    waiting.clear()  # they come after all that have begun
                    winner = pool.winner  # those above it can no longer be returned
                    idle = [b for b in running.pending if winner and numbers[b] > winner.first]
                    if idle:
                        running.cancel(*idle)
        try:
            yield from self._count(pool, answers, branches, ())
        except BudgetExceeded:
            if pool.winner is None:
                raise
        return ended

    def _cut_voters(
        self, branches: Sequence[Branch], ended: Sequence[Branch], pool: AnswerPool
    ) -> Process:
        """The samples that the budget has cut, which vote where none is whole.

        Raises:
            BudgetExceeded: none of them has a text.
            Exception: the failure of the samples.
        """
        failed = [branch.error for branch in (*ended, *branches) if branch.error is not None]
        assert failed, "a sample that does not vote has failed, or the budget has ended it"
        spent = [error for error in failed if isinstance(error, BudgetExceeded)]
        begun = [branch for branch in branches if branch.path is not None]
        cut = [branch for branch in begun if getattr(branch.tasks[0], "output_str", None)]
        if not spent or not cut:
            raise (spent or failed)[0]
        if not self._overridden:
            answers = {
                branches.index(branch): self.space.answer_of(branch.tasks[0]) for branch in cut
            }
            with contextlib.suppress(BudgetExceeded):  # of seconds
                yield from pool.adding(answers)
        return cut

    def _count(
        self,
        pool: AnswerPool,
        answers: _Answers,
        branches: Sequence[Branch],
        pending: Collection[int],
    ) -> Process:
        """Move the votes that can be counted by now from ``answers`` to ``pool``."""
        counted = yield from pool.adding_in_order(answers, pending)
        for number, answer in counted.items():
            if answer is not None:
                fields = {"answer": answer, "tally": pool.tally}
                yield Stage("voted", branch=branches[number].path, fields=fields)

    @property
    def _overridden(self) -> bool:
        return type(self).majority_vote is not MajorityVoteController.majority_vote

    def _answer(self, branch: Branch) -> str | None:
        """The vote of a sample that has ended; None: it has failed, or a subclass votes."""
        is_voter = branch.error is None and not self._overridden
        return self.space.answer_of(branch.tasks[0]) if is_voter else None


def _store(tasks: Sequence[GenerationTask], chosen: Sequence[Any], samples: Sequence[Any]) -> None:
    for number, (task, sample) in enumerate(zip(tasks, chosen, strict=True)):
        task.take_answer(sample)
        task.keep_candidates(
            None if tasks_of_sample is None else tasks_of_sample[number]
            for tasks_of_sample in samples
        )
