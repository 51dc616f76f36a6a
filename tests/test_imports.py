"""What importing the package costs, and who may import whom."""

import subprocess
import sys
from pathlib import Path

import pytest

from forethought.cli import main as cli

ROOT = Path(__file__).parents[1]
COMMANDS = [f"forethought.cli.{name}" for name in ("main", *cli.COMMANDS)]
LIGHT = ["forethought", "forethought.scaffolding", "forethought.methods", *COMMANDS]
HEAVY = ["torch", "transformers", "tokenizers", "safetensors", "openai", "matplotlib"]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False
    )


def test_importing_a_command_or_the_task_world_imports_nothing_heavy():
    done = python(
        "import importlib, os, sys\n"
        f"for name in {LIGHT}:\n"
        "    if not os.fork():\n"  # each in a process that has imported nothing yet
        "        importlib.import_module(name)\n"
        f"        found = sorted(set({HEAVY}) & set(sys.modules))\n"
        "        if found: print(name, 'imports', *found, flush=True)\n"
        "        os._exit(0)\n"
        "    _, status = os.wait()\n"
        "    if status: print(name, 'fails', flush=True)\n"
    )
    assert (done.stdout, done.returncode) == ("", 0), done.stdout + done.stderr


def test_every_public_name_of_scaffolding_and_methods_works_without_torch():
    done = python(
        "import sys\n"
        f"for name in {HEAVY[:4]}: sys.modules[name] = None\n"
        "import forethought.scaffolding as scaffolding, forethought.methods as methods\n"
        "without = {'EngineWorker', 'RewardWorker', 'TRTLLMWorker'}\n"
        "for module in (scaffolding, methods):\n"
        "    for name in set(module.__all__) - without: getattr(module, name)\n"
        "print('ok')"
    )
    assert done.stdout.strip() == "ok", done.stderr


def test_everything_can_be_imported_at_once_without_torch():
    done = python(
        "import sys\n"
        f"for name in {HEAVY[:4]}: sys.modules[name] = None\n"
        "from forethought.scaffolding import *\n"
        "print(ScaffoldingLlm.__name__, 'EngineWorker' in globals())"
    )
    assert done.stdout.strip() == "ScaffoldingLlm False", done.stderr


def test_a_name_that_needs_torch_says_how_to_install_it():
    for line in ("from forethought import LLM", "from forethought.scaffolding import EngineWorker"):
        done = python(f"import sys; sys.modules['torch'] = None\n{line}")
        assert "DependencyError: torch is not installed" in done.stderr
        assert "forethought[local]" in done.stderr


@pytest.mark.slow  # make lint, which make test begins with, checks them
def test_the_import_contracts_hold():
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
