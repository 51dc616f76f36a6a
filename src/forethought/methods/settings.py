"""What the settings of methods may be. Knows nothing about any method in particular."""

from __future__ import annotations

from typing import Any

from forethought.errors import ParameterError


def whole_number(name: str, value: Any) -> int:
    """``value``, a whole number of at least 1.

    Raises:
        ParameterError: it is anything else.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise ParameterError(f"invalid {name}", f"got {value!r}", "It must be a whole number")
    if value < 1:
        raise ParameterError(f"invalid {name}", f"got {value}", "It must be at least 1")
    return value


def function(name: str, value: Any) -> Any:
    """``value``, something that can be called.

    Raises:
        ParameterError: it is anything else.
    """
    if not callable(value):
        raise ParameterError(f"invalid {name}", f"got {value!r}", "It must be callable")
    return value
