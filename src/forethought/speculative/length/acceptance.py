"""How many tokens of drafts are expected to be accepted, by request and level.

A drafter has a profile over levels from all of its drafts; a request shifts the log-odds of that
profile by its own record, less the older that record is. Both are discounted by the steps that have
passed, as rewards are in bandits whose arms change (Garivier and Moulines, "On Upper-Confidence
Bound Policies for Switching Bandit Problems", 2011): what is not drafted for a while becomes
uncertain again, so the upper end of what acceptance may be rises until it is tried.
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
PROFILE_STEP_KEEPS = 0.998
"""Weight that it keeps per step, with drafts or without: it remembers about five hundred."""
STEP_KEEPS = 0.98
"""Weight that a request's past keeps per step: it remembers about fifty."""
GATHERED = 8
"""Drafts that are counted together, to save time, unless an estimate is asked for before."""


class AcceptanceEstimate:
    """Estimates for the drafts of one drafter.

    Args:
        levels: greatest depth of a draft.
    """

    def __init__(self, levels: int) -> None:
        self._levels = np.arange(levels)
        self._tested, self._passed = np.zeros(levels), np.zeros(levels)
        self._requested, self._drafted = np.zeros(levels), np.zeros(levels)
        self._slots: dict[int, int] = {}
        self._found: tuple[list[int], NDArray[np.int64]] = ([], np.zeros(0, np.int64))
        self._shown = np.zeros((4, 64))
        """Per request: tokens passed and failed, and how many the profile let expect of each."""
        self._pooled = PRIOR
        self._profile: Array = np.full(levels, PRIOR)
        self._reach: Array = np.ones(levels)
        # Observed and not counted yet; ``_drafts`` are those that came, as in ``observe``.
        self._steps = 0
        self._asked, self._came = list[int](), list[int]()  # depths, of each requested draft
        self._drafts: list[tuple[int, int, int]] = []

    @property
    def profile(self) -> Array:
        """[levels]: the chance of a token whose ancestors were all accepted."""
        self._count()
        return self._profile

    @property
    def reach(self) -> Array:
        """[levels]: the chance that a draft goes as deep as this if that is requested."""
        self._count()
        return self._reach

    @property
    def doubt(self) -> float:
        """How many times its estimate a token's chance may be: two standard errors more."""
        self._count()
        tested = self._tested.sum() + WEIGHT
        return 1.0 + 2.0 * float(np.sqrt((1.0 - self._pooled) / (self._pooled * tested)))

    def hopeful(self, survival: Array) -> Array:
        """[requests, levels]: ``survival`` with each token's chance at the upper end."""
        return np.minimum(survival * self.doubt ** (1.0 + self._levels), 1.0)

    def survival(self, request_ids: Sequence[int]) -> Array:
        """[requests, levels]: the chance that a level is accepted, in a draft that reaches it."""
        self._count()
        slots = self._find(request_ids)
        passed, failed, passes, fails = self._shown.take(slots, axis=1)
        likely = REQUEST_WEIGHT * self._pooled
        unlikely = REQUEST_WEIGHT - likely
        odds = (passed + likely) * (fails + unlikely) / ((failed + unlikely) * (passes + likely))
        moved = odds[:, None] * self._profile
        return (moved / (moved + (1.0 - self._profile))).cumprod(axis=1)

    def observe(
        self, requested: Mapping[int, int], drafts: Sequence[tuple[int, int, int]], steps: int = 1
    ) -> None:
        """Count the drafts of a step, or of all steps of a call.

        Args:
            requested: request -> depth that was requested, in each of the steps.
            drafts: see ``StepRecord.requests``.
            steps: how many steps these are.
        """
        self._steps += steps
        drafted = {number for number, _, _ in drafts}
        missing = [(number, 0, 0) for number in requested if number not in drafted]
        for number, depth, accepted in (*drafts, *missing):
            self._asked.append(requested.get(number, depth))
            self._came.append(min(depth, self._asked[-1]))
            if depth:
                self._drafts.append((number, depth, accepted))
        if len(self._asked) >= GATHERED:
            self._count()

    def age(self, num_steps: int) -> None:
        """Steps have passed in which nothing was drafted."""
        self._steps += num_steps

    def _count(self) -> None:
        self._age()
        if self._asked:
            keeps = DRAFT_KEEPS ** len(self._asked)
            num_requested, num_accepted = self._reaching([self._asked, self._came])
            self._requested = keeps * self._requested + num_requested
            self._drafted = keeps * self._drafted + num_accepted
            self._reach = np.minimum.accumulate((self._drafted + 1.0) / (self._requested + 1.0))
        if self._drafts:
            self._count_tokens()
        self._steps, self._asked, self._came, self._drafts = 0, [], [], []

    def _age(self) -> None:
        """Let both records age by the steps that have passed."""
        if self._steps:
            self._shown *= STEP_KEEPS**self._steps
            self._tested *= PROFILE_STEP_KEEPS**self._steps
            self._passed *= PROFILE_STEP_KEEPS**self._steps
            self._estimate_profile()

    def _estimate_profile(self) -> None:
        self._pooled = float((self._passed.sum() + WEIGHT * PRIOR) / (self._tested.sum() + WEIGHT))
        self._profile = (self._passed + WEIGHT * self._pooled) / (self._tested + WEIGHT)

    def _count_tokens(self) -> None:
        numbers, depths, accepted = np.array(self._drafts, np.int64).T
        slots = self._find(numbers.tolist())
        tested = np.minimum(accepted + 1, depths)
        expected = self._profile.cumsum()[tested - 1]
        counts = (accepted, tested - accepted, expected, tested - expected)
        np.add.at(self._shown.T, slots, np.array(counts).T)  # a request may be there twice
        keeps = DRAFT_KEEPS ** len(depths)
        num_tested, num_passed = self._reaching([tested, accepted])
        self._tested = keeps * self._tested + num_tested
        self._passed = keeps * self._passed + num_passed
        self._estimate_profile()

    def _reaching(self, depths: Sequence[Sequence[int] | NDArray[np.int64]]) -> Array:
        """[n, levels]: how many of each of n lists of depths go as deep as each level."""
        deep = self._levels[:, None] < np.array(depths, np.int64)[:, None]
        return deep.sum(axis=2).astype(np.float64)

    def _find(self, request_ids: Sequence[int]) -> NDArray[np.int64]:
        """The columns of ``_shown`` that hold these requests."""
        ids = list(request_ids)
        if ids != self._found[0]:  # mostly the same ones as in the step before
            if not self._slots.keys() >= set(ids):
                self._admit(ids)
            self._found = ids, np.array([self._slots[number] for number in ids], np.int64)
        return self._found[1]

    def _admit(self, request_ids: Sequence[int]) -> None:
        request_ids = list(dict.fromkeys(request_ids))
        new = [number for number in request_ids if number not in self._slots]
        capacity = self._shown.shape[1]
        if len(self._slots) + len(new) > capacity:
            admitted = [number for number in request_ids if number in self._slots]
            shown = np.zeros((4, max(capacity, 4 * len(request_ids))))
            shown[:, : len(admitted)] = self._shown[:, [self._slots[number] for number in admitted]]
            self._shown = shown
            self._slots.clear()
            self._slots.update((number, slot) for slot, number in enumerate(admitted))
        for number in new:
            self._slots[number] = len(self._slots)
