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

import torch
from torch import Tensor

from forethought.config.drafters import DraftTargetDecodingConfig
from forethought.kv.draft_cache import DraftKvCache
from forethought.model.sampling import TokenContext, invert_cdf, logits_to_probs, uniform_at
from forethought.speculative.draft import Draft, DraftKind
from forethought.speculative.draft_model import DraftModel
from forethought.speculative.draft_module import DraftModuleRunner
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
        cache, backend = DraftKvCache(model.runner.storage), model.runner.lm.backend
        self._model = model
        self._runner = DraftModuleRunner(model, cache, None, backend, model.max_num_tokens, 0)
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
        return self._runner.draft_caches

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

    def _chains(self, requests: list[DraftRequest]) -> None:
        """Greedy chains; tokens stay on the device until the drafts are complete."""
        depths = [min(request.max_draft_len, request.max_nodes) for request in requests]
        root = self._runner.read_known(requests, max(depths) - 1)
        output = root.output
        levels = [output.logits.argmax(dim=-1)]
        for depth in range(1, max(depths)):
            output = self._runner.advance(root, depth, levels[-1], output.states)
            levels.append(output.logits.argmax(dim=-1))
        self._runner.store(requests, root, [depth - 1 for depth in depths])
        drafted = torch.stack(levels, 1).tolist()  # one transfer for all
        for request, tokens, depth in zip(requests, drafted, depths, strict=True):
            request.draft = Draft(tokens[:depth])

    def _levels(self, requests: list[DraftRequest]) -> None:
        """Trees, and chains of which some are sampled: drawn level by level on the host.

        All levels are padded to the widest; the padding is masked.
        """
        drafts = [
            DraftInProgress(request, self._is_sampled(request), self._choices)
            for request in requests
        ]
        capacity = self.nodes(max(request.max_draft_len for request in requests))
        root = self._runner.read_known(requests, capacity)
        output, size = root.output, 1
        for depth in itertools.count(1):
            for index, draft in enumerate(drafts):
                if not draft.complete:
                    draft.grow(output.logits[index * size : index * size + draft.wanted])
            if all(draft.complete for draft in drafts):
                break
            size = max(draft.wanted for draft in drafts)
            tokens = [token for draft in drafts for token in draft.level(size)]
            visible, device = None, output.logits.device
            if self._choices is not None:
                visible = torch.tensor([draft.seen(size) for draft in drafts], device=device)
            output = self._runner.advance(
                root, depth, torch.tensor(tokens, device=device), output.states, visible
            )
        for draft in drafts:
            draft.finish()
        tree = self._choices is not None
        self._runner.store(requests, root, [0 if tree else draft.size - 1 for draft in drafts])


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
