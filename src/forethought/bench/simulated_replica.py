"""``SimulatedReplica``: an engine reduced to counts: what each step holds, and its seconds.

It plans as ``engine/scheduler.py`` does: one budget of tokens per step, decodes first, then chunks
of prefills, then waiting sequences in the order of arrival, as places and pages allow. The latest
arrival gives up its pages where they run out, and is computed again. Prefixes are found by the
blocks of the trace, a prompt waits for those that another one is computing, and a fork has the
tokens of its parent where these are. Blocks that nothing uses are evicted in the order of their
release.

Steps of equal rows are one *segment*: k decodes take k * first + slope * k * (k - 1) / 2 seconds,
as each adds a token to the context of each row, and those of the engine's calls, one for every
``steps_per_call`` of them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from forethought.bench.arrivals import TraceRequest
from forethought.bench.step_times import MeasuredEngine, StepTimes, attended_tokens


@dataclass(eq=False, slots=True)
class SimulatedSequence:
    """One request of the trace; a ``Remote`` for the rules of ``cluster/migration.py``.

    Attributes:
        handle: its number in the order of arrival, by which sequences are served.
        blocks: the full blocks of its prompt that others may share.
        key: of its session, by which it is placed.
        parent: what it continues.
        stops: numbers of generated tokens at which forks begin, the next one last.
    """

    handle: int
    request: TraceRequest
    blocks: Sequence[Hashable]
    key: str | None = None
    parent: SimulatedSequence | None = None
    stops: list[int] = field(default_factory=list)
    arrived: float = 0.0
    """Seconds; so are the other times."""
    first_token: float | None = None
    ended: float | None = None
    link: SimulatedReplica | None = None
    num_output: int = 0
    num_left: int = 0
    """Tokens that are not computed yet."""
    num_queued: int = 0
    """Of its prompt, as of when it came to where it is, until all are computed."""
    num_cached: int = 0
    """Prompt tokens that were found in a prefix cache at its first admission."""
    num_preemptions: int = 0
    has_pages: bool = False
    """Its keys and values come with it, by a move."""
    is_leaving: bool = False
    """It moves away when the segment ends."""
    entries: list[Hashable] = field(default_factory=list)
    """What it holds of the cache; the last one is its own, the tail."""
    num_admissions: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return self.request.input_length + self.num_output

    @property
    def num_remaining(self) -> int:
        """Tokens to generate until it ends or a fork begins, at least 1."""
        goal = self.stops[-1] if self.stops else self.request.output_length
        return max(1, min(goal, self.request.output_length) - self.num_output)

    @property
    def sequence(self) -> SimulatedSequence:
        """Itself, as a ``Remote`` has its sequence."""
        return self

    @property
    def tokens(self) -> range:
        """As many as it has."""
        return range(self.num_tokens)


class SimulatedCache:
    """Tokens of a KV cache, by blocks and tails that several sequences hold.

    Args:
        capacity: tokens.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.num_used, self._num_idle = capacity, 0, 0
        self._sizes: dict[Hashable, int] = {}
        self._refs: dict[Hashable, int] = {}
        self._idle = OrderedDict[Hashable, None]()

    @property
    def available(self) -> int:
        """Tokens that are free or that nothing uses."""
        return self.capacity - self.num_used

    def holds(self, entry: Hashable) -> bool:
        """Whether an entry is there."""
        return entry in self._sizes

    def add(self, entry: Hashable, size: int) -> None:
        """A new entry, which one sequence holds."""
        assert entry not in self._sizes, "it is there"
        self._sizes[entry], self._refs[entry] = size, 1
        self.num_used += size
        self._evict()

    def resize(self, entry: Hashable, change: int) -> None:
        """An entry in use becomes larger or smaller."""
        self._sizes[entry] += change
        self.num_used += change
        assert self._sizes[entry] >= 0, "more was shared than it has"
        self._evict()

    def retain(self, entry: Hashable) -> None:
        """A further sequence holds an entry."""
        if entry in self._idle:
            del self._idle[entry]
            self._num_idle -= self._sizes[entry]
            self.num_used += self._sizes[entry]
        self._refs[entry] += 1

    def release(self, entry: Hashable) -> None:
        """A sequence gives an entry up."""
        self._refs[entry] -= 1
        if not self._refs[entry]:
            self._idle[entry] = None
            self._num_idle += self._sizes[entry]
            self.num_used -= self._sizes[entry]

    def drop(self, entry: Hashable) -> None:
        """Remove an entry that nothing uses."""
        del self._idle[entry], self._refs[entry]
        self._num_idle -= self._sizes.pop(entry)

    def is_idle(self, entry: Hashable) -> bool:
        """Whether nothing uses an entry."""
        return entry in self._idle

    def _evict(self) -> None:
        while self._idle and self.num_used + self._num_idle > self.capacity:
            self.drop(next(iter(self._idle)))
        assert self.num_used <= self.capacity, "more was admitted than fits"

    def check_integrity(self) -> None:
        """Assert that the counts agree, and that all fits."""
        idle = sum(self._sizes[entry] for entry in self._idle)
        assert (idle, idle + self.num_used) == (self._num_idle, sum(self._sizes.values()))
        assert self._sizes.keys() == self._refs.keys()
        assert all((entry in self._idle) == (not refs) for entry, refs in self._refs.items())
        assert 0 <= self.num_used <= self.num_used + self._num_idle <= self.capacity


@dataclass(slots=True)
class _Segment:
    """Steps of equal rows, from one moment on."""

    start: float
    decodes: list[SimulatedSequence]
    chunks: list[tuple[SimulatedSequence, int]]
    num_steps: int
    first: float
    """Seconds of the first step, without its call."""
    slope: float
    """Seconds that each step takes more than the one before."""
    call: float
    """Seconds of each call."""
    steps_per_call: int

    def seconds(self, num_steps: int) -> float:
        num_calls = -(-num_steps // self.steps_per_call)
        steps = num_steps * self.first + self.slope * num_steps * (num_steps - 1) / 2
        return steps + num_calls * self.call

    @property
    def end(self) -> float:
        return self.start + self.seconds(self.num_steps)

    def cut(self, now: float) -> None:
        """End with the step that is computed now."""
        steps = range(1, self.num_steps)
        self.num_steps = 1 + bisect_left(steps, now - self.start, key=self.seconds)


class SimulatedReplica:
    """One engine, and a ``Place`` for placements.

    Attributes:
        load: sequences that run or wait here, or are on their way here.
        capacity: sequences that run at once.
        num_free_tokens: tokens that its KV cache has free pages for.
        segment: what it computes.
        busy_seconds: in which it computed.
        num_prefilled: tokens of prompts that it has computed, those computed again among them.
        num_preemptions: sequences that have given up their pages.
        num_queued_tokens: of prompts that it has yet to compute.
    """

    takes = True

    def __init__(
        self, name: str, engine: MeasuredEngine, times: StepTimes, block_size: int
    ) -> None:
        self.name, self.load, self.capacity = name, 0, engine.max_batch_size
        self._times, self._block_size = times, block_size
        self._max_num_tokens = engine.max_num_tokens
        self.cache = SimulatedCache(engine.kv_tokens)
        self.segment: _Segment | None = None
        self._running: list[SimulatedSequence] = []
        self._waiting: list[SimulatedSequence] = []
        self._pending: dict[Hashable, SimulatedSequence] = {}
        """Blocks that prefills are computing."""
        self.busy_seconds = 0.0
        self.num_prefilled = self.num_preemptions = self.num_queued_tokens = 0

    @property
    def num_free_tokens(self) -> int:
        """Tokens that its KV cache has pages for."""
        return self.cache.available

    @property
    def sequences(self) -> list[SimulatedSequence]:
        """Those that run or wait here."""
        return [*self._running, *self._waiting]

    def add(self, sequence: SimulatedSequence, now: float) -> None:
        """A sequence begins to wait here. It may be admitted after the current step."""
        is_first = not self._waiting
        sequence.num_queued = 0 if sequence.has_pages else self.num_uncomputed(sequence)
        self.num_queued_tokens += sequence.num_queued
        insort(self._waiting, sequence, key=_rank)
        if self.segment is not None and is_first and len(self._running) < self.capacity:
            self.segment.cut(now)

    def leave(self, sequence: SimulatedSequence, now: float) -> bool:
        """A sequence moves away: at once if it waits, which is returned; else after the current
        step, or that which ends its prefill.
        """
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            self._dequeue(sequence)
            return True
        assert self.segment is not None, "it is running"
        sequence.is_leaving = True
        self.segment.cut(now)
        return False

    def num_uncomputed(self, sequence: SimulatedSequence) -> int:
        """Tokens of a sequence that it would have to compute, one at least."""
        return max(1, sequence.num_tokens - self._shared(sequence)[1])

    def _dequeue(self, sequence: SimulatedSequence) -> None:
        self.num_queued_tokens -= sequence.num_queued
        sequence.num_queued = 0

    # ---- the plan of a step -------------------------------------------------------------------

    def plan(self, now: float) -> None:
        """Begin the next segment, if there is anything to compute."""
        assert self.segment is None, "a segment is in progress"
        decodes = self._decodes()
        budget = self._max_num_tokens - len(decodes)
        chunks: list[tuple[SimulatedSequence, int]] = []
        for sequence in self._running:
            if sequence.num_left and budget > 0:
                chunks.append((sequence, min(budget, sequence.num_left)))
                budget -= chunks[-1][1]
        for sequence in self._admitted(budget, len(decodes)):
            if sequence.num_left:
                chunks.append((sequence, min(budget, sequence.num_left)))
                budget -= chunks[-1][1]
            else:  # it has moved here
                decodes.append(sequence)
        if decodes or chunks:
            self.segment = self._segment(now, decodes, chunks)

    def _decodes(self) -> list[SimulatedSequence]:
        """The running sequences that decode, after as many preemptions as their tokens need."""
        while True:
            decodes = [sequence for sequence in self._running if not sequence.num_left]
            if self.cache.available >= len(decodes):
                return decodes
            self._preempt(self._running[-1])

    def _segment(
        self,
        now: float,
        decodes: list[SimulatedSequence],
        chunks: list[tuple[SimulatedSequence, int]],
    ) -> _Segment:
        context = sum(sequence.num_tokens for sequence in decodes)
        num_steps = 1
        if not chunks:
            fitting = self.cache.available // len(decodes)
            num_steps = max(1, min(fitting, *(s.num_remaining for s in decodes)))
        prefilled = sum(count for _, count in chunks)
        attended = sum(attended_tokens(s.num_tokens - s.num_left, count) for s, count in chunks)
        times, count = self._times, len(decodes)
        seconds = times.step(count, context, prefilled, attended)
        per_call = times.call(count), times.steps_per_call
        return _Segment(
            now, decodes, chunks, num_steps, seconds, times.per_context * count, *per_call
        )

    # ---- admission ----------------------------------------------------------------------------

    def _admitted(self, budget: int, num_reserved: int) -> list[SimulatedSequence]:
        """Admit waiting sequences in their order, but for those whose prefix is being computed:
        each of these keeps a place. ``num_reserved`` tokens stay free, for decodes.
        """
        admitted: list[SimulatedSequence] = []
        num_places = self.capacity - len(self._running)
        for sequence in self._waiting[: max(0, num_places)]:
            if budget <= 0:
                break
            if self._is_pending(sequence):
                continue
            num_reserved += sequence.has_pages
            if not self._admit(sequence, num_reserved):
                break
            budget -= sequence.num_left or 1
            admitted.append(sequence)
        for sequence in admitted:
            self._waiting.remove(sequence)
            insort(self._running, sequence, key=_rank)
        return admitted

    def _is_pending(self, sequence: SimulatedSequence) -> bool:
        num_hits, blocks = self._num_hits(sequence), sequence.blocks
        return num_hits < len(blocks) and blocks[num_hits] in self._pending

    def _num_hits(self, sequence: SimulatedSequence) -> int:
        holds = self.cache.holds
        return next(
            (n for n, b in enumerate(sequence.blocks) if not holds(b)), len(sequence.blocks)
        )

    def _admit(self, sequence: SimulatedSequence, num_reserved: int) -> bool:
        """Take the pages of a sequence, if there are enough."""
        entries, num_shared = self._shared(sequence)
        for entry in entries:
            self.cache.retain(entry)
        size = sequence.num_tokens - num_shared
        if size + num_reserved > self.cache.available and not self._running and num_shared:
            self._release(entries)  # the parent has more than what is shared: compute it
            entries, num_shared, size = [], 0, sequence.num_tokens
        if size + num_reserved > self.cache.available:
            self._release(entries)
            return False
        sequence.num_admissions += 1
        tail = ("tail", sequence.handle, sequence.num_admissions)
        self.cache.add(tail, size)
        sequence.entries = [*entries, tail]
        self._count(sequence, num_shared)
        return True

    def _count(self, sequence: SimulatedSequence, num_shared: int) -> None:
        """Note what an admitted sequence has to compute."""
        sequence.num_left = 0 if sequence.has_pages else sequence.num_tokens - num_shared
        if sequence.num_admissions == 1:
            sequence.num_cached = num_shared
        num_hits = self._num_hits(sequence)
        if num_hits * self._block_size == num_shared:  # else its parent has a part of a block
            for block in sequence.blocks[num_hits:]:
                if not self.cache.holds(block):
                    self._pending.setdefault(block, sequence)
        if sequence.has_pages:
            sequence.has_pages = False
            self._publish(sequence)

    def _shared(self, sequence: SimulatedSequence) -> tuple[list[Hashable], int]:
        """What a sequence adopts of the cache, and how many tokens of it."""
        num_hits, parent = self._num_hits(sequence), sequence.parent
        entries, num_tokens = [*sequence.blocks[:num_hits]], num_hits * self._block_size
        if parent is None or sequence.num_preemptions or not parent.entries:
            return entries, num_tokens
        num_kept = parent.request.input_length + min(sequence.request.fork_at, parent.num_output)
        num_kept = min(num_kept, sequence.request.input_length - 1)
        if num_kept > num_tokens and all(map(self.cache.holds, parent.entries)):
            return [*parent.entries], num_kept
        return entries, num_tokens

    # ---- the end of a segment -----------------------------------------------------------------

    def finish(self, now: float) -> list[SimulatedSequence]:
        """End the segment; returns the sequences that have ended, reached a stop, or leave."""
        segment = self.segment
        assert segment is not None, "a segment has ended"
        self.segment = None
        self.busy_seconds += segment.seconds(segment.num_steps)
        for sequence in segment.decodes:
            sequence.num_output += segment.num_steps
            self.cache.resize(sequence.entries[-1], segment.num_steps)
        for sequence, count in segment.chunks:
            sequence.num_left -= count
            self.num_prefilled += count
            if not sequence.num_left:
                self._prefilled(sequence, now)
        rows = [*segment.decodes, *(sequence for sequence, _ in segment.chunks)]
        return [sequence for sequence in rows if self._has_news(sequence, now)]

    def _prefilled(self, sequence: SimulatedSequence, now: float) -> None:
        """A prompt has been computed, and a token has been drawn."""
        self._dequeue(sequence)
        if sequence.request.output_length:
            sequence.num_output += 1
            if sequence.first_token is None:
                sequence.first_token = now
        self._publish(sequence)

    def _publish(self, sequence: SimulatedSequence) -> None:
        """The blocks that a sequence has computed, or brought, can be found by others."""
        tail = sequence.entries.pop()
        for block in sequence.blocks:
            if self._pending.get(block) is sequence:
                del self._pending[block]
                self.cache.resize(tail, -self._block_size)
                self.cache.add(block, self._block_size)
                sequence.entries.append(block)
        sequence.entries.append(tail)

    def _has_news(self, sequence: SimulatedSequence, now: float) -> bool:
        if sequence.num_left:
            return False
        if sequence.num_output >= sequence.request.output_length:
            sequence.ended = now
            self._remove(sequence)
            return True
        if sequence.is_leaving:
            self._remove(sequence)
            return True
        return bool(sequence.stops) and sequence.num_output >= sequence.stops[-1]

    def _remove(self, sequence: SimulatedSequence) -> None:
        """A sequence no longer runs here; what it has computed can be found until it is evicted."""
        self._running.remove(sequence)
        self._release(sequence.entries)

    def _preempt(self, sequence: SimulatedSequence) -> None:
        """A running sequence gives up its pages and waits."""
        self._running.remove(sequence)
        for block in [block for block, writer in self._pending.items() if writer is sequence]:
            del self._pending[block]
        tail = sequence.entries[-1]
        self._release(sequence.entries)
        if self.cache.is_idle(tail):
            self.cache.drop(tail)
        sequence.entries, sequence.num_left = [], 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        insort(self._waiting, sequence, key=_rank)

    def _release(self, entries: Sequence[Hashable]) -> None:
        """The last ones first, so that the beginnings of prefixes are evicted last."""
        for entry in reversed(entries):
            self.cache.release(entry)

    def check_integrity(self) -> None:
        """Assert that all is consistent."""
        self.cache.check_integrity()
        assert len(self._running) <= self.capacity
        assert all(sequence.entries for sequence in self._running)
        assert self.num_queued_tokens == sum(s.num_queued for s in self.sequences)


def _rank(sequence: SimulatedSequence) -> int:
    return sequence.handle
