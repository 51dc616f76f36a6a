r"""Attempts at countdown problems, and checks of their answers.

An attempt is a search that ends after ``LONGEST`` lines, also without a hit: its answer is then the
expression that came nearest, in the same words as a right one. So answers can be wrong, and a check
tells::

    Use 20, 9, 12 and 17 to make 13.     \boxed{(20+17)/(12-9)}

    numbers 20 17 12 9, all
    20 + 17 = 37, 12 - 9 = 3, 37 / 3 = ?, wrong
"""

import ast
import operator
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from countdown.traces import Trace, write_bounded
from forethought.evaluation.generated.countdown import (
    HIGHEST_NUMBER,
    QUESTIONS,
    Problem,
    Step,
    moves,
    question_text,
    sample_problem,
)

LONGEST = 8
"""Lines of a search after which no further first step is tried."""
ALL, RIGHT, WRONG = "all", "right", "wrong"
_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@dataclass(frozen=True, slots=True)
class Attempt:
    """A problem as it was asked, with a search and its answer."""

    problem: Problem
    question: str
    trace: Trace
    is_right: bool

    @property
    def answer(self) -> str:
        """The text after the thought."""
        return f"The answer is \\boxed{{{self.trace.answer}}}."

    @property
    def first_steps(self) -> list[Step]:
        """The first steps that its search has written, also where they came later."""
        return first_steps(self.problem, self.trace.search)

    def again(self, rng: random.Random) -> "Attempt":
        """Another attempt, which tries other first steps; a right answer is given again."""
        if self.is_right:
            return Attempt(self.problem, self.question, Trace("", self.trace.answer), True)
        trace, hits = write_bounded(self.problem, rng, LONGEST, self.first_steps)
        return Attempt(self.problem, self.question, trace, hits)


def sample_attempt(rng: random.Random, size: int | None = None) -> Attempt:
    """A new attempt at a training problem, of four numbers four times in five."""
    problem = sample_problem(rng, size or (3 if rng.random() < 0.2 else 4))
    return attempt_at(problem, question_text(problem, rng.choice(QUESTIONS)), rng)


def attempt_at(problem: Problem, question: str, rng: random.Random) -> Attempt:
    """A new attempt at a problem."""
    trace, hits = write_bounded(problem, rng, LONGEST)
    return Attempt(problem, question, trace, hits)


def sample_answer(rng: random.Random, problem: Problem, question: str) -> Attempt:
    """An answer without its search: of an attempt, or a right or a spoilt one."""
    attempt = attempt_at(problem, question, rng)
    if rng.random() < 0.25:
        spoilt = spoil(attempt.trace.answer, rng)
        is_right = check(problem, spoilt).is_right
        return Attempt(problem, question, Trace("", spoilt), is_right)
    return attempt


def first_steps(problem: Problem, search: str) -> list[Step]:
    """The first steps of a problem that stand at the beginning of a line of a search."""
    by_text = {str(step): step for step, _ in moves(problem.numbers)}
    begun = (re.split(r", ", line, maxsplit=1)[0] for line in search.splitlines())
    return [by_text[text] for text in begun if text in by_text]


def spoil(expression: str, rng: random.Random) -> str:
    """The expression with another number or another sign in it."""
    if rng.random() < 0.5:
        match = rng.choice(list(re.finditer(r"\d+", expression)))
        other = str(rng.randint(1, HIGHEST_NUMBER))
    else:
        match = rng.choice(list(re.finditer(r"[-+*/]", expression)))
        other = rng.choice("+-*/")
    return f"{expression[: match.start()]}{other}{expression[match.end() :]}"


@dataclass(frozen=True, slots=True)
class Check:
    """What a check of an answer writes and finds."""

    text: str
    has_numbers: bool
    """Whether the expression has the numbers of the problem, each once."""
    value: Fraction | None
    """What it makes; None: nothing whole, or it was not calculated."""
    target: int

    @property
    def is_right(self) -> bool:
        """Whether it solves the problem."""
        return self.has_numbers and self.value == self.target

    @property
    def finding(self) -> str:
        """What it comes to, as a sentence."""
        if self.is_right:
            return f"It makes {self.target}."
        if not self.has_numbers:
            return "Its numbers are wrong."
        if self.value is None:
            return "It makes nothing whole."
        return f"It makes {self.value}, not {self.target}."

    @property
    def score(self) -> int:
        """A grade from 1 to 10: 10 is right, and from 6 down it is wrong, by its distance."""
        if self.is_right:
            return 10
        if not self.has_numbers or self.value is None:
            return 1
        return max(2, 7 - int(abs(self.value - self.target)))


def check(problem: Problem, expression: str) -> Check:
    """Check an answer to a problem."""
    used = [int(number) for number in re.findall(r"\d+", expression)]
    amiss = _amiss(Counter(used), Counter(problem.numbers))
    line = f"numbers {' '.join(map(str, used))}, {amiss or ALL}\n"
    if amiss:
        return Check(line, False, None, problem.target)
    steps, value = [], None
    for text, value in _steps(ast.parse(expression, mode="eval").body):
        steps.append(text)
        if value is None:
            break
    conclusion = RIGHT if value == problem.target else WRONG
    return Check(f"{line}{', '.join([*steps, conclusion])}\n", True, value, problem.target)


def _amiss(used: Counter[int], available: Counter[int]) -> str:
    if missing := sorted((available - used).elements()):
        return f"{missing[0]} is missing"
    if surplus := sorted((used - available).elements()):
        return f"{surplus[0]} is too much"
    return ""


def _steps(node: ast.expr) -> Iterator[tuple[str, Fraction | None]]:
    """The calculations of an expression, each with its value; None, and the last: not whole."""
    if not isinstance(node, ast.BinOp):
        return
    operands = []
    for side in (node.left, node.right):
        value: Fraction | None = None
        for text, value in _steps(side):
            yield text, value
            if value is None:
                return
        operands.append(Fraction(ast.literal_eval(side)) if value is None else value)
    left, right = operands
    sign = _SIGNS[type(node.op)]
    value = _OPERATIONS[sign](left, right) if right or sign != "/" else None
    if value is not None and (value.denominator != 1 or value < 0):
        value = None
    yield f"{left} {sign} {right} = {'?' if value is None else value}", value


def checks(problem: Problem, answers: Sequence[Attempt]) -> list[Check]:
    """The check of each answer."""
    return [check(problem, attempt.trace.answer) for attempt in answers]
