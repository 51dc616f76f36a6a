"""The native forward under AddressSanitizer and UBSan; ``make sanitize`` runs all of its tests."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "sanitize.py"


def sanitize() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sanitize", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    try:
        return sanitize().environment()
    except SystemExit as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_small_models_compute_without_errors_of_memory_or_undefined_behaviour() -> None:
    tests = ["tests/backends/test_native.py", "tests/backends/test_native_attention.py"]
    tests += ["tests/speculative/test_chain_steps.py"]
    selected = "transformers or last_bit or chain_steps"
    command = [sys.executable, str(SCRIPT), *tests, "-m", "not slow", "-k", selected, "-q"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout


@pytest.mark.slow
def test_a_read_behind_the_end_of_an_array_is_found(environment: dict[str, str]) -> None:
    code = """
import ctypes, os, torch
from scripts import sanitize
sanitize.pytest_configure()
from forethought.backends.cpu.library import load_library
from forethought.backends.cpu.structures import ModelStruct
ids = torch.zeros(4, dtype=torch.int64)
model = ModelStruct(num_embeddings=1)
load_library().first_unknown(ctypes.byref(model), ctypes.c_void_p(ids.data_ptr()), 5)
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert "heap-buffer-overflow" in result.stderr
    assert "first_unknown" in result.stderr
