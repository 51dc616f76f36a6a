"""The documentation's site is built without a broken link, and tells programs what it has."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("material") is None, reason="mkdocs-material is not installed: docs")
def test_the_site_is_built_without_a_warning_lists_its_pages_and_loads_nothing(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=280)
    listed = (tmp_path / "llms.txt").read_text(encoding="utf-8")
    pages = [path for end in ("md", "ipynb") for path in (ROOT / "docs").rglob(f"*.{end}")]
    assert listed.count("\n- [") == len(pages) + 2  # README and CONTRIBUTING
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    sections = re.findall(r"^  - (\w+):$", navigation, re.MULTILINE)
    assert re.findall(r"(?m)^## (.*)$", listed) == sections
    built = [page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html")]
    loaded = r'<(?:script|img|iframe)[^>]* src="https?:|<link[^>]*stylesheet[^>]*"https?:|mermaid"'
    assert [re.findall(loaded, page) for page in built if re.search(loaded, page)] == []
    concepts = (tmp_path / "concepts" / "index.html").read_text(encoding="utf-8")
    assert concepts.count("<svg role=") == len([*(ROOT / "docs" / "diagrams").glob("*.svg")])
    assert '<svg class="trend"' in (tmp_path / "trends" / "index.html").read_text("utf-8")
