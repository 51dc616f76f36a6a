r"""Tasks: problems of a known kind, how they are asked, and how answers are graded.

=============  ==========================================  =====================================
task           data                                        graded by
=============  ==========================================  =====================================
arithmetic     shipped; JSON lines of one's own            canonical forms
countdown      shipped; numbers and target, or questions   the exact checker of expressions
gsm8k          ``question``, ``answer`` with ``#### 72``   canonical forms
math500        ``problem``, ``answer`` or ``\boxed{}``     canonical forms
aime24         ``problem``, ``answer`` from 0 to 999       canonical forms
humaneval      ``prompt``, ``test``, ``entry_point``       the tests, run in a sandbox
game24         ``Puzzles`` such as ``1 1 4 6``             the exact checker of expressions
=============  ==========================================  =====================================

Questions are asked without examples (zero-shot).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from forethought.answers.answer_extraction import AnswerRule, extract_answer_from_boxed
from forethought.errors import ParameterError, UnknownNameError, UsageError
from forethought.evaluation.data_files import Record, read_records
from forethought.evaluation.graders import CodeGrader, MathGrader, VerifierGrader
from forethought.evaluation.problems import Grader, Problem, of_record, shipped
from forethought.rewards.verifier import MAX_DIGITS, read_countdown, verifier
from forethought.sandbox.sandbox import Sandbox

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
_EXPRESSION = (
    "Use each number {times} once, with +, -, *, / and parentheses only. Please reason step by "
    "step, and put the final expression, without its value, within \\boxed{{}}."
)
_CODE = (
    "Complete the function. Answer with the whole function, with its imports, in one fenced "
    "Python code block."
)


@dataclass(frozen=True, slots=True)
class Task:
    """Problems of one kind, as returned by ``task(name)``."""

    name: str
    instruction: str
    """Appended to each question for models that are not embedded."""
    embedded_model: str | None
    """The embedded model that it is for, if there is one."""
    read: Callable[[Record], Problem]
    """Makes a problem of a record of the published data set."""
    fix: str
    """What data to give where there is none."""
    shipped: Callable[[], list[Problem]] | None = None
    """The problems that come with the embedded model."""
    verifier: str | None = None
    """The exact checker that grades it, if there is one."""
    is_code: bool = False
    """Whether answers are programs."""
    folder: str | None = None
    """The configuration to read, of a data set with several."""

    def problems(self, data: str | Path | None = None) -> list[Problem]:
        """The problems of a data set.

        Args:
            data: a file or directory in the format of the published data set, or its id on the
                Hugging Face Hub, see ``data_files``; None: the shipped ones.

        Raises:
            UsageError: none are shipped, or ``data`` cannot be read; names file, line and field.
            DependencyError: reading takes a package that is not installed.
        """
        if data is None:
            if self.shipped is None:
                raise UsageError(f"no data for the task {self.name}", "none is shipped", self.fix)
            return self.shipped()
        records = read_records(data, self.folder)
        return _named([self.read(record) for record in records], records)

    def grader(self, *, unsafe_code: bool = False, answer: AnswerRule = "auto") -> Grader:
        """A grader of its answers.

        Args:
            unsafe_code: run programs also where they cannot be isolated.
            answer: the rule that extracts an answer, see ``answers.answer_extraction``.

        Raises:
            ParameterError: an argument has no effect on this kind of answers.
            IsolationError: programs cannot be isolated here, and ``unsafe_code`` is False.
        """
        if answer != "auto" and (self.is_code or self.verifier is not None):
            raise ParameterError(
                "invalid answer",
                f"the grader of the task {self.name} finds the answers itself",
                "Leave it out",
            )
        if self.is_code:
            return CodeGrader(Sandbox(unsafe=unsafe_code))
        if unsafe_code:
            raise ParameterError(
                "invalid unsafe_code",
                f"answers of the task {self.name} are no programs",
                "Leave it out",
            )
        if self.verifier is not None:
            return VerifierGrader(verifier(self.verifier))
        return MathGrader(answer=answer)


def task(name: str) -> Task:
    """The task of this name, or ``UnknownNameError``."""
    match = next((one for one in _tasks() if one.name == name), None)
    if match is None:
        raise UnknownNameError("task", name, names())
    return match


def names() -> tuple[str, ...]:
    """The names of all tasks."""
    return tuple(one.name for one in _tasks())


def _tasks() -> tuple[Task, ...]:
    return (
        Task("arithmetic", BOXED, "forethought/reasoner", of_record, _OWN, shipped=shipped),
        Task(
            "countdown",
            _EXPRESSION.format(times="at most"),
            "forethought/countdown",
            _countdown,
            "Give a file with 'numbers' and 'target', or with 'question'",
            shipped=partial(shipped, "countdown"),
            verifier="countdown",
        ),
        Task("gsm8k", BOXED, None, _gsm8k, _give("GSM8K", "openai/gsm8k"), folder="main"),
        Task("math500", BOXED, None, _math, _give("MATH-500", "HuggingFaceH4/MATH-500")),
        Task("aime24", BOXED, None, _aime, _give("AIME 2024", "HuggingFaceH4/aime_2024")),
        Task(
            "humaneval",
            _CODE,
            None,
            _humaneval,
            _give("HumanEval", "openai/openai_humaneval"),
            is_code=True,
        ),
        Task(
            "game24",
            _EXPRESSION.format(times="exactly"),
            None,
            _game24,
            "Give the csv file of Tree of Thoughts (24.csv): --data FILE",
            verifier="game24",
        ),
    )


def _give(what: str, hub_id: str) -> str:
    return f"Give the file of {what}, or its id on the Hub: --data FILE, --data {hub_id}"


_WHOLE = re.compile(rf"[0-9]{{1,{MAX_DIGITS}}}")
"""The numbers that the exact checkers read."""
_OWN = "Give JSON lines with 'question' and 'answer'"


def _named(problems: list[Problem], records: Sequence[Record]) -> list[Problem]:
    """The problems, by their places in the files if their own names are not unique."""
    if len({problem.name for problem in problems}) == len(problems):
        return problems
    return [
        replace(problem, name=record.where)
        for problem, record in zip(problems, records, strict=True)
    ]


# ---- records of the published data sets ----------------------------------------------------------


def _gsm8k(record: Record) -> Problem:
    solution = record.text("answer")
    _, mark, answer = solution.rpartition("####")
    if not mark or not answer.strip():
        record.refuse("'answer' has no '#### ' with the final answer", "GSM8K ends in '#### 72'")
    return Problem(record.name, record.text("question"), answer.strip())


def _math(record: Record) -> Problem:
    name = str(record.get("unique_id") or record.name)
    return Problem(name, record.text("problem", "question"), _answer_or_box(record))


def _aime(record: Record) -> Problem:
    answer = _answer_or_box(record)
    digits = re.fullmatch(r"0*(\d{1,3})(?:\.0+)?", answer)
    if digits is None:
        record.refuse(f"its answer is {answer!r}", "Answers of AIME are integers from 0 to 999")
    name = str(record.get("id", "url") or record.name)
    return Problem(name, record.text("problem", "question"), str(int(digits[1])))


def _answer_or_box(record: Record) -> str:
    """The field ``answer``, else the content of the solution's last box."""
    answer = record.get("answer")
    if answer is None:
        answer = extract_answer_from_boxed(str(record.get("solution") or ""))
    if answer is None or not str(answer).strip():
        record.refuse("it has no 'answer', and no 'solution' with a \\boxed{}", "Give one of them")
    return str(answer).strip()


def _humaneval(record: Record) -> Problem:
    fields = {name: record.text(name) for name in ("prompt", "entry_point", "test")}
    entry_point = fields["entry_point"]
    if not entry_point.isidentifier():
        record.refuse(f"'entry_point' is {entry_point!r}", "Give the name of a function")
    if not re.search(rf"^def[ \t]+{re.escape(entry_point)}\b", fields["prompt"], re.M):
        record.refuse(f"'prompt' does not define {entry_point!r}", "It ends in that function")
    if not re.search(r"^def[ \t]+check\b", fields["test"], re.M):
        record.refuse("'test' does not define 'check'", "HumanEval has 'def check(candidate)'")
    name = str(record.get("task_id") or record.name)
    return Problem(name, fields["prompt"], str(record.get("canonical_solution") or ""), fields)


def _game24(record: Record) -> Problem:
    return _expression(record, "puzzles", 24, 4)


def _countdown(record: Record) -> Problem:
    if record.get("question") is not None:
        question = record.text("question")
        try:
            read_countdown(question)
        except UsageError as error:
            record.refuse(error.why, error.fix)
        return Problem(record.name, question, str(record.get("answer") or ""))
    target = record.get("target")
    if not _WHOLE.fullmatch(str(target)):
        record.refuse(
            f"'target' is {target!r}",
            f"Give a whole number of at most {MAX_DIGITS} digits, or a 'question'",
        )
    return _expression(record, "nums", int(target))


def _expression(record: Record, field: str, target: int, count: int | None = None) -> Problem:
    """A problem that asks to make ``target``, in the words of the countdown model."""
    value = record.get(field, "numbers")
    if value is None:
        record.text(field, "numbers")
    listed = value if isinstance(value, Sequence) and not isinstance(value, str) else None
    numbers = re.findall(r"\S+", str(value).replace(",", " ")) if listed is None else listed
    if not all(_WHOLE.fullmatch(str(number)) for number in numbers) or len(numbers) < 2:
        record.refuse(
            f"{field!r} is {value!r}",
            f"Give whole numbers of at most {MAX_DIGITS} digits, such as 1 1 4 6",
        )
    if count not in (None, len(numbers)):
        record.refuse(f"{field!r} has {len(numbers)} numbers", f"Give {count}, such as 1 1 4 6")
    *first, last = map(str, numbers)
    return Problem(record.name, f"Use {', '.join(first)} and {last} to make {target}.", str(target))
