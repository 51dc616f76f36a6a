"""How long the target's forward takes, by its tokens and its context.

The linear model c0 + c1 tokens + c2 context says what happens at sizes that were not tried.
Machines are not linear: they are flat until their units are busy, and jump at the borders of tiles.
So what was really measured at a size outweighs the model there and, in proportion, between measured
sizes, for as long as it is fresh. Knows nothing about rows or drafts.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from math import log2

import numpy as np
from numpy.typing import NDArray

from forethought.speculative.latency import (
    CLIP,
    EVERY,
    FIRST_RESIDUAL,
    LEAST_RESIDUAL,
    SETTLED,
    LinearLatency,
)

Array = NDArray[np.float64]

PER_OCTAVE, SIZES = 4, 64
"""Sizes in one doubling of the tokens, and in all: up to 2**16 tokens."""
FRESH, LEAST_FRESH = 256.0, 0.02
"""Steps after which a measurement has lost most of its weight; the least that still counts."""
LEAST_SECONDS = 1e-9
"""No forward is predicted to take less: where all time was put down to the context, one without any
would take none."""
WINDOW = 9
"""Measurements of a size that are kept; their median counts, so that hiccups do not."""


class ForwardLatency:
    """Seconds of a forward; fitted while it is used."""

    def __init__(self) -> None:
        self.linear = LinearLatency((0.8, 0.1, 0.1))
        self._windows: dict[int, deque[tuple[float, float, float]]] = {}  # by size
        self._medians = np.ones((3, SIZES))  # of seconds, tokens and context of each size's window
        self._coefficients: tuple[float, ...] = (0.0, 0.0, 0.0)
        self._steps = np.full(SIZES, -np.inf)  # when each size was last measured
        self._step = self._told = 0  # steps gone by, and measurements taken of them
        self._usual = FIRST_RESIDUAL
        self._where = [1.0]  # tokens at the fresh sizes, rising
        self._factor = [1.0]  # measured over linear there

    @property
    def ready(self) -> bool:
        """Whether it can predict."""
        return self.linear.ready

    @property
    def settled(self) -> bool:
        """Whether it has learned so much that not every step has to be told."""
        return self.linear.observations > SETTLED

    @property
    def usual(self) -> float:
        """How far off a prediction usually is, relative to it."""
        return self._usual

    def predict(self, tokens: float, context: float) -> float:
        """Seconds of one forward."""
        fixed, each, distant = self._coefficients
        line = max(fixed + each * tokens + distant * context, LEAST_SECONDS)
        where, factor = self._where, self._factor
        after = bisect(where, tokens)
        if not 0 < after < len(where):
            return line * factor[min(after, len(where) - 1)]
        left, right = where[after - 1], where[after]
        part = (tokens - left) / (right - left)
        return line * (factor[after - 1] + part * (factor[after] - factor[after - 1]))

    def predict_many(self, tokens: Array, context: float) -> Array:
        """[n]: seconds of forwards of so many tokens each, all at least 1."""
        fixed, each, distant = self._coefficients
        line = np.maximum(fixed + distant * context + each * tokens, LEAST_SECONDS)
        return line * np.interp(tokens, self._where, self._factor)

    def observe(self, tokens: int, context: int, seconds: float, steps: int = 1) -> float:
        """Learn that a forward took so long.

        Args:
            tokens: of the forward.
            context: tokens that its rows have seen, in all.
            seconds: that it took.
            steps: how many have gone by, this one included.

        Returns:
            ``seconds`` without what was clipped from them as a hiccup.
        """
        if self.ready:
            predicted = max(self.predict(tokens, context), LEAST_SECONDS)
            most = CLIP * self._usual
            residual = min(max(seconds / predicted - 1.0, -most), most)
            self._usual = max(LEAST_RESIDUAL, 0.9 * self._usual + 0.1 * abs(residual))
            seconds = predicted * (1.0 + residual)
        self.linear.observe((1.0, tokens, context), seconds)
        self._coefficients = tuple(self.linear.coefficients.tolist())
        self._step += steps
        self._measure(tokens, context, seconds)
        return seconds

    def _measure(self, tokens: int, context: int, seconds: float) -> None:
        size = min(round(PER_OCTAVE * log2(tokens)), SIZES - 1)
        if self._step - self._steps[size] > FRESH:
            self._windows[size] = deque(maxlen=WINDOW)
        window = self._windows[size]
        if len(window) == WINDOW and self._step - self._steps[size] < EVERY:
            return
        self._steps[size] = self._step
        window.append((seconds, tokens, context))
        self._medians[:, size] = sorted(window)[len(window) // 2]
        self._told += 1
        if self.ready and (self._told < SETTLED or self._told % EVERY == 0):
            self._compare()

    def _compare(self) -> None:
        """Where, and by how much, the fresh measurements differ from the linear model."""
        fresh = np.exp((self._steps - self._step) / FRESH)
        sizes = np.flatnonzero(fresh > LEAST_FRESH)
        seconds, tokens, context = self._medians[:, sizes]
        fixed, each, distant = self._coefficients
        line = np.maximum(fixed + each * tokens + distant * context, LEAST_SECONDS)
        self._where = tokens.tolist()
        self._factor = (1.0 + fresh[sizes] * (seconds / line - 1.0)).tolist()
