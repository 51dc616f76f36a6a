"""Drafts that are sampled from a draft model's distribution, node by node of a static tree.

Siblings are sampled without replacement. A node's uniform sample is a function of the request's
seed, the position and the node. ``SampledDraft`` samples for one request, on the host, where the
distribution may depend on the tokens that were drafted before; ``SampledDrafts`` gives the same
tokens to all requests whose distributions do not, by operations that no one waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from forethought.config.tree import TreeChoices
from forethought.kv.staging import upload
from forethought.model.sampling import TokenContext, invert_cdf, logits_to_probs, uniform_at
from forethought.speculative.drafter import Draft, DraftKind, DraftRequest

DRAFTING = 1
"""The ``use`` of the uniform samples that drafts are sampled with."""


def drafting_uniform(request: DraftRequest, choices: TreeChoices, node: int) -> float:
    """The uniform sample of a node."""
    position = len(request.tokens) + len(choices.paths[node]) - 1
    return uniform_at(request.seed, request.index, position, use=DRAFTING + (node << 8))


def sampled_kind(choices: TreeChoices) -> DraftKind:
    """How the children of a node are drawn."""
    return DraftKind.IID if choices.is_chain else DraftKind.WITHOUT_REPLACEMENT


def depends_on_tokens(request: DraftRequest) -> bool:
    """Whether its distributions depend on earlier tokens beyond the logits."""
    params = request.params
    num_output = len(request.tokens) - request.prompt_length
    return params.penalises or num_output < params.min_tokens


class SampledDraft:
    """The draft of one request, sampled under its own params; the reference implementation.

    Args:
        request: to draft for.
        choices: the tree; of its ranks only their number matters.
        size: nodes of the draft, the first ones of the tree.
    """

    def __init__(self, request: DraftRequest, choices: TreeChoices, size: int) -> None:
        self._request, self._choices, self._size = request, choices, size
        self._tokens: list[int] = []
        self._probs: list[Tensor] = []
        self._void: set[int] = set()
        """Nodes whose earlier siblings have all tokens of nonzero probability."""

    def grow(self, logits: Tensor, above: Sequence[int], nodes: range) -> list[int]:
        """Sample the next level.

        Args:
            logits: float32 ``[len(above), V]``.
            above: nodes of the level above, -1 for the root.
            nodes: those of the level; others than the first ``size`` of the tree are not sampled.

        Returns:
            A token for each of ``nodes``, anything for those that are not sampled.
        """
        if nodes.start >= self._size:
            return [0] * len(nodes)
        parents = self._choices.parents
        probs = self._next_probs(logits, above)
        residual = dict(zip(above, probs, strict=True))
        for node in nodes[: max(0, self._size - nodes.start)]:
            parent = parents[node]
            row = probs[above.index(parent)]
            if not residual[parent].any():
                self._void.add(node)
                residual[parent] = row
            token = int(
                invert_cdf(
                    residual[parent][None], [drafting_uniform(self._request, self._choices, node)]
                )
            )
            self._tokens.append(token)
            self._probs.append(row)
            residual[parent] = residual[parent].clone()
            residual[parent][token] = 0.0
        tokens = self._tokens[nodes.start :]
        return tokens + [0] * (len(nodes) - len(tokens))

    def draft(self) -> Draft:
        """The sampled draft."""
        tokens = [-1 if node in self._void else token for node, token in enumerate(self._tokens)]
        parents = self._choices.draft_parents(len(tokens))
        return Draft(tokens, parents, sampled_kind(self._choices), torch.stack(self._probs))

    def _next_probs(self, logits: Tensor, above: Sequence[int]) -> Tensor:
        """The distributions ``[len(above), V]`` that plain decoding with the draft model samples
        from.
        """
        request = self._request
        prompt = request.tokens[: request.prompt_length]
        output = list(request.tokens[request.prompt_length :])
        context = TokenContext(
            request.params, prompt, output, frozenset(), breakers=request.breakers
        )
        contexts = [replace(context, output=[*output, *self._path(node)]) for node in above]
        return logits_to_probs(logits, contexts)

    def _path(self, node: int) -> list[int]:
        if node < 0:
            return []
        return [*self._path(self._choices.parents[node]), self._tokens[node]]


class SampledLevel(Protocol):
    """The nodes of one depth of a static tree.

    Attributes:
        begin, end: which nodes of the tree they are.
        above: nodes of the level above that have children; -1 for the root.
        width: how many those are.
        is_single: whether it is one node after one.
        rows: int64 ``[nodes]``, which of those above each node follows.
        rounds: int64 ``[n]`` each: the first child of each one above, counted from ``begin``, then
            the second children, and so on.
    """

    begin: int
    end: int
    above: Sequence[int]
    width: int
    is_single: bool
    rows: Tensor
    rounds: list[Tensor]


class SampledDrafts:
    """The sampled drafts of a step: together where they can be, else each as ``SampledDraft``.

    Where all tokens of nonzero probability are among a node's earlier siblings, a draft that is
    sampled together repeats one of them, which verification never accepts.

    Args:
        requests: by their row in the batch of the draft model.
        choices: the tree; of its ranks only their number matters.
        sizes: nodes of the draft of each row, the first ones of the tree.
        device: of the draft model.

    Attributes:
        alone: the drafts of requests that ``depends_on_tokens``, by row.
    """

    def __init__(
        self,
        requests: Mapping[int, DraftRequest],
        choices: TreeChoices,
        sizes: Sequence[int],
        device: torch.device,
    ) -> None:
        self._choices, self._sizes = choices, sizes
        self.alone = {
            row: SampledDraft(request, choices, sizes[row])
            for row, request in requests.items()
            if depends_on_tokens(request)
        }
        self._rows = sorted(set(requests) - set(self.alone))
        sampled = [requests[row] for row in self._rows]
        self._contexts = list(map(_context, sampled))
        if sampled:
            largest = max(sizes[row] for row in self._rows)
            nodes = range(next(end for end in choices.num_nodes if end >= largest))
            rows = [
                [drafting_uniform(request, choices, node) for node in nodes] for request in sampled
            ]
            self._uniforms = upload(rows, device, torch.float64)  # [S, N], of whole levels
        self._probs: list[Tensor] = []

    def grow(self, logits: Tensor, level: SampledLevel, tokens: Tensor) -> None:
        """Sample the next level.

        Args:
            logits: float32 ``[rows * width, V]``, of the first rows of the batch.
            level: its nodes.
            tokens: int64 ``[rows, nodes]``; those of sampled drafts are overwritten.
        """
        grouped = logits.view(len(tokens), level.width, logits.shape[-1])
        for row, draft in self.alone.items():
            if row < len(tokens):
                drawn = draft.grow(grouped[row], level.above, range(level.begin, level.end))
                tokens[row] = upload(drawn, tokens.device)
        # All rows may go through levels that only some drafts reach.
        deep = [row for row in self._rows if self._sizes[row] > level.begin]
        rows = [row for row in deep if row < len(tokens)]
        if len(rows) == len(tokens):
            tokens.copy_(self._grow_together(grouped, level))
        elif rows:
            index = upload(rows, tokens.device)
            tokens[index] = self._grow_together(grouped[index], level)

    def _grow_together(self, logits: Tensor, level: SampledLevel) -> Tensor:
        """logits ``[S, width, V]`` -> int64 ``[S, nodes]``."""
        contexts = [
            context for context in self._contexts[: len(logits)] for _ in range(level.width)
        ]
        probs = logits_to_probs(logits.flatten(0, 1), contexts).view(logits.shape)
        self._probs.append(probs if level.is_single else probs[:, level.rows])
        uniforms = self._uniforms[: len(logits), level.begin : level.end]
        if level.is_single:
            return invert_cdf(probs[:, 0], uniforms[:, 0]).unsqueeze(1)
        return _draw_siblings(probs, uniforms, level)

    def q(self) -> dict[int, Tensor]:
        """The distributions ``[nodes, V]`` that drafts sampled together were drawn from, by row."""
        probs_of = {}
        for number, row in enumerate(self._rows):
            levels = [probs[number] for probs in self._probs if number < len(probs)]
            probs_of[row] = torch.cat(levels)[: self._sizes[row]]
        return probs_of


def _context(request: DraftRequest) -> TokenContext:
    start = request.prompt_length if request.params.min_tokens else len(request.tokens)
    return TokenContext(request.params, (), request.tokens[start:], frozenset())


def _draw_siblings(probs: Tensor, uniforms: Tensor, level: SampledLevel) -> Tensor:
    """Draw the nodes of a level, siblings one after the other and without replacement.

    Args:
        probs: ``[S, width, V]`` of the nodes above.
        uniforms: float64 ``[S, nodes]``.
        level: the nodes.

    Returns:
        int64 ``[S, nodes]``.
    """
    drawn = torch.empty(uniforms.shape, dtype=torch.int64, device=probs.device)
    residual = probs.clone()
    for number, nodes in enumerate(level.rounds):
        above = level.rows[nodes]
        rest = residual[:, above]  # [S, n, V]
        if number:  # nothing may be left of a distribution
            rest = torch.where(rest.any(-1, keepdim=True), rest, probs[:, above])
        tokens = invert_cdf(rest.flatten(0, 1), uniforms[:, nodes].flatten())
        drawn[:, nodes] = tokens.view(len(probs), len(nodes))
        residual[:, above] = rest.scatter(2, drawn[:, nodes, None], 0.0)
    return drawn
