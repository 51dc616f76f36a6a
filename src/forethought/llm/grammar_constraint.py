"""A sequence under a grammar: the tokens that may follow, and those that were taken."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from forethought.errors import (
    ParameterError,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher

Bits = NDArray[np.uint8]
"""[ceil(V / 8)] bytes, one bit for each of the model's V tokens; see ``Constraint.mask``."""


class GrammarConstraint:
    """A ``Constraint`` over llguidance's matcher.

    The matcher has consumed one prefix at a time. For another prefix it is rolled back to their
    common part and consumes the rest, so a prefix that shares most tokens costs little.

    Args:
        start: a matcher at its beginning; it is copied and never moved.
        writable: mask of the tokens that may occur in an output or end it.
        ends: mask of those that end an output.
    """

    def __init__(self, start: LLMatcher, writable: Bits, ends: Bits) -> None:
        self._start, self._writable, self._text = start, writable, writable & ~ends
        self._matcher = start.deep_copy()
        self._path: list[int] = []
        """The tokens that the matcher has consumed."""
        self._mask: Bits | None = None
        """The mask after ``_path``, once computed."""
        self._failure = ""
        """The last error of a matcher."""
        self._stuck: dict[tuple[int, ...], str] = {}
        """Prefix within the grammar that no token may follow -> why."""

    def fresh(self) -> GrammarConstraint:
        """A constraint of the same grammar, for another generation."""
        sibling = GrammarConstraint(self._start, self._writable, self._writable & ~self._text)
        sibling._mask = None if self._path else self._mask
        return sibling

    def samples(self, prompt_ids: Sequence[int], count: int) -> list[GrammarConstraint]:
        """Constraints of the same grammar for ``count`` generations; see ``Constraints``."""
        return [self.fresh() for _ in range(count)]

    @property
    def failure(self) -> str:
        """llguidance's last error; empty if there was none."""
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
            self._matcher.compute_bitmask()  # a limit that stopped it may be reported only here
            if self._matcher.is_error():
                self._give_up()
            raise ParameterError(
                "the output cannot be kept to its grammar",
                reason or self._failure or f"token {output[-1]} is not in it",
                "Use a simpler grammar, and a model whose tokens can write all that it asks for",
            )
        return self._matcher.is_accepting() and not (self.mask(output) & self._text).any()

    def _compute_mask(self) -> Bits:
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask = np.zeros_like(self._writable)
        size = min(len(allowed), len(mask))
        mask[:size] = allowed[:size] & self._writable[:size]
        if self._matcher.is_error():
            path = tuple(self._path)
            self._give_up()
            self._stuck[path] = self._failure
            return np.zeros_like(mask)
        if not mask.any():
            self._stuck[tuple(self._path)] = "no token of the model may follow"
        return mask

    def _move(self, output: list[int]) -> bool:
        """Move the matcher to the end of ``output``; False if that is not in the grammar."""
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
        consumed = self._matcher.try_consume_tokens(more)
        if self._matcher.is_error():
            self._give_up()
            return False
        if consumed:
            self._path += more[:consumed]
            self._mask = None
        return consumed == len(more)

    def _give_up(self) -> None:
        """Replace the matcher by a fresh one: an error makes it unusable."""
        self._failure = read_error(self._matcher)
        self._matcher, self._path, self._mask = self._start.deep_copy(), [], None


def read_error(matcher: LLMatcher) -> str:
    """The matcher's error in one line; empty if there is none."""
    return one_line(matcher.get_error())


def one_line(error: str) -> str:
    """llguidance's message without line ends, and not at any length."""
    return " ".join(error.removesuffix("<non-verbose/>").split())[:400]


def _shared(path: list[int], output: list[int]) -> int:
    """The length of their common prefix. Slices compare at the speed of C."""
    size = min(len(path), len(output))
    if path[:size] == output[:size]:
        return size
    return bisect_left(range(size), True, key=lambda end: path[: end + 1] != output[: end + 1])
