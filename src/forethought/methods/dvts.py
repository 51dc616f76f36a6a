"""Diverse verifier tree search: independent greedy searches, so that not all beams become alike.

N samples of width M are N/M subtrees. Each begins with M first steps of its own, keeps the best of
them, continues it M times, keeps the best, and so on until that one is finished. No subtree waits
for another one. All answers that were finished on the way are candidates.

Paper: Beeching, Tunstall and Rush, "Scaling test-time compute with open models", 2024. Hugging Face
blog; the defaults of ``width``, ``max_steps`` and ``aggregation`` are those of its code,
search-and-learn. There ``lookahead`` is a part of the algorithm too, 0 by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forethought.methods.parts.search import (
    MAX_STEPS,
    STEP_TOKEN,
    Search,
    SearchController,
    beam_stages,
    best_of,
    expect_multiple,
    merged,
)
from forethought.rewards.prm_controller import StepAggregation
from forethought.scaffolding.controller import Controller
from forethought.scaffolding.parallel import ParallelProcess, Process
from forethought.scaffolding.settings import POSITIVE_INT, OnFailure, validated


class DVTSController(SearchController):
    """Searches greedily in several independent subtrees, and returns the best of their answers.

    Args:
        generation_controller: generates the steps; it is given the tasks of all beams of a subtree
            at once.
        reward_controller: scores beams, best as a process reward model; None: the mean
            log-probability of their tokens.
        default_sample_num: beams of all subtrees together, a multiple of ``width``.
        width: next steps among which a subtree chooses.
        lookahead: greedy steps beyond a beam that its score is taken from.
        step_token: text that ends a step.
        max_steps: steps of an answer; the last one goes on to its end.
        aggregation: what makes one score of those of the steps: ``"last"``, ``"min"``,
            ``"product"`` or ``"mean"``.
        on_failure: ``"drop"`` goes on without what failed: a beam, or a subtree with all its beams.

    Raises:
        ParameterError: a setting of the wrong kind.
    """

    name = "dvts"

    def __init__(
        self,
        generation_controller: Controller,
        reward_controller: Controller | None = None,
        default_sample_num: int = 16,
        width: int = 4,
        *,
        lookahead: int = 0,
        step_token: str = STEP_TOKEN,
        max_steps: int = MAX_STEPS,
        aggregation: StepAggregation = "last",
        on_failure: OnFailure = "raise",
    ) -> None:
        super().__init__(
            generation_controller,
            reward_controller,
            default_sample_num=default_sample_num,
            lookahead=lookahead,
            step_token=step_token,
            max_steps=max_steps,
            aggregation=aggregation,
            on_failure=on_failure,
        )
        self.width = validated("width", width, POSITIVE_INT)

    def check_count(self, count: int) -> None:
        """See ``SearchController``."""
        expect_multiple(count, self.width, self.name)

    def search(self, search: Search, count: int) -> Process:
        """See ``SearchController``."""
        starts = range(0, count, self.width)
        subtrees = [_Subtree(search, range(start, start + self.width)) for start in starts]
        process = ParallelProcess(
            subtrees, [[] for _ in subtrees], on_failure=search.settings.on_failure
        )
        yield process
        if not search.answers:
            raise next(branch.error for branch in process.branches if branch.error is not None)


class _Subtree:
    """One greedy search.

    Args:
        search: that it is a part of.
        numbers: of its first steps.
    """

    def __init__(self, search: Search, numbers: range) -> None:
        self._search, self._numbers = search, numbers

    def process(self, tasks: Sequence[Any], **kwargs: Any) -> Process:
        """Continue the best beam until it is finished."""
        search, beam, numbers = self._search, self._search.root, self._numbers
        while not beam.finished:
            grown = yield from search.step([(beam, number) for number in numbers])
            beams = merged(grown)
            yield from search.score(beams)
            (beam,), numbers = best_of(beams, 1), range(len(self._numbers))
            others = [other for other in beams if other is not beam]
            yield from beam_stages("pruned", "it is not the best of its subtree", others)
