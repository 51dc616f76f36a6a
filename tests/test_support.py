"""docs/support.md has every family of the tests, every drafter and every quantisation."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from forethought.backends.cpu.weights import FAMILIES as NATIVE
from forethought.config.drafter_table import DRAFTERS
from forethought.config.quantization import QUANTIZATIONS
from forethought.gguf.model_config import ARCHITECTURES as GGUF
from forethought.model.llama.network import FAMILIES as FUSED
from models import ARCHITECTURES, RECURRENT

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
CELLS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines()]
HEADS = {"model_type", "--speculative", "quantization"}
ROWS = {
    name: cells[1:]
    for cells in CELLS
    if cells[0].startswith("`") and (name := cells[0].strip("`")) not in HEADS
}


@pytest.fixture(scope="module")
def support() -> ModuleType:
    spec = importlib.util.spec_from_file_location("support", ROOT / "scripts" / "support.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_every_family_of_the_tests_every_drafter_and_every_quantisation() -> None:
    families = {kind for kind, _ in {**ARCHITECTURES, **RECURRENT}.values()}
    drafters = {spec.option for spec in DRAFTERS if spec.drafter and spec.option}
    assert ROWS.keys() == families | drafters | {*QUANTIZATIONS}


def test_the_forwards_of_the_page_are_those_of_the_code(support: ModuleType) -> None:
    classes = {name: support.module_class(name) for name, cells in ROWS.items() if len(cells) == 5}
    native = {name for name, cells in ROWS.items() if cells[0] == "C++"}
    fused = {name for name, cells in ROWS.items() if cells[1].startswith("fused")}
    assert native == {name for name, cls in classes.items() if cls and cls.__name__ in NATIVE}
    assert fused == {name for name, cls in classes.items() if cls in FUSED}


def test_the_page_names_every_architecture_of_gguf_files() -> None:
    written = {name for cells in ROWS.values() for name in re.findall(r"`([\w-]+)`", cells[-1])}
    types = {kind for kind, _ in {**ARCHITECTURES, **RECURRENT}.values()}
    assert written == {name for name, known in GGUF.items() if known.model_type in types}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3", "gpt_oss", "qwen3_5", "jamba"])
def test_a_family_runs_with_what_the_page_says(support: ModuleType, architecture: str) -> None:
    row = support.row(architecture)
    assert support.family_table([row])[-1] in PAGE.splitlines()
