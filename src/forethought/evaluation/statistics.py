"""Statistics of an evaluation: intervals, paired comparisons, pass@k, coverage, a sequential test.

=======================  =========================================================================
``Proportion``           a share of right answers, with the score interval of Wilson (1927)
``clustered_interval``   the same where each problem was attempted several times: attempts at one
                         problem are no independent observations (Miller, "Adding Error Bars to
                         Evals", 2024, arXiv 2411.00640)
``compare_pairs``        two methods on the same problems: exact test and interval of the difference
``SequentialTest``       the same test, valid however often and whenever it is looked at
``pass_at_k``            Chen et al., "Evaluating Large Language Models Trained on Code", 2021
``CoverageFit``          how pass@k grows: Brown et al., "Large Language Monkeys", 2024, arXiv
                         2407.21787
``pareto_front``         what no other point beats in both cost and value
=======================  =========================================================================

Outcomes are booleans, or 0 and 1. Plain Python.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from forethought.errors import ParameterError

CONFIDENCE = 0.95


def _quantile(confidence: float) -> float:
    """Half the width of the central interval of a standard normal variable."""
    return NormalDist().inv_cdf(0.5 + confidence / 2)


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

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """The score interval of Wilson (1927): accurate for few trials and shares near 0 or 1."""
        z = _quantile(confidence)
        n, p = self.trials, self.value
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        low = 0.0 if self.successes == 0 else centre - half
        high = 1.0 if self.successes == n else centre + half
        return low, high


def clustered_error(clusters: Sequence[Sequence[float]]) -> float:
    """Standard error of the mean of all values, which are independent between clusters only.

    ``sqrt(C / (C - 1) * sum over clusters of (sum of the deviations in it)^2) / n`` for n values in
    C clusters. With one value per cluster it is the usual standard error of a mean. It is Miller's
    but for the factor ``C / (C - 1)``, without which few clusters give too small an error.

    Args:
        clusters: at least two, none of them empty.
    """
    count = sum(map(len, clusters))
    mean = math.fsum(map(math.fsum, clusters)) / count
    squares = math.fsum(math.fsum(value - mean for value in one) ** 2 for one in clusters)
    return math.sqrt(len(clusters) / (len(clusters) - 1) * squares) / count


def clustered_interval(
    clusters: Sequence[Sequence[bool]], confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Interval of the share of right answers, where each problem was attempted several times.

    The mean and its ``clustered_error`` as a normal interval, cut to [0, 1]. Where that has no
    width, because all clusters agree, it is Wilson's for as many trials as there are clusters.

    Args:
        clusters: outcomes of the attempts at each problem.
        confidence: that it holds the true share.
    """
    values = [[float(outcome) for outcome in one] for one in clusters]
    mean = math.fsum(map(math.fsum, values)) / sum(map(len, values))
    error = clustered_error(values) if len(values) > 1 else 0.0
    if error == 0.0:
        return Proportion(round(mean * len(values)), len(values)).interval(confidence)
    half = _quantile(confidence) * error
    return max(0.0, mean - half), min(1.0, mean + half)


# ---- two methods on the same problems ------------------------------------------------------------


def mcnemar(num_first: int, num_second: int) -> float:
    """The exact two-sided test of McNemar: p-value of the discordant pairs.

    If two methods are equally good, each problem that exactly one of them solves is as likely
    solved by one as by the other: the binomial test of 1/2, doubled tail.

    Args:
        num_first: problems that only the first method solves.
        num_second: problems that only the second solves.
    """
    count, fewer = num_first + num_second, min(num_first, num_second)
    tail = sum(math.comb(count, number) for number in range(fewer + 1))
    return min(1.0, tail / 2 ** (count - 1)) if count else 1.0


def sign_flip(differences: Sequence[int]) -> float:
    """The exact two-sided sign-flip test that differences have no preferred sign.

    If two methods are equally good, the difference between their right answers to a problem is as
    likely ``d`` as ``-d``. The p-value is the probability of a sum at least as far from 0 as the
    observed one. Of differences -1, 0 and 1 it is ``mcnemar``.
    """
    observed = abs(sum(differences))
    counts = {0: 1}
    for size, number in Counter(abs(value) for value in differences if value).items():
        grown: Counter[int] = Counter()
        for total, ways in counts.items():
            for positive in range(number + 1):
                change = size * (2 * positive - number)
                grown[total + change] += ways * math.comb(number, positive)
        counts = dict(grown)
    far = sum(ways for total, ways in counts.items() if abs(total) >= observed)
    return far / sum(counts.values())


def difference_interval(
    differences: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Interval of the mean of paired differences in [-1, 1].

    The normal interval after one pair has been added that favours each side, which keeps it honest
    where few pairs or none are discordant (Bonett and Price, "Adjusted Wald Confidence Interval for
    a Difference of Binomial Proportions Based on Paired Data", 2012).

    Args:
        differences: one for each problem: second method less first.
        confidence: that it holds the true difference.
    """
    count = len(differences) + 2
    mean = math.fsum(differences) / count
    squares = (math.fsum(value * value for value in differences) + 2) / count
    half = _quantile(confidence) * math.sqrt((squares - mean * mean) / count)
    return max(-1.0, mean - half), min(1.0, mean + half)


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """A method against the first one on the same problems."""

    baseline: str
    """Name of the first method."""
    num_better: int
    """Problems that this method solves more often."""
    num_worse: int
    difference: float
    """Mean over problems of its share of right answers less the baseline's."""
    interval: tuple[float, float]
    """95 % confidence interval of the difference."""
    p: float
    test: str
    """``"mcnemar"``, ``"sign flip"`` (several attempts at a problem) or ``"sequential"``."""

    def to_dict(self) -> dict[str, object]:
        """Plain values."""
        return {
            "paired_baseline": self.baseline,
            "paired_better": self.num_better,
            "paired_worse": self.num_worse,
            "paired_difference": round(self.difference, 4),
            "paired_difference_ci": [round(bound, 4) for bound in self.interval],
            "paired_p": float(f"{self.p:.4g}"),
            "paired_test": self.test,
        }


def compare_pairs(
    baseline: str, first: Sequence[Sequence[bool]], second: Sequence[Sequence[bool]]
) -> PairedComparison:
    """Compare two methods problem by problem.

    Args:
        baseline: name of the first method.
        first: its outcomes: of each problem those of all attempts, as many for every problem.
        second: outcomes of the other method on the same problems.
    """
    counts = [sum(b) - sum(a) for a, b in zip(first, second, strict=True)]
    num_attempts = len(first[0])
    shares = [count / num_attempts for count in counts]
    num_better, num_worse = (sum(sign * count > 0 for count in counts) for sign in (1, -1))
    single = num_attempts == 1
    return PairedComparison(
        baseline,
        num_better,
        num_worse,
        math.fsum(shares) / len(shares),
        difference_interval(shares),
        mcnemar(num_worse, num_better) if single else sign_flip(counts),
        "mcnemar" if single else "sign flip",
    )


class SequentialTest:
    """An anytime-valid McNemar test: an e-process that bets on the discordant pairs.

    If two methods are equally good, each discordant pair falls to either with probability 1/2,
    whatever came before. A gambler who stakes on "the second method wins" with odds for probability
    q multiplies the capital by 2q or 2(1 - q) per pair: a nonnegative martingale. The mean of the
    capital over q uniform in [0, 1] is one, too: after n discordant pairs, w of them for the second
    method,

        E = 2^n * integral of q^w (1 - q)^(n - w) dq = 2^n / ((n + 1) * C(n, w)).

    By Ville's inequality E ever reaches ``1 / level`` with probability ``level`` at most, however
    often it is tested. Repeated p-values keep no such promise.

    The pairs must come in an order that does not depend on their outcomes: that of the problems,
    not that in which they are finished.

    Args:
        level: probability of a wrong decision, if both are equally good.

    Attributes:
        num_better: discordant pairs so far that the second method wins.
        num_worse: those that it loses.
        most: the largest E so far.
    """

    def __init__(self, level: float = 1 - CONFIDENCE) -> None:
        if not 0 < level < 1:
            raise ParameterError("invalid level", f"got {level}", "Give one between 0 and 1")
        self.level = level
        self.num_better = self.num_worse = 0
        self.most = 1.0

    def add(self, first: bool, second: bool) -> None:
        """Add the outcomes of the next problem."""
        self.num_better += second and not first
        self.num_worse += first and not second
        self.most = max(self.most, self.evidence)

    @property
    def evidence(self) -> float:
        """The e-value E after the pairs so far."""
        count = self.num_better + self.num_worse
        ways = math.lgamma(count + 1) - sum(
            math.lgamma(number + 1) for number in (self.num_better, self.num_worse)
        )
        return math.exp(min(700.0, count * math.log(2) - math.log(count + 1) - ways))

    @property
    def p(self) -> float:
        """An anytime-valid p-value: at most x with probability x at most."""
        return min(1.0, 1 / self.most)

    @property
    def is_decided(self) -> bool:
        """Whether one of the two is better, at this level."""
        return self.most >= 1 / self.level


# ---- several samples of a problem ----------------------------------------------------------------


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k samples is right.

    ``1 - C(n - c, k) / C(n, k)``: the share of the choices of k among the n samples that hold one
    of the c right ones.

    Raises:
        ParameterError: ``k`` is not within ``1..num_samples``, or the counts are impossible.
    """
    Proportion(num_correct, num_samples)
    if not 1 <= k <= num_samples:
        raise ParameterError(
            f"cannot estimate pass@{k}",
            f"there are {num_samples} samples",
            f"Draw at least {max(1, k)}",
        )
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def mean_pass_at_k(outcomes: Sequence[Sequence[bool]]) -> dict[int, float]:
    """pass@k over all problems for k = 1, 2, 4, ... and the number of samples.

    Args:
        outcomes: of the samples of each problem, as many for every problem.
    """
    count = len(outcomes[0])
    sizes = [*(2**power for power in range(count.bit_length()) if 2**power < count), count]
    return {
        k: math.fsum(pass_at_k(count, sum(one), k) for one in outcomes) / len(outcomes)
        for k in sizes
    }


@dataclass(frozen=True, slots=True)
class CoverageFit:
    """pass@k as ``exp(a * k^b)`` with a < 0: the power law of Large Language Monkeys."""

    a: float
    b: float

    def predict(self, k: float) -> float:
        """pass@k for any number of samples; beyond those of the fit an extrapolation."""
        return math.exp(self.a * k**self.b)

    @classmethod
    def of(cls, coverage: Mapping[int, float]) -> CoverageFit | None:
        """Fit the power law to pass@k.

        It is a line, ``log(-log c) = log(-a) + b log k``, fitted by least squares with the weights
        ``(c log c)^2``, which make a residual there the residual of c itself, to first order.

        Args:
            coverage: pass@k by k; values of 0 and 1 have no place on the line and are left out.

        Returns:
            None if fewer than two values are left.
        """
        points = [
            (math.log(k), math.log(-math.log(c)), (c * math.log(c)) ** 2)
            for k, c in coverage.items()
            if 0 < c < 1
        ]
        if len(points) < 2:
            return None
        total = math.fsum(w for _, _, w in points)
        x_mean = math.fsum(w * x for x, _, w in points) / total
        y_mean = math.fsum(w * y for _, y, w in points) / total
        spread = math.fsum(w * (x - x_mean) ** 2 for x, _, w in points)
        slope = math.fsum(w * (x - x_mean) * (y - y_mean) for x, y, w in points) / spread
        return cls(-math.exp(y_mean - slope * x_mean), slope)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the (cost, value) points that no other beats: none is at most as costly and at
    least as good, and better in one of the two. By rising cost; of equal points the first.
    """
    order = sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1], i))
    front: list[int] = []
    for index in order:
        if not front or points[index][1] > points[front[-1]][1]:
            front.append(index)
    return front
