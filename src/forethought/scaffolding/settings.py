"""What the settings of controllers may be. Knows nothing about any controller in particular."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from forethought.errors import ParameterError
from forethought.scaffolding.answers import Equivalence, MathEquivalence, PairwiseEquivalence
from forethought.scaffolding.task import OnFailure


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """``value``, a whole number of at least ``least``.

    Raises:
        ParameterError: it is anything else.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise _refuse(name, value, "It must be a whole number")
    if value < least:
        raise _refuse(name, value, f"It must be at least {least}")
    return value


def seconds(name: str, value: Any) -> float:
    """``value``, a number of seconds above zero.

    Raises:
        ParameterError: it is anything else.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _refuse(name, value, "It must be a number of seconds")
    if not value > 0:
        raise _refuse(name, value, "Give seconds above zero")
    return value


def switch(name: str, value: Any) -> bool:
    """``value``, which turns something on or off.

    Raises:
        ParameterError: it is neither True nor False.
    """
    if not isinstance(value, bool):
        raise _refuse(name, value, "It must be True or False")
    return value


def words(name: str, value: Any) -> tuple[str, ...]:
    """``value``, several words; none will do too.

    Raises:
        ParameterError: it is a single text, or something among it is no word.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise _refuse(name, value, "Give a list of words")
    found = tuple(value)
    if not all(isinstance(word, str) and word.strip() for word in found):
        raise _refuse(name, value, "Each word must be a text, and not empty")
    return found


def function(name: str, value: Any) -> Any:
    """``value``, something that can be called.

    Raises:
        ParameterError: it is anything else.
    """
    if not callable(value):
        raise _refuse(name, value, "It must be callable")
    return value


def equivalence(value: Any) -> Equivalence | PairwiseEquivalence:
    """``value``, what decides which answers mean the same; for None mathematical equality does.

    Raises:
        ParameterError: it has no method ``canonical_form``, and is no function of two answers.
    """
    if value is None:
        return MathEquivalence()
    keyed = callable(getattr(value, "canonical_form", None))
    if isinstance(value, type) or not (keyed or callable(value)):
        rule = "Give a function of two answers, or an object with a method canonical_form(answer)"
        raise _refuse("equivalence", value, rule)
    decides = value.canonical_form if keyed else value
    call = getattr(type(decides), "__call__", None)  # noqa: B004  # that of an object
    if inspect.iscoroutinefunction(decides) or inspect.iscoroutinefunction(call):
        raise _refuse("equivalence", value, "It is called in a thread: give a plain function")
    found: Equivalence | PairwiseEquivalence = value
    return found


def on_failure(value: Any) -> OnFailure:
    """``value``, what becomes of a failure.

    Raises:
        ParameterError: it is no ``OnFailure``.
    """
    if value not in get_args(OnFailure):
        raise _refuse("on_failure", value, "It must be 'raise' or 'drop'")
    found: OnFailure = value
    return found


def directory(name: str, value: Any) -> Path:
    """``value``, the path of a directory.

    Raises:
        ParameterError: it is no path, or there is no such directory.
    """
    if not isinstance(value, str | Path):
        raise _refuse(name, value, "It must be the path of a directory")
    if not Path(value).is_dir():
        raise _refuse(name, str(value), "There is no such directory")
    return Path(value)


def _refuse(name: str, value: Any, rule: str) -> ParameterError:
    return ParameterError(f"invalid {name}", f"got {value!r}", rule)
