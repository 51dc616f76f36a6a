"""How long a step takes: a linear model that is fitted while it is used.

Recursive least squares with exponential forgetting, and three changes that a running machine asks
for. Errors count relative to the prediction, since noise grows with what it disturbs. A residual
counts for no more than a few times the usual one, so that a hiccup is not a lesson. And along each
axis a little information is never forgotten, so that a thousand steps of one kind neither wipe out
what is known about the others nor leave the fit at the mercy of the next. Knows nothing about what
the terms mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

FIRST = 5
"""Observations before the first fit, which starts with their median."""
CLIP = 3.0
"""Usual residuals that one residual counts for at most."""
KEPT = 0.3
"""Observations' worth of information about each coefficient that is never forgotten."""
SETTLED, EVERY = 32, 4
"""After so many observations only every so manieth is learned from, to save time."""
LEAST_RESIDUAL, FIRST_RESIDUAL = 0.01, 0.2
"""Relative: what is usual at least, and what is taken for usual at first."""


class LinearLatency:
    """Seconds as a sum of terms, each a coefficient of at least 0 times a known number.

    Args:
        shares: how the seconds of the first observation are shared out among the terms; sums to 1.
            Every share is above 0.
        forgetting: weight that an observation keeps when another one comes.
    """

    def __init__(self, shares: Sequence[float], forgetting: float = 0.96) -> None:
        self._shares = np.asarray(shares, dtype=np.float64)
        self._forgotten = 1.0 - forgetting
        self._information = np.zeros((len(shares), len(shares)))
        self._usual = FIRST_RESIDUAL
        self._waiting: list[tuple[Vector, float]] = []
        self.observations = 0
        self._free: Vector = np.zeros(len(shares))  # the fit before what is below 0 is forbidden
        self.coefficients: Vector = np.zeros(len(shares))
        """One per term, in seconds, none below 0."""

    @property
    def ready(self) -> bool:
        """Whether it has been fitted: until then it predicts 0."""
        return self.observations >= FIRST

    def predict(self, terms: Sequence[float] | Vector) -> float:
        """Seconds for one step's terms."""
        return float(self.coefficients.dot(terms))

    def observe(self, terms: Sequence[float] | Vector, seconds: float) -> float:
        """Learn that a step with these terms took so long.

        Returns:
            ``seconds`` without what was clipped from them as a hiccup.
        """
        known = np.asarray(terms, dtype=np.float64)
        self.observations += 1
        if self.observations > FIRST:
            return self._update(known, seconds)
        self._waiting.append((known, seconds))
        least = min(seconds for _, seconds in self._waiting)
        if self.observations == FIRST:
            self._start()
        return least

    def _start(self) -> None:
        """Fit to the median of the first observations, then to the others."""
        first = sorted(self._waiting, key=lambda each: each[1])
        terms, seconds = first.pop(FIRST // 2)
        scale = np.maximum(np.abs(terms), 1.0)
        self._free = self._shares / scale * max(seconds, 1e-9)
        self._information = np.diag(scale**2 / self._shares) * (0.1 / max(seconds, 1e-9) ** 2)
        for terms, seconds in first:
            self._update(terms, seconds)
        self._waiting.clear()

    def _update(self, terms: Vector, seconds: float) -> float:
        predicted = max(float(self._free @ terms), 1e-9)
        most = CLIP * self._usual
        clipped = min(max(seconds / predicted - 1.0, -most), most)
        if self.observations > SETTLED and self.observations % EVERY:
            return predicted * (1.0 + clipped)
        self._usual = max(LEAST_RESIDUAL, 0.9 * self._usual + 0.1 * abs(clipped))
        row = terms / predicted
        self._information *= 1.0 - self._forgotten
        self._information += row[:, None] * row
        self._information.flat[:: len(row) + 1] += self._forgotten * KEPT * row * row
        self._free = self._free + np.linalg.solve(self._information, row) * clipped
        self.coefficients = self._constrained()
        return predicted * (1.0 + clipped)

    def _constrained(self) -> Vector:
        """The best fit without coefficients below 0: the lowest is fixed at 0 until none is left.

        Not simply clipped: what the forbidden part explained is left to the others.
        """
        fitted = self._free
        allowed = np.ones(len(fitted), bool)
        while fitted.min() < 0.0:
            allowed[int(fitted.argmin())] = False
            target = self._information[allowed] @ self._free
            fitted = np.zeros_like(self._free)
            fitted[allowed] = np.linalg.solve(self._information[np.ix_(allowed, allowed)], target)
        return fitted
