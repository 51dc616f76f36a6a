"""Whether an answer is right. Knows nothing about who gave it."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from forethought.scaffolding.answers import extract_answer_from_boxed
from forethought.scaffolding.canonical_form import canonical_form
from forethought.scaffolding.sympy_pool import SympyPool


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
