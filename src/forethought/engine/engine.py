"""The engine: sequences of token ids, each a handle that its holder can fork while it runs.

A sequence can be forked, extended, rewound, resumed and aborted with its KV kept. Prompts and
params are checked in ``base.py`` against the model and the limits, before anything is computed.
What a step does is written in ``step.py``. An engine is used by one thread at a time.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Ids
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from typing_extensions import override

from forethought.config.engine import KvEventsConfig
from forethought.config.sampling import SamplingParams
from forethought.engine import snapshot
from forethought.engine.adapters import AdapterTable
from forethought.engine.base import FRESH, BaseEngine, Begun, Capabilities
from forethought.engine.drafting import Drafting
from forethought.engine.embedding import MAX_FORWARD_TOKENS, EmbeddingPass, Pooling
from forethought.engine.guarded_drafter import DrafterEntry
from forethought.engine.scheduler import Limits, Scheduler
from forethought.engine.sequence import (
    OtherSequence,
    Sequence,
    Status,
    attach_ready_dependents,
    attach_to_parent,
    depend_on,
    detach_from_parent,
    num_common,
)
from forethought.engine.snapshot import SequenceSnapshot
from forethought.engine.step import Event, Step, publish
from forethought.errors import CapacityError, UsageError
from forethought.kv.events import EventLog, KvEventPublisher
from forethought.kv.pool import PagePool, PrefixIndex
from forethought.kv.table import PageTable
from forethought.model.adapter import Adapter
from forethought.model.device import computing_threads, torch_alone
from forethought.model.runner import ModelRunner
from forethought.model.sampling import Constraint, Constraints, SequenceBreakers
from forethought.model.token_adapters import PlacedAdapter
from forethought.outputs import EngineLoad, EngineStats, FinishReason, SpeculationMetrics


class Engine(BaseEngine):
    """Runs sequences.

    Args:
        limits: of a step and of a sequence, which the KV cache may limit further.
        reuse: whether full pages are found again by later prompts with the same prefix.
        seed: where the seeds of unseeded requests come from; None: the operating system.
        drafters: in the order in which they are asked.
        num_threads: that a step computes with; None: as torch has them.
        kv_events: where what the prefix index gains and loses is published; None: nowhere.

    Raises:
        DependencyError: ``kv_events`` needs packages that are not installed.
        ParameterError: ``kv_events`` names an endpoint that cannot be opened.

    Attributes:
        num_decode_steps: that are made at most before the tokens are returned.
        num_streamed_decode_steps: the same with a streamed sequence, of which somebody waits for
            each token, and on a GPU while ``ends_with_rows``.
        adapters: that requests may choose.
    """

    def __init__(
        self,
        runner: ModelRunner,
        limits: Limits,
        *,
        reuse: bool = True,
        seed: int | None = None,
        drafters: Ids[DrafterEntry] = (),
        num_threads: int | None = None,
        kv_events: KvEventsConfig | None = None,
    ) -> None:
        self.num_threads = num_threads
        self.num_decode_steps = self.num_streamed_decode_steps = 1
        self.runner, self.stats = runner, EngineStats(forward_path=runner.lm.path.kind)
        self.adapters = AdapterTable()
        self.pool = PagePool(runner.storage.num_pages, runner.storage.page_size)
        self.index = PrefixIndex(self.pool, reuse)
        self._capacity = self.pool.num_pages * self.pool.page_size
        self._max_context = limits.max_length
        super().__init__(replace(limits, max_length=min(limits.max_length, self._capacity)), seed)
        self.scheduler = Scheduler(self.pool, self.index, self.limits, self.stats)
        self.speculation = Drafting(drafters, self.stats, runner.lm.vocab_size, runner.lm.device)
        paths = {self.stats.forward_path, *self.stats.draft_paths.values()}
        self._is_native = paths == {"native"}
        self.scheduler.on_end = self.speculation.release
        self.scheduler.on_resume = runner.storage.resume
        self._step = Step(runner, self.scheduler, self.speculation, self.index, self.stats)
        self.interrupt = self._step.interrupt
        self._ids, self._arrivals = itertools.count(), itertools.count()
        self._publisher: KvEventPublisher | None = None
        if kv_events is not None:
            self.index.recorder = EventLog(self.pool.page_size, kv_events.max_queue_size)
            self._publisher = KvEventPublisher(self.index.recorder, kv_events)

    @property
    @override
    def capabilities(self) -> Capabilities:
        return Capabilities(
            self.runner.lm.vocab_size,
            self._max_context,
            self._capacity,
            self.adapters.names,
            self.speculation.names,
            self.runner.lm.hidden_size,
        )

    @property
    @override
    def load(self) -> EngineLoad:
        return EngineLoad(
            len(self.scheduler.running),
            len(self.scheduler.waiting),
            self.pool.in_use / self.pool.num_pages,
        )

    @override
    def check_running(self) -> None:
        self.runner.check_running()

    @override
    def check_concurrent(self) -> None:
        self.runner.lm.check_concurrent()

    @property
    @override
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.to_run)

    @override
    def step(self, max_steps: float = math.inf) -> list[Event]:
        """One forward for all that run, and what it did to each sequence; see ``Step.run``. Where
        all are decodes it is up to ``num_decode_steps`` forwards, or ``max_steps``.

        Raises EngineStopped if a rank of tensor parallelism has ended.
        """
        running = self.scheduler.running
        is_queued = self.runner.lm.device.type != "cpu"  # no interrupt reaches steps on a GPU
        is_streamed = any(sequence.is_streamed for sequence in running)
        is_streamed |= self.ends_with_rows and is_queued
        num_steps = self.num_streamed_decode_steps if is_streamed else self.num_decode_steps
        self._step.num_decode_steps = min(num_steps, max_steps)
        self.interrupt.with_rows = self.ends_with_rows or bool(self.scheduler.waiting)
        self.runner.check_running()
        with self._computing():
            events = self._step.run()
        self.runner.check_running()  # else all requests of the step fail, with the engine
        return events

    def _computing(self) -> AbstractContextManager[None]:
        """Have the engine's number of threads compute: those of torch where it computes layers."""
        num_threads = self.num_threads or torch.get_num_threads()
        if self._is_native:
            return torch_alone(num_threads)
        if num_threads == torch.get_num_threads():
            return nullcontext()
        return computing_threads(num_threads)

    @override
    def embedding_pass(
        self,
        rows: Ids[Ids[int]],
        pooling: Pooling,
        adapter: str | None = None,
        dimensions: int | None = None,
    ) -> EmbeddingPass:
        placed = self.adapters.chosen(adapter, None)
        max_tokens = min(MAX_FORWARD_TOKENS, self.limits.max_num_tokens)
        return EmbeddingPass(self.runner, rows, pooling, max_tokens, placed, dimensions)

    @override
    def advance(self, embedding_pass: EmbeddingPass) -> None:
        self.runner.check_running()
        with self._computing():
            self.stats.embedded += embedding_pass.advance()

    # ---- sequences --------------------------------------------------------------------------

    def add(
        self,
        prompt_ids: Ids[int],
        params: SamplingParams,
        *,
        keep: bool = False,
        constraints: Constraints | None = None,
        breakers: SequenceBreakers | None = None,
    ) -> list[Sequence]:
        """Check a prompt and its params, and ``start`` them."""
        self.check_prompt(prompt_ids, params)
        return self.start(prompt_ids, params, keep=keep, constraints=constraints, breakers=breakers)

    @override
    def start(
        self,
        prompt_ids: Ids[int],
        params: SamplingParams,
        *,
        keep: bool = False,
        constraints: Constraints | None = None,
        breakers: SequenceBreakers | None = None,
    ) -> list[Sequence]:
        """Start ``params.n`` generations from one prompt, which is prefilled once.

        Args:
            prompt_ids: the prompt, which has passed ``check_prompt`` with these params.
            keep: park each sequence at its end instead of closing it.
            constraints: of the shape or thinking budget, if and only if the params ask for one
                (ParameterError).
            breakers: the ``dry_sequence_breakers`` of the params in tokens, without which DRY is
                refused if there are any (ParameterError).
        """
        self._check_constraints(params, constraints)
        self._check_breakers(params, breakers)
        adapter = self.adapters.chosen(params.adapter, None)
        sample_constraints = constraints(prompt_ids, params.n) if constraints else [None] * params.n
        arrival, seed = next(self._arrivals), self._seed(params)
        samples: list[Sequence] = []
        for index, constraint in enumerate(sample_constraints):
            sample = self._new(list(prompt_ids), keep)
            sample.index, sample.adapter, sample.breakers = index, adapter, breakers
            self._start(sample, params, arrival, seed, constraint)
            if samples:
                depend_on(sample, samples[0], len(prompt_ids))
            samples.append(sample)
        return samples

    def order_by_prefix(self, requests: Ids[list[Sequence]]) -> None:
        """Exchange the arrivals of requests that came together so that those with a common prefix
        follow each other. Requests that share no page keep their order.

        ``requests`` has the samples of each, as ``start`` has returned them, in the order of
        arrival.
        """
        groups: list[list[list[Sequence]]] = []
        for samples in sorted(requests, key=lambda samples: samples[0].tokens):
            last = groups[-1][-1] if groups else []
            if last and num_common([last[0], samples[0]]) >= self.pool.page_size:
                groups[-1].append(samples)
            else:
                groups.append([samples])
        groups.sort(key=lambda group: min(samples[0].arrival for samples in group))
        arrivals = sorted(samples[0].arrival for samples in requests)
        for arrival, samples in zip(arrivals, itertools.chain.from_iterable(groups), strict=True):
            for sample in samples:
                sample.arrival = arrival

    @override
    def open(self, prompt_ids: Ids[int]) -> Sequence:
        """A parked sequence of a prompt that has passed ``check_prompt``. Nothing is computed
        yet.
        """
        return self._new(list(prompt_ids), keep=True)

    @override
    def resume(
        self,
        sequence: Sequence,
        params: SamplingParams,
        *,
        constraints: Constraints | None = None,
        breakers: SequenceBreakers | None = None,
        begun: Begun = FRESH,
    ) -> None:
        """Generate from a parked sequence. ``params.n`` must be 1: fork for more.

        A shape that the params ask for is that of the new output alone. ``prompt_logprobs`` are
        those of the tokens that ``extend`` has added since it generated last. With another adapter
        than before, all tokens are computed again. A generation that has ``begun`` elsewhere goes
        on as it would have there: its output so far counts for limits, penalties and shape.

        Raises:
            UsageError: it is not parked.
            ParameterError, ContextLengthError, CapacityError: as ``check_prompt``.
        """
        self.check_resume(sequence, params)
        self._check_constraints(params, constraints)
        self._check_breakers(params, breakers)
        prompt_ids = sequence.tokens[: len(sequence.tokens) - begun.num_tokens]
        constraint = constraints(prompt_ids, 1)[0] if constraints else None
        sequence.index, sequence.breakers = begun.index, breakers
        self._choose_adapter(sequence, params)
        if sequence.num_uncomputed == 0:  # the last token's logits are needed once more
            sequence.table.rewind(len(sequence.tokens) - 1)
        if params.prompt_logprobs is not None:
            self._score_extension(sequence)
        arrival, seed = next(self._arrivals), self._seed(params)
        self._start(sequence, params, arrival, seed, constraint, begun.num_tokens)
        parent = sequence.parent
        has_more = len(sequence.tokens) > sequence.num_shared
        if parent is not None and has_more and parent.num_computed == sequence.num_shared - 1:
            attach_to_parent(sequence)  # to wait for one token is not worth a step
        if sequence.num_computed == 0 and sequence.parent is None:
            writing = [other for other in sequence.others if _writes_for(other, sequence)]
            first = next((other for other in writing if other.sequence.parent is None), None)
            if first is not None:  # what they begin with is computed once, if both read the same
                apart = {*sequence.others} ^ {*first.sequence.others}
                begins = [first.num_common, *(other.num_common for other in apart)]
                depend_on(sequence, first.sequence, min(begins))

    @override
    def fork(self, sequence: Sequence, length: int | None = None) -> Sequence:
        """A parked copy of the first ``length`` tokens (all by default), sharing their pages.

        A running sequence is not disturbed; KV that it has yet to compute is shared once it has.
        """
        length = self._fork_length(sequence, length)
        child = self._new(sequence.tokens[:length], keep=True)
        child.others, child.adapter = _read_before(sequence, length), sequence.adapter
        depend_on(child, sequence, length)
        return child

    @override
    def attend_to(self, sequence: Sequence, others: Mapping[Sequence, int]) -> None:
        """Let a sequence read the tokens of others, while they are written, in place.

        It then sees them after the tokens that both begin with, before the rest of its own. A token
        of another sequence is seen from the step after the one that stored its keys and values;
        while another one is computed again, what it has stored by then. The sequence's own ones
        depend on them: its pages are not published, it is not saved, and has no drafts; if it has
        to be computed again, that is with what the others have written by then. It ends with
        ``LENGTH`` where the context cannot hold all tokens, and fails if one of the others is
        closed, or parked before its tokens are stored.

        Args:
            sequence: a live one, with a token of its own after each common beginning.
            others: live ones, and how many tokens each has in common with it. They may attend to it
                as well. None: it attends to itself alone again.

        Raises:
            UsageError: one of them is closed or of another engine, does not begin with these
                tokens, or the sequence has no token of its own after them.
            ModelError: the model's attention cannot; see ``CausalLM.check_concurrent``.
        """
        self.check_concurrent()
        if not {sequence, *others} <= {*self.scheduler} or sequence in others:
            raise UsageError(
                "these sequences cannot be attended to",
                "one of them is closed, of another engine, or the sequence itself",
                "Give other live sequences of the same engine",
            )
        for other, count in others.items():
            if count >= len(sequence.tokens) or sequence.tokens[:count] != other.tokens[:count]:
                raise UsageError(
                    "a sequence that attends to another one begins alike, and goes on differently",
                    f"they do not both begin with {count} tokens, or it has no further one",
                    "Extend it first, as with the name of its writer",
                )
        readable = [OtherSequence(other, count) for other, count in others.items()]
        sequence.others = tuple(sorted(readable, key=lambda other: other.num_common))

    @override
    def capture(self, sequence: Sequence, token_ids: Ids[int], start: int = 0) -> SequenceSnapshot:
        """A copy of a sequence that begins like ``token_ids``, or is their beginning: these ids,
        and their KV so far, from the token ``start`` on. KV that it has yet to compute, or whose
        pages it has given up, is not in it.

        Raises UsageError if its KV depends on other sequences (``attend_to``).
        """
        if sequence.table.private_from is not None:
            raise UsageError(
                "the sequence cannot be saved",
                "it attends to other sequences, and its keys and values depend on them",
                "Save another sequence with its text",
            )
        caches = self.speculation.hidden_state_caches
        saved = snapshot.capture(sequence.table, token_ids, self.runner.storage, caches, start)
        salt, digest = sequence.params.cache_salt, sequence.adapter_digest
        if sequence.table.digests and sequence.table.root == self.index.root(salt, digest):
            saved = replace(saved, cache_salt=salt)
        if sequence.adapter is None:
            return saved
        return replace(saved, adapter=sequence.adapter.name, adapter_digest=digest)

    @override
    def restore(self, saved: SequenceSnapshot) -> Sequence:
        """A parked sequence with the tokens and the KV of a snapshot; nothing is computed.

        The draft KV caches lag: drafters compute what they lack before their next draft.

        Raises:
            ParameterError: ids outside the vocabulary.
            ContextLengthError: the context does not hold it.
            CapacityError: the KV cache does not, or has too few free pages now.
            SnapshotError: it was computed with an adapter whose weights are not here.
        """
        adapter = self.adapters.of_snapshot(saved.adapter, saved.adapter_digest)
        sequence = self._new([], keep=True)
        sequence.adapter = adapter
        if saved.cache_salt is not None:
            sequence.params = SamplingParams(cache_salt=saved.cache_salt)
            digests = self.index.digests(
                saved.token_ids[: saved.stop], saved.cache_salt, sequence.adapter_digest
            )
            sequence.table.adopt(self.index.find(digests))
        try:
            self.append_snapshot(sequence, saved)
        except BaseException:
            self.close(sequence)
            raise
        return sequence

    @override
    def append_snapshot(self, sequence: Sequence, saved: SequenceSnapshot) -> None:
        """Append the tokens that a snapshot has beyond those of a parked sequence, with which it
        begins, and their KV. If the sequence has lost pages before ``saved.start``, all that it
        lacks is computed when it is resumed.

        Raises as ``restore``; nothing has changed then.
        """
        self._expect_parked(sequence, "continued")
        self._check_ids("the snapshot", saved.token_ids)
        self._check_length(len(saved.token_ids))
        table, first = sequence.table, sequence.table.length
        num_new = saved.stop - first if saved.start <= first < saved.stop else 0
        needed = table.pages_needed(num_new)
        if needed > self.pool.available:
            raise CapacityError(
                f"the KV cache has no place for a snapshot of {num_new} tokens now",
                f"it takes {needed} pages, and {self.pool.available} are free",
                "Close sessions, wait for requests to end, or raise kv_cache_config.max_tokens",
            )
        if num_new:
            copies = table.append(num_new)
            assert not copies, "it shares full pages alone"
            caches = self.speculation.draft_caches
            snapshot.write(saved, table, self.runner.storage, caches, first)
        sequence.tokens[:] = saved.token_ids
        sequence.prompt_length = len(sequence.tokens)
        sequence.num_ever_computed = max(sequence.num_ever_computed, table.length)
        num_restored = table.length - (first if saved.start else 0)
        sequence.usage.cached += num_restored
        self.stats.cached += num_restored
        if saved.cache_salt is not None and self.index.enabled:
            publish(self.index, sequence)

    @override
    def rewind(self, sequence: Sequence, length: int) -> None:
        """Forget the tokens of a parked sequence from ``length`` on."""
        self._check_rewind(sequence, length)
        attach_ready_dependents(sequence, all_of_them=True)
        num_sampled = bisect_left(sequence.sampled_positions, length)
        self._count_discarded(sequence, len(sequence.sampled_positions) - num_sampled)
        del sequence.sampled_positions[num_sampled:]
        del sequence.tokens[length:]
        sequence.table.rewind(min(length, sequence.table.length))
        sequence.prompt_length = min(sequence.prompt_length, length)
        sequence.num_ever_computed = min(sequence.num_ever_computed, length)
        sequence.num_shared = min(sequence.num_shared, length)
        sequence.others = _read_before(sequence, length)
        if sequence.extended_from is not None and sequence.extended_from >= length:
            sequence.extended_from = None

    @override
    def abort(self, sequence: Sequence) -> None:
        """End a generation now, without a further event. Parked and closed ones stay so."""
        if sequence.active:
            self.scheduler.finish(sequence, FinishReason.ABORT)

    @override
    def cut(self, sequence: Sequence, length: int) -> None:
        """End a generation of which the first ``length`` tokens of the sequence are wanted: a step
        may append several, and the caller's reason to stop may come before the last.
        """
        self.abort(sequence)
        if sequence.status is Status.PARKED:
            self.rewind(sequence, length)
        else:
            self._count_discarded(sequence, len(sequence.tokens) - length)

    @override
    def close(self, sequence: Sequence) -> None:
        """Give back all its pages; the sequence is of no further use. Closing twice is fine."""
        self.scheduler.close(sequence)

    @override
    def shutdown(self) -> None:
        """Let drafters and runner release what they hold: the engine ends."""
        self.speculation.shutdown()
        self.runner.shutdown()
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def check_integrity(self) -> None:
        """Assert that every page is held by exactly the tables that list it."""
        self.pool.check_integrity()
        self.index.check_integrity()
        held = Counter(page for sequence in self.scheduler for page in sequence.table.pages)
        assert held == Counter({page: n for page, n in enumerate(self.pool.refs) if n})
        for sequence in self.scheduler:
            assert sequence.num_computed <= len(sequence.tokens)
            assert all(child.parent is sequence for child in sequence.dependents)

    @override
    def place_adapter(self, adapter: Adapter) -> PlacedAdapter:
        return self.runner.lm.place(adapter)

    @override
    def add_adapter(self, adapter: PlacedAdapter) -> None:
        self.adapters.add(adapter)

    @override
    def remove_adapter(self, name: str) -> None:
        self.adapters.remove(name, self.scheduler)

    # ---- shared --------------------------------------------------------------------

    def _new(self, tokens: list[int], keep: bool) -> Sequence:
        sequence = Sequence(
            id=next(self._ids),
            tokens=tokens,
            prompt_length=len(tokens),
            params=SamplingParams(),
            table=PageTable(self.pool),
            keep=keep,
        )
        self.scheduler.place(sequence, Status.PARKED)
        return sequence

    def _count_discarded(self, sequence: Sequence, num_tokens: int) -> None:
        sequence.usage.discarded += num_tokens
        self.stats.discarded += num_tokens

    def _start(
        self,
        sequence: Sequence,
        params: SamplingParams,
        arrival: int,
        seed: int,
        constraint: Constraint | None,
        num_begun: int = 0,
    ) -> None:
        prompt_length = len(sequence.tokens) - num_begun
        num_remaining = self.limits.max_length - prompt_length
        sequence.params, sequence.arrival, sequence.seed = params, arrival, seed
        sequence.prompt_length = prompt_length
        max_tokens = (
            num_remaining if params.max_tokens is None else min(num_remaining, params.max_tokens)
        )
        sequence.limit = prompt_length + max_tokens
        sequence.table.longest = sequence.limit
        sequence.end_ids = params.end_ids(self.runner.lm.eos_token_ids)
        sequence.finish_reason = sequence.stop_reason = None
        sequence.constraint, sequence.had_nonfinite_logits = constraint, False
        sequence.stop_candidates = None
        sequence.takes_argmax = params.takes_argmax and constraint is None
        sequence.extended_from, sequence.is_streamed, sequence.hold = None, False, math.inf
        sequence.metrics, sequence.drafted_steps = SpeculationMetrics(), []
        self.speculation.begin(sequence)
        self.scheduler.place(sequence, Status.WAITING)

    def _choose_adapter(self, sequence: Sequence, params: SamplingParams) -> None:
        """Give a parked sequence the adapter of the params; KV of another one is dropped."""
        adapter = self.adapters.chosen(params.adapter, sequence.adapter)
        if adapter is sequence.adapter:
            return
        assert not sequence.dependents, "what a parked sequence has is shared at once"
        detach_from_parent(sequence)
        sequence.table.rewind(0)
        sequence.adapter = adapter

    @staticmethod
    def _score_extension(sequence: Sequence) -> None:
        """Have the next step compute the logits that score the extension."""
        first = sequence.extended_from
        assert first is not None, "check_resume has seen an extension"
        sequence.prompt_logprobs = [None] * first
        sequence.table.rewind(min(sequence.table.length, first - 1))


def _writes_for(other: OtherSequence, reader: Sequence) -> bool:
    """Whether it computes what both begin with, alike."""
    return other.sequence.active and other.sequence.adapter is reader.adapter


def _read_before(sequence: Sequence, length: int) -> tuple[OtherSequence, ...]:
    """What the first ``length`` tokens of a sequence attend to."""
    return tuple(other for other in sequence.others if other.num_common < length)
