r"""Questions with known answers: a problem, the protocol of its grader, and users' own files.

A user's file has a record with ``question`` and ``answer`` (or ``problem`` and ``solution``) for
each problem, as JSON lines or in another format of ``data_files``; other fields are ignored. The
answer of a worked solution is the content of its last ``\boxed{}`` or the text after its last
``####``. Published data sets are read by ``tasks``.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from forethought import assets
from forethought.answers.answer_extraction import (
    ExtractedAnswer,
    extract_answer_from_boxed,
    extract_answer_with_regex,
)
from forethought.errors import ParameterError, UsageError
from forethought.evaluation.data_files import Record, read_records

if TYPE_CHECKING:
    from forethought.llm.async_llm import AsyncLLM
    from forethought.llm.llm import LLM

_QUESTION = ("question", "problem")
_ANSWER = ("answer", "solution")


@dataclass(frozen=True, slots=True)
class Problem:
    """One question and its reference answer, both as text."""

    name: str
    """Unique among the problems of one file."""
    question: str
    answer: str
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What a grader needs beyond the answer, such as the tests of a program."""


def shipped(model: str = "reasoner") -> list[Problem]:
    """The held-out problems that come with an embedded model, in their fixed order."""
    return [
        Problem(f"{number}", record["question"], str(record["answer"]))
        for number, record in enumerate(assets.problems(model))
    ]


def load(data: str | Path) -> list[Problem]:
    """Read a user's own problems; ``data_files`` describes the formats.

    Raises:
        UsageError: they cannot be read, there are none, or a record has no question or answer.
    """
    return [of_record(record) for record in read_records(data)]


def of_record(record: Record) -> Problem:
    """The problem in a record, which needs ``question`` and ``answer``."""
    answer = record.get(*_ANSWER)
    if answer is None:
        record.refuse("it has no 'answer'", 'Write {"question": "...", "answer": "..."}')
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | Decimal):
        record.refuse(f"its 'answer' is {answer!r:.200}", "It has to be text or a number")
    return Problem(record.where, record.text(*_QUESTION), final_answer(str(answer)))


def read_lines(path: str | Path, what: str, fix: str) -> list[tuple[str, str]]:
    """The lines of a text file that are not blank, each with its place, ``path:number``.

    Args:
        path: of the file.
        what: what the lines are, for messages, such as "problems".
        fix: advice for a file that has none.

    Raises:
        UsageError: the file cannot be read, or has no such line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the {what} in {path}", str(error), fix) from error
    numbered = [
        (f"{path}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip()
    ]
    if not numbered:
        raise UsageError(f"no {what} in {path}", "the file is empty", fix)
    return numbered


def user_prompt(llm: LLM | AsyncLLM, text: str, system: str | None = None) -> str | list[int]:
    """A user's text through the model's chat template; the text itself where there is none.

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
    """``count`` of the problems, drawn without replacement by ``seed``; None: all, in order."""
    if count is None:
        return list(problems)
    if not 1 <= count <= len(problems):
        raise ParameterError(
            "invalid number of problems",
            f"got {count}, and there are {len(problems)}",
            f"Ask for 1 to {len(problems)}",
        )
    return random.Random(seed).sample(list(problems), count)


def final_answer(answer: str) -> str:
    """The final answer of a reference, which may be a worked solution."""
    return (
        extract_answer_from_boxed(answer)
        or extract_answer_with_regex(answer, r"#### (.+)$")
        or answer.strip()
    )


class Grader(Protocol):
    """Decides whether a text solves a problem; for one thread at a time."""

    def grade(self, text: str | None, problem: Problem) -> bool:
        """Whether ``text`` solves ``problem``; a missing answer does not.

        May take seconds: not for an event loop.
        """

    def close(self) -> None:
        """End the processes that it has started."""


@runtime_checkable
class AnswerFinder(Protocol):
    """A grader that shows which answer of a text it grades."""

    def grade(self, text: str | None, problem: Problem, *, is_cut: bool = False) -> bool:
        """As a ``Grader``, by the answer that ``answer_of`` extracts."""

    def answer_of(self, text: str | None, *, is_cut: bool = False) -> ExtractedAnswer | None:
        """The answer, and the rule that extracts it; None if there is none.

        Args:
            text: of the model.
            is_cut: whether it ends at its limit of tokens.
        """


def solves(grader: Grader, text: str, problem: Problem, *, is_cut: bool) -> bool:
    """Whether a text, which ``is_cut`` if a limit of tokens ended it, solves a problem."""
    if isinstance(grader, AnswerFinder):
        return grader.grade(text, problem, is_cut=is_cut)
    return grader.grade(text, problem)
