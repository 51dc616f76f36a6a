"""Predicted step times: linear models fitted online, and measured times where there are any.

``LinearLatency`` is recursive least squares with exponential forgetting and three changes. Errors
are relative to the prediction, since noise grows with the time. A residual counts for at most a few
times the usual one, so that an outlier moves little. And along each axis a little information is
never forgotten, so that a thousand steps of one kind neither erase the others nor leave the fit
dominated by the next step.

``ForwardLatency`` is the time of a step with one forward of the target: c0 + c1 tokens + c2 context
+ c3 calls where a size was not measured. Of n steps that are one call of the engine, each is 1/n of
a call; the last term is what the host does around each. Processors are not linear: the time is flat
until their units are busy and jumps at tile borders. So a measurement outweighs the model at its
size and, in proportion, between measured sizes, for as long as it is recent.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Sequence
from math import log2
from operator import mul

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
"""After this many observations only one in ``EVERY`` is used for the fit, to save time."""
LEAST_RESIDUAL, FIRST_RESIDUAL = 0.01, 0.2
"""Relative: what is usual at least, and what is taken for usual at first."""
LEAST_PREDICTED = 1 / 8
"""Of the typical seconds: errors are relative to at least that."""


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
        self._typical = 0.0  # seconds
        self._waiting: list[tuple[Vector, float]] = []
        self.observations = 0
        self._free: Vector = np.zeros(len(shares))  # the fit before what is below 0 is forbidden
        self.coefficients: Vector = np.zeros(len(shares))
        """One per term, in seconds, none below 0."""
        # The same as lists: with four terms numpy takes longer than Python.
        self._free_line, self._line = self._free.tolist(), self.coefficients.tolist()

    @property
    def ready(self) -> bool:
        """Whether it has been fitted: until then it predicts 0."""
        return self.observations >= FIRST

    def predict(self, terms: Sequence[float] | Vector) -> float:
        """Seconds for one step's terms."""
        return sum(map(mul, self._line, terms))

    def observe(self, terms: Sequence[float] | Vector, seconds: float) -> float:
        """Learn the seconds of a step with these terms; returns them without what an outlier was
        clipped by.
        """
        self.observations += 1
        if self.observations > FIRST:
            return self._update(terms, seconds)
        self._waiting.append((np.asarray(terms, np.float64), seconds))
        least = min(seconds for _, seconds in self._waiting)
        if self.observations == FIRST:
            self._start()
        return least

    def _start(self) -> None:
        """Fit to the median of the first observations, then to the others."""
        first = sorted(self._waiting, key=lambda sample: sample[1])
        terms, seconds = first.pop(FIRST // 2)
        self._typical = seconds
        scale = np.maximum(np.abs(terms), 1.0)
        self._free = self._shares / scale * max(seconds, 1e-9)
        self._free_line = self._free.tolist()
        self._information = np.diag(scale**2 / self._shares) * (0.1 / max(seconds, 1e-9) ** 2)
        for terms, seconds in first:
            self._update(terms, seconds)
        self._waiting.clear()

    def _update(self, terms: Sequence[float] | Vector, seconds: float) -> float:
        free = sum(map(mul, self._free_line, terms))
        # Where the free fit is far too low, or below 0, errors are not relative to it.
        predicted = max(free, LEAST_PREDICTED * self._typical, 1e-9)
        usual = predicted * (1.0 + self._clipped(seconds / predicted - 1.0))
        clipped = self._clipped((seconds - free) / predicted)
        self._typical += 0.1 * (usual - self._typical)
        if self.observations > SETTLED and self.observations % EVERY:
            return usual
        self._usual = max(LEAST_RESIDUAL, 0.9 * self._usual + 0.1 * abs(clipped))
        row = np.asarray(terms, np.float64) / predicted
        self._information *= 1.0 - self._forgotten
        self._information += row[:, None] * row
        self._information.flat[:: len(row) + 1] += self._forgotten * KEPT * row * row
        self._free = self._free + np.linalg.solve(self._information, row) * clipped
        self.coefficients = self._constrained()
        self._free_line, self._line = self._free.tolist(), self.coefficients.tolist()
        return usual

    def _clipped(self, residual: float) -> float:
        limit = CLIP * self._usual
        return min(max(residual, -limit), limit)

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


Array = NDArray[np.float64]

PER_OCTAVE, SIZES = 4, 64
"""Sizes in one doubling of the tokens, and in all: up to 2**16 tokens."""
FRESH, LEAST_FRESH = 256.0, 0.02
"""Steps after which a measurement has lost most of its weight; the least that still counts."""
LEAST_SECONDS = 1e-9
"""No forward is predicted to take less: where all time was put down to the context, one without any
would take none."""
WINDOW = 9
"""Measurements of a size that are kept; their median, relative to the linear model, counts, so that
outliers do not."""


class ForwardLatency:
    """Seconds of a step; fitted while it is used. ``calls`` are those of the engine per step."""

    def __init__(self) -> None:
        self.linear = LinearLatency((0.7, 0.1, 0.1, 0.1))
        self._windows: dict[int, deque[tuple[float, ...]]] = {}  # by size
        self._medians = np.ones((4, SIZES))  # seconds, tokens, context and calls, by size
        self._coefficients: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
        self._steps = np.full(SIZES, -np.inf)  # when each size was last measured
        self._step = self._num_measured = 0  # steps gone by, and measurements taken of them
        self._usual = FIRST_RESIDUAL
        self._where = [1.0]  # tokens at the fresh sizes, rising
        self._factor = [1.0]  # measured over linear there

    @property
    def ready(self) -> bool:
        """Whether it can predict."""
        return self.linear.ready

    @property
    def settled(self) -> bool:
        """Whether it has learned enough that not every step has to be observed."""
        return self.linear.observations > SETTLED

    @property
    def usual(self) -> float:
        """How far off a prediction usually is, relative to it."""
        return self._usual

    def predict(self, tokens: float, context: float, calls: float = 1.0) -> float:
        """Seconds of one step."""
        line = self._line(tokens, context, calls)
        where, factor = self._where, self._factor
        after = bisect(where, tokens)
        if not 0 < after < len(where):
            return line * factor[min(after, len(where) - 1)]
        low, right = where[after - 1], where[after]
        part = (tokens - low) / (right - low)
        return line * (factor[after - 1] + part * (factor[after] - factor[after - 1]))

    def _line(self, tokens: float, context: float, calls: float) -> float:
        """Seconds by the linear model."""
        fixed, per_token, distant, call = self._coefficients
        return max(fixed + per_token * tokens + distant * context + call * calls, LEAST_SECONDS)

    def predict_many(self, tokens: Array, context: Array, calls: float = 1.0) -> Array:
        """[n]: seconds of steps by their tokens, at least 1, and context."""
        fixed, per_token, distant, call = self._coefficients
        line = np.maximum(
            fixed + distant * context + per_token * tokens + call * calls, LEAST_SECONDS
        )
        return line * np.interp(tokens, self._where, self._factor)

    def observe(
        self, tokens: float, context: float, seconds: float, calls: float = 1.0, steps: int = 1
    ) -> float:
        """Learn the seconds of a step; returns them without what an outlier was clipped by.

        Args:
            tokens: of its forward; less than 1 counts as 1: a mean over the steps of a call that
                went on after all of its rows had ended, as on a GPU.
            context: tokens that were attended to, in all.
            seconds: that it took.
            calls: what part of a call it was, as one of several steps that took as long.
            steps: how many steps have passed, this one included.
        """
        tokens = max(tokens, 1.0)
        if self.ready:
            predicted = max(self.predict(tokens, context, calls), LEAST_SECONDS)
            limit = CLIP * self._usual
            residual = min(max(seconds / predicted - 1.0, -limit), limit)
            self._usual = max(LEAST_RESIDUAL, 0.9 * self._usual + 0.1 * abs(residual))
            seconds = predicted * (1.0 + residual)
        self.linear.observe((1.0, tokens, context, calls), seconds)
        self._coefficients = tuple(self.linear.coefficients.tolist())
        self._step += steps
        self._measure(tokens, context, calls, seconds)
        return seconds

    def _measure(self, tokens: float, context: float, calls: float, seconds: float) -> None:
        size = min(round(PER_OCTAVE * log2(tokens)), SIZES - 1)
        if self._step - self._steps[size] > FRESH:
            self._windows[size] = deque(maxlen=WINDOW)
        window = self._windows[size]
        if len(window) == WINDOW and self._step - self._steps[size] < EVERY:
            return
        self._steps[size] = self._step
        window.append((seconds, tokens, context, calls))
        excess = sorted(window, key=lambda sample: sample[0] / self._line(*sample[1:]))
        self._medians[:, size] = excess[len(window) // 2]
        self._num_measured += 1
        if self.ready and (self._num_measured < SETTLED or self._num_measured % EVERY == 0):
            self._compare()

    def _compare(self) -> None:
        fresh = np.exp((self._steps - self._step) / FRESH)
        sizes = np.flatnonzero(fresh > LEAST_FRESH)
        seconds, tokens, context, calls = self._medians[:, sizes]
        fixed, per_token, distant, call = self._coefficients
        line = np.maximum(
            fixed + per_token * tokens + distant * context + call * calls, LEAST_SECONDS
        )
        self._where = tokens.tolist()
        self._factor = (1.0 + fresh[sizes] * (seconds / line - 1.0)).tolist()
