"""Layers in a file: a network computes with them what it computes with all of them in memory."""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn
from transformers import CONFIG_MAPPING

import adapters
import drafters
import gguf
from chain_drafters import draft_model
from engines import GREEDY, drain, engine_over, expect_empty, outputs
from forethought.backends.cpu.layer_window import LayerWindow, streamed_layers
from forethought.backends.cpu.network import NativeNetwork
from forethought.backends.cpu.packed_linear import PackedLinear
from forethought.backends.cpu.structures import LinearStruct
from forethought.backends.cpu.weight_file import WeightFile
from forethought.config.drafters import UserProvidedDecodingConfig
from forethought.config.engine import LlmArgs
from forethought.engine import resolve
from forethought.engine.engine import Engine
from forethought.errors import ModelError, ParameterError, RequestError
from forethought.model import loader
from forethought.model.adapter import read_adapter
from forethought.model.causal_lm import CausalLM
from forethought.model_dir import find_model_dir
from gguf_files import config_of_case, module_of_case, write_model
from models import prompts, save_random, tiny

PROMPTS = prompts((3, 17, 1, 30, 90))
NEW, LAYERS = 16, 6
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4", "dtype": "float32"},
    "w8a8": {"quantization": "w8a8", "dtype": "float32"},
    "w4a8": {"quantization": "w4a8", "dtype": "float32"},
}


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="deep-models-")


@functools.cache
def deep(model_type: str = "llama") -> Path:
    """A tiny model of six layers."""
    path = Path(_directory().name) / model_type
    save_random(CONFIG_MAPPING[model_type](**SIZES), path)
    return path


def load(directory: Path, window: int | None, **fields: Any) -> CausalLM:
    return loader.load(directory, forward="auto", layer_window=window, **fields)


def window_of(lm: CausalLM) -> LayerWindow:
    network = lm.network
    assert isinstance(network, NativeNetwork)
    assert network.window is not None
    return network.window


def machine(lm: CausalLM, **settings: Any) -> Engine:
    return engine_over(lm, pages=80, max_num_tokens=40, **settings)


def generated(lm: CausalLM, num_steps: int = 1, **settings: Any) -> list[list[int]]:
    """Requests that come one after the other: a prompt in chunks, and a prefix twice."""
    engine, sequences = machine(lm, **settings), []
    engine.num_decode_steps = num_steps
    for prompt in (*PROMPTS, PROMPTS[3] + PROMPTS[1]):
        sequences += engine.add(prompt, GREEDY.replace(max_tokens=NEW))
        engine.step()
    drain(engine)
    expect_empty(engine)
    return outputs(sequences)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_tokens_are_those_with_all_layers_in_memory(precision: str) -> None:
    fields = PRECISIONS[precision]
    whole = generated(load(deep(), None, **fields))
    for size in (1, 2, LAYERS - 1):
        assert generated(load(deep(), size, **fields)) == whole


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])
def test_biases_and_norms_of_heads_are_those_of_their_layer(model_type: str) -> None:
    more = {"sliding_window": None} if model_type == "mistral" else {}
    path = Path(_directory().name) / f"{model_type}-plain"
    save_random(CONFIG_MAPPING[model_type](**SIZES, **more), path)
    lm = load(path, 2, dtype="float32")
    assert generated(lm) == generated(load(path, None, dtype="float32"))


def blocks_of(name: str, data: np.ndarray) -> Any:
    """Values in another type than queries and keys, so that one product has parts."""
    kinds = gguf.GGMLQuantizationType
    if data.ndim < 2 or "norm" in name:
        return kinds.F32
    return kinds.Q4_0 if "attn_v" in name else kinds.Q8_0


@pytest.fixture
def gguf_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORETHOUGHT_CACHE", str(tmp_path / "cache"))
    weights = dict(module_of_case("llama").state_dict())
    path = write_model(tmp_path / "m.gguf", "llama", weights=weights, quantize=blocks_of)
    return find_model_dir(path)


def test_layers_of_gguf_files_stay_in_their_blocks(gguf_model: Path) -> None:
    lm = load(gguf_model, 1)
    assert generated(lm) == generated(load(gguf_model, None))
    num_elements = sum(weight.num_elements for weight in lm.traits.weights[-7:]) * lm.num_layers
    assert window_of(lm).file_bytes < 2 * num_elements


@pytest.mark.parametrize("architecture", ["mistral", "gemma3", "phi3"])
def test_layers_that_transformers_reads_may_be_in_a_file(architecture: str) -> None:
    lm = load(tiny(architecture), 1, dtype="float32")
    assert generated(lm) == generated(load(tiny(architecture), None, dtype="float32"))
    assert window_of(lm).counts.num_read > 0


@pytest.mark.parametrize("case", ["gemma3", "phi3", "qwen3moe"])
def test_layers_of_a_gguf_file_that_transformers_reads_may_be_in_another(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETHOUGHT_CACHE", str(tmp_path / "cache"))
    weights = dict(module_of_case(case).state_dict())
    if config_of_case(case).tie_word_embeddings:
        del weights["lm_head.weight"]
    path = write_model(tmp_path / "m.gguf", case, weights=weights, quantize=blocks_of)
    directory = find_model_dir(path)
    assert generated(load(directory, 1)) == generated(load(directory, None))


def test_several_steps_of_a_call_read_the_layers_again() -> None:
    lm = load(deep(), 3, dtype="float32")
    before = window_of(lm).counts.num_read
    assert generated(lm, num_steps=8) == generated(load(deep(), None, dtype="float32"))
    engine = machine(lm)
    engine.num_decode_steps = 8
    engine.add(PROMPTS[1], GREEDY.replace(max_tokens=9))
    engine.step()
    at = window_of(lm).counts.num_read
    engine.step()  # eight steps in one call
    assert not engine.has_work
    num_streamed = len(streamed_layers(LAYERS, 3))
    assert at > before
    assert abs(window_of(lm).counts.num_read - at - 8 * num_streamed) <= 2  # read ahead


@pytest.mark.parametrize("kind", ["tree", "draft model"])
def test_drafts_are_exact_with_layers_in_a_file(kind: str) -> None:
    whole = load(tiny("llama"), None, dtype="float32")
    plain = generated(whole)
    texts = dict(zip(map(tuple, PROMPTS), plain, strict=False))
    tree = UserProvidedDecodingConfig(
        max_draft_len=4, max_total_draft_tokens=8, drafter=drafters.bush(texts)
    )
    configs = [tree if kind == "tree" else draft_model()]
    windowed = load(tiny("llama"), 2, dtype="float32")
    assert generated(windowed, num_steps=8, speculative=configs) == plain


def test_samples_and_prefixes_are_shared() -> None:
    results = []
    for size in (None, 2):
        engine = machine(load(deep(), size, dtype="float32"))
        params = GREEDY.replace(temperature=0.8, n=3, seed=5, max_tokens=NEW)
        sequences = engine.add(PROMPTS[3], params)
        drain(engine)
        again = engine.add(PROMPTS[3], params)
        drain(engine)
        assert again[0].usage.cached > 0
        expect_empty(engine)
        results.append(outputs([*sequences, *again]))
    assert results[0] == results[1]


def test_adapters_add_to_layers_in_a_file(tmp_path: Path) -> None:
    matrices, results = adapters.random_tensors(deep()), []
    adapter = read_adapter("a", adapters.save(tmp_path / "a", matrices))
    for size in (None, 2):
        lm = load(deep(), size, dtype="float32")
        engine = machine(lm)
        engine.adapters.add(lm.place(adapter))
        sequences = [engine.add(prompt, GREEDY.replace(adapter="a"))[0] for prompt in PROMPTS]
        drain(engine)
        expect_empty(engine)
        results.append(outputs(sequences))
    assert results[0] == results[1]
    assert results[0] != generated(load(deep(), None, dtype="float32"))[:5]


@pytest.mark.parametrize("num_layers", [2, 3, 6, 32])
def test_all_but_two_layers_of_a_window_stay_and_are_spread(num_layers: int) -> None:
    for size in range(1, num_layers):
        streamed = sorted(streamed_layers(num_layers, size))
        assert len(streamed) == num_layers - max(0, size - 2)
        held = [index for index in range(num_layers) if index not in streamed]
        gaps = {after - before for before, after in itertools.pairwise(held)}
        assert not gaps or max(gaps) - min(gaps) <= 1


def test_memory_is_that_of_the_window() -> None:
    whole = load(deep(), None, dtype="float32")
    layer = sum(weight.num_bytes for weight in whole.traits.weights[-7:])
    for size in (1, 2, 4):
        lm = load(deep(), size, dtype="float32")
        outside = whole.weight_bytes - LAYERS * layer
        assert lm.weight_bytes <= outside + size * (layer + 4096)
        assert window_of(lm).file_bytes >= len(streamed_layers(LAYERS, size)) * layer


PEAK = """
import json, sys, threading
from forethought.config.sampling import SamplingParams
from forethought.engine.engine import Engine
from forethought.engine.scheduler import Limits
from forethought.model import loader
from forethought.model.runner import ModelRunner

def anonymous():
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

def generated(path, window):
    lm = loader.load(path, dtype="float32", forward="native", layer_window=window)
    engine = Engine(ModelRunner(lm, lm.storage(8, 16)), Limits(4, 16, 64))
    [sequence] = engine.add([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=8))
    while engine.has_work:
        engine.step()
    return sequence.output

def watched(path, window):
    stopped, before, peaks = threading.Event(), anonymous(), [0]
    def watch():
        while not stopped.wait(0.0005):
            peaks.append(anonymous())
    thread = threading.Thread(target=watch)
    thread.start()
    tokens = generated(path, window)
    stopped.set()
    thread.join()
    return [max(peaks) - before, tokens]

generated(sys.argv[2], None)  # what the first model takes beside its weights stays out
print(json.dumps([watched(sys.argv[1], window) for window in (2, None)]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells it")
def test_loading_and_running_never_hold_more_than_the_window(tmp_path: Path) -> None:
    sizes = {**SIZES, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12}
    save_random(CONFIG_MAPPING["llama"](**{**sizes, "head_dim": 128}), tmp_path / "wide")
    layer = 4 * (2 * 512 * 512 + 2 * 256 * 512 + 3 * 512 * 1024)
    command = [sys.executable, "-c", PEAK, tmp_path / "wide", deep()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    (windowed, tokens), (whole, same_tokens) = json.loads(done.stdout.splitlines()[-1])
    assert tokens == same_tokens
    assert whole > 12 * layer
    assert windowed < 5 * layer  # two, one as it is read, its largest product twice, activations


@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_a_file_that_is_damaged_fails_requests_and_never_changes_a_token(damage: str) -> None:
    lm = load(deep(), 2, dtype="float32")
    engine, window = machine(lm), window_of(lm)
    [before] = engine.add(PROMPTS[1], GREEDY.replace(max_tokens=2))
    drain(engine)
    at, size = window.file_bytes // 2, window.file_bytes
    content = os.pread(window.descriptor, size - at, at)
    if damage == "truncated":
        os.ftruncate(window.descriptor, at)
    else:
        os.pwrite(window.descriptor, bytes([content[64] ^ 1]), at + 64)
    [during] = engine.add(PROMPTS[4], GREEDY.replace(max_tokens=NEW))
    failures = [event.error for event in drain(engine) if event.sequence is during and event.error]
    assert isinstance(failures[0], RequestError)
    assert f"layer {LAYERS // 2} could not be read" in str(failures[0])
    assert len(before.output) == 2
    os.pwrite(window.descriptor, content, at)
    drain(engine)
    for _ in range(2):  # the first one may begin with what was read ahead
        [after] = engine.add(PROMPTS[4], GREEDY.replace(max_tokens=NEW))
        drain(engine)
    assert after.output == generated(load(deep(), None, dtype="float32"))[4]
    expect_empty(engine)


@pytest.mark.parametrize(
    ("architecture", "fields", "why"),
    [
        ("llama", {"forward": "torch"}, "not asked for"),
        ("llama", {"device": "meta"}, "runs on meta"),
        ("llama", {"fuse": False}, "fuse=False"),
        ("llama", {"attention": "sdpa"}, "another backend"),
        ("llama", {"dtype": "float16"}, "float16"),
        ("gemma2", {}, "not among its families"),
        ("qwen3_5", {}, "not among its families"),
        ("gemma3", {"dtype": "bfloat16"}, "in memory to be converted"),
        ("gemma3", {"quantization": "int8"}, "in memory to be quantised"),
        ("qwen3_moe", {}, "in memory to be merged"),
    ],
)
def test_models_that_cannot_leave_layers_in_a_file_are_refused_before_they_are_read(
    architecture: str, fields: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("weights are read")

    monkeypatch.setattr("forethought.model.transformers_module.checked_module", fail)
    monkeypatch.setattr("forethought.model.checkpoint_module.CheckpointModule.read", fail)
    with pytest.raises(ModelError, match=why):
        loader.load(tiny(architecture), layer_window=1, **{"forward": "auto", **fields})


def test_windows_that_make_no_sense_are_refused(gguf_model: Path) -> None:
    with pytest.raises(ParameterError, match="the model has 6 layers"):
        load(deep(), LAYERS)
    with pytest.raises(ParameterError, match="exclude each other"):
        load(deep(), 1, expert_bytes=2**20)
    with pytest.raises(ModelError, match="quantised already"):
        load(gguf_model, 1, quantization="int8")
    with pytest.raises(ParameterError, match="layer_window"):
        LlmArgs(layer_window=0)
    with pytest.raises(ParameterError, match="a slice of every layer"):
        resolve.build(LlmArgs(layer_window=1, tensor_parallel_size=2, device="cpu"), deep())


def test_the_file_is_not_in_the_memory_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no directory in memory is known")
    monkeypatch.setenv("FORETHOUGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    assert WeightFile("layers", "layer_window")._directory == tmp_path
    monkeypatch.setenv("FORETHOUGHT_CACHE", "/dev/shm/forethought-test")
    with pytest.raises(ModelError, match="in the memory of the machine"):
        WeightFile("layers", "layer_window")
    os.rmdir("/dev/shm/forethought-test")


def test_without_temporary_directories_the_file_is_in_the_cache_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", missing)
    monkeypatch.setenv("FORETHOUGHT_CACHE", str(tmp_path / "cache"))
    assert WeightFile("layers", "layer_window")._directory == tmp_path / "cache"
    tmp_path.joinpath("file").touch()
    monkeypatch.setenv("FORETHOUGHT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"layers cannot be stored in a file: .*/file: "):
        WeightFile("layers", "layer_window")


def test_layers_are_read_through_the_cache_of_a_system_that_must(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "preadv", refuse)
    lm = load(deep(), 2, dtype="float32")
    assert generated(lm) == generated(load(deep(), None, dtype="float32"))


def test_what_the_reader_points_to_its_slots_lives_until_it_has_ended() -> None:
    """A network that is freed frees its layers first."""
    window, packed = LayerWindow(2, 1), PackedLinear.of(nn.Linear(32, 16))
    structs = (LinearStruct * 1)(packed.struct)
    window.put(0, [(structs[0], packed.tensors)])
    alive = weakref.ref(structs)
    del structs
    window.open()
    assert alive() is not None
    del window
    assert alive() is None


def test_a_disk_without_room_is_refused_at_the_first_layer() -> None:
    file = WeightFile("layers", "layer_window")
    file.check_room(2**10)
    with pytest.raises(ModelError, match="it has no room"):
        file.check_room(2**50)
