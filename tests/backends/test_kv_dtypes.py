"""Keys and values in another dtype than the model's: C++ against torch, and the engine.

The reference of the integers is ``kv.entries``, that of attention over them the torch forward.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import models
from eagle_heads import random_head
from engines import GREEDY, drain, engine_over, expect_empty, outputs
from forethought import LLM, SamplingParams
from forethought.backends.cpu import library
from forethought.config.drafters import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    NGramDecodingConfig,
)
from forethought.config.engine import LlmArgs
from forethought.engine import resolve
from forethought.errors import ParameterError, SnapshotError
from forethought.kv.entries import to_entries
from forethought.kv.pool import PagePool
from forethought.kv.storage import KvStorage
from forethought.kv.table import PageTable
from forethought.model import loader
from forethought.model.batch import Row
from forethought.model.causal_lm import CausalLM
from forethought.model.runner import ModelRunner
from tokens import speaking

DTYPES = [torch.float32, torch.bfloat16, torch.int8]
LONG = 90  # tokens: more than a block of queries, several pages, beyond every window
BLOCK_QUERIES = 32  # new tokens of a row from which queries go in blocks, as in attention.h

needs_compiler = pytest.mark.skipif(
    library.find_compiler() is None, reason="there is no C++ compiler (c++, g++ or clang++)"
)


def load(path: Path, forward: loader.Forward = "native", dtype: str = "float32") -> CausalLM:
    return loader.load(path, dtype=dtype, forward=forward)


def tokens(count: int = LONG) -> list[int]:
    source = torch.Generator().manual_seed(count)
    return torch.randint(3, models.VOCAB, (count,), generator=source).tolist()


def new_runner(lm: CausalLM, dtype: torch.dtype, size: int) -> tuple[ModelRunner, PagePool]:
    pool = PagePool(size // 4, 4)
    storage = KvStorage(lm.layer_shapes, pool.num_pages, 4, lm.dtype, stored_dtype=dtype)
    return ModelRunner(lm, storage), pool


def prefilled(
    lm: CausalLM, dtype: torch.dtype, size: int, scattered: bool = False, length: int = LONG
) -> tuple[torch.Tensor, KvStorage]:
    """The logits of a prompt that enters in chunks of ``size``, and the storage."""
    runner, pool = new_runner(lm, dtype, 2 * length + 8)
    if scattered:  # free pages are never next to each other
        for page in [pool.take() for _ in range(pool.num_pages)]:
            if page % 2:
                pool.release(page)
    table, prompt, found = PageTable(pool), tokens(length), []
    for start in range(0, length, size):
        chunk = prompt[start : start + size]
        table.append(len(chunk))
        found.append(runner.forward([Row(chunk, start, table)]))
    return torch.cat(found), runner.storage


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ["llama", "llama_mqa", "qwen3"])
def test_the_native_forward_stores_the_entries_of_the_reference(
    architecture: str, dtype: torch.dtype
) -> None:
    """In the first layer, whose keys and values no attention has rounded before."""
    lm = load(models.tiny(architecture))
    full, stored = (prefilled(lm, kind, 45)[1] for kind in (torch.float32, dtype))
    pairs = ((full.keys[0], stored.keys[0]), (full.values[0], stored.values[0]))
    for expected, found in pairs:
        assert torch.equal(found, to_entries(expected, dtype))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("architecture", ["llama", "llama_mqa", "mistral", "gemma3"])
def test_logits_are_those_of_torch_over_the_same_entries(
    architecture: str, dtype: torch.dtype
) -> None:
    """But for numbers halfway between two steps, which round up in one and down in the other, and
    for queries and weights of positions, which long runs round to bf16 where the processor has
    products of bf16 and the entries are in it: that is as much again as the rounding of entries.
    """
    path = models.tiny(architecture)
    lm, plain = load(path), load(path, "torch")
    exact = prefilled(plain, torch.float32, 45)[0]
    expected = prefilled(plain, dtype, 45)[0]
    rounding = (expected - exact).norm()
    for size, scattered in ((LONG, False), (45, True), (7, True), (1, False)):
        found = prefilled(lm, dtype, size, scattered)[0]
        rounds_all = dtype == torch.bfloat16 and size > BLOCK_QUERIES and library.rounds_inputs()
        assert (found - expected).norm() < (1.2 if rounds_all else 0.3) * rounding, size


@needs_compiler
@pytest.mark.parametrize("model_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_is_batch_invariant_to_the_last_bit(dtype: torch.dtype, model_dtype: str) -> None:
    lm = load(models.tiny("llama"), dtype=model_dtype)
    alone = prefilled(lm, dtype, 1)[0]
    for size, scattered in ((7, False), (32, True)):
        assert torch.equal(prefilled(lm, dtype, size, scattered)[0], alone)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("architecture", ["llama", "llama_mqa"])
def test_after_several_chunks_threads_and_scattered_pages_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, architecture: str, dtype: torch.dtype
) -> None:
    path, found = tmp_path / "long", []
    shutil.copytree(models.tiny(architecture), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    lm = load(path)
    for num_threads, size, scattered in ((1, 30, False), (2, 30, True), (3, 7, False)):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=num_threads: count)
        found.append(prefilled(lm, dtype, size, scattered, length=1050)[0])
    assert all(torch.equal(other, found[0]) for other in found[1:])


@pytest.mark.parametrize("forward", [pytest.param("native", marks=needs_compiler), "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_drafts_change_no_token(dtype: torch.dtype, forward: loader.Forward) -> None:
    path = models.tiny("llama")
    lm, found = load(path, forward), []
    for speculative in (
        (),
        (NGramDecodingConfig(max_draft_len=4, max_matching_ngram_size=2),),
        (DraftTargetDecodingConfig(max_draft_len=3, speculative_model=path),),
        (EagleDecodingConfig(max_draft_len=4, speculative_model=random_head()),),
    ):
        machine = engine_over(lm, speculative=speculative, kv_dtype=dtype)
        sequences = [machine.add(prompt, GREEDY)[0] for prompt in models.prompts()]
        drain(machine)
        expect_empty(machine)
        found.append(outputs(sequences))
    assert all(other == found[0] for other in found[1:])


@needs_compiler
def test_int8_entries_with_nan_show_in_the_logits(tmp_path: Path) -> None:
    lm = load(models.tiny("llama"))
    runner, pool = new_runner(lm, torch.int8, 256)
    table, prompt = PageTable(pool), tokens(61)
    table.append(60)
    runner.forward([Row(prompt[:60], 0, table, logits_from=60)])
    shape = runner.storage.keys[-1][table.slots(20, 21)].shape
    bad = to_entries(torch.full((*shape[:-1], shape[-1] - 4), torch.nan), torch.int8)
    runner.storage.keys[-1][table.slots(20, 21)] = bad
    table.append(1)
    assert runner.forward([Row(prompt[60:], 60, table)]).isnan().all()


# ---- through LLM ---------------------------------------------------------------------------------

TEXT, MORE = "Hello world, how are you?", " And how are the others?"
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def build(dtype: str, **fields: object) -> LLM:
    cache = {"max_tokens": 1024, "page_size": 4, "dtype": dtype}
    return LLM(speaking(), **{"dtype": "float32", "kv_cache_config": cache, **fields})


def expect_no_page_is_lost(llm: LLM) -> None:
    expect_empty(llm._frontend.engine)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_forks_rewinds_and_cached_prefixes_change_no_token(dtype: str) -> None:
    with build(dtype) as llm:
        expected = llm.generate(TEXT + MORE, PARAMS).outputs[0].token_ids
        assert llm.generate(TEXT + MORE, PARAMS).outputs[0].token_ids == expected
        assert llm.stats.cached > 0
        with llm.start(TEXT) as session:
            length = len(session.tokens)
            with session.fork() as fork:
                fork.extend(MORE)
                assert fork.generate(PARAMS).token_ids == expected
            session.generate(PARAMS)
            session.rewind(length)
            session.extend(MORE)
            assert session.generate(PARAMS).token_ids == expected
        expect_no_page_is_lost(llm)


def test_a_snapshot_in_int8_is_restored_in_int8_alone(tmp_path: Path) -> None:
    with build("int8", snapshot_dir=tmp_path) as llm:
        with llm.start(TEXT) as session:
            session.generate(PARAMS)
            session.save("chat")
            expected = session.generate(PARAMS).token_ids
        with llm.restore("chat") as restored:
            assert restored.generate(PARAMS).token_ids == expected
            assert restored.usage.prefilled == 1
        expect_no_page_is_lost(llm)
    for dtype in ("auto", "bfloat16"):
        with build(dtype, snapshot_dir=tmp_path) as llm, pytest.raises(SnapshotError, match="int8"):
            llm.restore("chat")


def test_the_same_memory_holds_more_tokens_in_a_smaller_dtype() -> None:
    sizes = {}
    for dtype in ("auto", "bfloat16", "int8"):
        with build(dtype, kv_cache_config={"host_cache_size": 200_000, "dtype": dtype}) as llm:
            sizes[dtype] = llm._frontend.engine.pool.num_pages
    assert sizes["bfloat16"] >= 2 * sizes["auto"]
    assert sizes["int8"] > sizes["bfloat16"]


@pytest.mark.parametrize(
    ("fields", "device", "why"),
    [
        ({}, "cuda", "model is on cuda"),
        ({"tensor_parallel_size": 2}, "cpu", "tensor parallelism"),
        ({"attention": "reference"}, "cpu", "attention='reference'"),
    ],
)
def test_a_dtype_that_cannot_be_honoured_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, object], device: str, why: str
) -> None:
    args = LlmArgs.from_dict({"kv_cache_config": {"dtype": "int8"}, **fields})
    monkeypatch.setattr(resolve, "find_device", lambda _: torch.device(device))
    monkeypatch.setattr(loader, "load", None)
    with pytest.raises(ParameterError, match=f"dtype='int8' is not possible here: .*{why}"):
        resolve.build(args, Path("nowhere"))
