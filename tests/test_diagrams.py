"""The diagrams in docs/diagrams: drawn here, readable in light and dark, with a text for each."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
DIAGRAMS = sorted((DOCS / "diagrams").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
FILL = "#3949ab"
"""Of what stands out, under white text."""


@pytest.mark.parametrize("path", DIAGRAMS, ids=lambda path: path.stem)
def test_a_diagram_takes_its_colours_from_the_theme_and_loads_nothing(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)|href|<script|@import", text) == []
    root = ElementTree.fromstring(text)
    assert root.find(f"{SVG}title") is not None
    assert "prefers-color-scheme: dark" in (root.findtext(f"{SVG}style") or "")
    colours = {e.get(name) for e in root.iter() for name in ("fill", "stroke")} - {None, "none"}
    assert colours <= {"currentColor", FILL, "#fff"}


@pytest.mark.parametrize("path", DIAGRAMS, ids=lambda path: path.stem)
def test_the_ids_of_a_diagram_are_its_own(path: Path) -> None:
    ids = re.findall(r'id="([^"]*)"', path.read_text(encoding="utf-8"))
    assert ids
    assert all(name.startswith(f"{path.stem}-") for name in ids)


@pytest.mark.parametrize("path", DIAGRAMS, ids=lambda path: path.stem)
def test_the_shapes_of_a_diagram_are_inside_of_it(path: Path) -> None:
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    width, height = (float(root.get(name, 0)) for name in ("width", "height"))
    assert root.get("viewBox") == f"0 0 {width:g} {height:g}"
    for box in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(box.get(name, 0)) for name in ("x", "y", "width", "height"))
        assert 0 <= x < x + w <= width
        assert 0 <= y < y + h <= height


def test_every_picture_of_the_documentation_says_what_it_shows() -> None:
    pages = [*DOCS.rglob("*.md"), DOCS.parent / "README.md"]
    pictures = [
        (page.name, target, text)
        for page in pages
        for text, target in re.findall(r"!\[([^]]*)\]\(([^)]*)\)", page.read_text("utf-8"))
    ]
    assert [picture for picture in pictures if len(picture[2]) < 20] == []
    shown = {Path(target).name for _, target, _ in pictures}
    assert {path.name for path in DIAGRAMS} <= shown


def test_no_page_needs_a_script_of_another_host_for_its_diagrams() -> None:
    assert [page for page in DOCS.rglob("*.md") if "```mermaid" in page.read_text("utf-8")] == []
