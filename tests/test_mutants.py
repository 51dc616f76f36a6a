"""``scripts/mutants.py``: each mutant has its line in the source as it is now."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # where its dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


def test_every_mutant_applies_to_the_source(mutants: ModuleType) -> None:
    assert len(mutants.MUTANTS) > 150
    assert list(map(str, mutants.not_applicable(mutants.MUTANTS))) == []


def test_every_mutant_names_tests_that_exist(mutants: ModuleType) -> None:
    words = {word for mutant in mutants.MUTANTS for word in mutant.tests.split()}
    paths = {word for word in words if word.startswith("tests/")}
    assert [path for path in sorted(paths) if not (ROOT / path.partition("::")[0]).exists()] == []


@pytest.mark.parametrize(
    ("file", "original", "replacement"),
    [
        ("kv/table.py", "a line that was changed since", "another"),
        ("kv/table.py", "def", "fed"),  # more than once
        ("kv/no_such_file.py", "def", "fed"),
        ("kv/table.py", "class PageTable", "class of PageTable"),
    ],
)
def test_the_script_fails_where_a_mutant_does_not_apply(
    mutants: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    file: str,
    original: str,
    replacement: str,
) -> None:
    wrong = mutants.Mutant(file, original, replacement, "tests/kv")
    monkeypatch.setattr(mutants, "MUTANTS", [*mutants.MUTANTS[:3], wrong])
    monkeypatch.setattr(sys, "argv", ["mutants.py"])
    assert mutants.main() == 1
    counts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert counts == {"script": "mutants", "mutants": 4, "not applicable": 1}
