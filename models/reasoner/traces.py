"""Think traces: what a problem's solver writes, and what it would answer if interrupted.

A trace is a list of pieces. Each carries the guess that an honest solver gives when it is stopped
inside that piece: the value just computed at the end of a step, ``hmm`` in the middle of one, the
answer once the derivation is complete. A bare sum, and a problem of more than ``MOST_RECHECKED``
steps, is answered then. After the derivation of other problems come one to four re-checks. A
re-check computes every step in a second way, by parts (:func:`by_parts`), so that it depends less
on the first derivation, and writes the derivation's value beside its own before it judges: two
numbers that stand side by side are compared far more reliably than one with a line far back. A
quotient is multiplied, and the product compared with the number that was divided. Where the two
differ, one of them is a slip, and nobody knows yet which: the step is computed once more, in the
words of the derivation, and two values of three stand. So a slip of the derivation is corrected,
and one of a re-check changes nothing.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from forethought.evaluation.generated.arithmetic import Problem, Step, calculate

UNSURE = "hmm"
OPENINGS = ("", "", "Okay, let me see.\n", "Let me go step by step.\n")
RECHECKS = (
    "Wait, let me check that again.\n",
    "Hmm, let me make sure.\n",
    "But wait, did I get every step right?\n",
    "Let me go through it once more.\n",
    "Hold on, I want to be sure.\n",
)
REREADS = (
    "Wait, let me read the question again.\n",
    "Hmm, did I read the question right?\n",
)
CONFIRMATIONS = ("So it is still {}.\n", "Yes, {} it is.\n", "That gives {} again.\n")
MOST_RECHECKED = 4
"""Steps of the longest problem that is calculated again: in longer ones the model, which sees
formulas only, loses its place among them, and breaks more answers than it fixes."""
RECHECK_SLIPS, SHORT_RECHECKS = 0.7, 0.2
"""Re-checks that go wrong or doubt without a cause, and those that leave out their last line, after
which the answer is still that of the derivation: per derivation with a slip."""
LONGEST = 800
"""Characters of question and trace beyond which no further re-check begins: they are about
one and a half to a token, and contexts of 512 tokens are trained."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text and the guess of a solver who is stopped inside it or at its end."""

    text: str
    guess: str
    trained: bool = True
    """False for what the solver is not to write: a wrong value, an operand of another step, a doubt
    without a cause, or an end that comes too early."""
    is_value: bool = False
    """The result of a formula, and nothing else."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Everything that follows ``<think>\\n``: the derivation, then the re-checks and the answer."""

    derivation: tuple[Piece, ...]
    rechecks: tuple[Piece, ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The whole trace, to the end of the spoken answer."""
        return self.derivation + self.rechecks

    @property
    def text(self) -> str:
        """The whole trace as text, without the end token."""
        return _text(self.pieces)


@dataclass(frozen=True, slots=True)
class Formula:
    """``left sign right = value`` as it is written; the value may be wrong."""

    left: int
    sign: str
    right: int
    value: int

    @property
    def is_slip(self) -> bool:
        """Whether the value is wrong."""
        return self.value != calculate(self.left, self.sign, self.right)


@dataclass(frozen=True, slots=True)
class _Line:
    """A step as the solver sees it (operands may carry an earlier slip), and its formulas."""

    step: Step
    formulas: tuple[Formula, ...]

    @property
    def value(self) -> int:
        return self.formulas[-1].value


def write_trace(problem: Problem, rng: random.Random, slip_rate: float = 0.0) -> Trace:
    """Solve a problem in words; with probability ``slip_rate`` one step goes wrong at first.

    Re-checks go wrong in proportion to it (``RECHECK_SLIPS``, ``SHORT_RECHECKS``). A bare sum, and
    a problem of more than ``MOST_RECHECKED`` steps, is derived without slip, and nothing is checked
    again.
    """
    lines, slip_at = _exact(problem), None
    is_checked = is_rechecked(problem)
    if is_checked and rng.random() < slip_rate:
        place = rng.randrange(len(problem.steps))
        if slipped := _with_slip(problem, place, rng):
            lines, slip_at = slipped, place
    derivation = [Piece(rng.choice(OPENINGS), UNSURE), *_derive(lines)]
    length = len(problem.question) + len(_text(derivation))
    rechecks: list[Piece] = []
    has_reread = False
    for _ in range(_recheck_count(problem, rng) if is_checked else 0):
        if rechecks and not has_reread and rng.random() < 0.25:
            more, has_reread = _reread(problem, lines, rng), True
        elif slip_at is not None:
            more = recheck(problem, [line.value for line in lines], rng)
        else:
            more = _repeat(lines, rng, slip_rate)
        length += len(_text(more))
        if rechecks and length > LONGEST:
            break
        rechecks += more
        if slip_at is not None and len(more) > 1:
            lines, slip_at = _exact(problem), None
    if slip_at is not None:
        rechecks += recheck(problem, [line.value for line in lines], rng)
    rechecks.append(Piece(closing(problem), problem.answer))
    return Trace(tuple(derivation), tuple(rechecks))


def is_rechecked(problem: Problem) -> bool:
    """Whether the problem is calculated again after its derivation."""
    return problem.family != "sum" and len(problem.steps) <= MOST_RECHECKED


def closing(problem: Problem) -> str:
    """The end of the thoughts, and the spoken answer."""
    return f"</think>\nThe answer is \\boxed{{{problem.answer}}}."


def recheck(problem: Problem, noted: Sequence[int], rng: random.Random) -> list[Piece]:
    """Every step once more, after a derivation that gave the values ``noted``.

    The first step whose value is not the noted one is named a slip, and the steps after it are
    computed with the right value, to the answer. Without a slip the answer is confirmed.
    """
    values = [step.value for step in problem.steps]
    slip_at = next((n for n, value in enumerate(values) if value != noted[n]), None)
    if slip_at is None:
        return _repeat(_exact(problem), rng, 0.0)
    return _correct(problem, noted, slip_at, rng)


def by_parts(left: int, sign: str, right: int, *, split_left: bool = False) -> list[Formula]:
    """The exact formulas that compute ``left sign right`` by the parts of one number.

    The leading digit of a number comes first, then the rest: ``47 x 23`` is ``47 x 20``,
    ``47 x 3`` and the sum of both; ``217 + 115`` is ``217 + 100`` and ``317 + 15``; ``1539 / 9`` is
    ``900 / 9``, what remains, ``1539 - 900``, ``639 / 9``, and a sum. The last formula gives the
    value.

    Args:
        left: first operand.
        sign: ``+ - x /``.
        right: second operand.
        split_left: of a product, the left factor is split.
    """
    whole = [_formula(left, sign, right)]
    if sign == "/":
        lead = _leading(left // right)
        if lead in (0, left // right):
            return whole
        high, rest = _formula(lead * right, "/", right), _formula(left, "-", lead * right)
        low = _formula(rest.value, "/", right)
        return [high, rest, low, _formula(high.value, "+", low.value)]
    factor = left if split_left else right
    lead = _leading(factor)
    if lead in (0, factor):
        return whole
    if sign == "x":
        first, second = (lead, factor - lead)
        if split_left:
            high, low = _formula(first, "x", right), _formula(second, "x", right)
        else:
            high, low = _formula(left, "x", first), _formula(left, "x", second)
        return [high, low, _formula(high.value, "+", low.value)]
    high = _formula(left, sign, lead)
    return [high, _formula(high.value, sign, right - lead)]


def derived(step: Step) -> list[Formula]:
    """How a first derivation computes a step: at once, or by parts where that is error-prone.

    By parts are products of two numbers of two digits or more, differences of two numbers of three
    digits or more, and quotients of three digits.
    """
    left, sign, right = step.left, step.sign, step.right
    if sign == "x" and min(left, right) > 9:
        return by_parts(left, sign, right, split_left=right > 99)
    if (sign == "-" and min(left, right) > 99) or (sign == "/" and left // right > 99):
        return by_parts(left, sign, right)
    return [_formula(left, sign, right)]


def rechecked(step: Step, noted: int) -> list[Formula]:
    """How a re-check computes a step to which the derivation gave the value ``noted``.

    A long sum is computed by parts, a product by the parts of its other factor, a short sum or
    product with its operands swapped, a difference by its parts with the leading digit last. A
    quotient is multiplied by the divisor, by its parts.
    """
    if step.sign == "/":
        return rechecked(Step("", noted, "x", step.right), noted * step.right)
    left, sign, right = step.left, step.sign, step.right
    if sign == "-" and (rest := right - _leading(right)):
        low = _formula(left, "-", rest)
        return [low, _formula(low.value, "-", right - rest)]
    if sign == "x":
        if min(left, right) > 9:
            formulas = by_parts(left, sign, right, split_left=left < 100)
            return formulas if len(formulas) > 1 else by_parts(left, sign, right)
        if max(left, right) > 10:
            return by_parts(left, sign, right, split_left=left > right)
        return [_formula(right, sign, left)]
    if sign == "+":
        swapped = [_formula(right, sign, left)]
        return by_parts(left, sign, right) if min(left, right) > 99 else swapped
    return [_formula(left, sign, right)]


def expected(step: Step, noted: int) -> int:
    """What a re-check gives where ``noted`` is right: itself; of a quotient, what was divided."""
    return step.left if step.sign == "/" else noted


def _leading(number: int) -> int:
    """The number with all digits but the first made zero."""
    power = 10 ** (len(str(number)) - 1)
    return number // power * power


def _formula(left: int, sign: str, right: int) -> Formula:
    return Formula(left, sign, right, calculate(left, sign, right))


def _text(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _recheck_count(problem: Problem, rng: random.Random) -> int:
    weights = (1, 4, 8, 7) if len(problem.steps) > 1 else (5, 4, 1, 0)
    return rng.choices((1, 2, 3, 4), weights)[0]


def _exact(problem: Problem) -> list[_Line]:
    return [_Line(step, tuple(derived(step))) for step in problem.steps]


def _with_slip(problem: Problem, slip_at: int, rng: random.Random) -> list[_Line] | None:
    """The lines with a wrong formula in step ``slip_at``, carried on through the steps that use it.

    None where every slip tried would make some value less than one.
    """
    for _ in range(8):
        lines: list[_Line] = []
        for index, step in enumerate(problem.steps):
            left_from, right_from = problem.inputs[2 * index : 2 * index + 2]
            left = step.left if left_from is None else lines[left_from].value
            right = step.right if right_from is None else lines[right_from].value
            step_as_seen = replace(step, left=left, right=right)
            formulas = derived(step_as_seen)
            lines.append(
                _Line(step_as_seen, tuple(slip(formulas, rng) if index == slip_at else formulas))
            )
        values = [formula.value for line in lines for formula in line.formulas]
        if min(values) > 0 and lines[slip_at].value != problem.steps[slip_at].value:
            return lines
    return None


def slip(formulas: list[Formula], rng: random.Random) -> list[Formula]:
    """The same formulas with one value wrong; a wrong part is carried into the last formula."""
    last = len(formulas) - 1
    place = rng.choice([n for n in range(last + 1) if last < 3 or n != 1])  # not what remains
    wrong = [*formulas]
    wrong[place] = replace(wrong[place], value=wrong[place].value + _error(wrong[place], rng))
    if place < last == 1:
        wrong[1] = _formula(wrong[0].value, wrong[1].sign, wrong[1].right)
    elif place < last:
        wrong[last] = _formula(wrong[0].value, "+", wrong[last - 1].value)
    return wrong


def _error(formula: Formula, rng: random.Random) -> int:
    """What a result may be wrong by: a digit, a carry; in products also a multiple of a factor."""
    digits = len(str(abs(formula.value)))
    error = rng.choice((1, 1, 1, 2, 3, 5)) * 10 ** rng.randrange(digits)
    if formula.sign == "x" and rng.random() < 0.4:
        error = rng.choice((formula.left, formula.right)) * rng.choice((1, 1, 2, 10))
    elif formula.sign in "+-" and rng.random() < 0.6:
        error = 10 ** rng.randrange(1, digits + 1)
    return error if rng.random() < 0.5 else -error


def _derive(lines: list[_Line]) -> list[Piece]:
    """One line per step; the guess is a step's value from its end until the next step's numbers."""
    pieces: list[Piece] = []
    guess = UNSURE
    for line in lines:
        reason = line.step.reason
        head = next((i for i, c in enumerate(reason) if c.isdigit()), len(reason))
        pieces.append(Piece(reason[:head], guess))
        pieces.append(Piece(reason[head:] + (": " if reason else ""), UNSURE))
        pieces += _calculations(line.formulas, UNSURE)
        guess = str(line.value)
        pieces.append(Piece(".\n", guess))
    pieces.append(Piece(f"So the answer is {guess}.\n", guess))
    return [piece for piece in pieces if piece.text]


def _calculations(formulas: Sequence[Formula], guess: str) -> list[Piece]:
    """Formulas with a comma between them."""
    pieces: list[Piece] = []
    for index, formula in enumerate(formulas):
        comma = ", " if index else ""
        calculation = f"{comma}{formula.left} {formula.sign} {formula.right} = "
        pieces.append(Piece(calculation, guess))
        pieces.append(Piece(str(formula.value), guess, not formula.is_slip, is_value=True))
    return pieces


def _repeat(lines: list[_Line], rng: random.Random, slip_rate: float) -> list[Piece]:
    """Every calculation once more, in order; a slip among them is found by a third calculation."""
    answer = str(lines[-1].value)
    slip_at = rng.randrange(len(lines)) if rng.random() < RECHECK_SLIPS * slip_rate else None
    is_short = len(lines) > 1 and rng.random() < SHORT_RECHECKS * slip_rate
    pieces = [Piece(rng.choice(RECHECKS), answer)]
    for index, line in enumerate(lines[:-1] if is_short else lines):
        if index == slip_at:
            pieces += _doubted(line, lines, answer, rng)
        else:
            pieces += _calculations(rechecked(line.step, line.value), answer)
            pieces.append(Piece(had(expected(line.step, line.value)), answer))
        pieces.append(Piece(", yes.\n", answer))
    before, after = rng.choice(CONFIRMATIONS).split("{}")
    pieces.append(Piece(before, answer, trained=not is_short))
    return [*pieces, Piece(f"{answer}{after}", answer)]


def _doubted(line: _Line, lines: Sequence[_Line], answer: str, rng: random.Random) -> list[Piece]:
    """A step whose re-check goes wrong, in a value or an operand, or doubts without a cause."""
    step = line.step
    checks = rechecked(step, line.value)
    exact = written = _calculations(checks, answer)
    wrong = rng.choices(("value", "operand", "nothing"), (5, 4, 1))[0]
    if wrong == "value":
        written = _calculations(slip(checks, rng), answer)
    elif wrong == "operand":
        numbers = {
            n
            for other_line in lines
            for n in (other_line.step.left, other_line.step.right, other_line.value)
        }
        if others := sorted(numbers - {checks[0].left}):
            other = rng.choice(others)
            astray = rechecked(replace(step, left=other), other)
            question, *rest = _calculations(astray, answer)
            written = [replace(question, trained=False), *rest]
    values = [int(piece.text) for piece in written if piece.is_value]
    noted = Piece(had(expected(step, line.value)), answer)
    if min(values) < 1:
        return [*exact, noted]
    doubt, *third = again(line.value, step)
    differs = values[-1] != expected(step, line.value)
    return [*written, noted, replace(doubt, trained=differs), *third]


def had(value: int) -> str:
    """What the derivation has, written after what a re-check gives before the two are judged."""
    return f", I had {value}"


def again(noted: int, step: Step) -> list[Piece]:
    """A third calculation, where the value of the derivation is not that of the re-check.

    It quotes the step's words, as the derivation did, since the re-check may have taken a number of
    another step; and it is judged as the second was, beside the value of the derivation.
    """
    question = Piece(f". Again: {step.reason}: " if step.reason else ". Again: ", UNSURE)
    return [question, *_calculations(derived(step), UNSURE), Piece(had(noted), UNSURE)]


def _reread(problem: Problem, lines: list[_Line], rng: random.Random) -> list[Piece]:
    """The story once more, without calculating."""
    answer = str(lines[-1].value)
    story = problem.question.replace(". ", ".\n")
    return [Piece(rng.choice(REREADS) + f"{story}\nRight, that is {answer}.\n", answer)]


def _correct(
    problem: Problem, noted: Sequence[int], slip_at: int, rng: random.Random
) -> list[Piece]:
    """A re-check that meets the slip, names it, and carries the right value to the end."""
    before, answer = str(noted[-1]), problem.answer
    pieces = [Piece(rng.choice(RECHECKS), before)]
    for index, step in enumerate(problem.steps):
        guess = before if index <= slip_at else UNSURE
        if index <= slip_at:
            pieces += _calculations(rechecked(step, noted[index]), guess)
            pieces.append(Piece(had(expected(step, noted[index])), guess))
        else:
            pieces += _calculations(derived(step), guess)
        if index < slip_at:
            pieces.append(Piece(", yes.\n", before))
        elif index == slip_at:
            pieces += again(noted[index], step)
            pieces.append(Piece(". That was a slip.\n", UNSURE))
        else:
            pieces.append(Piece(".\n", UNSURE))
    guess = answer if slip_at == len(problem.steps) - 1 else UNSURE
    pieces.append(Piece("So the answer is ", guess))
    pieces.append(Piece(f"{answer}.\n", answer))
    return pieces
