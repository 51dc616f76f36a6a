"""A machine that decodes without a model: known step times and known acceptance, noisy clocks.

What it reports has noise and outliers; what it is judged by has none: expected tokens over true
seconds, against every fixed length at the very same batches and contexts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from forethought.speculative.length.policy import (
    CappedRequest,
    LengthPolicy,
    SkippedSteps,
    StepRecord,
)

CONTEXT = 2e-7
"""Seconds per token of context."""
FORWARDS: dict[str, Callable[[int, int], float]] = {
    # Seconds by tokens and context.
    "small": lambda tokens, context: 1.2e-4 + 3e-5 * tokens + 1e-8 * context,
    "flat": lambda tokens, context: 0.02 + 1e-5 * tokens + CONTEXT * context,
    "rising": lambda tokens, context: 0.01 + 4e-4 * tokens + CONTEXT * context,
    "bound": lambda tokens, context: 0.004 + 1e-3 * tokens + CONTEXT * context,
    "bent": lambda tokens, context: (
        0.01 + 1e-4 * tokens + 3e-4 * max(tokens - 48, 0) + CONTEXT * context
    ),
}
DRAFTERS: dict[str, Callable[[int, int, int], float]] = {
    # Seconds by greatest depth, drafted tokens and drafting rows.
    "small model": lambda depth, tokens, rows: 2.5e-5 * depth + 2e-6 * tokens,
    "lookup": lambda depth, tokens, rows: 5e-5 + 1e-5 * rows,
    "model": lambda depth, tokens, rows: 0.0015 * depth + 2e-5 * tokens,
    "slow model": lambda depth, tokens, rows: 0.005 * depth + 1e-4 * tokens,
}


@dataclass
class Judgement:
    """What became of a run, without the noise."""

    tokens: float = 0.0
    seconds: float = 0.0
    fixed: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Seconds that each fixed length would have taken for the same tokens, 0 being plain."""
    drafting_steps: int = 0

    @property
    def against_plain(self) -> float:
        """Speed over that of plain decoding."""
        return self.fixed[0] / self.seconds

    @property
    def against_best(self) -> float:
        """Speed over that of the best fixed length."""
        return self.fixed.min() / self.seconds


@dataclass
class Calls:
    """How a machine makes steps: several in one call where nothing is decided between them."""

    seconds: float = 0.0
    """Of the host per call."""
    most: int = 8
    """Steps in a call."""
    plain: bool = True
    """Whether plain steps that skip the policy are made so."""
    drafted: bool = True
    """Whether steps with drafts are, while the policy holds its choice."""
    asking: float = 0.0
    """Seconds of the policy in a call that it is asked about."""


@dataclass
class Load:
    """Other processes on the machine: they slow down plain steps and drafts alike, and the speed
    that a run is judged by not at all.
    """

    pause: float = 0.0
    """Seconds for which the machine does something else."""
    mean_between: float = math.inf
    """Seconds from one pause to the next, on average."""
    slow: Callable[[float], float] = lambda clock: 1.0
    """Clock, in seconds -> how many times as long everything takes."""


class Machine:
    """Runs a batch of requests that end and are replaced.

    Args:
        forward, draft: true seconds.
        alpha: (request, step) -> chance of each drafted token behind accepted ones.
        rows: requests at a time.
        seed: of everything random.
        offers: chance that the drafter has a draft for a request at all.
        calls: how steps are made.
        load: what else runs.
    """

    def __init__(
        self, forward, draft, alpha, rows, seed, offers=1.0, levels=5, calls=None, load=None
    ):
        self.forward, self.draft, self.alpha, self.offers = forward, draft, alpha, offers
        self.rng = np.random.default_rng(seed)
        self.levels, self.steps, self.next = levels, 0, rows
        self.requests = [CappedRequest(number, levels) for number in range(rows)]
        self.contexts = self.rng.integers(50, 500, rows)
        self.calls = calls or Calls()
        self.load, self.clock = load or Load(), 0.0
        self.next_pause = self._until_pause()
        self.to_skip, self.skipped = 0, SkippedSteps()
        self.largest_call = 1
        """Most steps with drafts that were one call."""

    def resize(self, rows: int) -> None:
        """From now on another number of requests."""
        self.to_skip = 0
        while len(self.requests) < rows:
            self.requests.append(self._new())
        del self.requests[rows:]
        self.contexts = np.resize(self.contexts, rows)

    def run(self, policy: LengthPolicy, steps: int) -> Judgement:
        """At least so many steps, and the rest of the last call."""
        judged = Judgement(fixed=np.zeros(self.levels + 1))
        stop = self.steps + steps
        while self.steps < stop:
            self._replace()
            if self.to_skip > 0:
                self._skip(judged)
            else:
                self._call(policy, judged)
        return judged

    def _new(self) -> CappedRequest:
        self.next += 1
        return CappedRequest(self.next, self.levels)

    def _replace(self) -> None:
        for row in np.flatnonzero(self.rng.random(len(self.requests)) < 1 / 400):
            self.requests[row], self.contexts[row] = self._new(), 100

    def _skip(self, judged: Judgement) -> None:
        """A call of plain steps that the policy is not asked about."""
        size = min(self.to_skip, self.calls.most) if self.calls.plain else 1
        self.to_skip -= size
        rows, seconds, context = len(self.requests), 0.0, 0
        for _ in range(size):
            context += int(self.contexts.sum())
            seconds += self._step(judged, np.zeros(rows, int), 1 / size)[1]
        self.skipped.num_steps += size
        self.skipped.measure(size, rows * size, context, self._measured(seconds, size))

    def _call(self, policy: LengthPolicy, judged: Judgement) -> None:
        """A step that the policy is asked about, with others for which its choice holds."""
        rows = len(self.requests)
        if self.skipped.num_steps:
            policy.skipped(self.skipped)
            self.skipped = SkippedSteps()
        asked = np.array(policy.lengths(self.requests, rows))
        assert len(asked) == rows
        assert 0 <= asked.min() <= asked.max() <= self.levels
        size = 1
        if self.calls.drafted if asked.any() else self.calls.plain:
            size = int(min(policy.hold(), self.calls.most))
        if asked.any():
            self.largest_call = max(self.largest_call, size)
        judged.seconds += self.calls.asking
        context, seconds, drafts = 0, 0.0, list[tuple[int, int, int]]()
        for _ in range(size):
            context += int(self.contexts.sum())
            some, spent = self._step(judged, asked, 1 / size)
            drafts += some
            seconds += spent
        policy.observe(
            StepRecord(
                requests=drafts,
                batch_size=rows,
                tokens=rows + sum(depth for _, depth, _ in drafts) / size,
                context=context / size,
                forward_seconds=self._measured(seconds, size) / size,
                draft_seconds=self._measured(size * self._drafting(asked) + self.calls.asking, size)
                / size,
                num_steps=size,
            )
        )
        self.to_skip = policy.skip()

    def _step(
        self, judged: Judgement, asked: np.ndarray, calls: float
    ) -> tuple[list[tuple[int, int, int]], float]:
        """Its drafts, as in a record, and its true seconds but for drafting."""
        rows = len(self.requests)
        alphas = np.array([self.alpha(r.request_id, self.steps) for r in self.requests])
        depths = np.where(self.rng.random(rows) < self.offers, asked, 0)
        passed = self.rng.random((rows, self.levels)) < alphas[:, None]
        accepted = np.minimum(np.cumprod(passed, axis=1).sum(axis=1), depths)
        context = int(self.contexts.sum())
        seconds = self.forward(rows + int(depths.sum()), context) + calls * self.calls.seconds
        self._judge(judged, alphas, depths, seconds + self._drafting(asked), context)
        self.contexts += 1 + accepted
        self.steps += 1
        drafts = [
            (request.request_id, depth, taken)
            for request, depth, taken in zip(
                self.requests, depths.tolist(), accepted.tolist(), strict=True
            )
            if depth
        ]
        return drafts, seconds

    def _drafting(self, asked: np.ndarray) -> float:
        if not asked.any():
            return 0.0
        return self.draft(int(asked.max()), int(asked.sum()), int(np.count_nonzero(asked)))

    def _judge(self, judged, alphas, depths, seconds, context) -> None:
        rows = len(alphas)
        gains = np.cumsum(np.power.outer(alphas, np.arange(self.levels + 1)), axis=1)
        tokens = float(gains[np.arange(rows), depths].sum())
        judged.tokens += tokens
        judged.seconds += seconds
        judged.drafting_steps += bool(depths.any())
        for length in range(self.levels + 1):
            drafted = round(self.offers * rows * length)
            each = rows + self.offers * float((gains[:, length] - 1.0).sum())
            many = self.calls.drafted if length else self.calls.plain
            took = self.forward(rows + drafted, context) + self._drafting(np.full(rows, length))
            took += self.calls.seconds / (self.calls.most if many else 1)
            judged.fixed[length] += tokens * took / each

    def _measured(self, seconds: float, size: int) -> float:
        """What a clock shows for work of this many true seconds in one call."""
        seconds *= self._noise(size) * self.load.slow(self.clock)
        self.clock += seconds
        while self.clock > self.next_pause:
            self.clock += self.load.pause
            seconds += self.load.pause
            self.next_pause = self.clock + self._until_pause()
        return seconds

    def _until_pause(self) -> float:
        between = self.load.mean_between
        return float(self.rng.exponential(between)) if between < math.inf else math.inf

    def _noise(self, size: int) -> float:
        """3 % of noise, and in one call of a hundred a step that takes several times as long."""
        outlier = 1.0 + (self.rng.uniform(2.0, 9.0) / size if self.rng.random() < 0.01 else 0.0)
        return float(np.exp(self.rng.normal(0.0, 0.03))) * outlier
