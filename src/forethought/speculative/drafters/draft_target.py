"""Speculative decoding with a draft model: a smaller model of the same vocabulary drafts.

Leviathan et al., 2023 (arXiv 2211.17192); Chen et al., 2023 (arXiv 2302.01318). The draft model has
a KV cache over the target's pages (``speculative.draft_module``), so that forks, prefix hits and
rewinds of the target are valid for both. Drafts are greedy or sampled chains, or static trees of
ranks, and are built level by level. For chains the entries of drafted tokens are stored, so that
accepted tokens are not computed again.
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
"""The ``use`` of the uniform samples that drafts are sampled with."""


class DraftTargetDrafter(Drafter):
    """Drafts with a model.

    Args:
        model: the draft model over a storage with as many pages as the target's.
        sampled: sample drafts of sampled requests from the draft model's distribution, under the
            request's own params, instead of taking the most probable token.
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
    """One request's draft, built level by level on the host.

    Args:
        request: to draft for.
        sampled: sample from the distribution instead of taking the most probable tokens.
        choices: the tree; None: a chain.
    """

    def __init__(self, request: DraftRequest, sampled: bool, choices: TreeChoices | None) -> None:
        self._request, self.sampled, self.choices = request, sampled, choices
        self._depth = 0
        self._tokens: list[int] = []
        self._probs: list[Tensor] = []
        self._paths = list(self._fitting())
        self._level_start = 0
        self._columns: list[int] = []  # of the nodes that are computed, among all of the request's
        self._width = 0
        self._void: set[int] = set()

    def _fitting(self) -> Iterator[tuple[int, ...]]:
        """The paths of the tree within the request's limits, parents first."""
        if self.choices is not None:
            fitting = [p for p in self.choices.paths if len(p) <= self._request.max_draft_len]
            yield from fitting[: self._request.max_nodes]

    @property
    def size(self) -> int:
        """Tokens so far."""
        return len(self._tokens)

    @property
    def complete(self) -> bool:
        """Whether no level is left to draft."""
        if self.choices is not None:
            return self.size >= len(self._paths)
        return self.size >= min(self._request.max_draft_len, self._request.max_nodes)

    @property
    def wanted(self) -> int:
        """Rows of logits that the next level needs: one per node of the last one, or the root's."""
        return max(1, len(self._tokens) - self._level_start)

    def grow(self, logits: Tensor) -> None:
        """Add the next level; ``logits`` float32 [wanted, V]: one row per node of the last one."""
        previous, self._level_start = self._level_start, len(self._tokens)
        self._depth += 1
        scores = self._next_probs(logits, previous) if self.sampled else logits
        if self.choices is None:
            self._add_children(scores[0], [()])
            return
        parents = self._paths[previous : self._level_start] if self._depth > 1 else [()]
        for row, parent in enumerate(parents):
            children = [p for p in self._paths if len(p) == self._depth and p[:-1] == parent]
            if children:
                self._add_children(scores[row], children)

    def _next_probs(self, logits: Tensor, previous: int) -> Tensor:
        """float32 [wanted, V]: the probs that plain decoding with the draft model samples from."""
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

    def _add_children(self, scores: Tensor, paths: list[tuple[int, ...]]) -> None:
        """Add the children of one node; ``scores`` [V]: its logits, or its probs if sampled."""
        if not self.sampled:
            ranks = [path[-1] if path else 0 for path in paths]
            best = scores.topk(min(max(ranks) + 1, len(scores))).indices.tolist()
            # A rank beyond the vocabulary repeats the last one; repeated siblings are left out.
            self._tokens += [best[min(rank, len(best) - 1)] for rank in ranks]
            return
        left = scores
        position = len(self._request.tokens) + self._depth - 1
        for _ in paths:
            node = len(self._tokens)
            uniform = uniform_at(
                self._request.seed, self._request.index, position, use=DRAFTING + (node << 8)
            )
            if not left.any():  # every token of nonzero probability is an earlier sibling
                self._void.add(node)
                left = scores
            token = int(invert_cdf(left[None], [uniform]))
            self._tokens.append(token)
            self._probs.append(scores)
            left = left.clone()
            left[token] = 0.0

    def level(self, size: int) -> list[int]:
        """The tokens of the last level, which are computed next, padded to ``size``."""
        nodes = [] if self.complete else self._tokens[self._level_start :]
        if nodes:
            self._columns += range(self._width, self._width + len(nodes))
        self._width += size
        return nodes + [0] * (size - len(nodes))

    def seen(self, size: int) -> list[list[bool]]:
        """For each token of ``level``, which tokens of all levels so far are visible to it."""
        parents, rows = self._parents(), list[list[bool]]()
        for index in range(size):
            row = [False] * self._width
            row[self._width - size + index] = True
            node = self._level_start + index
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
            q = torch.stack(self._probs)
        tokens = [-1 if node in self._void else token for node, token in enumerate(self._tokens)]
        self._request.draft = Draft(tokens, self._parents(), kind, q)
