"""Predicted step times: linear models fitted online, and measured times where there are any.

``LinearLatency`` is recursive least squares with exponential forgetting and three changes. Errors
are relative to the prediction, since noise grows with the time. A residual counts for at most a few
times the usual one, so that an outlier moves little. And along each axis a little information is
never forgotten, so that a thousand steps of one kind neither erase the others nor leave the fit
dominated by the next step.

``age`` discounts what was learned by the steps that have passed without an observation, so a time
that was measured long ago, while something else ran perhaps, gives way to the next one.

``ForwardLatency`` is the time of a step with one forward of the target: c0 + c1 tokens + c2 context
+ c3 calls where a size was not measured. Of n steps that are one call of the engine, each is 1/n of
a call; the last term is what the host does around each. Processors are not linear: the time is flat
until their units are busy and jumps at tile borders. So a measurement outweighs the model at its
size and, in proportion, between measured sizes, for as long as it is recent.

``Slowdown`` is what other processes on the machine do to all of these times alike.
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
AGE_KEEPS = 0.998
"""Weight that the fit keeps per step without an observation."""
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
        self._weight = 0.0  # of all observations that the fit is based on
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

    def age(self, num_steps: float) -> None:
        """Let what was learned age by steps without an observation.

        What is left weighs as much as one observation, so the next one moves the fit by half, and
        what is taken for an outlier is as it was at first.
        """
        discount = AGE_KEEPS**num_steps
        if self._weight > 1.0:
            factor = max(discount, 1.0 / self._weight)
            self._information *= factor
            self._weight *= factor
        self._usual = max(self._usual, (1.0 - discount) * FIRST_RESIDUAL)

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
        is_known = self.observations > SETTLED and self._weight > FIRST
        if is_known and self.observations % EVERY:
            return usual
        self._usual = max(LEAST_RESIDUAL, 0.9 * self._usual + 0.1 * abs(clipped))
        row = np.asarray(terms, np.float64) / predicted
        self._information *= 1.0 - self._forgotten
        self._weight = (1.0 - self._forgotten) * self._weight + 1.0
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


RECENT = 3
"""Calls of which the median counts, so that a pause of the machine in one of them does not."""
UNEXPECTED = 1.1
"""How many times as slow as before drafts must be for their slowness to be put to the test."""
MUCH_FASTER = 1.5
"""How many times as fast: other processes may have ended."""


FIRST_RATIO = 2.0
"""Most that is believed of the first call with drafts, of which a pause cannot be told."""


class RecentMedian:
    """The median of the last few values, the lower one of two."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=RECENT)

    @property
    def value(self) -> float | None:
        """None where nothing was observed."""
        values = sorted(self._values)
        return values[(len(values) - 1) // 2] if values else None

    def observe(self, value: float) -> float:
        """Record a value; returns the median."""
        self._values.append(value)
        return sorted(self._values)[(len(self._values) - 1) // 2]

    def scale(self, factor: float) -> None:
        """Multiply all values."""
        self._values = deque((factor * value for value in self._values), maxlen=RECENT)

    def clear(self) -> None:
        """Forget all values."""
        self._values.clear()


class Slowdown:
    """How many times as long as predicted everything takes, as other processes run.

    Plain steps alone show it. While there are drafts, plain steps are rare; then a plain step
    moves it no further than to what drafts, or the plain steps before it, show: neither drafts that
    become dearer nor a pause in one plain step are taken for it. Drafts that become slower, or much
    faster, are believed only after a plain step has been made since.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        """Measured over predicted seconds."""
        self.is_doubtful = False
        """Whether drafts took another time than before, and no plain step was made since."""
        self._plain, self._drafted = RecentMedian(), RecentMedian()
        self._believed: float | None = None  # of drafts, relative to the factor

    def observe_plain(self, ratio: float, is_drafting: bool) -> None:
        """Record measured over predicted seconds of a call without drafts."""
        is_first = self._plain.value is None
        usual = self._plain.observe(ratio)
        self._believed, self.is_doubtful = None, False
        if not is_drafting:
            self.factor = usual
        elif (drafted := self._drafted.value) is not None:
            before = self.factor
            for witness in (drafted * before, before if is_first else usual):
                low, high = sorted((ratio, witness))
                self.factor = min(max(self.factor, low), high)
            self._drafted.scale(before / self.factor)

    def observe_drafted(self, ratio: float) -> float:
        """Record measured over predicted seconds of a call with drafts; returns what is believed,
        relative to the factor.
        """
        is_first = self._drafted.value is None
        usual = self._drafted.observe(ratio / self.factor)
        if is_first:
            return min(usual, FIRST_RATIO)
        if self._believed is None:
            self._believed = usual
        change = usual / self._believed
        self.is_doubtful = not 1.0 / MUCH_FASTER < change < UNEXPECTED
        return self._believed if self.is_doubtful else usual

    def forget(self) -> None:
        """What was measured is long ago."""
        self._plain.clear()
        self._drafted.clear()
        self._believed, self.is_doubtful = None, False


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

    def age(self, num_steps: int) -> None:
        """Let what was measured age by steps without an observation."""
        self._step += num_steps
        self.linear.age(num_steps)
        discount = AGE_KEEPS**num_steps
        self._usual = max(self._usual, (1.0 - discount) * FIRST_RESIDUAL)

    def _measure(self, tokens: float, context: float, calls: float, seconds: float) -> None:
        size = min(round(PER_OCTAVE * log2(tokens)), SIZES - 1)
        if self._step - self._steps[size] > FRESH:
            self._windows[size] = deque(maxlen=WINDOW)
        window = self._windows[size]
        while window and self._step - window[0][-1] > FRESH:
            window.popleft()
        if len(window) == WINDOW and self._step - self._steps[size] < EVERY:
            return
        self._steps[size] = self._step
        window.append((seconds, tokens, context, calls, self._step))
        excess = sorted(window, key=lambda sample: sample[0] / self._line(*sample[1:4]))
        self._medians[:, size] = excess[len(window) // 2][:4]
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
