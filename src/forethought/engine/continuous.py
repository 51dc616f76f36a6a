"""Continuous decode steps: several in one call, where nothing has to be decided between them.

Every running sequence decodes without a constraint or DRY, and nothing can be admitted; one that is
prefilled beside decodes decodes from the second step on. Drafts, if there are any, are chains of
one drafter, of a length that holds. The steps are made by
``StepRunner.advance`` and committed and counted as if they had been made one by one.
"""

from __future__ import annotations

import functools
import logging
import math
from array import array
from collections.abc import Sequence as List

from forethought.engine.drafting import Drafting
from forethought.engine.guarded_drafter import GuardedDrafter
from forethought.engine.packing import goes_on_plainly, sampled_token
from forethought.engine.scheduler import Plan, PlannedRow, Scheduler
from forethought.kv.table import TableView
from forethought.model import backends
from forethought.model.hidden_states import HiddenStateCache
from forethought.model.runner import ModelRunner
from forethought.outputs import EngineStats
from forethought.speculative.drafter import ChainSource
from forethought.speculative.step_runner import (
    Advance,
    DecodeRow,
    Interrupt,
    QueuedSteps,
    SingleSteps,
    StepRunner,
)

log = logging.getLogger(__name__)


@functools.cache
def step_runners(has_graphs: bool) -> tuple[type[StepRunner], ...]:
    """The first that can make a call's steps does; the last is the reference implementation."""
    rounds = (backends.cuda().step_runner(),) if has_graphs else ()
    return *backends.cpu().step_runners(), *rounds, QueuedSteps, SingleSteps


def step_runner(
    runner: ModelRunner,
    chains: ChainSource | None,
    rows: List[DecodeRow],
    caches: List[HiddenStateCache] = (),
) -> StepRunner | None:
    """What makes steps of these rows in one call, see :meth:`StepRunner.of`; None: single calls are
    no slower.
    """
    implementations = step_runners(runner.graphs is not None)
    runners = (
        implementation.of(runner, chains, rows, caches) for implementation in implementations
    )
    return next((candidate for candidate in runners if candidate is not None), None)


class ContinuousDecode:
    """Reserves slots for the steps of a plan, and makes them."""

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, drafting: Drafting, stats: EngineStats
    ) -> None:
        self._runner, self._scheduler = runner, scheduler
        self._drafting, self._stats = drafting, stats
        step_runners(runner.graphs is not None)  # imported before the first step

    def reserve(self, plan: Plan, num_steps: float, asks_drafters: bool) -> bool:
        """Reserve slots for up to ``num_steps`` steps in all, if the rows of a plan of one step can
        be decoded so; whether drafters, if they take part in this step, are to be asked after
        all.
        """
        scheduler, rows = self._scheduler, plan.rows
        may_admit = bool(scheduler.waiting) and not scheduler.is_full
        if num_steps == 1 or may_admit or plan.failures:
            return asks_drafters
        if len(rows) < len(scheduler.to_run) or not all(map(goes_on_plainly, rows)):
            return asks_drafters
        if not plan.decodes or (asks_drafters and self._drafting.num_offered < len(rows)):
            return asks_drafters  # prefills alone end a call; drafters are offered each row
        if any(row.num_nodes for row in rows):
            self._reserve_with_drafts(plan, num_steps)
            return asks_drafters
        drafters = self._drafting.chosen_by(rows)
        most = self._num_plain_steps(rows, drafters, asks_drafters)
        plan.num_steps = scheduler.reserve_decode_slots(plan, int(min(num_steps, most)))
        return asks_drafters and bool(drafters or plan.num_steps == 1)

    def _num_plain_steps(
        self, rows: List[PlannedRow], drafters: List[GuardedDrafter], asks_drafters: bool
    ) -> float:
        """How many steps of these rows, from this one on, are plain: no drafter and no policy is
        needed, or all policies that have just chosen no drafts hold to it.
        """
        if not self._can_advance(rows):
            return 1
        drafting = self._drafting
        if not drafting.drafters or all(map(_refuses_drafts, rows)):
            return math.inf
        if not asks_drafters:
            return 1 + drafting.num_to_skip
        if not all(self._holds(drafter, rows) for drafter in drafters):
            return 1
        return min((drafter.num_held_steps() for drafter in drafters), default=1)

    def _can_advance(self, rows: List[PlannedRow]) -> bool:
        """Whether plain steps of these rows can be one call: on a GPU only greedy ones of which no
        hidden states are stored.
        """
        caches = self._drafting.hidden_state_caches
        sampled = [row for row in rows if not row.sequence.takes_argmax][:1]
        prefills = [row for row in rows if row.num_tokens > 1][:1]
        if not (sampled or prefills or caches):
            return True
        special = list(map(self._row, [*sampled, *prefills] or rows[:1]))
        return step_runner(self._runner, None, special, caches) is not None

    def _reserve_with_drafts(self, plan: Plan, num_steps: float) -> None:
        """``reserve`` for rows of which some have draft slots. The step is single if a drafter
        cannot say whether its drafts follow each other.
        """
        try:
            num_steps = self._num_chain_steps(plan.rows, num_steps)
        except Exception:
            log.exception("steps with drafts stay single")
            return
        plan.num_steps = self._scheduler.reserve_decode_slots(plan, num_steps)

    def _num_chain_steps(self, rows: List[PlannedRow], num_steps: float) -> int:
        """How many steps with drafts of these rows, from this one on, may be one call."""
        drafter = self._only_drafter(rows)
        if drafter is None:
            return 1
        chains = drafter.drafter.chain_source
        if chains is None or not self._holds(drafter, rows):
            return 1
        if step_runner(self._runner, chains, list(map(self._row, rows))) is None:
            return 1
        drafting = [row for row in rows if row.num_nodes]
        held = drafter.num_held_steps()
        steps_in_reach = [_positions_left(chains, row) for row in drafting]
        num_steps = int(min(num_steps, held, *steps_in_reach))
        return num_steps if num_steps > 1 and self._can_follow(chains, drafting) else 1

    def _only_drafter(self, rows: List[PlannedRow]) -> GuardedDrafter | None:
        """The one that drafts for all of these rows; None if there are several, or another one
        reads hidden states, which only single steps store for all of them.
        """
        drafters = self._drafting.chosen_by(rows)
        if len(drafters) != 1:
            return None
        draft_caches = drafters[0].drafter.draft_caches
        stores_all = all(cache in draft_caches for cache in self._drafting.hidden_state_caches)
        return drafters[0] if stores_all else None

    def _holds(self, drafter: GuardedDrafter, rows: List[PlannedRow]) -> bool:
        """Whether single steps of a drafter would draft alike, whatever becomes of other rows.

        In single steps a length may depend on the batch, a draft may be cut to the rest of the
        step's tokens, and a user's rule or resource manager is asked.
        """
        rule, lengths = drafter.rule, set(map(drafter.schedule.length, range(1, len(rows) + 1)))
        is_lossy = rule is not None and any(rule.applies_to(row.sequence.params) for row in rows)
        is_cut = any(row.num_nodes < self._drafting.num_requested(row) for row in rows)
        return not (is_lossy or is_cut or len(lengths) > 1 or drafter.resource_manager is not None)

    def _can_follow(self, chains: ChainSource, rows: List[PlannedRow]) -> bool:
        requests = [self._drafting.request_of(row.sequence) for row in rows]
        for row, request in zip(rows, requests, strict=True):
            request.table = TableView(row.sequence.table)
        return all(map(chains.can_follow, requests))

    def advance(self, plan: Plan, interrupt: Interrupt) -> Advance | None:
        """Make the steps that there are slots for, unless ``interrupt`` ends the call earlier, and
        fill ``results`` of the rows. None: this failed, and the plan is of one step now.
        """
        rows = sorted(plan.rows, key=lambda row: (-row.num_nodes, -row.num_further))
        try:
            return self._advance(rows, plan.num_steps, interrupt)
        except Exception as error:
            log.warning("decode steps of %d rows failed: %r", len(rows), error)
            self._stats.failed_forwards += 1
            plan.make_single()
            return None

    def _advance(self, rows: List[PlannedRow], num_steps: int, interrupt: Interrupt) -> Advance:
        drafter = self._only_drafter(rows) if rows[0].num_nodes else None
        chains = None if drafter is None else drafter.drafter.chain_source
        assert (chains is None) == (not rows[0].num_nodes)
        decode_rows = list(map(self._row, rows))
        caches = self._drafting.hidden_state_caches if chains is None else ()
        steps = step_runner(self._runner, chains, decode_rows, caches)
        assert steps is not None
        advance = steps.advance(decode_rows, num_steps, interrupt)
        if drafter is not None:
            self._drafting.add_draft_seconds(drafter, advance.draft_seconds)
            self._stats.forward_seconds -= advance.draft_seconds  # of the call, timed as one
        for row, results in zip(rows, advance.results, strict=True):
            row.results, row.drafter = results, "" if drafter is None else drafter.name
        return advance

    def _row(self, row: PlannedRow) -> DecodeRow:
        sequence, eos_ids = row.sequence, self._runner.lm.eos_token_ids
        return DecodeRow(
            request=self._drafting.request_of(sequence),
            table=sequence.table,
            draft_len=row.num_nodes,
            num_left=sequence.num_wanted,
            ends=sequence.end_ids,
            pauses=sequence.stop_candidates or array("q"),
            sampled=None if sequence.takes_argmax else sampled_token(sequence, eos_ids, {}),
            num_known=row.num_tokens,
            adapter=sequence.adapter,
        )


def _refuses_drafts(row: PlannedRow) -> bool:
    settings = row.sequence.params.speculation
    return settings is not None and not settings.enabled


def _positions_left(chains: ChainSource, row: PlannedRow) -> float:
    """Steps in which a row's known and drafted tokens stay within the drafter's positions."""
    return (chains.max_positions + 1 - len(row.sequence.tokens)) // (1 + row.num_nodes)
