"""Static draft trees: the same tree of ranks in every step, of most probable or sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from forethought.config.tree import TreeChoices
from forethought.kv.staging import upload
from forethought.model.batch import ancestors
from forethought.model.sampling import TokenContext, invert_cdf, logits_to_probs, uniform_at
from forethought.speculative.chain_graph import ChainGraphs
from forethought.speculative.draft_module import DraftModuleRunner
from forethought.speculative.drafter import DeviceTokens, Draft, DraftKind, DraftRequest

DRAFTING = 1
"""The ``use`` of the uniform samples that drafts are sampled with."""


class TreeBuilder(Protocol):
    """Builds the drafts of a step with a draft module."""

    def nodes(self, depth: int) -> int:
        """KV slots behind the root that a draft of ``depth`` levels needs."""
        ...

    def grow(self, runner: DraftModuleRunner, requests: Sequence[DraftRequest]) -> None:
        """Set the drafts of ``requests``."""
        ...


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


class StaticTreeBuilder:
    """A static tree of ranks, or a chain, drafted level by level.

    Tokens stay on the device unless they are sampled: each level's forward is queued behind the
    previous one. On a GPU the target verifies them before the host reads them, unless some are
    sampled; other drafts are transferred to the host together.

    Args:
        choices: the tree.
        device: of the draft network.
        sampled: whether a request's tokens are sampled instead of chosen by rank; None: none's are.
        stores_drafted: store the entries of the drafted tokens of a chain, so that accepted ones
            are not computed again. Only for a network that reads no fed-back hidden states.
    """

    def __init__(
        self,
        choices: TreeChoices,
        device: torch.device,
        sampled: Callable[[DraftRequest], bool] | None = None,
        stores_drafted: bool = False,
    ) -> None:
        assert choices.is_chain or not stores_drafted
        self._choices, self._sampled, self._stores_drafted = choices, sampled, stores_drafted
        self._num_nodes, self._depth = choices.num_nodes, choices.depth
        self._levels = _levels(choices, device)
        self._graphs: dict[DraftModuleRunner, ChainGraphs] = {}

    def nodes(self, depth: int) -> int:
        """Nodes of the tree down to ``depth``."""
        return self._num_nodes[min(depth, self._depth)]

    def grow(self, runner: DraftModuleRunner, requests: Sequence[DraftRequest]) -> None:
        """See :class:`TreeBuilder`. Short drafts take no part in the forwards of deeper levels."""
        requests = sorted(requests, key=self._size, reverse=True)
        sizes = list(map(self._size, requests))
        samplers = {
            row: SampledDraft(request, self._choices, sizes[row])
            for row, request in enumerate(requests)
            if self._sampled is not None and self._sampled(request)
        }
        if self._choices.is_chain and not samplers and runner.network.draft_chains is not None:
            drafts = runner.draft_chains(requests, sizes, self._stores_drafted)
            for request, tokens in zip(requests, drafts, strict=True):
                request.draft = Draft(tokens)
            return
        graphs = None if samplers else self._graphs_of(runner)
        chains = None if graphs is None else graphs.draft(requests, sizes)
        if chains is not None:
            self._finish(requests, sizes, samplers, list(chains.unsqueeze(-1)))
            return
        levels = [level for level in self._levels if level.begin < sizes[0]]
        capacity = sum(level.inner for level in levels[:-1])
        root = (runner.read_known if self._stores_drafted else runner.begin)(requests, capacity)
        states, logits = root.output
        drawn: list[Tensor] = []
        for depth, level in enumerate(levels, start=1):
            tokens = level.draw(logits, runner.network.ids)
            _sample(level, logits, samplers, tokens)
            drawn.append(tokens)
            if level is levels[-1]:
                break
            further = len(requests)
            if not self._stores_drafted:  # stored together at the end
                further = sum(size > level.end for size in sizes)
                root.workspace.keep(further)
            token_ids, states = level.grown(tokens[:further], states[: further * level.width])
            seen = None if level.seen is None else level.seen.expand(further, -1, -1)
            states, logits = runner.advance(root, depth, token_ids, states, seen)
        if self._stores_drafted:
            runner.store(requests, root, [size - 1 for size in sizes])
        self._finish(requests, sizes, samplers, drawn)

    def _graphs_of(self, runner: DraftModuleRunner) -> ChainGraphs | None:
        """The graphs of a runner, if its drafts can be captured."""
        reads_states = runner.hidden_states is not None and not self._stores_drafted
        if runner.graphs is None or not self._choices.is_chain or not reads_states:
            return None
        if runner not in self._graphs:
            self._graphs[runner] = ChainGraphs(runner, runner.graphs)
        return self._graphs[runner]

    def _size(self, request: DraftRequest) -> int:
        """Number of nodes of its draft."""
        return min(self.nodes(request.max_draft_len), request.max_nodes)

    def _finish(
        self,
        requests: Sequence[DraftRequest],
        sizes: Sequence[int],
        samplers: Mapping[int, SampledDraft],
        drawn: Sequence[Tensor],
    ) -> None:
        """Set the drafts: on a GPU they stay there if they can, else all are read at once."""
        if drawn[0].device.type != "cpu" and not samplers:
            for request, ids in zip(requests, _by_request(drawn, sizes), strict=True):
                parents = draft_parents(self._choices, len(ids))
                request.draft = Draft(DeviceTokens(ids), parents)
            return
        flat: list[int] = torch.cat([level.flatten() for level in drawn]).tolist()
        drafts: list[list[int]] = [[] for _ in requests]
        begin = 0
        for tokens in drawn:
            rows, width = tokens.shape
            for row in range(rows):
                drafts[row] += flat[begin : begin + width]
                begin += width
        for row, (request, size) in enumerate(zip(requests, sizes, strict=True)):
            if row in samplers:
                request.draft = samplers[row].draft()
            else:
                request.draft = Draft(drafts[row][:size], draft_parents(self._choices, size))


def _by_request(drawn: Sequence[Tensor], sizes: Sequence[int]) -> Sequence[Tensor]:
    """The tokens of each request's draft, on the device.

    Args:
        drawn: by level, int64 ``[rows, nodes]``: of the requests that go as deep, the first ones.
        sizes: tokens of each request's draft, falling.
    """
    if all(len(tokens) == len(sizes) for tokens in drawn):
        together = torch.cat(list(drawn), dim=1)
        return [ids[:size] for ids, size in zip(together, sizes, strict=True)]
    index: list[int] = []
    for row, size in enumerate(sizes):
        own, begin = list[int](), 0
        for tokens in drawn:
            rows, width = tokens.shape
            if row < rows:
                own += range(begin + row * width, begin + (row + 1) * width)
            begin += rows * width
        index += own[:size]
    flat = torch.cat([tokens.flatten() for tokens in drawn])
    return flat[upload(index, flat.device)].split(list(sizes))


def draft_parents(choices: TreeChoices, size: int) -> tuple[int, ...] | None:
    """The parents of the first ``size`` nodes; None for a chain."""
    return None if choices.is_chain else choices.parents[:size]


def _sample(
    level: _StaticLevel, logits: Tensor, samplers: Mapping[int, SampledDraft], tokens: Tensor
) -> None:
    """Replace the tokens ``[rows, nodes]`` of sampled drafts by samples."""
    for row, sampler in samplers.items():
        if row < len(tokens):
            own = logits[row * level.width : (row + 1) * level.width]
            drawn = sampler.grow(own, level.above, range(level.begin, level.end))
            tokens[row] = upload(drawn, tokens.device)


class _StaticLevel:
    """The nodes of one depth.

    Attributes:
        begin, end: which nodes of the tree they are.
        above: nodes of the level above that have children; -1 for the root.
        width: how many those are.
        inner: nodes of this level that have children.
        seen: bool ``[inner, read]``, which of the nodes with children so far are visible to each of
            these; None: all.
    """

    def __init__(
        self, choices: TreeChoices, above: Sequence[int], nodes: range, read: list[int]
    ) -> None:
        parents, ranks = choices.parents, choices.ranks
        self.begin, self.end = nodes.start, nodes.stop
        self.above, self.width = above, len(above)
        inner = [node for node in nodes if node in set(parents)]
        self.nodes, self.inner = inner, len(inner)
        row_of = {node: row for row, node in enumerate(above)}
        self._rows = torch.tensor([row_of[parents[node]] for node in nodes])
        self._ranks = torch.tensor([ranks[node] for node in nodes])
        self._max_rank = max(ranks[node] for node in nodes)
        self._inner = torch.tensor([node - nodes.start for node in inner], dtype=torch.int64)
        self._inner_rows = self._rows[self._inner]
        self._is_single = len(nodes) == self.width == 1
        seen = ancestors(parents)[inner][:, read + inner]
        self.seen = None if bool(seen.all()) else seen

    def to(self, device: torch.device) -> _StaticLevel:
        """Its tensors on a device."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        return self

    def draw(self, logits: Tensor, ids: Tensor | None) -> Tensor:
        """logits ``[rows * width, D]`` -> int64 ``[rows, nodes]``, the target's ids."""
        if self._is_single and not self._max_rank:
            tokens = logits.argmax(-1, keepdim=True)  # a chain's level, without an index
        else:
            grouped = logits.view(-1, self.width, logits.shape[-1])
            tokens = tokens_of_ranks(grouped, self._rows, self._ranks, self._max_rank)
        return tokens if ids is None else ids[tokens]

    def grown(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of the nodes with children ``[rows * inner]``, and their parents' states.

        Args:
            tokens: ``[rows, nodes]``.
            states: ``[rows * width, hidden]``.
        """
        if self._is_single:
            return tokens.flatten(), states
        grouped = states.view(len(tokens), self.width, states.shape[-1])
        return tokens[:, self._inner].flatten(), grouped[:, self._inner_rows].flatten(0, 1)


def _levels(choices: TreeChoices, device: torch.device) -> list[_StaticLevel]:
    levels: list[_StaticLevel] = []
    above, read, begin = [-1], list[int](), 0
    for depth in range(1, choices.depth + 1):
        end = begin + sum(len(path) == depth for path in choices.paths)
        levels.append(_StaticLevel(choices, above, range(begin, end), read))
        above, begin = levels[-1].nodes, end
        read = read + above
    return [level.to(device) for level in levels]


class SampledDraft:
    """The draft of one request, sampled from a draft model's distribution under its own params.

    Siblings are sampled without replacement. A node's uniform sample is a function of the request's
    seed, the position and the node.

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
        left = dict(zip(above, probs, strict=True))
        for node in nodes[: max(0, self._size - nodes.start)]:
            parent = parents[node]
            row = probs[above.index(parent)]
            if not left[parent].any():
                self._void.add(node)
                left[parent] = row
            token = int(invert_cdf(left[parent][None], [self._uniform(node)]))
            self._tokens.append(token)
            self._probs.append(row)
            left[parent] = left[parent].clone()
            left[parent][token] = 0.0
        tokens = self._tokens[nodes.start :]
        return tokens + [0] * (len(nodes) - len(tokens))

    def draft(self) -> Draft:
        """What was sampled."""
        kind = DraftKind.IID if self._choices.is_chain else DraftKind.WITHOUT_REPLACEMENT
        tokens = [-1 if node in self._void else token for node, token in enumerate(self._tokens)]
        parents = draft_parents(self._choices, len(tokens))
        return Draft(tokens, parents, kind, torch.stack(self._probs))

    def _uniform(self, node: int) -> float:
        request = self._request
        position = len(request.tokens) + len(self._choices.paths[node]) - 1
        return uniform_at(request.seed, request.index, position, use=DRAFTING + (node << 8))

    def _next_probs(self, logits: Tensor, above: Sequence[int]) -> Tensor:
        """float32 [len(above), V]: what plain decoding with the draft model samples from."""
        request = self._request
        prompt = request.tokens[: request.prompt_length]
        output = list(request.tokens[request.prompt_length :])
        contexts = [
            TokenContext(request.params, prompt, [*output, *self._path(node)], frozenset())
            for node in above
        ]
        return logits_to_probs(logits, contexts)

    def _path(self, node: int) -> list[int]:
        """The tokens from the root to ``node``."""
        if node < 0:
            return []
        return [*self._path(self._choices.parents[node]), self._tokens[node]]
