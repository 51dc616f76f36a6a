"""Shapes of draft trees: node depths, and static trees written as paths of ranks.

A tree of N nodes is its ``parents``: entry n is the node that node n follows, -1 for the root, the
last known token. Parents come before their children.

A static tree is a list of paths, a path being the rank of each token on it: ``[1, 0]`` is the most
probable token after the second most probable one. Two forms are read: all nodes
(``[[0], [1], [1, 0]]``), or the leaves only (``[[0, 0], [1, 0]]``). A list with a path of one rank
is one of all nodes. Either form may be given as text.
"""

from __future__ import annotations

import ast
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator

from forethought.errors import ParameterError


def node_depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node of a tree: 1 for the children of the root. Parents come before
    children.
    """
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def _from_text(value: Any) -> Any:
    try:
        return ast.literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError) as error:
        raise ValueError("it is not the text of a list of lists") from error


TreePaths = Annotated[tuple[tuple[int, ...], ...], BeforeValidator(_from_text)]
"""A static tree; see this module's docstring, and ``TreeChoices``."""


def all_nodes(paths: Collection[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Every node on the paths, sorted by length and then by value."""
    nodes = {path[:end] for path in paths for end in range(1, len(path) + 1)}
    return tuple(sorted(nodes, key=lambda path: (len(path), path)))


def missing_path(paths: Collection[tuple[int, ...]]) -> tuple[int, ...] | None:
    """A node that is missing in a list of all nodes; None: none, or these are the leaves only."""
    listed, nodes = set(paths), all_nodes(paths)
    inner = {path[:-1] for path in nodes}
    if min(map(len, paths)) > 1 and not listed & inner:
        return None
    return next((node for node in nodes if node not in listed), None)


@dataclass(frozen=True)
class TreeChoices:
    """A static tree: ``paths`` has one path of ranks from the root per node, sorted by length, then
    by value.

    Rank r is the drafter's r-th most probable token, from 0: ``(1, 0)`` is the most probable token
    after the second most probable. Medusa's and EAGLE's choices are written so.
    """

    paths: tuple[tuple[int, ...], ...]

    @classmethod
    def parse(cls, choices: Iterable[Sequence[int]] | str) -> TreeChoices:
        """Read paths, or the text of a list of them: of all nodes, or of the leaves only.

        Raises ParameterError for no path, an empty or repeated one, or an entry that is no rank.
        """
        paths = _paths(choices)
        if not paths or not all(paths):
            raise _refused(choices, "a tree is one or more paths of at least one rank")
        if any(isinstance(rank, bool) or rank < 0 for path in paths for rank in path):
            raise _refused(choices, "ranks are integers from 0")
        if len(set(paths)) < len(paths):
            raise _refused(choices, "a path is listed twice")
        return cls(all_nodes(paths))

    @classmethod
    def chain(cls, length: int) -> TreeChoices:
        """The most probable tokens, one after the other."""
        return cls.parse([[0] * length])

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def is_chain(self) -> bool:
        """Whether no node has a sibling."""
        return self.depth == len(self)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """The node that each one follows, -1 for the root."""
        node_of = {path: node for node, path in enumerate(self.paths)}
        return tuple(node_of.get(path[:-1], -1) for path in self.paths)

    def draft_parents(self, size: int) -> tuple[int, ...] | None:
        """The parents of the first ``size`` nodes; None for a chain."""
        return None if self.is_chain else self.parents[:size]

    @cached_property
    def num_nodes(self) -> tuple[int, ...]:
        """Number of nodes no deeper than each depth from 0 on; they are the first ones."""
        lengths = list(map(len, self.paths))
        return tuple(bisect_right(lengths, depth) for depth in range(self.depth + 1))

    def truncated(self, depth: int) -> TreeChoices:
        """The tree of the nodes no deeper than ``depth``, at least 1."""
        return TreeChoices(self.paths[: self.num_nodes[min(depth, self.depth)]])

    def expect_ranks_below(self, vocab_size: int, name: str) -> None:
        """Raises ParameterError, about field ``name``, for a rank that is not below
        ``vocab_size``.
        """
        if max(self.ranks) >= vocab_size:
            raise ParameterError(
                f"invalid {name}",
                f"it has the rank {max(self.ranks)}, and the drafter knows {vocab_size} tokens",
                f"Take ranks from 0 to {vocab_size - 1}",
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        """Each node's rank at its parent."""
        return tuple(path[-1] for path in self.paths)

    @property
    def depth(self) -> int:
        """Tokens on the longest path."""
        return len(self.paths[-1])


def _paths(choices: Iterable[Sequence[int]] | str) -> list[tuple[int, ...]]:
    try:
        read = _from_text(choices)
        paths = [tuple(path) for path in read]
    except (ValueError, TypeError) as error:
        raise _refused(choices, "it is not a list of lists") from error
    if not all(isinstance(rank, int) for path in paths for rank in path):
        raise _refused(choices, "ranks are integers from 0")
    return paths


def _refused(choices: object, why: str) -> ParameterError:
    return ParameterError(
        f"invalid tree choices {choices!r}", why, "Write them like [[0], [1], [0, 0]]"
    )


class TreeShape(NamedTuple):
    """Sizes of dynamic trees."""

    depth: int
    """Levels."""
    width: int
    """Nodes of a level that are expanded, and children of each."""
    total: int
    """Most nodes that are kept."""
