"""The benchmark of a GPU runs, on a CPU and in small, as far as it needs no GPU."""

from __future__ import annotations

import json
import sys

import pytest
from benchmarks import gpu


def test_graphs_chains_and_waits_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = ["model", "graphs", "waits", "eagle"]
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--small", "--parts", *parts])
    gpu.main()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert {row["part"] for row in rows} == set(parts)
    assert [row["equal tokens"] for row in rows if row["part"] == "graphs"] == ["32/32", "64/64"]
    assert [row["waited"] for row in rows if row["part"] == "waits"] == [0, 0]
    assert all(row["tokens/s"] > 0 for row in rows if row["part"] != "waits")
