"""The process that works on formulas: a request per line in, its result per line out, as JSON.

``{"seconds": 1.0, "form": "x+1"}`` is answered with the formula's canonical form, and
``{"seconds": 1.0, "verify": ["1/2", "0.5"]}`` with math-verify's result; ``null`` means that it
cannot be said. Before that it prints one line when it is ready.

Sympy can take for ever, also inside a single call that neither returns to Python nor lets another
thread run, so time is kept by ``faulthandler``, whose timer needs neither: when a request has taken
its seconds, the process ends. It also ends when its input does, as it does when its parent is gone.
Run by its path, it imports nothing of the package; see ``sympy_pool`` for the other side.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import queue
import re
import signal
import sys
import threading
from fractions import Fraction
from typing import Any

_START_SECONDS = 60.0
_DIGITS = 50
"""Decimal digits that values are worked out to; forms keep half of them."""
_NUM_POINTS = 3
_NEGLIGIBLE = Fraction(1, 10**45)
_LONGEST = 4000
"""Bits; numbers that are larger, or as small, are identified by their first digits."""

Form = str | list[Any]
"""A fraction such as ``"1/2"``, or a list: a kind, and forms or texts."""


def canonical_form(text: str) -> Form | None:
    """The canonical form of a formula: its values at fixed points, to 25 digits.

    Formulas that are equal for all values of their symbols have the same form, however they are
    written; two that differ have not, unless they agree at all points (polynomial identity testing:
    Schwartz 1980, "Fast Probabilistic Algorithms for Verification of Polynomial Identities").
    Where all values are the same the formula is a number. An equation or inequality is identified
    by the difference of its sides, up to a factor, and what has no values by its structure.
    """
    import sympy

    formula = _parsed(text)
    if isinstance(formula, str) or formula is None or _is_partial(formula, text):
        return None
    if isinstance(formula, sympy.core.relational.Relational):
        return _relation(formula)
    if isinstance(formula, sympy.Expr):
        return _expression(formula)
    return ["structure", sympy.srepr(formula)]


def _parsed(text: str) -> Any:
    from math_verify import parse

    found = parse(f"\\boxed{{{text}}}", parsing_timeout=None)
    return found[0] if found else None


_COMMAND = re.compile(r"\\[A-Za-z]+")
_BINDING = re.compile(r"\\(?:sum|prod|int|lim)(?![A-Za-z])")
_CONSTANTS = frozenset("eid")


def _is_partial(formula: Any, text: str) -> bool:
    """Whether the parser has left out letters: what it cannot read it drops in silence."""
    if _BINDING.search(text):
        return False
    letters = set(re.findall("[A-Za-z]", _COMMAND.sub(" ", text))) - _CONSTANTS
    read = {letter for symbol in formula.free_symbols for letter in str(symbol)}
    return not letters <= read


def _expression(formula: Any) -> Form:
    import sympy

    formula = _evaluated(formula)
    if formula.is_infinite and formula.is_extended_real:
        return ["infinity", "-" if formula.is_extended_negative else "+"]
    values = [_form(value) for value in _values(formula)]
    first = values[0]
    if first is None or None in values:
        return ["structure", sympy.srepr(formula)]
    return first if all(value == first for value in values) else ["values", *values]


def _relation(formula: Any) -> Form:
    """The form by the values of the difference of its sides, divided by the first of them."""
    import sympy

    kind, difference = formula.rel_op, formula.lhs - formula.rhs
    if kind in {">", ">="}:
        kind, difference = {">": "<", ">=": "<="}[kind], -difference
    values = _values(_evaluated(difference))
    scale = values[0] if kind in {"==", "!="} else abs(values[0])
    if abs(scale) < 10**-20 or not all(value.is_number for value in values):
        return ["structure", sympy.srepr(formula)]
    return [kind, *(_form((value / scale).evalf(_DIGITS)) for value in values)]


def _evaluated(formula: Any) -> Any:
    """The formula with its decimals as fractions, its sums worked out, and ``i`` as a number."""
    import sympy

    units = {symbol: sympy.I for symbol in formula.free_symbols if symbol.name == "i"}
    return sympy.nsimplify(formula.doit().subs(units), rational=True)


def _values(formula: Any) -> list[Any]:
    """What it is worth at the fixed points, one value if it has no symbols."""
    if formula.is_Rational or not formula.free_symbols:
        return [formula if formula.is_Rational else formula.evalf(_DIGITS)]
    return [
        formula.evalf(
            _DIGITS, subs={symbol: _point(symbol.name, n) for symbol in formula.free_symbols}
        )
        for n in range(_NUM_POINTS)
    ]


def _point(name: str, number: int) -> Any:
    """A value for a symbol, by its name: between 0.5 and 2.5 in size, of either sign."""
    import sympy

    digest = hashlib.sha256(f"{number}/{name}".encode()).digest()
    size = sympy.Rational(1, 2) + sympy.Rational(int.from_bytes(digest[:6], "big"), 2**47)
    return -size if number == _NUM_POINTS - 1 else size


def _form(value: Any) -> Form | None:
    """A value in writing; None if it is no finite number."""
    if not value.is_number or not value.is_finite:
        return None
    real, imaginary = map(_written, value.as_real_imag())
    if imaginary != "0/1":
        return ["complex", real, imaginary]
    return real if "/" in real else ["real", real]


def _written(part: Any) -> str:
    """A real number as a fraction, if it is one to within rounding; else its first digits."""
    import sympy

    if part.is_Rational:
        if max(abs(part.p), part.q).bit_length() < _LONGEST:
            return f"{part.p}/{part.q}"
    elif abs(_exponent(part)) < _LONGEST:
        exact = Fraction(str(sympy.Rational(part)))
        if abs(exact) < _NEGLIGIBLE:
            return "0/1"
        short = exact.limit_denominator(10**9)
        if abs(short - exact) < abs(exact) / 10**30:
            return f"{short.numerator}/{short.denominator}"
    return str(part.evalf(_DIGITS // 2))


def _exponent(part: Any) -> int:
    """The exponent of two in a number that is no fraction."""
    _, _, exponent, bits = part._mpf_
    return int(exponent + bits)


def verify(gold: str, answer: str) -> bool:
    """Whether math-verify finds the two equal, in one direction or the other."""
    import math_verify

    one, other = _all_parsed(gold), _all_parsed(answer)
    return bool(
        math_verify.verify(one, other, timeout_seconds=None)
        or math_verify.verify(other, one, timeout_seconds=None)
    )


def _all_parsed(text: str) -> Any:
    from math_verify import parse

    return parse(f"\\boxed{{{text}}}", parsing_timeout=None)


def _answer(request: dict[str, Any]) -> Any:
    try:
        if "form" in request:
            return canonical_form(request["form"])
        return verify(*request["verify"])
    except Exception:
        return None


def _read(lines: queue.SimpleQueue[str]) -> None:
    """Hand on requests; at the end of the input the process exits, even during one."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def main() -> None:
    """Serve until the input ends. The arguments are directories to import from."""
    faulthandler.dump_traceback_later(_START_SECONDS, exit=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started us
    sys.path += [directory for directory in sys.argv[1:] if directory not in sys.path]
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    verify(*["x+\\frac{1}{2}"] * 2)  # the first formula takes longer than all others
    result: Any = canonical_form("x+\\frac{1}{2}")
    while True:
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
        request = json.loads(lines.get())
        faulthandler.dump_traceback_later(request["seconds"], exit=True)
        result = _answer(request)


if __name__ == "__main__":
    main()
