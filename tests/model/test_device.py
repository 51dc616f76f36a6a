"""Devices by name, and the warning about more threads than processors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from forethought.errors import ParameterError
from forethought.llm.llm import LLM
from forethought.model.device import check_threads, find_device, usable_processors
from tokens import speaking

AFFINITY = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else None
needs_affinity = pytest.mark.skipif(AFFINITY is None, reason="this system has no CPU affinity")


def test_the_cpu_is_always_there() -> None:
    assert find_device("cpu") == torch.device("cpu")
    assert find_device("auto").type in ("cpu", "cuda")


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ParameterError, match="Use cpu, cuda or cuda:N"):
        find_device("zzz")


def test_cuda_is_refused_where_torch_finds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto").type == "cpu"
    with pytest.raises(ParameterError, match="no CUDA device"):
        find_device("cuda:1")


def system(root: Path, group: str, **files: str) -> Path:
    """A directory like ``/`` with the control-group ``files`` (``__`` stands for ``/``)."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(group)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@needs_affinity
def test_without_quotas_the_affinity_is_the_limit(tmp_path: Path) -> None:
    assert usable_processors(tmp_path / "nothing") == AFFINITY
    unlimited = system(tmp_path, "0::/a/b\n", a__b__cpu_DOT_max="max 100000\n")
    assert usable_processors(unlimited) == AFFINITY


@needs_affinity
def test_the_smallest_quota_of_all_parent_groups_is_the_limit(tmp_path: Path) -> None:
    files = {"a__cpu_DOT_max": "25000 100000\n", "a__b__cpu_DOT_max": "50000 100000\n"}
    assert usable_processors(system(tmp_path, "0::/a/b\n", **files)) == 0.25


@needs_affinity
def test_quotas_of_cgroup_version_1_are_read(tmp_path: Path) -> None:
    files = {"cpu__c__cpu_DOT_cfs_quota_us": "60000\n", "cpu__c__cpu_DOT_cfs_period_us": "100000\n"}
    found = system(tmp_path, "4:memory:/x\n1:cpu,cpuacct:/c\n0::/\n", **files)
    assert usable_processors(found) == 0.6


@needs_affinity
def test_building_with_more_threads_than_processors_is_warned_of_once_with_the_fix(
    caplog: pytest.LogCaptureFixture,
) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(int(AFFINITY or 1) + 1)
        LLM(speaking("byte_level")).shutdown()
        (record,) = [r for r in caplog.records if "threads" in r.message]
        assert record.levelname == "WARNING"
        assert f"{AFFINITY:.3g} processors" in record.message
        assert "OMP_NUM_THREADS" in record.message
        assert torch.get_num_threads() == int(AFFINITY or 1) + 1
        caplog.clear()
        torch.set_num_threads(1)
        check_threads()
        assert not caplog.records
    finally:
        torch.set_num_threads(threads)
