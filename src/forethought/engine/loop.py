"""The loop: schedule, draft, forward, verify, commit.

There is only this one. Every decode verifies a tree of drafted tokens, which without a drafter is
its root alone. What is raised on the way is the error of the request that causes it: a forward or a
verification that fails is made again with fewer rows, and once without the draft, before a request
fails. Knows nothing about handles, and of each part only that it does its part.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as List

from torch import Tensor

from forethought.engine import kinship, passing
from forethought.engine.commit import Commit, Event
from forethought.engine.ledger import Ledger
from forethought.engine.passing import Drawing
from forethought.engine.scheduler import Plan, PlannedRow, Scheduler
from forethought.engine.sequence import Sequence
from forethought.engine.speculation import Speculation
from forethought.engine.stats import EngineStats
from forethought.errors import LogitsError, RequestError
from forethought.kv.companion import Companion
from forethought.kv.storage import KvStorage
from forethought.kv.table import SlotMove
from forethought.model.runner import Runner
from forethought.speculative.draft import NO_DRAFT

log = logging.getLogger(__name__)


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
        self._speculation, self._ledger = speculation, ledger
        self._storages: list[KvStorage | Companion] = [runner.storage, *speculation.companions]
        self._eos_ids = runner.lm.eos_token_ids
        self._commit = Commit(scheduler, ledger, self._eos_ids, self._fail)
        self._events: list[Event] = []
        """What has happened and was not told yet."""

    def step(self) -> list[Event]:
        """One pass through the network for everyone.

        A sequence that cannot go on is closed, its pages are given back, and its event has the
        error. A step that is interrupted can be repeated: until it commits, it leaves all sequences
        as they were, and the events of what it has committed are told by the next one.
        """
        began = time.perf_counter()
        plan, forward_seconds = Plan(), 0.0
        try:
            self._plan(plan)
            self._prepare(plan)
            self._draft(plan)
            drafted = time.perf_counter()
            parts = self._forward(plan)
            forward_seconds = time.perf_counter() - drafted
            suspects = dict.fromkeys(s for part in parts for s in self._judge(plan, *part))
        except Exception as error:  # a mistake of our own
            plan.fail_all(error)
            suspects = {}
        except BaseException:
            plan.undo()
            raise
        for sequence in suspects:
            self._suspect(plan, sequence)
        moves: list[SlotMove] = []
        try:
            self._commit(plan, self._events, moves)
        finally:
            self._move_slots(moves)
        self._events += [self._fail(*failure) for failure in plan.failures]
        if plan.rows:
            self._observe(plan, time.perf_counter() - began)
            self._stats.steps += 1
            self._stats.forward_seconds += forward_seconds
            self._stats.step_seconds += time.perf_counter() - began
        events, self._events = self._events, []
        return events

    def _plan(self, plan: Plan) -> None:
        """Choose the rows. What cannot be told to be one sequence's error is everybody's."""
        try:
            for sequence in list(self._scheduler):
                kinship.attach_ready(sequence)
            self._scheduler.plan(plan, self._speculation.wishes)
        except Exception as error:
            log.exception("no step could be planned")
            plan.undo()
            plan.rows.clear()
            plan.failures = [
                (sequence, _unplanned(error))
                for sequence in (*self._scheduler.running, *self._scheduler.waiting)
            ]

    def _prepare(self, plan: Plan) -> None:
        """Copy what is copied on write; say what will be written anew."""
        try:
            for storage in self._storages:
                storage.copy_pages(plan.copies)
        except Exception:  # they compute those tokens in the next step instead, without a copy
            log.exception("pages could not be copied")
            for row in [row for row in plan.rows if row.copies]:
                plan.remove(row.sequence)
        for row in plan.rows:
            table = row.sequence.table
            for companion in self._speculation.companions:
                companion.invalidate(table, row.start, row.stop + row.nodes)
            if row.sequence.suspect:  # masked slots count if they are not finite
                end = len(table.pages) * table.page_size
                self._runner.storage.clear_slots(table.slots(row.start, end))

    def _draft(self, plan: Plan) -> None:
        """Have the drafters asked; what fails there costs drafts alone."""
        try:
            self._speculation.draft(plan)
        except Exception:
            log.exception("this step has no drafts")
            for row in plan.rows:
                row.draft, row.rule = NO_DRAFT, None
                plan.reserve(row, 0)

    def _forward(self, plan: Plan) -> list[tuple[List[PlannedRow], Tensor]]:
        """Compute the rows: those that were computed together, with their logits [R, V]."""
        readers = self._speculation.features

        def failed(row: PlannedRow, error: Exception) -> PlannedRow | None:
            if not len(row.draft):
                plan.fail(row.sequence, error)
                return None
            self._speculation.drop(row.sequence, error)
            row.draft, row.rule = NO_DRAFT, None
            plan.reserve(row, 0)
            return row

        def compute(rows: List[PlannedRow]) -> Tensor:
            try:
                return passing.forward(self._runner, rows, readers)
            except Exception as error:
                log.warning("a forward of %d rows failed: %r", len(rows), error)
                self._stats.failed_forwards += 1
                raise

        return passing.by_halves(list(plan.rows), compute, failed)

    def _judge(self, plan: Plan, rows: List[PlannedRow], logits: Tensor) -> list[Sequence]:
        """Fill what the rows, which were computed together, have of their logits [R, V].

        Returns:
            The sequences that want logits which are not finite.
        """

        def failed(drawing: Drawing, error: Exception) -> Drawing | None:
            if not len(drawing.candidate.draft):
                plan.fail(drawing.sequence, error)
                return None
            self._speculation.drop(drawing.sequence, error)
            return passing.without_draft(drawing)

        suspects = _known(rows, logits)
        wanted = passing.drawings(rows, self._eos_ids)
        judged = passing.by_halves(wanted, lambda some: passing.judge(logits, some), failed)
        for some, verdicts in judged:
            for drawing, verdict in zip(some, verdicts, strict=True):
                if verdict.tokens:
                    drawing.row.outcome.append((drawing.sequence, verdict))
                elif drawing.sequence is drawing.row.sequence:  # its twins wait for it
                    suspects.append(drawing.sequence)
        return suspects

    def _suspect(self, plan: Plan, sequence: Sequence) -> None:
        """Its logits are not finite: have it computed again, or give up if that has been done.

        What is not finite in the cache may be another's: attention adds up whole pages, in which
        the weight of what is masked is 0, and 0 times NaN is NaN.
        """
        if plan.has_failed(sequence):
            return
        plan.remove(sequence)
        self._ledger.withdraw(sequence)
        if sequence.suspect:
            plan.fail(sequence, _not_finite(sequence))
        sequence.suspect = True
        self._scheduler.restart(sequence)

    def _observe(self, plan: Plan, seconds: float) -> None:
        try:
            self._speculation.observe(plan, seconds)
        except Exception:
            log.exception("drafters were not told what became of a step")

    def _move_slots(self, moves: list[SlotMove]) -> None:
        for storage in self._storages:
            storage.move_slots(moves)

    def _fail(self, sequence: Sequence, error: Exception) -> Event:
        self._stats.failures += 1
        self._scheduler.close(sequence)
        return Event(sequence, [], error=error)


def _known(rows: List[PlannedRow], logits: Tensor) -> list[Sequence]:
    """Give the rows their logits [R, V]; returns whose prompt has some that are not finite."""
    begin, suspects = 0, []
    for row in rows:
        known = row.known_logits = logits[begin : begin + row.logits]
        begin += row.logits + len(row.draft)
        if row.sequence.wants_prompt_logprobs and not known.amax(-1).isfinite().all():
            suspects.append(row.sequence)
    return suspects


def _unplanned(error: Exception) -> RequestError:
    failure = RequestError(
        "no step of the engine could be planned",
        f"{type(error).__name__}: {error}",
        "All requests of that moment have failed with it; later ones are served",
    )
    failure.__cause__ = error
    return failure


def _not_finite(sequence: Sequence) -> LogitsError:
    return LogitsError(
        "the model's logits are not finite",
        f"behind {len(sequence.tokens)} tokens they are NaN, +inf or all -inf, and were so again "
        "when all of it was computed a second time",
        "Check the model's weights; in float16, try bfloat16 or float32",
    )
