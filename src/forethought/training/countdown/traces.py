"""Search traces: a depth-first search with backtracking, written as text.

Of three numbers, every line combines two of them, then the result with the third by the operation
that comes nearest to the target; a miss goes back::

    7 - 5 = 2, 3 * 2 = 6, back
    7 + 3 = 10, 10 * 5 = 50, yes

Of four numbers, a line first says what is left after one step; a few such lines follow, and where
none of them hits, that step is taken back as well::

    9 - 4 = 5, left 7 3 5
    7 - 5 = 2, 3 * 2 = 6, back
    back

Branches are tried in a random order that prefers those near the target, with a limited number of
tries below a step, and no trace is longer than ``LONGEST_SEARCH`` lines: one that found nothing by
then is drawn again. A model trained on such traces searches in another order in every sample.
"""

import math
import random
from dataclasses import dataclass
from functools import lru_cache

from forethought.errors import ParameterError
from forethought.training.countdown.problems import (
    Numbers,
    Problem,
    Step,
    combine,
    expression,
    moves,
    reachable,
)

UNSURE = "hmm"
BACK, FOUND = "back", "yes"
GREED = 0.3
TRIES = (3, 4, 5, 6)
LONGEST_SEARCH = 18


@dataclass(frozen=True, slots=True)
class Trace:
    """What follows ``<think>\\n``: the search, then the answer."""

    search: str
    answer: str
    """The expression found."""

    @property
    def text(self) -> str:
        """The whole trace, without the end token."""
        return f"{self.search}</think>\nThe answer is \\boxed{{{self.answer}}}."

    def guess_at(self, length: int) -> str:
        """What a solver who is stopped after ``length`` characters answers."""
        return self.answer if length >= len(self.search) else UNSURE


def write_trace(problem: Problem, rng: random.Random) -> Trace:
    """A search that ends with an expression.

    Raises:
        ParameterError: the target cannot be made of all the numbers.
    """
    if problem.target not in reachable(problem.numbers):
        raise ParameterError(
            "no search ends",
            f"{problem.target} cannot be made of {problem.numbers}",
            "Give a problem with a solution",
        )
    while True:
        search = _Search(problem.target, rng)
        steps = search.run(problem.numbers, TRIES if len(problem.numbers) > 3 else None)
        if steps is not None:
            return Trace("".join(search.lines), expression(steps))


class _Search:
    """One depth-first search and the lines that it writes."""

    def __init__(self, target: int, rng: random.Random) -> None:
        self.target, self.rng = target, rng
        self.lines: list[str] = []

    def run(self, numbers: Numbers, tries: tuple[int, ...] | None) -> list[Step] | None:
        """The steps found among the first few moves from ``numbers``; None: tries: all moves.

        ``tries`` are the numbers of moves, of which one is drawn for each state below the first.
        """
        if len(numbers) == 2:
            return self._last(numbers, "")
        for step, left in self._ordered(numbers):
            if len(self.lines) >= LONGEST_SEARCH:
                return None
            found = self._try(step, left, tries)
            if found is not None:
                return [step, *found]
        return None

    def _try(self, step: Step, left: Numbers, tries: tuple[int, ...] | None) -> list[Step] | None:
        if len(left) == 2:
            return self._last(left, f"{step}, ")
        self.lines.append(f"{step}, left {' '.join(map(str, left))}\n")
        for below, rest in self._ordered(left)[: self.rng.choice(tries or TRIES)]:
            found = self._try(below, rest, tries)
            if found is not None:
                return [below, *found]
        self.lines.append(f"{BACK}\n")
        return None

    def _last(self, pair: Numbers, before: str) -> list[Step] | None:
        step = nearest(pair, self.target)
        hit = step.value == self.target
        self.lines.append(f"{before}{step}, {FOUND if hit else BACK}\n")
        return [step] if hit else None

    def _ordered(self, numbers: Numbers) -> list[tuple[Step, Numbers]]:
        """The moves, each drawn with weight ``(1 + distance) ** -GREED`` from those that remain."""

        def appeal(move: tuple[Step, Numbers]) -> float:
            noise = -math.log(-math.log(self.rng.random() or 0.5))  # of a Gumbel distribution
            return noise - GREED * math.log(1 + distance(tuple(sorted(move[1])), self.target))

        return sorted(moves(numbers), key=appeal, reverse=True)


def nearest(pair: Numbers, target: int) -> Step:
    """The step with the last two numbers whose value is nearest to the target."""
    return min(combine(*pair), key=lambda step: abs(step.value - target))


@lru_cache(maxsize=200_000)
def distance(numbers: Numbers, target: int) -> int:
    """How near to the target any search from ``numbers`` comes."""
    if len(numbers) == 2:
        return abs(nearest(numbers, target).value - target)
    return min(distance(tuple(sorted(left)), target) for _, left in moves(numbers))
