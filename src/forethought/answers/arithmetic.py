r"""Arithmetic: the exact value of a formula in LaTeX or plain text, where it has one.

Numbers, mixed numbers, letters, ``+ - * / ^ !``, ``\frac``, ``\sqrt``, ``\binom`` and ``\pi`` are
read. A formula may take ``_MAX_WORK`` products of terms, some 50 ms, so that none holds up an event
loop; what is beyond that is too large. Nothing is ever evaluated as Python.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from forethought.answers.exact_value import (
    IMAGINARY_UNIT,
    MAX_DIVISOR,
    MAX_TERMS,
    ExactValue,
    NotExact,
    TooLarge,
    bits,
    is_short_power,
)

_MAX_WORK = 5_000
"""Products of two terms with short coefficients, or what takes as long."""
_MAX_DEPTH, _MAX_LENGTH = 30, 1000
"""Brackets in brackets, and digits of a number."""
_TOKEN = re.compile(
    r"\s*(?:(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)|(\\[A-Za-z]+|\*\*|sqrt|.))", re.DOTALL
)
_PLUS, _TIMES, _OVER = {"+", "-"}, {"*", "\\cdot", "\\times", "\\ast"}, {"/", "\\div"}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_FUNCTIONS, _NO_LETTERS = {"f", "g", "h"}, {"e", "d", "E", "I"}


def exact_value(text: str) -> ExactValue:
    """The value of a formula in LaTeX or plain text.

    Raises:
        NotExact: it has no such value; it may be a formula nevertheless.
        TooLarge: its size is beyond the bounds.
    """
    parser = _Parser(text)
    value = parser.sum(0)
    if parser.token:
        raise NotExact
    return value


class _Parser:
    r"""Recursive descent; the value is worked out on the way::

    sum      sign* product (sign product)*
    product  power ((times | over) sign? power | power)*      not: over power power
    power    atom "!"? ("^" exponent)?
    exponent sign* (digits | group) ("^" exponent)?
    atom     number | letter | "\pi" | bracket | "\frac" group group | "\sqrt" ("[" sum "]")? group
    group    bracket | digit | letter
    """

    def __init__(self, text: str) -> None:
        self._tokens = [number or other for number, other in _TOKEN.findall(text.strip())]
        self._next, self._work = 0, _MAX_WORK

    @property
    def token(self) -> str:
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def _take(self) -> str:
        token = self.token
        self._next += 1
        return token

    def _signs(self) -> int:
        sign = 1
        while self.token in _PLUS:
            sign = -sign if self._take() == "-" else sign
        return sign

    def sum(self, depth: int) -> ExactValue:
        """The value of products added and subtracted."""
        if depth > _MAX_DEPTH:
            raise NotExact
        value = self._signed(depth)
        while self.token in _PLUS:
            value += self._signed(depth)
        return value

    def _signed(self, depth: int) -> ExactValue:
        sign = self._signs()
        value = self._product(depth)
        return value if sign > 0 else -value

    def _product(self, depth: int) -> ExactValue:
        value, is_divided = self._power(depth), False
        while self.token:
            if self.token in _TIMES | _OVER:
                is_divided = self._take() in _OVER
                sign = self._signs()
                factor = self._power(depth)
                factor = factor if sign > 0 else -factor
                value = self._times(value, self._inverse(factor) if is_divided else factor)
            elif self._begins_atom():
                if is_divided:  # 1/2x has two meanings
                    raise NotExact
                value = self._times(value, self._power(depth))
            else:
                break
        return value

    def _charge(self, work: int) -> None:
        self._work -= work
        if self._work < 0:
            raise TooLarge

    def _times(self, one: ExactValue, other: ExactValue) -> ExactValue:
        self._charge(one.work * other.work)
        return one * other

    def _inverse(self, value: ExactValue) -> ExactValue:
        self._charge(500 if len(value.terms) > 1 else 1)
        return value.inverse()

    def _raised(self, value: ExactValue, exponent: ExactValue) -> ExactValue:
        number = exponent.rational
        if number is None or bits(number) > 512:
            raise TooLarge if not exponent.letters and value.rational is not None else NotExact
        if value.rational == 0 and number <= 0:
            raise NotExact
        if len(value.terms) > 1 and number.denominator == 1:
            if abs(number) > MAX_TERMS:
                raise TooLarge
            base, result = self._inverse(value) if number < 0 else value, ExactValue.of(1)
            for _ in range(abs(int(number))):
                result = self._times(result, base)
            return result
        return self._to_power(value, number)

    def _to_power(
        self, value: ExactValue, exponent: Fraction, *, is_root: bool = False
    ) -> ExactValue:
        """A single term to a power, for which its coefficient is factored."""
        for coefficient in value.terms.values():
            if is_short_power(coefficient, exponent):
                continue
            for whole in (abs(coefficient.numerator), coefficient.denominator):
                trials = min(MAX_DIVISOR, math.isqrt(whole)) // 64
                self._charge(1 + trials * (1 + (whole.bit_length() >> 9)))
        return value.power(exponent, is_root=is_root)

    def _begins_atom(self) -> bool:
        """Whether a factor follows; a number does only after a bracket."""
        token = self.token
        if token[0].isdigit():
            return self._tokens[self._next - 1] in _CLOSING.values()
        return token[0] in "([{\\" or token.isalpha()

    def _power(self, depth: int) -> ExactValue:
        value = self._atom(depth)
        if self.token == "!":
            self._take()
            value = value.factorial()
        if self.token in ("^", "**"):
            is_python = self._take() == "**"
            value = self._raised(value, self._exponent(depth, is_python))
        if self.token in ("!", "^", "**", "'", "_"):
            raise NotExact
        return value

    def _exponent(self, depth: int, is_python: bool) -> ExactValue:
        if depth > _MAX_DEPTH:
            raise NotExact
        sign = self._signs()
        if self.token[:1].isdigit():
            value = ExactValue.of(self._number(self._take()))
        elif self.token in ("(", "{") or self.token.isalpha() or not is_python:
            value = self._group(depth)
        else:
            raise NotExact
        if self.token in ("^", "**"):  # 2^3^4 is 2^(3^4)
            is_python = self._take() == "**"
            value = self._raised(value, self._exponent(depth + 1, is_python))
        return value if sign > 0 else -value

    def _atom(self, depth: int) -> ExactValue:
        token = self._take()
        if token[:1].isdigit() or (token[:1] == "." and len(token) > 1):
            return self._number_or_mixed(token, depth)
        if token in _CLOSING:
            return self._bracket(token, depth)
        if token == "\\pi":
            return ExactValue.generator("pi")
        if token in ("\\frac", "\\binom"):
            above, below = self._group(depth), self._group(depth)
            if token == "\\binom":
                return above.binomial(below)
            return self._times(above, self._inverse(below))
        if token in ("\\sqrt", "sqrt"):
            return self._root(depth)
        if len(token) == 1 and token.isascii() and token.isalpha():
            return self._letter(token)
        raise NotExact

    def _letter(self, token: str) -> ExactValue:
        if token in _NO_LETTERS or (token in _FUNCTIONS and self.token == "("):
            raise NotExact
        if token == "i":
            return ExactValue({IMAGINARY_UNIT: Fraction(1)})
        return ExactValue.generator(token)

    def _number(self, token: str) -> Fraction:
        if len(token) > _MAX_LENGTH or self.token[:1].isdigit():
            raise NotExact
        return Fraction(token.replace(",", ""))

    def _number_or_mixed(self, token: str, depth: int) -> ExactValue:
        r"""A number, with ``\frac`` of two numbers after it the sum."""
        value = ExactValue.of(self._number(token))
        if self.token != "\\frac" or not token.isdigit():
            return value
        fraction = self._atom(depth)
        if fraction.rational is None:
            return self._times(value, fraction)
        return value + fraction

    def _bracket(self, opening: str, depth: int) -> ExactValue:
        value = self.sum(depth + 1)
        if self._take() != _CLOSING[opening]:
            raise NotExact
        return value

    def _group(self, depth: int) -> ExactValue:
        r"""The argument of a command: a bracket, or one sign, as in ``\frac12``."""
        if self.token[:1].isdigit() and len(self.token) > 1:
            token = self.token
            self._tokens[self._next] = token[1:]
            return ExactValue.of(int(token[0]))
        token = self._take()
        if token == "{":
            return self._bracket(token, depth)
        if token.isdigit():
            return ExactValue.of(int(token))
        if len(token) == 1 and token.isalpha():
            return self._letter(token)
        raise NotExact

    def _root(self, depth: int) -> ExactValue:
        degree = Fraction(2)
        if self.token == "[":
            self._take()
            number = self._bracket("[", depth).rational
            if number is None or number.denominator != 1 or not 2 <= number <= 1000:
                raise NotExact
            degree = number
        if self.token == "(":
            radicand = self._bracket(self._take(), depth)
        else:
            radicand = self._group(depth)
        return self._to_power(radicand, 1 / degree, is_root=True)
