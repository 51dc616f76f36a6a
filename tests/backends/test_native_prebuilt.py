"""Libraries in the wheel: which one is loaded, what it computes, and how it comes there."""

from __future__ import annotations

import importlib.util
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import models
from forethought.backends.cpu import library
from forethought.backends.cpu.network import NativeNetwork
from forethought.cli import doctor
from forethought.errors import ModelError
from forethought.kv.pool import PagePool
from forethought.kv.storage import KvStorage
from forethought.kv.table import PageTable
from forethought.model import loader
from forethought.model.batch import Row
from forethought.model.runner import ModelRunner

ROOT = Path(__file__).parents[2]
COMPILER = library.find_compiler()
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
V3 = "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
DOTS = f"{V4} avx512_bf16 avx512_vnni"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    library.load_library.cache_clear()
    yield
    library.load_library.cache_clear()


@pytest.fixture
def directory(monkeypatch, tmp_path) -> Path:
    monkeypatch.setattr(library, "PREBUILT", tmp_path)
    return tmp_path


@pytest.fixture
def wheel(directory: Path) -> Path:
    """The directory of a wheel with all libraries, which are empty."""
    for level in library.LEVELS:
        (directory / library.prebuilt_name(level)).touch()
    return directory


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        pytest.param(f"{DOTS} amx_tile amx_bf16", "amx", id="Sapphire Rapids"),
        pytest.param(DOTS, "amx", id="Zen 4"),
        pytest.param(V4, "x86-64-v4", id="Ice Lake"),
        pytest.param(V3, "x86-64-v3", id="Zen 3"),
        pytest.param(V3.replace(" fma", ""), None, id="older"),
        pytest.param("", None, id="another architecture"),
    ],
)
def test_the_highest_level_that_the_processor_has_is_chosen(
    monkeypatch, wheel: Path, flags: str, level: str | None
) -> None:
    monkeypatch.setattr(library, "_processor", lambda: {"flags": flags})
    path = library.prebuilt_path()
    assert (None if path is None else path.name.removeprefix("forward-")[:-20]) == level


def test_where_the_sources_are_others_none_is_chosen(monkeypatch, wheel: Path) -> None:
    monkeypatch.setattr(library, "_processor", lambda: {"flags": V4})
    assert library.prebuilt_path() is not None
    monkeypatch.setattr(library, "SOURCES", library.SOURCES[:-1])
    assert library.prebuilt_path() is None


def test_without_a_compiler_the_library_of_the_wheel_is_named(monkeypatch, wheel: Path) -> None:
    monkeypatch.setattr(library, "find_compiler", lambda: None)
    monkeypatch.setattr(library, "_processor", lambda: {"flags": V3})
    assert library.is_available()
    assert "prebuilt" in doctor._native()
    monkeypatch.setattr(library, "_processor", lambda: {"flags": ""})
    assert not library.is_available()
    assert "no library for this processor" in doctor._native()


def test_a_library_that_the_system_cannot_load_is_compiled(monkeypatch, wheel, caplog) -> None:
    """Its file is empty, as one for a newer libc is refused."""
    monkeypatch.setattr(library, "_processor", lambda: {"flags": V3})
    monkeypatch.setattr(library, "find_compiler", lambda: None)
    with caplog.at_level(logging.INFO), pytest.raises(ModelError, match="cannot be compiled"):
        library.load_library()
    assert "cannot be loaded" in caplog.text


def hook(monkeypatch) -> tuple[type, list[str]]:
    """The class of ``hatch_build.py``, and the warnings that it shows."""
    warnings = list[str]()
    app = types.SimpleNamespace(display_warning=warnings.append)
    base = type("BuildHookInterface", (), {"root": str(ROOT), "app": app})
    module = types.ModuleType("hatchling.builders.hooks.plugin.interface")
    module.BuildHookInterface = base  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    return build.NativeForwardHook, warnings


def built(hook_class: type, root: Path, version: str = "standard") -> dict:
    data: dict = {"force_include": {}}
    hook_class.root = str(root)
    hook_class().initialize(version, data)
    return data


def test_a_wheel_that_is_built_without_a_compiler_is_pure(monkeypatch, tmp_path) -> None:
    hook_class, warnings = hook(monkeypatch)
    monkeypatch.setattr(library, "find_compiler", lambda: None)
    assert built(hook_class, tmp_path) == {"force_include": {}}
    assert "no C++ compiler" in warnings[0]


def test_an_editable_install_compiles_nothing(monkeypatch, tmp_path) -> None:
    hook_class, warnings = hook(monkeypatch)
    monkeypatch.setattr(library, "compile_library", lambda *args: pytest.fail("compiled"))
    assert built(hook_class, tmp_path, "editable") == {"force_include": {}}
    assert not warnings


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="libraries are for Linux")
def test_a_wheel_holds_a_library_of_each_level_which_is_compiled_once(
    monkeypatch, tmp_path
) -> None:
    compiled = list[str]()

    def compile_level(compiler: str, path: Path, flags: tuple[str, ...]) -> None:
        path.touch()
        compiled.extend(flags[:1])

    hook_class, _ = hook(monkeypatch)
    monkeypatch.setattr(library, "compile_library", compile_level)
    monkeypatch.setattr(library, "PREBUILT", tmp_path / "src" / "forethought" / "prebuilt")
    for _ in range(2):  # for the metadata, and for the wheel
        data = built(hook_class, tmp_path)
    names = [library.prebuilt_name(level) for level in library.LEVELS]
    assert list(data["force_include"].values()) == [f"forethought/prebuilt/{n}" for n in names]
    assert sorted(compiled) == sorted(level.flags[0] for level in library.LEVELS)
    assert (data["pure_python"], data["tag"]) == (False, "py3-none-linux_x86_64")


def logits(architecture: str, dtype: str) -> torch.Tensor:
    lm = loader.load(models.tiny(architecture), dtype=dtype, forward="native")
    assert isinstance(lm.network, NativeNetwork)
    pool = PagePool(64, 4)
    runner = ModelRunner(lm, KvStorage(lm.layer_shapes, pool.num_pages, 4, lm.dtype))
    table, results = PageTable(pool), list[torch.Tensor]()
    ids = torch.randint(3, models.VOCAB, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    for start, stop in ((0, 60), (60, 65), (65, 66), (66, 90)):
        table.append(stop - start)
        results.append(runner.forward([Row(ids[start:stop], start, table)]))
    return torch.cat(results)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("level", library.LEVELS, ids=lambda level: level.name)
def test_what_a_prebuilt_library_computes_is_that_of_one_for_this_processor(
    monkeypatch, directory: Path, level: library.Level
) -> None:
    """To the last bit at the highest level that this processor has."""
    features = set(library._processor().get("flags", "").split())
    if not level.features <= features:
        pytest.skip(f"this processor has less than {level.name}")
    assert COMPILER is not None
    is_highest = level is next(level for level in library.LEVELS if level.features <= features)
    dtypes = ("float32", "bfloat16") if is_highest else ("float32",)
    cases = [(name, dtype) for name in ("llama", "qwen3_moe", "gemma3") for dtype in dtypes]
    native = [logits(*case) for case in cases]
    library.compile_library(COMPILER, directory / library.prebuilt_name(level), level.flags)
    library.load_library.cache_clear()
    prebuilt = [logits(*case) for case in cases]
    assert str(directory) in library.load_library()._name
    tolerance = 0.0 if is_highest else 1e-4
    torch.testing.assert_close(prebuilt, native, rtol=tolerance, atol=tolerance)
