"""What to solve: questions with known answers. Knows nothing about who solves them.

A file of the user's own is JSON lines, one object per line with ``question`` and ``answer``
(``problem`` and ``solution`` are accepted for them); other fields are left alone. A worked solution
counts by what stands in its last ``\boxed{}`` or behind its last ``####``.

[grader] Whether an answer is right. Knows nothing about who gave it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from forethought.errors import ParameterError, UsageError
from forethought.scaffolding.answers import extract_answer_from_boxed, extract_answer_with_regex
from forethought.scaffolding.canonical_form import canonical_form
from forethought.scaffolding.sympy_pool import SympyPool

_QUESTION = ("question", "problem")
_ANSWER = ("answer", "solution")


@dataclass(frozen=True, slots=True)
class Problem:
    """One question and its reference answer, both as text."""

    name: str
    question: str
    answer: str


def shipped() -> list[Problem]:
    """The held-out problems that come with the embedded reasoner, in their fixed order."""
    from forethought import assets

    return [_from_record(record, f"{i}") for i, record in enumerate(assets.problems())]


def load(path: str | Path) -> list[Problem]:
    """Read problems from a file of JSON lines; blank lines are skipped.

    Raises:
        UsageError: the file cannot be read, is empty, or a line is not such an object.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the problems in {path}", str(error), "Give a file of JSON lines"
        ) from error
    found = [
        _from_line(line, f"{path}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not found:
        raise UsageError(f"no problems in {path}", "the file is empty", "Give one object per line")
    return found


def choose(problems: Sequence[Problem], count: int | None, seed: int = 0) -> list[Problem]:
    """``count`` of the problems, drawn without replacement by ``seed``; None: all, as they stand.

    Raises:
        ParameterError: ``count`` is below 1 or above what there is.
    """
    if count is None:
        return list(problems)
    if not 1 <= count <= len(problems):
        raise ParameterError(
            "invalid number of problems",
            f"got {count}, and there are {len(problems)}",
            f"Ask for 1 to {len(problems)}",
        )
    return random.Random(seed).sample(list(problems), count)


def _from_line(line: str, where: str) -> Problem:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"bad problem at {where}", f"not JSON: {error}", "Write one JSON object per line"
        ) from error
    return _from_record(record, where)


def _from_record(record: Any, where: str) -> Problem:
    question, answer = _first(record, _QUESTION), _first(record, _ANSWER)
    if not isinstance(question, str) or not question.strip() or answer is None:
        raise UsageError(
            f"bad problem at {where}",
            "it needs the fields 'question' (text) and 'answer'",
            'Write {"question": "...", "answer": "..."}',
        )
    return Problem(where, question, _final(str(answer)))


def _final(answer: str) -> str:
    """The answer alone, where the reference is a worked solution."""
    return (
        extract_answer_from_boxed(answer)
        or extract_answer_with_regex(answer, r"#### (.+)$")
        or answer.strip()
    )


def _first(record: Any, names: Sequence[str]) -> Any:
    if not isinstance(record, dict):
        return None
    return next((record[name] for name in names if record.get(name) is not None), None)


class Grader:
    r"""Compares what stands in the last ``\boxed{}`` of a text with the reference answer.

    An answer of the reference's canonical form is right. So is one that ``math-verify`` finds
    equal, which is more lenient: ``50\%`` is right where the reference says ``50``, and where it
    says ``0.5``. For that there is a process with sympy; ``close`` ends it.

    Args:
        extract: finds the answer in a text; a text without one is wrong.
        equivalence: whether an answer and the reference mean the same, in place of all that.
        time_limit: seconds for one comparison by ``math-verify``; beyond it an answer is wrong.
    """

    def __init__(
        self,
        extract: Callable[[str], str | None] = extract_answer_from_boxed,
        equivalence: Callable[[str, str], bool] | None = None,
        time_limit: float = 3.0,
    ) -> None:
        self._extract, self._time_limit = extract, time_limit
        self._equivalence = equivalence or self._is_equal
        self._sympy: SympyPool | None = None

    def grade(self, text: str | None, reference: str) -> bool:
        """Whether ``text`` answers ``reference``. May take seconds where sympy is needed.

        Raises:
            DependencyError: it takes sympy, and ``math-verify`` is not installed.
        """
        answer = self._extract(text or "")
        return answer is not None and self._equivalence(answer, reference)

    def close(self) -> None:
        """End the process with sympy; it starts again if it is needed."""
        if self._sympy is not None:
            self._sympy.close()
            self._sympy = None

    def _is_equal(self, answer: str, reference: str) -> bool:
        forms = canonical_form(answer), canonical_form(reference)
        if forms[0] == forms[1]:
            return True
        if not (answer and reference) or all(map(_is_plain, (answer, reference), forms)):
            return False
        self._sympy = self._sympy or SympyPool(1)
        return self._sympy.verify(reference, answer, self._time_limit).result()


def _is_plain(answer: str, form: object) -> bool:
    """Whether there is one way to read an answer: words, or a number that is no percentage."""
    if isinstance(form, Fraction):
        return not re.search("[%=]", answer)
    return isinstance(form, str) and form.replace(" ", "").isalpha()
