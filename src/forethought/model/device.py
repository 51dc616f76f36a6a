"""What a caller calls a device, as torch's.

[processors] How many processors this process may use, and whether torch has started more threads
than that.

Knows nothing about models.
"""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path

import torch

from forethought.errors import ParameterError


def find_device(name: str) -> torch.device:
    """The device of that name; ``auto``: CUDA where torch has it, else the CPU.

    Raises:
        ParameterError: there is none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ParameterError("invalid device", str(error), "Use cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ParameterError(f"device {name}", "torch finds no CUDA device", "Use cpu")
    return device


log = logging.getLogger(__name__)


def check_threads(system: Path = Path("/")) -> None:
    """Warn if torch computes with more threads than there are processors for them.

    Each small operation ends when its slowest thread does, and a thread that waits for its turn on
    a processor can make that a hundred times longer. Nothing is changed: the number of threads is
    the whole program's.

    Args:
        system: where ``proc`` and ``sys`` lie.
    """
    threads, processors = torch.get_num_threads(), usable_processors(system)
    if threads > math.ceil(processors):
        fit = max(1, math.floor(processors))
        log.warning(
            "torch computes with %d threads, and this process may use %.3g processors: every step "
            "will wait for threads that wait for a processor. Start it with OMP_NUM_THREADS=%d, or "
            "call torch.set_num_threads(%d) first",
            threads,
            processors,
            fit,
            fit,
        )


def usable_processors(system: Path = Path("/")) -> float:
    """Processors that the affinity of this process and the quotas of its control groups leave it.

    Args:
        system: where ``proc`` and ``sys`` lie.
    """
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    return min([float(count), *_quotas(system)])


def _quotas(system: Path) -> list[float]:
    """The quotas of all control groups that this process is in, in processors."""
    try:
        lines = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = system / "sys/fs/cgroup" / ("cpu" if controllers else "")
        leaf = mount / group.strip("/")
        for directory in (leaf, *leaf.parents):
            if directory == mount.parent:
                break
            quota = _quota(directory)
            if quota is not None:
                found.append(quota)
    return found


def _quota(group: Path) -> float | None:
    """Of one control group; None if it has none. Version 2 has it in one file, version 1 in two."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            most, period = " ".join((group / name).read_text() for name in names).split()
            if int(most) > 0 and int(period) > 0:
                return int(most) / int(period)
        except (OSError, ValueError):  # there is no such file, or it says "max"
            continue
    return None
