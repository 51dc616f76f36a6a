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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from forethought.errors import ParameterError
from forethought.evaluation.generated.countdown import (
    BACK,
    FOUND,
    Numbers,
    Problem,
    Step,
    expression,
    moves,
    nearest,
    reachable,
)

UNSURE = "hmm"
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


def write_bounded(
    problem: Problem, rng: random.Random, longest: int, avoid: Sequence[Step] = ()
) -> tuple[Trace, bool]:
    """A search of about ``longest`` lines; whether it hit, else the answer is what came nearest.

    Args:
        problem: its target may be out of reach.
        rng: decides the order.
        longest: lines after which no further first step is tried.
        avoid: first steps that are not tried, unless there are no others.
    """
    search = _Search(problem.target, rng, longest, avoid)
    steps = search.run(problem.numbers, TRIES if len(problem.numbers) > 3 else None)
    best_steps = search.nearest if steps is None else steps
    return Trace("".join(search.lines), expression(best_steps)), steps is not None


@dataclass(frozen=True, slots=True)
class SearchBranch:
    """A search below one first step."""

    first: Step
    text: str
    """Its lines."""
    steps: tuple[Step, ...]
    """What hits the target, or else what came nearest."""
    hits: bool


def branches(problem: Problem, rng: random.Random) -> Iterator[SearchBranch]:
    """The searches below each first step, in the order in which a search tries them."""
    search = _Search(problem.target, rng)
    for step, remaining in search.ordered(problem.numbers):
        search.lines, search.nearest = [], []
        solution = search.try_step(step, remaining, TRIES)
        steps = search.nearest if solution is None else [step, *solution]
        yield SearchBranch(step, "".join(search.lines), tuple(steps), solution is not None)


class _Search:
    """One depth-first search and the lines that it writes."""

    def __init__(
        self,
        target: int,
        rng: random.Random,
        longest: int = LONGEST_SEARCH,
        avoid: Sequence[Step] = (),
    ) -> None:
        self.target, self.rng, self.longest, self.avoid = target, rng, longest, avoid
        self.lines: list[str] = []
        self.nearest: list[Step] = []
        self._path: list[Step] = []

    def run(self, numbers: Numbers, tries: tuple[int, ...] | None) -> list[Step] | None:
        """The steps found among the first few moves from ``numbers``; None: tries: all moves.

        ``tries`` are the numbers of moves, of which one is drawn for each state below the first.
        """
        if len(numbers) == 2:
            return self._last(numbers, "")
        ordered = self.ordered(numbers)
        fresh = [move for move in ordered if move[0] not in self.avoid]
        for step, remaining in fresh or ordered:
            if len(self.lines) >= self.longest:
                return None
            solution = self.try_step(step, remaining, tries)
            if solution is not None:
                return [step, *solution]
        return None

    def try_step(
        self, step: Step, remaining: Numbers, tries: tuple[int, ...] | None
    ) -> list[Step] | None:
        """The steps found after ``step``, which leaves ``remaining``; None: nothing hits."""
        self._path.append(step)
        solution = self._below(step, remaining, tries)
        self._path.pop()
        return solution

    def _below(
        self, step: Step, remaining: Numbers, tries: tuple[int, ...] | None
    ) -> list[Step] | None:
        if len(remaining) == 2:
            return self._last(remaining, f"{step}, ")
        self.lines.append(f"{step}, left {' '.join(map(str, remaining))}\n")
        for below, rest in self.ordered(remaining)[: self.rng.choice(tries or TRIES)]:
            solution = self.try_step(below, rest, tries)
            if solution is not None:
                return [below, *solution]
        self.lines.append(f"{BACK}\n")
        return None

    def _last(self, pair: Numbers, before: str) -> list[Step] | None:
        step = nearest(pair, self.target)
        hit = step.value == self.target
        if not self.nearest or self._misses(step) < self._misses(self.nearest[-1]):
            self.nearest = [*self._path, step]
        self.lines.append(f"{before}{step}, {FOUND if hit else BACK}\n")
        return [step] if hit else None

    def _misses(self, step: Step) -> int:
        return abs(step.value - self.target)

    def ordered(self, numbers: Numbers) -> list[tuple[Step, Numbers]]:
        """The moves, each drawn with weight ``(1 + distance) ** -GREED`` from those that remain."""

        def appeal(move: tuple[Step, Numbers]) -> float:
            noise = -math.log(-math.log(self.rng.random() or 0.5))  # of a Gumbel distribution
            return noise - GREED * math.log(1 + distance(tuple(sorted(move[1])), self.target))

        return sorted(moves(numbers), key=appeal, reverse=True)


@lru_cache(maxsize=200_000)
def distance(numbers: Numbers, target: int) -> int:
    """How near to the target any search from ``numbers`` comes."""
    if len(numbers) == 2:
        return abs(nearest(numbers, target).value - target)
    return min(distance(tuple(sorted(remaining)), target) for _, remaining in moves(numbers))
