"""The machine that a command runs on: its processor's name, cores and instruction sets; and the
memory of this process there.
"""

from __future__ import annotations

import mmap
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forethought.llm.llm import LLM

_CPUINFO = Path("/proc/cpuinfo")
_STATM, _STATUS = Path("/proc/self/statm"), Path("/proc/self/status")
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


def resident_bytes() -> int | None:
    """Bytes of this process in memory now; None where the system does not say."""
    if not _STATM.exists():
        return None
    return int(_STATM.read_text(encoding="utf-8").split()[1]) * mmap.PAGESIZE


def peak_bytes() -> int | None:
    """The most bytes of this process that ever were in memory; None where it is unknown."""
    if _STATUS.exists():  # ru_maxrss counts what the process was before it began this program
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
        peaks = (1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
        return next(peaks, None)
    if sys.platform == "win32":
        return None
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def num_threads(llm: LLM) -> int:
    """Threads that the steps of a model run on."""
    import torch

    chosen = llm.lend("bench").local_engine.num_threads
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
