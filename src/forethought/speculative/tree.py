"""Shapes of draft trees: node depths, and static trees written as paths of ranks.

A tree of N nodes is its ``parents``: entry n is the node that node n follows, -1 for the root, the
last known token. Parents come before their children.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from forethought.config.speculation import all_nodes
from forethought.errors import ParameterError


def node_depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node of a tree: 1 for the children of the root.

    Args:
        parents: the node that each one follows, -1 for the root; parents come before children.
    """
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


@dataclass(frozen=True)
class TreeChoices:
    """A static tree, each node a path of ranks from the root.

    Rank r is the drafter's r-th likeliest token at that place, from 0: ``(1, 0)`` is the likeliest
    token after the second likeliest. Medusa's and EAGLE's choices are written so.

    Attributes:
        paths: one per node, sorted by length, then by value.
    """

    paths: tuple[tuple[int, ...], ...]

    @classmethod
    def parse(cls, choices: Iterable[Sequence[int]] | str) -> TreeChoices:
        """Read either spelling: all nodes, or the paths to the leaves only.

        Args:
            choices: paths, or the text of a list of them. What leads to a path belongs to the tree
                whether it is listed or not.

        Raises:
            ParameterError: no paths, an empty one, one that stands there twice, or something in one
                that is no rank.
        """
        given = _paths(choices)
        if not given or not all(given):
            raise _refused(choices, "a tree is one or more paths of at least one rank")
        if any(isinstance(rank, bool) or rank < 0 for path in given for rank in path):
            raise _refused(choices, "ranks are integers from 0")
        if len(set(given)) < len(given):
            raise _refused(choices, "a path stands there twice")
        return cls(all_nodes(given))

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """The node that each one follows, -1 for the root."""
        place = {path: node for node, path in enumerate(self.paths)}
        return tuple(place.get(path[:-1], -1) for path in self.paths)

    def truncated(self, depth: int) -> TreeChoices:
        """The tree of the nodes no deeper than ``depth``, at least 1."""
        return TreeChoices(tuple(path for path in self.paths if len(path) <= depth))

    def expect_ranks_below(self, vocab_size: int, name: str) -> None:
        """Refuse a tree, that of the field ``name``, with ranks that no token can have.

        Args:
            vocab_size: tokens that the drafter knows.
            name: for the message.

        Raises:
            ParameterError: a rank is not below ``vocab_size``.
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
        read = ast.literal_eval(choices) if isinstance(choices, str) else choices
        paths = [tuple(path) for path in read]
    except (ValueError, SyntaxError, TypeError) as error:
        raise _refused(choices, "it is not a list of lists") from error
    if not all(isinstance(rank, int) for path in paths for rank in path):
        raise _refused(choices, "ranks are integers from 0")
    return paths


def _refused(choices: object, why: str) -> ParameterError:
    return ParameterError(
        f"tree choices {choices!r} are none", why, "Write them like [[0], [1], [0, 0]]"
    )
