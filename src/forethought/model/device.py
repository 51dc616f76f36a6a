"""The torch device of a name: the dtypes that it multiplies, threads, memory, times of forwards."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch

from forethought.errors import ParameterError

log = logging.getLogger(__name__)

BYTES_PER_THREAD = 2**25
"""Weights below which a further thread costs more than it saves: every product of a step waits for
its slowest thread, whatever the product's size."""
NATIVE_BYTES_PER_THREAD = 2**22
"""The same of the native forward, whose barriers take less than a microsecond."""


def find_device(name: str) -> torch.device:
    """The device ``name``; ``auto``: CUDA where torch has it, else the CPU. Raises ParameterError
    if there is no such device.
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


def has_fast_matmul(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device has fast matrix products in ``dtype``. A CPU without AVX-512 or AMX has
    none in 16 bits: torch converts there, several times slower than it multiplies in float32.
    """
    if device.type != "cpu" or dtype == torch.float32:
        return True
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }.get(dtype)
    return supported is not None and torch.backends.mkldnn.is_available() and bool(supported())


def free_gpu_memory(device: torch.device) -> int:
    """Free bytes of a GPU."""
    return int(torch.cuda.mem_get_info(device)[0])


def free_host_memory(system: Path = Path("/")) -> int:
    """Bytes of host memory that are free; the installed ones where the system does not say. On
    Linux caches of files count as free, and a limit of a control group is an upper bound.

    ``system`` is the directory of ``proc`` and ``sys``.
    """
    limits = []
    for group in _groups(system, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                limits.append(int((group / name).read_text()))
            except (OSError, ValueError):  # no such file, or "max"
                continue
    return min([_available_memory(system), *limits])


def return_freed_memory() -> None:
    """Give memory that was freed back to the system, where the C library would keep it (glibc):
    loading a model frees what its weights were packed or merged from.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def owned(weight: torch.Tensor) -> torch.Tensor:
    """A copy on a CPU, where weights as they are loaded may be parts of a mapped file. A network
    that copies most of its weights would otherwise keep the whole file in memory for the rest.
    """
    return weight.detach().clone() if weight.device.type == "cpu" else weight


def _available_memory(system: Path) -> int:
    try:
        lines = (system / "proc/meminfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    names = os.sysconf_names
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def set_threads(num_threads: int, device: torch.device) -> None:
    """Have torch compute with ``num_threads`` threads, in the whole process.

    Raises ParameterError for more than this process may use, or a model that runs on no CPU.
    """
    if device.type != "cpu":
        raise ParameterError(
            "num_threads has no meaning here", f"the model runs on {device}", "Leave it out"
        )
    processors = usable_processors()
    if num_threads > math.ceil(processors):
        raise ParameterError(
            f"invalid num_threads {num_threads}",
            f"this process may use {processors:.3g} processors",
            f"Use 1 to {math.ceil(processors)}",
        )
    torch.set_num_threads(num_threads)
    log.info("torch computes with %d threads", num_threads)


def choose_threads(weight_bytes: int, available: int, *, native: bool) -> int:
    """Threads for the steps of a model: one per ``BYTES_PER_THREAD`` of weights, of those
    available.
    """
    bytes_per_thread = NATIVE_BYTES_PER_THREAD if native else BYTES_PER_THREAD
    return max(1, min(available, -(-weight_bytes // bytes_per_thread)))


def available_threads() -> int:
    """Threads that torch has, but not more than the processors that this process may use."""
    return max(1, min(torch.get_num_threads(), math.floor(usable_processors())))


@contextmanager
def computing_threads(num_threads: int) -> Iterator[None]:
    """Have torch compute with ``num_threads`` threads, in the calling thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_NATIVE_THREADS = ContextVar[int | None]("native_threads", default=None)
"""Threads of C++ within ``torch_alone``; None: as many as torch has. It belongs to the context of
the calling thread, as torch's own number does: two engines in two threads have their own."""


def native_threads() -> int:
    """Threads of a call of C++: as many as torch has, or had before ``torch_alone``."""
    return _NATIVE_THREADS.get() or torch.get_num_threads()


@contextmanager
def torch_alone(num_threads: int | None = None) -> Iterator[None]:
    """Have torch compute in the calling thread alone, and C++ with ``num_threads``, or as many as
    torch has.

    Torch's own look for work for some milliseconds after each operation, on the processors that the
    threads of C++ would compute on.
    """
    num_threads = native_threads() if num_threads is None else num_threads
    token = _NATIVE_THREADS.set(num_threads)
    try:
        with computing_threads(1):
            yield
    finally:
        _NATIVE_THREADS.reset(token)


def check_threads(system: Path = Path("/")) -> None:
    """Warn if torch computes with more threads than there are processors for them.

    Each small operation ends with its slowest thread, and a thread that waits for a processor can
    make that a hundred times longer. The number of threads is not changed: it is the program's.
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
    """Processors that this process may use, by its affinity and the quotas of its control groups.
    ``system`` is the directory of ``proc`` and ``sys``.
    """
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    return min([float(count), *_quotas(system)])


def _quotas(system: Path) -> list[float]:
    """The CPU quotas of all control groups of this process, in processors."""
    quotas = [_quota(group) for group in _groups(system, "cpu")]
    return [quota for quota in quotas if quota is not None]


def _groups(system: Path, controller: str) -> list[Path]:
    """Directories of the control groups of this process that ``controller`` may limit."""
    try:
        lines = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    directories = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = system / "sys/fs/cgroup" / (controller if controllers else "")
        leaf = mount / group.strip("/")
        for directory in (leaf, *leaf.parents):
            if directory == mount.parent:
                break
            directories.append(directory)
    return directories


def _quota(group: Path) -> float | None:
    """The CPU quota of a control group, in cores, or None. Version 1 has it in two files."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((group / name).read_text() for name in names).split()
            if int(quota) > 0 and int(period) > 0:
                return int(quota) / int(period)
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return None


class ForwardTimer:
    """Measures what runs in its context, one forward at a time.

    On a CPU that is wall time. On CUDA a call returns when its work is queued, so two events of the
    stream are compared, once the GPU has passed them; reading them waits for nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._began = self._seconds = 0.0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def __enter__(self) -> None:
        if self._on_gpu:
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._events.append(pair)
            pair[0].record()
        else:
            self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        if self._on_gpu:
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._began

    def take(self) -> float:
        """Seconds of the forwards that were finished since the last call."""
        while self._events and self._events[0][1].query():
            first, last = self._events.popleft()
            self._seconds += first.elapsed_time(last) / 1e3
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def wait(self) -> None:
        """Wait until the last forward is done, which on a CPU it is."""
        if self._events:
            self._events[-1][1].synchronize()
