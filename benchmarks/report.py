"""The JSON line that ends every benchmark: what was measured, and on which machine."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from forethought.cli.machine import instruction_sets, processor_name
from forethought.model.device import has_fast_matmul


def print_report(benchmark: str, rows: Sequence[dict[str, Any]], **settings: Any) -> None:
    """Print the line.

    Args:
        benchmark: its name.
        rows: of its table.
        settings: that it ran with.
    """
    report = {
        "benchmark": benchmark,
        "date": date.today().isoformat(),
        "commit": commit(),
        "command": shlex.join(["python", "-m", f"benchmarks.{benchmark}", *sys.argv[1:]]),
        **settings,
        "rows": list(rows),
        "device": device(),
        "machine": machine(),
        "instruction_sets": instruction_sets(),
        "dtype": str(dtype()).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(report))


def commit() -> str | None:
    """Of the checkout that is measured, with ``+`` where files differ from it; None: there is no
    checkout, or no git.
    """
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    folder = Path(__file__).resolve().parent
    try:
        return subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def device() -> str:
    """Where models run, as ``LLM`` chooses."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def dtype() -> torch.dtype:
    """In which both sides of a comparison run: bf16 where it is fast, else float32."""
    fast = has_fast_matmul(torch.bfloat16, torch.device(device()))
    return torch.bfloat16 if fast else torch.float32


def machine() -> str:
    """The accelerator or the processor, by name."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return processor_name()
