"""Recursive rejection: which tokens drawn by a drafter may stand, and what is left if none may.

At a node with law p and children x_1 .. x_m drawn from q, the children are tried in their order,
against a law that starts as p. x_j is accepted with probability min(1, law(x_j) / q_j(x_j)); if it
is not, the law becomes max(law - q_j, 0), renormalised. q_j is q where the children were drawn
independently, and q without x_1 .. x_j-1, renormalised, where they were drawn without replacement.
The token that then follows the node, be it an accepted child or one drawn from the law that is left
at the end, has law p exactly. (Leviathan et al. 2023, Algorithm 1, for one child; SpecInfer 2024,
Algorithm 2, for independent children.)

All nodes are settled as if they were reached and their first children rejected, so that round j
tries the j-th children of all nodes of all drafts at once. Knows nothing about which is reached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forethought.speculative.draft import Draft, DraftKind


@dataclass(frozen=True, slots=True)
class DrawnDraft:
    """A draft of N tokens with what decides about it."""

    draft: Draft
    begin: int
    """Row of the root's law; the nodes' follow."""
    uniforms: Sequence[float]
    """N numbers in [0, 1), each independent of whatever the drafter tossed."""


def settle(distributions: Tensor, tossed: Sequence[DrawnDraft]) -> Tensor:
    """Try every drafted token where its parent is reached and its elder siblings are rejected.

    Args:
        laws: [R, V] float32, of the token that follows each row. Modified: those of nodes with
            children become what is left when all children are rejected.
        tossed: drafts of a kind with chance of its own.

    Returns:
        [R] bool: whether the token of each row may follow its parent; false for all other rows.
    """
    accepted = torch.zeros(len(distributions), dtype=torch.bool, device=distributions.device)
    q = torch.cat([_over_vocabulary(each.draft, distributions) for each in tossed])  # [Q, V]
    q = torch.where(q > 0, q, 0.0)  # nor is NaN a weight
    for trials in _rounds(tossed):
        rows = _index([trial.row for trial in trials], distributions)
        accepted[rows] = _try(distributions, q, trials)
    return accepted


@dataclass(frozen=True, slots=True)
class _NodeTest:
    row: int
    """Of the token's own law."""
    parent: int
    """Row of the law that it is tried against."""
    source: int
    """Row of q."""
    token: int
    uniform: float
    gone: list[int]
    """Tokens taken out of q before it was drawn."""


def _rounds(tossed: Sequence[DrawnDraft]) -> Iterator[list[_NodeTest]]:
    """The first children of all nodes, then the second ones, and so on."""
    rounds: list[list[_NodeTest]] = []
    source = 0
    for each in tossed:
        draft, earlier_siblings = each.draft, dict[int, list[int]]()
        for node, token in enumerate(draft.tokens):
            parent = draft.parent(node)
            before = earlier_siblings.setdefault(parent, [])
            if len(before) == len(rounds):
                rounds.append([])
            gone = list(before) if draft.kind is DraftKind.WITHOUT_REPLACEMENT else []
            own, of_parent = each.begin + 1 + node, each.begin + 1 + parent
            trial = _NodeTest(own, of_parent, source + node, token, each.uniforms[node], gone)
            rounds[len(before)].append(trial)
            before.append(token)
        source += len(draft)
    yield from rounds


def _try(distributions: Tensor, q: Tensor, trials: Sequence[_NodeTest]) -> Tensor:
    """Try one child per parent; the parents' laws become what is left if it is rejected.

    laws: [R, V] float32; q: [Q, V] float32. Returns [len(trials)] bool.
    """
    parents = _index([trial.parent for trial in trials], distributions)
    tokens = _index([trial.token for trial in trials], distributions).unsqueeze(1)
    uniforms = torch.tensor(
        [[trial.uniform] for trial in trials], dtype=torch.float64, device=distributions.device
    )
    distribution, drawn_from = (
        distributions[parents],
        q[_index([trial.source for trial in trials], distributions)],
    )
    gone = [(place, token) for place, trial in enumerate(trials) for token in trial.gone]
    if gone:
        places, taken = _index(gone, distributions).unbind(dim=1)
        drawn_from[places, taken] = 0.0
    drawn_from /= drawn_from.sum(dim=-1, keepdim=True)
    chance = drawn_from.gather(1, tokens)  # [n, 1]
    # A token cannot have come from a law that gives it no mass: it is taken for a point.
    is_point = ~(chance > 0)
    chance = torch.where(is_point, 1.0, chance)
    drawn_from.masked_fill_(is_point, 0.0).scatter_(1, tokens, chance)

    accepted = (
        uniforms * chance < distribution.gather(1, tokens).double()
    )  # never where the law is 0
    rest = (distribution - drawn_from).clamp_(min=0.0)
    mass = rest.sum(dim=-1, keepdim=True)
    # Nothing is left where law and q are equal; then only rounding could have rejected.
    distributions[parents] = torch.where(mass > 0, rest / mass, distribution)
    return accepted.squeeze(1)


def _over_vocabulary(draft: Draft, distributions: Tensor) -> Tensor:
    """The draft's q as [N, V] float32."""
    assert draft.q is not None, draft.kind
    q = draft.q.to(distributions)
    if draft.ids is None:
        return q
    return distributions.new_zeros(len(q), distributions.shape[1]).index_add_(
        1, draft.ids.to(distributions.device), q
    )


def _index(values: Sequence[int] | Sequence[tuple[int, int]], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)
