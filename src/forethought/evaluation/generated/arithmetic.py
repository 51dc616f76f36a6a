"""Arithmetic word problems: a seeded generator with a split into training and test problems.

A problem is a short story with its solution steps. Which side of the split it is on is a function
of its steps alone (:func:`is_held_out`): training and test problems never share a chain of
calculations, whatever the names and things in the story.

These are the problems of the shipped test set; ``questions`` has the other kinds.
"""

import hashlib
import random
from dataclasses import dataclass

# The problems of a seed, and so the shipped ones, depend on these two lists and on FAMILIES.
PEOPLE = (
    ("Tom", "he"), ("Ann", "she"), ("Sam", "he"), ("Eva", "she"), ("Ben", "he"), ("Mia", "she"),
    ("Max", "he"), ("Zoe", "she"),
)  # fmt: skip
THINGS = ("apples", "books", "coins", "cards", "pens", "shells", "stamps", "nuts")
LARGEST = 9999
MOST_STEPS = 8
SMALL = 20


@dataclass(frozen=True, slots=True)
class Step:
    """One calculation and the sentence of the story that asks for it."""

    reason: str
    left: int
    sign: str
    right: int

    @property
    def value(self) -> int:
        """The exact result; division steps are built without remainder."""
        return calculate(self.left, self.sign, self.right)


@dataclass(frozen=True, slots=True)
class Problem:
    """A question in words and the steps that answer it, in order."""

    family: str
    question: str
    steps: tuple[Step, ...]
    inputs: tuple[int | None, ...]
    """Two entries per step (left, right): the index of the step whose value the operand is; None:
    the number is in the story."""

    @property
    def answer(self) -> str:
        """The value of the last step, as digits."""
        return str(self.steps[-1].value)


def calculate(left: int, sign: str, right: int) -> int:
    """Value of ``left sign right`` for the signs ``+ - x /`` (whole division)."""
    if sign == "+":
        return left + right
    if sign == "-":
        return left - right
    return left * right if sign == "x" else left // right


def is_held_out(family: str, steps: tuple[Step, ...]) -> bool:
    """True for the one calculation chain in sixteen that is never trained on."""
    chain = family + "".join(f"|{s.left}{s.sign}{s.right}" for s in steps)
    return hashlib.blake2b(chain.encode(), digest_size=1).digest()[0] < 16


def sample_problem(rng: random.Random, *, held_out: bool = False) -> Problem:
    """Draw a problem from one side of the split; it depends on the state of rng alone."""
    while True:
        problem = rng.choice(FAMILIES)(rng)
        in_range = all(0 < step.value <= LARGEST for step in problem.steps)
        if in_range and is_held_out(problem.family, problem.steps) == held_out:
            return problem


def sample_calculation(rng: random.Random) -> tuple[int, str, int]:
    """A calculation ``(left, sign, right)`` of the sizes that occur in problems, value 1..9999."""
    while True:
        sign = rng.choice("++--xxx/")
        if sign in "+-":
            left, right = (rng.randint(2, rng.choice((99, 999, 4000)[:n])) for n in (3, 2))
        elif sign == "x":
            left, right = rng.randint(2, rng.choice((99, 99, 99, 300))), rng.randint(2, 9)
            if rng.random() < 0.5:
                left, right = rng.randint(6, 99), rng.randint(10, 99)
        else:
            right = rng.randint(2, 9)
            left = right * rng.randint(2, rng.choice((99, 240)))
        if 0 < calculate(left, sign, right) <= LARGEST:
            return left, sign, right


def sample_hard_calculation(rng: random.Random) -> tuple[int, str, int]:
    """A calculation of a kind that takes long to learn, value -99..9999.

    Differences of close numbers, some negative; sums and quotients of long ones; three digits
    times one.
    """
    while True:
        if rng.random() < 0.2:
            return rng.randint(0, 99), "-", rng.randint(0, 99)
        sign = rng.choice("----++/x")
        if sign == "-":
            right = rng.randint(1, rng.choice((99, 999, 999, 4000)))
            left = right + rng.randint(0, rng.choice((9, 99, 999)))
        elif sign == "+":
            left, right = rng.randint(2, rng.choice((999, 8000))), rng.randint(2, 999)
        elif sign == "/":
            right = rng.randint(2, 9)
            left = right * rng.randint(2, rng.choice((99, 999)))
        else:
            left, right = rng.randint(100, 999), rng.randint(2, 9)
        if max(left, calculate(left, sign, right)) <= LARGEST:
            return left, sign, right


def is_demanding(problem: Problem) -> bool:
    """True with three steps or more, or with a product of two numbers of two digits each."""
    products = (step for step in problem.steps if step.sign == "x")
    return len(problem.steps) > 2 or any(min(s.left, s.right) > 9 for s in products)


def fixed_test_problems(count: int = 200, seed: int = 2024) -> list[Problem]:
    """The test set: distinct held-out problems that are demanding; the shipped one by default.

    Easy problems are left out: the model solves nearly all of them at the first attempt, so they
    would not tell methods apart.
    """
    rng, questions = random.Random(seed), set[str]()
    problems: list[Problem] = []
    while len(problems) < count:
        problem = sample_problem(rng, held_out=True)
        if is_demanding(problem) and problem.question not in questions:
            questions.add(problem.question)
            problems.append(problem)
    return problems


def _person(rng: random.Random) -> tuple[str, str]:
    name, pronoun = rng.choice(PEOPLE)
    return name, pronoun.capitalize()


def _collection(rng: random.Random) -> Problem:
    (name, pronoun), things = _person(rng), rng.choice(THINGS)
    start = value = rng.randint(11, rng.choice((99, 300, 900)))
    steps: list[Step] = []
    for _ in range(rng.choice((2, 3, 3, 4))):
        sign = rng.choice("++--x" if value <= 240 else "--+")
        if sign == "x":
            factor = rng.randint(2, 9)
            steps.append(Step(f"{pronoun} now has {factor} times as many", value, "x", factor))
        elif sign == "+":
            amount = rng.randint(6, rng.choice((99, 300, 900)))
            verb = rng.choice(("buys", "finds", "gets"))
            steps.append(Step(f"{pronoun} {verb} {amount} more", value, "+", amount))
        else:
            amount = rng.randint(3, max(4, min(value - 1, rng.choice((99, 300, 900)))))
            verb = rng.choice(("uses", "sells", "loses"))
            steps.append(Step(f"{pronoun} {verb} {amount}", value, "-", amount))
        value = steps[-1].value
    story = "".join(f" {step.reason}." for step in steps)
    question = f"{name} has {start} {things}.{story} How many {things} does {name} have now?"
    return Problem("collection", question, tuple(steps), chained(len(steps)))


def _boxes(rng: random.Random) -> Problem:
    (name, pronoun), things = _person(rng), rng.choice(THINGS)
    boxes, size = rng.randint(3, rng.choice((9, 99, 99))), rng.randint(6, 99)
    steps = [Step(f"{boxes} boxes with {size} each", size, "x", boxes)]
    story = f"{name} buys {boxes} boxes with {size} {things} each."
    if rng.random() < 0.7:
        loose = rng.randint(5, rng.choice((99, 400)))
        story += f" {pronoun} finds {loose} more."
        steps.append(Step(f"{pronoun} finds {loose} more", steps[-1].value, "+", loose))
    if len(steps) == 1 or rng.random() < 0.6:
        loss = rng.randint(3, min(steps[-1].value - 1, rng.choice((99, 900))))
        verb = rng.choice(("uses", "sells", "loses"))
        story += f" {pronoun} {verb} {loss}."
        steps.append(Step(f"{pronoun} {verb} {loss}", steps[-1].value, "-", loss))
    question = f"{story} How many {things} does {name} have now?"
    return Problem("boxes", question, tuple(steps), chained(len(steps)))


def _shop(rng: random.Random) -> Problem:
    name, pronoun = _person(rng)
    first, second = rng.sample([thing for thing in THINGS if thing != "coins"], 2)
    price_1, price_2 = rng.randint(3, 60), rng.randint(3, 60)
    count_1, count_2 = rng.randint(2, rng.choice((9, 40, 40))), rng.randint(2, 9)
    steps = [
        Step(f"{count_1} {first} at {price_1} each", price_1, "x", count_1),
        Step(f"{count_2} {second} at {price_2} each", price_2, "x", count_2),
    ]
    steps.append(Step("Both together", steps[0].value, "+", steps[1].value))
    story = (
        f"{name} buys {count_1} {first} at {price_1} coins each"
        f" and {count_2} {second} at {price_2} coins each."
    )
    inputs: tuple[int | None, ...] = (None, None, None, None, 0, 1)
    if rng.random() < 0.5:
        purse = steps[2].value + rng.randint(5, 300)
        steps.append(Step(f"{pronoun} had {purse} coins", purse, "-", steps[2].value))
        question = f"{name} had {purse} coins. {story} How many coins does {name} have now?"
        inputs += (None, 2)
    else:
        question = f"{story} How many coins does {name} pay?"
    return Problem("shop", question, tuple(steps), inputs)


def _compare(rng: random.Random) -> Problem:
    (name, _), (other, _) = rng.sample(PEOPLE, 2)
    things, amount = rng.choice(THINGS), rng.randint(11, rng.choice((99, 300)))
    kind = rng.choice(("more", "fewer", "times"))
    if kind == "times":
        factor = rng.randint(2, rng.choice((9, 40)))
        comparison, step = f"{factor} times as many as {name}", Step("", amount, "x", factor)
    else:
        gap = rng.randint(4, max(5, min(amount - 3, 99)) if kind == "fewer" else 150)
        sign = "+" if kind == "more" else "-"
        comparison, step = f"{gap} {kind} than {name}", Step("", amount, sign, gap)
    steps = [Step(f"{other} has {comparison}", step.left, step.sign, step.right)]
    steps.append(Step("Both together", steps[0].value, "+", amount))
    story = f"{name} has {amount} {things}. {other} has {comparison}."
    inputs: tuple[int | None, ...] = (None, None, 0, None)
    if rng.random() < 0.5:
        loss = rng.randint(3, 99)
        story += f" They lose {loss}."
        steps.append(Step(f"They lose {loss}", steps[-1].value, "-", loss))
        inputs += (1, None)
    question = f"{story} How many {things} do they have together?"
    return Problem("compare", question, tuple(steps), inputs)


def _share(rng: random.Random) -> Problem:
    (name, pronoun), things = _person(rng), rng.choice(THINGS)
    friends, part = rng.randint(2, 9), rng.randint(4, rng.choice((99, 240)))
    total = friends * part
    first = rng.randint(2, total - 2)
    steps = [
        Step(f"{pronoun} buys {total - first} more", first, "+", total - first),
        Step(f"{friends} friends share them", total, "/", friends),
    ]
    story = f"{name} has {first} {things}. {steps[0].reason}. {steps[1].reason}."
    if rng.random() < 0.5:
        loss = rng.randint(2, max(3, part - 1))
        story += f" Each friend loses {loss}."
        steps.append(Step(f"Each friend loses {loss}", part, "-", loss))
    question = f"{story} How many {things} does each friend have?"
    return Problem("share", question, tuple(steps), chained(len(steps)))


def chained(count: int) -> tuple[int | None, ...]:
    """Inputs of a chain in which each step's left operand is the value of the step before."""
    return tuple(entry for i in range(count) for entry in (i - 1 if i else None, None))


FAMILIES = (_collection, _boxes, _boxes, _shop, _compare, _share)
"""The shipped mix, which :func:`sample_problem` draws from. Other kinds are in ``questions``."""
