"""Whether two answers mean the same: ``1/2``, ``0.5`` and ``\\frac{1}{2}`` do.

Equal texts and plain numbers are settled at once. For the rest sympy is needed, which can take for
ever and cannot be interrupted in a thread: a process of its own does it and is killed when the time
is up. Knows nothing about votes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import re
import subprocess
import sys
import threading
import weakref
from fractions import Fraction
from typing import Protocol

from forethought.errors import DependencyError, ForethoughtError

_START_SECONDS = 60.0
_LONGEST = 2000
"""Characters; longer answers are compared as text."""
_REMEMBERED = 4096
_NUMBER = re.compile(r"([+-]? ?)(?=\.?\d)(\d{1,3}([ ,]\d{3})+|\d+)?(\.\d*)?([eE][+-]?\d{1,3})?")
"""Digits in one piece or in groups of three; no other space may stand between two digits."""
_FRACTION = re.compile(r"([+-]? ?)\\frac ?{ ?(\d+) ?} ?{ ?(\d+) ?}")
_RATIO = re.compile(r"([+-]? ?)(\d+) ?/ ?(\d+)")
_MIXED = re.compile(r"([+-]? ?)(\d+) (\d+ ?/ ?\d+)")
_SPACED = re.compile(r"[-+./\d ]*\d \d[-+./\d ]*")
_WORDS = re.compile(r"[A-Za-z]+( [A-Za-z]+)*")
_SPACING = re.compile(r"\\left|\\right|\\[!,;: ]|\$|\s+")


class Equivalence(Protocol):
    """What decides whether two answers are the same."""

    def quick(self, one: str, other: str) -> bool | None:
        """The verdict if it takes no time; None if ``__call__`` has to work for it."""

    def __call__(self, one: str, other: str) -> bool:
        """The verdict. May take a while: not for an event loop."""


class TextEquivalence:
    """Answers are the same if their texts are, but for spaces around them."""

    def quick(self, one: str, other: str) -> bool | None:
        """The verdict."""
        return one.strip() == other.strip()

    def __call__(self, one: str, other: str) -> bool:
        """The verdict."""
        return one.strip() == other.strip()


class MathEquivalence:
    """Answers are the same if they are mathematically equal, by ``math-verify`` and sympy.

    Safe to share between threads. The process is started at the first comparison that needs it.

    Args:
        time_limit: seconds per comparison; beyond it two answers count as different.
    """

    def __init__(self, time_limit: float = 3.0) -> None:
        self.time_limit = time_limit
        self._lock = threading.Lock()
        self._process: _SympyProcess | None = None
        self._known: dict[tuple[str, str], bool] = {}

    def quick(self, one: str, other: str) -> bool | None:
        """The verdict on equal texts, two plain numbers or two plain words; else None."""
        one, other = _tidy(one), _tidy(other)
        if one == other:
            return True
        if max(len(one), len(other)) > _LONGEST or not one or not other:
            return False
        read = [(_number(text), text) for text in (one, other)]
        first, second = read[0][0], read[1][0]
        if first is not None and second is not None:
            return first == second
        if any(value is None and _SPACED.fullmatch(text) for value, text in read):
            return False  # several numbers, of which a parser would make one, or their product
        if _WORDS.fullmatch(one) and _WORDS.fullmatch(other):
            return one.casefold() == other.casefold()
        return self._known.get(_pair(one, other))

    def __call__(self, one: str, other: str) -> bool:
        """The verdict.

        Raises:
            DependencyError: it takes sympy, and ``math-verify`` is not installed.
        """
        verdict = self.quick(one, other)
        if verdict is not None:
            return verdict
        pair = _pair(_tidy(one), _tidy(other))
        with self._lock:
            if pair not in self._known:
                if len(self._known) >= _REMEMBERED:
                    self._known.clear()
                self._known[pair] = self._work_out(*pair)
            return self._known[pair]

    def _work_out(self, one: str, other: str) -> bool:
        if self._process is None:
            self._process = _SympyProcess()
        verdict = self._process.compare(_spelt_out(one), _spelt_out(other), self.time_limit)
        if verdict is None:
            self._process.end()
            self._process = None
        return bool(verdict)


class _SympyProcess:
    """One ``sympy_process`` and the two pipes to it; not safe to share."""

    def __init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise DependencyError.missing("math-verify", "comparing formulas", "eval")
        process = subprocess.Popen(
            [sys.executable, "-m", "forethought.scaffolding.sympy_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self._process, self._lines = process, queue.SimpleQueue[str]()
        listener = threading.Thread(target=_listen, args=(process, self._lines), daemon=True)
        listener.start()
        self.end = weakref.finalize(self, _end, process, listener)
        if self._line(_START_SECONDS) is None:
            self.end()
            raise ForethoughtError("cannot compare formulas", "the process for it does not start")

    def compare(self, one: str, other: str, seconds: float) -> bool | None:
        """The verdict; None if it took too long or broke the process."""
        assert self._process.stdin is not None, "it was opened with a pipe"
        try:
            print(json.dumps([one, other]), file=self._process.stdin, flush=True)
        except OSError:
            return None
        line = self._line(seconds)
        return None if line is None else bool(json.loads(line))

    def _line(self, seconds: float) -> str | None:
        try:
            return self._lines.get(timeout=seconds) or None
        except queue.Empty:
            return None


def _listen(process: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    assert process.stdout is not None, "it was opened with a pipe"
    for line in process.stdout:
        lines.put(line)
    lines.put("")  # it has ended


def _end(process: subprocess.Popen[str], listener: threading.Thread) -> None:
    process.kill()
    process.wait()
    if listener is not threading.current_thread():
        listener.join()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _tidy(answer: str) -> str:
    """The answer without what only spaces it out."""
    answer = _SPACING.sub(" ", answer.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))
    return answer.strip().rstrip(".").strip()


def _number(answer: str) -> Fraction | None:
    """The value of a plain number, a fraction or a mixed number; None for anything else."""
    answer = answer.replace("{,}", ",")
    if _NUMBER.fullmatch(answer):
        return Fraction(re.sub("[ ,]", "", answer))
    if mixed := _MIXED.fullmatch(answer):
        whole, part = int(mixed[2]), _number(mixed[3])
        sign = -1 if mixed[1].startswith("-") else 1
        return None if part is None else sign * (whole + part)
    found = _FRACTION.fullmatch(answer) or _RATIO.fullmatch(answer)
    if found is None or int(found[3]) == 0:
        return None
    return Fraction(int(found[1].replace(" ", "") + found[2]), int(found[3]))


def _spelt_out(answer: str) -> str:
    """The answer without an exponent behind an ``e``, which a parser would take for Euler's."""
    value = _number(answer)
    return answer if value is None or "e" not in answer.lower() else str(value)


def _pair(one: str, other: str) -> tuple[str, str]:
    return min(one, other), max(one, other)
