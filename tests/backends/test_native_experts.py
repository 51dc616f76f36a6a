"""Mixtures of experts in C++: rows grouped by expert, shared experts, quantised weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import models
from engines import GREEDY, drain, engine_over, expect_empty, outputs
from forethought import SamplingParams
from forethought.backends.cpu import library
from forethought.backends.cpu.backend import CpuBackend
from forethought.backends.cpu.network import NativeNetwork
from forethought.config.drafters import NGramDecodingConfig
from forethought.kv.pool import PagePool
from forethought.kv.storage import KvStorage
from forethought.kv.table import PageTable
from forethought.model import loader
from forethought.model.batch import Row
from forethought.model.causal_lm import CausalLM
from forethought.model.runner import ModelRunner

ARCHITECTURES = ["qwen2_moe", "qwen3_moe"]
QUANTIZATIONS = ["int8", "int4", "w8a8", "w4a8"]
WIDE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
"""Widths that groups of 4 bits divide."""

pytestmark = pytest.mark.skipif(
    library.find_compiler() is None, reason="there is no C++ compiler (c++, g++ or clang++)"
)


def save(path: Path, architecture: str = "qwen3_moe", **sizes: int) -> Path:
    """A model whose sizes differ from those of ``models.tiny``."""
    config = loader.load(models.tiny(architecture)).config
    config.update(sizes)
    models.save_random(config, path)
    return path


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that 4 bits can hold, by architecture."""
    directory = tmp_path_factory.mktemp("wide")
    return {name: save(directory / name, name, **WIDE) for name in ARCHITECTURES}


def native(path: Path, dtype: str = "float32", **settings: str) -> CausalLM:
    lm = loader.load(path, dtype=dtype, forward="native", **settings)
    assert isinstance(lm.network, NativeNetwork)
    return lm


def tokens(count: int) -> list[int]:
    source = torch.Generator().manual_seed(count)
    return torch.randint(3, models.VOCAB, (count,), generator=source).tolist()


def new_runner(lm: CausalLM, num_slots: int = 1024) -> tuple[ModelRunner, PagePool]:
    pool = PagePool(num_slots // 4, 4)
    storage = KvStorage(lm.layer_shapes, pool.num_pages, 4, lm.dtype)
    return ModelRunner(lm, storage), pool


def logits(lm: CausalLM, prompt: Sequence[int], size: int) -> torch.Tensor:
    """Of all tokens of a prompt that enters in chunks of ``size``."""
    runner, pool = new_runner(lm)
    table, parts = PageTable(pool), []
    for start in range(0, len(prompt), size):
        chunk = prompt[start : start + size]
        table.append(len(chunk))
        parts.append(runner.forward([Row(chunk, start, table)]))
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_in_several_passes_are_the_same_to_the_last_bit(tmp_path: Path, dtype: str) -> None:
    """More rows of an expert than are gathered at a time, and of all than there is memory for."""
    sizes = {"hidden_size": 2048, "num_experts": 24, "num_experts_per_tok": 20, "head_dim": 16}
    sizes |= {"num_hidden_layers": 1, "max_position_embeddings": 512}
    lm = native(save(tmp_path / "large", **sizes), dtype)
    prompt = [*tokens(230), *tokens(220)]
    whole = logits(lm, prompt, 450)
    assert torch.equal(logits(lm, prompt, 90), whole)
    if dtype == "float32":
        reference = loader.load(tmp_path / "large", dtype=dtype, fuse=False)
        torch.testing.assert_close(whole, logits(reference, prompt, 450), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_number_of_threads_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, architecture: str, dtype: str
) -> None:
    """With fewer panels than threads, and with parts of experts."""
    lm = native(models.tiny(architecture), dtype)
    for size in (1, 2, 30):
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        alone = logits(lm, tokens(60), size)
        for num_threads in (2, 3, 7):
            monkeypatch.setattr(torch, "get_num_threads", lambda count=num_threads: count)
            assert torch.equal(logits(lm, tokens(60), size), alone)


def test_a_chunk_without_logits_is_stored(tmp_path: Path) -> None:
    """Its last layer has no token left to compute experts for."""
    lm, prompt = native(models.tiny("qwen3_moe")), tokens(20)
    runner, pool = new_runner(lm)
    table = PageTable(pool)
    table.append(19)
    assert len(runner.forward([Row(prompt[:19], 0, table, logits_from=19)])) == 0
    table.append(1)
    assert torch.equal(runner.forward([Row(prompt[19:], 19, table)]), logits(lm, prompt, 1)[19:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_that_is_not_finite_changes_none_beside_it(dtype: str) -> None:
    lm = native(models.tiny("qwen2_moe"), dtype)
    runner, pool = new_runner(lm)
    tables = [PageTable(pool) for _ in range(3)]
    for index, table in enumerate(tables):
        table.append(9)
        runner.forward([Row(tokens(9 + index)[:9], 0, table)])
    for cache in runner.storage.values:
        cache[tables[1].slots(0, 9)] = float("nan")
    for table in tables:
        table.append(1)
    rows = [Row([5 + index], 9, table) for index, table in enumerate(tables)]
    together = runner.forward(rows)
    assert together[1].isnan().all()
    for index in (0, 2):
        assert torch.equal(together[index], runner.forward([rows[index]])[0])


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_quantised_experts_are_those_of_torch(
    wide: dict[str, Path], architecture: str, quantization: str
) -> None:
    """Sums of attention differ in their last bits, which may round an activation apart."""
    settings = {"dtype": "float32", "quantization": quantization}
    reference = loader.load(wide[architecture], forward="torch", **settings)
    lm, expected = native(wide[architecture], **settings), logits(reference, tokens(30), 30)
    error = (logits(lm, tokens(30), 30) - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.median() < 1e-5
    assert error.max() < (0.05 if quantization in ("w8a8", "w4a8") else 1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_token_of_quantised_experts_is_the_same_to_the_last_bit_in_every_batch(
    wide: dict[str, Path], quantization: str, dtype: str
) -> None:
    lm, prompt = native(wide["qwen2_moe"], dtype, quantization=quantization), tokens(64)
    alone = logits(lm, prompt, 1)
    for size in (7, 32):
        assert torch.equal(logits(lm, prompt, size), alone)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_drafts_change_no_token_of_quantised_experts(
    wide: dict[str, Path], quantization: str, temperature: float
) -> None:
    lm = native(wide["qwen3_moe"], quantization=quantization)
    params = SamplingParams(temperature=temperature, max_tokens=30, ignore_eos=True, seed=3)
    drafts = NGramDecodingConfig(max_draft_len=4, max_matching_ngram_size=2)
    assert generated(lm, params, [drafts]) == generated(lm, params)


def generated(
    lm: CausalLM, params: SamplingParams = GREEDY, speculative: Sequence[NGramDecodingConfig] = ()
) -> list[list[int]]:
    engine = engine_over(lm, speculative=speculative)
    sequences = [engine.add(prompt, params)[0] for prompt in models.prompts()]
    drain(engine)
    expect_empty(engine)
    return outputs(sequences)


def test_quantised_experts_take_less_memory(tmp_path: Path) -> None:
    path = save(tmp_path / "wide", hidden_size=128, moe_intermediate_size=128, num_experts=16)
    sizes = {
        name: native(path, "bfloat16", **({"quantization": name} if name else {})).weight_bytes
        for name in (None, *QUANTIZATIONS)
    }
    assert sizes["w8a8"] <= sizes["int8"] < 0.56 * sizes[None]
    assert sizes["w4a8"] < sizes["int4"] < 0.36 * sizes[None]


def test_auto_takes_the_native_forward_for_large_mixtures_in_4_bits(
    wide: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch computes one expert after the other."""
    monkeypatch.setattr(loader, "has_fast_matmul", lambda *_: True)
    monkeypatch.setattr(CpuBackend, "uses_amx", lambda: True)
    monkeypatch.setattr(loader, "MAX_SMALL_WEIGHTS", 0)
    lm = loader.load(wide["qwen3_moe"], dtype="bfloat16", quantization="int4", forward="auto")
    assert (lm.path.kind, lm.path.reason) == ("native", None)
