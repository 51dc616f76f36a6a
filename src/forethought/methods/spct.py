"""Generalist rewards: a model writes principles, criticises all answers by them and scores each.

::

    question, answers 0 1 2                                      meta reward   kept
      critique 0   principles ... analysis ... Scores: [7, 4, 9]     0.8        yes
      critique 1   principles ... analysis ... Scores: [9, 9, 2]     0.1        no
      critique 2   principles ... analysis ... Scores: [6, 5, 8]     0.7        yes
                                               sums    13  9 17      the third answer wins

The principles are written anew each time, so critiques differ and their sum is finer than one
score. Each critique lists the answers in another order. A meta reward model, if there is one,
scores the critiques themselves, and only the best of them vote.

The paper trains the model (self-principled critique tuning, SPCT: DeepSeek-GRM); any chat model can
be asked. Scores from 1 to 10, their sum as the vote and the filter are the paper's; the text of the
prompt and the defaults are ours.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any

from forethought.config.sampling import SamplingParams
from forethought.errors import BudgetExceeded, ParameterError
from forethought.rewards.judge import (
    checked_prompt,
    filled,
    judging,
    numbered_answers,
    question_of,
)
from forethought.scaffolding import sampling
from forethought.scaffolding.base_task import RewardTask
from forethought.scaffolding.controller import Controller, refuse_arguments
from forethought.scaffolding.parallel import AsCompleted, Process
from forethought.scaffolding.result import Stage
from forethought.scaffolding.reward_controller import NativeRewardController, has_failed, scores_of
from forethought.scaffolding.settings import PositiveInt, Text, setting, with_settings
from forethought.scaffolding.task import ChatTask, GenerationTask

CRITIQUE_PROMPT = """\
Here are {count} answers to a question. First write the principles by which answers to this question
should be judged, with a weight for each. Then analyse each answer by these principles. Then give
each answer a whole score from 1 (worst) to 10 (best).

Question:
{question}

{answers}

End with one line of the form "Scores: [a, b, ...]", with {count} scores in the order above."""

CRITIQUE_PARAMS: Mapping[str, Any] = {"temperature": 1.0, "max_tokens": 2048}
HIGHEST = 10
_SCORES = re.compile(r"scores\W*?\[([^\]]*)\]", re.IGNORECASE)


@with_settings
class SPCTRewardController(NativeRewardController):
    """Scores answers by the sum over several sampled critiques, the best of which vote.

    A reward controller, for ``best_of_n`` and others. ``scores`` holds one per task, from 0 to 1:
    the sum of its votes by the highest that they could come to; 0 for all if no critique can be
    read, and None for a task that failed. ``critiques`` holds the texts of the critiques, ``votes``
    the scores in each (None: it cannot be read), and ``voters`` the numbers of those that voted.

    Raises:
        ParameterError: a setting of the wrong kind, a prompt without ``{answers}``, or
            ``num_voters`` without a meta reward.
    """

    paper = (
        'Liu et al., "Inference-Time Scaling for Generalist Reward Modeling", 2025. arXiv '
        "2504.02495"
    )

    num_critiques: PositiveInt = setting(8, "K, sampled side by side.")
    meta_reward_controller: Controller | None = setting(
        None,
        "Scores critiques, as answers to the prompt that they were given; None: all of them vote.",
    )
    _: KW_ONLY
    num_voters: PositiveInt | None = setting(
        None,
        "Critiques that vote, those that `meta_reward_controller` scores highest; None: half of "
        "them.",
    )
    shuffled: bool = setting(True, "Whether the answers stand in another order in each critique.")
    prompt: Text = setting(
        CRITIQUE_PROMPT,
        'What is asked; `{question}`, `{count}` and `{answers}` are replaced. The last "Scores: '
        '[...]" of a critique counts.',
    )
    sampling_params: Mapping[str, Any] | SamplingParams | None = setting(
        None,
        "Of the critiques; by default at temperature 1, with at most 2048 tokens. A `seed` "
        "decides the order of the answers too.",
    )

    def __post_init__(self) -> None:
        if self.num_voters is not None and self.meta_reward_controller is None:
            raise ParameterError(
                "num_voters needs a meta_reward_controller",
                "without one there is no order among the critiques, and all of them vote",
                "Give one, or leave num_voters out",
            )
        checked_prompt(self.prompt, "{answers}")
        params = sampling.checked(type(self).__name__, self.sampling_params)
        self.sampling_params = {**CRITIQUE_PARAMS, **params}
        self.critiques: list[str] = []
        self.votes: list[list[int] | None] = []
        self.voters: list[int] = []

    def fan_out(self) -> int:
        """The critiques."""
        return self.num_critiques

    def process(self, tasks: Sequence[GenerationTask | RewardTask], **kwargs: Any) -> Process:
        """Score all tasks, which answer the same question; critiques that have ended vote."""
        refuse_arguments(self, kwargs)
        alive = [number for number, task in enumerate(tasks) if not has_failed(task)]
        self.scores = [None] * len(tasks)
        if not alive:
            return
        answers = [tasks[number] for number in alive]
        orders = self._orders(len(answers), getattr(answers[0], "seed", None))
        chats = [self._chat([answers[n] for n in order], k) for k, order in enumerate(orders)]
        ended = yield from _run(chats)
        self.critiques = [(chat.output_str or "") if chat in ended else "" for chat in chats]
        self.votes = [
            votes_in(critique, order)
            for critique, order in zip(self.critiques, orders, strict=True)
        ]
        self.voters = [k for k, votes in enumerate(self.votes) if votes is not None]
        if self.meta_reward_controller is not None and self.voters:
            yield from self._filter(self.meta_reward_controller.clone(), chats)
        yield from self._tell()
        valid_votes = [votes for k in self.voters if (votes := self.votes[k]) is not None]
        for place, number in enumerate(alive):
            total = sum(votes[place] for votes in valid_votes)
            self.scores[number] = total / (HIGHEST * max(1, len(valid_votes)))

    def _tell(self) -> Process:
        """Yield a stage with the votes of each critique, or why it has none."""
        for number, votes in enumerate(self.votes):
            fields = {"critique": number, "scores": votes}
            if number in self.voters:
                yield Stage("scored", fields=fields)
            elif votes is None:
                yield Stage("pruned", "the critique cannot be read", fields=fields)
            else:
                yield Stage("pruned", "other critiques are scored higher", fields=fields)

    def _orders(self, count: int, seed: int | None) -> list[list[int]]:
        """The order of the answers in each critique, which the request's seed decides."""
        params: Any = self.sampling_params
        source = random.Random(params.get("seed") or seed or 0)
        orders = [list(range(count)) for _ in range(self.num_critiques)]
        for order in orders if self.shuffled else []:
            source.shuffle(order)
        return orders

    def _chat(self, answers: Sequence[GenerationTask | RewardTask], number: int) -> ChatTask:
        texts = numbered_answers(answers)
        values = {"{question}": question_of(answers[0]), "{count}": str(len(answers))}
        chat = judging(self, answers[0], filled(self.prompt, {**values, "{answers}": texts}))
        sampling.vary(chat, number)
        return chat

    def _filter(self, reward: Any, chats: Sequence[ChatTask]) -> Process:
        try:
            yield from reward.process([chats[number] for number in self.voters])
        except BudgetExceeded:
            return  # all of them vote
        scores = zip(self.voters, scores_of(reward, len(self.voters)), strict=True)
        scored = {number: score for number, score in scores if score is not None}
        ranked = sorted(scored, key=lambda number: -scored[number])
        num_voters = self.num_voters or max(1, self.num_critiques // 2)
        self.voters = sorted(ranked[:num_voters])


def votes_in(critique: str, order: Sequence[int]) -> list[int] | None:
    """The scores in a critique, by the answers' own numbers; None if they cannot be read.

    Args:
        critique: its text.
        order: the numbers of the answers in the order of the critique.
    """
    matches = _SCORES.findall(critique)
    values = re.findall(r"-?\d+(?:\.\d+)?", matches[-1]) if matches else []
    whole = [int(value) for value in values if value.isdecimal() and 1 <= int(value) <= HIGHEST]
    if len(whole) != len(values) or len(whole) != len(order):
        return None
    by_number = dict(zip(order, whole, strict=True))
    return [by_number[number] for number in range(len(order))]


def _run(chats: Sequence[ChatTask]) -> Process:
    """Run chats; returns those that have ended, if the budget ends before all have."""
    ended: list[ChatTask] = []
    with AsCompleted(chats) as running:
        while running:
            try:
                ended.append((yield running))
            except BudgetExceeded:
                if not ended:
                    raise
                break
    return ended
