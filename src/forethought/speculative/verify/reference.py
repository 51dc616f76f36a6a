"""Reference implementation of ``verify.py``: one draft at a time, in plain Python.

Every random decision is made by a ``RandomSource``. With uniform samples it gives one result; with
a source that enumerates all answers, in fractions, it gives the exact distribution of the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from forethought.speculative.drafter import DraftKind

Number = float | Fraction
Probs = list[Number]
"""Probabilities, one per token id."""


class RandomSource(Protocol):
    """Makes the random decisions. ``depth`` is the number of tokens accepted before."""

    def accepts(self, probability: Number, depth: int, sibling: int) -> bool:
        """True with this probability, for child number ``sibling`` of its node, from 0."""

    def draws(self, probs: Probs, depth: int) -> int:
        """A token drawn from ``probs``."""


@dataclass(frozen=True)
class ReferenceDraft:
    """A ``Draft`` on lists: ``q`` has one distribution per node, over the whole vocabulary."""

    tokens: Sequence[int]
    parents: Sequence[int]
    kind: DraftKind
    q: Sequence[Probs] = ()

    def children(self, node: int) -> list[int]:
        """The nodes that follow ``node``, -1 being the root."""
        return [child for child, parent in enumerate(self.parents) if parent == node]


NodeRule = Callable[
    [Probs, list[tuple[int, Probs]], DraftKind, RandomSource, int], tuple[int | None, int]
]
"""Decides at one node; see ``verify_node``."""


def verify_node(
    probs: Probs,
    children: list[tuple[int, Probs]],
    kind: DraftKind,
    source: RandomSource,
    depth: int,
) -> tuple[int | None, int]:
    """Decide which child of a node is accepted.

    Args:
        probs: of the token that follows the node.
        children: of each, its token and the q that it was drawn from; points have an empty one.
        kind: how they were chosen.
        source: makes the random decisions.
        depth: of the node, 0 for the root.

    Returns:
        The index of the accepted child or None, and the token that follows.
    """
    if kind is DraftKind.POINT:
        token = source.draws(probs, depth)
        matching = [number for number, (drafted, _) in enumerate(children) if drafted == token]
        return (matching[0] if matching else None), token
    removed: list[int] = []
    for number, (token, q) in enumerate(children):
        if kind is DraftKind.WITHOUT_REPLACEMENT:
            q = [0 if other in removed else weight for other, weight in enumerate(q)]
            removed.append(token)
        q = normalised([weight if weight > 0 else 0 for weight in q])
        if not q[token] > 0:  # it cannot have been drawn from q: a point mass
            q = [int(other == token) for other in range(len(probs))]
        if source.accepts(min(1, probs[token] / q[token]), depth, number):
            return number, token
        residual = [max(p - weight, 0) for p, weight in zip(probs, q, strict=True)]
        probs = normalised(residual) if sum(residual) > 0 else probs
    return None, source.draws(probs, depth)


def reference_verify(
    probs: Sequence[Probs],
    draft: ReferenceDraft,
    source: RandomSource,
    rule: NodeRule = verify_node,
) -> tuple[list[int], list[int]]:
    """The accepted path and the emitted tokens of one draft of N tokens.

    Args:
        probs: 1 + N: of the token that follows the root, then of the one that follows each node.
        draft: what was proposed.
        source: makes the random decisions.
        rule: decides at each node.
    """
    path: list[int] = []
    tokens: list[int] = []
    node = -1
    while True:
        children = draft.children(node)
        drawn = [(draft.tokens[child], draft.q[child] if draft.q else []) for child in children]
        accepted, token = rule(probs[1 + node], drawn, draft.kind, source, len(path))
        tokens.append(token)
        if accepted is None:
            return path, tokens
        node = children[accepted]
        path.append(node)


def normalised(weights: Sequence[Number]) -> Probs:
    """The weights divided by their sum; unchanged if the sum is 0."""
    total = sum(weights)
    return [weight / total for weight in weights] if total > 0 else list(weights)
