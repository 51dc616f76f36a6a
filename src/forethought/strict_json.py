"""JSON that a user wrote, without what Python reads beyond JSON."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn


def read_json(text: str) -> Any:
    """The value of a JSON text.

    Raises ValueError for what is no JSON, ``NaN`` and ``Infinity`` included, and for a number that
    no float holds, such as 1e999; RecursionError for one that is nested too deeply.
    """
    return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits[:40]} is beyond the largest float")
    return value
