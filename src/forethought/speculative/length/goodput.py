"""Draft lengths that maximise goodput: expected tokens per predicted second, by request.

After SmartSpec (Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models
Using Goodput", 2024). Each step chooses the lengths k_i >= 0 that maximise

    sum_i (1 + expected accepted of k_i)  /  (forward + drafting seconds)

with acceptance estimated per request and level, and both times fitted online. A choice holds for
several steps, which the engine may make in one call, as it does plain ones; so the host's work per
call is a term of both times, and calls per step are counted, of steps with drafts and without.

* ``CallRate``: calls per step, as the engine made them.
* ``LossBudget``: the loss against plain decoding, in plain steps (the time that one step of the
  same rows takes without drafts, as one of several in a call where they are). Over any stretch of
  steps it is at most ``ALLOWANCE`` of the time, plus ``SAVINGS``, plus the loss of the call that
  overdrew it, however wrong the estimates were: it relies on nothing but the times of plain steps,
  under the same load as those of drafts (``Slowdown``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from forethought.speculative.length.acceptance import AcceptanceEstimate
from forethought.speculative.length.gate import Backoff
from forethought.speculative.length.latency import (
    ForwardLatency,
    LinearLatency,
    RecentMedian,
    Slowdown,
)
from forethought.speculative.length.loss_budget import ALLOWANCE, CREDIT, LossBudget
from forethought.speculative.length.policy import LengthRequest, SkippedSteps, StepRecord

PRIOR_STEPS = 0.25
"""Steps that what is assumed of calls per step counts for."""
CALLS_KEEP, CALLS_AGE = 0.97, 0.995
"""Weight that earlier calls keep per step: of the same kind, and of any other."""


class CallRate:
    """Calls of the engine per step, as they were of late."""

    def __init__(self) -> None:
        self._num_calls = self._num_steps = 0.0

    def per_step(self, assumed: float) -> float:
        """Above 0 and at most 1: ``assumed`` where nothing was seen, or only long ago."""
        return (self._num_calls + PRIOR_STEPS * assumed) / (self._num_steps + PRIOR_STEPS)

    def observe(self, num_calls: int, num_steps: int) -> None:
        """Record that ``num_calls`` calls made ``num_steps`` steps."""
        self.age(num_steps, CALLS_KEEP)
        self._num_calls += num_calls
        self._num_steps += num_steps

    def age(self, num_steps: int, keeps: float = CALLS_AGE) -> None:
        """Let the record age by steps of another kind."""
        self._num_calls *= keeps**num_steps
        self._num_steps *= keeps**num_steps


log = logging.getLogger(__name__)

Array = NDArray[np.float64]

STAY, SWITCH = 1.005, 1.03
"""How much better than plain drafting must look to go on with it, and to begin."""
PROBE_DEPTH = 2
"""Levels of the drafts of a probe."""
PROBE_SHARE, LAST_SHARE = 1 / 8, 1 / 2
"""Largest expected cost of a probe, and of one of a single request, as a share of the balance."""
FIRST_PAUSE, LAST_PAUSE = 8, 128
"""Steps between probes, at first and at most."""
FIRST_CHECK, LAST_CHECK = 8, 128
"""Steps between plain ones while it drafts, at first and at most."""
CHECKED, PLAIN_AGE = 7, 512
"""Steps that are skipped after such a step, as they may be one call, where that many have passed
since any were."""
SURPRISE, USUALS = 0.1, 3.0
"""How far off the time of such a step must be for the next one to come soon: relatively, and in
usual errors."""
FIRST_HOLD, LAST_HOLD = 8, 32
"""Steps for which a choice is kept if nothing changes; more where the same one comes again."""
HOST_SHARE = 0.03
"""What the host may do per step, relative to the rest of it, where a call could be longer."""
IDLE = 128
"""While it does not draft, it is called for at least one of this many steps, or of more where
being asked costs more than half of their allowance, to recover."""
DRAFTS = "{:.2f} times the goodput of plain decoding"
PLAIN = "plain: drafting would have {:.2f} times its goodput"
RECOVERING = "plain: recovering losses of {:.2f} steps"
MAX_TRIED = 4
"""Greatest depths that are searched in a step."""
FEW = 16
"""Levels of all requests that are searched one by one: numpy takes longer there."""
LEAST_TOKENS = 1e-6
"""Of a level, in the search: a tree of limited size may have levels that add none."""
STRETCH = 2
"""How many times the most tokens seen in a forward the next one may have: costs of larger ones
are estimates, so they are approached in steps."""


class Goodput:
    """Chooses the lengths that maximise the goodput of the step as a whole.

    A level more on request i adds its chance of being accepted to the numerator, and its tokens to
    the denominator. Chances fall from level to level, so the best set of levels of any size is that
    of the largest chances, and takes each request's levels in order: sort all levels of all
    requests, and the best of the n+1 prefixes is the best of all choices. A drafter works level by
    level, which costs once for all requests; so the search is made for each greatest depth.

    Four things keep it honest. While it drafts it makes a plain step now and then, and while it
    does not, a probe: each ever more seldom as long as nothing new is learned. Forwards grow in
    steps of ``STRETCH`` times what was seen. What was learned is discounted by the steps that have
    passed (``acceptance.py``, ``latency.py``), so it cannot be held against drafts for long; and
    seconds are compared under the same load: where drafts become slower, a plain step is made to
    see whether all does (``Slowdown``). And all that is lost against plain decoding is booked
    on a ``LossBudget``, which bounds it. So when plain decoding stays best, probing comes down to
    one step in ``LAST_PAUSE``, each expected to lose at most half a plain step, or two where even
    a draft for a single request is that dear; whatever the estimates, the account holds.

    Being asked and learning take time too. It is booked, and while it does not draft, steps of the
    same batch skip the policy. A probe that might show that drafting pays is made in two steps
    running: the first finds the code of drafting out of the processor's caches.

    Args:
        max_draft_len: greatest depth of a draft.
        nodes: tokens of a draft of that depth; the depth itself unless drafts branch.
        node_context: share of a row's context that a draft node after it costs once more: 1 where
            attention is computed token by token, 0 where the keys are read once for all of them.
    """

    def __init__(
        self,
        max_draft_len: int,
        nodes: Callable[[int], int] | None = None,
        node_context: float = 1.0,
    ) -> None:
        sizes = [nodes(depth) if nodes else depth for depth in range(1, max_draft_len + 1)]
        self._sizes = np.array([0, *sizes], np.float64)  # [levels + 1]: tokens up to a depth
        self._tokens = np.diff(self._sizes)  # [levels]: tokens of a level
        self._depths = np.arange(1, max_draft_len + 1)  # [levels]
        self.acceptance = AcceptanceEstimate(max_draft_len)
        self.forward = ForwardLatency()
        self.drafting = LinearLatency((0.1, 0.4, 0.4, 0.1))
        self.plain_calls, self.draft_calls = CallRate(), CallRate()
        self.account = LossBudget()
        self.slowdown = Slowdown()
        self._asking = RecentMedian()  # seconds of a call of the policy in plain steps
        self._probes = Backoff(FIRST_PAUSE, LAST_PAUSE)
        self._checks = Backoff(FIRST_CHECK, LAST_CHECK)
        self._drafting = False
        self._hopeful = True
        self._turn = 0
        self._num_skipped = 0  # steps since the last one that was observed
        self._held: list[int] = []
        self._held_steps = FIRST_HOLD  # for which it is kept
        self._left = 0  # of these
        self._state: tuple[int, list[int], list[int]] = (0, [], [])
        self._gained = 0.0  # plain steps, by the last step
        self._deepest = max_draft_len  # of the best lengths
        self._branches = bool((self._tokens != 1.0).any())
        self._widest = 1.0
        self._context = 1.0  # tokens of context per row
        self._batch_size = 1.0
        self._node_context = node_context
        self._requested: dict[int, int] = {}
        self._again: list[int] | None = None  # the probe that the next step repeats
        self._waits = False  # whether a probe is due that the account cannot bear
        self._is_trial = False  # whether the last lengths are a probe of several steps
        self._drafted_last = False  # whether the step before had drafts
        self._why: tuple[str, tuple[float, ...]] = ("nothing has been measured yet", ())
        self._held_why: tuple[str, tuple[float, ...]] = self._why
        self._checks_plain = False  # whether the last lengths are 0 to measure a plain step
        self._plain_age = PLAIN_AGE  # steps since any were skipped

    @property
    def reason(self) -> str:
        """Why the last lengths were chosen."""
        text, numbers = self._why
        return text.format(*numbers)

    # ---- before the step --------------------------------------------------------------------

    def lengths(self, requests: Sequence[LengthRequest], batch_size: int) -> list[int]:
        """The lengths with the best goodput, or those of a probe or a check."""
        ids = [request.request_id for request in requests]
        caps = [request.max_draft_len for request in requests]
        depths = self._choose(ids, caps, batch_size)
        self._requested = {
            number: depth for number, depth in zip(ids, depths, strict=True) if depth
        }
        return depths

    def _choose(self, ids: list[int], max_lengths: list[int], batch_size: int) -> list[int]:
        plain, again, self._again = [0] * len(ids), self._again, None
        self._waits = self._is_trial = False
        self._checks_plain = not self.forward.ready or (self._drafting and self._checks.due)
        if not ids or not self.forward.ready:
            self._why = ("plain: the time of a step is being measured", ())
            return plain
        if not self.account.open:
            self._why = (RECOVERING, (self.account.balance,))
            return plain
        if self._checks_plain:
            self._why = ("plain: to compare with", ())
            return plain
        if again is not None and len(again) == len(ids):
            return list(map(min, again, max_lengths))
        if self._holds(ids, max_lengths, batch_size) and not self._probes.due:
            self._why = self._held_why
            return list(self._held)
        caps, survival = np.array(max_lengths), self.acceptance.survival(ids)
        depths, ratio = self._search(survival, caps, batch_size)
        drafting = ratio >= (STAY if self._drafting else SWITCH)
        if drafting != self._drafting:
            log.debug("%d rows: drafting at %.2f times plain goodput", batch_size, ratio)
        self._drafting = drafting
        self._keep(depths if drafting else plain)
        self._why = self._held_why = (DRAFTS if drafting else PLAIN, (ratio,))
        if drafting:
            return depths
        if self._probes.due and (probe := self._probe(depths, survival, caps, batch_size)):
            self._why = ("a probe of {} tokens", (sum(probe),))
            return probe
        self._waits = self._probes.due
        return plain

    def _keep(self, depths: list[int]) -> None:
        """Keep a choice for some steps."""
        again = depths == self._held
        self._held_steps = min(2 * self._held_steps, LAST_HOLD) if again else FIRST_HOLD
        self._held, self._left = depths, self._held_steps

    def _holds(self, ids: list[int], max_lengths: list[int], batch_size: int) -> bool:
        """Whether the last choice is kept, which saves time: if all is as then and nothing lost."""
        state = batch_size, ids, max_lengths
        same, self._state = state == self._state, state
        return same and self._left > 0 and (not self._drafting or self._gained >= 0.0)

    def _search(
        self, survival: Array, caps: NDArray[np.int64], batch_size: int
    ) -> tuple[list[int], float]:
        """The best lengths, and how many times the goodput of plain decoding they have."""
        worth = survival
        if self._branches:
            # Of a tree whose later levels are cheaper, an earlier one never comes after a later.
            worth = np.minimum.accumulate(worth / np.maximum(self._tokens, LEAST_TOKENS), axis=1)
        search = self._search_few if survival.size <= FEW else self._search_many
        return search(survival, worth, caps, batch_size)

    def _search_few(
        self, survival: Array, worth: Array, caps: NDArray[np.int64], batch_size: int
    ) -> tuple[list[int], float]:
        """The search as it is described above. For a few levels it takes a fifth of the time."""
        values, chances = worth.tolist(), survival.tolist()
        reach, sizes = self.acceptance.reach.tolist(), self._tokens.tolist()
        cells = [
            (row, level)
            for row, cap in enumerate(caps.tolist())
            for level in range(min(cap, len(reach)))
        ]
        cells.sort(key=lambda cell: values[cell[0]][cell[1]], reverse=True)
        largest = STRETCH * self._widest + 1 - batch_size
        plain, calls = batch_size / self._plain_seconds(batch_size), self._calls_with_drafts
        best, chosen = 0.0, list[tuple[int, int]]()
        for deepest in self._deepest_tried().tolist():
            within = [cell for cell in cells if cell[1] < deepest]
            tokens, nodes = float(batch_size), 0.0
            for count, (row, level) in enumerate(within, start=1):
                tokens += chances[row][level] * reach[level]
                nodes += sizes[level] * reach[level]
                if nodes > largest:
                    break
                seconds = self._seconds(batch_size, int(nodes + 0.5), calls)
                seconds += self.drafting.predict((1.0, deepest, count, calls))
                if tokens / seconds > best:
                    best, chosen, self._deepest = tokens / seconds, within[:count], deepest
        rows = [row for row, _ in chosen]
        return [rows.count(row) for row in range(len(chances))], best / plain

    def _search_many(
        self, survival: Array, worth: Array, caps: NDArray[np.int64], batch_size: int
    ) -> tuple[list[int], float]:
        """The search for all levels at once."""
        requests, levels = survival.shape
        worth = worth.copy()
        cells = requests * levels
        if int(caps.min()) < levels:
            worth[self._depths > caps[:, None]] = -1.0
            cells = int(np.minimum(caps, levels).sum())
        if not cells:
            return [0] * requests, 0.0
        order = worth.argsort(axis=None)[: -cells - 1 : -1]  # [n]: cells, the worthiest first
        level = order % levels
        deepest = self._deepest_tried()
        within = (level < deepest[:, None]).astype(np.float64)  # [tries, n]: no level beyond
        reach = self.acceptance.reach
        requested = within.cumsum(axis=1)
        nodes = (within * (self._tokens * reach)[level]).cumsum(axis=1)
        goodput = (within * (survival * reach).ravel()[order]).cumsum(axis=1) + batch_size
        max_nodes = int(nodes[-1, -1]) + 1
        added = np.arange(max_nodes + 1.0)
        context = self._context * (batch_size + self._node_context * added)
        calls = self._calls_with_drafts
        forward = self.forward.predict_many(batch_size + added, context, calls)
        base, deeper, wider, call = self.drafting.coefficients
        goodput /= forward[(nodes + 0.5).astype(np.int64)] + (
            (base + call * calls + deeper * deepest[:, None]) + wider * requested
        )
        goodput[nodes > STRETCH * self._widest + 1 - batch_size] = 0.0
        tried, last = divmod(int(goodput.argmax()), cells)
        self._deepest = int(deepest[tried])
        rows_taken = order[: last + 1][level[: last + 1] < self._deepest] // levels
        ratio = float(goodput[tried, last]) * self._plain_seconds(batch_size) / batch_size
        return np.bincount(rows_taken, minlength=requests).tolist(), ratio

    def _deepest_tried(self) -> NDArray[np.int64]:
        """[tries], rising: greatest depths to search; the best one moves by a level at a time."""
        levels, near = len(self._depths), self._deepest
        if levels <= MAX_TRIED:
            return self._depths
        return np.array(sorted({max(near - 1, 1), near, min(near + 1, levels), levels}))

    def _probe(
        self, best: list[int], survival: Array, caps: NDArray[np.int64], batch_size: int
    ) -> list[int] | None:
        """What to try although it looks slower than plain decoding; None if nothing is affordable.

        In turn the best lengths there are, which is what might be switched to, and short drafts on
        as many requests as possible, which show more of acceptance. Where both look dear, a trial:
        a prediction that is never tested cannot be found wrong. That is the lengths that would be
        best with acceptance at the upper end of what it may be, for several steps, as one of them
        costs nearly as much and shows little.
        """
        hopeful, ratio = self._search(self.acceptance.hopeful(survival), caps, batch_size)
        self._hopeful = ratio >= SWITCH
        probe = self._affordable_probe(best, survival, caps, batch_size)
        if probe is not None:
            self._again = probe if self._hopeful else None
        elif self.account.balance >= CREDIT and any(hopeful):
            probe, self._is_trial = hopeful, True
        return probe

    def _affordable_probe(
        self, best: list[int], survival: Array, caps: NDArray[np.int64], batch_size: int
    ) -> list[int] | None:
        self._turn += 1
        if self._turn % 2 and self._affordable(np.array(best), survival, batch_size):
            return best
        rows = len(caps)
        while rows:
            chosen = (self._turn + np.arange(rows)) % len(caps)
            depths = np.zeros_like(caps)
            depths[chosen] = np.minimum(np.minimum(PROBE_DEPTH, len(self._depths)), caps[chosen])
            if self._affordable(depths, survival, batch_size):
                return depths.tolist()
            rows //= 2
        return None

    def _affordable(self, depths: NDArray[np.int64], survival: Array, batch_size: int) -> bool:
        """Whether the account can bear what these lengths are expected to lose."""
        nodes = float(self._sizes[depths].sum())
        if not nodes or nodes > max(self._widest, self._sizes.max()):
            return False
        seconds = self._seconds(batch_size, nodes, 1.0)
        seconds += self.drafting.predict((1.0, depths.max(), depths.sum(), 1.0))
        gain = float(survival[self._depths <= depths[:, None]].sum()) / batch_size
        cost = seconds / self._plain_seconds(batch_size) - 1.0 - gain
        share = PROBE_SHARE if np.count_nonzero(depths) > 1 else LAST_SHARE
        return cost <= share * min(self.account.balance, CREDIT)

    @property
    def _plain_calls(self) -> float:
        """Calls per plain step for which the policy is not called."""
        return self.plain_calls.per_step(1.0)

    @property
    def _calls_with_drafts(self) -> float:
        """Calls per step with drafts, while a choice holds."""
        return self.draft_calls.per_step(self._plain_calls)

    def _plain_seconds(self, batch_size: float) -> float:
        """Of a plain decode step."""
        return self._seconds(batch_size, 0, self._plain_calls)

    def _seconds(self, batch_size: float, nodes: float, calls: float) -> float:
        """Of a step of decodes with ``nodes`` draft nodes, without drafting."""
        context = self._context * (batch_size + self._node_context * nodes)
        return self.forward.predict(batch_size + nodes, context, calls)

    # ---- after the step ---------------------------------------------------------------------

    def observe(self, record: StepRecord) -> None:
        """Learn time and acceptance of the steps, and book them."""
        requested, self._requested = self._requested, {}
        self._context = record.context / (record.batch_size or 1.0)
        self._batch_size = record.batch_size
        steps, self._num_skipped = record.num_steps + self._num_skipped, 0
        drafted = sum(float(self._sizes[depth]) for _, depth, _ in record.requests)
        num_tokens, calls = record.tokens - drafted / record.num_steps, 1.0 / record.num_steps
        # Prompts are computed in single steps; means of several are not exact.
        has_prompts = num_tokens > record.batch_size + 0.5
        plain_calls = 1.0 if has_prompts else self._plain_calls
        plain = self.forward.predict(num_tokens, record.context, plain_calls)
        decoding = self.forward.predict(num_tokens, record.context, calls)
        if requested:
            seconds = self._observe_drafts(record, requested, steps)
            self._gained = self._decoded(record) - record.num_steps * seconds / plain
            self._count_drafts(record.num_steps)
        else:
            self._observe_plain(record, not (has_prompts or drafted), steps)
            asking = self._asking.observe(record.draft_seconds / calls / self.slowdown.factor)
            loss = max(decoding / plain - 1.0, 0.0) + min(asking * calls / plain, 1.0)
            self._gained = -record.num_steps * loss if plain > 0.0 else 0.0
        self._drafted_last = bool(requested)
        self._widest = max(self._widest, record.tokens)
        self.acceptance.observe(requested, record.requests, steps)
        self.account.book(self._gained, record.num_steps)
        self._left -= record.num_steps
        self._plain_age += record.num_steps

    @staticmethod
    def _decoded(record: StepRecord) -> float:
        """Tokens per row. On a GPU calls go on after the end of all rows, which yields nothing."""
        accepted = sum(accepted for _, _, accepted in record.requests)
        num_rows = record.num_steps * record.batch_size
        return (num_rows + accepted) / max(record.batch_size, 1.0)

    def _observe_plain(self, record: StepRecord, decodes: bool, steps: int) -> None:
        """Learn from steps for which no drafts were requested; ``decodes``: they only decode."""
        calls = 1.0 / record.num_steps
        predicted = self.forward.predict(record.tokens, record.context, calls)
        predicted *= self.slowdown.factor
        if decodes:
            self._observe_slowdown(record.tokens, record.context, record.forward_seconds, calls)
        if decodes and calls < self._plain_calls:  # shorter ones are booked as a loss
            self.plain_calls.observe(1, record.num_steps)
        seconds = record.forward_seconds / self.slowdown.factor
        self.forward.observe(record.tokens, record.context, seconds, calls, steps)
        self.drafting.age(record.num_steps)
        if self._drafting:
            limit = max(SURPRISE, USUALS * self.forward.usual) * predicted
            self._checks.tried(news=abs(record.forward_seconds - predicted) > limit)
        else:
            self._probes.wait(record.num_steps)

    def _observe_slowdown(
        self, tokens: float, context: float, seconds: float, calls: float
    ) -> None:
        """A step of a call of plain decodes took so long. Only what is known well shows a slowdown:
        at first the model is wrong.
        """
        known = self.forward.settled
        ratio = seconds / self.forward.predict(tokens, context, calls) if known else 1.0
        self.slowdown.observe_plain(ratio, self._drafting and self.account.open)

    def _observe_drafts(self, record: StepRecord, requested: dict[int, int], steps: int) -> float:
        """Learn from steps with drafts; returns the seconds of one that are believed."""
        num_nodes = record.tokens - record.batch_size
        context = record.context + self._node_context * num_nodes * self._context
        calls, factor = 1.0 / record.num_steps, self.slowdown.factor
        depths = list(requested.values())
        expected = self.forward.predict(record.tokens, context, calls)
        expected += self.drafting.predict((1.0, max(depths), sum(depths), calls))
        seconds = record.forward_seconds
        self.forward.observe(record.tokens, context, seconds / factor, calls, steps)
        if self._hold > 1:
            self.draft_calls.observe(1, record.num_steps)
        if self._observe_drafting(depths, record.draft_seconds / factor, calls):
            seconds += record.draft_seconds
        believed = self.slowdown.observe_drafted(seconds / expected)
        return believed * expected

    def _observe_drafting(self, depths: list[int], seconds: float, calls: float) -> bool:
        """Learn what drafts of these depths took; returns False for the first one, which sets
        things up.

        Of a probe made twice only the second one is learned from: after plain steps the code and
        data of drafting are out of the processor's caches. Of several steps in a call most are not.
        """
        is_first = calls == 1.0 and (self._again is not None or self._drafting)
        if is_first and not self._drafted_last and self.drafting.ready:
            return True
        self.drafting.observe((1.0, max(depths), sum(depths), calls), seconds)
        return self.drafting.observations > 1

    def _count_drafts(self, num_steps: int) -> None:
        if self._drafting:
            self._probes.tried(news=True)
            self._checks.wait(num_steps)
            if self.slowdown.is_doubtful and self.forward.settled:
                self._checks.hasten()
        elif self._again is None:  # a probe may take two steps
            self._probes.tried(news=self._hopeful or (self._is_trial and self._gained > 0.0))

    def hold(self) -> float:
        """While it drafts, what is left of the choice and before a check; while it does not, this
        step and those that it would skip. Probes and checks are single steps.

        With drafts no more than the account has plain steps, so that one call does not lose far
        more; and where the host does little per call, so few that single steps, which teach more,
        cost little.
        """
        return self._hold if self._requested or self._checks_plain else max(self.skip(), 1)

    @property
    def _hold(self) -> int:
        """Steps with drafts, or one."""
        if self._is_trial:
            return FIRST_HOLD
        if not self._drafting or self._checks_plain:
            return 1
        most = min(self._left, self._checks.left, self.account.balance, self._enough_steps)
        return max(int(most), 1)

    @property
    def _enough_steps(self) -> float:
        """Steps in a call with which the host does little per step."""
        forward = self._seconds(self._batch_size, 0, 0.0)
        return (self._seconds(self._batch_size, 0, 1.0) / forward - 1.0) / HOST_SHARE

    def skip(self) -> int:
        """While it does not draft, up to ``IDLE`` steps, and none of those that probe.

        More where they are so much faster than one that is asked that their allowance would not
        pay for it: the account would never allow a probe again.

        A few after a plain step among drafts, now and then, to know what they take, and after
        each plain step while little is known.
        """
        if self._again is not None:
            return 0
        is_old = self._plain_age >= PLAIN_AGE or not self.forward.settled
        if self._checks_plain and is_old:
            return CHECKED
        most = IDLE if self.forward.settled else min(CHECKED, int(self._enough_steps))
        if not self.account.open:
            self._why = (RECOVERING, (self.account.balance,))
            return max(most, self._num_to_recover)
        num_left = most if self._waits else self._probes.left
        count = 0 if self._drafting else max(min(most, num_left), 0)
        if count:
            self._why = self._held_why
        return count

    @property
    def _num_to_recover(self) -> int:
        """Skipped steps whose allowance opens the account again, and at least twice the cost of a
        call of the policy in a plain step.
        """
        single = self._seconds(self._batch_size, 0, 1.0)
        loss = single / self._plain_seconds(self._batch_size) - 1.0
        return int(max(CREDIT / 2 - self.account.balance, 2.0 * min(loss, CREDIT)) / ALLOWANCE)

    def skipped(self, steps: SkippedSteps) -> None:
        """Count plain steps that it was not called for, and learn their time."""
        if steps.tokens:
            size = steps.num_decodes
            calls, seconds = steps.num_calls / size, steps.seconds / size
            tokens, context = steps.tokens / size, steps.context / size
            self._observe_slowdown(tokens, context, seconds, calls)
            self.forward.observe(tokens, context, seconds / self.slowdown.factor, calls)
            self.plain_calls.observe(steps.num_calls, size)
        self.account.book(0.0, steps.num_steps)
        self._probes.wait(steps.num_steps)
        self.draft_calls.age(steps.num_steps)
        self.drafting.age(steps.num_steps)
        self._plain_age = 0
        self._left -= steps.num_steps
        self._num_skipped += steps.num_steps

    def age(self, num_steps: int) -> None:
        """Let all that was learned age by steps of other batches."""
        self.acceptance.age(num_steps)
        self.forward.age(num_steps)
        self.drafting.age(num_steps)
        self.draft_calls.age(num_steps)
        self.slowdown.forget()
        self._probes.wait(num_steps)
        self._checks.wait(num_steps)
        self._plain_age += num_steps
        self._left -= num_steps
