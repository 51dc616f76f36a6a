"""The wheel, built and installed outside the checkout, under several Pythons and versions of torch.

    python scripts/packages.py --python python3.11 python3.12 python3.13 --torch 2.9.1 newest
    python scripts/packages.py --torch none      # methods alone, on servers: no torch

Builds the wheel with ``pip wheel``. For each Python and each torch it makes an environment,
installs the wheel there, and has the installed command answer a question on the embedded reasoner,
in an empty directory; without torch it lists the methods. Prints a table, and one JSON line last. A
cell whose torch the registry does not have for its Python is left out, and the table says so.
``PIP_INDEX_URL`` and the like choose the registry, ``--torch-index`` that of torch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_BYTES = 25_000_000
"""Of the wheel without the models that no command uses unless it names them."""
NAMED_MODELS = tuple(f"forethought/assets/{name}/" for name in ("countdown", "instruct", "prm"))
QUESTION = "Sam has 110 nuts. He uses 84. He uses 12. He uses 8. How many nuts does Sam have now?"
ANSWER = "\\boxed{6}"
MISSING = ("No matching distribution found for torch", "Could not find a version that satisfies")
"""What pip says where the registry does not have a version for this Python."""
REPORT = """
import importlib.util, json, platform, forethought
found = importlib.util.find_spec("torch") and __import__("torch").__version__
print(json.dumps([platform.python_version(), found or "none", forethought.__file__]))
"""


@dataclass
class Cell:
    """One environment, and what became of it."""

    python: str
    torch: str
    result: str


class Failed(Exception):
    """A command ended with an error; the message is the end of what it wrote."""


def main() -> int:
    """Try all cells; 0 if none fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--python", nargs="+", default=[sys.executable], metavar="PROGRAM")
    parser.add_argument("--torch", nargs="+", default=["newest"], metavar="VERSION|newest|none")
    parser.add_argument("--torch-index", metavar="URL", help="such as that of torch for CPUs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="forethought-packages-") as folder:
        wheel = built(Path(folder))
        size = without_named_models(wheel)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {size / 1e6:.1f} MB without")
        print("the models that no command uses unless it names them")
        cells = [
            tried(wheel, python, torch, args.torch_index)
            for python in args.python
            for torch in args.torch
        ]
    for cell in cells:
        print(f"{cell.python:<10}  {cell.torch:<12}  {cell.result}")
    print(json.dumps({"wheel_bytes": size, "cells": [asdict(cell) for cell in cells]}))
    return int(size > MAX_BYTES or any(cell.result.startswith("failed") for cell in cells))


def built(folder: Path) -> Path:
    """The wheel of the checkout."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    run([*pip, "--wheel-dir", str(folder), str(ROOT)], folder)
    return next(folder.glob("*.whl"))


def without_named_models(wheel: Path) -> int:
    """Bytes of a wheel without ``NAMED_MODELS``."""
    with zipfile.ZipFile(wheel) as files:
        named = [file for file in files.infolist() if file.filename.startswith(NAMED_MODELS)]
    return wheel.stat().st_size - sum(file.compress_size for file in named)


def tried(wheel: Path, python: str, torch: str, index: str | None) -> Cell:
    """A cell, in an environment that is removed afterwards."""
    folder = Path(tempfile.mkdtemp(dir=wheel.parent))
    cell = Cell(python, torch, "answers")
    try:
        run([python, "-m", "venv", "env"], folder)
        installed(wheel, folder, torch, index)
        report = run([str(folder / "env/bin/python"), "-c", REPORT], folder)
        cell.python, cell.torch, place = json.loads(report)
        if Path(place).is_relative_to(ROOT):
            raise Failed(f"{place} is the checkout")
        works(folder, has_torch=torch != "none")
    except Failed as error:
        is_missing = any(words in str(error) for words in MISSING) and "torch" in str(error)
        cell.result = "left out: the registry has none" if is_missing else f"failed: {error}"
    finally:
        shutil.rmtree(folder)
    return cell


def installed(wheel: Path, folder: Path, torch: str, index: str | None) -> None:
    """Install the wheel, with torch or for servers alone."""
    pip = [str(folder / "env/bin/python"), "-m", "pip", "install", "--quiet"]
    if torch == "none":
        run([*pip, f"{wheel}[openai]"], folder)
        return
    wanted = "torch" if torch == "newest" else f"torch=={torch}"
    run([*pip, wanted, *(["--index-url", index] if index else [])], folder)
    run([*pip, f"{wheel}[local]"], folder)


def works(folder: Path, *, has_torch: bool) -> None:
    """Raise Failed unless the installed command does its work."""
    command, home = str(folder / "env/bin/forethought"), folder / "elsewhere"
    home.mkdir()
    if not has_torch:
        if "majority_vote" not in run([command, "methods"], home):
            raise Failed("forethought methods does not list majority_vote")
        return
    answer = run([command, "generate", QUESTION, "--temperature", "0"], home)
    if ANSWER not in answer:
        raise Failed(f"the answer is {answer[-200:]!r}")


def run(command: list[str], folder: Path) -> str:
    """What a command writes; raises Failed with the end of its errors."""
    environment = {**os.environ, "PYTHONPATH": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Failed((done.stderr or done.stdout).strip()[-500:])
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
