"""Tokens to read and not to write: what a drafter sees of a text that the engine owns.

A view copies nothing and grows with its text. A slice is a new list, made as fast as a list makes
it. Knows nothing about requests.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import overload


class TokenView(Sequence[int]):
    """A list of token ids that cannot be written to; it equals lists with the same ids.

    Args:
        tokens: the list itself, which may grow and shrink meanwhile.
    """

    __slots__ = ("_tokens",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> list[int]: ...

    def __getitem__(self, place: int | slice) -> int | list[int]:
        return self._tokens[place]

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)

    def __reversed__(self) -> Iterator[int]:
        return reversed(self._tokens)

    def __contains__(self, token: object) -> bool:
        return token in self._tokens

    def index(self, token: int, start: int = 0, stop: int = sys.maxsize) -> int:
        """The first place of a token in [start, stop).

        Raises:
            ValueError: it is not there.
        """
        return self._tokens.index(token, start, stop)

    def count(self, token: int) -> int:
        """How often a token stands there."""
        return self._tokens.count(token)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenView):
            return self._tokens == other._tokens
        return self._tokens == other if isinstance(other, list) else NotImplemented

    def __add__(self, more: Sequence[int]) -> list[int]:
        return [*self._tokens, *more]

    def __radd__(self, before: Sequence[int]) -> list[int]:
        return [*before, *self._tokens]

    def __repr__(self) -> str:
        return f"TokenView({self._tokens!r})"
