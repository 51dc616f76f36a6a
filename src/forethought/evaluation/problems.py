r"""Questions with known answers, and the grading of answers to them.

A user's file is JSON lines, one object per line with ``question`` and ``answer`` (or ``problem``
and ``solution``); other fields are ignored. The answer of a worked solution is what stands in its
last ``\boxed{}`` or behind its last ``####``.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forethought.errors import ParameterError, UsageError
from forethought.scaffolding.answers import extract_answer_from_boxed, extract_answer_with_regex
from forethought.scaffolding.canonical_form import canonical_form
from forethought.scaffolding.sympy_pool import SympyPool

if TYPE_CHECKING:
    from forethought.llm.async_llm import AsyncLLM
    from forethought.llm.llm import LLM

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
    lines = read_lines(path, "problems", "Give a file with one JSON object per line")
    return [_from_line(line, where) for where, line in lines]


def read_lines(path: str | Path, what: str, fix: str) -> list[tuple[str, str]]:
    """The lines of a text file that are not blank, each with its place, ``path:number``.

    Args:
        path: of the file.
        what: the lines are, for messages, such as "problems".
        fix: what to do about a file that has none.

    Raises:
        UsageError: the file cannot be read, or has no such line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the {what} in {path}", str(error), fix) from error
    found = [
        (f"{path}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip()
    ]
    if not found:
        raise UsageError(f"no {what} in {path}", "the file is empty", fix)
    return found


def user_prompt(llm: LLM | AsyncLLM, text: str, system: str | None = None) -> str | list[int]:
    """A user's text through the model's chat template; as it is where there is none.

    Args:
        llm: with the template.
        text: of the user.
        system: system prompt, if any; needs a template.
    """
    if not llm.tokenizer.chat_template:
        return text
    messages = [{"role": "system", "content": system}] if system else []
    return llm.chat_prompt([*messages, {"role": "user", "content": text}])


def choose(problems: Sequence[Problem], count: int | None, seed: int = 0) -> list[Problem]:
    """``count`` of the problems, drawn without replacement by ``seed``; None: all, in their order.

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
    """The final answer, where the reference is a worked solution."""
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

    An answer is right if its canonical form is the reference's, or if ``math-verify`` finds them
    equal, which is more lenient: ``50\%`` is right for both ``50`` and ``0.5``. It runs in a
    process with sympy, which ``close`` ends.

    Args:
        extract: finds the answer in a text; a text without one is wrong.
        equivalence: whether an answer and the reference mean the same; replaces the above.
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
