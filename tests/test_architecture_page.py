"""``docs/architecture.md``: every file and every class that it names is there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "forethought"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:/|\.py)?)`", PAGE)))
"""Names in code quotes that are of the form of a path."""


def exists(path: str) -> bool:
    return (SOURCE / path).exists() or (SOURCE / path).with_suffix(".py").is_file()


def test_every_file_that_it_names_exists() -> None:
    paths = [name for name in NAMED if "/" in name or name.endswith(".py")]
    missing = [
        path
        for path in paths
        if not exists(path) and not (path.count("/") == 0 and any(SOURCE.rglob(path)))
    ]
    assert len(paths) > 50
    assert missing == []


def test_every_part_of_a_layer_in_its_diagram_exists() -> None:
    diagram = PAGE.split("```")[1]
    rows = re.findall(r"^ ([a-z]+) {4,}([a-z_, ]+?)(?: \(|  |$)", diagram, re.MULTILINE)
    named = {layer: parts.split(", ") for layer, parts in rows}
    assert {"kv", "model", "engine", "speculative"} <= named.keys()
    layers = ("kv", "model", "engine", "speculative")
    assert [f"{n}/{part}" for n in layers for part in named[n] if not exists(f"{n}/{part}")] == []


def test_every_method_of_a_class_that_it_names_exists() -> None:
    classes = {
        "Engine": "forethought.engine.engine",
        "Scheduler": "forethought.engine.scheduler",
        "Drafting": "forethought.engine.drafting",
        "Step": "forethought.engine.step",
        "Plan": "forethought.engine.scheduler",
        "Frontend": "forethought.llm.frontend",
        "GrammarCompiler": "forethought.llm.grammar",
        "Batch": "forethought.model.batch",
        "CausalLM": "forethought.model.causal_lm",
    }
    named = re.findall(rf"`({'|'.join(classes)})\.([a-z_]+)`", PAGE)
    assert len(named) > 8
    for owner, method in named:
        assert hasattr(getattr(importlib.import_module(classes[owner]), owner), method)
