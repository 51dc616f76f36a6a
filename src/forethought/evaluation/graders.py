r"""Graders: of mathematical answers, of answers that an exact checker verifies, and of programs.

Each is a ``Grader`` (``problems``) and may be shared between threads.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
from collections.abc import Callable

from forethought.answers.answer_extraction import (
    ANSWER_RULE,
    AnswerRule,
    ExtractedAnswer,
    extract_answer,
)
from forethought.answers.answers import AnswerClasses, MathEquivalence
from forethought.answers.code_blocks import program_in
from forethought.answers.sympy_pool import SympyPool
from forethought.errors import ParameterError
from forethought.evaluation.problems import Problem
from forethought.rewards.verifier import Verifier
from forethought.sandbox.sandbox import Sandbox
from forethought.scaffolding.settings import validated

_logger = logging.getLogger(__name__)


class MathGrader:
    r"""Compares the final answer of a text with the reference answer.

    An answer is right if its canonical form is the reference's, as in votes (``MathEquivalence``).
    A percentage is accepted with and without its sign: ``50\%`` is right for both ``50`` and
    ``0.5``.

    Args:
        answer: the rule that extracts the answer, see ``answers.answer_extraction``; a text without
            one is wrong.
        extract: extracts the answer in place of the rule.
        equivalence: whether an answer and the reference mean the same; replaces the above.
        time_limit: work for one formula, as in ``MathEquivalence``; an answer that takes more is
            wrong unless it is written like the reference.
    """

    def __init__(
        self,
        extract: Callable[[str], str | None] | None = None,
        equivalence: Callable[[str, str], bool] | None = None,
        time_limit: float = 3.0,
        *,
        answer: AnswerRule = "auto",
    ) -> None:
        self._extract, self._rule = extract, MathEquivalence(time_limit)
        self._answer = validated("answer", answer, ANSWER_RULE)
        if extract is not None and answer != "auto":
            raise ParameterError(
                "answer and extract exclude each other",
                f"got answer={answer!r} and a function",
                "Leave one of them out",
            )
        self._equivalence = equivalence or self._is_equal
        self._sympy: SympyPool | None = None
        self._lock = threading.Lock()

    def grade(self, text: str | None, problem: Problem, *, is_cut: bool = False) -> bool:
        """Whether ``text`` answers the problem. May take seconds where sympy is needed.

        Raises:
            DependencyError: it takes sympy, and ``math-verify`` is not installed.
        """
        extracted = self.answer_of(text, is_cut=is_cut)
        return extracted is not None and self._equivalence(extracted.text, problem.answer)

    def answer_of(self, text: str | None, *, is_cut: bool = False) -> ExtractedAnswer | None:
        """The answer that is compared; a text that ``is_cut`` has no last number."""
        if self._extract is None:
            return extract_answer(text, self._answer, is_cut=is_cut)
        answer = self._extract(text or "")
        return None if answer is None else ExtractedAnswer(answer, "function")

    def close(self) -> None:
        """End the process with sympy; it starts again when it is needed."""
        with self._lock:
            pool, self._sympy = self._sympy, None
        if pool is not None:
            pool.close()

    def _is_equal(self, answer: str, reference: str) -> bool:
        with self._lock:
            pool = self._sympy = self._sympy or SympyPool(1)
        classes = AnswerClasses(self._rule, pool)
        variants = [answer, reference, *_without_percent(answer, reference)]
        classes.find(variants)
        for text in (answer, reference):
            if classes.is_uncompared(text):
                _logger.warning("compared as text, as it takes too much work: %s", text[:200])
        forms = [classes.of(text) for text in variants]
        pairs = zip(forms[::2], forms[1::2], strict=True)
        return bool(answer.strip()) and any(one == other for one, other in pairs)


_PERCENT = re.compile(r"\s*(?:\\?%|\\?\s*percent|\\text\{\s*percent\s*\})\s*\.?\s*$")


def _without_percent(answer: str, reference: str) -> tuple[str, ...]:
    """Both without the sign of a percentage, if exactly one of them has it."""
    bare = _PERCENT.sub("", answer), _PERCENT.sub("", reference)
    return bare if (bare[0] == answer) != (bare[1] == reference) else ()


class VerifierGrader:
    """Asks an exact checker, which reads the question and the answer and needs no reference."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    def grade(self, text: str | None, problem: Problem, *, is_cut: bool = False) -> bool:
        """Whether the checker accepts ``text``, as it is."""
        return bool(text) and self._verifier(problem.question, text or "")

    def answer_of(self, text: str | None, *, is_cut: bool = False) -> ExtractedAnswer | None:
        """The expression that is checked."""
        return extract_answer(text, "boxed")

    def close(self) -> None:
        """Nothing to end."""


class CodeGrader:
    """Runs programs in a sandbox with the tests of their problems, as HumanEval has them.

    A problem's fields are ``prompt`` (the program up to the body of a function), ``entry_point``
    (the function's name) and ``test`` (a program that defines ``check(function)``). Source:
    "Evaluating Large Language Models Trained on Code" (Chen et al. 2021).

    A program that ends before its tests have passed, by ``sys.exit()`` for example, is wrong: the
    last statement prints a random number, which has to arrive.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def grade(self, text: str | None, problem: Problem, *, is_cut: bool = False) -> bool:
        """Whether the program in ``text``, as it is, passes the tests of the problem. May take
        seconds.
        """
        if not text or not text.strip():
            return False
        fields = problem.fields
        program = completed_program(text, fields["prompt"], fields["entry_point"])
        passed = secrets.token_hex(16)
        check = f"{fields['test']}\n\ncheck({fields['entry_point']})\nprint('\\n{passed}')\n"
        result = self._sandbox.run(f"{program}\n\n{check}")
        return result.status == "ok" and result.stdout.endswith(f"\n{passed}\n")

    def answer_of(self, text: str | None, *, is_cut: bool = False) -> ExtractedAnswer | None:
        """The text, which is a program or has one."""
        return ExtractedAnswer(text, "code") if text and text.strip() else None

    def close(self) -> None:
        """Nothing to end: each program has ended with its result."""


_STOP = re.compile(r"\n(?=class\b|def\b|#|if\b|print\b|@|assert\b)")
"""What ends a completion: code after the function. The first five are those of the paper."""


def completed_program(text: str, prompt: str, entry_point: str) -> str:
    """The program of an answer to a HumanEval problem, without its tests.

    The code is the last block that defines the function, else the last block, else the whole text,
    see ``program_in``. Code that defines the function replaces the prompt's, after the imports and
    functions above it; other code is the body and is appended to the prompt.

    Args:
        text: of the answer.
        prompt: imports, perhaps other functions, and the function's head and docstring.
        entry_point: name of the function.
    """
    definition = re.compile(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(entry_point)}\b", re.M)
    program = program_in(text, definition)
    code = text if program is None else program.code
    if definition.search(code):
        head = definition.search(prompt)
        return f"{prompt[: head.start()] if head else prompt}\n{code}"
    if program is not None and program.is_block:
        return prompt + _indented(code)
    return prompt + _STOP.split(f"\n{code}", maxsplit=1)[0].removeprefix("\n")


def _indented(body: str) -> str:
    """A function's body with the indentation that it has after its head."""
    lines = body.rstrip("\n").split("\n")
    first = next((line for line in lines if line.strip()), "")
    if first[:1] in (" ", "\t"):
        return body
    return "\n".join(f"    {line}" for line in lines)
