"""Matrices of cases of which a part runs in ``make test``: the others enter the same code."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def by_turns(*axes: Sequence[Any], every: int = 0) -> list[Any]:
    """All combinations of the axes; each value of the first axis has one that is not slow.

    Which one goes round by turns, so that each value of the other axes comes, too.

    Args:
        axes: the values of each argument.
        every: 0, or: of the values of the first axis all but each ``every``-th are slow as well.
    """
    first, *others = axes
    rest = list(product(*others))
    cases = []
    for row, value in enumerate(first):
        for number, combination in enumerate(rest):
            is_fast = number == row % len(rest) and not (every and row % every)
            marks = () if is_fast else (pytest.mark.slow,)
            cases.append(pytest.param(value, *combination, marks=marks))
    return cases
