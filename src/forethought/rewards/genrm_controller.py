"""Generative verification: a language model checks answers in words, and its "Yes" is the score.

The answer is continued with an instruction to verify it, the verification is generated, and the
model is asked whether the answer is correct. The score is the probability of "Yes", as the mean
over several verifications (GenRM-CoT with a vote)::

    score(x, y) = 1/K sum over k of p("Yes" | x, y, instruction, verification k, question)

With no verification (``num_verifications=0``) the question is asked at once (direct GenRM).

The paper trains the verifier; any model can be asked. The instruction and the question are the
paper's; the number of verifications is ours (the paper goes up to 32).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY
from enum import Enum
from typing import Any

from forethought.errors import BudgetExceeded, ParameterError
from forethought.rewards.confidence import NUM_LOGPROBS, word_probability
from forethought.scaffolding.controller import Controller, refuse_arguments
from forethought.scaffolding.parallel import AsCompleted, Branch, Process
from forethought.scaffolding.result import Stage
from forethought.scaffolding.reward_controller import has_failed
from forethought.scaffolding.settings import (
    NonNegativeInt,
    PositiveInt,
    Text,
    setting,
    with_settings,
)
from forethought.scaffolding.task import GenerationTask

VERIFY_PROMPT = "\n\nLet's verify step by step.\n"
YES_NO_PROMPT = "\nIs the answer correct (Yes/No)?"


@with_settings
class GenRMController(Controller):
    """Scores answers by the probability of "Yes" after verifications that a model generates.

    A reward controller, for ``best_of_n`` and others: ``scores`` holds one per task, in their
    order, from 0 to 1; None for a task that failed, or of which the budget left no verification.
    ``votes`` holds the probabilities of "Yes", a list per task. A verification continues the
    answer's own sequence where its worker holds that, so the answer is not prefilled again.
    """

    paper = (
        'Zhang et al., "Generative Verifiers: Reward Modeling as Next-Token Prediction", 2024. '
        "arXiv 2408.15240"
    )

    class WorkerTag(Enum):
        """The worker that verifies."""

        VERIFICATION = "verification"

    num_verifications: NonNegativeInt = setting(
        4, "K, sampled per answer; 0: the question is asked without any."
    )
    _: KW_ONLY
    verify_prompt: Text = setting(
        VERIFY_PROMPT, "Text after an answer, which asks for a verification."
    )
    yes_no_prompt: Text = setting(
        YES_NO_PROMPT, 'Text after a verification, which asks for "Yes" or "No".'
    )
    yes: Text = setting(
        "Yes",
        "The word whose probability counts, in upper or lower case, with or without blanks.",
    )
    verification_tokens: PositiveInt | None = setting(
        None, "Length of a verification at most; None: as of an answer."
    )

    def __post_init__(self) -> None:
        self._word = self.yes.strip().lower()
        self.scores: list[float | None] | None = None
        self.votes: list[list[float]] | None = None

    def fan_out(self) -> int:
        """The verifications, each with a verdict."""
        return max(1, 2 * self.num_verifications)

    def process(self, tasks: Sequence[GenerationTask], **kwargs: Any) -> Process:
        """Verify all tasks at once; if the budget ends, the verifications so far count."""
        refuse_arguments(self, kwargs)
        votes: list[list[float]] = [[] for _ in tasks]
        owners: dict[int, int] = {}
        branches = []
        for number, task in enumerate(tasks):
            for first in [] if has_failed(task) else self._first_parts(task):
                branches.append(Branch(_Verification(self), [first]))
                owners[id(branches[-1])] = number
        with AsCompleted(branches) as running:
            while running:
                try:
                    done = yield running
                except BudgetExceeded:
                    if not any(votes):
                        raise
                    break
                number, vote = owners[id(done)], done.result
                votes[number].append(vote)
                yield Stage("scored", branch=done.path, fields={"answer": number, "score": vote})
        self.votes = votes
        self.scores = [
            math.fsum(probabilities) / len(probabilities) if probabilities else None
            for probabilities in votes
        ]

    def _first_parts(self, task: GenerationTask) -> list[GenerationTask]:
        if not isinstance(task, GenerationTask) or task.output_str is None:
            raise ParameterError(
                "generative verification scores finished texts",
                f"got {type(task).__name__} without output_str",
                'Use it as a reward controller: create("best_of_n", reward_controller="genrm")',
            )
        if not self.num_verifications:
            return [task]
        limit = self.verification_tokens or task.max_tokens
        fields: dict[str, Any] = {"max_tokens": limit, "guided_decoding": None, "is_aside": True}
        return task.follow_up(self.verify_prompt, **fields).samples_of(self.num_verifications)

    def ask(self, part: GenerationTask) -> GenerationTask:
        """The task that asks whether the answer verified by ``part`` is correct: one token."""
        return part.follow_up(
            self.yes_no_prompt,
            inherit=False,
            temperature=0.0,
            max_tokens=1,
            num_logprobs=NUM_LOGPROBS,
            is_aside=True,
        )

    def probability_of_yes(self, question: GenerationTask) -> float:
        """The probability of all tokens that spell "Yes"; 0 if none is among the most probable."""
        return word_probability(question, self._word)


class _Verification:
    """One verification and the question after it, as a branch."""

    def __init__(self, method: GenRMController) -> None:
        self._method = method

    def process(self, tasks: Sequence[GenerationTask], **_: Any) -> Process:
        """Generate the verification, if there is one, and return the probability of "Yes"."""
        part, tag = tasks[0], self._method.WorkerTag.VERIFICATION
        if self._method.num_verifications:
            part.worker_tag = tag
            yield [part]
        question = self._method.ask(part)
        question.worker_tag = tag
        yield [question]
        return self._method.probability_of_yes(question)
