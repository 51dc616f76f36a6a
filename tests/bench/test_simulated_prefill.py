"""Prefill replicas in the simulation: outcomes computed by hand, and when one pool is better."""

import pytest

from forethought.bench.cluster_simulation import (
    POLICIES,
    ClusterSettings,
    ClusterSimulation,
    simulate,
    simulation_table,
    split_lines,
)
from forethought.bench.simulated_prefill import MOVE_SECONDS, best_split, candidates
from forethought.errors import ParameterError
from simulated_traces import BLOCK, engine, random_trace, request, times

TARGETS = {"ttft": 3.0, "tpot": 0.03}


def run(requests, num_replicas=2, num_prefill=1, policy="placement", **fields):
    """The result, once what remains of the simulation is consistent."""
    settings = ClusterSettings(engine(**fields), num_replicas, BLOCK, num_prefill=num_prefill)
    simulation = ClusterSimulation(settings, requests, policy)
    result = simulation.run()
    for replica in result.replicas:
        replica.check_integrity()
        assert replica.cache.num_used == replica.load == len(replica.sequences) == 0
        assert replica.num_queued_tokens == 0
    assert not simulation._split._targets
    assert [s.num_output for s in result.sequences] == [r.output_length for r in requests]
    return result


def test_a_long_prompt_is_computed_apart_and_delays_no_decode():
    requests = [request(0, 0.0, limit=20), request(1, 0.5, length=150, limit=3)]
    result = run(requests, per_token=10.0)
    # chunks of 64, 64 and 22 tokens from 1.08 on; then the next step of the other replica
    assert times(result) == [(1.08, pytest.approx(20.085, abs=1e-4)), (5.58, 8.085008)]
    assert [s.link.name for s in result.sequences] == ["replica-1"] * 2
    assert (result.num_apart, result.num_moved) == (2, 0)
    (pool,) = [simulate(ClusterSettings(engine(per_token=10.0), 1, BLOCK), requests, "placement")]
    assert pool.sequences[0].ended == pytest.approx(20.08 + 1.5)


def test_the_pause_is_the_copy_of_the_last_chunk_and_the_messages():
    requests = [request(0, 0.0, length=150, limit=2)]
    settings = ClusterSettings(engine(per_token=10.0), 2, BLOCK, 1e6, num_prefill=1)
    (sequence,) = simulate(settings, requests, "placement").sequences
    copied = 64 * 1000 / 1e6
    assert sequence.ended - sequence.first_token == pytest.approx(MOVE_SECONDS + copied + 1.0)


def test_short_prompts_and_those_that_are_cached_stay_where_they_decode():
    slow = {"base": 1.0, "per_token": 0.1}
    assert run([request(n, 1.0 * n) for n in range(5)], **slow).num_apart == 0
    ids = [*range(20)]
    turns = [request(n, 5.0 * n, 20 * BLOCK + 2, 3, ids, session="s") for n in range(3)]
    result = run(turns, **slow)
    assert result.num_apart == 1
    assert [s.num_cached for s in result.sequences] == [0, 20 * BLOCK, 20 * BLOCK]


def test_a_fork_begins_once_its_origin_has_arrived():
    origin = request(0, 0.0, 150, 10, [*range(9)])
    fork = request(1, 0.0, 156, 2, [*range(9)], fork_of=0, fork_at=1)
    result = run([origin, fork], per_token=10.0)
    assert result.sequences[1].arrived > result.sequences[0].first_token + MOVE_SECONDS
    assert result.sequences[1].num_cached == 151
    assert result.num_apart == 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("limits", [{}, {"kv_tokens": 320, "max_batch_size": 4}])
def test_every_request_of_a_trace_ends_with_its_tokens(policy, limits):
    for seed in range(3):
        requests = random_trace(seed, session=lambda number: f"{number % 5}")
        for num_prefill in (1, 2):
            slow = {"base": 50.0, "per_token": 5.0, "per_context": 0.05}
            result = run(requests, 3, num_prefill, policy, **slow, **limits)
            assert result.num_apart > 0
            again = run(requests, 3, num_prefill, policy, **slow, **limits)
            assert result.to_dict(TARGETS) == again.to_dict(TARGETS)


def trace(length, count=60, limit=60):
    return [request(n, 0.3 * n, length, limit, [n, *range(1000, 1400)]) for n in range(count)]


@pytest.mark.parametrize(("length", "is_split"), [(1500, True), (20, False)])
def test_a_split_has_more_goodput_with_long_prompts_and_one_pool_with_short_ones(length, is_split):
    fields = {"base": 15.0, "per_token": 0.5, "max_num_tokens": 256, "max_batch_size": 8}
    requests = trace(length)
    results = [run(requests, 4, n, kv_tokens=50_000, **fields) for n in (0, 1, 2, 3)]
    goodput = [result.goodput(TARGETS) for result in results]
    assert (best_split(range(4), goodput.__getitem__) > 0) is is_split
    (line,) = split_lines(results, TARGETS)
    assert ("one pool" in line) is not is_split
    assert simulation_table(results, TARGETS).splitlines()[0].split()[-2:] == ["prefill", "apart"]
    assert not [*split_lines(results, {})]


def test_of_equal_numbers_the_fewest_prefill_replicas_are_best():
    assert best_split([2, 1, 0], {0: 3.97, 1: 4.0, 2: 3.99}.__getitem__) == 0
    assert best_split([0, 1, 2], {0: 3.0, 1: 4.0, 2: 4.01}.__getitem__) == 1
    assert [candidates(number) for number in (1, 2, 3, 8)] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 4, 5, 6],
    ]


@pytest.mark.parametrize("num_prefill", [-1, 2])
def test_numbers_that_leave_none_to_decode_are_refused(num_prefill):
    with pytest.raises(ParameterError, match="prefill_replicas"):
        ClusterSettings(engine(), 2, num_prefill=num_prefill)
