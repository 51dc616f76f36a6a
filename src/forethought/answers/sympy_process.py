"""The process that evaluates formulas: a request per line in, its result per line out, as JSON.

``{"form": "x+1", "steps": 1000000}`` is answered with the formula's value, see ``canonical_form``;
``null`` means that it cannot be read, and ``"limit"`` that it takes too much. Before that it prints
one line when it is ready.

Each formula is evaluated in a fork of this process, which ends with it, so the result depends on
the formula alone and not on earlier requests. The limit is a number of steps: calls and returns of
functions, counted by the interpreter's profiler. Hashes are the same in each run
(``PYTHONHASHSEED``), so the count is, too, on every machine and whatever else runs there. Processor
time, which only a single call into C can take without steps, and memory are limited as well.

It ends when its input does, as it does when its parent is dead. Run by its path, it imports nothing
of the package but ``exact_value``; see ``sympy_pool`` for the other side.
"""

from __future__ import annotations

import gc
import importlib.machinery
import json
import os
import re
import resource
import select
import signal
import sys
import types
from pathlib import Path
from typing import Any, NoReturn

_DIGITS = 130
"""Decimal digits that values are worked out to; forms keep less than half of them."""
_MAX_BITS, _MAX_FACTORIAL = 1 << 17, 5000
_MEMORY = 1 << 30
"""Bytes that one formula may take."""
STEPS_PER_SECOND = 1_000_000
"""Steps per second of a time limit; processors of 2020 make five times as many."""
_PROCESSOR_TIME = 4
"""Seconds of processor time in which the steps of one second of a time limit have to end."""
_LIMIT = 3
"""Exit status of a formula that has come to its limit."""

_FIRST = (
    "\\frac{\\sqrt{x}+1}{2^{y}}-\\sin(2x)\\cdot\\log_2 8+\\cos^2 \\frac{\\pi}{7}",
    "\\sqrt[3]{x}\\le e^{y}",
    "\\int_0^1 x^2 dx",
    "\\sum_{k=1}^{20}\\frac{1}{k^2}",
)
"""Worked out before any other: what parser and sympy learn by them, all forks have."""

Reply = dict[str, Any]


def canonical_form(text: str) -> Reply | None:
    """The values of a formula at fixed points, which identify it.

    Formulas that are equal for all values of their symbols have the same values, however they are
    written; two that differ have not, unless they agree at all points (polynomial identity testing:
    Schwartz 1980, "Fast Probabilistic Algorithms for Verification of Polynomial Identities"). An
    equation or inequality is identified by the difference of its sides, up to a factor, and what
    has no values by its structure.
    """
    import sympy

    formula = _parsed(text)
    if isinstance(formula, str) or formula is None or _is_partial(formula, text):
        return None
    if isinstance(formula, sympy.core.relational.Relational):
        return _relation(formula)
    if isinstance(formula, sympy.Expr):
        return _expression(formula)
    return {"structure": sympy.srepr(formula)}


def _parsed(text: str) -> Any:
    from math_verify import parse

    formulas = parse(f"\\boxed{{{text}}}", parsing_timeout=None)
    return formulas[0] if formulas else None


_CONSTANTS = frozenset("eid")


def _is_partial(formula: Any, text: str) -> bool:
    """Whether the parser has left out letters: what it cannot read it drops in silence."""
    if re.search(r"\\(?:sum|prod|int|lim)(?![A-Za-z])", text):
        return False
    letters = set(re.findall("[A-Za-z]", re.sub(r"\\[A-Za-z]+", " ", text))) - _CONSTANTS
    read = {letter for symbol in formula.free_symbols for letter in str(symbol)}
    return not letters <= read


def _expression(formula: Any) -> Reply:
    import sympy

    formula = _evaluated(formula)
    if formula.is_infinite and formula.is_extended_real:
        return {"infinity": "-" if formula.is_extended_negative else "+"}
    values = [_parts(value) for value in _values(formula)]
    return {"structure": sympy.srepr(formula)} if None in values else {"values": values}


def _relation(formula: Any) -> Reply:
    """The values of the difference of its sides, divided by the first of them."""
    import sympy

    kind, difference = formula.rel_op, formula.lhs - formula.rhs
    if kind in {">", ">="}:
        kind, difference = {">": "<", ">=": "<="}[kind], -difference
    values = _values(_evaluated(difference))
    scale = values[0] if kind in {"==", "!="} else abs(values[0])
    if abs(scale) < 10**-20 or not all(value.is_number for value in values):
        return {"structure": sympy.srepr(formula)}
    parts = [_parts((value / scale).evalf(_DIGITS)) for value in values]
    return {"structure": sympy.srepr(formula)} if None in parts else {kind: parts}


def _evaluated(formula: Any) -> Any:
    """The formula with its decimals as fractions, its sums evaluated, and ``i`` as a number."""
    import sympy

    units = {symbol: sympy.I for symbol in formula.free_symbols if symbol.name == "i"}
    return sympy.nsimplify(formula.doit().subs(units), rational=True)


def _values(formula: Any) -> list[Any]:
    """Its values at the fixed points, one value if it has no symbols."""
    import sympy

    if formula.is_Rational or not formula.free_symbols:
        return [formula if formula.is_Rational else formula.evalf(_DIGITS)]
    exact = _exact_value()
    points = range(exact.NUM_POINTS)
    symbols = sorted(formula.free_symbols, key=str)
    return [
        formula.evalf(
            _DIGITS,
            subs={symbol: sympy.Rational(exact.point(symbol.name, n)) for symbol in symbols},
        )
        for n in points
    ]


def _parts(value: Any) -> list[str] | None:
    """Real and imaginary part as text; None if it is no finite number."""
    if not value.is_number or not value.is_finite:
        return None
    return [_written(part) for part in value.as_real_imag()]


def _written(part: Any) -> str:
    """A fraction in hexadecimal digits, or a decimal."""
    return f"{int(part.p):x}/{int(part.q):x}" if part.is_Rational else str(part.evalf(_DIGITS))


def _exact_value() -> types.ModuleType:
    name = "forethought_exact_value"
    if name not in sys.modules:
        path = str(Path(__file__).with_name("exact_value.py"))
        loader = importlib.machinery.SourceFileLoader(name, path)
        module = types.ModuleType(name)
        sys.modules[name] = module  # dataclasses and typing look it up
        loader.exec_module(module)
    return sys.modules[name]


# ---- limits --------------------------------------------------------------------------------------


def _end(*_: Any) -> NoReturn:
    os._exit(_LIMIT)


class _Steps:
    """Counts steps and ends the process after the last one."""

    def __init__(self, steps: int) -> None:
        self._remaining = steps

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        self._remaining -= 1
        if self._remaining < 0:
            _end()


def _bound_numbers() -> None:
    """End the process before a number with more than ``_MAX_BITS`` bits is computed."""
    import sympy
    from sympy.functions.combinatorial import factorials

    def bounded_power(kind: Any) -> None:
        power = kind._eval_power

        def checked(self: Any, exponent: Any) -> Any:
            size = int(abs(self.p)).bit_length() + int(self.q).bit_length()
            if exponent.is_Rational and (abs(exponent) - 1) * max(0, size - 2) > _MAX_BITS:
                _end()
            return power(self, exponent)

        kind._eval_power = checked

    for kind in (sympy.Integer, sympy.Rational):
        bounded_power(kind)
    for kind in (factorials.factorial, factorials.binomial):
        evaluate = kind.eval.__func__

        def checked(cls: Any, n: Any, *others: Any, evaluate: Any = evaluate) -> Any:
            if n.is_Number and abs(n) > _MAX_FACTORIAL:
                _end()
            return evaluate(cls, n, *others)

        kind.eval = classmethod(checked)


def _limit(steps: int) -> None:
    """Begin to count."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if os.path.isdir("/proc") else 0
    memory = pages * resource.getpagesize() + _MEMORY
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    if pages and (most == resource.RLIM_INFINITY or memory < most):
        resource.setrlimit(resource.RLIMIT_AS, (memory, most))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, 1 + _PROCESSOR_TIME * steps / STEPS_PER_SECOND)
    sys.setprofile(_Steps(steps))


# ---- the process ---------------------------------------------------------------------------------


def _work(request: dict[str, Any], output: int) -> NoReturn:
    """Work on a formula, in a fork."""
    _limit(request["steps"])
    try:
        result = canonical_form(request["form"])
    except MemoryError:
        _end()
    except Exception:
        result = None
    sys.setprofile(None)
    with os.fdopen(output, "w") as file:
        file.write(json.dumps(result))
    os._exit(0)


def _answer(line: bytes) -> str:
    """The reply to a request, by a fork."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            _work(json.loads(line), writing)
        finally:
            os._exit(1)
    os.close(writing)
    parts = []
    while True:
        ready, _, _ = select.select([reading, 0], [], [])
        if reading not in ready:  # there is no further request, so the input has ended
            os.kill(child, signal.SIGKILL)
            os._exit(0)
        part = os.read(reading, 1 << 16)
        if not part:
            break
        parts.append(part)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    return b"".join(parts).decode() if status == 0 else json.dumps("limit")


def _lines() -> Any:
    """The lines of the input, which is read no further than necessary."""
    line = b""
    while part := os.read(0, 1 << 16):
        line += part
        if line.endswith(b"\n"):
            yield line
            line = b""


def main() -> None:
    """Serve until the input ends. The arguments are directories to import from."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started us
    sys.path += [directory for directory in sys.argv[1:] if directory not in sys.path]
    _exact_value()
    for formula in _FIRST:
        canonical_form(formula)
    _bound_numbers()
    gc.freeze()
    sys.stdout.write(json.dumps("ready") + "\n")
    sys.stdout.flush()
    for line in _lines():
        sys.stdout.write(_answer(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
