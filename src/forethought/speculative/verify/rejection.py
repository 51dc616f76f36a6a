"""Recursive rejection sampling: which tokens drawn by a drafter are accepted.

At a node with target distribution p and children x_1 .. x_m drawn from q, the children are tested
in order, against a residual r that starts as p. x_j is accepted with probability min(1, r(x_j) /
q_j(x_j)); if it is rejected, r becomes max(r - q_j, 0), renormalised. q_j is q where the children
were drawn independently, and q without x_1 .. x_j-1, renormalised, where they were drawn without
replacement. The token that then follows the node, an accepted child or one drawn from the last
residual, has distribution p exactly. (Leviathan et al. 2023, Algorithm 1, for one child; SpecInfer
2024, Algorithm 2, for independent children.)

All nodes are tested as if they were reached and their earlier siblings rejected, so that round j
tests the j-th children of all nodes of all drafts at once; ``accept.py`` then walks from the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forethought.kv.staging import upload
from forethought.speculative.drafter import DeviceTokens, Draft, DraftKind


@dataclass(frozen=True, slots=True)
class DrawnDraft:
    """A draft of N tokens that were drawn from its ``q``."""

    draft: Draft
    begin: int
    """Row of the root's probs; those of the nodes follow."""
    uniforms: Sequence[float]
    """N uniform samples in [0, 1), independent of those that the drafter used."""


def accept_drawn(probs: Tensor, drafts: Sequence[DrawnDraft]) -> Tensor:
    """Test every drafted token given that its parent is reached and its earlier siblings rejected.

    Args:
        probs: [R, V] float32, of the token after each row. Modified: the rows of nodes with
            children become the residual that is left when all children are rejected.
        drafts: of any kind but ``POINT``.

    Returns:
        [R] bool: whether the token of each row is accepted by its parent; false for all other rows.
    """
    accepted = torch.zeros(len(probs), dtype=torch.bool, device=probs.device)
    q = torch.cat([_over_vocabulary(drafted.draft, probs) for drafted in drafts])  # [Q, V]
    q = torch.where(q > 0, q, 0.0)  # NaN counts as 0 too
    tokens = token_ids([drafted.draft for drafted in drafts], probs.device)  # [Q]
    for tests in _rounds(drafts):
        indices = upload([(test.row, test.parent, test.source) for test in tests], probs.device)
        rows, parents, sources = indices.unbind(dim=1)
        proposal = _proposal(q, tokens, sources, tests)
        uniforms = upload([test.uniform for test in tests], probs.device, torch.float64)
        accepted[rows] = _run_round(probs, parents, proposal, tokens[sources], uniforms)
    return accepted


@dataclass(frozen=True, slots=True)
class _NodeTest:
    row: int
    """Row of the token's own probs."""
    parent: int
    """Row of the residual that it is tested against."""
    source: int
    """Its row of q, and of the drafted tokens."""
    uniform: float
    removed: tuple[int, ...]
    """Rows of the tokens taken out of q before it was drawn."""


def _rounds(drafts: Sequence[DrawnDraft]) -> list[list[_NodeTest]]:
    """The first children of all nodes, then the second ones, and so on."""
    rounds: list[list[_NodeTest]] = []
    first = 0
    for drafted in drafts:
        draft, siblings = drafted.draft, dict[int, list[int]]()
        for node in range(len(draft)):
            parent = draft.parent(node)
            earlier = siblings.setdefault(parent, [])
            if len(earlier) == len(rounds):
                rounds.append([])
            removed = tuple(earlier) if draft.kind is DraftKind.WITHOUT_REPLACEMENT else ()
            row, source = drafted.begin + 1 + node, first + node
            test = _NodeTest(
                row, drafted.begin + 1 + parent, source, drafted.uniforms[node], removed
            )
            rounds[len(earlier)].append(test)
            earlier.append(source)
        first += len(draft)
    return rounds


def token_ids(drafts: Sequence[Draft], device: torch.device) -> Tensor:
    """The drafted tokens of drafts ``[nodes]``, int64 on the device, where some may be already."""
    on_device = [draft.tokens for draft in drafts if isinstance(draft.tokens, DeviceTokens)]
    if not on_device:
        return upload([token for draft in drafts for token in draft.tokens], device)
    return torch.cat(
        [
            draft.tokens.on_device
            if isinstance(draft.tokens, DeviceTokens)
            else upload(list(draft.tokens), device)
            for draft in drafts
        ]
    )


def _proposal(q: Tensor, tokens: Tensor, sources: Tensor, tests: Sequence[_NodeTest]) -> Tensor:
    """What the tokens of a round were drawn from: [n, V], normalised.

    q: [Q, V] float32; tokens: [Q] int64, the drafted ones; sources: [n], rows of both.
    """
    q_j = q[sources]
    removed = [(number, source) for number, test in enumerate(tests) for source in test.removed]
    if removed:
        numbers, nodes = upload(removed, q.device).unbind(dim=1)
        q_j[numbers, tokens[nodes]] = 0.0
    q_j /= q_j.sum(dim=-1, keepdim=True)
    return q_j


def _run_round(
    probs: Tensor, parents: Tensor, q_j: Tensor, tokens: Tensor, uniforms: Tensor
) -> Tensor:
    """Test one child per parent; the parents' rows become the residuals after its rejection.

    Args:
        probs: [R, V] float32.
        parents: [n] int64, rows of probs.
        q_j: [n, V] float32, what each token was drawn from. Modified.
        tokens: [n] int64.
        uniforms: [n] float64.

    Returns:
        [n] bool.
    """
    p, tokens = probs[parents], tokens.unsqueeze(1)
    q_token = q_j.gather(1, tokens)  # [n, 1]
    # A token that q gives no mass cannot have been drawn from it: it counts as a point mass.
    is_point = ~(q_token > 0)
    q_token = torch.where(is_point, 1.0, q_token)
    q_j.masked_fill_(is_point, 0.0).scatter_(1, tokens, q_token)

    accepted = uniforms.unsqueeze(1) * q_token < p.gather(1, tokens).double()  # never where p is 0
    residual = (p - q_j).clamp_(min=0.0)
    mass = residual.sum(dim=-1, keepdim=True)
    # No mass is left where p equals q; then only rounding could have rejected.
    probs[parents] = torch.where(mass > 0, residual / mass, p)
    return accepted.squeeze(1)


def _over_vocabulary(draft: Draft, probs: Tensor) -> Tensor:
    """The draft's q over the target's vocabulary: [N, V] float32."""
    assert draft.q is not None, draft.kind
    q = draft.q.to(probs)
    if draft.ids is None:
        return q
    return probs.new_zeros(len(q), probs.shape[1]).index_add_(1, draft.ids.to(probs.device), q)
