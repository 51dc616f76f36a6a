"""Arithmetic questions: the shipped mix, and problems of other kinds.

The other kinds are chains of one to eight steps, stories of one step, stories that do not ask, and
bare sums. A story without its question is answered with the value that it ends in. Zero is an
answer like any other; the result is negative only in a difference of one step (``3 - 5``), never in
a story. Every problem follows the split of ``arithmetic.is_held_out``, except sums of one step with
small numbers, which are all trained on, as tables are learnt whole: both up to ``SMALL``, or the
second up to 10 and the result up to 100.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from forethought.evaluation.generated.arithmetic import (
    LARGEST,
    MOST_STEPS,
    PEOPLE,
    SMALL,
    THINGS,
    Problem,
    Step,
    chained,
    is_held_out,
    sample_calculation,
    sample_problem,
)

MORE_PEOPLE = (
    ("Lisa", "she"), ("John", "he"), ("Mary", "she"), ("Peter", "he"), ("Natalia", "she"),
    ("Alice", "she"), ("Bob", "he"), ("Maria", "she"), ("James", "he"), ("Emma", "she"),
    ("Liam", "he"), ("Olivia", "she"), ("Noah", "he"), ("Jane", "she"), ("David", "he"),
    ("Sara", "she"), ("Paul", "he"), ("Julia", "she"), ("Kim", "she"), ("Leo", "he"),
    ("Ali", "he"), ("Yuki", "she"), ("Carlos", "he"), ("Wei", "she"), ("Ivan", "he"),
    ("Janet", "she"), ("Mike", "he"), ("Ravi", "he"), ("Grace", "she"), ("Oscar", "he"),
)  # fmt: skip
MORE_THINGS = (
    "oranges", "balls", "marbles", "pears", "stones", "cakes", "eggs", "flowers", "toys", "cats",
    "dogs", "pencils", "stickers", "cookies", "candies", "bananas", "tickets", "letters", "keys",
    "balloons", "fish", "plates", "cups", "chairs", "hats", "roses", "beads", "buttons", "leaves",
    "dollars", "muffins", "photos", "bottles", "lemons", "birds", "cars",
)  # fmt: skip
SIGNS = {
    "+": ("+", "+", "+", "plus"),
    "-": ("-", "-", "-", "minus"),
    "x": ("*", "x", "\u00d7", "times", "multiplied by"),
    "/": ("/", "/", "\u00f7", "divided by"),
}
FRAMES = (
    "{}", "{}", "{}=", "{} =", "{} = ?", "{}?", "What is {}?", "What is {}?", "What is {}",
    "What's {}?", "How much is {}?", "Compute {}.", "Compute {}", "Calculate {}.", "Calculate {}",
    "Solve {}.", "Work out {}.", "Evaluate {}", "Tell me {}.", "Can you compute {}?",
    "What does {} make?", "Please calculate {}.", "{} equals", "What do you get for {}?",
    "Find {}.", "What is the result of {}?", "Hello! What is {}?", "Add up: {}",
)  # fmt: skip
IN_WORDS = {
    "+": ("Add {} and {}.", "What is the sum of {} and {}?", "Add {} to {}."),
    "-": ("What is the difference of {} and {}?", "Take {1} away from {0}.",
          "Subtract {1} from {0}."),
    "x": ("Multiply {} by {}.", "What is the product of {} and {}?", "Multiply {} and {}"),
    "/": ("Divide {} by {}.", "Share {} among {}."),
}  # fmt: skip
ASKED = (
    "How many {things} does {name} have?", "How many {things} are left?", "How many are there now?",
    "How many {things} does {name} have in the end?", "How many?", "What is the total?",
    "How many {things} now?",
)  # fmt: skip


def sample_varied(
    rng: random.Random, kind: str | None = None, *, held_out: bool = False
) -> Problem:
    """Draw a problem of one of ``KINDS`` (None: in their shares) from one side of the split."""
    draw = KINDS[kind][1] if kind else _any(rng)
    while True:
        problem = draw(rng)
        if _in_range(problem) and on_side(problem, held_out):
            return rename(problem, rng) if rng.random() < 0.4 else problem


def sample_mixed(rng: random.Random, *, held_out: bool = False) -> Problem:
    """A problem: one of the shipped mix for ``SHIPPED_SHARE`` of them."""
    if rng.random() < SHIPPED_SHARE:
        problem = sample_problem(rng, held_out=held_out)
        return rename(problem, rng) if rng.random() < 0.15 else problem
    return sample_varied(rng, held_out=held_out)


def sample_chain(rng: random.Random, count: int, *, held_out: bool = False) -> Problem:
    """A story of exactly ``count`` steps about one pile, from one side of the split."""
    while True:
        problem = _chain(rng, count)
        if _in_range(problem) and on_side(problem, held_out):
            return problem


def sample_larger(
    rng: random.Random, steps: Sequence[int] = range(4, 7), *, held_out: bool = False
) -> Problem:
    """A story of one of the numbers of ``steps``, four to six, with operands up to 3000.

    Traces that the generator writes have such operands in products alone, many derivations then go
    wrong: evaluations can tell methods apart there, unlike on the shipped problems, and samples of
    them teach re-checks.
    """
    while True:
        problem = _chain(rng, rng.choice(steps), largest=3000)
        if _in_range(problem) and on_side(problem, held_out):
            return problem


def on_side(problem: Problem, held_out: bool) -> bool:
    """Whether a problem is on that side of the split."""
    if problem.family == "sum" and len(problem.steps) == 1:
        step = problem.steps[0]
        if max(step.left, step.right) <= SMALL or (step.right <= 10 and step.value <= 100):
            return not held_out
    return is_held_out(problem.family, problem.steps) == held_out


def rename(problem: Problem, rng: random.Random) -> Problem:
    """The same problem about other people and things; the calculations stay as they are."""
    people = [p for p in PEOPLE if re.search(rf"\b{p[0]}\b", problem.question)]
    things = [t for t in THINGS if re.search(rf"\b{t}\b", problem.question) and t != "coins"]
    swaps = dict(zip(things, rng.sample(MORE_THINGS, len(things)), strict=True))
    for name, pronoun in people:
        free = [
            p
            for p, pronoun_of_person in MORE_PEOPLE
            if pronoun_of_person == pronoun and p not in swaps.values()
        ]
        swaps[name] = rng.choice(free)
    if not swaps:
        return problem
    pattern = re.compile(rf"\b({'|'.join(swaps)})\b")

    def swap(text: str) -> str:
        return pattern.sub(lambda match: swaps[match[0]], text)

    steps = tuple(replace(step, reason=swap(step.reason)) for step in problem.steps)
    return replace(problem, question=swap(problem.question), steps=steps)


def _any(rng: random.Random) -> Callable[[random.Random], Problem]:
    shares = [share for share, _ in KINDS.values()]
    return rng.choices([draw for _, draw in KINDS.values()], shares)[0]


def _in_range(problem: Problem) -> bool:
    """Values 0..``LARGEST``; negative only as the result of a sum of one step."""
    values = [step.value for step in problem.steps]
    lowest = -LARGEST if problem.family == "sum" and len(values) == 1 else 0
    return all(lowest <= value <= LARGEST for value in values)


def _chain(rng: random.Random, count: int, largest: int | None = None) -> Problem:
    (name, pronoun), things = rng.choice(PEOPLE), rng.choice(THINGS)
    pronoun = pronoun.capitalize()
    sizes = (20, 99, 300, 900) if largest is None else (largest,)
    start = value = rng.randint(2, rng.choice(sizes))
    steps: list[Step] = []
    for _ in range(count):
        sign = rng.choice("++--x" if value <= (largest or 120) else "--+")
        if sign == "-" and value < 2:
            sign = "+"
        reason, amount = _change(rng, sign, value, sizes)
        steps.append(Step(f"{pronoun} {reason}", value, sign, amount))
        value = steps[-1].value
    story = "".join(f" {step.reason}." for step in steps)
    question = f"{name} has {start} {things}.{story} How many {things} does {name} have now?"
    return Problem("collection", question, tuple(steps), chained(count))


def _change(rng: random.Random, sign: str, value: int, sizes: tuple[int, ...]) -> tuple[str, int]:
    """Words for a change of a pile of ``value``, without the pronoun, and its number."""
    if sign == "x":
        factor = rng.randint(2, 9)
        return f"now has {factor} times as many", factor
    if sign == "+":
        amount = rng.randint(1, rng.choice(sizes))
        return f"{rng.choice(('buys', 'finds', 'gets'))} {amount} more", amount
    amount = rng.randint(1, min(value, rng.choice(sizes)))
    return f"{rng.choice(('uses', 'sells', 'loses', 'eats', 'gives away'))} {amount}", amount


def _long(rng: random.Random) -> Problem:
    return _chain(rng, rng.choices(range(1, MOST_STEPS + 1), (3, 2, 2, 3, 4, 4, 4, 4))[0])


def _one_step(rng: random.Random) -> Problem:
    form = rng.choice(("chain", "chain", "boxes", "shop", "share", "compare"))
    if form == "chain":
        return _reworded(_chain(rng, 1), rng)
    (name, _), (other, _) = rng.sample(PEOPLE, 2)
    things = rng.choice(THINGS[:2] + THINGS[3:])
    few, many = rng.randint(2, rng.choice((9, 12, 99))), rng.randint(2, 99)
    if form == "boxes":
        step = Step(f"{few} boxes with {many} each", many, "x", few)
        story = f"{name} buys {few} boxes with {many} {things} each."
        query = f"How many {things} does {name} have now?"
    elif form == "shop":
        step = Step(f"{few} {things} at {many} each", many, "x", few)
        story = f"{name} buys {few} {things} at {many} coins each."
        query = f"How many coins does {name} pay?"
    elif form == "share":
        few = min(few, 9)
        step = Step(f"{few} friends share them", few * many, "/", few)
        story = f"{name} has {few * many} {things}. {step.reason}."
        query = f"How many {things} does each friend have?"
    else:
        sign = rng.choice("+-") if few < many else "+"
        comparison = f"{few} {'more' if sign == '+' else 'fewer'} than {name}"
        step = Step(f"{other} has {comparison}", many, sign, few)
        story = f"{name} has {many} {things}. {other} has {comparison}."
        query = f"How many {things} does {other} have?"
    question = story if rng.random() < 0.3 else f"{story} {query}"
    return Problem(f"one {form}", question, (step,), chained(1))


def _unasked(rng: random.Random) -> Problem:
    if rng.random() < 0.5:
        return _reworded(_chain(rng, rng.choice((1, 2, 2, 3, 3, 4))), rng)
    while True:
        problem = sample_problem(rng, held_out=rng.random() < 1 / 16)
        if problem.family in ("collection", "boxes", "share"):
            return _reworded(problem, rng)


def _reworded(problem: Problem, rng: random.Random) -> Problem:
    story, last_sentence = problem.question.rsplit(". ", 1)
    if rng.random() < 0.6 or problem.family == "share":
        return replace(problem, question=f"{story}.")
    words = last_sentence.split()
    question = rng.choice(ASKED).format(things=words[2], name=words[4])
    return replace(problem, question=f"{story}. {question}")


def _operands(rng: random.Random) -> tuple[int, str, int]:
    """The operands of a sum of one step; a third of them small, some differences negative."""
    size = rng.random()
    if size < 0.45:
        left, right = rng.randint(0, SMALL), rng.randint(0, SMALL)
        sign = rng.choice("++--xx/")
        if sign == "/":
            right = max(1, min(right, 12))
            left = right * rng.randint(0, 12)
        return left, sign, right
    left, sign, right = sample_calculation(rng)
    if size < 0.55:
        return rng.randint(0, 99), "-", rng.randint(0, 99)
    if sign == "x" and rng.random() < 0.5:
        left, right = right, left
    return left, sign, right


def _sum(rng: random.Random) -> Problem:
    left, sign, right = _operands(rng)
    step = Step("", left, sign, right)
    if rng.random() < 0.15:
        question = rng.choice(IN_WORDS[sign]).format(left, right)
    else:
        question = _framed(rng, _written(rng, [left, right], [sign]))
    return Problem("sum", _typed(rng, question), (step,), chained(1))


def _sum_chain(rng: random.Random) -> Problem:
    form = rng.choice(("plain", "plain", "plain", "product", "brackets"))
    top = rng.choice((9, 20, 99, 300))
    if form == "plain":
        count = rng.choice((2, 2, 2, 3, 3, 4, 5))
        signs = ["x"] * 2 if rng.random() < 0.12 else rng.choices("++-", k=count)
        most = min(top, 12) if signs[0] == "x" else top
        numbers = [rng.randint(1, most) for _ in range(len(signs) + 1)]
        steps, value = [], numbers[0]
        for sign, number in zip(signs, numbers[1:], strict=True):
            steps.append(Step("", value, sign, number))
            value = steps[-1].value
        written = _written(rng, numbers, signs)
        return Problem("sum", _typed(rng, _framed(rng, written)), tuple(steps), chained(len(steps)))
    a, b, c = rng.randint(1, top), rng.randint(2, 20), rng.randint(2, 9)
    sign, swapped = rng.choice("+-"), rng.random() < 0.5
    if form == "product":
        first = Step("", b, "x", c)
        left, right = (a, first.value) if swapped else (first.value, a)
        steps = [first, Step("", left, sign, right)]
        order = ([a, b, c], [sign, "x"]) if swapped else ([b, c, a], ["x", sign])
        inputs: tuple[int | None, ...] = (None, None, *((None, 0) if swapped else (0, None)))
        written = _written(rng, *order)
    else:
        first = Step("", a, sign, b)
        steps = [first, Step("", first.value, "x", c)]
        inputs = chained(2)
        inner = f"({_written(rng, [a, b], [sign], words=False)})"
        sign_x = rng.choice(("*", " * ", " x ", "x", " \u00d7 "))
        written = f"{inner}{sign_x}{c}"
    return Problem("sum", _typed(rng, _framed(rng, written)), tuple(steps), inputs)


def _written(
    rng: random.Random, numbers: list[int], signs: list[str], *, words: bool = True
) -> str:
    """Numbers and signs as one of the ways to type them."""
    style, tight = rng.randrange(5), rng.random() < 0.4
    shown = {s: options[style % (len(options) if words else 3)] for s, options in SIGNS.items()}
    text = str(numbers[0])
    for sign, number in zip(signs, numbers[1:], strict=True):
        typed = shown[sign]
        text += f"{typed}{number}" if tight and not typed[-1].isalpha() else f" {typed} {number}"
    return text


def _framed(rng: random.Random, expression: str) -> str:
    return rng.choice(FRAMES).format(expression)


def _typed(rng: random.Random, text: str) -> str:
    """The text, at times without its capital or its last mark, as some people type."""
    if rng.random() < 0.15:
        text = text[0].lower() + text[1:]
    return text.rstrip("?.") if rng.random() < 0.1 else text


SHIPPED_SHARE = 0.58
"""Share of the training problems that are of the shipped mix; the rest are ``KINDS``."""
KINDS: dict[str, tuple[float, Callable[[random.Random], Problem]]] = {
    "long": (0.36, _long),
    "one step": (0.14, _one_step),
    "unasked": (0.12, _unasked),
    "sum": (0.24, _sum),
    "sum chain": (0.14, _sum_chain),
}
"""Name -> its share beside the shipped mix, and what draws one."""
