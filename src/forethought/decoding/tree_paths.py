"""A static tree as it is written down. Knows nothing about what grows on it."""

from __future__ import annotations

import ast
from typing import Annotated, Any

from pydantic import BeforeValidator


def _from_text(value: Any) -> Any:
    """A list of paths may be written as the text of one."""
    try:
        return ast.literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError) as error:
        raise ValueError("it is not the text of a list of lists") from error


TreePaths = Annotated[tuple[tuple[int, ...], ...], BeforeValidator(_from_text)]
"""See ``speculative.tree.TreeChoices``."""
