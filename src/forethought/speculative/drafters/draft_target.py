"""A smaller model with the same vocabulary drafts: speculative decoding as first published.

Leviathan et al., 2023 (arXiv 2211.17192); Chen et al., 2023 (arXiv 2302.01318). The draft model's
keys and values are further layers over the target's pages, so that forks, prefix hits and rewinds
of the target serve both; what the draft model has not seen yet it catches up on, over all requests
in one forward. Drafts are chains, or static trees of ranks whose levels are computed one by one.
Knows nothing about acceptance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from forethought.decoding import DraftTargetDecodingConfig
from forethought.kv.companion import Companion
from forethought.model.batch import Row
from forethought.model.sampling import TokenContext, coin, logits_to_probs, pick
from forethought.speculative.draft import Draft, DraftKind
from forethought.speculative.draft_model import DraftModel, Past
from forethought.speculative.drafter import (
    Drafter,
    DraftRequest,
    ResourceManager,
    ScheduledRequests,
)
from forethought.speculative.table import Target
from forethought.speculative.tree import TreeChoices

DRAFTING = 1
"""The ``use`` of the coins that drafts are drawn with."""


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
        self._model, self._companion = model, Companion(model.runner.storage)
        self._sampled, self._choices = sampled, choices

    @classmethod
    def build(cls, config: DraftTargetDecodingConfig, target: Target) -> DraftTargetDrafter:
        """Load the draft model. See ``speculative.table``.

        Raises:
            ModelError: it cannot be loaded.
            ParameterError: its vocabulary is not the target's.
        """
        assert config.speculative_model is not None
        return cls(
            DraftModel.load(config.speculative_model, target),
            sampled=config.draft_sampling == "sampled",
            choices=TreeChoices.parse(config.draft_choices) if config.draft_choices else None,
        )

    @property
    def companions(self) -> Sequence[Companion]:
        """The draft model's keys and values."""
        return (self._companion,)

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
        growths = [self._growth(request) for request in requests]
        logits = self._catch_up(requests)
        while growths:
            logits = self._advance(growths, logits)

    def _growth(self, request: DraftRequest) -> Growth:
        sampled = self._sampled and not request.params.greedy
        return Growth(request, sampled, self._choices)

    def _catch_up(self, requests: list[DraftRequest]) -> Tensor:
        """float32 ``[len(requests), V]``: the logits behind each root."""
        pasts: list[Past] = []
        for request in requests:
            assert request.table is not None
            start = self._companion.ready_length(request.table, len(request.tokens) - 1)
            pasts.append(Past(request.tokens, start, request.table))
        logits = self._model.compute(pasts)
        for past in pasts:
            self._companion.mark(past.table, past.start, len(past.tokens))
        return logits

    def _advance(self, growths: list[Growth], logits: Tensor) -> Tensor:
        """Grow one level of each draft; compute it where another one follows.

        Drafts that are complete leave ``growths``.
        """
        begin = 0
        points = [growth.wanted for growth in growths]
        likeliest: list[int] | None = None
        if not any(growth.sampled or growth.choices for growth in growths):
            likeliest = logits.argmax(dim=-1).tolist()  # one transfer for all chains
        for growth, count in zip(growths, points, strict=True):
            if likeliest is not None:
                growth.append(likeliest[begin])
            else:
                growth.grow(logits[begin : begin + count])
            begin += count
        for growth in growths:
            if growth.complete:
                growth.finish()
        growths[:] = [growth for growth in growths if not growth.complete]
        return self._forward([growth.row() for growth in growths]) if growths else logits

    def _forward(self, rows: list[Row]) -> Tensor:
        logits = self._model.forward(rows)
        for row in rows:
            self._companion.mark(row.table, row.start, row.table.length)
        return logits


class Growth:
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
        self._laws: list[Tensor] = []
        self._paths = list(self._fitting())
        self._level_start = 0
        self._void: set[int] = set()

    def _fitting(self) -> Iterator[tuple[int, ...]]:
        """The paths of the tree within the request's depth and nodes, parents first."""
        if self.choices is not None:
            fitting = [p for p in self.choices.paths if len(p) <= self._request.max_draft_len]
            yield from fitting[: self._request.max_nodes]

    @property
    def complete(self) -> bool:
        """Whether no level is left to draw."""
        size = len(self._tokens)
        if self.choices is not None:
            return size >= len(self._paths)
        return size >= min(self._request.max_draft_len, self._request.max_nodes)

    @property
    def wanted(self) -> int:
        """Rows of logits that the next level grows from: the nodes of the last one, or the root."""
        return max(1, len(self._tokens) - self._level_start)

    def append(self, token: int) -> None:
        """The next token of a chain of points."""
        self._level_start = len(self._tokens)
        self._tokens.append(token)
        self._depth += 1

    def grow(self, logits: Tensor) -> None:
        """Draw the next level from ``logits`` [wanted, V] float32, one row per node of the last."""
        previous, self._level_start = self._level_start, len(self._tokens)
        self._depth += 1
        laws = self._law(logits, previous) if self.sampled else logits
        if self.choices is None:
            self._draw_children(laws[0], [()])
            return
        parents = self._paths[previous : self._level_start] if self._depth > 1 else [()]
        for place, parent in enumerate(parents):
            children = [p for p in self._paths if len(p) == self._depth and p[:-1] == parent]
            if children:
                self._draw_children(laws[place], children)

    def _law(self, logits: Tensor, previous: int) -> Tensor:
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

    def _draw_children(self, law: Tensor, paths: list[tuple[int, ...]]) -> None:
        """Draw the children of one node; ``law`` [V] are logits, or probabilities if sampled."""
        if not self.sampled:
            ranks = [path[-1] if path else 0 for path in paths]
            best = law.topk(min(max(ranks) + 1, len(law))).indices.tolist()
            # A rank beyond the vocabulary repeats the last one; repeated siblings are left out.
            self._tokens += [best[min(rank, len(best) - 1)] for rank in ranks]
            return
        left = law
        position = len(self._request.tokens) + self._depth - 1
        for _ in paths:
            place = len(self._tokens)
            toss = coin(
                self._request.seed, self._request.index, position, use=DRAFTING + (place << 8)
            )
            if not left.any():  # every token of mass is a sibling already: this node is none
                self._void.add(place)
                left = law
            token = int(pick(left[None], [toss]))
            self._tokens.append(token)
            self._laws.append(law)
            left = left.clone()
            left[token] = 0.0

    def row(self) -> Row:
        """The nodes so far, to be computed: their logits are wanted from the last level on.

        Of a chain only the last token is new. Levels of a tree are computed together again, as the
        tokens of one row see only each other and the past; up to 16 rows cost what one costs.
        """
        table, length = self._request.table, len(self._request.tokens)
        assert table is not None
        size = len(self._tokens)
        if self.choices is None:
            return Row([self._tokens[-1]], length + size - 1, table.window(length + size))
        return Row(
            list(self._tokens),
            length,
            table.window(length + size),
            self._parents(),
            self._level_start,
        )

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
            q = torch.stack(self._laws)
        tokens = [-1 if node in self._void else token for node, token in enumerate(self._tokens)]
        self._request.draft = Draft(tokens, self._parents(), kind, q)
