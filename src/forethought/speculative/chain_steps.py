"""Several greedy steps with drafts in one call: the drafts are chains of a draft network.

A step drafts a chain behind the last known token of each row, computes both in one forward of the
target, and keeps the drafted tokens as far as they are the most probable ones, and the one behind::

    known    .. t            drafted  a b c        most probable  a b x ?
    step     a b x           the next step goes on from x

Each row goes on from its own position, until it has ended. What the engine does around a step is
paid once for all of them. :func:`decode_by_forwards` is the reference for other implementations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from forethought.kv.table import PageTable, TableView
from forethought.model.batch import Row
from forethought.model.runner import ModelRunner
from forethought.model.sampling import NO_TOKEN, most_probable
from forethought.speculative.draft_module import DraftModuleRunner
from forethought.speculative.drafter import NO_DRAFT, DraftRequest, table_of
from forethought.speculative.tree import StaticTreeBuilder


@dataclass(frozen=True, slots=True, eq=False)
class GreedyChains:
    """Of a drafter whose drafts of greedy requests are a network's most probable tokens, in chains.

    Attributes:
        runner: of the network.
        builder: of the drafts, chains.
        max_positions: known and drafted tokens of a sequence that the network can read.
    """

    runner: DraftModuleRunner
    builder: StaticTreeBuilder
    max_positions: float = math.inf

    def can_follow(self, request: DraftRequest) -> bool:
        """Whether what it reads of the target is stored up to the root of a request."""
        states = self.runner.hidden_states
        return states is None or states.covers(table_of(request), len(request.tokens) - 1)


@dataclass(slots=True, eq=False)
class ChainRow:
    """A sequence to decode with drafts.

    Attributes:
        request: the sequence as drafters see it, with its table. It is not changed.
        table: of the same, with slots for all that the steps may store: known tokens, and
            ``min(num_left, num_steps * (1 + draft_len)) - 1`` behind the last one.
        draft_len: tokens to draft in a step at most, less than ``num_left``; 0: it has no drafts.
        num_left: tokens to decode at most.
        ends: ids behind which no more are wanted.
    """

    request: DraftRequest
    table: PageTable
    draft_len: int
    num_left: int
    ends: Collection[int]


class ChainStep(NamedTuple):
    """What became of one step of a row."""

    drafted: list[int]
    tokens: list[int]
    """The accepted ones and the one behind; cut off behind one that ends the row. Where no token
    follows an accepted one, as its logits are not finite, that one is the last, and the row's
    last."""


@dataclass(frozen=True, slots=True)
class DecodedChains:
    """What has been decoded.

    Attributes:
        steps: of each row, none behind its end; none at all where the logits behind its last known
            token are not finite.
        num_forwards: of the target.
        draft_seconds: of the call, spent on drafts.
    """

    steps: list[list[ChainStep]]
    num_forwards: int
    draft_seconds: float


def can_decode_chains(runner: ModelRunner) -> bool:
    """Whether one call is worth it: on a GPU the host would wait for each draft."""
    return runner.lm.device.type == "cpu"


def decode_chains(
    runner: ModelRunner, chains: GreedyChains, rows: Sequence[ChainRow], num_steps: int
) -> DecodedChains:
    """Make up to ``num_steps`` steps with drafts, until each row has ended.

    What the draft network stores is marked as stored, as are the target's hidden states. All draft
    caches are invalid behind the known tokens but the last one of each row.

    Args:
        runner: of the target.
        chains: what drafts; it ``can_follow`` all rows that have drafts.
        rows: none has longer drafts than the one before it.
        num_steps: at most.
    """
    return decode_by_forwards(runner, chains, rows, num_steps)


def decode_by_forwards(
    runner: ModelRunner, chains: GreedyChains, rows: Sequence[ChainRow], num_steps: int
) -> DecodedChains:
    """The reference implementation: each step is a draft and a forward, whose tokens are read."""
    states, draft_seconds, num_forwards = chains.runner.hidden_states, 0.0, 0
    readers = [] if states is None else [states]
    decoding = [_Decoding.of(row) for row in rows]
    while num_forwards < num_steps:
        going = [each for each in decoding if not each.has_ended]
        if not going:
            break
        began = time.perf_counter()
        _draft(chains, going)
        draft_seconds += time.perf_counter() - began
        drawn = most_probable(runner.forward([each.pack() for each in going], readers))
        num_forwards += 1
        for each in going:
            size = 1 + len(each.request.draft)
            each.accept(drawn[:size])
            del drawn[:size]
    return DecodedChains([each.steps for each in decoding], num_forwards, draft_seconds)


@dataclass(slots=True, eq=False)
class _Decoding:
    """A row that is decoded, with a request of its own whose tokens grow."""

    row: ChainRow
    request: DraftRequest
    tokens: list[int]
    num_left: int
    has_ended: bool = False
    steps: list[ChainStep] = field(default_factory=list)

    @classmethod
    def of(cls, row: ChainRow) -> _Decoding:
        tokens = list(row.request.tokens)
        request = replace(row.request, tokens=tokens, table=TableView(row.table))
        return cls(row, request, tokens, row.num_left)

    def limit_draft(self) -> int:
        """Forget the draft; how long the next one may be."""
        request = self.request
        request.draft = NO_DRAFT
        request.max_draft_len = request.max_nodes = min(self.row.draft_len, self.num_left - 1)
        return request.max_nodes

    def pack(self) -> Row:
        """The last known token and the draft."""
        start, drafted = len(self.tokens) - 1, list(self.request.draft.tokens)
        table = self.row.table.prefix(start + 1 + len(drafted))
        return Row([self.tokens[-1], *drafted], start, table)

    def accept(self, drawn: Sequence[int]) -> None:
        """Append what is accepted of the draft; drawn: behind the root and each of its tokens."""
        drafted, tokens = list(self.request.draft.tokens), list[int]()
        for token, proposed in zip(drawn, [*drafted, None], strict=True):
            if token == NO_TOKEN:
                self.has_ended = True
                break
            tokens.append(token)
            if token in self.row.ends:
                self.has_ended = True
            if self.has_ended or token != proposed:
                break
        if tokens:
            self.steps.append(ChainStep(drafted, tokens))
        self.tokens += tokens
        self.num_left -= len(tokens)
        self.has_ended |= not self.num_left


def _draft(chains: GreedyChains, decoding: Sequence[_Decoding]) -> None:
    """Draft for all rows that may still have a draft; their slots get other tokens than before."""
    drafting = [each for each in decoding if each.limit_draft() > 0]
    for each in decoding:
        start = len(each.tokens) - 1
        for cache in chains.runner.draft_caches:
            cache.invalidate(each.row.table, start, start + 1 + each.request.max_nodes)
    if drafting:
        chains.builder.grow(chains.runner, [each.request for each in drafting])
