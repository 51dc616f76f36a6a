"""Shapes of draft trees: node depths, and static trees written as paths of ranks.

A tree of N nodes is its ``parents``: entry n is the node that node n follows, -1 for the root, the
last known token. Parents come before their children.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from forethought.config.speculation import all_nodes
from forethought.errors import ParameterError

if TYPE_CHECKING:
    from torch import Tensor


def node_depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node of a tree: 1 for the children of the root.

    Args:
        parents: the node that each one follows, -1 for the root; parents come before children.
    """
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def tokens_of_ranks(logits: Tensor, positions: Tensor, ranks: Tensor, max_rank: int) -> Tensor:
    """The tokens of n nodes of a static tree: int64 ``[N, n]``, columns of the logits.

    Args:
        logits: ``[N, P, V]``: of N requests at P positions.
        positions: int64 ``[n]``, of each node's logits.
        ranks: int64 ``[n]``, of each node's token there. A rank beyond V repeats the last one;
            ``check_draft`` leaves repeated siblings out.
        max_rank: the greatest of ``ranks``.
    """
    if max_rank == 0:
        return logits.argmax(-1)[:, positions]
    width = min(max_rank + 1, logits.shape[-1])
    return logits.topk(width).indices[:, positions, ranks.clamp(max=width - 1)]


@dataclass(frozen=True)
class TreeChoices:
    """A static tree, each node a path of ranks from the root.

    Rank r is the drafter's r-th most probable token, from 0: ``(1, 0)`` is the most probable token
    after the second most probable. Medusa's and EAGLE's choices are written so.

    Attributes:
        paths: one per node, sorted by length, then by value.
    """

    paths: tuple[tuple[int, ...], ...]

    @classmethod
    def parse(cls, choices: Iterable[Sequence[int]] | str) -> TreeChoices:
        """Read a list of all nodes, or of the paths to the leaves only.

        Args:
            choices: paths, or the text of a list of them. The nodes on a path belong to the tree
                whether they are listed or not.

        Raises:
            ParameterError: there is no path, an empty one or a repeated one, or an entry is not a
                rank.
        """
        given = _paths(choices)
        if not given or not all(given):
            raise _refused(choices, "a tree is one or more paths of at least one rank")
        if any(isinstance(rank, bool) or rank < 0 for path in given for rank in path):
            raise _refused(choices, "ranks are integers from 0")
        if len(set(given)) < len(given):
            raise _refused(choices, "a path is listed twice")
        return cls(all_nodes(given))

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """The node that each one follows, -1 for the root."""
        node_of = {path: node for node, path in enumerate(self.paths)}
        return tuple(node_of.get(path[:-1], -1) for path in self.paths)

    def num_nodes(self, depth: int) -> int:
        """Number of nodes no deeper than ``depth``; they are the first ones."""
        return sum(len(path) <= depth for path in self.paths)

    def truncated(self, depth: int) -> TreeChoices:
        """The tree of the nodes no deeper than ``depth``, at least 1."""
        return TreeChoices(self.paths[: self.num_nodes(depth)])

    def expect_ranks_below(self, vocab_size: int, name: str) -> None:
        """Check that every rank is that of a token.

        Args:
            vocab_size: size of the drafter's vocabulary.
            name: the configuration field, for the message.

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
        f"invalid tree choices {choices!r}", why, "Write them like [[0], [1], [0, 0]]"
    )
