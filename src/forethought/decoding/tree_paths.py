"""A static tree as it is written down: a path of ranks per node.

``[1, 0]`` is the most probable token after the second most probable one. Two spellings are read:
all nodes, each with what leads to it (``[[0], [1], [1, 0]]``), or the paths to the leaves only
(``[[0, 0], [1, 0]]``). A list that has a path of one rank is one of all nodes. Either may be the
text of such a list.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
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


def all_nodes(paths: Collection[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Every node that the paths lead through, by length and then by value."""
    nodes = {path[:end] for path in paths for end in range(1, len(path) + 1)}
    return tuple(sorted(nodes, key=lambda path: (len(path), path)))


def missing_path(paths: Collection[tuple[int, ...]]) -> tuple[int, ...] | None:
    """A node that a list of all nodes lacks; None: it lacks none, or has the leaves only."""
    listed, nodes = set(paths), all_nodes(paths)
    inner = {path[:-1] for path in nodes}
    if min(map(len, paths)) > 1 and not listed & inner:
        return None
    return next((node for node in nodes if node not in listed), None)
