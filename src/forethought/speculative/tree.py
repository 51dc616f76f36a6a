"""Trees of draft tokens: which node follows which, and how static ones are written down.

Node numbers count the drafted tokens from 0; -1 is the root, the last token that is known. A chain
is a thin tree. Knows nothing about which tokens stand at the nodes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from forethought.config.speculation import all_nodes
from forethought.errors import ParameterError
from forethought.model.batch import ancestors


@dataclass(frozen=True)
class TokenTree:
    """The shape of a draft of N tokens.

    Attributes:
        parents: the node that each one follows, -1 for the root; parents come before children.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        assert all(-1 <= parent < node for node, parent in enumerate(self.parents)), self.parents

    def __len__(self) -> int:
        return len(self.parents)

    @classmethod
    def chain(cls, length: int) -> TokenTree:
        """One path of ``length`` nodes."""
        return cls(tuple(range(-1, length - 1)))

    @property
    def is_chain(self) -> bool:
        """Whether each node follows the one before it."""
        return self.parents == tuple(range(-1, len(self) - 1))

    @cached_property
    def depths(self) -> list[int]:
        """Tokens from the root to each node, itself included: children of the root have 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def children(self, node: int) -> list[int]:
        """The nodes that follow ``node``, -1 being the root, in rising order."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def path(self, node: int) -> list[int]:
        """The nodes from the root's child down to ``node``; none for the root itself."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    @cached_property
    def mask(self) -> Tensor:
        """Whom each node sees: bool [N, N], true where the column is the row or its ancestor."""
        return ancestors(self.parents)

    def truncated(self, depth: int) -> TokenTree:
        """The tree of the nodes no deeper than ``depth``, numbered anew in their order."""
        kept = [node for node in range(len(self)) if self.depths[node] <= depth]
        place = {-1: -1, **{node: number for number, node in enumerate(kept)}}
        return TokenTree(tuple(place[self.parents[node]] for node in kept))


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
