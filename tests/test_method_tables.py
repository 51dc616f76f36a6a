"""``scripts/method_tables.py``: the tables of docs/methods are what the settings' fields make."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from forethought import methods

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    path = ROOT / "scripts" / "method_tables.py"
    spec = importlib.util.spec_from_file_location("method_tables", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(tables: ModuleType, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["method_tables.py", *options])
    return int(tables.main())


def test_the_pages_of_methods_have_the_tables_that_the_settings_make(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(tables, monkeypatch, "--check") == 0
    pages = {page.name for page in tables.pages_in_order()}
    assert pages == {page.name for page in tables.FOLDER.glob("*.md")}


def test_a_stale_table_fails_the_check_and_is_written_anew(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = ", ".join(methods.names())
    text = f"# All\n<!-- settings: {names} -->\n| old |\n<!-- end of settings -->\nafter\n"
    page = tmp_path / "index.md"
    page.write_text(text)
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert run(tables, monkeypatch, "--check") == 1
    assert page.read_text() == text, "the check writes nothing"
    assert run(tables, monkeypatch) == 0
    assert "| old |" not in page.read_text()
    assert page.read_text().endswith("<!-- end of settings -->\nafter\n")
    assert run(tables, monkeypatch, "--check") == 0


def test_methods_that_share_a_setting_share_its_row(tables: ModuleType) -> None:
    described = [methods.describe(name) for name in ("beam_search", "dvts")]
    rows = tables.settings_table(described).splitlines()
    assert sum(row.startswith("| `max_steps` | all | int >= 1 | `40` |") for row in rows) == 1
    assert [row.split(" | ")[1] for row in rows if row.startswith("| `width`")] == [
        "`beam_search`",
        "`dvts`",
    ]


def test_a_method_without_a_page_is_named(tables: ModuleType) -> None:
    with pytest.raises(SystemExit, match="no page has the settings of"):
        tables.method_table({"plain": "index.md#using-one"})
