"""The loop: schedule, draft, forward, verify, commit.

There is only this one. Every decode verifies a tree of drafted tokens, which without a drafter is
its root alone. Knows nothing about handles, and of each part only that it does its part.
"""

from __future__ import annotations

import time

from forethought.engine import kinship, passing
from forethought.engine.commit import Commit, Event
from forethought.engine.ledger import Ledger
from forethought.engine.scheduler import Plan, Scheduler
from forethought.engine.sequence import Sequence
from forethought.engine.speculation import Speculation
from forethought.engine.stats import EngineStats
from forethought.kv.companion import Companion
from forethought.kv.storage import KvStorage
from forethought.kv.table import SlotMove
from forethought.model.runner import Runner


class Loop:
    """Carries sequences through the network, step by step.

    Args:
        runner: the network and the tensors of its KV cache.
        scheduler: who runs.
        speculation: who guesses.
        ledger: who counts.
        stats: the engine's totals.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        speculation: Speculation,
        ledger: Ledger,
        stats: EngineStats,
    ) -> None:
        self._runner, self._scheduler, self._stats = runner, scheduler, stats
        self._speculation = speculation
        self._storages: list[KvStorage | Companion] = [runner.storage, *speculation.companions]
        self._eos_ids = runner.lm.eos_token_ids
        self._commit = Commit(scheduler, ledger, self._eos_ids, self._fail)

    def step(self) -> list[Event]:
        """One pass through the network for everyone.

        A step that fails ends the sequences that were in it, with their pages given back; one that
        is interrupted leaves all as they were.
        """
        began = time.perf_counter()
        plan, outcomes = Plan(), None
        try:
            for sequence in list(self._scheduler):
                kinship.attach_ready(sequence)
            self._scheduler.plan(plan, self._speculation.wishes)
            if not plan.rows:
                return []
            self._prepare(plan)
            self._speculation.draft(plan)
            drafted = time.perf_counter()
            logits = passing.forward(self._runner, plan, self._speculation.features)
            forward_seconds = time.perf_counter() - drafted
            outcomes = passing.judge(plan, logits, self._eos_ids)
        except Exception as error:
            failure = error
        finally:
            if outcomes is None:
                self._undo(plan)
        if outcomes is None:
            rows = [row.sequence for row in plan.rows]
            return [self._fail(each, failure) for each in rows or self._unplanned()]
        events, moves = self._commit(plan, logits, outcomes)
        self._move_slots(moves)
        self._speculation.observe(plan, outcomes, time.perf_counter() - began)
        self._stats.steps += 1
        self._stats.forward_seconds += forward_seconds
        self._stats.step_seconds += time.perf_counter() - began
        return events

    def _prepare(self, plan: Plan) -> None:
        """Copy what is copied on write; say what will be written anew."""
        for storage in self._storages:
            storage.copy_pages(plan.copies)
        for companion in self._speculation.companions:
            for row in plan.rows:
                companion.invalidate(row.sequence.table, row.start, row.stop + row.nodes)

    def _move_slots(self, moves: list[SlotMove]) -> None:
        for storage in self._storages:
            storage.move_slots(moves)

    def _undo(self, plan: Plan) -> None:
        """What was not committed was never stored; a page that was to be copied may be empty."""
        size = self._runner.storage.page_size
        for row in plan.rows:
            copying = row.copies is None or row.copies
            row.sequence.table.rewind(row.start // size * size if copying else row.start)

    def _unplanned(self) -> list[Sequence]:
        """Who cannot go on when not even a plan can be made; nothing else could be tried."""
        return [*self._scheduler.running, *self._scheduler.waiting]

    def _fail(self, sequence: Sequence, error: Exception) -> Event:
        self._stats.failures += 1
        self._scheduler.close(sequence)
        return Event(sequence, [], error=error)
