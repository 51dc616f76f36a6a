import logging
import math
from itertools import pairwise

import pytest

from forethought.speculative.length.gate import (
    FIRST_PAUSE,
    LAST_PAUSE,
    PROBE_DEPTH,
    PROBE_DRAFTS,
    PROBE_REQUESTS,
    AcceptanceGate,
)
from forethought.speculative.length.policy import CappedRequest, SkippedSteps, StepRecord

FULL = 5


def requests(count):
    return [CappedRequest(number, FULL) for number in range(count)]


def record(drafts, rows):
    return StepRecord(drafts, rows, rows, 100 * rows, 0.01, 0.0)


def step(guard, accept, rows=1):
    """One step in which each draft of depth k has ``accept(k)`` tokens accepted; its lengths."""
    lengths = guard.lengths(requests(rows), rows)
    drafts = [(number, k, accept(k)) for number, k in enumerate(lengths) if k]
    guard.observe(record(drafts, rows))
    return lengths


def all_of_it(depth):
    return depth


def nothing(depth):
    return 0


def test_it_stays_open_while_the_rate_is_at_the_threshold():
    guard = AcceptanceGate(window=3, threshold=0.8)
    for _ in range(20):
        assert step(guard, lambda depth: 4) == [FULL]
    assert guard.rate == pytest.approx(0.8)


def test_it_closes_only_with_a_full_window():
    guard = AcceptanceGate(window=3, threshold=0.3)
    assert [step(guard, nothing) for _ in range(4)] == [[FULL], [FULL], [FULL], [0]]


def test_drafts_that_left_the_window_do_not_count():
    guard = AcceptanceGate(window=3, threshold=0.7)
    for _ in range(10):
        step(guard, all_of_it)
    step(guard, nothing)
    assert not guard.open  # two thirds


def test_every_draft_of_a_step_counts():
    guard = AcceptanceGate(window=6, threshold=0.5)
    step(guard, nothing, rows=6)
    assert step(guard, nothing, rows=6) == [0] * 6


def test_open_it_holds_for_any_number_of_steps_and_closes_behind_a_call():
    guard = AcceptanceGate(window=6, threshold=0.5)
    assert guard.hold() == math.inf
    lengths = guard.lengths(requests(2), 2)
    drafts = [(row, length, 0) for row, length in enumerate(lengths)]
    guard.observe(StepRecord(drafts * 2 + [(0, 0, 0)] * 2, 2, 12, 200, 0.01, 0.0, num_steps=3))
    assert guard.open, "of the drafts of a call only those that came count"
    guard.observe(StepRecord(drafts * 2, 2, 12, 200, 0.01, 0.0, num_steps=2))
    assert not guard.open
    assert guard.hold() == guard.skip() > 1, "plain steps are one call up to the next probes"


def test_steps_without_drafts_change_nothing_while_it_is_open():
    guard = AcceptanceGate(window=1, threshold=1.0)
    for _ in range(100):
        guard.observe(record([], 4))
    assert guard.open
    assert guard.rate is None


def test_closed_it_probes_with_a_few_short_drafts():
    guard = AcceptanceGate(window=4, threshold=0.5)
    step(guard, nothing, rows=16)
    seen = [step(guard, nothing, rows=16) for _ in range(FIRST_PAUSE + 20)]
    probes = [lengths for lengths in seen if any(lengths)]
    assert probes
    for lengths in probes:
        assert sum(map(bool, lengths)) <= PROBE_REQUESTS
        assert max(lengths) == PROBE_DEPTH


def test_closed_it_skips_the_steps_before_its_probes_and_none_while_it_is_open():
    guard = AcceptanceGate(window=4, threshold=0.5)
    assert guard.skip() == 0
    step(guard, nothing, rows=4)
    assert not guard.open
    for _ in range(6):
        count = guard.skip()
        if count:
            guard.skipped(SkippedSteps(num_steps=count))
        assert any(step(guard, nothing, rows=4)), "it probes"
        while not guard.skip():
            step(guard, nothing, rows=4)
    assert guard.skip() == LAST_PAUSE


def test_probes_take_turns_among_the_requests():
    guard = AcceptanceGate(window=4, threshold=0.5)
    probed = set()
    for _ in range(400):
        lengths = step(guard, nothing, rows=16)
        probed |= {place for place, depth in enumerate(lengths) if 0 < depth < FULL}
    assert probed == set(range(16))


def test_it_opens_again_when_acceptance_recovers():
    guard = AcceptanceGate(window=4, threshold=0.5)
    for _ in range(50):
        step(guard, nothing)
    assert not guard.open
    waited = 0
    while not guard.open:
        step(guard, all_of_it)
        waited += 1
    assert waited <= 8 * FIRST_PAUSE + PROBE_DRAFTS
    assert step(guard, all_of_it) == [FULL]


def test_it_opens_and_closes_as_often_as_acceptance_changes():
    guard = AcceptanceGate(window=4, threshold=0.5)
    states = []
    for accept in (all_of_it, nothing) * 3:
        for _ in range(1500):
            step(guard, accept)
        states.append(guard.open)
    assert states == [True, False] * 3


def test_pauses_between_probes_double_up_to_the_longest():
    guard = AcceptanceGate(window=4, threshold=0.5)
    steps = [any(step(guard, nothing)) for _ in range(4000)][4:]
    begins = [n for n in range(1, len(steps)) if steps[n] and not steps[n - 1]]
    gaps = [later - earlier for earlier, later in pairwise(begins)]
    assert gaps[0] < gaps[1] < gaps[2]
    assert gaps[-1] == gaps[-2]
    assert LAST_PAUSE <= gaps[-1] <= LAST_PAUSE + PROBE_DRAFTS


def test_a_drafter_without_drafts_is_not_asked_in_every_step():
    guard = AcceptanceGate(window=2, threshold=0.5)
    step(guard, nothing, rows=2)
    asked = 0
    for _ in range(2000):
        asked += any(guard.lengths(requests(2), 2))
        guard.observe(record([], 2))
    assert 0 < asked <= 12 * PROBE_DRAFTS


def test_short_probes_are_judged_by_what_full_drafts_would_be():
    # Of each token behind accepted ones 3 in 5 are accepted: 0.6 of drafts of one, but 0.28 of
    # drafts of five. A gate that compared short with long would open and close for ever.
    guard = AcceptanceGate(window=5, threshold=0.4)
    pattern = [1, 0, 2, 1, 0, 3, 0, 1, 5, 0]
    opened = turn = 0
    for _ in range(3000):
        lengths = guard.lengths(requests(1), 1)
        drafts = [(0, k, min(pattern[turn % 10], k)) for k in lengths if k]
        turn += len(drafts)
        was = guard.open
        guard.observe(record(drafts, 1))
        opened += guard.open and not was
    assert not guard.open
    assert opened == 0


def test_tokens_behind_a_rejected_one_are_not_counted_as_tested():
    """All or nothing of two: 2 of 3 tested tokens are accepted, 0.35 of full drafts; not 2 of 4."""
    guard = AcceptanceGate(window=4, threshold=0.25)
    for _ in range(4):
        step(guard, nothing)
    assert not guard.open
    turn = 0
    while not guard.open and turn < 40:
        lengths = guard.lengths(requests(1), 1)
        drafts = [(0, k, k * (turn % 2)) for k in lengths if k]
        turn += len(drafts)
        guard.observe(record(drafts, 1))
    assert turn == 4  # the first round of probes


def test_it_says_why_it_decided(caplog):
    guard = AcceptanceGate(window=2, threshold=0.5)
    with caplog.at_level(logging.DEBUG, logger="forethought.speculative.length.gate"):
        step(guard, all_of_it)
        assert guard.reason == "acceptance: open, 1.00 of the drafted tokens are accepted"
        step(guard, nothing)
        step(guard, nothing)
        assert guard.reason == (
            "acceptance: closed, 0.00 of the drafted tokens are accepted (limit 0.50)"
        )
        while not guard.open:
            step(guard, all_of_it)
    assert "open, 1.00 of the tokens of full drafts are expected (limit 0.55)" in guard.reason
    assert [r.message.split(",")[0] for r in caplog.records] == [
        "acceptance: closed",
        "acceptance: open",
    ]
