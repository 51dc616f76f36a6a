r"""Exact checks of answers, found by name: whether an expression solves a number problem.

A verifier reads numbers and target in the question and the last ``\boxed{}`` of the answer, and
works the expression out in fractions::

    accepts = verifier("countdown")
    accepts("Use 3, 5, 7 and 2 to make 40.", r"The answer is \boxed{(3+5)*(7-2)}.")  # True

``countdown``: each number at most once; the target is the integer that follows the list of numbers
in the question, or else the last one before it. ``game24``: each of four numbers exactly once, and
the target is 24. Expressions are made of whole numbers, brackets and the four operations, as
``+ - * / x × · ÷`` or in LaTeX (``\times``, ``\cdot``, ``\div``, ``\frac{}{}``); a sign in front of
a number is not among them. ``= 24`` may follow if it is the target. Nothing is ever evaluated as
Python, and longer texts than ``MAX_LENGTH`` characters are not accepted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from forethought.answers.answer_extraction import extract_answer
from forethought.errors import UnknownNameError, UsageError

Verifier = Callable[[str, str], bool]
"""(text of the question, text of the answer) -> whether the answer is right."""

MAX_LENGTH = 400
"""Characters of an expression."""
MAX_DIGITS = 9
MAX_DEPTH = 40
"""Brackets within brackets."""

_GAP = r"(?:\s*[,;]\s*(?:and\s+)?|\s+and\s+|\s+)"
_LIST = re.compile(rf"(?<![\d.])\d{{1,{MAX_DIGITS}}}(?:{_GAP}\d{{1,{MAX_DIGITS}}}(?![\d.]\d))+")
_INTEGER = re.compile(rf"(?<![\d.])\d{{1,{MAX_DIGITS}}}(?!\d|\.\d)")
_OTHER_NUMBER = re.compile(r"(?<![\w)])-\d+|\d+\.\d+|(?<!\d)\d{1,3}(?:,\d{3})+(?!\d)")
"""Negative, decimal, or with separators of thousands."""
_NUMBER = re.compile(rf"[0-9]{{1,{MAX_DIGITS}}}")
_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|\\[a-zA-Z]+|\S)")
_NOISE = re.compile(r"\\(?:left|right)\b|\\[,;:! ]|\$")
_OPERATIONS = {
    **dict.fromkeys(("+",), "+"),
    **dict.fromkeys(("-", "−", "–"), "-"),
    **dict.fromkeys(("*", "x", "X", "×", "·", "⋅", "∗", "\\times", "\\cdot", "\\ast"), "*"),
    **dict.fromkeys(("/", "÷", "∕", "\\div"), "/"),
}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_FRACTIONS = ("\\frac", "\\dfrac", "\\tfrac")


def verifier(name: str) -> Verifier:
    """The verifier of that name, or ``UnknownNameError``.

    It raises ``UsageError`` for a question without numbers and target.
    """
    if name not in _VERIFIERS:
        raise UnknownNameError("verifier", name, _VERIFIERS)
    return _VERIFIERS[name]


def names() -> list[str]:
    """The names of all verifiers."""
    return list(_VERIFIERS)


def countdown(question: str, answer: str) -> bool:
    """Whether the answer makes the question's target with each of its numbers at most once."""
    numbers, target = read_countdown(question)
    used = _used_numbers(answer, target)
    return used is not None and not used - Counter(numbers)


def game24(question: str, answer: str) -> bool:
    """Whether the answer makes 24 with each of the question's four numbers exactly once."""
    numbers = read_game24(question)
    return _used_numbers(answer, 24) == Counter(numbers)


def read_countdown(question: str) -> tuple[tuple[int, ...], int]:
    """Numbers and target of a question such as ``Use 3, 5, 7 and 2 to make 40.``

    Raises:
        UsageError: it names fewer than two numbers, or no target.
    """
    _refuse_other_numbers(question)
    numbers = _number_list(question)
    after = None if numbers is None else _INTEGER.search(question, numbers.end())
    before = [] if numbers is None else _INTEGER.findall(question[: numbers.start()])
    if numbers is None or not (after or before):
        raise _unreadable(question, "a list of numbers and a target")
    return _integers(numbers.group()), int(after.group() if after else before[-1])


def read_game24(question: str) -> tuple[int, ...]:
    """The four numbers of a question such as ``4 9 10 13``; else raises ``UsageError``."""
    _refuse_other_numbers(question)
    match = _number_list(question)
    numbers = _integers(match.group()) if match else ()
    if len(numbers) != 4:
        raise _unreadable(question, "a list of four numbers")
    return numbers


def _refuse_other_numbers(question: str) -> None:
    """Refuse a question with a negative number, a decimal, or a separator of thousands."""
    if other := _OTHER_NUMBER.search(question):
        raise UsageError(
            "cannot check an answer",
            f"the question {question[:80]!r} has the number {other.group()!r}",
            "Write whole numbers without signs and separators, with blanks after commas",
        )


def _number_list(question: str) -> re.Match[str] | None:
    """The longest list of numbers, and of equally long ones the first."""
    lists = _LIST.finditer(question)
    return max(lists, key=lambda match: len(_integers(match.group())), default=None)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def _unreadable(question: str, expected: str) -> UsageError:
    return UsageError(
        "cannot check an answer",
        f"the question {question[:80]!r} does not name {expected}",
        "Write it like: Use 3, 5, 7 and 2 to make 40.",
    )


def _used_numbers(answer: str, target: int) -> Counter[int] | None:
    """The numbers of the boxed expression; None if it is none, or its value is not the target."""
    boxed = extract_answer(answer, "boxed")
    if boxed is None:
        return None
    term, equals, result = boxed.text.partition("=")
    if equals and result.strip(" $") != str(target):
        return None
    expression = read_expression(term)
    if expression is None or expression.value != target:
        return None
    return Counter(expression.numbers)


@dataclass(frozen=True, slots=True)
class Expression:
    """What an expression is worth, and the numbers in it from left to right."""

    value: Fraction
    numbers: tuple[int, ...]


def read_expression(text: str) -> Expression | None:
    """Work an expression out; None where it is none, divides by zero, or is too long or deep."""
    if len(text) > MAX_LENGTH:
        return None
    tokens = _TOKEN.findall(_NOISE.sub(" ", text))
    parser = _Parser(tokens)
    try:
        value = parser.sum(0)
    except (_NotAnExpression, ZeroDivisionError):
        return None
    return Expression(value, tuple(parser.numbers)) if parser.token is None else None


class _NotAnExpression(Exception):
    """A token where the grammar has no place for it."""


class _Parser:
    r"""Recursive descent, with the value worked out on the way::

    sum      product (("+" | "-") product)*
    product  factor (("*" | "/") factor | factor that is in brackets)*
    factor   number | "(" sum ")" | "\frac" "{" sum "}" "{" sum "}"
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens, self._next = tokens, 0
        self.numbers: list[int] = []

    @property
    def token(self) -> str | None:
        """The next token; None at the end."""
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    @property
    def _operation(self) -> str | None:
        return _OPERATIONS.get(self.token or "")

    def sum(self, depth: int) -> Fraction:
        """The value of products added and subtracted."""
        value = self._product(depth)
        while self._operation in ("+", "-"):
            sign = self._operation
            self._next += 1
            term = self._product(depth)
            value = value + term if sign == "+" else value - term
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while True:
            sign = self._operation
            if sign in ("*", "/"):
                self._next += 1
            elif self.token not in _CLOSING:
                return value
            factor = self._factor(depth)
            value = value / factor if sign == "/" else value * factor

    def _factor(self, depth: int) -> Fraction:
        token = self.token
        if token in _CLOSING:
            return self._bracket(depth + 1)
        self._next += 1
        if token in _FRACTIONS and self.token == "{":
            top = self._bracket(depth + 1)
            if self.token == "{":
                return top / self._bracket(depth + 1)
        elif _NUMBER.fullmatch(token or ""):
            self.numbers.append(int(token or ""))
            return Fraction(self.numbers[-1])
        raise _NotAnExpression

    def _bracket(self, depth: int) -> Fraction:
        closing = _CLOSING[self.token or ""]
        self._next += 1
        if depth > MAX_DEPTH:
            raise _NotAnExpression
        value = self.sum(depth)
        if self.token != closing:
            raise _NotAnExpression
        self._next += 1
        return value


_VERIFIERS: dict[str, Verifier] = {"countdown": countdown, "game24": game24}
