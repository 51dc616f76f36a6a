"""How long a step takes: models that are fitted while decoding.

``LinearLatency`` is recursive least squares with exponential forgetting. Errors are relative to the
prediction, since noise grows with the time that it disturbs; a residual counts for at most a few
typical ones, so that an outlier does not move the fit; and a little information along each axis is
never forgotten, so that a thousand steps of one size do not wipe out what is known about others.

``ForwardLatency`` adds what a linear model misses. Forwards take constant time until the units are
busy, and jump at tile borders, so the averages measured at a size correct the line there and, in
proportion, between measured sizes, as long as they are fresh.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NUM_FIRST = 5
"""Observations before the first fit, which starts from their median."""
MAX_RESIDUAL = 3.0
"""Typical residuals that one residual counts for at most."""
MIN_INFORMATION = 0.3
"""Observations' worth of information about each coefficient that is never forgotten."""
FIRST_TYPICAL, MIN_TYPICAL = 0.2, 0.01
"""The typical relative residual at first, and at least."""
NUM_SETTLED, INTERVAL = 32, 4
"""After this many observations the models use only every fourth one, to save time."""
SIZES_PER_DOUBLING, NUM_SIZES = 4, 64
"""Sizes of forwards that are measured apart, up to 2**16 tokens."""
FRESH_STEPS, MIN_FRESHNESS = 256.0, 0.02
"""Steps after which a measurement has lost most of its weight, and the least that still counts."""
MIN_SECONDS = 1e-9
"""Of a predicted forward: where all time was put down to the context, one without any takes
none."""


class ResidualClip:
    """Limits a relative residual to a few typical ones; learns what is typical."""

    def __init__(self) -> None:
        self.typical = FIRST_TYPICAL

    def __call__(self, seconds: float, predicted: float) -> float:
        """The clipped residual ``seconds / predicted - 1``."""
        limit = MAX_RESIDUAL * self.typical
        residual = min(max(seconds / predicted - 1.0, -limit), limit)
        self.typical = max(MIN_TYPICAL, 0.9 * self.typical + 0.1 * abs(residual))
        return residual


class LinearLatency:
    """Seconds as a sum of known terms, each times a coefficient of at least 0.

    Args:
        shares: how the seconds of the first observation are divided among the terms; each above 0,
            their sum is 1.
        forgetting: weight that the past keeps per observation.
    """

    def __init__(self, shares: Sequence[float], forgetting: float = 0.96) -> None:
        self._shares = np.asarray(shares, dtype=np.float64)
        self._forgotten = 1.0 - forgetting
        self._clip = ResidualClip()
        self._first: list[tuple[float, Array]] = []
        self.num_observations = 0
        self._information = np.zeros((len(shares), len(shares)))
        self._unconstrained: Array = np.zeros(len(shares))
        self.coefficients: Array = np.zeros(len(shares))
        """One per term, in seconds, none below 0."""

    @property
    def ready(self) -> bool:
        """Whether it has been fitted; until then it predicts 0."""
        return self.num_observations >= NUM_FIRST

    @property
    def settled(self) -> bool:
        """Whether it knows enough to skip observations."""
        return self.num_observations > NUM_SETTLED

    def predict(self, terms: Sequence[float]) -> float:
        """Seconds of one step."""
        return float(self.coefficients.dot(terms))

    def observe(self, terms: Sequence[float], seconds: float) -> float:
        """Learn what a step with these terms took.

        Returns:
            ``seconds`` without what exceeds the clipped residual; at first, the median so far.
        """
        row = np.asarray(terms, dtype=np.float64)
        self.num_observations += 1
        if self.num_observations > NUM_FIRST:
            return self._update(row, seconds)
        self._first.append((seconds, row))
        median = sorted(seconds for seconds, _ in self._first)[(len(self._first) - 1) // 2]
        if self.ready:
            self._start()
        return median

    def _start(self) -> None:
        """Fit to the median of the first observations, then to the others."""
        self._first.sort(key=lambda each: each[0])
        seconds, row = self._first.pop(NUM_FIRST // 2)
        scale = np.maximum(row, 1.0)
        self._unconstrained = self._shares / scale * max(seconds, MIN_SECONDS)
        self._information = np.diag(scale**2 / self._shares) * 0.1 / max(seconds, MIN_SECONDS) ** 2
        for seconds, row in self._first:
            self._update(row, seconds)

    def _update(self, row: Array, seconds: float) -> float:
        predicted = max(float(self._unconstrained @ row), MIN_SECONDS)
        residual = self._clip(seconds, predicted)
        if not self.settled or self.num_observations % INTERVAL == 0:
            scaled = row / predicted
            self._information *= 1.0 - self._forgotten
            self._information += scaled[:, None] * scaled
            kept = self._forgotten * MIN_INFORMATION * scaled * scaled
            self._information.flat[:: len(row) + 1] += kept
            self._unconstrained += np.linalg.solve(self._information, scaled) * residual
            self.coefficients = self._constrained()
        return predicted * (1.0 + residual)

    def _constrained(self) -> Array:
        """The best fit without coefficients below 0: the lowest is fixed at 0 until none is left.

        Clipping alone would lose what the negative coefficients explained.
        """
        fitted = self._unconstrained.copy()
        free = np.ones(len(fitted), bool)
        while fitted.min() < 0.0:
            free[int(fitted.argmin())] = False
            target = self._information[free] @ self._unconstrained
            fitted = np.zeros_like(fitted)
            fitted[free] = np.linalg.solve(self._information[np.ix_(free, free)], target)
        return fitted


class ForwardLatency:
    """Seconds of the target's forward by its tokens and its rows' context."""

    def __init__(self) -> None:
        self.linear = LinearLatency((0.8, 0.1, 0.1))
        self._clip = ResidualClip()
        self._averages = np.zeros((3, NUM_SIZES))  # seconds, tokens and context of each size
        self._num_measured = np.zeros(NUM_SIZES, np.int64)
        self._last_measured = np.full(NUM_SIZES, -np.inf)
        self._step = 0
        self._tokens, self._factors = np.ones(1), np.ones(1)  # measured over linear, by tokens

    @property
    def ready(self) -> bool:
        """Whether it can predict."""
        return self.linear.ready

    def predict(self, tokens: float | Array, context: float) -> float | Array:
        """Seconds of a forward of ``tokens``, or of one forward for each entry."""
        line = np.maximum(self._line(tokens, context), MIN_SECONDS)
        seconds: float | Array = line * np.interp(tokens, self._tokens, self._factors)
        return seconds

    def observe(self, tokens: int, context: int, seconds: float, num_steps: int = 1) -> float:
        """Learn what a forward took.

        Args:
            tokens: of the forward.
            context: sum of its rows' lengths in the KV cache.
            seconds: that it took.
            num_steps: steps since the last observation, this one included.

        Returns:
            ``seconds`` without what exceeds the clipped residual.
        """
        self._step += num_steps
        if self.ready:
            predicted = float(self.predict(tokens, context))
            seconds = predicted * (1.0 + self._clip(seconds, predicted))
            self.linear.observe((1.0, tokens, context), seconds)
        else:
            seconds = self.linear.observe((1.0, tokens, context), seconds)
            self._num_measured[:] = 0  # the median so far replaces what was measured before
        self._measure(tokens, context, seconds)
        return seconds

    def _line(self, tokens: float | Array, context: float | Array) -> float | Array:
        fixed, per_token, per_context = self.linear.coefficients.tolist()
        seconds: float | Array = fixed + per_token * tokens + per_context * context
        return seconds

    def _measure(self, tokens: int, context: int, seconds: float) -> None:
        """Update the size's averages, then the factors at all fresh sizes."""
        size = min(round(SIZES_PER_DOUBLING * log2(tokens)), NUM_SIZES - 1)
        if self._step - self._last_measured[size] > FRESH_STEPS:
            self._num_measured[size] = 0
        self._last_measured[size] = self._step
        self._num_measured[size] += 1
        rate = max(1.0 / self._num_measured[size], 0.2)
        self._averages[:, size] += rate * ((seconds, tokens, context) - self._averages[:, size])
        if not self.ready or (self.linear.settled and self.linear.num_observations % INTERVAL):
            return
        freshness = np.exp((self._last_measured - self._step) / FRESH_STEPS)
        fresh = np.flatnonzero(freshness > MIN_FRESHNESS)
        measured, self._tokens, contexts = self._averages[:, fresh]
        line = np.maximum(self._line(self._tokens, contexts), MIN_SECONDS)
        self._factors = 1.0 + freshness[fresh] * (measured / line - 1.0)
