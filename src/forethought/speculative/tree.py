"""Static draft trees: the same tree of ranks in every step, of most probable or sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from forethought.config.tree import TreeChoices
from forethought.kv.staging import upload
from forethought.model import backends
from forethought.model.batch import Row, ancestors
from forethought.speculative.draft_module import DraftModuleRunner, ModuleOutput, TokenRange
from forethought.speculative.drafter import DeviceTokens, Draft, DraftKind, DraftRequest
from forethought.speculative.sampled_draft import SampledDrafts, sampled_kind


class TreeBuilder(Protocol):
    """Builds the drafts of a step with a draft module."""

    def nodes(self, depth: int) -> int:
        """KV slots after the root that a draft of ``depth`` levels needs."""
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


Advance = Callable[[int, Tensor, Tensor, Tensor | None], ModuleOutput]
"""Computes the nodes of a level that go on: ``DraftModuleRunner.advance`` without its root."""
Grow = Callable[[ModuleOutput, Advance], Tensor]
"""Drafts all levels from the outputs at the roots; the drafts of all rows."""


@dataclass(frozen=True, slots=True)
class ReadNodes:
    """The drafted nodes that the forwards of a draft read, numbered in order of their levels.

    Attributes:
        ends: how many there are down to each depth from 1 on; the last level is not read.
        parents: of each, -1 for the root. Where the tree is known on the device only, any parents
            of the right depths; None: a chain.
    """

    ends: tuple[int, ...]
    parents: tuple[int, ...] | None

    @classmethod
    def of_beams(cls, width: int, depth: int) -> ReadNodes:
        """Of a tree of ``depth`` levels, of which ``width`` nodes go on in each but the last."""
        parents = [width * (level - 2) if level > 1 else -1 for level in range(1, depth)]
        ends = tuple(width * level for level in range(1, depth))
        return cls(ends, tuple(parent for parent in parents for _ in range(width)))

    def num_new(self, depth: int) -> int:
        """How many are of ``depth``."""
        return self.ends[depth - 1] - (self.ends[depth - 2] if depth > 1 else 0)

    def count(self, depth: int) -> int:
        """How many nodes the forward after ``depth`` reads: the new ones are the last."""
        return self.num_new(depth) if self.parents is None else self.ends[depth - 1]

    def row(self, after: TokenRange, depth: int) -> Row:
        """The row of a request whose known tokens are ``after``; the graph writes its tokens."""
        size, stop = self.count(depth), after.stop + self.ends[depth - 1]
        parents = None if self.parents is None else self.parents[:size]
        first_logit = size - self.num_new(depth)
        return Row([0] * size, stop - size, after.table.prefix(stop), parents, first_logit)


class DraftGraphs(Protocol):
    """Drafts the chains and trees of one builder by graphs of a device."""

    def draft(
        self,
        requests: Sequence[DraftRequest],
        read: ReadNodes,
        num_deeper: Sequence[int],
        grow: Grow,
    ) -> Tensor | None:
        """Draft; what the module had not read is stored.

        Args:
            requests: B of them.
            read: the nodes that the forwards read.
            num_deeper: requests, the first ones, that have drafts deeper than 1, 2, ...: one number
                for each depth of ``read``.
            grow: captured; it depends on nothing but ``read`` and its arguments.

        Returns:
            The first B rows of what ``grow`` returns, overwritten by the next draft; a row has
            anything below its depth. None: there is no graph for these.
        """


class StaticTreeBuilder(TreeBuilder):
    """A static tree of ranks, or a chain, drafted level by level.

    Tokens stay on the device: each level's forward is queued behind the previous one. On a GPU the
    target verifies them before the host reads them; on a CPU, and where the distribution of a
    sampled draft depends on its tokens (``SampledDraft``), all drafts are read together.

    Args:
        choices: the tree.
        device: of the draft network.
        sampled: whether a request's tokens are sampled instead of chosen by rank; None: none's are.
        stores_drafted: store the entries of the drafted tokens of a chain, so that accepted ones
            are not computed again. Only for a network that reads no fed-back hidden states.

    Attributes:
        is_chain: whether the tree has no branches.
        depth: levels of the tree.
        stores_drafted: as given.
    """

    def __init__(
        self,
        choices: TreeChoices,
        device: torch.device,
        sampled: Callable[[DraftRequest], bool] | None = None,
        stores_drafted: bool = False,
    ) -> None:
        assert choices.is_chain or not stores_drafted
        self._choices, self._sampled, self.stores_drafted = choices, sampled, stores_drafted
        self.is_chain = choices.is_chain
        self._num_nodes, self.depth = choices.num_nodes, choices.depth
        self._levels, self._device = _levels(choices, device), device
        self._graphs: dict[DraftModuleRunner, DraftGraphs] = {}

    def nodes(self, depth: int) -> int:
        """Nodes of the tree down to ``depth``."""
        return self._num_nodes[min(depth, self.depth)]

    @override
    def grow(self, runner: DraftModuleRunner, requests: Sequence[DraftRequest]) -> None:
        """Short drafts take no part in the forwards of deeper levels."""
        requests = sorted(requests, key=self._size, reverse=True)
        sizes = list(map(self._size, requests))
        sampled = self._sampled_rows(requests)
        if self.is_chain and not sampled and runner.network.draft_chains is not None:
            drafts = runner.draft_chains(requests, sizes, self.stores_drafted)
            for request, tokens in zip(requests, drafts, strict=True):
                request.draft = Draft(tokens)
            return
        levels = self._levels_of(sizes[0])
        samplers = SampledDrafts(sampled, self._choices, sizes, self._device)
        drafted = None if sampled else self._draft_by_graph(runner, requests, sizes, levels)
        if drafted is not None:
            self._finish(requests, sizes, samplers, [drafted])
            return
        capacity = sum(level.inner for level in levels[:-1])
        root = (runner.read_known if self.stores_drafted else runner.begin)(requests, capacity)
        states, logits = root.output
        drawn: list[Tensor] = []
        for depth, level in enumerate(levels, start=1):
            tokens = level.draw(logits, runner.network.ids)
            samplers.grow(logits, level, tokens)
            drawn.append(tokens)
            if level is levels[-1]:
                break
            further = len(requests)
            if root.workspace.is_stored or not self.stores_drafted:  # at the end, all together
                further = sum(size > level.end for size in sizes)
                root.workspace.keep(further)
            token_ids, states = level.grown(tokens[:further], states[: further * level.width])
            mask = None if level.seen is None else level.seen.expand(further, -1, -1)
            states, logits = runner.advance(root, depth, token_ids, states, mask)
        if self.stores_drafted:
            runner.store(requests, root, [size - 1 for size in sizes])
        self._finish(requests, sizes, samplers, drawn)

    def draft_levels(
        self, ids: Tensor | None, size: int, output: ModuleOutput, advance: Advance
    ) -> Tensor:
        """Draft the levels of the first ``size`` nodes: the target's ids, int64 ``[B, nodes]``.

        Args:
            ids: of the network; see ``DraftNetwork``.
            size: nodes of the longest draft.
            output: at the roots of B rows.
            advance: computes the nodes of a level that go on.
        """
        drawn, levels = list[Tensor](), self._levels_of(size)
        for depth, level in enumerate(levels, start=1):
            drawn.append(level.draw(output.logits, ids))
            if level is not levels[-1]:
                output = advance(depth, *level.grown(drawn[-1], output.states), None)
        return torch.cat(drawn, dim=1)

    def _levels_of(self, size: int) -> list[_StaticLevel]:
        return [level for level in self._levels if level.begin < size]

    def _draft_by_graph(
        self,
        runner: DraftModuleRunner,
        requests: Sequence[DraftRequest],
        sizes: Sequence[int],
        levels: Sequence[_StaticLevel],
    ) -> Tensor | None:
        """The tokens of all drafts ``[B, nodes]``; None: there is no graph for them."""
        if runner.graphs is None:
            return None
        if runner not in self._graphs:
            self._graphs[runner] = backends.cuda().draft_graphs(runner)

        def grow(output: ModuleOutput, advance: Advance) -> Tensor:
            return self.draft_levels(runner.network.ids, sizes[0], output, advance)

        num_deeper = [sum(size > level.end for size in sizes) for level in levels[:-1]]
        drafted = self._graphs[runner].draft(requests, self._read_nodes(levels), num_deeper, grow)
        if drafted is not None and self.stores_drafted:
            runner.mark_drafted(requests, sizes)
        return drafted

    def _read_nodes(self, levels: Sequence[_StaticLevel]) -> ReadNodes:
        """The nodes with children, down to the last of some levels."""
        read = [node for level in levels[:-1] for node in level.nodes]
        number = {-1: -1, **{node: at for at, node in enumerate(read)}}
        parents = tuple(number[self._choices.parents[node]] for node in read)
        ends = tuple(accumulate(level.inner for level in levels[:-1]))
        return ReadNodes(ends, None if self._choices.is_chain else parents)

    def _sampled_rows(self, requests: Sequence[DraftRequest]) -> dict[int, DraftRequest]:
        if self._sampled is None:
            return {}
        return {row: request for row, request in enumerate(requests) if self._sampled(request)}

    def _size(self, request: DraftRequest) -> int:
        return min(self.nodes(request.max_draft_len), request.max_nodes)

    def _finish(
        self,
        requests: Sequence[DraftRequest],
        sizes: Sequence[int],
        samplers: SampledDrafts,
        drawn: Sequence[Tensor],
    ) -> None:
        tokens = _read(drawn, sizes) if samplers.alone else drafted_tokens(drawn, sizes)
        proposals = samplers.q()
        for row, (request, draft_tokens) in enumerate(zip(requests, tokens, strict=True)):
            if row in samplers.alone:
                request.draft = samplers.alone[row].draft()
                continue
            q, parents = proposals.get(row), self._choices.draft_parents(sizes[row])
            kind = DraftKind.POINT if q is None else sampled_kind(self._choices)
            request.draft = Draft(draft_tokens, parents, kind, q)


def drafted_tokens(drawn: Sequence[Tensor], sizes: Sequence[int]) -> Sequence[Sequence[int]]:
    """The tokens of each request's draft: on a GPU they stay there, else all are read at once.

    Arguments as of ``_by_request``.
    """
    if drawn[0].device.type == "cpu":
        return _read(drawn, sizes)
    return list(map(DeviceTokens, _by_request(drawn, sizes)))


def _read(drawn: Sequence[Tensor], sizes: Sequence[int]) -> list[list[int]]:
    """The tokens of each request's draft, on the host. Arguments as of ``_by_request``."""
    flat: list[int] = torch.cat([level.flatten() for level in drawn]).tolist()
    drafts: list[list[int]] = [[] for _ in sizes]
    begin = 0
    for tokens in drawn:
        rows, width = tokens.shape
        for row in range(rows):
            drafts[row] += flat[begin : begin + width]
            begin += width
    return [tokens[:size] for tokens, size in zip(drafts, sizes, strict=True)]


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
        nodes, begin = list[int](), 0
        for tokens in drawn:
            rows, width = tokens.shape
            if row < rows:
                nodes += range(begin + row * width, begin + (row + 1) * width)
            begin += rows * width
        index += nodes[:size]
    flat = torch.cat([tokens.flatten() for tokens in drawn])
    return flat[upload(index, flat.device)].split(list(sizes))


class _StaticLevel:
    """The nodes of one depth.

    Attributes:
        begin, end: which nodes of the tree they are.
        above: nodes of the level above that have children; -1 for the root.
        width: how many those are.
        inner: nodes of this level that have children.
        is_single, rows, rounds: see ``SampledLevel``.
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
        rows = [row_of[parents[node]] for node in nodes]
        self.rows, self.rounds = torch.tensor(rows), _rounds(rows)
        self._ranks = torch.tensor([ranks[node] for node in nodes])
        self._max_rank = max(ranks[node] for node in nodes)
        self._inner = torch.tensor([node - nodes.start for node in inner], dtype=torch.int64)
        self._inner_rows = self.rows[self._inner]
        self.is_single = len(nodes) == self.width == 1
        mask = ancestors(parents)[inner][:, read + inner]
        self.seen = None if bool(mask.all()) else mask

    def to(self, device: torch.device) -> _StaticLevel:
        """Its tensors on a device."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        self.rounds = [nodes.to(device) for nodes in self.rounds]
        return self

    def draw(self, logits: Tensor, ids: Tensor | None) -> Tensor:
        """logits ``[rows * width, D]`` -> int64 ``[rows, nodes]``, the target's ids."""
        if self.is_single and not self._max_rank:
            tokens = logits.argmax(-1, keepdim=True)  # a chain's level, without an index
        else:
            grouped = logits.view(-1, self.width, logits.shape[-1])
            tokens = tokens_of_ranks(grouped, self.rows, self._ranks, self._max_rank)
        return tokens if ids is None else ids[tokens]

    def grown(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of the nodes with children ``[rows * inner]``, and their parents' states.

        Args:
            tokens: ``[rows, nodes]``.
            states: ``[rows * width, hidden]``.
        """
        if self.is_single:
            return tokens.flatten(), states
        grouped = states.view(len(tokens), self.width, states.shape[-1])
        return tokens[:, self._inner].flatten(), grouped[:, self._inner_rows].flatten(0, 1)


def _rounds(rows: Sequence[int]) -> list[Tensor]:
    """The nodes that follow ``rows``: first children, then second ones, and so on."""
    rounds: list[list[int]] = []
    for node, row in enumerate(rows):
        rank = rows[:node].count(row)
        rounds += [[]] * (rank == len(rounds))
        rounds[rank] = [*rounds[rank], node]
    return list(map(torch.tensor, rounds))


def _levels(choices: TreeChoices, device: torch.device) -> list[_StaticLevel]:
    levels: list[_StaticLevel] = []
    above, read, begin = [-1], list[int](), 0
    for depth in range(1, choices.depth + 1):
        end = begin + sum(len(path) == depth for path in choices.paths)
        levels.append(_StaticLevel(choices, above, range(begin, end), read))
        above, begin = levels[-1].nodes, end
        read = read + above
    return [level.to(device) for level in levels]
