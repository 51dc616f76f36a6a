"""The scheduler alone: plans without torch, within its budgets, in the promised order."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

from forethought.config.sampling import SamplingParams
from forethought.engine.scheduler import (
    PROMPT_LOGPROB_ROWS,
    Limits,
    Plan,
    PlannedRow,
    Scheduler,
)
from forethought.engine.sequence import Sequence, Status
from forethought.kv.pool import PagePool, PrefixIndex
from forethought.kv.table import PageTable
from forethought.outputs import EngineStats, FinishReason


class Queue:
    """A scheduler, and a stand-in for the rest of the engine that draws token 0 for ever."""

    def __init__(self, pages: int = 32, page_size: int = 4, **limits: Any) -> None:
        settings = {"max_batch_size": 4, "max_num_tokens": 16, "max_length": 64, **limits}
        self.pool = PagePool(pages, page_size)
        self.scheduler = Scheduler(
            self.pool, PrefixIndex(self.pool), Limits(**settings), EngineStats()
        )
        self.numbers = count()
        self.requested_nodes: Callable[[list[PlannedRow]], list[int]] = lambda rows: [0] * len(rows)

    def add(self, length: int, new: int = 4, priority: int = 0) -> Sequence:
        number = next(self.numbers)
        sequence = Sequence(
            id=number,
            tokens=[number + 1] * length,
            prompt_length=length,
            params=SamplingParams(priority=priority),
            table=PageTable(self.pool),
            arrival=number,
            limit=length + new,
        )
        self.scheduler.place(sequence, Status.WAITING)
        return sequence

    def plan(self) -> Plan:
        """Plan a step in the order in which ``Step`` does."""
        plan = Plan()
        self.scheduler.plan_decodes(plan)
        rows = plan.decodes
        self.scheduler.reserve_draft_slots(plan, rows, self.requested_nodes(rows))
        self.scheduler.plan_prefills(plan)
        return plan

    def step(self) -> dict[int, int]:
        """Plan and pretend; tokens computed per sequence id."""
        plan = self.plan()
        assert plan.num_tokens == sum(row.num_tokens + row.num_nodes for row in plan.rows)
        assert plan.num_tokens <= self.scheduler.limits.max_num_tokens
        assert len(self.scheduler.running) <= self.scheduler.limits.max_batch_size
        for row in plan.rows:
            row.sequence.table.rewind(row.stop)  # no draft was accepted
            if row.is_last:
                row.sequence.tokens.append(0)
                if len(row.sequence.tokens) >= row.sequence.limit:
                    self.scheduler.finish(row.sequence, FinishReason.LENGTH)
        self.pool.check_integrity()
        return {row.sequence.id: row.num_tokens for row in plan.rows}


def test_the_scheduler_and_the_pages_import_no_torch() -> None:
    code = "import sys, forethought.engine.scheduler, forethought.kv.table; 'torch' in sys.modules"
    checked = f"{code} and sys.exit(1)"
    assert subprocess.run([sys.executable, "-c", checked], check=False).returncode == 0


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(-2, 2)), min_size=2, max_size=8),
    st.integers(0, 6),
    st.integers(14, 20),
)
def test_a_plan_counts_its_tokens_whatever_is_reserved_given_back_and_taken_away(
    arrivals: list[tuple[int, int]], requested: int, pages: int
) -> None:
    queue = Queue(pages=pages)
    queue.requested_nodes = lambda rows: [requested] * len(rows)
    for length, priority in arrivals:
        queue.add(length, new=12, priority=priority)
        queue.step()  # which looks at what the plan says of itself
    while any(sequence.active for sequence in queue.scheduler):
        assert queue.step()


def test_decodes_come_before_prefills_and_the_rest_of_the_budget_is_for_chunks() -> None:
    queue = Queue()
    for _ in range(3):
        queue.add(3, new=9)
    queue.add(40)
    assert queue.step() == {0: 3, 1: 3, 2: 3, 3: 7}
    assert queue.step() == {0: 1, 1: 1, 2: 1, 3: 13}
    assert queue.step() == {0: 1, 1: 1, 2: 1, 3: 13}
    assert queue.step() == {0: 1, 1: 1, 2: 1, 3: 7}


def test_no_sequence_overtakes_the_head_of_the_queue() -> None:
    queue = Queue(pages=8, page_size=4, max_num_tokens=32)
    queue.add(16, new=16)
    big = queue.add(24, new=2)
    small = queue.add(2, new=2)
    queue.step()
    assert big.status is Status.WAITING
    assert small.status is Status.WAITING


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(-1, 1)), min_size=1
    ),
    pages=st.integers(16, 40),
    budget=st.integers(4, 40),
)
def test_everyone_finishes_within_the_budgets_and_no_page_is_lost(
    requests: list[tuple[int, int, int]], pages: int, budget: int
) -> None:
    queue = Queue(pages, 4, max_num_tokens=budget)
    sequences = [queue.add(length, new, priority) for length, new, priority in requests]
    for _ in range(3000):
        if not queue.scheduler.running and not queue.scheduler.waiting:
            break
        assert queue.step(), "a sequence waits and none runs"
    assert all(sequence.finish_reason is FinishReason.LENGTH for sequence in sequences)
    assert queue.pool.in_use == 0


def test_an_urgent_sequence_replaces_a_running_one_which_keeps_its_pages() -> None:
    queue = Queue(max_batch_size=2)
    first, second = queue.add(3, new=8), queue.add(3, new=8)
    queue.step()
    urgent = queue.add(2, new=2, priority=-1)
    stored = second.table.length
    assert set(queue.step()) == {first.id, urgent.id}
    assert second.status is Status.WAITING
    assert second.table.length == stored
    while urgent.status is Status.RUNNING:
        queue.step()
    assert queue.step() == {first.id: 1, second.id: 1}  # goes on where it was
    assert queue.scheduler._stats.preemptions == queue.scheduler._stats.dropped == 0


def test_an_urgent_sequence_runs_although_paused_ones_hold_the_pages_that_it_needs() -> None:
    queue = Queue(pages=9, page_size=4, max_batch_size=1, max_num_tokens=8)
    patient = queue.add(24, priority=1)
    queue.step()
    queue.step()
    urgent = queue.add(24, priority=0)
    assert urgent.table.pages_needed(24) > queue.pool.available
    assert queue.step() == {urgent.id: 8}
    while patient.active:
        assert queue.step(), "a sequence waits and none runs"


def test_a_batch_is_filled_up_to_its_limit_before_a_sequence_pauses() -> None:
    queue = Queue(max_batch_size=2)
    first = queue.add(3)
    queue.step()
    urgent = queue.add(2, priority=-1)
    assert set(queue.step()) == {first.id, urgent.id}


def test_an_earlier_arrival_alone_replaces_no_sequence() -> None:
    queue = Queue(max_batch_size=1)
    decoding: list[list[int]] = []

    def requested_nodes(rows: list[PlannedRow]) -> list[int]:
        decoding.append([row.sequence.id for row in rows])
        return [0] * len(rows)

    queue.requested_nodes = requested_nodes
    early = queue.add(3, new=3, priority=1)
    queue.step()
    late = queue.add(3, priority=1)
    assert set(queue.step()) == {early.id}
    assert late.status is Status.WAITING
    assert decoding == [[], [early.id]]  # it has not even lost its turn


def test_drafts_take_at_most_half_of_what_decodes_leave_to_prefills() -> None:
    queue = Queue()
    queue.requested_nodes = lambda rows: [100] * len(rows)
    early = queue.add(3, new=20)
    queue.step()
    late = queue.add(60, new=3)
    # Of 16 tokens 1 is decoded, and 7 of the 15 left are for its draft: while the prompt waits,
    # and while it is being computed.
    assert [queue.step(), queue.step()] == [{early.id: 1, late.id: 8}] * 2


def test_drafts_fill_the_last_page_where_no_other_is_free() -> None:
    queue = Queue(pages=2, page_size=8)
    queue.requested_nodes = lambda rows: [5] * len(rows)
    queue.add(9, new=5)
    queue.step()
    plan = queue.plan()
    assert queue.pool.available == 0
    assert [row.num_nodes for row in plan.rows] == [5]


def test_logits_of_few_prompt_tokens_are_wanted_in_one_step() -> None:
    queue = Queue(pages=200, max_num_tokens=600, max_length=700)
    sequence = queue.add(600)
    sequence.params = SamplingParams(prompt_logprobs=1)
    assert queue.step() == {sequence.id: PROMPT_LOGPROB_ROWS}
    assert PROMPT_LOGPROB_ROWS < 600


def test_drafts_take_all_that_is_left_where_no_prompt_is_computed() -> None:
    queue = Queue()
    queue.requested_nodes = lambda rows: [100] * len(rows)
    queue.add(3, new=40)
    queue.step()
    plan = queue.plan()
    assert plan.num_tokens == 16
