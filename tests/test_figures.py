"""``scripts/figures.py``: the tables of the documentation are what it writes."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmarks.drafters import DRAFTERS, with_defaults
from benchmarks.report import print_report

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "scripts" / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(figures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page with the table of drafters, and an empty store."""
    page, store = tmp_path / "page.md", tmp_path / "figures.jsonl"
    page.write_text("before\n<!-- figures: drafters -->\n<!-- end of figures -->\nafter\n")
    store.write_text("")
    for name, value in (("ROOT", tmp_path), ("STORE", store), ("PAGES", [page])):
        monkeypatch.setattr(figures, name, value)
    return page


def run(**changes: Any) -> str:
    rows = [
        {"drafter": "plain", "tokens_per_second": 1234.5, "ratio": 1.0, "tokens_per_step": 1.0},
        {"drafter": "mtp", "tokens_per_second": 999.0, "ratio": 0.81, "tokens_per_step": 7.25},
    ]
    line = {
        "benchmark": "drafters",
        "date": "2026-11-25",
        "command": "python -m x",
        "rows": rows,
        "machine": "AMD EPYC",
        "instruction_sets": ["avx2"],
        "dtype": "float32",
        **changes,
    }
    return f"a table\n{json.dumps(line)}\n"


def main(figures: ModuleType, *options: str) -> int:
    old, sys.argv = sys.argv, ["figures.py", *options]
    try:
        return int(figures.main())
    finally:
        sys.argv = old


def test_the_tables_of_all_pages_are_what_the_script_writes(figures: ModuleType) -> None:
    runs = figures.read()
    for page in figures.PAGES:
        assert page.read_text(encoding="utf-8") == figures.written(page, runs), page


def test_every_table_is_on_one_page(figures: ModuleType) -> None:
    texts = [page.read_text(encoding="utf-8") for page in figures.PAGES]
    names = [name for text in texts for name in figures.BLOCK.findall(text)]
    transcribed = [f"table-{run['table']}" for run in figures.read() if "table" in run]
    kinds = [name for name in figures.TABLES if name != "table"]
    assert sorted(names) == sorted([*kinds, *transcribed])


def test_the_readme_has_no_figures_beside_those_tables(figures: ModuleType) -> None:
    rest = figures.BLOCK.sub("", (ROOT / "README.md").read_text(encoding="utf-8"))
    rest = rest.replace("Qwen3.5", "")  # a name
    assert re.findall(r"^\|.*\d[.,]\d.*\|$", rest, re.MULTILINE) == []
    assert re.findall(r"tokens/s[^;:]*\d,\d{3}|\d,\d{3} tokens/s|\d\.\d+ times", rest) == []


def test_every_run_of_the_store_says_when_where_and_how_it_was_made(figures: ModuleType) -> None:
    runs = figures.read()
    assert len(set(map(figures.key_of, runs))) == len(runs)
    for one in runs:
        assert one["command"].startswith(("python -m benchmarks.", "forethought "))
        assert figures.day(one)
        assert one["dtype"]


def test_every_drafter_of_the_benchmark_has_a_label(figures: ModuleType) -> None:
    assert figures.DRAFTERS.keys() == DRAFTERS.keys()
    names = with_defaults(list(DRAFTERS))
    rows = [{"drafter": name, "ratio": 1.5, "tokens_per_step": 2.0} for name in names]
    line = json.loads(run(rows=rows).splitlines()[-1])
    assert figures.drafters([line]).count("| 1.50 |") == len(names)


def test_a_run_is_added_by_one_command_and_replaces_that_of_its_processor(
    figures: ModuleType, copy: Path, tmp_path: Path
) -> None:
    (tmp_path / "one.log").write_text(run())
    assert main(figures, "--add", str(tmp_path / "one.log")) == 0
    assert "| MTP | `mtp` | a chain of 10, one module replayed | 7.2 | 0.81 |" in copy.read_text()
    assert "* AMD EPYC, AVX2: 25 November 2026, float32, `python -m x`" in copy.read_text()
    (tmp_path / "two.log").write_text(run(date="2026-11-26", command="python -m y"))
    (tmp_path / "gpu.log").write_text(run(machine="NVIDIA H100", device="cuda"))
    for name in ("two.log", "gpu.log"):
        assert main(figures, "--add", str(tmp_path / name)) == 0
    text = copy.read_text()
    assert "| AMD EPYC, AVX2 | NVIDIA H100 |" in text
    assert "python -m y" in text
    assert "AVX2: 25 November" not in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert main(figures, "--check") == 0
    copy.write_text(text.replace("0.81", "0.91"))
    assert main(figures, "--check") == 1
    assert "0.91" in copy.read_text()


def test_what_is_no_line_of_a_benchmark_is_refused(
    figures: ModuleType, copy: Path, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text('{"rows": []}\n')
    with pytest.raises(SystemExit, match="not that of a benchmark"):
        main(figures, "--add", str(tmp_path / "log"))
    (tmp_path / "log").write_text(run(rows=[{"drafter": "telepathy", "ratio": 1.0}]))
    with pytest.raises((SystemExit, ValueError)):
        main(figures, "--add", str(tmp_path / "log"))


def test_the_gpu_benchmark_is_a_table_per_part(figures: ModuleType) -> None:
    rows = [
        {"part": "bandwidth", "GB/s": 3021.5},
        {"part": "eagle", "length": 2, "graphs": True, "tokens_per_second": 1234.5},
        {"part": "eagle", "length": 4, "graphs": True, "failed": "out of memory"},
    ]
    line = {"machine": "NVIDIA H100", "device": "cuda", "date": "2026-11-26", "dtype": "bfloat16"}
    text = figures.gpu([{"benchmark": "gpu", "command": "python -m b", **line, "rows": rows}])
    assert "### NVIDIA H100" in text
    assert "| GB/s |\n| ---: |\n| 3,021.5 |" in text
    assert "| 4 | True |  | out of memory |" in text
    parts = [
        {"benchmark": "gpu", "command": f"python -m b --parts {part}", **line, "rows": rows[:1]}
        for part in ("bandwidth", "sweep", "bandwidth")
    ]
    runs: list[dict[str, Any]] = []
    for part in parts:
        runs = figures.added(runs, part)
    assert len(runs) == 2


def test_a_benchmark_prints_its_date_its_command_and_its_processor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["x.py", "--threads", "1"])
    print_report("drafters", [], threads=1)
    line = json.loads(capsys.readouterr().out)
    assert line["command"] == "python -m benchmarks.drafters --threads 1"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", line["date"])
    assert isinstance(line["instruction_sets"], list)
    assert line["machine"]
