"""Labels of a sample's steps: each line of a trace recomputed exactly from its problem.

A step is a line. It is good if it is right, and nothing wrong comes before it: what has been
derived so far is the problem's own derivation, or has been corrected to it. A line is right if

======================  ==========================================================================
a derivation            it quotes a step that is due (misspelt words do not matter), its operands
                        are that step's, and every formula on it is exact
a re-check              its formulas are exact and give the value of the step that it repeats (of
                        a quotient the number that was divided), which holds from there on, and it
                        quotes what held; where it doubts a value, this is said of the calculation
                        that follows, and the slip that it names is one
a value or an answer    it is the problem's
a sentence read again   it is in the question
anything else           it has no digits
======================  ==========================================================================

Traces of the first derivation in one formula per step and by parts are both read; what matters is
the last value of a line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from forethought.evaluation.generated.arithmetic import Problem, Step, calculate
from reasoner.traces import expected

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_FORMULA = re.compile(r"(-?\d+) ([-+x/]) (\d+) = (-?\d+)")
_DERIVED = re.compile(r"(?:(?P<reason>.*?): )?(?P<formulas>-?\d+ [-+x/] \d+ = -?\d.*)\.\n?")
_HAD = re.compile(r", I had (-?\d+)")
_DOUBT = re.compile(r", I had -?\d+\. Again: ")
_SLIP = re.compile(r"\. That was a slip\.\n?$")
_CLAIM = re.compile(
    r"(?:So the answer is|So it is still|Right, that is|That gives|Yes,) (-?\d+)"
    r"(?: again| it is)?\.\n?|The answer is \\boxed\{(-?\d+)\}\.\n?"
)
_CLAIM_BEGINS = re.compile(r"So the answer is|So it is still|Right, that is|The answer is")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


def label_lines(problem: Problem, text: str) -> list[bool]:
    """Whether each line of ``text``, what was generated after ``<think>``, is a good step.

    Blank lines are none.
    """
    checker = _Checker(problem)
    return [checker.check(line) for line in _LINE.findall(text) if line.strip()]


def is_right(problem: Problem, text: str) -> bool:
    """Whether the last answer in a box is the problem's."""
    matches = _BOXED.findall(text)
    return bool(matches) and matches[-1].strip() == problem.answer


@dataclass
class _Checker:
    """Follows one trace line by line."""

    problem: Problem
    values: dict[int, int] = field(default_factory=dict)
    """What the trace holds to be the value of each step, by its index."""
    wrong: set[int] = field(default_factory=set)
    """The steps whose line is wrong and has not been corrected."""
    has_derived: bool = False
    """Whether the first derivation is complete: further lines re-check."""
    is_lost: bool = False
    """Whether a line of the derivation was none of the problem's, which nothing repairs."""
    repeated: int = 0
    """The step that the next line of a re-check repeats."""

    def check(self, line: str) -> bool:
        """Whether the next line is a good step."""
        return self._is_line_right(line) and not self.wrong and not self.is_lost

    @property
    def _is_complete(self) -> bool:
        return len(self.values) == len(self.problem.steps)

    def _is_line_right(self, line: str) -> bool:
        if claim := _CLAIM.fullmatch(line):
            self.has_derived, self.repeated = True, 0
            return (claim[1] or claim[2]) == self.problem.answer and self._is_complete
        if _CLAIM_BEGINS.match(line):
            return False
        if self.has_derived and (formulas := _FORMULA.findall(line)):
            return self._is_recheck_right(line, formulas)
        if derived := _DERIVED.fullmatch(line):
            return self._is_step_right(derived["reason"] or "", derived["formulas"])
        self.repeated = 0
        if not re.search(r"\d", line):
            return not line.startswith("</think>") or self._is_complete
        return line.strip() in self.problem.question

    def _is_step_right(self, reason: str, text: str) -> bool:
        """A line of the derivation; it gives a value to the step whose words it quotes."""
        formulas = _FORMULA.findall(text)
        ready = [(n, step) for n, step in enumerate(self.problem.steps) if self._is_ready(n)]
        due = [n for n, step in ready if step.reason == reason] or [
            n for n, step in ready if _is_misspelt(step, reason, formulas[0][1])
        ]
        if not due:
            self.is_lost = True
            return False
        index, joined = due[0], ", ".join("{} {} {} = {}".format(*f) for f in formulas)
        step = self.problem.steps[index]
        calculation = (str(step.left), step.sign, str(step.right))
        right = joined == text and (len(formulas) > 1 or formulas[0][:3] == calculation)
        return self._hold(index, int(formulas[-1][3]), right and _are_exact(formulas))

    def _hold(self, index: int, value: int, right: bool) -> bool:
        """Take the value for that of a step; whether it is right if ``right`` is so far."""
        right &= value == self.problem.steps[index].value
        self.values[index] = value
        self.wrong -= {index}
        self.wrong |= set() if right else {index}
        return right

    def _is_ready(self, index: int) -> bool:
        """Whether a step may come next: it is not done, and the steps that it uses are."""
        used = self.problem.inputs[2 * index : 2 * index + 2]
        ready = all(other is None or other in self.values for other in used)
        return index not in self.values and ready

    def _is_recheck_right(self, line: str, formulas: Sequence[_Formula]) -> bool:
        """A line of a re-check, which confirms a value, corrects it, or follows a correction."""
        index, self.repeated = self.repeated, self.repeated + 1
        if index >= len(self.problem.steps):
            return False
        step, held = self.problem.steps[index], self.values.get(index)
        quoted = [int(value) for value in _HAD.findall(line)]
        if held is None or not quoted:
            return self._hold(index, int(formulas[-1][3]), _are_exact(formulas))
        doubt, due = _DOUBT.search(line), expected(step, held)
        if doubt is not None:
            formulas = _FORMULA.findall(line[doubt.end() :])
        if not formulas or quoted != [due, held][: len(quoted)]:
            return False
        value, is_exact = int(formulas[-1][3]), _are_exact(formulas)
        if doubt is not None and _SLIP.search(line):
            for later in range(index + 1, len(self.problem.steps)):  # they are computed again
                self.values.pop(later, None)
                self.wrong.discard(later)
            return self._hold(index, value, is_exact) and held != value
        agrees = value == (due if doubt is None else held)
        return is_exact and agrees and held == step.value and self._hold(index, held, True)


_Formula = tuple[str, str, str, str]
"""Left operand, sign, right operand and value, as they are written."""


def _is_misspelt(step: Step, reason: str, sign: str) -> bool:
    """Whether the words of a step may be meant: the same numbers and sign."""
    numbers = re.findall(r"\d+", reason)
    return bool(numbers) and numbers == re.findall(r"\d+", step.reason) and sign == step.sign


def _are_exact(formulas: Sequence[_Formula]) -> bool:
    return all(
        not (sign == "/" and int(right) == 0)
        and calculate(int(left), sign, int(right)) == int(value)
        for left, sign, right, value in formulas
    )
