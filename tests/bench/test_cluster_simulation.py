"""Replicas simulated under a trace: outcomes computed by hand, and what holds for any trace."""

import random

import pytest

from forethought.bench.cluster_simulation import (
    POLICIES,
    ClusterSettings,
    ClusterSimulation,
    simulate,
    simulation_table,
)
from forethought.bench.simulated_replica import SimulatedReplica, SimulatedSequence
from forethought.bench.step_times import MeasuredEngine, MeasuredStep, StepTimes
from forethought.errors import ParameterError, UsageError
from simulated_traces import BLOCK, engine, random_trace, request, times


def run(requests, policy="placement", num_replicas=1, **fields):
    """The result, once what remains of the simulation is consistent."""
    settings = ClusterSettings(engine(**fields), num_replicas, BLOCK)
    simulation = ClusterSimulation(settings, requests, policy)
    result = simulation.run()
    for replica in result.replicas:
        replica.check_integrity()
        assert replica.cache.num_used == replica.load == len(replica.sequences) == 0
    assert [s.num_output for s in result.sequences] == [r.output_length for r in requests]
    assert all(s.ended >= s.arrived >= s.request.at for s in result.sequences)
    return result


# ---- by hand -----------------------------------------------------------------------------------


def test_one_request_takes_a_step_per_token():
    result = run([request(0, 2.0)])
    assert times(result) == [(3.0, 6.0)]
    row = result.to_dict({})
    assert (row["ttft_p50_ms"], row["tpot_p50_ms"], row["seconds"]) == (1000.0, 1000.0, 6.0)
    assert row["output_tokens_per_second"] == pytest.approx(4 / 6, abs=0.1)
    assert result.utilisation == pytest.approx(4 / 6)


def test_a_later_request_joins_at_the_next_step_and_shares_the_steps():
    # the first one computes from 0 to 4; the second one arrives in its second step
    assert times(run([request(0, 0.0), request(1, 1.5)])) == [(1.0, 4.0), (3.0, 6.0)]


def test_requests_at_one_moment_are_one_step():
    assert times(run([request(n, 1.0, limit=n + 1) for n in range(3)])) == [
        (2.0, 2.0),
        (2.0, 3.0),
        (2.0, 4.0),
    ]


def test_a_long_prompt_is_computed_in_chunks_beside_decodes():
    # 64 tokens per step, one of them for the decode: 150 = 63 + 63 + 24
    requests = [request(0, 0.0, limit=9), request(1, 0.5, length=150, limit=1)]
    assert times(run(requests)) == [(1.0, 9.0), (4.0, 4.0)]
    # each prefilled token takes 10 ms more
    assert times(run(requests, per_token=10.0)) == [(1.08, 10.58), (5.58, 5.58)]


def test_context_makes_steps_longer_by_the_tokens_it_has():
    # steps of 1 s and 0.1 s per stored token: 8 of the prompt and one more in each step
    result = run([request(0, 0.0)], per_context=100.0)
    assert times(result) == [(1.0, pytest.approx(1 + 1.9 + 2.0 + 2.1))]


def test_calls_of_several_decodes_take_their_seconds_once_each():
    # 1 s per step and 0.4 s per call of up to four of them; the prefill is one
    counts = [(n, n * context, 0, 0) for n in (1, 2) for context in (1, 9)]
    counted = [(*count, calls) for count in counts for calls in (1, 0.25)]
    counted += [(0, 0, length, 0, 1) for length in (1, 100)]
    steps = tuple(MeasuredStep(*count, 1000 + 400 * count[-1]) for count in counted)
    model = MeasuredEngine(8, 64, 4096, 1000, steps, steps_per_call=4)
    settings = ClusterSettings(model, 1, BLOCK)
    result = simulate(settings, [request(0, 0.0, limit=7)], "placement")
    assert times(result) == [(1.4, pytest.approx(1.4 + 6 + 2 * 0.4))]
    # a second one ends the first call with the step in which it arrives, its third
    result = simulate(settings, [request(0, 0.0, limit=7), request(1, 4.5, limit=1)], "placement")
    assert times(result)[0] == (1.4, pytest.approx(1.4 + 6 + 3 * 0.4))


def test_a_full_batch_has_others_wait():
    requests = [request(n, 0.0) for n in range(3)]
    result = run(requests, max_batch_size=2)
    assert times(result) == [(1.0, 4.0), (1.0, 4.0), (5.0, 8.0)]


def test_a_shared_prefix_is_computed_once_and_the_other_prompt_waits_for_it():
    # 64 tokens per step: 33 of the first; the second one waits and has 1 of 33 left
    requests = [request(n, 0.0, 33, 2, [1, 2]) for n in range(2)]
    result = run(requests, per_token=10.0)
    assert [s.num_cached for s in result.sequences] == [0, 32]
    assert times(result) == [(1.33, 2.34), (2.34, 3.34)]
    assert result.hit_share == 32 / 66


def test_a_fork_begins_with_the_tokens_of_its_parent_and_computes_the_rest():
    parent = request(0, 0.0, 20, 10, [1])
    fork = request(1, 0.5, 30, 2, [1, 7], fork_of=0, fork_at=3)
    result = run([parent, fork])
    assert result.sequences[1].arrived == pytest.approx(3.0)  # the parent has three tokens
    assert result.sequences[1].num_cached == 23
    assert result.sequences[0].key == result.sequences[1].key
    assert times(result) == [(1.0, 10.0), (5.0, 6.0)]  # the next step had begun


def test_what_does_not_fit_waits_and_what_grows_too_large_is_computed_again():
    requests = [request(0, 0.0, 40, 20), request(1, 0.0, 50, 10)]
    result = run(requests, kv_tokens=64)  # one at a time
    assert times(result) == [(1.0, 20.0), (21.0, 30.0)]
    result = run([request(0, 0.0, 20, 20), request(1, 0.0, 20, 20)], kv_tokens=64, base=10.0)
    assert sum(replica.num_preemptions for replica in result.replicas) == 1
    assert result.sequences[0].ended < result.sequences[1].ended


def test_blocks_are_evicted_where_others_need_the_room():
    first, other = request(0, 0.0, 33, 1, [1, 2]), request(1, 10.0, 49, 1, [5, 6, 7])
    again = request(2, 20.0, 33, 1, [1, 2])
    assert run([first, other, again], kv_tokens=128).sequences[2].num_cached == 32
    # two tokens too many: the last token and the second block go, the beginning stays
    assert run([first, other, again], kv_tokens=80).sequences[2].num_cached == 16
    assert run([first, other, again], kv_tokens=50).sequences[2].num_cached == 0


def test_what_has_moved_waits_until_its_pages_and_the_next_token_fit():
    model = engine(kv_tokens=40)
    replica = SimulatedReplica("replica-0", model, StepTimes.fit(model), BLOCK)
    here = SimulatedSequence(0, request(0, 0.0, 20, 5), ())
    moved = SimulatedSequence(1, request(1, 0.0, 10, 12), (), num_output=9, has_pages=True)
    replica.add(here, 0.0)
    replica.plan(0.0)
    replica.finish(1.0)
    replica.add(moved, 1.0)  # 19 tokens, and both need one more: 20 are free
    replica.plan(1.0)
    assert replica.segment.decodes == [here]
    while replica.segment is not None:
        now = replica.segment.end
        replica.finish(now)
        replica.check_integrity()
        replica.plan(now)
    assert (here.ended, moved.ended) == (pytest.approx(5.0), pytest.approx(8.0))
    assert replica.num_prefilled == 20


# ---- several replicas --------------------------------------------------------------------------


def test_round_robin_takes_turns_and_placement_keeps_a_session_together():
    sessions = [0, 1, 1, 0, 0, 1, 1, 0]
    requests = [
        request(number, 10.0 * number, 33, 1, [session, 2 + session], session=f"{session}")
        for number, session in enumerate(sessions)
    ]
    by_turns, placed = (run(requests, policy, 2) for policy in ("round_robin", "placement"))
    assert [s.link.name[-1] for s in by_turns.sequences] == ["0", "1"] * 4
    assert len({(s.key, s.link) for s in placed.sequences}) == 2
    assert placed.hit_share > by_turns.hit_share


def test_a_full_replica_spills_over_and_rebalancing_moves_what_generates():
    # one session of eight long generations, and many places elsewhere
    requests = [request(n, 0.1 * n, 8, 200, session="s") for n in range(8)]
    slow = {"per_context": 1.0, "base": 10.0}
    stay, move = (run(requests, policy, 2, **slow) for policy in ("placement", "rebalancing"))
    assert len({s.link for s in stay.sequences}) == 1
    assert move.num_moved == 4
    assert move.seconds < 0.8 * stay.seconds
    spilled = run(requests, "placement", 2, **slow, max_batch_size=4)
    assert [sum(s.link is r for s in spilled.sequences) for r in spilled.replicas] == [4, 4]


def test_the_cost_of_a_move_is_its_bytes_over_the_bandwidth():
    requests = [request(n, 0.1 * n, 8, 200, session="s") for n in range(8)]
    model = engine(per_context=1.0, base=10.0)
    fast, slow, never = (
        simulate(ClusterSettings(model, 2, BLOCK, bandwidth), requests, "rebalancing")
        for bandwidth in (1e9, 1e4, 1.0)
    )
    assert fast.num_moved
    assert fast.seconds < slow.seconds
    assert never.num_moved == 0  # all have ended before they are copied


def test_on_a_skewed_trace_with_shared_prefixes_policies_rank_by_what_they_know():
    sessions = [0] * 6 + [*range(1, 7)]
    source, at, requests = random.Random(3), 0.0, []
    for number in range(150):
        at += source.expovariate(8.0)
        session = source.choice(sessions)
        ids = [100 * session + block for block in range(20)]
        requests.append(request(number, at, 20 * BLOCK + 9, 40, ids, session=str(session)))
    model = {"base": 10.0, "per_token": 2.0, "per_context": 0.02}
    turns, placed, moved = (run(requests, policy, 4, **model) for policy in POLICIES)
    assert placed.hit_share > turns.hit_share
    ttft = [sum(result.latencies()["ttft"]) for result in (turns, placed)]
    assert ttft[1] < ttft[0]
    assert moved.num_moved
    assert moved.seconds <= placed.seconds * 1.02
    e2e = [sum(result.latencies()["e2e"]) for result in (placed, moved)]
    assert e2e[1] < e2e[0] * 1.02


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("limits", [{}, {"kv_tokens": 320, "max_batch_size": 4}])
def test_every_request_of_a_trace_ends_with_its_tokens(policy, limits):
    for seed in range(4):
        requests = random_trace(seed, session=lambda number: f"{number % 5}")
        for num_replicas in (1, 3):
            run(requests, policy, num_replicas, base=50.0, per_context=0.05, **limits)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_trace_gives_the_same_figures(policy):
    requests = random_trace(7)
    rows = [run(requests, policy, 3, base=50.0).to_dict({"ttft": 0.2}) for _ in range(2)]
    assert rows[0] == rows[1]


def test_more_replicas_never_make_independent_requests_slower():
    source = random.Random(5)
    requests = [request(n, 0.01 * n, 40, source.randrange(5, 40)) for n in range(200)]
    seconds = [
        run(requests, "placement", num, base=50.0, per_context=0.05).seconds
        for num in (1, 2, 4, 8, 16)
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_the_table_has_a_line_per_result_and_goodput_counts_what_meets_the_targets():
    result = run([request(0, 0.0), request(1, 0.0, limit=1)])
    assert result.goodput({"ttft": 1.5}) == pytest.approx(2 / 4)
    # of one token there is no time per further token
    assert result.goodput({"ttft": 1.5, "tpot": 0.5}) == pytest.approx(1 / 4)
    assert result.goodput({"e2el": 0.5}) == 0.0
    table = simulation_table([result], {"ttft": 1.5}).splitlines()
    assert len(table) == 3
    assert table[-1].split()[:2] == ["1", "placement"]


# ---- what cannot be ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_replicas", [0, -1, 10_001])
def test_a_number_of_replicas_out_of_range_is_refused(num_replicas):
    with pytest.raises(ParameterError, match="replicas"):
        ClusterSettings(engine(), num_replicas)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (request(1, 0.0, length=5000), "does not fit"),
        (request(0, 0.0), "twice"),
        (request(1, 0.0, fork_of=9), "continues none"),
        (request(1, 0.0, fork_of=1), "continues none"),
    ],
)
def test_a_trace_that_cannot_be_is_refused_with_its_line(second, message):
    with pytest.raises(UsageError, match=message):
        simulate(ClusterSettings(engine(), 1), [request(0, 0.0), second], "placement")
