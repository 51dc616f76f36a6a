"""Examples that the reasoner began itself: its samples, continued as the solver would go on.

The generator's traces go wrong in the ways that it knows; a model that samples goes astray in ways
of its own, and what it writes then nobody has taught it. So a sample is followed line by line to
the first place where its re-checks leave what the solver would write after that derivation, right
or wrong. From there the solver goes on, and loss is taken on its words alone (dataset aggregation:
Ross et al. 2011, "A Reduction of Imitation Learning and Structured Prediction to No-Regret Online
Learning", arXiv 1011.0686). A sample that never goes astray is an example as it is.

The derivation is the model's own and is not repaired: a wrong value in it is for the re-check to
find.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import Tokenizer

from forethought.evaluation.generated.arithmetic import Problem
from forethought.training.chat_tokenizer import END, prompt_text
from forethought.training.from_scratch import Example, Span, encode
from reasoner.samples import Sample
from reasoner.traces import (
    CONFIRMATIONS,
    OPENINGS,
    RECHECKS,
    REREADS,
    again,
    closing,
    expected,
    had,
    is_rechecked,
    recheck,
)

KINDS = ("slipped", "astray", "right")
"""Of samples: with a wrong derivation, with a right one and a wrong re-check, and right ones."""
_FORMULAS = r"(?:-?\d+ [-+x/] \d+ = -?\d+, )*-?\d+ [-+x/] \d+ = (?P<value>-?\d+)"
_DERIVED = re.compile(rf"(?:(?P<reason>.*?): )?{_FORMULAS}\.\n")
_CHECKED = re.compile(rf"(?P<first>(?=-?\d+ (?P<sign>[-+x/])){_FORMULAS})(?P<rest>.*)", re.DOTALL)
_CLAIM = re.compile(r"So the answer is (-?\d+)\.\n")


@dataclass(frozen=True, slots=True)
class Continuation:
    """What is kept of a sample, and what the solver writes after it, up to the spoken answer.

    Of a sample that never goes astray nothing is kept: all of it is the solver's.
    """

    kept: str
    gold: str
    kind: str
    """One of ``KINDS``."""


def continue_sample(sample: Sample, rng: random.Random) -> Continuation | None:
    """The solver's continuation of a sample.

    None for a derivation that is not that of the problem's steps, one that is wrong of a problem
    that is not calculated again, and a sample that ends before it goes astray.
    """
    lines = sample.text.splitlines(keepends=True)
    noted = _read_derivation(sample.problem, lines)
    if noted is None:
        return None
    solver, position = _Solver(sample.problem, noted, rng), len(noted) + (lines[0] in OPENINGS)
    if not solver.began_right and not is_rechecked(sample.problem):
        return None
    for index in range(position, len(lines)):
        line = lines[index]
        if solver.accepts(line):
            continue
        if index == len(lines) - 1 and "</think>" not in sample.text:
            return None  # cut off in its middle
        kind = "astray" if solver.began_right else "slipped"
        prefix, gold = solver.resume(line)
        return Continuation("".join(lines[:index]) + prefix, gold, kind)
    if not solver.has_ended:
        return None
    if solver.began_right:
        return Continuation("", sample.text, "right")
    derivation = "".join(lines[:position])
    return Continuation(derivation, sample.text[len(derivation) :], "slipped")


def continued(tokenizer: Tokenizer, sample: Sample, continuation: Continuation) -> Example:
    """The example: loss is taken on what the solver writes, and on the end token."""
    spans = [
        Span(prompt_text(sample.problem.question), False),
        Span(continuation.kept, False),
        Span(continuation.gold + END, True),
    ]
    return encode(tokenizer, [span for span in spans if span.text])


class Continued:
    """Examples of samples, by kind: ``slipped`` with a wrong derivation, ``astray``, ``right``.

    Args:
        samples: of any temperature.
        rng: of the solver's words.
    """

    def __init__(self, samples: Iterable[Sample], rng: random.Random) -> None:
        self.pairs: dict[str, list[tuple[Sample, Continuation]]] = {kind: [] for kind in KINDS}
        for sample in samples:
            if (continuation := continue_sample(sample, rng)) is not None:
                self.pairs[continuation.kind].append((sample, continuation))

    def example(self, tokenizer: Tokenizer, rng: random.Random, kind: str) -> Example:
        """One of those of a kind."""
        return continued(tokenizer, *rng.choice(self.pairs[kind]))


def _read_derivation(problem: Problem, lines: list[str]) -> list[int] | None:
    """The value noted for each step, and the answer claimed; None if the steps are others."""
    noted = list[int]()
    rows = lines[1:] if lines and lines[0] in OPENINGS else lines
    if len(rows) <= len(problem.steps):
        return None
    for step, line in zip(problem.steps, rows, strict=False):
        match = _DERIVED.fullmatch(line)
        if match is None or (match["reason"] or "") != step.reason:
            return None
        noted.append(int(match["value"]))
    claim = _CLAIM.fullmatch(rows[len(problem.steps)])
    return None if claim is None else [*noted, int(claim[1])]


class _Solver:
    """Reads a sample after its derivation: the lines that may come, and those that should."""

    def __init__(self, problem: Problem, noted: list[int], rng: random.Random) -> None:
        self.problem, self._rng = problem, rng
        self._exact = [*(step.value for step in problem.steps), int(problem.answer)]
        self._answer = closing(problem).splitlines()[-1]
        self._noted = noted
        """The value that the trace gives to each step, and its answer."""
        self.began_right = noted == self._exact
        self._due = list[str]()
        """What is left of a re-check, of a rereading or of the ending."""
        self._checks = False
        """Whether it is a re-check."""
        self._has_checked = self._has_reread = False
        """Whether there was a re-check yet, and a rereading, of which one may follow it."""
        self.has_ended = False

    def accepts(self, line: str) -> bool:
        """Whether the solver might have written the line; if so it has."""
        if not self._due:
            return self._opens(line)
        if line != self._due[0] and not self._confirms(line):
            return False
        self._due.pop(0)
        if not self._due:
            self._close(line)
        return True

    def resume(self, line: str) -> tuple[str, str]:
        """What to keep of a line that is not accepted, and all that follows."""
        if not self._due:
            return "", self._ending()
        prefix, gold = "", self._due[0]
        if self._checks and len(self._due) > 1:
            prefix, gold = self._mend(line)
        if gold == self._answer:
            return prefix, gold
        gold += "".join(self._due[1:])
        if self._checks:
            self._noted = self._exact
        return prefix, gold + self._ending()

    def _opens(self, line: str) -> bool:
        if line in RECHECKS and is_rechecked(self.problem):
            self._due, self._checks, self._has_checked = self._recheck()[1:], True, True
        elif line in REREADS and self._has_checked and not self._has_reread:
            self._has_reread = True
            story = self.problem.question.replace(". ", ".\n")
            self._due, self._checks = [*f"{story}\n".splitlines(keepends=True)], False
            self._due.append(f"Right, that is {self._noted[-1]}.\n")
        elif line == "</think>\n" and self._noted == self._exact:
            self._due, self._checks = [self._answer], False
        else:
            return False
        return True

    def _recheck(self) -> list[str]:
        """The lines of a re-check; one that comes to another answer than the trace says so."""
        pieces = recheck(self.problem, self._noted[:-1], self._rng)
        lines = "".join(piece.text for piece in pieces).splitlines(keepends=True)
        if self._noted[-1] != self._exact[-1]:
            lines[-1] = f"So the answer is {self.problem.answer}.\n"
        return lines

    def _confirms(self, line: str) -> bool:
        """Whether the line confirms the answer in other words than the one that is due."""
        answer = self.problem.answer
        confirmations = [text.format(answer) for text in CONFIRMATIONS]
        return self._due[0] in confirmations and line in confirmations

    def _close(self, line: str) -> None:
        if self._checks:
            self._noted = self._exact
        self.has_ended = line == self._answer

    def _mend(self, line: str) -> tuple[str, str]:
        """What to keep of a line of a re-check, and the solver's end of that line."""
        due = self._due[0]
        index = len(self.problem.steps) - len(self._due) + 1
        noted, value = self._noted[index], self._exact[index]
        is_mended = self._noted[:index] != self._exact[:index]
        written, right = _CHECKED.fullmatch(line), _CHECKED.fullmatch(due)
        if written is None or right is None or is_mended or written["sign"] != right["sign"]:
            return "", due
        step = self.problem.steps[index]
        differs = int(written["value"]) != expected(step, noted)
        if written["first"] != right["first"] and not differs:
            return "", due
        beside = had(expected(step, noted))
        asks, *third = again(noted, step)
        doubts = written["rest"].startswith(beside + asks.text)
        if differs or (doubts and self._rng.random() < 0.5):
            calculated = "".join(piece.text for piece in third)
            ending = ", yes.\n" if noted == value else ". That was a slip.\n"
            gold = beside + asks.text + calculated + ending
            prefix = next(
                (t for t in (beside + asks.text, beside) if written["rest"].startswith(t)), ""
            )
        else:
            gold = right["rest"]
            prefix = beside if written["rest"].startswith(beside) else ""
        return written["first"] + prefix, gold.removeprefix(prefix)

    def _ending(self) -> str:
        """What follows the present re-check or rereading."""
        checked = "" if self._noted == self._exact else "".join(self._recheck())
        return checked + closing(self.problem)
