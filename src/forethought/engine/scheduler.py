"""Who runs in the next step, and with how many tokens. No torch; knows pages and counts only.

One token budget per step. Running sequences come first, those with a single token to compute (a
decode) before those with more (a chunk of a prefill), so that a long prompt never stalls running
answers; what is left goes to waiting sequences, strictly in the order of priority and arrival.
Behind a decode, room for the nodes of a draft is reserved as far as budget and free pages go; it is
the first to be given back when anybody needs pages, and takes at most half of what prefills want.
Where all places are taken, one of higher priority gets that of one of lower, which pauses.
When pages run out, they are taken from whoever is served last: first from parked sequences, then
from waiting ones that still hold some, then from running ones, whose KV is computed again later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forethought.engine.sequence import (
    Sequence,
    Status,
    attach_ready_dependents,
    detach_from_parent,
)
from forethought.kv.pool import PagePool
from forethought.kv.prefix import PrefixIndex
from forethought.kv.table import PageCopy
from forethought.outputs import EngineStats, FinishReason
from forethought.speculative.draft import NO_DRAFT, Draft

if TYPE_CHECKING:
    from torch import Tensor

    from forethought.speculative.verify.verify import AcceptanceRule, VerificationResult

    Outcome = list[tuple[Sequence, VerificationResult]]
    # What was sampled after one row: for its own sequence first, then for its siblings.


log = logging.getLogger(__name__)

RequestedNodes = Callable[[List[Sequence], int], List[int]]
"""How many draft nodes to reserve behind each of these sequences, all of which decode, while so
many run."""

PROMPT_LOGPROB_ROWS = 256
"""Most prompt tokens per step whose logits are wanted, as these take vocabulary-sized rows."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step and one sequence may take."""

    max_batch_size: int
    """Running sequences."""
    max_num_tokens: int
    """Tokens per step."""
    max_length: int
    """Tokens of one sequence, prompt and output."""
    chunked_prefill: bool = True
    """Whether a prompt may be spread over several steps."""


@dataclass(slots=True)
class PlannedRow:
    """``count`` tokens of a sequence from position ``start``, and the draft behind the last one."""

    sequence: Sequence
    start: int
    count: int
    logits: int
    """Of how many of its last known tokens the logits are wanted."""
    copies: tuple[PageCopy, ...] | None = None
    """To be made before the forward; None: the table has no room for the tokens yet."""
    nodes: int = 0
    """Room behind the tokens that is reserved for a draft."""
    draft: Draft = NO_DRAFT
    rule: AcceptanceRule | None = None
    """What decides about the draft; None: its law, exactly."""
    known_logits: Tensor | None = None
    """Filled by the forward: [logits, V] float32, of its last known tokens."""
    outcome: Outcome = field(default_factory=list)
    """Filled by verification: what was drawn behind it."""

    @property
    def stop(self) -> int:
        """The position behind its last known token."""
        return self.start + self.count

    @property
    def is_last(self) -> bool:
        """Whether the row computes the sequence's last token, so that one is drawn after it."""
        return self.stop == len(self.sequence.tokens)

    @property
    def decodes(self) -> bool:
        """Whether the row computes a token drawn in this generation: a draft may follow it."""
        drawn = self.stop > self.sequence.prompt_length
        return drawn and self.count == 1 == self.logits and self.is_last

    def undo(self) -> None:
        """Take back the room for its tokens: they were not stored.

        A page that was to be copied may be empty, so that one is given back as a whole.
        """
        table, size = self.sequence.table, self.sequence.table.page_size
        copying = self.copies is None or self.copies
        start = self.start // size * size if copying else self.start
        table.rewind(min(start, table.length))


@dataclass(slots=True)
class Plan:
    """The rows of one step."""

    rows: list[PlannedRow] = field(default_factory=list)
    tokens: int = 0
    """To compute, those of drafts included."""
    failures: list[tuple[Sequence, Exception]] = field(default_factory=list)
    """Sequences that cannot go on, to be closed at the end of the step. They have no row."""

    @property
    def copies(self) -> list[PageCopy]:
        """Page copies to make before the forward."""
        return [copy for row in self.rows for copy in row.copies or ()]

    def add(self, row: PlannedRow) -> None:
        """One more, without room for a draft as yet."""
        self.rows.append(row)
        self.tokens += row.count

    def remove(self, sequence: Sequence) -> None:
        """Leave a sequence out of the step: its row, if it has one, is undone."""
        for place, row in enumerate(self.rows):
            if row.sequence is sequence:
                row.undo()
                self.tokens -= row.count + row.nodes
                del self.rows[place]
                return

    def fail(self, sequence: Sequence, error: Exception) -> None:
        """Leave a sequence out of this step and have it closed at the end of it."""
        self.remove(sequence)
        self.failures.append((sequence, error))

    def fail_all(self, error: Exception) -> None:
        """As ``fail``, for every row."""
        for row in list(self.rows):
            self.fail(row.sequence, error)

    def has_failed(self, sequence: Sequence) -> bool:
        """Whether it is to be closed at the end of the step."""
        return any(failed is sequence for failed, _ in self.failures)

    def undo(self) -> None:
        """Nothing of this step was stored, and nobody fails."""
        for row in self.rows:
            row.undo()

    def reserve(self, row: PlannedRow, nodes: int) -> None:
        """Make room for a draft, in place of the room that there was; ``nodes`` pages are free."""
        table = row.sequence.table
        if table.length > row.stop:
            table.rewind(row.stop)
        copies = table.append(nodes)
        assert not copies, "the page of the root is the sequence's own already"
        self.tokens += nodes - row.nodes
        row.nodes = nodes

    def give_back_nodes(self) -> bool:
        """Release what is reserved for drafts; whether there was anything."""
        reserved = [row for row in self.rows if row.nodes]
        for row in reserved:
            self.reserve(row, 0)
        return bool(reserved)


class Scheduler:
    """Holds the queues; plans steps.

    Args:
        pool: where pages come from.
        index: where prefixes that are stored already are found.
        limits: of a step and of a sequence.
        stats: counts cached tokens, preemptions and drops.
    """

    def __init__(
        self, pool: PagePool, index: PrefixIndex, limits: Limits, stats: EngineStats
    ) -> None:
        self._pool, self._index, self.limits, self._stats = pool, index, limits, stats
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.parked: list[Sequence] = []
        """Least recently used first."""
        self.on_end: Callable[[Sequence], None] = lambda sequence: None
        """Told of each generation that is over, and of each sequence that is closed."""
        self._queues = {
            Status.RUNNING: self.running,
            Status.WAITING: self.waiting,
            Status.PARKED: self.parked,
        }

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue

    def place(self, sequence: Sequence, status: Status) -> None:
        """Move a sequence to the end of the queue of ``status``; a closed one is in none."""
        if sequence.status is not Status.CLOSED:
            self._queues[sequence.status].remove(sequence)
        sequence.status = status
        if status is not Status.CLOSED:
            self._queues[status].append(sequence)

    @property
    def is_full(self) -> bool:
        """Whether no further sequence may run."""
        return len(self.running) >= self.limits.max_batch_size

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """A generation is over: park the sequence if it is to be kept, else close it."""
        sequence.finish_reason, sequence.constraint = reason, None
        self.on_end(sequence)
        if sequence.keep:
            self.place(sequence, Status.PARKED)
        else:
            self.close(sequence)

    def close(self, sequence: Sequence) -> None:
        """Give back all pages; the sequence is in no queue afterwards."""
        if sequence.status is not Status.CLOSED:
            self.on_end(sequence)
            attach_ready_dependents(sequence, all_of_them=True)
            detach_from_parent(sequence)
            sequence.table.release()
            self.place(sequence, Status.CLOSED)

    def plan(self, plan: Plan, requested_nodes: RequestedNodes | None = None) -> None:
        """Choose the rows of the next step and make room for their tokens.

        Args:
            plan: an empty one, filled row by row, so that it can be undone wherever this stops.
                What is raised for one sequence ends up in its ``failures``.
            wishes: how many draft nodes the sequences that decode would like.
        """
        self._yield_places()
        self.running.sort(key=lambda sequence: sequence.rank)
        decoding = [sequence for sequence in self.running if sequence.num_uncomputed == 1]
        prefilling = [sequence for sequence in self.running if sequence.num_uncomputed > 1]
        self._plan_rows(plan, decoding)
        if requested_nodes is not None:
            self._try_to_reserve(plan, requested_nodes)
        self._plan_rows(plan, prefilling)
        self.waiting.sort(key=lambda sequence: sequence.rank)
        for sequence in list(self.waiting):
            if sequence.parent is not None or plan.has_failed(sequence):
                continue
            try:
                if self.is_full or not self._admit(plan, sequence):
                    break
            except Exception as error:
                plan.fail(sequence, error)

    def _plan_rows(self, plan: Plan, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            try:
                if sequence.status is Status.RUNNING:  # may have lost its pages to an earlier one
                    self._plan_row(plan, sequence)
            except Exception as error:
                plan.fail(sequence, error)

    def _try_to_reserve(self, plan: Plan, requested_nodes: RequestedNodes) -> None:
        """Reserve room for drafts; where that fails, this step has none."""
        try:
            self._reserve(plan, requested_nodes)
        except Exception:
            log.exception("no room for drafts could be reserved in this step")
            plan.give_back_nodes()

    def _reserve(self, plan: Plan, requested_nodes: RequestedNodes) -> None:
        """Give the decodes room for drafts, the first ones first; nobody loses a page by it."""
        rows = [row for row in plan.rows if row.decodes]
        left = self.limits.max_num_tokens - plan.tokens
        if len(self.running) > len(rows) or any(s.parent is None for s in self.waiting):
            left //= 2
        wished = requested_nodes([row.sequence for row in rows], len(self.running))
        for row, wish in zip(rows, wished, strict=True):
            table = row.sequence.table
            free = -table.length % self._pool.page_size
            nodes = min(wish, left, free + self._pool.available * self._pool.page_size)
            if nodes > 0:
                plan.reserve(row, nodes)
                left -= nodes

    def _yield_places(self) -> None:
        """Let waiting sequences of higher priority take the places of running ones of lower.

        Those keep their pages and wait for the next free place. Arrival takes no place away.
        """
        ready = sorted((s for s in self.waiting if s.parent is None), key=lambda s: s.rank)
        free = max(0, self.limits.max_batch_size - len(self.running))
        for urgent, last in zip(ready[free:], _last_first(self.running), strict=False):
            if urgent.params.priority >= last.params.priority:
                break
            self.place(last, Status.WAITING)

    def _plan_row(self, plan: Plan, sequence: Sequence) -> None:
        count = self._count(plan, sequence)
        if count == 0:
            return
        while sequence.table.pages_needed(count) > self._pool.available:
            if plan.give_back_nodes():
                continue
            if not self._take_pages_from(plan, self._victims(sequence), sequence):
                return
        start = sequence.table.length
        logits = int(sequence.num_uncomputed == count)
        if sequence.wants_prompt_logprobs:
            logits = count
        row = PlannedRow(sequence, start, count, logits)
        plan.add(row)  # before the table grows: an interrupt in between can be undone
        row.copies = tuple(sequence.table.append(count))

    def _count(self, plan: Plan, sequence: Sequence) -> int:
        """Tokens of the sequence that fit into what is left of the step's budget."""
        left = self.limits.max_num_tokens - plan.tokens
        wanted = sequence.num_uncomputed
        if sequence.wants_prompt_logprobs:
            wanted = min(wanted, PROMPT_LOGPROB_ROWS)
        if wanted > left and not self.limits.chunked_prefill:
            return 0 if plan.rows else wanted  # recomputing more than a step's worth: alone
        return min(wanted, left)

    def _admit(self, plan: Plan, sequence: Sequence) -> bool:
        """Start a waiting sequence if budget and pages allow; parked ones give up theirs."""
        self._adopt_prefix(sequence)
        if self._count(plan, sequence) == 0:
            return False
        needed = sequence.table.pages_needed(sequence.num_uncomputed)
        if needed > self._pool.available:
            plan.give_back_nodes()
        while needed > self._pool.available:
            idle = [other for other in self.parked if other.table.pages]
            if not idle:
                break
            self._drop(idle[0])
        if needed > self._pool.available and self.running:
            return False  # those that run will finish and give pages back
        self.place(sequence, Status.RUNNING)
        self._plan_row(plan, sequence)
        return sequence.status is Status.RUNNING

    def _adopt_prefix(self, sequence: Sequence) -> None:
        """Begin an empty table with the pages of a known prefix; at least one token is left."""
        if sequence.table.pages or sequence.wants_prompt_logprobs or sequence.suspect:
            return
        pages = self._index.match(sequence.tokens[:-1], sequence.params.cache_salt)
        sequence.table.adopt(pages)
        sequence.usage.cached += sequence.table.length
        self._stats.cached += sequence.table.length

    def _victims(self, needy: Sequence) -> list[Sequence]:
        """Who gives pages to ``needy``, first one first: idle ones, then those served after it."""
        idle = [other for other in self.parked if other.table.pages]
        waiting = [other for other in self.waiting if other.table.pages]
        later = [other for other in self.running if other.rank >= needy.rank]
        return [*idle, *_last_first(waiting), *_last_first(later)]

    def _take_pages_from(self, plan: Plan, victims: list[Sequence], needy: Sequence) -> bool:
        """Free the first victim's pages; False if that was ``needy`` itself."""
        victim = victims[0]
        if victim.status is Status.RUNNING:
            plan.remove(victim)
            self._stats.preemptions += 1
            self.restart(victim)
        else:
            self._drop(victim)
        return victim is not needy

    def restart(self, sequence: Sequence) -> None:
        """A running sequence gives back its pages; its KV is computed again when it is admitted."""
        self.place(sequence, Status.WAITING)
        sequence.table.release()

    def _drop(self, sequence: Sequence) -> None:
        sequence.table.release()
        self._stats.dropped += 1


def _last_first(sequences: list[Sequence]) -> list[Sequence]:
    return sorted(sequences, key=lambda sequence: sequence.rank, reverse=True)
