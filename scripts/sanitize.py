"""Runs the tests of the native forward with AddressSanitizer and UBSan: ``make sanitize``.

As a script it starts pytest in an environment in which sanitized libraries can be loaded; as a
plugin of that pytest it has them compiled. The first finding ends the run.

    python scripts/sanitize.py [arguments of pytest]
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from forethought.backends.cpu import library
from forethought.backends.cpu.cache import LibraryDirectory

ROOT = Path(__file__).parents[1]
FLAGS = (
    *("-O1", "-g", "-fno-omit-frame-pointer"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
)
TESTS = (
    "tests/backends/test_expert_store.py",
    "tests/backends/test_integer_products.py",
    "tests/backends/test_kv_dtypes.py",
    "tests/backends/test_layer_window.py",
    "tests/backends/test_native.py",
    "tests/backends/test_native_attention.py",
    "tests/backends/test_native_experts.py",
    "tests/backends/test_native_recurrent.py",
    "tests/backends/test_native_sampling.py",
    "tests/backends/test_native_team.py",
    "tests/model/test_adapter.py",
    "tests/engine/test_adapters.py",
    "tests/engine/test_recurrent_drafts.py",
    "tests/speculative/test_chain_steps.py",
    "tests/speculative/test_step_runner.py",
    "tests/speculative/test_medusa_head.py",
    "tests/speculative/test_native_modules.py",
    "tests/speculative/test_redrafter.py",
)


def pytest_configure() -> None:
    """Have the library compiled with the sanitizers, by a compiler that runs without them.

    It is loaded by its own path, where they find the lines of a finding.
    """
    library.FLAGS = (*library.FLAGS, *FLAGS)
    LibraryDirectory._real_path = lambda self, name: self.path / name
    os.environ.pop("LD_PRELOAD", None)


def environment() -> dict[str, str]:
    """In which a process that is not sanitized loads libraries that are.

    Raises:
        SystemExit: the compiler has no sanitizers.
    """
    compiler = library.find_compiler()
    if compiler is None:
        sys.exit(library.NO_COMPILER)
    # libstdc++ as well, or the sanitizer finds no functions that throw exceptions to wrap.
    preloaded = [_file_of(compiler, name) for name in ("libasan.so", "libstdc++.so.6")]
    return os.environ | {
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter frees little of its memory at its end
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }


def _file_of(compiler: str, name: str) -> str:
    command = [compiler, f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(path):
        sys.exit(f"{compiler} has no {name}: install g++ with its sanitizers")
    return path


def main() -> None:
    """Become pytest."""
    arguments = sys.argv[1:] or ["-m", "not slow", *TESTS]
    command = [sys.executable, "-m", "pytest", "-p", "scripts.sanitize", "-x", "-s", *arguments]
    os.chdir(ROOT)
    os.execve(sys.executable, command, environment())


if __name__ == "__main__":
    main()
