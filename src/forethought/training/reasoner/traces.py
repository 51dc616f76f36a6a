"""Think traces: what a problem's solver writes, and what it would answer if interrupted.

A trace is a list of pieces. Each carries the guess that an honest solver gives when it is stopped
inside that piece: the value just computed at the end of a step, ``hmm`` in the middle of one, the
answer once the derivation is complete. After the derivation come one to four re-checks, which
repeat finished work; where the derivation contains a slip, one of them finds it.
"""

import random
from dataclasses import dataclass, replace

from forethought.training.reasoner.problems import Problem, Step, calculate

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
SLIPS = (-100, -20, -10, -10, -2, -1, 1, 2, 10, 10, 20, 100)
CONFIRMATIONS = ("So it is still {}.\n", "Yes, {} it is.\n", "That gives {} again.\n")


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text and the guess of a solver who is stopped inside it or at its end."""

    text: str
    guess: str
    is_slip: bool = False


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
        return "".join(piece.text for piece in self.pieces)


def write_trace(problem: Problem, rng: random.Random, slip_rate: float = 0.0) -> Trace:
    """Solve a problem in words; with probability ``slip_rate`` one step goes wrong at first."""
    written, slip_at = _exact(problem), None
    if rng.random() < slip_rate:
        slip_at = rng.randrange(len(problem.steps))
        slipped = _with_slip(problem, slip_at, rng)
        written, slip_at = (slipped, slip_at) if slipped else (written, None)
    derivation = [Piece(rng.choice(OPENINGS), UNSURE)]
    derivation += _derive(written, slip_at)
    rechecks: list[Piece] = []
    count = rng.choices((1, 2, 3, 4), (1, 4, 8, 7))[0]
    for index in range(count):
        if slip_at is not None and (index == count - 1 or rng.random() < 0.5):
            rechecks += _correct(problem, written, slip_at, rng)
            written, slip_at = _exact(problem), None
        elif rng.random() < 0.3:
            rechecks += _reread(problem, written, rng)
        else:
            rechecks += _repeat(written, rng)
    answer = str(written[-1][1])
    rechecks.append(Piece(f"</think>\nThe answer is \\boxed{{{answer}}}.", answer))
    return Trace(tuple(derivation), tuple(rechecks))


_Written = list[tuple[Step, int]]
"""Steps as the solver sees them (operands may carry an earlier slip) with the value written."""


def _exact(problem: Problem) -> _Written:
    return [(step, step.value) for step in problem.steps]


def _with_slip(problem: Problem, slip_at: int, rng: random.Random) -> _Written | None:
    """The steps with a wrong value at ``slip_at``, carried on through the steps that use it.

    None where every slip tried would make some value less than one.
    """
    for error in rng.sample(SLIPS, len(SLIPS)):
        written: _Written = []
        for index, step in enumerate(problem.steps):
            left_from, right_from = problem.inputs[2 * index : 2 * index + 2]
            left = step.left if left_from is None else written[left_from][1]
            right = step.right if right_from is None else written[right_from][1]
            value = calculate(left, step.sign, right) + (error if index == slip_at else 0)
            written.append((replace(step, left=left, right=right), value))
        if min(value for _, value in written) > 0:
            return written
    return None


def _derive(written: _Written, slip_at: int | None) -> list[Piece]:
    """One line per step; the guess is a step's value from its end until the next step's numbers."""
    pieces: list[Piece] = []
    guess = UNSURE
    for index, (step, value) in enumerate(written):
        head = next((i for i, c in enumerate(step.reason) if c.isdigit()), len(step.reason))
        pieces.append(Piece(step.reason[:head], guess))
        formula = f"{step.reason[head:]}: {step.left} {step.sign} {step.right} = "
        pieces.append(Piece(formula, UNSURE))
        pieces.append(Piece(str(value), UNSURE, is_slip=index == slip_at))
        guess = str(value)
        pieces.append(Piece(".\n", guess))
    pieces.append(Piece(f"So the answer is {guess}.\n", guess))
    return pieces


def _repeat(written: _Written, rng: random.Random) -> list[Piece]:
    """Every calculation once more, in order."""
    answer = str(written[-1][1])
    text = rng.choice(RECHECKS)
    for step, value in written:
        text += f"{step.left} {step.sign} {step.right} = {value}, yes.\n"
    return [Piece(text + rng.choice(CONFIRMATIONS).format(answer), answer)]


def _reread(problem: Problem, written: _Written, rng: random.Random) -> list[Piece]:
    """The story once more, without calculating."""
    answer = str(written[-1][1])
    story = problem.question.replace(". ", ".\n")
    return [Piece(rng.choice(REREADS) + f"{story}\nRight, that is {answer}.\n", answer)]


def _correct(problem: Problem, written: _Written, slip_at: int, rng: random.Random) -> list[Piece]:
    """A re-check that meets the slip, names it, and carries the right value to the end."""
    before = str(written[-1][1])
    pieces = [Piece(rng.choice(RECHECKS), before)]
    for index, step in enumerate(problem.steps):
        calculation = f"{step.left} {step.sign} {step.right} = {step.value}"
        if index < slip_at:
            pieces.append(Piece(f"{calculation}, yes.\n", before))
        elif index == slip_at:
            note = f", but I wrote {written[index][1]}. That was a slip.\n"
            pieces.append(Piece(calculation, before))
            pieces.append(Piece(note, UNSURE))
        else:
            pieces.append(Piece(f"{calculation}.\n", UNSURE))
    answer = problem.answer
    guess = answer if slip_at == len(problem.steps) - 1 else UNSURE
    pieces[-1] = replace(pieces[-1], guess=UNSURE)
    pieces.append(Piece("So the answer is ", guess))
    pieces.append(Piece(f"{answer}.\n", answer))
    return pieces
