"""The machine that a command runs on: its processor's name, cores and instruction sets."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forethought.llm.llm import LLM

_CPUINFO = Path("/proc/cpuinfo")
_NAMES = ("model name", "Model", "cpu model", "Hardware")
"""Keys of the processor's name in ``/proc/cpuinfo``, the best first."""
_FLAGS = ("flags", "Features")
_SETS = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_fp16", "amx_int8"),
    *("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)
"""Instruction sets that decide how fast a model runs, as Linux names them."""


def processor_name() -> str:
    """Such as "AMD EPYC 7763"; the architecture where the name is unknown."""
    facts = _facts(_CPUINFO)
    name = next((facts[key] for key in _NAMES if facts.get(key)), "") or _macos_name()
    return name or platform.processor() or platform.machine()


def instruction_sets() -> list[str]:
    """Those of ``_SETS`` that the processor has; empty where that is unknown."""
    facts = _facts(_CPUINFO)
    flags = set(" ".join(facts.get(key, "") for key in _FLAGS).split())
    return [name for name in _SETS if name in flags]


def num_cores() -> int:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_threads(llm: LLM) -> int:
    """Threads that the steps of a model run on."""
    import torch

    chosen = llm.lend("bench").engine.num_threads
    llm.take_back()
    return chosen or torch.get_num_threads()


def measured_on(fields: dict[str, Any]) -> dict[str, Any]:
    """The machine as reports of ``bench`` name it; ``fields`` are those of the run's
    ``LlmArgs``.
    """
    import torch

    device = fields.get("device", "auto")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else device,
        "processor": processor_name(),
        "threads": fields.get("num_threads") or torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": str(fields.get("dtype", "auto")),
    }


def _facts(path: Path) -> dict[str, str]:
    """The first processor's lines of ``/proc/cpuinfo``, and those about all; empty elsewhere."""
    try:
        lines: Iterable[str] = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    facts: dict[str, str] = {}
    for line in lines:
        key, colon, value = line.partition(":")
        if colon:
            facts.setdefault(key.strip(), value.strip())
    return facts


def _macos_name() -> str:
    """The name that macOS gives; empty elsewhere."""
    if platform.system() != "Darwin":
        return ""
    try:
        done = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
