"""Several steps in one call: ``StepRunner.advance``.

A step drafts a chain after the last known token of each row, or nothing, computes both in one
forward of the target, and keeps the drafted tokens up to the first that is not the target's own,
and that one in its place::

    known    .. t            drafted  a b c        the target's  a b x ?
    step     a b x           the next step goes on from x

The target's own token is the most probable one, or the one that it samples at that position.

Plain decoding is the case without drafts; the first step of a row may then compute several known
tokens. Each row goes on from its own position until it has
ended; what the engine does around a step is paid once for all of them. ``SingleSteps`` is the
reference implementation, a loop of single steps. The others make all steps in one call of C++
(``backends.cpu.native_steps``), or queue them on a GPU and wait once: ``QueuedSteps``, and with
drafts ``backends.cuda.chain_rounds``.
"""

from __future__ import annotations

import ctypes
import logging
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, islice
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from forethought.config.sampling import SamplingParams
from forethought.kv.table import PageTable, TableView
from forethought.model.batch import Row
from forethought.model.hidden_states import HiddenStateCache
from forethought.model.runner import ModelRunner
from forethought.model.sampling.distribution import TokenContext
from forethought.model.sampling.sampler import NO_TOKEN, mark_not_finite
from forethought.model.token_adapters import PlacedAdapter
from forethought.speculative.drafter import NO_DRAFT, ChainSource, Draft, DraftRequest
from forethought.speculative.verify.accept import (
    VerificationResult,
    accept_points,
    num_until_end,
    result_of,
    verify_argmax,
)
from forethought.speculative.verify.verify import SampledToken, VerificationRequest, verify

log = logging.getLogger(__name__)

GREEDY_TOKEN = SampledToken(
    TokenContext(SamplingParams(temperature=0.0), (), (), frozenset()), 0, 0, is_stateful=False
)
"""Of a row whose tokens are the most probable ones."""


@dataclass(slots=True, eq=False)
class DecodeRow:
    """A sequence to advance.

    Attributes:
        request: the sequence as drafters see it, with its table. It is not changed.
        table: of the same, with slots for all that the steps may store: known tokens, and
            ``min(num_left, num_steps * (1 + draft_len)) - 1`` after the last one.
        draft_len: tokens to draft in a step at most, less than ``num_left``; 0: it has no drafts.
        num_left: tokens to decode at most, at least one.
        ends: tokens that end the generation.
        pauses: int64 ids in rising order; the row waits after the step that decodes one.
        sampled: how its tokens are sampled; None: each is the most probable one, without scores.
        num_known: its last known tokens that are not stored yet, at least one; several only of rows
            without drafts.
        adapter: of its tokens in the target; None: they have none.
    """

    request: DraftRequest
    table: PageTable
    draft_len: int
    num_left: int
    ends: Collection[int]
    pauses: array[int] = field(default_factory=partial(array, "q"))
    sampled: SampledToken | None = None
    num_known: int = 1
    adapter: PlacedAdapter | None = None

    @property
    def start(self) -> int:
        """The first position that is not stored yet."""
        return len(self.request.tokens) - self.num_known

    @property
    def position(self) -> int:
        """Of the last known token, the root of the first draft."""
        return len(self.request.tokens) - 1

    def root(self) -> Row:
        """The last known token as a row of a batch."""
        start = self.position
        table = self.table.prefix(start + 1)
        return Row([self.request.tokens[start]], start, table, adapter=self.adapter)

    def known(self) -> Row:
        """The known tokens that are not stored yet as a row of a batch, with the logits of the
        last one.
        """
        tokens, last = self.request.tokens[self.start :], self.num_known - 1
        table = self.table.prefix(self.position + 1)
        return Row([*tokens], self.start, table, logits_from=last, adapter=self.adapter)


ROWS_PER_WAITING = 8
"""One row in this number may wait while the others go on. What the engine does between two calls
costs as much as a few steps of all rows, and the steps that the rest of a call would have made of a
row that waits are worth less in a larger batch."""


class Interrupt:
    """Ends a call early: with the step that it makes when ``request`` is called, from any thread,
    or in which the last of ``max_waiting`` rows begins to wait.

    A row waits, and makes no more steps of the call, once it has decoded one of its ``pauses``.

    Attributes:
        with_rows: rows that have ended wait, too.
    """

    def __init__(self) -> None:
        self.with_rows = False
        self._flag = ctypes.c_int32()

    def request(self) -> None:
        """End the call that is being made, or else the next one, after one step."""
        self._flag.value = 1

    def clear(self) -> None:
        """Let the next calls make all of their steps."""
        self._flag.value = 0

    @property
    def is_requested(self) -> bool:
        """Whether a call ends after the step that it makes."""
        return bool(self._flag.value)

    @staticmethod
    def max_waiting(num_rows: int) -> int:
        """How many rows of a call wait when it ends."""
        return max(1, num_rows // ROWS_PER_WAITING)

    @property
    def address(self) -> int:
        """Of an int32, which is 0 until ``request``."""
        return ctypes.addressof(self._flag)


@dataclass(frozen=True, slots=True)
class Advance:
    """The result of a call.

    Attributes:
        results: of each row, one for each step, none after its end; none at all where the logits
            after its last known token are not finite.
        num_forwards: of the target.
        draft_seconds: of the call, spent on drafts; 0 on a GPU, where they are not timed apart.
    """

    results: list[list[VerificationResult]]
    num_forwards: int
    draft_seconds: float = field(default=0.0, compare=False)


class StepRunner(ABC):
    """Makes steps with one target and one source of drafts."""

    @classmethod
    @abstractmethod
    def of(
        cls,
        runner: ModelRunner,
        chains: ChainSource | None,
        rows: Sequence[DecodeRow],
        caches: Sequence[HiddenStateCache] = (),
    ) -> Self | None:
        """A runner for rows like these; None: it cannot make their steps, or not faster.

        Args:
            runner: of the target.
            chains: the source of drafts; it ``can_follow`` all rows that have drafts. None: no row
                has.
            rows: whose tables need not have their slots yet.
            caches: which store the target's hidden states of plain steps, for later drafts.
        """

    @abstractmethod
    def advance(
        self, rows: Sequence[DecodeRow], num_steps: int, interrupt: Interrupt | None = None
    ) -> Advance:
        """Make up to ``num_steps`` steps, until each row has ended.

        What the draft network stores is marked as stored, as are the target's hidden states. All
        draft caches are invalid after the known tokens but the last one of each row.

        Args:
            rows: none has longer drafts than the one before it, nor more tokens left among those
                without drafts.
            num_steps: at most.
            interrupt: may end the call early; steps that are queued on a GPU are made in any case.
        """


@dataclass(slots=True, eq=False)
class RowProgress:
    """A row that advances, with a request of its own whose tokens grow."""

    row: DecodeRow
    request: DraftRequest
    tokens: list[int]
    num_left: int
    num_known: int
    """Tokens that the next step stores, beside its drafts."""
    has_ended: bool = False
    has_paused: bool = False
    """It goes on, but not in this call."""
    results: list[VerificationResult] = field(default_factory=list)

    @classmethod
    def of(cls, row: DecodeRow) -> RowProgress:
        """Before its first step."""
        tokens = list(row.request.tokens)
        request = replace(row.request, tokens=tokens, table=TableView(row.table))
        return cls(row, request, tokens, row.num_left, row.num_known)

    def limit_draft(self) -> int:
        """Drop the draft; returns the maximum length of the next one."""
        request = self.request
        request.draft = NO_DRAFT
        request.max_draft_len = request.max_nodes = min(self.row.draft_len, self.num_left - 1)
        return request.max_nodes

    def pack(self) -> Row:
        """The known tokens that are not stored and the draft, which no longer changes."""
        draft = self.request.draft = Draft(list(self.request.draft.tokens))
        start = len(self.tokens) - self.num_known
        table = self.row.table.prefix(len(self.tokens) + len(draft))
        tokens = [*self.tokens[start:], *draft.tokens]
        first, adapter, num_nodes = self.num_known - 1, self.row.adapter, len(draft)
        return Row(tokens, start, table, logits_from=first, adapter=adapter, num_nodes=num_nodes)

    def verification(self, begin: int) -> VerificationRequest:
        """What is verified, its logits from row ``begin`` on."""
        token, num_known = self.row.sampled or GREEDY_TOKEN, len(self.row.request.tokens)
        token = token.after(self.tokens[num_known:])
        return VerificationRequest.of(self.request.draft, begin, token, self.tokens)

    def take(self, result: VerificationResult) -> None:
        """Append what a step gives, up to the end of the row."""
        size = num_until_end(result.tokens, self.row.ends, self.num_left)
        self.has_ended = size is not None or not result.tokens
        if size is not None:
            result.truncate(size)
        if result.tokens:
            self.results.append(result)
        has_paused = any(token in self.row.pauses for token in result.tokens)
        self.has_paused = has_paused and not self.has_ended
        self.tokens += result.tokens
        self.num_left -= len(result.tokens)
        self.num_known = 1

    def take_queued(self, drafted: list[int], decoded: list[int]) -> None:
        """Append a step of a GPU, where no row ends.

        Args:
            drafted: tokens, of which no more count than may be drafted.
            decoded: the most probable token after the root and each of them.
        """
        if self.has_ended:
            return
        draft = Draft(drafted[: max(0, self.limit_draft())])
        path = accept_points(draft, decoded)
        self.take(result_of(draft, path, decoded[: 1 + len(draft)]))
        self.has_ended |= decoded[len(path)] == NO_TOKEN  # what follows has no meaning


class SingleSteps(StepRunner):
    """The reference implementation: each step is a draft and a forward, whose tokens are read.

    Args:
        runner: of the target.
        chains: what drafts; None: plain decoding.
        caches: see ``of``.
    """

    def __init__(
        self,
        runner: ModelRunner,
        chains: ChainSource | None,
        caches: Sequence[HiddenStateCache] = (),
    ) -> None:
        self._runner, self._chains = runner, chains
        of_chains = () if chains is None else chains.draft_caches
        read = (cache for cache in of_chains if isinstance(cache, HiddenStateCache))
        self._readers = [*caches, *read]

    @classmethod
    def of(
        cls,
        runner: ModelRunner,
        chains: ChainSource | None,
        rows: Sequence[DecodeRow],
        caches: Sequence[HiddenStateCache] = (),
    ) -> Self | None:
        """Not on a GPU unless all rows are greedy decodes without drafts: the host would wait for
        each step.
        """
        waits = chains is not None or any(row.sampled or row.num_known > 1 for row in rows)
        is_slow = waits and runner.lm.device.type != "cpu"
        return None if is_slow else cls(runner, chains, caches)

    @override
    def advance(
        self, rows: Sequence[DecodeRow], num_steps: int, interrupt: Interrupt | None = None
    ) -> Advance:
        progress = list(map(RowProgress.of, rows))
        interrupt = interrupt or Interrupt()
        going, num_forwards, draft_seconds = progress, 0, 0.0
        while going and num_forwards < num_steps:
            try:
                if num_forwards:
                    self._resume(going)
                draft_seconds += self._draft(going)
                logits = self._runner.forward([row.pack() for row in going], self._readers)
            except Exception as error:
                if not num_forwards:
                    raise
                log.warning("a call of decode steps ends early: %r", error)
                break  # the steps before it hold; states from which they began may be dropped
            num_forwards += 1
            results = _verify(logits, going)
            for row, result in zip(going, results, strict=True):
                row.take(result)
            going = [row for row in going if not (row.has_ended or row.has_paused)]
            if self._chains and self._chains.learns_from_ends and _num_ended(progress):
                break
            num_waiting = sum(row.has_paused for row in progress)
            num_waiting += _num_ended(progress) if interrupt.with_rows else 0
            if interrupt.is_requested or num_waiting >= interrupt.max_waiting(len(rows)):
                break
        return Advance([row.results for row in progress], num_forwards, draft_seconds)

    def _resume(self, going: Sequence[RowProgress]) -> None:
        """Tell the storage that rows go on, as before each step of the engine."""
        storage = self._runner.storage
        lengths = [len(row.tokens) - row.num_known for row in going]
        rows = list(zip((row.row.table for row in going), lengths, strict=True))
        storage.limit_states(table.prefix(length) for table, length in rows)
        for table, length in rows:
            storage.resume(table, length)

    def _draft(self, going: Sequence[RowProgress]) -> float:
        """Draft for all rows that may still have a draft; their slots get other tokens than before.

        Returns:
            The seconds that it takes.
        """
        drafting, began = [row for row in going if row.limit_draft() > 0], time.perf_counter()
        if self._chains is None:
            return 0.0
        for row in going:
            start = len(row.tokens) - 1
            for cache in self._chains.draft_caches:
                cache.invalidate(row.row.table, start, start + 1 + row.request.max_nodes)
        if drafting:
            self._chains.draft([row.request for row in drafting])
        return time.perf_counter() - began


def _num_ended(rows: Sequence[RowProgress]) -> int:
    return sum(row.has_ended for row in rows)


def _verify(logits: Tensor, rows: Sequence[RowProgress]) -> list[VerificationResult]:
    """The results of a step, from logits [R, V] float32."""
    if all(row.row.sampled is None for row in rows):
        return verify_argmax(logits, [row.request.draft for row in rows])
    ends = accumulate(1 + len(row.request.draft) for row in rows)
    begins = [0, *ends][:-1]
    return verify(
        logits, [row.verification(begin) for row, begin in zip(rows, begins, strict=True)]
    )


class QueuedSteps(StepRunner):
    """Plain steps on a GPU: each reads the tokens of the one before on the device.

    Args:
        runner: of the target.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    @classmethod
    def of(
        cls,
        runner: ModelRunner,
        chains: ChainSource | None,
        rows: Sequence[DecodeRow],
        caches: Sequence[HiddenStateCache] = (),
    ) -> Self | None:
        """Without drafts and states to store, where all rows are greedy decodes."""
        is_plain = chains is None and not caches
        is_greedy = is_plain and not any(row.sampled or row.num_known > 1 for row in rows)
        return cls(runner) if is_greedy and runner.lm.device.type == "cuda" else None

    @override
    def advance(
        self, rows: Sequence[DecodeRow], num_steps: int, interrupt: Interrupt | None = None
    ) -> Advance:
        """Rows that have ended go on until they have all their tokens."""
        largest, tokens = list[Tensor](), list[Tensor]()
        num_steps = min(num_steps, rows[0].num_left)
        for step in range(num_steps):
            logits = self._runner.forward(_inputs(rows, step, tokens))
            values, ids = logits.max(dim=-1)
            largest.append(values)
            tokens.append(ids)
        decoded = iter(mark_not_finite(torch.cat(tokens), torch.cat(largest)).tolist())
        progress = list(map(RowProgress.of, rows))
        for ids in tokens:
            for row, token in zip(progress, islice(decoded, len(ids)), strict=False):
                row.take_queued([], [token])
        return Advance([row.results for row in progress], num_steps)


def _inputs(rows: Sequence[DecodeRow], step: int, tokens: Sequence[Tensor]) -> list[Row]:
    """The rows of a step: the root of each row, or the token that it has decoded last.

    Args:
        rows: of which the first ones have as many tokens left.
        step: from 0.
        tokens: int64 ``[rows]`` of each step before.
    """
    if not tokens:
        return [row.root() for row in rows]
    inputs = list[Row]()
    for row, token in zip(rows, tokens[-1].split(1), strict=False):
        if step < row.num_left:
            start = row.position + step
            table = row.table.prefix(start + 1)
            inputs.append(Row([0], start, table, drafted=token, adapter=row.adapter))
    return inputs
