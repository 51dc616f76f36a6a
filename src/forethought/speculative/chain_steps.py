"""Several greedy steps with drafts in one call: the drafts are chains.

A step drafts a chain behind the last known token of each row, computes both in one forward of the
target, and keeps the drafted tokens as far as they are the most probable ones, and the one behind::

    known    .. t            drafted  a b c        most probable  a b x ?
    step     a b x           the next step goes on from x

Each row goes on from its own position, until it has ended. What the engine does around a step is
paid once for all of them. :func:`decode_by_forwards` is the reference for other implementations:
one call of C++, and rounds on a GPU (``chain_rounds``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from torch import Tensor

from forethought.backends.cpu.chain_steps import (
    ChainCall,
    NativeChainRow,
    NativeDraftNetwork,
    StoredStates,
)
from forethought.backends.cpu.forward import NativeForward
from forethought.backends.cpu.network import NativeNetwork
from forethought.kv.storage import DraftKvCache, HiddenStateCache
from forethought.kv.table import PageTable, TableView
from forethought.model.attention.base import PagedPass
from forethought.model.batch import Batch, Row
from forethought.model.runner import ModelRunner
from forethought.model.sampling import NO_TOKEN, most_probable
from forethought.speculative.chain_rounds import ChainRounds, Round, RoundRow, can_begin, can_run
from forethought.speculative.draft_model import DraftModel
from forethought.speculative.draft_module import DraftModuleRunner, TokenRange
from forethought.speculative.drafter import (
    NO_DRAFT,
    Draft,
    Drafter,
    DraftRequest,
    ScheduledRequests,
    table_of,
)
from forethought.speculative.heads.native import NativeDraftModule
from forethought.speculative.tree import StaticTreeBuilder
from forethought.speculative.verify.accept import accept_points, num_until_end, result_of


class ChainSource(Protocol):
    """What a drafter offers whose drafts of greedy requests are chains of points."""

    @property
    def max_positions(self) -> float:
        """Known and drafted tokens of a sequence that it can read."""
        ...

    @property
    def learns_from_ends(self) -> bool:
        """Whether drafts depend on rows that have ended: then the first one ends the call."""
        ...

    @property
    def draft_caches(self) -> Sequence[DraftKvCache]:
        """Its caches over the target's pages."""
        ...

    def can_follow(self, request: DraftRequest) -> bool:
        """Whether what it reads of the target is stored up to the root of a request."""
        ...

    def draft(self, requests: list[DraftRequest]) -> None:
        """Set the drafts of requests, or leave them as they are."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TextChains:
    """Of a drafter that reads the tokens of requests and nothing else.

    Attributes:
        drafter: is asked in each step, and has no use for ``update``.
        learns_from_ends, max_positions, draft_caches: see :class:`ChainSource`.
    """

    drafter: Drafter
    learns_from_ends: bool = True
    max_positions: float = math.inf
    draft_caches: tuple[DraftKvCache, ...] = ()

    def can_follow(self, request: DraftRequest) -> bool:
        """Always."""
        return True

    def draft(self, requests: list[DraftRequest]) -> None:
        """See :class:`ChainSource`."""
        self.drafter.prepare_draft_tokens(ScheduledRequests(requests))


@dataclass(frozen=True, slots=True, eq=False)
class GreedyChains:
    """Of a drafter that takes the most probable tokens of a network.

    Attributes:
        runner: of the network.
        builder: of the drafts, chains.
        max_positions, learns_from_ends: see :class:`ChainSource`.
    """

    runner: DraftModuleRunner
    builder: StaticTreeBuilder
    max_positions: float = math.inf
    learns_from_ends: bool = False
    _rounds: dict[ModelRunner, ChainRounds] = field(default_factory=dict)
    """By the runner of the target, which is the same in all calls of an engine."""

    @property
    def draft_caches(self) -> Sequence[DraftKvCache]:
        """The target's hidden states, if they are read, and the network's keys and values."""
        return self.runner.draft_caches

    def can_follow(self, request: DraftRequest) -> bool:
        """See :class:`ChainSource`."""
        states = self.runner.hidden_states
        return states is None or states.covers(table_of(request), len(request.tokens) - 1)

    def draft(self, requests: list[DraftRequest]) -> None:
        """See :class:`ChainSource`."""
        self.builder.grow(self.runner, requests)

    def rounds(self, target: ModelRunner) -> ChainRounds:
        """With its graphs, which are kept; see ``chain_rounds.can_run``."""
        if target not in self._rounds:
            self._rounds[target] = ChainRounds(target, self.runner, self.builder)
        return self._rounds[target]


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
        draft_seconds: of the call, spent on drafts; 0 on a GPU, where they are not timed apart.
    """

    steps: list[list[ChainStep]]
    num_forwards: int
    draft_seconds: float


def can_decode_chains(
    runner: ModelRunner, chains: ChainSource, sizes: Sequence[tuple[int, int]]
) -> bool:
    """Whether one call is worth it: on a GPU, if the host need not wait for each draft.

    Args:
        runner: of the target.
        chains: what drafts.
        sizes: known tokens, and tokens to draft in a step, of each row.
    """
    return runner.lm.device.type == "cpu" or _can_decode_on_device(runner, chains, sizes)


def _can_decode_on_device(
    runner: ModelRunner, chains: ChainSource, sizes: Sequence[tuple[int, int]]
) -> bool:
    if not isinstance(chains, GreedyChains) or chains.learns_from_ends:
        return False
    drafting, builder = chains.runner, chains.builder
    return can_run(runner, drafting, builder, len(sizes)) and all(
        can_begin(drafting, builder, *size) for size in sizes
    )


def decode_chains(
    runner: ModelRunner, chains: ChainSource, rows: Sequence[ChainRow], num_steps: int
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
    native = _Native.of(runner, chains) if rows[0].draft_len else None
    if native is not None:
        return native.decode(rows, num_steps)
    sizes = [(len(row.request.tokens), row.draft_len) for row in rows]
    if rows[0].draft_len and _can_decode_on_device(runner, chains, sizes):
        assert isinstance(chains, GreedyChains)
        return decode_on_device(runner, chains, rows, num_steps)
    return decode_by_forwards(runner, chains, rows, num_steps)


@dataclass(frozen=True, slots=True)
class _Native:
    """Decodes in one call of C++."""

    runner: ModelRunner
    target: NativeForward
    chains: GreedyChains
    draft: NativeDraftNetwork

    @classmethod
    def of(cls, runner: ModelRunner, chains: ChainSource) -> _Native | None:
        """Where both target and draft network run there."""
        network = runner.lm.network
        if not isinstance(chains, GreedyChains) or not isinstance(network, NativeNetwork):
            return None
        drafting = chains.runner.network
        if not isinstance(drafting, DraftModel | NativeDraftModule) or drafting.native is None:
            return None
        return cls(runner, network.forward, chains, drafting.native)

    def decode(self, rows: Sequence[ChainRow], num_steps: int) -> DecodedChains:
        """See :func:`decode_chains`; some rows have drafts."""
        drafting, runner = [row.request for row in rows if row.draft_len], self.chains.runner
        decoded: list[DecodedChains] = runner.draft_behind(
            drafting,
            [0] * len(drafting),
            lambda states, known, _: [self._call(rows, states, known, num_steps)],
        )
        for row, steps in zip(rows, decoded[0].steps, strict=True):
            _mark(self.chains, row, steps)
        return decoded[0]

    def _call(
        self, rows: Sequence[ChainRow], states: Tensor, known: PagedPass, num_steps: int
    ) -> DecodedChains:
        lm, hidden_states = self.runner.lm, self.chains.runner.hidden_states
        self._replace_unknown(known)
        roots = Batch.build([_root(row) for row in rows])
        stored, entering = None, None
        if hidden_states is not None:
            stored = StoredStates(hidden_states.storage.keys[0], hidden_states.layer_ids)
            entering = states.float().contiguous()
        call = ChainCall(
            draft=self.draft,
            known=known,
            entering=entering,
            target=PagedPass(roots, self.runner.storage, lm.backend, lm.windows),
            rows=list(map(_native_row, rows)),
            stored=stored,
            seen_from=self.chains.runner.offset,
            stores_drafted=self.chains.builder.stores_drafted,
        )
        found, num_forwards, seconds = call.run(self.target, num_steps)
        steps = [[ChainStep(*each) for each in own] for own in found]
        return DecodedChains(steps, num_forwards, seconds)

    def _replace_unknown(self, known: PagedPass) -> None:
        batch, size = known.batch, self.draft.num_known
        if size < self.runner.lm.vocab_size:
            token_ids = batch.token_ids.where(batch.token_ids < size, 0)
            known.batch = replace(batch, token_ids=token_ids)


def _mark(chains: GreedyChains, row: ChainRow, steps: Sequence[ChainStep]) -> None:
    """Mark what is stored behind the root; what a plain step computes has no entry yet."""
    runner, stores_drafted = chains.runner, chains.builder.stores_drafted
    root = at = len(row.request.tokens) - 1
    stop = root
    for drafted, tokens in steps:
        if drafted:
            stop = at + (len(drafted) if stores_drafted else 1)
        else:
            stop = min(stop, at)
        at += len(tokens)
    if runner.hidden_states is not None:
        runner.hidden_states.mark(row.table, root, at)
    runner.mark([TokenRange((), row.table, root, max(root, stop))])


def _root(row: ChainRow) -> Row:
    start = len(row.request.tokens) - 1
    return Row([row.request.tokens[start]], start, row.table.prefix(start + 1))


def _native_row(row: ChainRow) -> NativeChainRow:
    return NativeChainRow(
        token=row.request.tokens[-1],
        position=len(row.request.tokens) - 1,
        table=row.table,
        draft_len=row.draft_len,
        num_left=row.num_left,
        ends=row.ends,
    )


def decode_on_device(
    runner: ModelRunner, chains: GreedyChains, rows: Sequence[ChainRow], num_steps: int
) -> DecodedChains:
    """All steps are queued, and their tokens are read at the end, up to the end of each row.

    Every step is made by all rows, also by those that have ended.
    """
    num_steps = min(num_steps, max(row.num_left for row in rows))
    rounds = chains.rounds(runner).run(
        [RoundRow(row.request, row.table, row.draft_len) for row in rows], num_steps
    )
    decoding = [_Decoding.of(row) for row in rows]
    for found in rounds:
        for each, own in zip(decoding, found, strict=True):
            each.accept_round(own)
    for each in decoding:
        _mark(chains, each.row, each.steps)
    return DecodedChains([each.steps for each in decoding], num_steps, 0.0)


def decode_by_forwards(
    runner: ModelRunner, chains: ChainSource, rows: Sequence[ChainRow], num_steps: int
) -> DecodedChains:
    """The reference implementation: each step is a draft and a forward, whose tokens are read."""
    draft_seconds, num_forwards = 0.0, 0
    readers = [cache for cache in chains.draft_caches if isinstance(cache, HiddenStateCache)]
    decoding = [_Decoding.of(row) for row in rows]
    while num_forwards < num_steps:
        going = [each for each in decoding if not each.has_ended]
        if not going or (chains.learns_from_ends and len(going) < len(decoding)):
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

    def accept_round(self, found: Round) -> None:
        """The same of a round, which knows of no ends, with its own draft."""
        if self.has_ended:
            return
        size = max(0, self.limit_draft())
        self.request.draft = Draft(found.drafted[:size])
        self.accept(found.decoded[: size + 1])

    def accept(self, drawn: Sequence[int]) -> None:
        """Append what is accepted of the draft; drawn: behind the root and each of its tokens."""
        draft = Draft(list(self.request.draft.tokens))
        path = accept_points(draft, drawn)
        result = result_of(draft, path, drawn)
        size = num_until_end(result.tokens, self.row.ends, self.num_left)
        self.has_ended = size is not None or drawn[len(path)] == NO_TOKEN
        if size is not None:
            result.truncate(size)
        tokens = result.tokens
        if tokens:
            self.steps.append(ChainStep(list(draft.tokens), tokens))
        self.tokens += tokens
        self.num_left -= len(tokens)


def _draft(chains: ChainSource, decoding: Sequence[_Decoding]) -> None:
    """Draft for all rows that may still have a draft; their slots get other tokens than before."""
    drafting = [each for each in decoding if each.limit_draft() > 0]
    for each in decoding:
        start = len(each.tokens) - 1
        for cache in chains.draft_caches:
            cache.invalidate(each.row.table, start, start + 1 + each.request.max_nodes)
    if drafting:
        chains.draft([each.request for each in drafting])
