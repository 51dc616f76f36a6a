"""Verification of one draft in slow, plain Python: read it to know what ``verify.py`` must do.

It decides by asking a ``Chance``. With coins it gives one verdict; with one that tries every answer
in turn, in fractions, it gives the exact law of the verdicts. Knows nothing about tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from forethought.speculative.draft import DraftKind

Number = float | Fraction
Distribution = list[Number]
"""Probabilities, one per id."""


class Chance(Protocol):
    """Decides what the laws leave open. ``depth`` is the number of tokens accepted before."""

    def accepts(self, probability: Number, depth: int, sibling: int) -> bool:
        """Yes with this probability, asked for the ``sibling``-th child of its node, from 0."""

    def draws(self, distribution: Distribution, depth: int) -> int:
        """A token of this law."""


@dataclass(frozen=True)
class PlainDraft:
    """A ``Draft`` on lists: ``q`` has one law per node, over all ids of the vocabulary."""

    tokens: Sequence[int]
    parents: Sequence[int]
    kind: DraftKind
    q: Sequence[Distribution] = ()

    def children(self, node: int) -> list[int]:
        """Those that follow ``node``, -1 being the root."""
        return [child for child, parent in enumerate(self.parents) if parent == node]


Rule = Callable[
    [Distribution, list[tuple[int, Distribution]], DraftKind, Chance, int], tuple[int | None, int]
]
"""Settles one node; see ``settle_node``."""


def settle_node(
    distribution: Distribution,
    children: list[tuple[int, Distribution]],
    kind: DraftKind,
    chance: Chance,
    depth: int,
) -> tuple[int | None, int]:
    """Settle one node.

    Args:
        law: of the token that follows it.
        children: of each, its token and the law that it was drawn from; points have an empty one.
        kind: how they were chosen.
        chance: decides.
        depth: of the node, 0 for the root.

    Returns:
        The accepted child's place among ``children`` or None, and the token that follows.
    """
    if kind is DraftKind.POINT:
        token = chance.draws(distribution, depth)
        places = [place for place, (drafted, _) in enumerate(children) if drafted == token]
        return (places[0] if places else None), token
    gone: list[int] = []
    for place, (token, q) in enumerate(children):
        if kind is DraftKind.WITHOUT_REPLACEMENT:
            q = [0 if other in gone else weight for other, weight in enumerate(q)]
            gone.append(token)
        q = normalised([weight if weight > 0 else 0 for weight in q])
        if not q[token] > 0:  # it cannot have come from there: a point
            q = [int(other == token) for other in range(len(distribution))]
        if chance.accepts(min(1, distribution[token] / q[token]), depth, place):
            return place, token
        rest = [max(p - weight, 0) for p, weight in zip(distribution, q, strict=True)]
        distribution = normalised(rest) if sum(rest) > 0 else distribution
    return None, chance.draws(distribution, depth)


def reference_verify(
    distributions: Sequence[Distribution],
    draft: PlainDraft,
    chance: Chance,
    rule: Rule = settle_node,
) -> tuple[list[int], list[int]]:
    """The accepted path and the tokens that come out of one draft of N tokens.

    Args:
        laws: 1 + N, of the token that follows the root, then of the one that follows each node.
        draft: what was proposed.
        chance: decides.
        rule: how a node is settled.
    """
    path: list[int] = []
    tokens: list[int] = []
    node = -1
    while True:
        children = draft.children(node)
        pairs = [(draft.tokens[child], draft.q[child] if draft.q else []) for child in children]
        place, token = rule(distributions[1 + node], pairs, draft.kind, chance, len(path))
        tokens.append(token)
        if place is None:
            return path, tokens
        node = children[place]
        path.append(node)


def normalised(weights: Sequence[Number]) -> Distribution:
    """The weights over their sum; as they are if they have none."""
    total = sum(weights)
    return [weight / total for weight in weights] if total > 0 else list(weights)
