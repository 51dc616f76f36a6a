"""How far drafts get: the chance of each level, estimated per request.

A drafter has a profile over levels, from all of its drafts; a request moves the odds of that
profile up or down by what it has shown itself. The less it has shown lately, the closer it stays to
the profile. Knows nothing about time or what to do with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

PRIOR = 0.7
"""Chance of a token that nothing is known about: hopeful, so that it is tried."""
WEIGHT, REQUEST_WEIGHT = 4.0, 8.0
"""Tokens that the prior of the profile counts for, and the profile as the prior of a request."""
DRAFT_KEEPS = 0.99
"""Weight that the profile's past keeps per draft: it remembers about a hundred."""
STEP_KEEPS = 0.98
"""Weight that a request's past keeps per step: it remembers about fifty."""


class Acceptance:
    """Estimates for the drafts of one drafter.

    Args:
        levels: most depth of a draft.
    """

    def __init__(self, levels: int) -> None:
        self._levels = np.arange(levels)
        self._tested, self._passed = np.zeros(levels), np.zeros(levels)
        self._asked, self._drafted = np.zeros(levels), np.zeros(levels)
        self._slots: dict[int, int] = {}
        self._found: tuple[list[int], NDArray[np.int64]] = ([], np.zeros(0, np.int64))
        self._shown = np.zeros((4, 64))
        """Per request: tokens passed and failed, and how many the profile let expect of each."""
        self._pooled = PRIOR
        self._profile: Array = np.full(levels, PRIOR)
        self._reach: Array = np.ones(levels)

    @property
    def profile(self) -> Array:
        """[levels]: the chance of a token whose ancestors were all accepted."""
        return self._profile

    @property
    def reach(self) -> Array:
        """[levels]: the chance that a draft goes as deep as this if it is asked to."""
        return self._reach

    @property
    def doubt(self) -> float:
        """How many times its estimate a token's chance may well be: two standard errors more."""
        tested = self._tested.sum() + WEIGHT
        return 1.0 + 2.0 * float(np.sqrt((1.0 - self._pooled) / (self._pooled * tested)))

    def survival(self, request_ids: Sequence[int]) -> Array:
        """[requests, levels]: the chance that a level is accepted, in a draft that reaches it."""
        slots = self._find(request_ids)
        passed, failed, passes, fails = self._shown.take(slots, axis=1)
        likely = REQUEST_WEIGHT * self._pooled
        unlikely = REQUEST_WEIGHT - likely
        odds = (passed + likely) * (fails + unlikely) / ((failed + unlikely) * (passes + likely))
        moved = odds[:, None] * self._profile
        return (moved / (moved + (1.0 - self._profile))).cumprod(axis=1)

    def observe(
        self, asked: Mapping[int, int], drafts: Sequence[tuple[int, int, int]], steps: int = 1
    ) -> None:
        """Count the drafts of a step.

        Args:
            asked: request -> depth that was asked for.
            drafts: ``(request_id, depth, accepted)`` of those that came.
            steps: how many have gone by, this one included.
        """
        self._shown *= STEP_KEEPS**steps
        if asked:
            self._count_reach(asked, drafts)
        if drafts:
            self._count_tokens(drafts)

    def _count_reach(
        self, asked: Mapping[int, int], drafts: Sequence[tuple[int, int, int]]
    ) -> None:
        keeps = DRAFT_KEEPS ** len(asked)
        depths = np.fromiter(asked.values(), np.int64, len(asked))
        came = np.array([min(depth, asked.get(number, 0)) for number, depth, _ in drafts], np.int64)
        self._asked = keeps * self._asked + self._reaching(depths)
        self._drafted = keeps * self._drafted + self._reaching(came)
        self._reach = np.minimum.accumulate((self._drafted + 1.0) / (self._asked + 1.0))

    def _count_tokens(self, drafts: Sequence[tuple[int, int, int]]) -> None:
        numbers, depths, accepted = np.array(drafts, np.int64).T
        slots = self._find(numbers.tolist())
        tested = np.minimum(accepted + 1, depths)
        expected = np.cumsum(self._profile)[tested - 1]
        counts = (accepted, tested - accepted, expected, tested - expected)
        self._shown[:, slots] += counts
        keeps = DRAFT_KEEPS ** len(drafts)
        self._tested = keeps * self._tested + self._reaching(tested)
        self._passed = keeps * self._passed + self._reaching(accepted)
        self._pooled = float((self._passed.sum() + WEIGHT * PRIOR) / (self._tested.sum() + WEIGHT))
        self._profile = (self._passed + WEIGHT * self._pooled) / (self._tested + WEIGHT)

    def _reaching(self, depths: NDArray[np.int64]) -> Array:
        """[levels]: how many of ``depths`` go as deep as each level."""
        return (self._levels[:, None] < depths).sum(axis=1).astype(np.float64)

    def _find(self, request_ids: Sequence[int]) -> NDArray[np.int64]:
        """The columns of ``_shown`` that hold these requests."""
        ids = list(request_ids)
        if ids != self._found[0]:  # mostly the same ones as in the step before
            if not self._slots.keys() >= set(ids):
                self._admit(ids)
            self._found = ids, np.array([self._slots[number] for number in ids], np.int64)
        return self._found[1]

    def _admit(self, request_ids: Sequence[int]) -> None:
        """Give a column to each request; when all are taken, only these keep theirs."""
        new = [number for number in request_ids if number not in self._slots]
        capacity = self._shown.shape[1]
        if len(self._slots) + len(new) > capacity:
            kept = [number for number in request_ids if number in self._slots]
            shown = np.zeros((4, max(capacity, 4 * len(request_ids))))
            shown[:, : len(kept)] = self._shown[:, [self._slots[number] for number in kept]]
            self._shown = shown
            self._slots.clear()
            self._slots.update((number, slot) for slot, number in enumerate(kept))
        for number in new:
            self._slots[number] = len(self._slots)
