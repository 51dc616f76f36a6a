"""A machine that decodes without a model: known step times and known acceptance, noisy clocks.

What it reports has noise and outliers; what it is judged by has none: expected tokens over true
seconds, against every fixed length at the very same batches and contexts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from forethought.speculative.length.policy import CappedRequest, LengthPolicy, StepRecord

CONTEXT = 2e-7
"""Seconds per token of context."""
FORWARDS: dict[str, Callable[[int, int], float]] = {
    # Seconds by tokens and context.
    "flat": lambda tokens, context: 0.02 + 1e-5 * tokens + CONTEXT * context,
    "rising": lambda tokens, context: 0.01 + 4e-4 * tokens + CONTEXT * context,
    "bound": lambda tokens, context: 0.004 + 1e-3 * tokens + CONTEXT * context,
    "bent": lambda tokens, context: (
        0.01 + 1e-4 * tokens + 3e-4 * max(tokens - 48, 0) + CONTEXT * context
    ),
}
DRAFTERS: dict[str, Callable[[int, int, int], float]] = {
    # Seconds by greatest depth, drafted tokens and drafting rows.
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


class Machine:
    """Runs a batch of requests that end and are replaced.

    Args:
        forward, draft: true seconds.
        alpha: (request, step) -> chance of each drafted token behind accepted ones.
        rows: requests at a time.
        seed: of everything random.
        offers: chance that the drafter has a draft for a request at all.
        skipped_share: time of a step that the policy skips, as a share of a plain one.
    """

    def __init__(self, forward, draft, alpha, rows, seed, offers=1.0, levels=5, skipped_share=1.0):
        self.forward, self.draft, self.alpha, self.offers = forward, draft, alpha, offers
        self.rng = np.random.default_rng(seed)
        self.levels, self.steps, self.next = levels, 0, rows
        self.requests = [CappedRequest(number, levels) for number in range(rows)]
        self.contexts = self.rng.integers(50, 500, rows)
        self.to_skip = self.skipped = 0
        self.skipped_share, self.skipped_seconds = skipped_share, 0.0

    def resize(self, rows: int) -> None:
        """From now on another number of requests."""
        self.to_skip = 0
        while len(self.requests) < rows:
            self.requests.append(self._new())
        del self.requests[rows:]
        self.contexts = np.resize(self.contexts, rows)

    def run(self, policy: LengthPolicy, steps: int) -> Judgement:
        judged = Judgement(fixed=np.zeros(self.levels + 1))
        for _ in range(steps):
            self._replace()
            self._step(policy, judged)
            self.steps += 1
        return judged

    def _new(self) -> CappedRequest:
        self.next += 1
        return CappedRequest(self.next, self.levels)

    def _replace(self) -> None:
        for row in np.flatnonzero(self.rng.random(len(self.requests)) < 1 / 400):
            self.requests[row], self.contexts[row] = self._new(), 100

    def _step(self, policy: LengthPolicy, judged: Judgement) -> None:
        rows = len(self.requests)
        is_asked = self._is_asked(policy)
        asked = np.array(policy.lengths(self.requests, rows) if is_asked else [0] * rows)
        assert len(asked) == rows
        assert 0 <= asked.min() <= asked.max() <= self.levels
        alphas = np.array([self.alpha(r.request_id, self.steps) for r in self.requests])
        depths = np.where(self.rng.random(rows) < self.offers, asked, 0)
        passed = self.rng.random((rows, self.levels)) < alphas[:, None]
        accepted = np.minimum(np.cumprod(passed, axis=1).sum(axis=1), depths)
        context = int(self.contexts.sum())
        forward = self.forward(rows + int(depths.sum()), context)
        draft = self._drafting(asked)
        if not is_asked:
            forward *= self.skipped_share
            self.skipped_seconds += forward * self._noise()
        self._judge(judged, alphas, depths, forward + draft, context)
        self.contexts += 1 + accepted
        if not is_asked:
            return
        policy.observe(
            StepRecord(
                requests=[
                    (request.request_id, depth, taken)
                    for request, depth, taken in zip(
                        self.requests, depths.tolist(), accepted.tolist(), strict=True
                    )
                    if depth
                ],
                batch_size=rows,
                tokens=rows + int(depths.sum()),
                context=context,
                forward_seconds=forward * self._noise(),
                draft_seconds=draft * self._noise(),
            )
        )
        self.to_skip = policy.skip()

    def _is_asked(self, policy: LengthPolicy) -> bool:
        """As in the engine: not in the steps that the policy skips."""
        if self.to_skip > 0:
            self.to_skip -= 1
            self.skipped += 1
            return False
        if self.skipped:
            policy.skipped(self.skipped, self.skipped_seconds)
            self.skipped, self.skipped_seconds = 0, 0.0
        return True

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
            took = self.forward(rows + drafted, context) * (1.0 if length else self.skipped_share)
            took += self._drafting(np.full(rows, length))
            judged.fixed[length] += tokens * took / each

    def _noise(self) -> float:
        """3 % of noise, and one step in a hundred that takes several times as long."""
        outlier = self.rng.uniform(3.0, 10.0) if self.rng.random() < 0.01 else 1.0
        return float(np.exp(self.rng.normal(0.0, 0.03))) * outlier
