"""How the prototype of something becomes the one of a single request.

Cloning must be cheap (once per request and per sample) and must not let requests share what they
write to. So containers and cloneable things are copied, and everything else is shared: tokenizers,
models, clients, functions.
"""

from __future__ import annotations

import copy
from collections import deque
from typing import Any, ClassVar, Self, TypeVar

_C = TypeVar("_C", bound="Cloneable")


class Cloneable:
    """Something of which every request gets its own.

    Attributes:
        clone_shares: names of attributes that clones share although they are containers.
        clone_copies: names of attributes that each clone gets a deep copy of.
    """

    clone_shares: ClassVar[tuple[str, ...]] = ()
    clone_copies: ClassVar[tuple[str, ...]] = ()

    def clone(self) -> Self:
        """One for a request: the same class, attributes of its own, ``__init__`` not called.

        Containers and cloneable things among the attributes are copied, recursively; everything
        else is shared, unless ``clone_shares`` or ``clone_copies`` say otherwise.
        """
        return _clone(self, {})


def _clone(original: _C, memo: dict[int, Any]) -> _C:
    kind = type(original)
    twin = object.__new__(kind)
    memo[id(original)] = twin
    for name, value in vars(original).items():
        if name in kind.clone_shares:
            vars(twin)[name] = value
        elif name in kind.clone_copies:
            vars(twin)[name] = copy.deepcopy(value)
        else:
            vars(twin)[name] = _own(value, memo)
    return twin


def _own(value: Any, memo: dict[int, Any]) -> Any:
    """What a clone has in place of ``value``; the same thing twice stays the same thing twice."""
    if id(value) not in memo:
        memo[id(value)] = _copied(value, memo)
    return memo[id(value)]


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, Cloneable):
        overridden = type(value).clone is not Cloneable.clone
        return value.clone() if overridden else _clone(value, memo)
    if isinstance(value, dict):
        twin = memo[id(value)] = copy.copy(value)
        for key, item in value.items():
            twin[key] = _own(item, memo)
        return twin
    if isinstance(value, list | deque):
        sequence = memo[id(value)] = copy.copy(value)
        for index, item in enumerate(value):
            sequence[index] = _own(item, memo)
        return sequence
    if type(value) is tuple:
        return tuple(_own(item, memo) for item in value)
    return copy.copy(value) if isinstance(value, set | bytearray) else value
