"""Sources of chains: drafts of greedy requests that follow each other within one call of
``StepRunner.advance``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from typing_extensions import override

from forethought.kv.storage import DraftKvCache
from forethought.kv.table import PageTable
from forethought.speculative.draft_module import DraftModuleRunner, TokenRange
from forethought.speculative.drafter import (
    ChainSource,
    Drafter,
    DraftRequest,
    ScheduledRequests,
    table_of,
)
from forethought.speculative.tree import StaticTreeBuilder
from forethought.speculative.verify.accept import VerificationResult

if TYPE_CHECKING:
    from forethought.model.runner import ModelRunner


@dataclass(frozen=True, slots=True, eq=False)
class TextChains(ChainSource):
    """Chains of a drafter that reads only the tokens of requests.

    Attributes:
        drafter: is called in each step; its ``update`` does nothing.
        learns_from_ends, max_positions, draft_caches: see :class:`ChainSource`.
    """

    drafter: Drafter
    learns_from_ends: bool = True
    max_positions: float = math.inf
    draft_caches: tuple[DraftKvCache, ...] = ()

    def can_follow(self, request: DraftRequest) -> bool:
        """Always."""
        return True

    @override
    def draft(self, requests: list[DraftRequest]) -> None:
        self.drafter.prepare_draft_tokens(ScheduledRequests(requests))


@dataclass(frozen=True, slots=True, eq=False)
class GreedyChains(ChainSource):
    """Chains of the most probable tokens of a network.

    Attributes:
        runner: of the network.
        builder: of the drafts, chains.
        max_positions, learns_from_ends: see :class:`ChainSource`.
        step_runners: their state between calls, by the runner of the target, which is the same in
            all calls of an engine.
    """

    runner: DraftModuleRunner
    builder: StaticTreeBuilder
    max_positions: float = math.inf
    learns_from_ends: bool = False
    step_runners: dict[ModelRunner, object] = field(default_factory=dict)

    @property
    def draft_caches(self) -> Sequence[DraftKvCache]:
        """The target's hidden states, if they are read, and the network's keys and values."""
        return self.runner.draft_caches

    @override
    def can_follow(self, request: DraftRequest) -> bool:
        states = self.runner.hidden_states
        return states is None or states.covers(table_of(request), len(request.tokens) - 1)

    @override
    def draft(self, requests: list[DraftRequest]) -> None:
        self.builder.grow(self.runner, requests)

    def mark(self, root: int, table: PageTable, results: Sequence[VerificationResult]) -> None:
        """Mark what steps have stored after the root; what a plain one computes has no entry yet.

        Args:
            root: position of the last token that was known before them.
            table: of the row.
            results: of the steps.
        """
        stop = position = root
        for result in results:
            if num_drafted := len(result.draft):
                stop = position + (num_drafted if self.builder.stores_drafted else 1)
            else:
                stop = min(stop, position)
            position += len(result.tokens)
        if self.runner.hidden_states is not None:
            self.runner.hidden_states.mark(table, root, position)
        self.runner.mark([TokenRange((), table, root, max(root, stop))])
