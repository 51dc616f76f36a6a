"""``forethought bench cluster``: what it prints, what it measures, and what it refuses."""

import json

import pytest

from forethought.cli.main import main
from forethought.model import loader
from tokens import speaking

LIMITS = {"max_batch_size": 4, "max_num_tokens": 64}
LIMITS |= {"kv_tokens": 500, "kv_bytes": 64, "steps_per_call": 1}
STEPS = [
    {"decodes": 1, "context": 8, "prefilled": 0, "attended": 0, "calls": 1, "ms": 10.0},
    {"decodes": 0, "context": 0, "prefilled": 8, "attended": 36, "calls": 1, "ms": 10.0},
]


@pytest.fixture
def files(tmp_path):
    """Options that name a trace of four requests, and step times."""
    trace, steps = tmp_path / "trace.jsonl", tmp_path / "steps.json"
    lines = [
        {"timestamp": 100 * n, "input_length": 40, "output_length": 5, "hash_ids": [n % 2, 2, 3]}
        for n in range(4)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps.write_text(json.dumps(LIMITS | {"steps": STEPS, "label": "by hand"}))
    return ["bench", "cluster", "--trace", str(trace), "--step-times", str(steps)]


def test_a_table_and_one_json_line_last(capsys, files):
    options = ["--replicas", "1", "2", "--block-size", "16", "--goodput", "ttft:100"]
    assert main([*files, *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["replicas", "policy"]
    report = json.loads(lines[-1])
    rows = [(row["replicas"], row["policy"]) for row in report["rows"]]
    policies = ("round_robin", "placement", "rebalancing")
    assert rows == [(number, policy) for number in (1, 2) for policy in policies]
    assert {row["num_output_tokens"] for row in report["rows"]} == {20}
    assert report["rows"][0]["prefix_cache_hit_share"] == pytest.approx(2 * 32 / 160)
    assert report["engine"] == LIMITS | {"label": "by hand"}
    assert report["targets_ms"] == {"ttft": 100.0}
    assert main([*files, *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report


def test_numbers_of_prefill_replicas_are_compared_by_goodput(capsys, files):
    options = ["--replicas", "1", "3", "--policies", "placement", "--goodput", "ttft:100"]
    assert main([*files, *options, "--prefill-replicas", "auto"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = json.loads(lines[-1])["rows"]
    splits = [(row["replicas"], row["prefill_replicas"]) for row in rows]
    assert splits == [(1, 0), (3, 0), (3, 1), (3, 2)]
    (verdict,) = [line for line in lines if "goodput by their number" in line]
    assert verdict.startswith("3 replicas, placement: ")
    assert main([*files, *options, "--prefill-replicas", "0", "--json"]) == 0
    assert main([*files[:4], *files[4:], "--replicas", "3", "--prefill-replicas", "1", "2"]) == 0


def test_without_step_times_the_model_is_measured_and_they_are_saved(capsys, files, tmp_path):
    saved, config = tmp_path / "saved.json", tmp_path / "config.yaml"
    config.write_text("max_batch_size: 2\nmax_num_tokens: 64\n")
    model = ["--model", str(speaking("byte_level")), "--dtype", "float32", "--config", str(config)]
    options = ["--replicas", "2", "--policies", "placement", "--json"]
    assert main([*files[:4], *model, *options, "--save-step-times", str(saved)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["engine"]["max_batch_size"] == 2
    assert str(speaking("byte_level")) in report["engine"]["label"]
    assert main([*files[:4], "--step-times", str(saved), *options]) == 0
    assert json.loads(capsys.readouterr().out) == report


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--replicas", "0"], "invalid replicas"),
        (["--replicas", "1", "100000"], "invalid replicas"),
        (["--prefill-replicas", "8"], "invalid prefill_replicas"),
        (["--prefill-replicas", "-1"], "invalid prefill_replicas"),
        (["--prefill-replicas", "some"], "invalid --prefill-replicas"),
        (["--prefill-replicas", "auto"], "needs --goodput"),
        (["--policies", "telepathy"], "unknown policy 'telepathy'"),
        (["--trace", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--speed", "0"], "invalid speed"),
        (["--num-requests", "0"], "num_requests"),
        (["--block-size", "0"], "block_size"),
        (["--bandwidth", "0"], "invalid --bandwidth"),
        (["--goodput", "ttft"], "invalid target"),
        (["--step-times", "/nowhere.json"], "no step times in /nowhere.json"),
        (["--save-step-times", "out.json"], "exclude each other"),
        (["--dtype", "float32"], "exclude each other"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_is_loaded(
    capsys, monkeypatch, files, options, message
):
    def load(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(loader, "load", load)
    assert main([*files, *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err.splitlines()[-1]


@pytest.mark.parametrize("line", ['{"timestamp": 0}', "[1]", "{", '{"timestamp": 1e999}'])
def test_a_line_that_is_no_request_is_named(capsys, tmp_path, files, line):
    trace = tmp_path / "broken.jsonl"
    good = '{"timestamp": 0, "input_length": 4, "output_length": 4}'
    trace.write_text(f"{good}\n{line}\n")
    assert main([*files, "--trace", str(trace)]) == 2
    assert "broken.jsonl:2" in capsys.readouterr().err
