"""Countdown problems: numbers, a target, and the exact solver; split into training and test.

A problem asks for an expression that makes the target out of the numbers with ``+ - * /``. Every
problem drawn here has a solution that uses each number exactly once and whose intermediate results
are whole numbers from 1 to ``LARGEST``. Which side of the split it is on is a function of its
numbers (as a multiset) and target alone (:func:`is_held_out`).
"""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

SIZES = (3, 4)
HIGHEST_NUMBER = 20
TARGETS = range(10, 101)
LARGEST = 200
BACK, FOUND = "back", "yes"
"""The last words of the lines of a search that gives up a branch, and of one that hits."""

Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """Numbers in the order in which the question names them, and what to make of them."""

    numbers: Numbers
    target: int

    @property
    def question(self) -> str:
        """The question in the words of the shipped problems."""
        return question_text(self)


@dataclass(frozen=True, slots=True)
class Step:
    """Two of the numbers combined: ``left sign right = value``; ``left`` is not the smaller."""

    left: int
    sign: str
    right: int
    value: int

    def __str__(self) -> str:
        return f"{self.left} {self.sign} {self.right} = {self.value}"


QUESTIONS = (
    "Use {first} and {last} to make {target}.",
    "Make {target} out of {first} and {last}.",
    "Using the numbers {first}, {last}, create an equation that equals {target}.",
    "Use the numbers [{first}, {last}] to get {target}.",
)


def question_text(problem: Problem, wording: str = QUESTIONS[0]) -> str:
    """The question in one of the ``QUESTIONS``."""
    *first, last = map(str, problem.numbers)
    return wording.format(first=", ".join(first), last=last, target=problem.target)


def combine(one: int, other: int) -> Iterator[Step]:
    """Every step with two numbers whose value is whole and within 1 to ``LARGEST``.

    Dividing by 1 is left out, since multiplying by 1 gives the same.
    """
    left, right = max(one, other), min(one, other)
    if left + right <= LARGEST:
        yield Step(left, "+", right, left + right)
    if left > right:
        yield Step(left, "-", right, left - right)
    if left * right <= LARGEST:
        yield Step(left, "*", right, left * right)
    if right > 1 and left % right == 0:
        yield Step(left, "/", right, left // right)


def moves(numbers: Numbers) -> Iterator[tuple[Step, Numbers]]:
    """Every step with two of the numbers, and the remaining numbers after it, its value last.

    Steps that leave the same multiset of numbers are yielded once.
    """
    keys = set[Numbers]()
    for j in range(len(numbers)):
        for i in range(j):
            rest = (*numbers[:i], *numbers[i + 1 : j], *numbers[j + 1 :])
            for step in combine(numbers[i], numbers[j]):
                numbers_left = (*rest, step.value)
                key = tuple(sorted(numbers_left))
                if key not in keys:
                    keys.add(key)
                    yield step, numbers_left


def reachable(numbers: Numbers) -> frozenset[int]:
    """Every value that can be made of all the numbers, by whole numbers up to ``LARGEST``."""
    return _reachable(tuple(sorted(numbers)))


@lru_cache(maxsize=100_000)
def _reachable(numbers: Numbers) -> frozenset[int]:
    if len(numbers) == 1:
        return frozenset(numbers)
    return frozenset().union(*(reachable(numbers_left) for _, numbers_left in moves(numbers)))


def solve(problem: Problem) -> tuple[Step, ...] | None:
    """Steps that make the target of all the numbers; None where there are none in whole numbers."""
    return _solve(problem.numbers, problem.target)


def _solve(numbers: Numbers, target: int) -> tuple[Step, ...] | None:
    if target not in reachable(numbers):
        return None
    if len(numbers) == 1:
        return ()
    for step, numbers_left in moves(numbers):
        following = _solve(numbers_left, target)
        if following is not None:
            return (step, *following)
    raise AssertionError("a reachable target has steps")


def expression(steps: Sequence[Step]) -> str:
    """The steps as one expression; operands that are no numbers of the problem in parentheses."""
    operands: list[tuple[int, str]] = []

    def operand(value: int) -> str:
        for index in range(len(operands) - 1, -1, -1):
            if operands[index][0] == value:
                return f"({operands.pop(index)[1]})"
        return str(value)

    for step in steps:
        left, right = operand(step.left), operand(step.right)
        operands.append((step.value, f"{left}{step.sign}{right}"))
    return operands[-1][1]


def nearest(pair: Numbers, target: int) -> Step:
    """The step with the last two numbers whose value is nearest to the target."""
    return min(combine(*pair), key=lambda step: abs(step.value - target))


def is_held_out(problem: Problem) -> bool:
    """True for the one multiset of numbers and target in sixteen that is never trained on."""
    key = f"{sorted(problem.numbers)}:{problem.target}"
    return hashlib.blake2b(key.encode(), digest_size=1).digest()[0] < 16


def sample_problem(rng: random.Random, size: int, *, held_out: bool = False) -> Problem:
    """Draw a problem of ``size`` numbers from one side of the split; it depends on rng alone."""
    while True:
        numbers = tuple(rng.randint(1, HIGHEST_NUMBER) for _ in range(size))
        targets = sorted(reachable(numbers).intersection(TARGETS).difference(numbers))
        if targets:
            problem = Problem(numbers, rng.choice(targets))
            if is_held_out(problem) == held_out:
                return problem


def fixed_test_problems(count: int = 150, seed: int = 2026) -> list[Problem]:
    """The test set: distinct held-out problems, ``count`` of each size; by default the shipped."""
    rng, problems = random.Random(seed), dict[tuple[Numbers, int], Problem]()
    for index, size in enumerate(SIZES, start=1):
        while len(problems) < count * index:
            problem = sample_problem(rng, size, held_out=True)
            problems.setdefault((tuple(sorted(problem.numbers)), problem.target), problem)
    return list(problems.values())
