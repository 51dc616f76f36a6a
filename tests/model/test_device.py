"""Devices by name, and the warning about more threads than processors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from forethought import SamplingParams
from forethought.errors import ParameterError
from forethought.llm.llm import LLM
from forethought.model import device
from forethought.model.device import (
    BYTES_PER_THREAD,
    available_threads,
    check_threads,
    choose_threads,
    computing_threads,
    find_device,
    native_threads,
    torch_alone,
    usable_processors,
)
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
        LLM(speaking("byte_level"), num_threads="torch").shutdown()
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


@pytest.mark.parametrize(("native", "each"), [(False, BYTES_PER_THREAD), (True, 2**22)])
def test_small_models_get_few_threads_and_none_more_than_there_are(native: bool, each: int) -> None:
    sizes = {(0, 8): 1, (each, 8): 1, (each + 1, 8): 2, (100 * each, 8): 8, (100 * each, 1): 1}
    found = {size: choose_threads(*size, native=native) for size in sizes}
    assert found == sizes


def test_no_more_threads_are_available_than_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    with computing_threads(3):
        for processors, threads in [(0.5, 1), (2.9, 2), (64.0, 3)]:
            monkeypatch.setattr(device, "usable_processors", lambda count=processors: count)
            assert available_threads() == threads


def test_a_step_runs_on_the_threads_of_its_engine_and_leaves_those_of_torch(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "usable_processors", lambda: 64.0)
    with computing_threads(2), caplog.at_level("INFO"), LLM(speaking("byte_level")) as llm:
        assert any("steps run on 1 of 2 threads" in record.message for record in caplog.records)
        engine, seen = llm.lend("a test").engine, []
        llm.take_back()
        forward = engine.runner.lm.run
        monkeypatch.setattr(
            engine.runner.lm, "run", lambda *a: seen.append(torch.get_num_threads()) or forward(*a)
        )
        llm.generate([5, 6, 7], SamplingParams(max_tokens=2, temperature=0.0))
        assert set(seen) == {1}
        assert torch.get_num_threads() == 2


def test_torch_computes_alone_beside_the_threads_of_cpp() -> None:
    before = torch.get_num_threads()
    with computing_threads(3):
        with torch_alone():
            assert (torch.get_num_threads(), native_threads()) == (1, 3)
        assert (torch.get_num_threads(), native_threads()) == (3, 3)
    assert torch.get_num_threads() == native_threads() == before


@pytest.mark.parametrize(("forward", "threads"), [("native", (1, 2)), ("torch", (2, 2))])
def test_torch_computes_alone_in_the_steps_of_a_native_model_alone(
    forward: str, threads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    with computing_threads(2), LLM(forward=forward, num_threads=2) as llm:
        engine = llm.lend("a test").engine
        llm.take_back()
        forward_of = engine.runner.forward

        def spy(*args):
            seen.add((torch.get_num_threads(), native_threads()))
            return forward_of(*args)

        monkeypatch.setattr(engine.runner, "forward", spy)
        llm.generate([5, 6, 7], SamplingParams(max_tokens=2, temperature=0.0))
        assert (torch.get_num_threads(), native_threads()) == (2, 2)
    assert seen == {threads}
