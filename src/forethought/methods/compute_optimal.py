"""Compute-optimal sampling: method and budget are chosen by the predicted difficulty of a question.

Some samples are drawn as probes. The less their answers agree, the more difficult the question is
taken to be: difficulty = 1 - (votes of the most frequent answer) / (number of probes). Where there
is a reward, it is 1 - (their mean score), as in the paper. A policy says which method answers a
question of that difficulty::

    difficulty     0.0 to 0.25     to 0.5               above
    method         probes          majority_vote@8      majority_vote@32

``probes`` returns the probes' most frequent answer (with a reward, the one with the highest score)
and costs nothing more. Policies and how they are fitted: ``methods.parts.difficulty``.

The paper predicts difficulty by the mean score that a reward model gives to 2048 samples, and has
five bins; a few probes, their agreement, and the defaults are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Any

from forethought import methods
from forethought.answers import answer_spaces
from forethought.answers.answer_extraction import AnswerRule
from forethought.answers.answer_spaces import AnswerSpace
from forethought.answers.answers import AnswerPool
from forethought.errors import BudgetExceeded, ParameterError
from forethought.methods.parts.difficulty import (
    PROBES,
    Policy,
    difficulty_of,
    fit,
    score_difficulty,
)
from forethought.methods.stack import split, stack
from forethought.methods.table import MethodTable, SettingsByMethod
from forethought.scaffolding import sampling
from forethought.scaffolding.controller import (
    Controller,
    expect_one_text,
    sampled,
)
from forethought.scaffolding.parallel import Process, run_until
from forethought.scaffolding.result import Stage
from forethought.scaffolding.reward_controller import scores_of
from forethought.scaffolding.settings import required, setting, with_settings
from forethought.scaffolding.task import GenerationTask

__all__ = ["PROBES", "ComputeOptimalController", "Policy", "fit"]


@with_settings
class ComputeOptimalController(Controller):
    """Answers a question with the method that a policy chooses by its difficulty.

    ``customized_result_fields["compute_optimal"]`` holds the ``difficulty``, the ``method``, the
    ``answer`` in the text that is returned and the ``answer_rule`` that found it.

    Raises:
        ParameterError: a setting of the wrong kind, or no policy.
        UnknownNameError: the policy names a method that is not in the table.
    """

    paper = (
        'Snell et al., "Scaling LLM Test-Time Compute Optimally can be More Effective than '
        'Scaling Model Parameters", 2024. arXiv 2408.03314'
    )

    draws_samples = True
    """Probes, and what the methods of the policy draw, are equal at temperature 0."""

    policy: Policy | Mapping[str, Any] | str | Path = required(
        "A `Policy`, a mapping with its fields, or the path of its JSON file."
    )
    generation_controller: Controller = required("Cloned for each probe.")
    _: KW_ONLY
    answer_space: AnswerSpace | str = setting(
        "math",
        "How the answer is extracted and which answers mean the same, as in `majority_vote`.",
    )
    answer: AnswerRule = setting(
        "auto", "The rule that finds answers, see `answers.answer_extraction`."
    )
    settings: SettingsByMethod | None = setting(
        None, "By method of the policy: its further settings."
    )
    reward_controller: Controller | None = setting(
        None, "Scores the probes from 0 to 1, for a policy that was fitted on scores."
    )
    method_table: MethodTable | None = setting(
        None,
        "Where the policy's methods, and those in `settings`, have their names. A policy may "
        "come from a file, and names no code: by default its methods are those that are "
        'shipped. `methods.closed([NAME])` has a plug-in or `"module:Class"` too.',
    )

    def __post_init__(self) -> None:
        policy = self._policy = self.policy = Policy.load(self.policy)
        self.space = self.answer_space = answer_spaces.answer_space(self.answer_space, self.answer)
        if (policy.difficulty == "score") != (self.reward_controller is not None):
            raise ParameterError(
                "the policy and reward_controller do not belong together",
                f"the policy predicts difficulty by {policy.difficulty}, and reward_controller is "
                f"{'None' if self.reward_controller is None else 'given'}",
                "Give the reward that the policy was fitted with, and none for agreement",
            )
        settings, table = self.settings or {}, self.method_table
        if unknown := settings.keys() - {*policy.methods}:
            raise ParameterError.unknown("the policy", unknown, policy.methods)
        _check_names(policy, methods.shipped() if table is None else table)
        self.controllers = {
            name: stack(name, method_table=table, **settings.get(name, {}))
            for name in policy.methods
            if name != PROBES
        }

    def fan_out(self) -> int:
        """The probes."""
        return self._policy.num_probes

    def process(self, tasks: Sequence[GenerationTask], **kwargs: Any) -> Process:
        """Draw the probes, and leave the results of the chosen method on the only task.

        ``kwargs`` are those of the probes' ``process``. The probes' answer is returned if the
        budget ends the method.
        """
        task = expect_one_text("compute_optimal", tasks)
        probes = yield from self._probe(task, kwargs)
        if self.reward_controller is None:
            chosen, difficulty = yield from self._vote(probes)
        else:
            chosen, difficulty = yield from self._scored(self.reward_controller, probes)
        method = self._policy.method(difficulty)
        answer = self.space.answer_of(chosen)
        yield Stage("probed", fields={"difficulty": difficulty, "answer": answer})
        if method != PROBES:
            answered = task.copy()
            sampling.vary(answered, self._policy.num_probes)
            try:
                yield from self.controllers[method].process([answered])
                chosen = answered
            except BudgetExceeded:
                method = PROBES
        task.take_answer(chosen)
        yield Stage("selected", fields={"method": method})
        task.customized_result_fields["compute_optimal"] = {
            "difficulty": difficulty,
            "method": method,
            "answer": self.space.answer_of(chosen),
            "answer_rule": answer_spaces.rule_of(self.space, chosen),
        }

    def _probe(self, task: GenerationTask, options: Mapping[str, Any]) -> Process:
        branches = sampled(self.generation_controller, [task], self._policy.num_probes, options)
        ended = yield from run_until(branches)
        return [branch.tasks[0] for branch in branches if branch in ended]

    def _vote(self, probes: Sequence[GenerationTask]) -> Process:
        """The probe that gives the most frequent answer, and the difficulty."""
        pool = AnswerPool(self.space.equivalence)
        answers = {number: self.space.answer_of(probe) for number, probe in enumerate(probes)}
        try:
            yield from pool.adding(answers)
        except BudgetExceeded:
            return probes[0], 1.0
        chosen = probes[0 if pool.winner is None else pool.winner.first]
        return chosen, difficulty_of(pool, self._policy.num_probes)

    def _scored(self, reward: Controller, probes: Sequence[GenerationTask]) -> Process:
        """The probe with the highest score, and the difficulty."""
        try:
            yield from reward.process(probes)
        except BudgetExceeded:
            return probes[0], 1.0
        scores = [score or 0.0 for score in scores_of(reward, len(probes))]
        best = max(range(len(probes)), key=scores.__getitem__)
        return probes[best], score_difficulty(scores, self._policy.num_probes)


def _check_names(policy: Policy, table: MethodTable) -> None:
    for spec in policy.methods:
        for method in split(spec, table) if spec != PROBES else ():
            table.resolve(method.name)
