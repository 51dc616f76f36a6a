"""A smaller model with the same vocabulary drafts: speculative decoding as first published.

Leviathan et al., 2023 (arXiv 2211.17192); Chen et al., 2023 (arXiv 2302.01318). The draft model's
keys and values are further layers over the target's pages, so that forks, prefix hits and rewinds
of the target serve both; what the draft model has not seen yet it catches up on, over all requests
in one forward. Drafts are chains, or static trees of ranks; they grow level by level on strands. Of
chains what was computed is stored, so that what is accepted need not be computed again. Knows
nothing about acceptance.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forethought.config.drafters import DraftTargetDecodingConfig
from forethought.kv.draft_cache import DraftKvCache
from forethought.kv.table import ReadableTable
from forethought.model.attention.workspace import KvWorkspace, catch_up_start
from forethought.model.sampling import TokenContext, invert_cdf, logits_to_probs, uniform_at
from forethought.speculative.draft import Draft, DraftKind
from forethought.speculative.draft_model import DraftModel, Past
from forethought.speculative.drafter import (
    Drafter,
    DraftRequest,
    ResourceManager,
    ScheduledRequests,
)
from forethought.speculative.registry import Target
from forethought.speculative.tree import TreeChoices

DRAFTING = 1
"""The ``use`` of the coins that drafts are drawn with."""


class _Roots(NamedTuple):
    """B drafts at their roots."""

    workspace: KvWorkspace
    """Known tokens are the first behind the pasts."""
    known: int
    """How many of each."""
    logits: Tensor
    """float32 [B, V], behind the roots."""


class DraftTargetDrafter(Drafter):
    """Drafts with a model.

    Args:
        model: the draft model over a storage with as many pages as the target's.
        sampled: draw drafts of sampled requests from the draft model's law, under the request's own
            params, instead of taking the likeliest token.
        choices: a tree instead of a chain.
    """

    def __init__(
        self, model: DraftModel, *, sampled: bool = False, choices: TreeChoices | None = None
    ) -> None:
        self._model, self._draft_cache = model, DraftKvCache(model.runner.storage)
        self._sampled, self._choices = sampled, choices

    @classmethod
    def build(cls, config: DraftTargetDecodingConfig, target: Target) -> DraftTargetDrafter:
        """Load the draft model.

        Raises:
            ModelError: it cannot be loaded.
            ParameterError: its vocabulary is not the target's, or a rank is beyond it.
        """
        assert config.speculative_model is not None
        choices = None
        if config.draft_choices:
            choices = TreeChoices.parse(config.draft_choices)
            choices.expect_ranks_below(target.runner.lm.vocab_size, "draft_choices")
        return cls(
            DraftModel.load(config.speculative_model, target),
            sampled=config.draft_sampling == "sampled",
            choices=choices,
        )

    @property
    def draft_caches(self) -> Sequence[DraftKvCache]:
        """The draft model's keys and values."""
        return (self._draft_cache,)

    def nodes(self, depth: int) -> int:
        """Nodes of the tree down to ``depth``."""
        if self._choices is None:
            return depth
        return sum(len(path) <= depth for path in self._choices.paths)

    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        """See :class:`Drafter`."""
        longest = self._model.max_positions
        requests = [
            request
            for request in scheduled_requests.generation_requests
            if len(request.tokens) + request.max_draft_len <= longest
        ]
        if not requests:
            return
        if self._choices is None and not any(map(self._is_sampled, requests)):
            self._chains(requests)
        else:
            self._levels(requests)

    def _is_sampled(self, request: DraftRequest) -> bool:
        return self._sampled and not request.params.greedy

    def _begin(self, requests: list[DraftRequest], room: int) -> _Roots:
        """Compute what the draft model has not seen yet, the root at least.

        Args:
            requests: B of them.
            room: most tokens of each to be put behind the roots.
        """
        tables = [_table(request) for request in requests]
        texts = [request.tokens for request in requests]
        starts = [
            self._draft_cache.ready_length(table, len(text) - 1)
            for table, text in zip(tables, texts, strict=True)
        ]
        alike = catch_up_start(starts, list(map(len, texts)), first=1)
        if alike is not None:
            parts = [text[start:] for text, start in zip(texts, alike, strict=True)]
            known = len(parts[0])
            workspace = self._model.workspace(tables, alike, known + room)
            return _Roots(workspace, known, self._model.read(workspace, parts, alike))
        pasts = [Past(*past) for past in zip(texts, starts, tables, strict=True)]
        logits = self._model.compute(pasts)
        for table, start, text in zip(tables, starts, texts, strict=True):
            self._draft_cache.mark(table, start, len(text))
        return _Roots(self._model.workspace(tables, list(map(len, texts)), room), 0, logits)

    def _keep(self, requests: list[DraftRequest], begun: _Roots, drafted: Sequence[int]) -> None:
        """Store what was computed: known tokens, and so many drafted ones of each request."""
        workspace, known, _ = begun
        counts = [known + count for count in drafted]
        if not any(counts):
            return
        workspace.store(counts)
        for request, count in zip(requests, counts, strict=True):
            start = len(request.tokens) - known
            self._draft_cache.mark(_table(request), start, start + count)

    def _chains(self, requests: list[DraftRequest]) -> None:
        """The likeliest tokens; they stay on the device until the drafts are complete."""
        depths = [min(request.max_draft_len, request.max_nodes) for request in requests]
        workspace, _, logits = begun = self._begin(requests, max(depths) - 1)
        positions = self._positions(requests)
        levels = [logits.argmax(dim=-1)]
        for depth in range(max(depths) - 1):
            step = workspace.chain(levels[-1], self._within(positions + depth))
            levels.append(self._model.advance(step).argmax(dim=-1))
        self._keep(requests, begun, [depth - 1 for depth in depths])
        drafted = torch.stack(levels, 1).tolist()  # one transfer for all
        for request, tokens, depth in zip(requests, drafted, depths, strict=True):
            request.draft = Draft(tokens[:depth])

    def _levels(self, requests: list[DraftRequest]) -> None:
        """Trees, and chains of which some are sampled: drawn level by level on the host.

        All levels are as wide as the widest; what fills the others up is seen by nobody.
        """
        growths = [
            DraftInProgress(request, self._is_sampled(request), self._choices)
            for request in requests
        ]
        room = self.nodes(max(request.max_draft_len for request in requests))
        workspace, known, logits = begun = self._begin(requests, room)
        positions, size = self._positions(requests), 1
        for depth in itertools.count():
            for place, growth in enumerate(growths):
                if not growth.complete:
                    growth.grow(logits[place * size : place * size + growth.wanted])
            if all(growth.complete for growth in growths):
                break
            size = max(growth.wanted for growth in growths)
            tokens = [token for growth in growths for token in growth.level(size)]
            seen = None
            if self._choices is not None:
                seen = torch.tensor([growth.seen(size) for growth in growths])
                seen = seen.to(logits.device)
            step = workspace.level(
                torch.tensor(tokens, device=logits.device),
                self._within(positions + depth).repeat_interleave(size),
                known + depth,
                seen,
            )
            logits = self._model.advance(step)
        for growth in growths:
            growth.finish()
        tree = self._choices is not None
        self._keep(requests, begun, [0 if tree else growth.size - 1 for growth in growths])

    def _positions(self, requests: list[DraftRequest]) -> Tensor:
        """int64 ``[B]``: those behind the roots."""
        lengths = [len(request.tokens) for request in requests]
        return torch.tensor(lengths, device=self._draft_cache.storage.device)

    def _within(self, positions: Tensor) -> Tensor:
        """A short draft may be carried along with a longer one, beyond where it could be used."""
        return positions.clamp(max=self._model.max_positions - 1)


def _table(request: DraftRequest) -> ReadableTable:
    assert request.table is not None
    return request.table


class DraftInProgress:
    """One request's draft while it grows, level by level.

    Args:
        request: whose.
        sampled: draw from the law instead of taking the likeliest.
        choices: the tree; None: a chain.
    """

    def __init__(self, request: DraftRequest, sampled: bool, choices: TreeChoices | None) -> None:
        self._request, self.sampled, self.choices = request, sampled, choices
        self._depth = 0
        self._tokens: list[int] = []
        self._distributions: list[Tensor] = []
        self._paths = list(self._fitting())
        self._level_start = 0
        self._columns: list[int] = []  # of the nodes that are computed, among all of the request's
        self._width = 0
        self._void: set[int] = set()

    def _fitting(self) -> Iterator[tuple[int, ...]]:
        """The paths of the tree within the request's depth and nodes, parents first."""
        if self.choices is not None:
            fitting = [p for p in self.choices.paths if len(p) <= self._request.max_draft_len]
            yield from fitting[: self._request.max_nodes]

    @property
    def size(self) -> int:
        """Tokens so far."""
        return len(self._tokens)

    @property
    def complete(self) -> bool:
        """Whether no level is left to draw."""
        if self.choices is not None:
            return self.size >= len(self._paths)
        return self.size >= min(self._request.max_draft_len, self._request.max_nodes)

    @property
    def wanted(self) -> int:
        """Rows of logits that the next level grows from: the nodes of the last one, or the root."""
        return max(1, len(self._tokens) - self._level_start)

    def grow(self, logits: Tensor) -> None:
        """Draw the next level from ``logits`` [wanted, V] float32, one row per node of the last."""
        previous, self._level_start = self._level_start, len(self._tokens)
        self._depth += 1
        distributions = self._distribution(logits, previous) if self.sampled else logits
        if self.choices is None:
            self._draw_children(distributions[0], [()])
            return
        parents = self._paths[previous : self._level_start] if self._depth > 1 else [()]
        for place, parent in enumerate(parents):
            children = [p for p in self._paths if len(p) == self._depth and p[:-1] == parent]
            if children:
                self._draw_children(distributions[place], children)

    def _distribution(self, logits: Tensor, previous: int) -> Tensor:
        """[wanted, V] float32: what plain decoding of the draft model would draw from."""
        request = self._request
        prompt = request.tokens[: request.prompt_length]
        output = list(request.tokens[request.prompt_length :])
        nodes = range(previous, self._level_start) if self._depth > 1 else [-1]
        contexts = [
            TokenContext(request.params, prompt, [*output, *self._path(node)], frozenset())
            for node in nodes
        ]
        return logits_to_probs(logits, contexts)

    def _path(self, node: int) -> list[int]:
        """The tokens from the root to ``node``."""
        path: list[int] = []
        parents = self._parents()
        while node >= 0:
            path.append(self._tokens[node])
            node = node - 1 if parents is None else parents[node]
        return path[::-1]

    def _draw_children(self, distribution: Tensor, paths: list[tuple[int, ...]]) -> None:
        """Draw the children of one node; ``distribution`` [V]: logits, or probs if sampled."""
        if not self.sampled:
            ranks = [path[-1] if path else 0 for path in paths]
            best = distribution.topk(min(max(ranks) + 1, len(distribution))).indices.tolist()
            # A rank beyond the vocabulary repeats the last one; repeated siblings are left out.
            self._tokens += [best[min(rank, len(best) - 1)] for rank in ranks]
            return
        left = distribution
        position = len(self._request.tokens) + self._depth - 1
        for _ in paths:
            place = len(self._tokens)
            toss = uniform_at(
                self._request.seed, self._request.index, position, use=DRAFTING + (place << 8)
            )
            if not left.any():  # every token of mass is a sibling already: this node is none
                self._void.add(place)
                left = distribution
            token = int(invert_cdf(left[None], [toss]))
            self._tokens.append(token)
            self._distributions.append(distribution)
            left = left.clone()
            left[token] = 0.0

    def level(self, size: int) -> list[int]:
        """The tokens of the last level, filled up to ``size``, which are computed next."""
        nodes = [] if self.complete else self._tokens[self._level_start :]
        if nodes:
            self._columns += range(self._width, self._width + len(nodes))
        self._width += size
        return nodes + [0] * (size - len(nodes))

    def seen(self, size: int) -> list[list[bool]]:
        """For each token of ``level``, which of all levels so far it sees, itself included."""
        parents, rows = self._parents(), list[list[bool]]()
        for place in range(size):
            row = [False] * self._width
            row[self._width - size + place] = True
            node = self._level_start + place
            while parents is not None and node in range(len(self._columns)):
                row[self._columns[node]] = True
                node = parents[node]
            rows.append(row)
        return rows

    def _parents(self) -> tuple[int, ...] | None:
        if self.choices is None:
            return None
        places = {path: place for place, path in enumerate(self._paths)}
        kept = self._paths[: len(self._tokens)]
        return tuple(places.get(path[:-1], -1) for path in kept)

    def finish(self) -> None:
        """Hand the draft to its request."""
        kind, q = DraftKind.POINT, None
        if self.sampled:
            kind = DraftKind.IID if self.choices is None else DraftKind.WITHOUT_REPLACEMENT
            q = torch.stack(self._distributions)
        tokens = [-1 if node in self._void else token for node, token in enumerate(self._tokens)]
        self._request.draft = Draft(tokens, self._parents(), kind, q)
