"""The benchmark of a GPU runs, on a CPU and in small, as far as it needs no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from benchmarks import gpu, gpu_kernels

Rows = list[dict[str, Any]]


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Rows]:
    """The exit status and the rows of the last line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--small", *arguments])
        status = gpu.main()
    return status, json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]


def test_graphs_chains_and_waits_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    parts = ["model", "graphs", "waits", "eagle"]
    status, rows = report(capsys, "--in-process", "--parts", *parts)
    assert status == 0
    assert {row["part"] for row in rows} == set(parts)
    assert [row["equal tokens"] for row in rows if row["part"] == "graphs"] == ["32/32", "64/64"]
    assert [row["waited"] for row in rows if row["part"] == "waits"] == [0, 0]
    assert all(row["tokens/s"] > 0 for row in rows if row["part"] != "waits")


@pytest.mark.slow
def test_layers_that_are_compiled_give_the_same_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = report(capsys, "--in-process", "--parts", "compiled")
    assert status == 0
    assert [row["equal tokens"] for row in rows] == ["32/32", "64/64"]


def test_kernels_and_products_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    parts = ["bandwidth", "sdpa", "kernel", "sweep", "gemv"]
    status, rows = report(capsys, "--in-process", "--parts", *parts)
    assert status == 0
    assert {row["part"] for row in rows} == set(parts)
    assert [row["new"] for row in rows if row["part"] == "sweep"] == ["decode", "tree of 5"]
    assert all(row["error"] < 1e-4 for row in rows if row["part"] in ("kernel", "sweep"))
    assert [row["rows"] for row in rows if row["part"] == "gemv"] == [1, 5, 16]


def test_a_row_is_split_into_as_many_parts_as_the_sweep_asks_for() -> None:
    case = gpu_kernels.sweep_cases(small=True)[0]
    made = gpu_kernels.LayerInputs(case, gpu.torch.device("cpu"))
    layout = made.operands(lambda size, length: (17, -(-length // 17))).layout
    assert layout[0][:, 4].tolist() == [17] * case.num_rows
    assert layout[-1][:, 1].tolist() == [4] * case.num_rows


def test_a_part_that_fails_is_reported_and_the_others_follow(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> Rows:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setitem(gpu.PARTS, "sdpa", gpu.Part(broken, 1))
    status, rows = report(capsys, "--in-process", "--parts", "sdpa", "bandwidth")
    assert status == 1
    failure = "RuntimeError: an illegal memory access was encountered"
    assert rows[0] == {"part": "sdpa", "failed": failure}
    assert [row["what"] for row in rows[1:]] == ["sum", "gemv"]


def test_a_process_that_hangs_or_dies_is_a_part_that_has_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], *, timeout: int, **kwargs: object) -> Any:
        if command[-4] == "sdpa":
            raise subprocess.TimeoutExpired(command, timeout)
        if command[-4] == "kernel":
            return subprocess.CompletedProcess(command, -11, stdout="half a line")
        rows = [{"part": command[-4], "GB/s": 3}]
        return subprocess.CompletedProcess(command, 0, f"a table\n{json.dumps({'rows': rows})}\n")

    monkeypatch.setattr(subprocess, "run", run)
    status, rows = report(capsys, "--parts", "sdpa", "kernel", "bandwidth")
    assert status == 1
    assert rows == [
        {"part": "sdpa", "failed": "more than 40 s"},
        {"part": "kernel", "failed": "exit status -11"},
        {"part": "bandwidth", "GB/s": 3},
    ]


def test_all_parts_together_take_at_most_half_an_hour() -> None:
    assert sum(part.limit for part in gpu.PARTS.values()) <= 30 * 60
    assert next(iter(gpu.PARTS)) == "tests"
