"""The scheduler: the queues of sequences, and the plan of a step. Pages and counts only, no torch.

One token budget per step. Running sequences come first, those with a single token to compute (a
decode) before those with more (a chunk of a prefill), so that a long prompt never stalls running
decodes; what is left goes to waiting sequences, strictly by priority and arrival. Between decodes
and prefills, slots for draft nodes are reserved within budget and free pages: at most half of
what prefills could use, and they are the first to be given back when a sequence needs pages.

When the batch is full, a waiting sequence of higher priority replaces a running one of lower
priority, which keeps its pages. When pages run out, they are taken from the sequence that is served
last: parked sequences first, then waiting ones that hold some, then running ones (preemption by
recomputation).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forethought.engine.pending_prefixes import PendingPrefixes
from forethought.engine.sequence import (
    Sequence,
    Status,
    attach_ready_dependents,
    detach_from_parent,
)
from forethought.errors import ContextLengthError, UsageError
from forethought.kv.pool import PagePool, PrefixIndex
from forethought.kv.table import PageCopy, PageTable
from forethought.outputs import EngineStats, FinishReason
from forethought.speculative.drafter import NO_DRAFT, Draft

if TYPE_CHECKING:
    from torch import Tensor

    from forethought.speculative.verify.accept import VerificationResult
    from forethought.speculative.verify.verify import AcceptanceRule

PROMPT_LOGPROB_ROWS = 256
"""Max prompt tokens scored per step, as each takes a vocabulary-sized row of logits."""


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
    """Known tokens of a sequence to compute, and the draft after them."""

    sequence: Sequence
    start: int
    """The position of the first of them."""
    stop: int
    """The position after the last of them."""
    num_logits: int
    """The logits of this many of its last known tokens are computed."""
    copies: tuple[PageCopy, ...] | None = None
    """To make before the forward; None: the table has no slots for the tokens yet."""
    num_nodes: int = 0
    """Draft slots after the known tokens: those reserved by the plan, and from drafting on as many
    as the draft has nodes."""
    num_further: int = 0
    """Slots after those, for what the further steps of the call store."""
    draft: Draft = NO_DRAFT
    """Set by drafting."""
    drafter: str = ""
    """Set by drafting: the name of the drafter whose draft it is."""
    rule: AcceptanceRule | None = None
    """Set by drafting: accepts or rejects the draft; None: the exact rule."""
    known_logits: Tensor | None = None
    """Set by verification where the prompt is scored: [num_logits, V] float32."""
    results: list[VerificationResult] = field(default_factory=list)
    """Set by verification: what its sequence gains, in each step of the call."""
    sibling_results: list[tuple[Sequence, VerificationResult]] = field(default_factory=list)
    """Set by verification: what siblings with the same tokens gain."""

    @property
    def num_tokens(self) -> int:
        """Known tokens to compute."""
        return self.stop - self.start

    @property
    def num_stored(self) -> int:
        """Tokens of the sequence up to the last slot that it may write."""
        return self.stop + self.num_nodes + self.num_further

    @property
    def num_gained(self) -> int:
        """Tokens that its sequence gains."""
        return sum(len(result.tokens) for result in self.results)

    @property
    def is_last(self) -> bool:
        """Whether it computes the sequence's last token, after which a token is sampled."""
        return self.stop == len(self.sequence.tokens)

    @property
    def is_decode(self) -> bool:
        """Whether it computes a token sampled in this generation: a draft may follow it."""
        is_single = self.num_logits == 1 == self.stop - self.start
        return is_single and self.is_last and self.stop > self.sequence.prompt_length

    def undo(self) -> None:
        """Give back the slots of its tokens, which were not stored. A page that was to be copied
        may be empty, so that one is given back as a whole.
        """
        table, size = self.sequence.table, self.sequence.table.page_size
        copying = self.copies is None or self.copies
        start = self.start // size * size if copying else self.start
        table.rewind(min(start, table.length))


@dataclass(slots=True)
class Plan:
    """The rows of one step."""

    rows: list[PlannedRow] = field(default_factory=list)
    num_tokens: int = 0
    """To compute in one step: known tokens and draft slots."""
    num_steps: int = 1
    """Decode steps to make in one call, at most."""
    failures: list[tuple[Sequence, Exception]] = field(default_factory=list)
    """Sequences that cannot go on, to be closed at the end of the step. They have no row."""

    @property
    def copies(self) -> list[PageCopy]:
        """Page copies to make before the forward."""
        return [copy for row in self.rows for copy in row.copies or ()]

    @property
    def decodes(self) -> list[PlannedRow]:
        """The rows that a draft may follow."""
        return [row for row in self.rows if row.is_decode]

    def add(self, row: PlannedRow) -> None:
        """Add a row without draft slots."""
        self.rows.append(row)
        self.num_tokens += row.num_tokens

    def remove(self, sequence: Sequence) -> None:
        """Leave a sequence out of the step: its row, if it has one, is undone."""
        for position, row in enumerate(self.rows):
            if row.sequence is sequence:
                row.undo()
                self.num_tokens -= row.num_tokens + row.num_nodes
                del self.rows[position]
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
        """Undo all rows: nothing of this step was stored."""
        for row in self.rows:
            row.undo()

    def reserve(self, row: PlannedRow, num_nodes: int) -> None:
        """Append draft slots to a row; enough pages must be available."""
        copies = row.sequence.table.append(num_nodes)
        assert not copies, "the page of the root is the sequence's own already"
        self.num_tokens += num_nodes
        row.num_nodes += num_nodes

    def reserve_further(self, row: PlannedRow, num_slots: int) -> None:
        """Append slots of further steps to a row; enough pages must be available."""
        row.sequence.table.append(num_slots)
        row.num_further += num_slots

    def make_single(self) -> None:
        """The plan is of one step: give back the slots of further ones."""
        self.num_steps = 1
        for row in self.rows:
            self.trim(row, row.num_nodes)

    def trim(self, row: PlannedRow, num_nodes: int) -> None:
        """Keep only the first ``num_nodes`` draft slots of a row."""
        row.sequence.table.rewind(row.stop + num_nodes)
        self.num_tokens -= row.num_nodes - num_nodes
        row.num_nodes, row.num_further = num_nodes, 0

    def drop_draft(self, row: PlannedRow) -> None:
        """Leave the row without a draft and without slots for one."""
        row.draft, row.rule = NO_DRAFT, None
        self.trim(row, 0)

    def drop_drafts(self) -> bool:
        """``drop_draft`` for every row; whether this gave back any slots."""
        reserved = [row for row in self.rows if row.num_nodes]
        for row in reserved:
            self.drop_draft(row)
        return bool(reserved)


class Scheduler:
    """The queues of running, waiting and parked sequences. ``stats`` counts cached tokens,
    preemptions and drops.
    """

    def __init__(
        self, pool: PagePool, index: PrefixIndex, limits: Limits, stats: EngineStats
    ) -> None:
        self._pool, self._index, self.limits, self._stats = pool, index, limits, stats
        self.running: list[Sequence] = []
        """In the order of service."""
        self.waiting: list[Sequence] = []
        self.parked: list[Sequence] = []
        """Least recently used first."""
        self.on_end: Callable[[Sequence], None] = lambda sequence: None
        """Called with each sequence whose generation is over or that is closed."""
        self.on_resume: Callable[[PageTable, int], int] = lambda _, length: length
        """Called with the table of each row that is about to go on, and the number of tokens that
        are stored; see ``KvStorage.resume``."""
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
        if status is Status.WAITING:
            sequence.page_digests = []
        if status is not Status.CLOSED:
            self._queues[status].append(sequence)
        if status is Status.RUNNING:
            self.running.sort(key=lambda sequence: sequence.rank)

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
            sequence.others = ()
            self.place(sequence, Status.CLOSED)

    @property
    def to_run(self) -> list[Sequence]:
        """The running sequences that are not held. Where others wait for their places none is:
        their clients may wait for these others.
        """
        if self.waiting:
            return list(self.running)
        return [sequence for sequence in self.running if not sequence.is_held]

    def plan_decodes(self, plan: Plan) -> None:
        """Add a row for each running sequence with one token to compute, one by one, so that the
        plan can be undone wherever this stops. Errors of one sequence end up in its
        ``failures``.
        """
        if self.waiting:
            self._replace_by_priority()
        for sequence in self.to_run:
            self._rewind_to_resume(sequence)
        self._plan_rows(plan, [s for s in self.to_run if s.num_uncomputed == 1])

    def _rewind_to_resume(self, sequence: Sequence) -> None:
        """Leave out stored tokens after which the row cannot go on: they are computed again."""
        table = sequence.table
        length = self.on_resume(table, table.length)
        if length < table.length:
            table.rewind(length)

    def reserve_draft_slots(self, plan: Plan, rows: List[PlannedRow], requested: List[int]) -> None:
        """Reserve slots for the requested draft nodes after decodes, the first rows first; preempts
        no sequence.
        """
        num_remaining = self.limits.max_num_tokens - plan.num_tokens
        if len(self.running) > len(rows) or any(s.parent is None for s in self.waiting):
            num_remaining //= 2
        for row, num_requested in zip(rows, requested, strict=True):
            table = row.sequence.table
            free = -table.length % self._pool.page_size
            num_nodes = min(
                num_requested, num_remaining, free + self._pool.available * self._pool.page_size
            )
            if num_nodes > 0:
                plan.reserve(row, num_nodes)
                num_remaining -= num_nodes

    def reserve_decode_slots(self, plan: Plan, num_steps: int) -> int:
        """Reserve slots for what further decode steps store, within free pages; returns the steps
        that there are slots for, of ``num_steps`` with the first one.

        Preempts no sequence and evicts no page. A row gets no more than its sequence has tokens
        left, and otherwise for as many steps as the others.
        """
        num_remaining = [row.sequence.num_wanted for row in plan.rows]
        num_steps, free = min(num_steps, max(num_remaining, default=1)), self._pool.num_free
        rows = [
            (row.sequence.table, 1 + row.num_nodes, most)
            for row, most in zip(plan.rows, num_remaining, strict=True)
        ]

        def needed(num: int) -> int:
            return sum(
                table.pages_needed(min(num * size, most) - size) for table, size, most in rows
            )

        if needed(num_steps) > free:  # which rises with the steps, and is 0 for one
            num_steps = bisect_right(range(num_steps), free, lo=1, key=needed) - 1
        for row, (_, size, most) in zip(plan.rows, rows, strict=True):
            if min(num_steps * size, most) > size:
                plan.reserve_further(row, min(num_steps * size, most) - size)
        return num_steps

    def plan_prefills(self, plan: Plan) -> None:
        """Add chunks of running prefills, then admit waiting sequences, while there is budget.
        Draft slots are given back where their pages are needed.
        """
        prefilling = [s for s in self.running if s.num_uncomputed > 1 and not plan.has_failed(s)]
        self._plan_rows(plan, prefilling)
        self.waiting.sort(key=lambda sequence: sequence.rank)
        ready = [s for s in self.waiting if s.parent is None and not plan.has_failed(s)]
        if ready and not self.is_full:
            self._admit_ready(plan, ready)

    def _admit_ready(self, plan: Plan, ready: list[Sequence]) -> None:
        """Admit waiting sequences in their order, but for those whose prefix is being computed:
        each of those keeps a place in the batch, and the pages of its other tokens.
        """
        pending, num_places, num_pages = PendingPrefixes(self._index, self.running), 0, 0
        for sequence in ready:
            try:
                if len(self.running) + num_places >= self.limits.max_batch_size:
                    break
                if num_awaited := self._num_awaited(pending, sequence):
                    num_places += 1
                    num_pages += sequence.table.pages_needed(len(sequence.tokens)) - num_awaited
                    continue
                if not self._admit(plan, sequence, num_pages):
                    break
                pending.add(sequence)
            except Exception as error:
                plan.fail(sequence, error)

    def _plan_rows(self, plan: Plan, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            try:
                if sequence.status is Status.RUNNING:  # else preempted by an earlier one
                    self._plan_row(plan, sequence)
            except Exception as error:
                plan.fail(sequence, error)

    def _replace_by_priority(self) -> None:
        """Let waiting sequences of higher priority replace running ones of lower priority. Those
        keep their pages and wait until the batch has a free slot. Among equal priorities an
        earlier arrival replaces none.
        """
        ready = sorted((s for s in self.waiting if s.parent is None), key=lambda s: s.rank)
        free = max(0, self.limits.max_batch_size - len(self.running))
        for urgent, last in zip(ready[free:], _last_first(self.running), strict=False):
            if urgent.params.priority >= last.params.priority:
                break
            self.place(last, Status.WAITING)

    def _plan_row(self, plan: Plan, sequence: Sequence) -> None:
        if sequence.others:
            _check_others(sequence)
            sequence.limit = self._limit_with_others(sequence)
            sequence.table.keep_private(sequence.others[0].num_common)
        count = self._fitting_tokens(plan, sequence)
        if count == 0:
            return
        table = sequence.table
        while (needed := table.pages_needed(count)) and needed > self._pool.available:
            if plan.drop_drafts():
                continue
            if not self._take_pages_from(plan, self._victims(sequence), sequence):
                return
        is_last = sequence.num_uncomputed == count
        num_logits = count if sequence.wants_prompt_logprobs else int(is_last)
        row = PlannedRow(sequence, table.length, table.length + count, num_logits)
        plan.add(row)  # before the table grows: an interrupt in between can be undone
        row.copies = tuple(table.append(count))

    def _fitting_tokens(self, plan: Plan, sequence: Sequence) -> int:
        """Tokens of the sequence that fit into the rest of the step's budget."""
        num_remaining = self.limits.max_num_tokens - plan.num_tokens
        num_tokens, begin = sequence.num_uncomputed, sequence.num_computed
        if num_tokens == 1 and num_remaining > 0:  # a decode
            return 1
        ends = [other.num_common for other in sequence.others if other.num_common > begin]
        if ends:  # the tokens before do not see the others
            num_tokens = ends[0] - begin
        if sequence.wants_prompt_logprobs:
            num_tokens = min(num_tokens, PROMPT_LOGPROB_ROWS)
        if num_tokens > num_remaining and not self.limits.chunked_prefill:
            return 0 if plan.rows else num_tokens  # recomputing more than a step's worth: alone
        return min(num_tokens, num_remaining)

    def _admit(self, plan: Plan, sequence: Sequence, num_reserved: int) -> bool:
        """Start a waiting sequence if budget and pages allow, leaving ``num_reserved`` pages to
        those before it; parked ones release theirs.
        """
        self._adopt_prefix(sequence)
        if self._fitting_tokens(plan, sequence) == 0:
            return False
        needed = sequence.table.pages_needed(sequence.num_uncomputed) + num_reserved
        if needed > self._pool.available:
            plan.drop_drafts()
        while needed > self._pool.available:
            idle = self._idle()
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
        num_pages = self._num_shareable(sequence)
        if num_pages:
            sequence.table.adopt(self._index.find(sequence.page_digests[:num_pages]))
        self._rewind_to_resume(sequence)
        if num_pages:
            sequence.usage.cached += sequence.table.length
            self._stats.cached += sequence.table.length

    def _num_awaited(self, pending: PendingPrefixes, sequence: Sequence) -> int:
        """Pages of its prefix, if running prefills are computing some of them; else 0."""
        if not sequence.page_digests:
            salt, adapter = sequence.params.cache_salt, sequence.adapter_digest
            sequence.page_digests = self._index.digests(sequence.tokens, salt, adapter)
        return pending.num_awaited(sequence, self._num_shareable(sequence))

    def _num_shareable(self, sequence: Sequence) -> int:
        """Full pages that it may take from others: none if it has some; a token is left."""
        if sequence.table.pages or sequence.had_nonfinite_logits:
            return 0
        limit = len(sequence.tokens) - 1
        if sequence.others:
            limit = min(limit, sequence.others[0].num_common)
        if sequence.wants_prompt_logprobs:
            limit = min(limit, len(sequence.prompt_logprobs) - 1)
        return max(0, limit) // self._pool.page_size

    def _victims(self, needy: Sequence) -> list[Sequence]:
        """The sequences to take pages from for ``needy``: idle ones, then those served after it.
        Parked ones that others attend to only where nothing else runs: those would fail.
        """
        waiting = [other for other in self.waiting if other.table.pages]
        later = [other for other in self.running if other.rank >= needy.rank]
        is_alone = all(other is needy for other in self.running)
        read = [sequence for sequence in self.parked if sequence.table.pages] if is_alone else []
        return [*self._idle(), *_last_first(waiting), *read, *_last_first(later)]

    def _idle(self) -> list[Sequence]:
        """Parked sequences with pages to which none attends that runs or waits."""
        active = (*self.running, *self.waiting)
        read = {id(other.sequence) for sequence in active for other in sequence.others}
        return [parked for parked in self.parked if parked.table.pages and id(parked) not in read]

    def _limit_with_others(self, sequence: Sequence) -> int:
        """Tokens at which its generation ends, so that the context holds the others' as well.
        Raises ContextLengthError if those of the others alone do not fit.
        """
        num_others = sum(len(other.sequence.tokens) - other.num_common for other in sequence.others)
        if num_others >= self.limits.max_length:
            raise ContextLengthError(
                f"{num_others} tokens of other sequences do not fit into the context",
                f"one sequence may see {self.limits.max_length}, its own among them",
                "Attend to fewer or shorter sequences",
            )
        limit = max(len(sequence.tokens) + 1, self.limits.max_length - num_others)
        return min(sequence.limit, limit)

    def _take_pages_from(self, plan: Plan, victims: list[Sequence], needy: Sequence) -> bool:
        """Preempt the first victim: free its pages; False if that was ``needy`` itself."""
        victim = victims[0]
        if victim.status is Status.RUNNING:
            plan.remove(victim)
            self._stats.preemptions += 1
            self.restart(victim)
        else:
            self._drop(victim)
        return victim is not needy

    def restart(self, sequence: Sequence) -> None:
        """A running sequence gives back its pages, as it is preempted or has logits that are not
        finite; its KV is computed again when it is admitted."""
        self.place(sequence, Status.WAITING)
        sequence.table.release()

    def _drop(self, sequence: Sequence) -> None:
        sequence.table.release()
        self._stats.dropped += 1


def _check_others(sequence: Sequence) -> None:
    """Raise UsageError unless what the sequence attends to is stored, or will be."""
    for other in (reading.sequence for reading in sequence.others):
        generated = len(other.tokens) if other.extended_from is None else other.extended_from
        lost = other.status is Status.PARKED and generated - other.num_computed > 1
        if lost or other.status is Status.CLOSED:
            raise UsageError(
                "a sequence that this one attends to cannot be read",
                f"it is {other.status.value}, and {other.num_uncomputed} of its "
                f"{len(other.tokens)} tokens are not stored",
                "Keep it open and let it generate once; if the KV cache is too small to keep its "
                "pages, raise kv_cache_config.max_tokens",
            )


def _last_first(sequences: list[Sequence]) -> list[Sequence]:
    return sorted(sequences, key=lambda sequence: sequence.rank, reverse=True)
