"""What a loaded model takes of the memory of this process, part by part."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_STATM, _STATUS = Path("/proc/self/statm"), Path("/proc/self/status")
_PARTS = {
    "libraries": "Python, torch and the rest of the process, before the model is loaded",
    "weights": "as they are held, with embeddings",
    "kv_cache": "of all pages; a page is taken of the system when it is first written",
    "loaded": "resident after the first token",
    "peak": "most that was ever resident",
}
"""Part -> what it is."""


def memory_of(fields: Mapping[str, Any]) -> dict[str, int]:
    """Bytes by part, of a model that is loaded by fields of ``LlmArgs``. Raises as ``LLM``."""
    from forethought import LLM, SamplingParams

    before = _resident()
    with LLM(**fields) as llm:
        llm.generate([[0]], SamplingParams(max_tokens=1, temperature=0.0))
        runner = llm._frontend.engine.runner if llm._frontend else None
        assert runner is not None
        storage = runner.storage
        return {
            "libraries": before,
            "weights": runner.lm.weight_bytes,
            "kv_cache": storage.num_pages * storage.bytes_per_page,
            "loaded": _resident(),
            "peak": _peak(),
        }


def memory_lines(parts: Mapping[str, int]) -> list[str]:
    """A line for each part."""
    return [
        f"  {name:<10}{num_bytes / 2**20:>9.0f} MiB  {_PARTS[name]}"
        for name, num_bytes in parts.items()
    ]


def _resident() -> int:
    """Bytes of this process in memory now; where the system does not say, the most so far."""
    if not _STATM.exists():
        return _peak()
    return int(_STATM.read_text().split()[1]) * resource.getpagesize()


def _peak() -> int:
    if _STATUS.exists():  # ru_maxrss counts what the process was before it began this program
        lines = _STATUS.read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
