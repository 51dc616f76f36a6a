"""Whether an answer is right. Knows nothing about who gave it."""

from __future__ import annotations

from collections.abc import Callable

from forethought.scaffolding.answers import extract_answer_from_boxed
from forethought.scaffolding.equivalence import Equivalence, MathEquivalence


class Grader:
    r"""Compares what stands in the last ``\boxed{}`` of a text with the reference answer.

    Args:
        extract: finds the answer in a text; a text without one is wrong.
        equivalence: decides whether it means the same; mathematical equality by default.
    """

    def __init__(
        self,
        extract: Callable[[str], str | None] = extract_answer_from_boxed,
        equivalence: Equivalence | None = None,
    ) -> None:
        self._extract = extract
        self._equivalence: Equivalence = equivalence or MathEquivalence()

    def grade(self, text: str | None, reference: str) -> bool:
        """Whether ``text`` answers ``reference``. May take seconds where sympy is needed.

        Raises:
            DependencyError: it takes sympy, and ``math-verify`` is not installed.
        """
        answer = self._extract(text or "")
        return answer is not None and self._equivalence(answer, reference)
