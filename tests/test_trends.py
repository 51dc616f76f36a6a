"""``scripts/trends.py``: ratios of benchmarks over time, and regressions among them."""

from __future__ import annotations

import importlib
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmarks.report import commit

ROOT = Path(__file__).parents[1]


@pytest.fixture
def trends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script over an empty store."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    for name in ("figures", "trends"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("trends")
    monkeypatch.setattr(module.figures, "STORE", tmp_path / "figures.jsonl")
    monkeypatch.setattr(module.figures, "PAGES", [])
    (tmp_path / "figures.jsonl").write_text("")
    return module


def run(day: int, ratio: float, **changes: Any) -> dict[str, Any]:
    rows = [
        {"drafter": "plain", "tokens_per_second": 900.0, "ratio": 1.0},
        {"drafter": "mtp", "ratio": ratio, "lowest": 0.5},
    ]
    return {
        "benchmark": "drafters",
        "date": f"2026-11-{day}",
        "command": "python -m benchmarks.drafters",
        "rows": rows,
        "machine": "AMD EPYC",
        "instruction_sets": ["avx2"],
        "dtype": "float32",
        "commit": f"c{day}",
        **changes,
    }


def test_runs_are_compared_where_benchmark_processor_and_settings_are_the_same(
    trends: ModuleType,
) -> None:
    runs = [run(21, 1.4), run(20, 1.3), run(22, 9.0, dtype="bfloat16")]
    runs += [run(22, 9.0, command="python -m x"), run(22, 9.0, machine="Intel Xeon")]
    groups = trends.by_settings(runs)
    assert len(groups) == 4
    key = trends.Settings("drafters", "AMD EPYC, AVX2", "python -m benchmarks.drafters", "float32")
    assert groups[key] == {
        "mtp": [trends.Point("2026-11-20", "c20", 1.3), trends.Point("2026-11-21", "c21", 1.4)]
    }


def test_a_ratio_is_named_by_its_row(trends: ModuleType) -> None:
    row = {"batch": 4, "prompt": 64, "w8a8, tokens/s": 90.0, "w8a8, prefill ratio": 4.5}
    assert dict(trends.ratios_of({"rows": [row]})) == {"batch 4, prompt 64, w8a8, prefill": 4.5}
    row = {"case": "batch1", "against": "generate", "ratio": 2.0, "theirs_per_second": None}
    assert dict(trends.ratios_of({"rows": [row]})) == {"batch1, generate": 2.0}
    assert [*trends.ratios_of({"benchmark": "table", "cells": []})] == []


def test_the_newest_is_a_regression_if_it_is_a_tenth_below_the_best(trends: ModuleType) -> None:
    page = trends.page([run(20, 2.0), run(21, 1.5), run(22, 1.81)])
    assert "1 ratios, 0 more than 10 % below their best." in page
    assert "▼" not in page
    page = trends.page([run(20, 1.5), run(21, 2.0), run(22, 1.78)])
    assert "* **▼ 11 %** drafters, AMD EPYC, AVX2: mtp" in page
    assert "| 2.00 | 1.78 | 2026-11-22 c22 | **▼ 11 %** |" in page


def test_a_line_goes_through_all_values_in_the_colour_of_the_text(trends: ModuleType) -> None:
    values = (1.0, 3.0, 2.0)
    points = [trends.Point("2026-11-20", "", value) for value in values]
    svg = ElementTree.fromstring(trends.line(points))
    assert svg.get("aria-label") == "1.00, 3.00, 2.00"
    polyline, circle = svg
    heights = [float(pair.split(",")[1]) for pair in polyline.get("points", "").split()]
    assert heights == [21.0, 3.0, 12.0]
    assert circle.get("cy") == "12.0"
    assert {polyline.get("stroke"), circle.get("fill")} == {"currentColor"}
    one = ElementTree.fromstring(trends.line(points[:1]))
    assert one[1].get("cy") == "12.0"


def test_a_run_that_is_replaced_is_kept_for_the_page(
    trends: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for day, ratio in ((20, 2.0), (21, 1.5)):
        log = tmp_path / "log"
        log.write_text(json.dumps(run(day, ratio)) + "\n")
        monkeypatch.setattr(sys, "argv", ["figures.py", "--add", str(log)])
        assert trends.figures.main() == 0
    assert [one["date"] for one in trends.figures.read()] == ["2026-11-21"]
    assert "▼ 25 %" in trends.page(trends.runs())


def test_the_stored_runs_make_a_page_that_loads_nothing(trends: ModuleType) -> None:
    lines = (ROOT / "docs" / "results" / "figures.jsonl").read_text(encoding="utf-8").splitlines()
    page = trends.page([json.loads(line) for line in lines])
    assert page.count("<svg") > 30
    assert re.findall(r"<script|https?://|href=|src=", page) == []


def test_a_benchmark_states_the_commit_of_its_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    version = commit()
    assert version is None or re.fullmatch(r"[0-9a-f]{7,40}\+?", version)
    monkeypatch.setenv("PATH", "")
    assert commit() is None
