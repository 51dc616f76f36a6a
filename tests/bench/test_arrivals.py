"""When requests arrive, and what they ask."""

import itertools
import json
import math

import pytest

from forethought.bench.arrivals import BLOCK_SIZE, load_mooncake, poisson, read_mooncake
from forethought.errors import ParameterError, UsageError


def trace(tmp_path, *records):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def record(at, length=10, limit=5, ids=()):
    return {"timestamp": at, "input_length": length, "output_length": limit, "hash_ids": list(ids)}


def test_gaps_of_a_poisson_process_have_the_mean_of_the_rate_and_no_memory():
    # 4,000 gaps of mean 0.25 s: their mean is within 5 standard errors, 5 * 0.25 / sqrt(4000), and
    # of an exponential distribution 1/e are above the mean (standard error 0.0076)
    times = [arrival.at for arrival in poisson(["p"], 4001, 4.0, 8, seed=1)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.25, abs=0.02)
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(1 / math.e, abs=0.04)


def test_a_seed_fixes_the_times_and_prompts_are_asked_in_turn():
    first, second = (poisson(["a", "b"], 5, 2.0, 8, seed=3) for _ in range(2))
    assert first == second != poisson(["a", "b"], 5, 2.0, 8, seed=4)
    assert [arrival.prompt for arrival in first] == ["a", "b", "a", "b", "a"]


def test_at_an_infinite_rate_all_come_at_once():
    assert {arrival.at for arrival in poisson(["p"], 9, math.inf, 8)} == {0.0}


@pytest.mark.parametrize(
    ("count", "rate", "limit"), [(0, 1, 1), (1, 0, 1), (1, math.nan, 1), (1, 1, 0)]
)
def test_impossible_loads_are_refused(count, rate, limit):
    with pytest.raises(ParameterError):
        poisson(["p"], count, rate, limit)


def test_a_trace_is_sent_by_its_clock_from_its_first_request_on(tmp_path):
    path = trace(tmp_path, record(3000, limit=7), record(1000), record(2000))
    found = load_mooncake(path, speed=2.0)
    assert [arrival.at for arrival in found] == [0.0, 0.5, 1.0]
    assert found[-1].max_tokens == 7
    assert len(load_mooncake(path, max_requests=2)) == 2


def test_equal_blocks_of_a_trace_are_equal_text_and_other_text_differs(tmp_path):
    size = BLOCK_SIZE
    path = trace(
        tmp_path, record(0, 2 * size, ids=[1, 2]), record(1, size + 9, ids=[1]), record(2, 30)
    )
    first, second, third = (arrival.prompt.split() for arrival in load_mooncake(path))
    assert [len(words) for words in (first, second, third)] == [2 * size, size + 9, 30]
    assert first[:size] == second[:size]
    assert first[size : size + 9] != second[size:]
    assert third != second[size : size + 9]


def test_forks_and_sessions_of_a_trace_are_read_and_lines_without_them_are_numbered(tmp_path):
    fork = {**record(5, ids=[1, "b"]), "request": 9, "fork_of": 0, "fork_at": 3, "session": 2}
    plain, forked = read_mooncake(trace(tmp_path, record(0), fork))
    assert (plain.number, plain.fork_of, plain.session) == (0, None, None)
    assert (forked.number, forked.fork_of, forked.fork_at) == (9, 0, 3)
    assert (forked.session, forked.hash_ids) == ("2", (1, "b"))


def test_a_request_that_generates_nothing_is_no_request_to_a_server(tmp_path):
    path = trace(tmp_path, record(0), record(1, limit=0))
    assert read_mooncake(path)[1].output_length == 0
    with pytest.raises(UsageError, match=r"trace\.jsonl:2"):
        load_mooncake(path)


@pytest.mark.parametrize(
    "broken",
    [
        {"timestamp": 0},
        record(-1),
        record(0, length=0),
        record(0, limit="many"),
        {**record(0), "hash_ids": 3},
        {**record(0), "hash_ids": [[]]},
        {**record(0), "fork_of": "first"},
        {**record(0), "fork_at": -1},
        {**record(0), "session": {}},
        [1],
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path, broken):
    with pytest.raises(UsageError, match=r"trace\.jsonl:2"):
        load_mooncake(trace(tmp_path, record(0), broken))


def test_a_clock_cannot_stand_still(tmp_path):
    with pytest.raises(ParameterError, match="speed"):
        load_mooncake(trace(tmp_path, record(0)), speed=0)
