"""The engine: sequences of token ids that can be held on to while it carries them along.

A sequence is a handle. It can be forked while it runs, extended, rewound, resumed and aborted, with
its KV kept. What a step does stands in ``loop.py``. The engine belongs to one thread and knows
nothing about text, clients or time.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence as Ids
from dataclasses import replace

from forethought.config.sampling import SamplingParams
from forethought.engine.accounting import Accounting
from forethought.engine.admission import Admission
from forethought.engine.drafting import DrafterEntry, Drafting
from forethought.engine.scheduler import Limits, Scheduler
from forethought.engine.sequence import Sequence, Status, attach_ready_dependents, depend_on
from forethought.engine.step import Event, Step
from forethought.errors import UsageError
from forethought.kv.pool import PagePool
from forethought.kv.prefix import PrefixIndex
from forethought.kv.table import PageTable
from forethought.model.runner import ModelRunner
from forethought.model.sampling import Constraint, Constraints
from forethought.outputs import EngineStats, FinishReason, SpeculationMetrics


class Engine:
    """Runs sequences.

    Args:
        runner: the network and the tensors of its KV cache.
        limits: of a step and of a sequence, which the KV cache may limit further.
        reuse: whether full pages are found again by later prompts with the same prefix.
        seed: where the seeds of unseeded requests come from; None: the operating system.
        drafters: who guesses ahead, in the order of asking.
    """

    def __init__(
        self,
        runner: ModelRunner,
        limits: Limits,
        *,
        reuse: bool = True,
        seed: int | None = None,
        drafters: Ids[DrafterEntry] = (),
    ) -> None:
        self.runner, self.stats = runner, EngineStats()
        self.pool = PagePool(runner.storage.num_pages, runner.storage.page_size)
        self.index = PrefixIndex(self.pool, reuse)
        capacity = self.pool.num_pages * self.pool.page_size
        self.limits = replace(limits, max_length=min(limits.max_length, capacity))
        self.speculation = Drafting(drafters, self.stats, runner.lm.vocab_size)
        names = self.speculation.names
        self.admission = Admission(limits, runner.lm.vocab_size, capacity, names)
        self.scheduler = Scheduler(self.pool, self.index, self.limits, self.stats)
        self.scheduler.on_end = self.speculation.release
        self._ledger = Accounting(self.stats, self.index, self.pool.page_size)
        self.loop = Step(runner, self.scheduler, self.speculation, self._ledger, self.stats)
        self._seeds = random.Random(seed)
        self._ids, self._arrivals = itertools.count(), itertools.count()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self) -> list[Event]:
        """One pass through the network for everyone; see ``Loop.step``."""
        return self.loop.step()

    # ---- the handles ------------------------------------------------------------------------

    def add(
        self,
        prompt_ids: Ids[int],
        params: SamplingParams,
        *,
        keep: bool = False,
        constraints: Constraints | None = None,
    ) -> list[Sequence]:
        """Start ``params.n`` generations from one prompt, which is prefilled once.

        Args:
            prompt_ids: the prompt.
            params: how to draw and when to stop.
            keep: park each sequence at its end instead of closing it.
            constraints: of the shape that ``params.guided_decoding`` asks for, if it does.

        Raises:
            ParameterError, ContextLengthError, CapacityError: see ``Admission.check``.
        """
        self.admission.check(prompt_ids, params)
        self.admission.check_constraints(params, constraints)
        made = [constraints() if constraints is not None else None for _ in range(params.n)]
        arrival, seed = next(self._arrivals), self._seed(params)
        samples: list[Sequence] = []
        for index, constraint in enumerate(made):
            sample = self._new(list(prompt_ids), keep)
            sample.index = index
            self._start(sample, params, arrival, seed, constraint)
            if samples:
                depend_on(sample, samples[0], len(prompt_ids))
            samples.append(sample)
        return samples

    def open(self, prompt_ids: Ids[int]) -> Sequence:
        """A parked sequence that holds the prompt; nothing is computed before ``resume``."""
        self.admission.check(prompt_ids, SamplingParams())
        return self._new(list(prompt_ids), keep=True)

    def check_resume(self, sequence: Sequence, params: SamplingParams) -> None:
        """Raise what ``resume`` would."""
        self._expect_parked(sequence, "resumed")
        self.admission.check_resume(sequence.tokens, params)

    def resume(
        self,
        sequence: Sequence,
        params: SamplingParams,
        *,
        constraints: Constraints | None = None,
    ) -> None:
        """Generate from a parked sequence. ``params.n`` must be 1: fork for more.

        A shape that the params ask for is that of the new output alone.

        Raises:
            UsageError: it is not parked.
            ParameterError, ContextLengthError, CapacityError: see ``Admission.check``.
        """
        self.check_resume(sequence, params)
        self.admission.check_constraints(params, constraints)
        constraint = constraints() if constraints is not None else None
        if sequence.num_uncomputed == 0:  # the last token's logits are needed once more
            sequence.table.rewind(len(sequence.tokens) - 1)
        self._start(sequence, params, next(self._arrivals), self._seed(params), constraint)

    def extend(self, sequence: Sequence, token_ids: Ids[int]) -> None:
        """Put tokens behind a parked sequence; they are computed when it is resumed."""
        self._expect_parked(sequence, "extended")
        self.admission.check_extension(sequence.tokens, token_ids)
        sequence.tokens.extend(token_ids)
        sequence.prompt_length = len(sequence.tokens)

    def fork(self, sequence: Sequence, length: int | None = None) -> Sequence:
        """A parked copy of the first ``length`` tokens (all by default), sharing their pages.

        A running sequence is not disturbed; KV that it has yet to compute is shared once it has.
        """
        length = len(sequence.tokens) if length is None else length
        if sequence.status is Status.CLOSED or not 0 < length <= len(sequence.tokens):
            raise UsageError(
                "cannot fork this sequence",
                f"it is {sequence.status.value} with {len(sequence.tokens)} tokens, not {length}",
                "Fork a live sequence at one of its own lengths",
            )
        child = self._new(sequence.tokens[:length], keep=True)
        depend_on(child, sequence, length)
        return child

    def rewind(self, sequence: Sequence, length: int) -> None:
        """Forget the tokens of a parked sequence from ``length`` on."""
        self._expect_parked(sequence, "rewound")
        if not 0 < length <= len(sequence.tokens):
            raise UsageError(
                "cannot rewind this sequence",
                f"length {length} is not between 1 and its {len(sequence.tokens)} tokens",
                "Rewind to a length that it has had",
            )
        attach_ready_dependents(sequence, all_of_them=True)
        kept = bisect_left(sequence.drawn, length)
        self._ledger.count(sequence, discarded=len(sequence.drawn) - kept)
        del sequence.drawn[kept:]
        del sequence.tokens[length:]
        sequence.table.rewind(min(length, sequence.table.length))
        sequence.prompt_length = min(sequence.prompt_length, length)
        sequence.peak = min(sequence.peak, length)
        sequence.shared = min(sequence.shared, length)

    def abort(self, sequence: Sequence) -> None:
        """End a generation now; no further event tells of it. Idle and closed ones stay so."""
        if sequence.active:
            self.scheduler.finish(sequence, FinishReason.ABORT)

    def cut(self, sequence: Sequence, length: int) -> None:
        """End a generation of which the first ``length`` tokens of the sequence are wanted.

        A step may draw several tokens, and the caller's reason to stop may lie before the last.
        """
        self.abort(sequence)
        if sequence.status is Status.PARKED:
            self.rewind(sequence, length)
        else:
            self._ledger.count(sequence, discarded=len(sequence.tokens) - length)

    def close(self, sequence: Sequence) -> None:
        """Give back all its pages; the sequence is of no further use. Closing twice is fine."""
        self.scheduler.close(sequence)

    def shutdown(self) -> None:
        """Tell the drafters that the engine is going away."""
        self.speculation.shutdown()

    def check_integrity(self) -> None:
        """Assert that every page is held by exactly the tables that list it."""
        self.pool.check_integrity()
        self.index.check_integrity()
        held = Counter(page for sequence in self.scheduler for page in sequence.table.pages)
        assert held == Counter({page: n for page, n in enumerate(self.pool.refs) if n})
        for sequence in self.scheduler:
            assert sequence.num_computed <= len(sequence.tokens)
            assert all(child.parent is sequence for child in sequence.dependents)

    # ---- what they share --------------------------------------------------------------------

    def _new(self, tokens: list[int], keep: bool) -> Sequence:
        """A parked sequence without KV."""
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

    def _seed(self, params: SamplingParams) -> int:
        return self._seeds.getrandbits(64) if params.seed is None else params.seed

    def _start(
        self,
        sequence: Sequence,
        params: SamplingParams,
        arrival: int,
        seed: int,
        constraint: Constraint | None,
    ) -> None:
        """Let a parked sequence generate."""
        room = self.limits.max_length - len(sequence.tokens)
        sequence.params, sequence.arrival, sequence.seed = params, arrival, seed
        sequence.prompt_length = len(sequence.tokens)
        sequence.limit = len(sequence.tokens) + min(room, params.max_tokens or room)
        sequence.finish_reason = sequence.stop_reason = None
        sequence.constraint, sequence.suspect = constraint, False
        sequence.metrics = SpeculationMetrics()
        self.scheduler.place(sequence, Status.WAITING)

    @staticmethod
    def _expect_parked(sequence: Sequence, done: str) -> None:
        if sequence.status is not Status.PARKED:
            raise UsageError(
                f"the sequence cannot be {done}",
                f"it is {sequence.status.value}",
                "Wait for its generation to end, or abort it; closed ones are gone",
            )
