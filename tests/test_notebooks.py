"""The notebooks in docs/notebooks run from their first cell to their last."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
SLOW = {"train-a-drafter"}
MAX_PRINTED = 2_000
"""Characters that a notebook stores of what it printed."""


@pytest.fixture(scope="module")
def notebooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "scripts" / "notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.stem in SLOW)) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs_and_the_same_cells_print(notebooks: ModuleType, path: Path) -> None:
    notebook = notebooks.read(path)
    stored = [cell["outputs"] for cell in notebooks.code_cells(notebook)]
    texts = notebooks.printed(notebook)
    assert [bool(text) for text in texts] == [bool(outputs) for outputs in stored]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_as_the_script_writes_it(
    notebooks: ModuleType, path: Path, tmp_path: Path
) -> None:
    notebook = notebooks.read(path)
    notebooks.write(tmp_path / "copy", notebook)
    assert (tmp_path / "copy").read_text(encoding="utf-8") == path.read_text(encoding="utf-8")
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    outputs = [out for cell in notebooks.code_cells(notebook) for out in cell["outputs"]]
    assert sum(len("".join(out["text"])) for out in outputs) < MAX_PRINTED
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len({*ids}) == len(ids)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_a_page_of_the_site_with_its_code_and_output(
    notebooks: ModuleType, path: Path
) -> None:
    assert f"- notebooks/{path.stem}.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    notebook = notebooks.read(path)
    page = notebooks.markdown(notebook, path.name)
    assert page.startswith("# ")
    assert page.count("```python\n") == len(notebooks.code_cells(notebook))
    printed = sum(bool(cell["outputs"]) for cell in notebooks.code_cells(notebook))
    assert page.count("```text\n") == printed
    for target in re.findall(r"\]\(([^)#:]+)", page):
        assert (path.parent / target).exists(), target
