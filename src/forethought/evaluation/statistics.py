"""Numbers with their uncertainty. Knows nothing about models or methods."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from forethought.errors import ParameterError


@dataclass(frozen=True, slots=True)
class Proportion:
    """How many of how many, such as right answers of all problems.

    Raises:
        ParameterError: no trials, or successes outside ``0..trials``.
    """

    successes: int
    trials: int

    def __post_init__(self) -> None:
        if self.trials < 1 or not 0 <= self.successes <= self.trials:
            raise ParameterError(
                "invalid proportion",
                f"got {self.successes} of {self.trials}",
                "Count at least one trial, and successes from 0 to the trials",
            )

    @property
    def value(self) -> float:
        """The observed share, in [0, 1]."""
        return self.successes / self.trials

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """The score interval of Wilson (1927): honest for few trials and for shares near 0 or 1."""
        z = NormalDist().inv_cdf(0.5 + confidence / 2)
        n, p = self.trials, self.value
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        low = 0.0 if self.successes == 0 else centre - half
        high = 1.0 if self.successes == n else centre + half
        return low, high
