"""Goodput control: drafts as long as pays, request by request.

Goodput control after SmartSpec (Liu et al., "Optimizing Speculative Decoding for Serving Large
Language Models Using Goodput", 2024). Every step chooses the lengths k_i >= 0 that maximise

    sum_i (1 + expected accepted of k_i)  /  (forward + drafting seconds)

with acceptance estimated per request and level (``AcceptanceEstimate``) and both times fitted while
decoding (``latency.py``). ``LossBudget`` bounds what is lost against plain decoding, however wrong
the estimates are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from forethought.speculative.length.base import LengthRequest, StepRecord
from forethought.speculative.length.gate import Backoff
from forethought.speculative.length.latency import Array, ForwardLatency, LinearLatency

log = logging.getLogger(__name__)

ALLOWANCE, CREDIT, MAX_SAVINGS = 0.01, 4.0, 16.0
"""Plain steps granted per step; what may be lost before anything is gained, and up to which
allowances add up; the most that is saved up, gains included."""
PRIOR = 0.7
"""Acceptance of a token that nothing is known about: optimistic, so that it is tried."""
PRIOR_TOKENS, REQUEST_PRIOR_TOKENS = 4.0, 8.0
"""Tokens that the prior of the profile counts for, and the profile as the prior of a request."""
KEPT_PER_DRAFT, KEPT_PER_STEP = 0.99, 0.98
"""Weight that the profile's past keeps per draft, and a request's past per step."""
MAX_REQUESTS = 1024
"""Requests whose own acceptance is remembered."""
STAY, SWITCH = 1.005, 1.03
"""Predicted speed over plain decoding at which drafting goes on, and at which it begins."""
PROBE_DEPTH, PROBE_SHARE = 2, 1 / 8
"""Levels of a short probe, and the share of the budget that a probe may be expected to cost."""
PROBE_PAUSES, CHECK_PAUSES = (4, 64), (8, 128)
"""Fewest and most steps between probes, and between plain steps while drafting."""
SURPRISE = 0.15
"""Relative error of a plain step's predicted time after which the next one comes soon."""
HOLD_DRAFTING, HOLD_PLAIN = 4, 16
"""Steps for which a choice is kept if nothing changes."""
IDLE_INTERVAL = 8
"""Of this many plain steps while not drafting, one is observed: that takes time too."""
MAX_DEPTHS_TRIED = 4
"""Greatest depths that are searched in a step."""
STRETCH = 2
"""How many times the largest forward so far the next one may be: costs beyond are extrapolated."""


class LossBudget:
    """Bounds the loss against plain decoding, in plain steps: the time of a step without drafts.

    Over any stretch of steps the loss is at most ``ALLOWANCE`` of the steps, plus ``MAX_SAVINGS``,
    plus what the step that overdrew it lost.
    """

    def __init__(self) -> None:
        self.balance = CREDIT
        self.open = True
        """Whether drafting is allowed: not after an overdraft, until half the credit is back."""

    def book(self, gained: float) -> None:
        """Account for a step that gained so many plain steps, negative if it lost."""
        granted = max(min(ALLOWANCE, CREDIT - self.balance), 0.0)
        self.balance = min(max(self.balance + granted + gained, -CREDIT), MAX_SAVINGS)
        self.open = self.balance > 0.0 and (self.open or self.balance >= CREDIT / 2)


class AcceptanceEstimate:
    """Acceptance by level, for the requests of one drafter.

    All drafts together give a profile over levels; a request moves the odds of that profile up or
    down by its own acceptance. The less it has shown lately, the closer it stays to the profile.

    Args:
        num_levels: greatest depth of a draft.

    Attributes:
        profile: [levels]: acceptance of a token whose ancestors were all accepted.
        reach: [levels]: probability that a draft is as deep as this if it was requested to be.
    """

    def __init__(self, num_levels: int) -> None:
        self._levels = np.arange(num_levels)
        self._tested, self._accepted = np.zeros(num_levels), np.zeros(num_levels)
        self._requested, self._drafted = np.zeros(num_levels), np.zeros(num_levels)
        self._shown: dict[int, tuple[int, Array]] = {}
        """By request, least recent first: the step, and what it had shown then: accepted and
        rejected tokens, and how many of each the profile expected."""
        self._step = 0
        self._mean = PRIOR
        self.profile: Array = np.full(num_levels, PRIOR)
        self.reach: Array = np.ones(num_levels)

    @property
    def optimism(self) -> float:
        """How many times its estimate the acceptance may be: two standard errors more."""
        tested = self._tested.sum() + PRIOR_TOKENS
        return 1.0 + 2.0 * float(np.sqrt((1.0 - self._mean) / (self._mean * tested)))

    def survival(self, request_ids: Sequence[int]) -> Array:
        """[requests, levels]: the probability that a level of a draft that has it is accepted."""
        accepted, rejected, would_accept, would_reject = np.array(
            [self._shown_by(request_id) for request_id in request_ids]
        ).T
        yes = REQUEST_PRIOR_TOKENS * self._mean
        no = REQUEST_PRIOR_TOKENS - yes
        odds = (accepted + yes) * (would_reject + no) / ((rejected + no) * (would_accept + yes))
        moved = odds[:, None] * self.profile
        survival: Array = (moved / (moved + (1.0 - self.profile))).cumprod(axis=1)
        return survival

    def observe(
        self,
        requested: Mapping[int, int],
        drafts: Sequence[tuple[int, int, int]],
        num_steps: int = 1,
    ) -> None:
        """Count the drafts of a step.

        Args:
            requested: request -> requested depth.
            drafts: ``(request_id, depth, accepted)`` of those that were made.
            num_steps: steps since the last observation, this one included.
        """
        self._step += num_steps
        if requested:
            made = [min(depth, requested.get(number, 0)) for number, depth, _ in drafts]
            kept = KEPT_PER_DRAFT ** len(requested)
            self._requested = kept * self._requested + self._reaching(list(requested.values()))
            self._drafted = kept * self._drafted + self._reaching(made)
            self.reach = np.minimum.accumulate((self._drafted + 1.0) / (self._requested + 1.0))
        if drafts:
            self._count_tokens(drafts)

    def _count_tokens(self, drafts: Sequence[tuple[int, int, int]]) -> None:
        numbers, depths, accepted = np.array(drafts, np.int64).T
        tested = np.minimum(accepted + 1, depths)
        expected = self.profile.cumsum()[tested - 1]
        counts = np.stack([accepted, tested - accepted, expected, tested - expected], axis=1)
        for number, count in zip(numbers.tolist(), counts, strict=True):
            shown = self._shown_by(number) + count
            self._shown.pop(number, None)
            self._shown[number] = self._step, shown
        while len(self._shown) > MAX_REQUESTS:
            del self._shown[next(iter(self._shown))]
        kept = KEPT_PER_DRAFT ** len(drafts)
        self._tested = kept * self._tested + self._reaching(tested)
        self._accepted = kept * self._accepted + self._reaching(accepted)
        self._mean = float(
            (self._accepted.sum() + PRIOR_TOKENS * PRIOR) / (self._tested.sum() + PRIOR_TOKENS)
        )
        self.profile = (self._accepted + PRIOR_TOKENS * self._mean) / (self._tested + PRIOR_TOKENS)

    def _shown_by(self, request_id: int) -> Array:
        step, shown = self._shown.get(request_id, (self._step, _NOTHING_SHOWN))
        return shown * KEPT_PER_STEP ** (self._step - step)

    def _reaching(self, depths: Sequence[int] | NDArray[np.int64]) -> Array:
        """[levels]: how many of ``depths`` have each level."""
        reaching: Array = (self._levels[:, None] < np.asarray(depths)).sum(axis=1).astype(float)
        return reaching


_NOTHING_SHOWN = np.zeros(4)


class Goodput:
    """Chooses every request's length so that the step as a whole has the best goodput.

    One more level on request i adds its survival to the numerator and its tokens to the
    denominator. Survival falls from level to level, so the best set of levels of any size is that
    of the largest survival, and takes each request's levels in order: sort all levels of all
    requests, and the best of the n + 1 prefixes is the best choice. A drafter works level by level,
    which costs once for all requests, so the search is made for each greatest depth.

    While drafting it makes a plain step now and then, to compare with; while not drafting, a probe.
    Both become rare while nothing new is learned. Forwards grow in steps of ``STRETCH``, and the
    ``LossBudget`` bounds what all of it may lose.

    Args:
        max_draft_len: greatest depth of a draft.
        nodes: tokens of a draft of that depth; the depth itself unless drafts branch.
    """

    def __init__(self, max_draft_len: int, nodes: Callable[[int], int] | None = None) -> None:
        sizes = [nodes(depth) if nodes else depth for depth in range(1, max_draft_len + 1)]
        self._sizes = np.array([0, *sizes], np.float64)  # [1 + levels]: tokens up to a depth
        self._depths = np.arange(1, max_draft_len + 1)  # [levels]
        self.acceptance = AcceptanceEstimate(max_draft_len)
        self.forward = ForwardLatency()
        self.drafting = LinearLatency((0.2, 0.4, 0.4))
        self.budget = LossBudget()
        self.reason = "nothing has been measured yet"
        """Why the last lengths were chosen."""
        self._is_drafting = False
        self._probes, self._checks = Backoff(*PROBE_PAUSES), Backoff(*CHECK_PAUSES)
        self._num_probes = 0
        self._may_pay = True  # at the optimistic end of the estimates
        self._num_idle = 0  # plain steps in a row while not drafting
        self._state: tuple[int, list[int], list[int]] = (0, [], [])
        self._held: tuple[list[int], str] = [], ""  # the last choice and its reason
        self._hold_steps = 0  # for which it may be kept
        self._gained = 0.0  # plain steps, by the last step
        self._best_depth = max_draft_len
        self._max_tokens = 1  # of any forward so far
        self._context = 1.0  # tokens per row
        self._requested: dict[int, int] = {}

    # ---- before the step --------------------------------------------------------------------

    def lengths(self, requests: Sequence[LengthRequest], batch_size: int) -> list[int]:
        """The lengths with the best goodput, or those of a probe or a plain step."""
        ids = [request.request_id for request in requests]
        caps = [request.max_draft_len for request in requests]
        depths, self.reason = self._choose(ids, caps, batch_size)
        self._requested = {each: depth for each, depth in zip(ids, depths, strict=True) if depth}
        return list(depths)

    def _choose(self, ids: list[int], caps: list[int], batch_size: int) -> tuple[list[int], str]:
        plain = [0] * len(ids)
        if not ids or not self.forward.ready:
            return plain, "plain: the time of a step is being measured"
        if not self.budget.open:
            return plain, f"plain: losses are being made up for, {self.budget.balance:.2f} steps"
        if self._is_drafting and self._checks.due:
            return plain, "plain: to compare with"
        if self._can_hold((batch_size, ids, caps)) and not self._probes.due:
            return self._held
        survival, limits = self.acceptance.survival(ids), np.array(caps)
        depths, ratio = self._search(survival, limits, batch_size)
        self._is_drafting = ratio >= (STAY if self._is_drafting else SWITCH)
        if self._is_drafting:
            self._hold_steps = HOLD_DRAFTING
            self._held = depths, f"{ratio:.2f} times the goodput of plain decoding"
            return self._held
        self._hold_steps = HOLD_PLAIN
        self._held = plain, f"plain: drafting would have {ratio:.2f} times its goodput"
        if self._probes.due and (probe := self._probe(depths, survival, limits, batch_size)):
            optimistic = np.minimum(survival * self.acceptance.optimism**self._depths, 1.0)
            self._may_pay = self._search(optimistic, limits, batch_size)[1] >= SWITCH
            return probe, f"a probe of {sum(probe)} tokens"
        return self._held

    def _can_hold(self, state: tuple[int, list[int], list[int]]) -> bool:
        """Whether the last choice may be kept, to save time: nothing changed, nothing lost."""
        is_same, self._state = state == self._state, state
        self._hold_steps -= 1
        return is_same and self._hold_steps > 0 and self._gained >= 0.0

    def _search(
        self, survival: Array, caps: NDArray[np.int64], batch_size: int
    ) -> tuple[list[int], float]:
        """The best lengths, and their goodput over that of plain decoding."""
        num_requests, num_levels = survival.shape
        level_tokens = np.diff(self._sizes)
        # If later levels of a tree have fewer tokens, an earlier one must still come first.
        worth = np.minimum.accumulate(survival / level_tokens, axis=1)
        worth[self._depths > caps[:, None]] = -1.0
        num_cells = int(np.minimum(caps, num_levels).sum())
        if not num_cells:
            return [0] * num_requests, 0.0
        order = worth.argsort(axis=None)[: -num_cells - 1 : -1]  # [n]: cells, the worthiest first
        level = order % num_levels
        greatest = self._depths_tried()[:, None]
        within = (level < greatest).astype(np.float64)  # [tries, n]: not too deep
        reach = self.acceptance.reach
        nodes = (within * (level_tokens * reach)[level]).cumsum(axis=1)
        tokens = (within * (survival * reach).ravel()[order]).cumsum(axis=1) + batch_size
        context = self._context * batch_size
        forward = self.forward.predict(batch_size + nodes, context)
        fixed, per_level, per_token = self.drafting.coefficients
        drafting = fixed + per_level * greatest + per_token * within.cumsum(axis=1)
        goodput = tokens / (forward + drafting)
        goodput[nodes > STRETCH * self._max_tokens + 1 - batch_size] = 0.0
        best, last = divmod(int(goodput.argmax()), num_cells)
        self._best_depth = int(greatest[best, 0])
        taken = order[: last + 1][level[: last + 1] < self._best_depth] // num_levels
        plain = batch_size / float(self.forward.predict(batch_size, context))
        return np.bincount(taken, minlength=num_requests).tolist(), goodput[best, last] / plain

    def _depths_tried(self) -> NDArray[np.int64]:
        """[tries], rising: greatest depths to search; the best one moves by a level at a time."""
        if len(self._depths) <= MAX_DEPTHS_TRIED:
            return self._depths
        near = np.array([self._best_depth - 1, self._best_depth, self._best_depth + 1])
        return np.unique([*near.clip(1, len(self._depths)), len(self._depths)])

    def _probe(
        self, best: list[int], survival: Array, caps: NDArray[np.int64], batch_size: int
    ) -> list[int]:
        """What to try although it looks slower than plain decoding; zeros if all is too dear.

        In turn the best lengths, which drafting would begin with, and short drafts for as many
        requests as possible, which tell more about acceptance.
        """
        self._num_probes += 1
        if self._num_probes % 2 and self._is_affordable(np.array(best), survival, batch_size):
            return best
        num_rows = len(caps)
        while num_rows:
            rows = (self._num_probes + np.arange(num_rows)) % len(caps)
            depths = np.zeros_like(caps)
            depths[rows] = caps[rows].clip(max=min(PROBE_DEPTH, len(self._depths)))
            if self._is_affordable(depths, survival, batch_size):
                return depths.tolist()
            num_rows //= 2
        # However dear it looks: a prediction that is never tested cannot be found wrong.
        row = self._num_probes % len(caps) if self.budget.balance >= CREDIT else -1
        return [min(1, int(cap)) if n == row else 0 for n, cap in enumerate(caps)]

    def _is_affordable(self, depths: NDArray[np.int64], survival: Array, batch_size: int) -> bool:
        """Whether the expected loss of these lengths is a small share of the budget."""
        context, nodes = self._context * batch_size, float(self._sizes[depths].sum())
        if not nodes or nodes > max(self._max_tokens, self._sizes.max()):
            return False
        seconds = float(self.forward.predict(batch_size + nodes, context))
        seconds += self.drafting.predict((1.0, depths.max(), depths.sum()))
        gain = float(survival[self._depths <= depths[:, None]].sum()) / batch_size
        loss = seconds / float(self.forward.predict(batch_size, context)) - 1.0 - gain
        share = PROBE_SHARE if np.count_nonzero(depths) > 1 else 4 * PROBE_SHARE
        return loss <= share * min(self.budget.balance, CREDIT)

    # ---- after the step ---------------------------------------------------------------------

    def observe(self, record: StepRecord) -> None:
        """Learn what the step took and gave, and account for it."""
        requested, self._requested = self._requested, {}
        is_idle = not (requested or self._is_drafting) and self.forward.linear.settled
        self._num_idle = self._num_idle + 1 if is_idle else 0
        self._gained = 0.0
        if self._num_idle % IDLE_INTERVAL == 0:
            self._observe(record, requested, IDLE_INTERVAL if is_idle else 1)
        elif not requested:
            self._probes.wait()
        self.budget.book(self._gained)

    def _observe(self, record: StepRecord, requested: dict[int, int], num_steps: int) -> None:
        tokens, context = record.tokens, record.context
        self._context = context / max(record.batch_size, 1)
        num_drafted = sum(self._sizes[depth] for _, depth, _ in record.requests)
        plain = float(self.forward.predict(tokens - num_drafted, context))
        seconds = self.forward.observe(tokens, context, record.forward_seconds, num_steps)
        self._max_tokens = max(self._max_tokens, tokens)
        self.acceptance.observe(requested, record.requests, num_steps)
        if requested:
            terms = 1.0, max(requested.values()), sum(requested.values())
            drafting = self.drafting.observe(terms, record.draft_seconds)
            if self.drafting.num_observations > 1:  # the first one includes set-up
                seconds += drafting
            accepted = sum(accepted for _, _, accepted in record.requests)
            if plain > 0.0:
                self._gained = 1.0 + accepted / record.batch_size - seconds / plain
            self._probes.tried(news=self._is_drafting or self._may_pay)
            self._checks.wait()
        elif self._is_drafting:
            self._checks.tried(news=abs(record.forward_seconds - plain) > SURPRISE * plain)
        else:
            self._probes.wait()
