"""A grammar followed along the tokens of one generation: the engine's ``Constraint``.

Knows nothing about requests, or about where the grammar came from.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from forethought.errors import ParameterError

if TYPE_CHECKING:
    from llguidance import LLMatcher

Bits = NDArray[np.uint8]
"""[ceil(V / 8)] bytes, a bit for each of the model's V tokens, as ``Constraint.mask`` has them."""


class GrammarConstraint:
    """A ``Constraint`` that asks llguidance's matcher.

    The matcher stands behind one prefix at a time. It is moved to the one asked about by taking
    back tokens and taking in others, so that what lies near costs little.

    Args:
        start: a matcher at its beginning; it is copied and never moved.
        writable: the tokens that may be in an output, or end one, at all.
        ends: those of them that end one.
    """

    def __init__(self, start: LLMatcher, writable: Bits, ends: Bits) -> None:
        self._start, self._writable, self._text = start, writable, writable & ~ends
        self._matcher = start.deep_copy()
        self._path: list[int] = []
        """What the matcher has taken in."""
        self._mask: Bits | None = None
        """Behind ``_path``, once somebody has asked."""
        self._failure = ""
        """What the matcher last gave up for."""
        self._stuck: dict[tuple[int, ...], str] = {}
        """Prefixes that keep to the grammar and cannot go on, and why."""

    def fresh(self) -> GrammarConstraint:
        """A constraint of the same grammar, for another generation."""
        twin = GrammarConstraint(self._start, self._writable, self._writable & ~self._text)
        twin._mask = None if self._path else self._mask
        return twin

    @property
    def failure(self) -> str:
        """What llguidance last gave up for; empty if it never did."""
        return self._failure

    def mask(self, output: Sequence[int]) -> Bits:
        """Which tokens may come after ``output``; see ``Constraint``."""
        if not self._move(list(output)):
            return np.zeros_like(self._writable)
        if self._mask is None:
            self._mask = self._compute_mask()
        return self._mask

    def is_complete(self, output: Sequence[int]) -> bool:
        """Whether no text may follow ``output``; see ``Constraint``."""
        output = list(output)
        reason = self._stuck.get(tuple(output[:-1])) if self._stuck else None
        if reason is not None or not self._move(output):
            raise ParameterError(
                "the output cannot be kept to its grammar",
                reason or self._failure or f"token {output[-1]} is not in it",
                "Use a simpler grammar, and a model whose tokens can write all that it asks for",
            )
        return self._matcher.is_accepting() and not (self.mask(output) & self._text).any()

    def _compute_mask(self) -> Bits:
        found = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask = np.zeros_like(self._writable)
        size = min(len(found), len(mask))
        mask[:size] = found[:size] & self._writable[:size]
        if self._matcher.is_error():
            path = tuple(self._path)
            self._give_up()
            self._stuck[path] = self._failure
            return np.zeros_like(mask)
        if not mask.any():
            self._stuck[tuple(self._path)] = "no token of the model may follow"
        return mask

    def _move(self, output: list[int]) -> bool:
        """Put the matcher behind ``output``, if that keeps to the grammar."""
        shared = _shared(self._path, output)
        if shared < len(self._path):
            self._matcher.rollback(len(self._path) - shared)
            del self._path[shared:]
            self._mask = None
        more = output[shared:]
        if not more:
            return True
        if not all(self._writable[token // 8] >> token % 8 & 1 for token in more):
            return False
        taken = self._matcher.try_consume_tokens(more)
        if self._matcher.is_error():
            self._give_up()
            return False
        if taken:
            self._path += more[:taken]
            self._mask = None
        return taken == len(more)

    def _give_up(self) -> None:
        """An error stays with its matcher: begin again with another one."""
        self._failure = read_error(self._matcher)
        self._matcher, self._path, self._mask = self._start.deep_copy(), [], None


def read_error(matcher: LLMatcher) -> str:
    """What the matcher says is wrong, in one line; empty if nothing is."""
    words = matcher.get_error().removesuffix("<non-verbose/>").split()
    return " ".join(words)[:400]


def _shared(path: list[int], output: list[int]) -> int:
    """The length of their common prefix; slices compare at the speed of C."""
    size = min(len(path), len(output))
    if path[:size] == output[:size]:
        return size
    return bisect_left(range(size), True, key=lambda end: path[: end + 1] != output[: end + 1])
