"""The forward in C++ computes what transformers' module does, the same in every batch."""

from __future__ import annotations

import gc
import json
import logging
import random
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

import models
from engines import GREEDY, drain, engine_over, expect_empty, outputs
from forethought.backends.cpu import library, packed_linear, weights
from forethought.backends.cpu.backend import CpuBackend
from forethought.backends.cpu.network import NativeNetwork
from forethought.backends.cpu.packed_linear import PackedLinear
from forethought.config.drafters import DraftTargetDecodingConfig, NGramDecodingConfig
from forethought.errors import ModelError
from forethought.kv.pool import PagePool
from forethought.kv.storage import KvStorage
from forethought.kv.table import PageTable
from forethought.model import loader
from forethought.model.attention.workspace import KvWorkspace
from forethought.model.batch import Row
from forethought.model.causal_lm import CausalLM
from forethought.model.quantization import QuantizedLinear, QuantizedWeight, quantize
from forethought.model.runner import ModelRunner

FAMILIES = (
    *("llama", "llama_mha", "llama_mqa", "llama_tied_biased", "mistral", "qwen2", "qwen3"),
    *("qwen2_moe", "qwen3_moe", "gemma3", "phi3"),
)
LONG = 90  # tokens: more than a block of queries, several pages, beyond every window

pytestmark = pytest.mark.skipif(
    library.find_compiler() is None, reason="there is no C++ compiler (c++, g++ or clang++)"
)


def native(architecture: str, dtype: str = "float32", **settings) -> CausalLM:
    lm = loader.load(models.tiny(architecture), dtype=dtype, forward="native", **settings)
    assert isinstance(lm.network, NativeNetwork)
    return lm


def tokens(count: int = LONG) -> list[int]:
    source = torch.Generator().manual_seed(count)
    return torch.randint(3, models.VOCAB, (count,), generator=source).tolist()


def new_runner(lm: CausalLM, page_size: int = 4, size: int = 256) -> tuple[ModelRunner, PagePool]:
    pool = PagePool(size // page_size, page_size)
    storage = KvStorage(lm.layer_shapes, pool.num_pages, page_size, lm.dtype)
    return ModelRunner(lm, storage), pool


def scatter(pool: PagePool) -> None:
    """Leave free pages that are never next to each other."""
    taken = [pool.take() for _ in range(pool.num_pages)]
    random.Random(0).shuffle(taken)
    for page in taken:
        if page % 2:
            pool.release(page)


def logits(lm: CausalLM, size: int, scattered: bool = False, length: int = LONG) -> torch.Tensor:
    """Of all tokens of a prompt that enters in chunks of ``size``."""
    runner, pool = new_runner(lm, size=max(256, 2 * length + 8))
    if scattered:
        scatter(pool)
    table, prompt, found = PageTable(pool), tokens(length), []
    for start in range(0, length, size):
        chunk = prompt[start : start + size]
        table.append(len(chunk))
        found.append(runner.forward([Row(chunk, start, table)]))
    return torch.cat(found)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_logits_are_those_of_transformers(architecture: str) -> None:
    """In a long prefill, in short ones, and over scattered pages."""
    plain = logits(loader.load(models.tiny(architecture), fuse=False), 45)
    lm = native(architecture)
    for size, scattered in ((45, False), (7, True)):
        found = logits(lm, size, scattered)
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "architecture", ["llama", "mistral", "qwen2_moe", "qwen3", "qwen3_moe", "gemma3"]
)
def test_a_token_is_the_same_to_the_last_bit_in_every_batch(architecture: str, dtype: str) -> None:
    """One by one, in chunks, over scattered pages, and beside other rows."""
    lm = native(architecture, dtype)
    alone = logits(lm, 1)
    assert torch.equal(logits(lm, 7), alone)
    assert torch.equal(logits(lm, 32, scattered=True), alone)
    runner, pool = new_runner(lm)
    table, others, found, prompt = PageTable(pool), [PageTable(pool) for _ in "ab"], [], tokens()
    for start in range(0, 30, 3):
        rows = []
        for index, (each, size) in enumerate(
            zip([others[0], table, others[1]], (2, 3, 5), strict=True)
        ):
            each.append(size)
            chunk = prompt[start : start + 3] if index == 1 else tokens(size)
            rows.append(Row(chunk, each.length - size, each))
        found.append(runner.forward(rows)[2:5])
    assert torch.equal(torch.cat(found), alone[:30])


def long_model(architecture: str, dtype: str, directory: Path) -> CausalLM:
    """With room for 2,048 tokens."""
    shutil.copytree(models.tiny(architecture), directory)
    config = json.loads((directory / "config.json").read_text())
    config["max_position_embeddings"] = 2048
    (directory / "config.json").write_text(json.dumps(config))
    return loader.load(directory, dtype=dtype, forward="native")


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "llama_mqa", "gemma3"])
def test_rows_that_share_a_prefix_have_the_logits_of_each_row_alone(
    monkeypatch, tmp_path: Path, architecture: str, dtype: str, num_threads: int
) -> None:
    """Of one token and of draft trees, beside strangers, with prefixes that end within chunks."""
    lm = long_model(architecture, dtype, tmp_path / "model")
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    runner, pool = new_runner(lm, size=8192)
    scatter(pool)
    trunk, stranger = PageTable(pool), PageTable(pool)
    for table, size in ((trunk, 700), (stranger, 88)):
        table.append(size)
        runner.forward([Row(tokens(size), 0, table, logits_from=size)])
    rows = []
    for number, (length, size) in enumerate(
        [(700, 1), (700, 5), (612, 1), (400, 3), (88, 1), (400, 1), (400, 40), (300, 1), (20, 1)]
    ):
        table = (stranger if number == 4 else trunk).fork(length)
        table.append(3)
        runner.forward([Row(tokens(3 + number)[:3], length, table)])
        table.append(size)
        parents = (-1, -1, 0, 0, 3) if size == 5 else None
        rows.append(Row(tokens(size), length + 3, table, parents))
    together = runner.forward(rows)
    alone = torch.cat([runner.forward([row]) for row in rows])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("architecture", ["llama_mqa", "mistral", "gemma3"])
def test_a_path_of_a_draft_tree_equals_its_tokens_alone_to_the_last_bit(
    architecture: str,
) -> None:
    lm = native(architecture)
    runner, pool = new_runner(lm)
    table, prompt = PageTable(pool), tokens()
    table.append(20)
    runner.forward([Row(prompt[:20], 0, table, logits_from=20)])
    table.append(6)
    nodes = [prompt[20], 9, 11, prompt[21], 12, prompt[22]]
    parents = (-1, -1, 0, 0, 1, 3)
    found = runner.forward([Row(nodes, 20, table, parents)])
    assert torch.equal(found[[0, 3, 5]], logits(lm, 1)[20:23])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "llama_mqa", "gemma3"])
def test_after_several_chunks_a_token_is_batch_invariant_to_the_last_bit(
    monkeypatch, tmp_path: Path, architecture: str, dtype: str
) -> None:
    """Alone, in a chain, in a tree whose nodes cross the end of a chunk, and with other threads."""
    lm = long_model(architecture, dtype, tmp_path / "model")
    size = 1022  # chunks of 256 tokens, which threads share from four on: one ends behind two more
    prompt, nodes = tokens(size), tokens(6)
    found = []
    for num_threads, shape in ((1, "alone"), (2, "alone"), (3, "chain"), (1, "tree"), (2, "tree")):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=num_threads: count)
        runner, pool = new_runner(lm, size=4096)
        if shape == "tree":
            scatter(pool)
        table = PageTable(pool)
        for start in range(0, size, 73):
            table.append(73)
            runner.forward([Row(prompt[start : start + 73], start, table, logits_from=73)])
        if shape == "alone":
            rows = []
            for index, node in enumerate(nodes):
                table.append(1)
                rows.append(runner.forward([Row([node], size + index, table)]))
            found.append(torch.cat(rows))
        elif shape == "chain":
            table.append(6)
            found.append(runner.forward([Row(nodes, size, table)]))
        else:
            table.append(12)
            both = [token for node in nodes for token in (node, 7)]
            parents = tuple(-1 if at < 2 else (at - 2) // 2 * 2 for at in range(12))
            found.append(runner.forward([Row(both, size, table, parents)])[::2])
    assert all(torch.equal(other, found[0]) for other in found[1:])


def test_a_chunk_of_nan_keys_shows_in_the_logits(
    tmp_path: Path,
) -> None:
    config = loader.load(models.tiny("llama")).config
    config.update({"max_position_embeddings": 1024})
    models.save_random(config, tmp_path / "long")
    lm = loader.load(tmp_path / "long", dtype="float32", forward="native")
    runner, pool = new_runner(lm, size=1024)
    table, prompt = PageTable(pool), tokens(601)
    table.append(600)
    runner.forward([Row(prompt[:600], 0, table, logits_from=600)])
    runner.storage.keys[-1][table.slots(256, 512)] = float("nan")
    table.append(1)
    assert runner.forward([Row(prompt[600:], 600, table)]).isnan().all()


def check_long_prefills(lm: CausalLM) -> None:
    """Where tiles are multiplied, queries and weights are rounded, as inputs of products are."""
    alone = logits(lm, 1)
    for size, scattered in ((LONG, False), (45, True)):
        error = (logits(lm, size, scattered) - alone).norm(dim=1) / alone.norm(dim=1)
        assert error.median() < 0.03
        assert error.max() < 0.1


@pytest.mark.parametrize(
    "architecture", ["llama", "llama_mha", "llama_mqa", "mistral", "qwen3", "gemma3", "phi3"]
)
def test_a_long_bf16_prefill_equals_single_tokens_but_for_rounding(
    architecture: str,
) -> None:
    check_long_prefills(native(architecture, "bfloat16"))


@pytest.mark.parametrize(("head_dim", "group"), [(80, 1), (24, 3), (128, 8)])
def test_long_prefills_in_bf16_take_heads_of_any_size(
    tmp_path: Path, head_dim: int, group: int
) -> None:
    """That fill no tile or several; a score cap."""
    config = loader.load(models.tiny("gemma3")).config
    sizes = {"head_dim": head_dim, "num_attention_heads": 2 * group, "num_key_value_heads": 2}
    config.update(sizes | {"hidden_size": 96, "attn_logit_softcapping": 2.0})
    models.save_random(config, tmp_path / "heads")
    check_long_prefills(loader.load(tmp_path / "heads", dtype="bfloat16", forward="native"))


@pytest.mark.parametrize("architecture", ["llama_mqa", "mistral", "gemma3"])
def test_a_long_bf16_prefill_is_as_near_to_float32_as_single_tokens(
    tmp_path: Path, architecture: str
) -> None:
    """Over several blocks of positions; windows that begin within one."""
    config = loader.load(models.tiny(architecture)).config
    config.update({"max_position_embeddings": 512})
    models.save_random(config, tmp_path / "rounded", dtype=torch.bfloat16)
    exact = logits(loader.load(tmp_path / "rounded", dtype="float32"), 100, length=400)
    lm = loader.load(tmp_path / "rounded", dtype="bfloat16", forward="native")
    alone, long = (
        (logits(lm, size, length=400) - exact).norm(dim=1) / exact.norm(dim=1) for size in (1, 200)
    )
    assert long.median() < 1.25 * alone.median()
    assert long.max() < 1.5 * alone.max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3", "gemma3"])
def test_a_long_prefill_is_the_same_to_the_last_bit_however_it_is_cut(
    tmp_path: Path, architecture: str, dtype: str
) -> None:
    """Into chunks of more tokens than are computed as decodes are."""
    config = loader.load(models.tiny(architecture)).config
    config.update({"max_position_embeddings": 1024})
    models.save_random(config, tmp_path / "long")
    lm = loader.load(tmp_path / "long", dtype=dtype, forward="native")
    whole = logits(lm, 600, length=600)
    for size, scattered in ((300, True), (100, False), (50, True)):
        assert torch.equal(logits(lm, size, scattered, length=600), whole)


@pytest.mark.parametrize("architecture", ["llama", "llama_mqa", "qwen3"])
def test_a_prefill_in_float32_is_the_same_to_the_last_bit_in_short_runs(
    tmp_path: Path, architecture: str
) -> None:
    """Of up to 32 tokens, which are computed as decodes are; over several chunks."""
    config = loader.load(models.tiny(architecture)).config
    config.update({"max_position_embeddings": 1024, "head_dim": 40})
    models.save_random(config, tmp_path / "long")
    lm = loader.load(tmp_path / "long", dtype="float32", forward="native")
    whole = logits(lm, 600, length=600)
    for size, scattered in ((32, True), (9, False), (1, True)):
        assert torch.equal(logits(lm, size, scattered, length=600), whole)


@pytest.mark.parametrize("architecture", ["llama", "qwen2_moe", "qwen3_moe"])
def test_what_scratch_memory_held_before_changes_nothing(tmp_path: Path, architecture: str) -> None:
    """Sizes that fill no tile are padded with zeros; what is left over of a tile is not read."""
    config = loader.load(models.tiny(architecture)).config
    sizes = {"intermediate_size": 72, "shared_expert_intermediate_size": 72}
    config.update({"head_dim": 24, "moe_intermediate_size": 8, **sizes})
    models.save_random(config, tmp_path / "odd")
    lm = loader.load(tmp_path / "odd", dtype="bfloat16", forward="native")
    assert isinstance(lm.network, NativeNetwork)
    found = []
    for size in (1, 7, 45, 1, 7, 45):
        with torch.inference_mode():
            lm.network.forward._scratch.fill_(float("nan"))
        found.append(logits(lm, size))
    assert found[0].isfinite().all()
    for index in range(3):
        assert torch.equal(found[index], found[index + 3])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scattered", [False, True])
def test_slots_that_no_token_attends_to_may_hold_anything(scattered: bool, dtype: str) -> None:
    """Not even zero times their values is added: they are not numbers here."""
    lm, prompt, found = native("mistral", dtype), tokens(), []
    (window,) = set(lm.windows)
    assert window is not None
    for filling in (0.0, float("nan")):
        runner, pool = new_runner(lm)
        if scattered:
            scatter(pool)
        for cache in (*runner.storage.keys, *runner.storage.values):
            cache.fill_(filling)
        table = PageTable(pool)
        table.append(45)
        runner.forward([Row(prompt[:45], 0, table, logits_from=45)])
        slots = table.slots(0, 45 - window + 1)
        for cache in (*runner.storage.keys, *runner.storage.values):
            cache[slots] = filling
        table.append(LONG - 45)
        found.append(runner.forward([Row(prompt[45:], 45, table)]))
    assert found[0].isfinite().all()
    assert torch.equal(*found)


def test_layers_with_and_without_experts_may_alternate(tmp_path: Path) -> None:
    """The MLP of a layer is as wide as its own weights, not as the experts of another."""
    config = loader.load(models.tiny("qwen3_moe")).config
    config.update({"mlp_only_layers": [1], "intermediate_size": 88})
    models.save_random(config, tmp_path / "mixed")
    found = [
        logits(loader.load(tmp_path / "mixed", dtype="float32", **settings), 45)
        for settings in ({"fuse": False}, {"forward": "native"})
    ]
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gemma3"])
def test_hidden_states_and_embeddings_are_those_of_transformers(architecture: str) -> None:
    ids = torch.tensor(tokens(9))
    states, embedded, unembedded = [], [], []
    for forward in ("torch", "native"):
        lm = loader.load(models.tiny(architecture), dtype="float32", fuse=True, forward=forward)
        runner, pool = new_runner(lm)
        table = PageTable(pool)
        table.append(9)
        reader = Reader()
        runner.forward([Row(ids.tolist(), 0, table, logits_from=8)], [reader])
        states.append(reader.states)
        embedded.append(lm.embed(ids))
        unembedded.append(lm.unembed(states[0][-1]))
    for layer_id in Reader.layer_ids:
        torch.testing.assert_close(states[1][layer_id], states[0][layer_id], rtol=1e-4, atol=1e-4)
    assert torch.equal(embedded[0], embedded[1])
    torch.testing.assert_close(unembedded[1], unembedded[0], rtol=1e-4, atol=1e-4)


class Reader:
    """Takes hidden states: what enters the first and second layer, the end, the final norm."""

    layer_ids = (0, 1, 3, -1)

    def write(self, slots, states) -> None:
        self.states = dict(states)

    def mark_stored(self, slots) -> None:
        assert len(slots) == len(self.states[0])


def test_tied_embeddings_are_read_from_the_output_projection() -> None:
    lm, plain = native("llama_tied_biased"), loader.load(models.tiny("llama_tied_biased"))
    ids = torch.tensor([[1, 5], [100, 0]])
    assert torch.equal(lm.embed(ids), plain.embed(ids))
    with pytest.raises(IndexError, match="token id 101 is outside"):
        lm.embed(torch.tensor([3, 101]))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("count", [1, 3, 5, 6, 7, 20])
def test_a_packed_product_is_the_product_with_the_dequantised_weight(
    bits: int, gated: bool, count: int
) -> None:
    source = torch.Generator().manual_seed(bits)
    weight = quantize(torch.randn(44, 64, generator=source), bits)
    bias, x = torch.randn(44, generator=source), torch.randn(count, 64, generator=source)
    found = product(PackedLinear.pack(weight, bias, gated), x)
    if gated:
        found = ungated(found, 22)
    expected = x @ weight.dequantize().t() + bias
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def product(packed: PackedLinear, x: torch.Tensor, num_threads: int = 2) -> torch.Tensor:
    """Float32 x ``[T, in]`` -> ``[T, out]``."""
    found = torch.empty(len(x), packed.struct.num_outputs)
    library.load_library().linear(
        library.ctypes.byref(packed.struct),
        library.ctypes.c_void_p(x.data_ptr()),
        len(x),
        library.ctypes.c_void_p(found.data_ptr()),
        num_threads,
    )
    return found


def ungated(found: torch.Tensor, half: int) -> torch.Tensor:
    """The panels of both halves are in turns, each half is padded to whole panels."""
    halves = found.view(len(found), -1, 2, 16).transpose(1, 2).flatten(2)
    return torch.cat([each[:, :half] for each in halves.unbind(1)], 1)


def bf16_factors(num_inputs: int, num_outputs: int, count: int) -> list[torch.Tensor]:
    """A weight in bf16, a bias, and inputs, whose rows are of different sizes."""
    source = torch.Generator().manual_seed(num_inputs)
    weight = torch.randn(num_outputs, num_inputs, generator=source).to(torch.bfloat16)
    bias = torch.randn(num_outputs, generator=source)
    x = torch.randn(count, num_inputs, generator=source)
    return [weight, bias, x * torch.logspace(-2, 2, count)[:, None]]


def check_bf16_products() -> None:
    """Inputs and outputs that fill no tile, from one token to more than three passes."""
    for num_inputs, num_outputs in ((1, 2), (31, 16), (32, 44), (33, 130), (64, 80), (700, 34)):
        for count in (1, 3, 5, 8, 9, 16, 17, 24, 33, 50, 90):
            weight, bias, x = bf16_factors(num_inputs, num_outputs, count)
            rounded = x.to(torch.bfloat16).float() if library.rounds_inputs() else x
            for gated in (False, True):
                found = product(PackedLinear.pack(weight, bias, gated), x)
                found = ungated(found, num_outputs // 2) if gated else found
                check_product(found, weight, bias, rounded)


def check_product(
    found: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor
) -> None:
    """It is exact but for the sums, which float32 rounds."""
    wide, exact = weight.double(), x.double()
    error = (found - (exact @ wide.t() + bias)).abs()
    size = exact.abs() @ wide.abs().t() + bias.abs()
    assert (error <= (x.shape[1] + 2) * 2**-24 * size).all(), (weight.shape, len(x))


@pytest.mark.parametrize(("inputs", "groups"), [(98, 4), (66, 2)])
def test_int4_groups_of_odd_size_do_not_run_natively(inputs: int, groups: int) -> None:
    """98 inputs in 4 groups: two would be in none of them. 33 inputs of a group are no pairs."""
    values = torch.zeros(16, inputs, dtype=torch.uint8)
    linear = QuantizedLinear(QuantizedWeight(values, torch.ones(16, groups), None, 4))
    why = weights._linear_refusal(linear, torch.float32) or ""
    assert why.startswith("4 bits in groups of ")


def test_a_long_product_is_that_of_its_tokens_in_blocks() -> None:
    """More inputs than are multiplied by all panels at a time, the last block not a whole one."""
    weight, _, _ = bf16_factors(4096, 40, 1)
    x = torch.randn(300, 4096, generator=torch.Generator().manual_seed(1))
    packed = PackedLinear.pack(weight.float(), None)
    found = packed.multiply(x)
    assert torch.equal(found[137:], packed.multiply(x[137:]))
    assert torch.allclose(found, x @ weight.float().T, rtol=1e-4, atol=1e-3)


def test_a_product_with_bf16_is_that_of_the_inputs_rounded_to_bf16() -> None:
    """By AMX and by dot products of bf16; by other vectors, of the inputs themselves."""
    check_bf16_products()


def test_float32_inputs_of_bf16_weights_are_not_rounded_on_request() -> None:
    for count in (1, 5, 40):
        weight, bias, x = bf16_factors(100, 34, count)
        packed = PackedLinear.pack(weight, bias, float32_input=True)
        check_product(product(packed, x), weight, bias, x)


def test_the_router_of_experts_reads_its_inputs_in_float32() -> None:
    lm = native("qwen3_moe", "bfloat16")
    layer = lm.network._layers[0].struct
    assert layer.experts.contents.router.contents.float32_input
    assert not layer.experts.contents.down[0].float32_input


def test_a_row_of_a_product_is_the_same_to_the_last_bit_beside_hundreds() -> None:
    """Whose sums are kept between parts of the inputs."""
    weight, bias, x = bf16_factors(700, 48, 1100)
    packed = PackedLinear.pack(weight, bias)
    alone = torch.cat([product(packed, row[None], 1) for row in x])
    for count in (64, 65, 300, 513, 1100):
        for num_threads in (1, 2):
            assert torch.equal(
                product(packed, x[-count:].contiguous(), num_threads), alone[-count:]
            )


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(70, 100), (96, 64)])
def test_a_row_of_a_product_is_batch_invariant_to_the_last_bit(
    num_inputs: int, num_outputs: int
) -> None:
    weight, bias, x = bf16_factors(num_inputs, num_outputs, 70)
    packed = PackedLinear.pack(weight, bias)
    alone = torch.cat([product(packed, row[None], 1) for row in x])
    for count in range(2, 71):
        for num_threads in (1, 2, 3):
            assert torch.equal(
                product(packed, x[-count:].contiguous(), num_threads), alone[-count:]
            )


def test_products_of_torch_in_between_change_nothing() -> None:
    """Both may use AMX, on the same threads, with tiles of other sizes."""
    weight, bias, x = bf16_factors(96, 64, 21)
    packed = PackedLinear.pack(weight, bias)
    a, b = (torch.randn(150, 150).to(torch.bfloat16) for _ in "ab")
    expected, theirs = product(packed, x), a @ b
    for count in (21, 2, 9):
        assert torch.equal(product(packed, x[:count].contiguous()), expected[:count])
        assert torch.equal(a @ b, theirs)


@pytest.mark.parametrize("architecture", ["llama_tied_biased", "qwen3", "qwen3_moe", "gemma3"])
def test_logits_in_bf16_are_near_those_of_transformers_in_float32(
    tmp_path: Path, architecture: str
) -> None:
    """Keys and values are rounded, and in tiles what products read."""
    config = loader.load(models.tiny(architecture)).config
    models.save_random(config, tmp_path / "rounded", dtype=torch.bfloat16)
    plain = logits(loader.load(tmp_path / "rounded", dtype="float32", fuse=False), 45)
    lm = loader.load(tmp_path / "rounded", dtype="bfloat16", forward="native")
    for size in (1, 7, 45):
        error = (logits(lm, size) - plain).norm(dim=1) / plain.norm(dim=1)
        assert error.median() < 0.02
        assert error.max() < 0.3


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantised_model_generates_what_its_dequantised_weights_do(
    tmp_path: Path, quantization: str
) -> None:
    config = loader.load(models.tiny("qwen3")).config
    config.update({"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8})
    models.save_random(config, tmp_path / "wide")
    found = []
    for forward in ("native", "torch"):
        lm = loader.load(
            tmp_path / "wide", dtype="float32", quantization=quantization, forward=forward
        )
        assert lm.path.kind == {"native": "native", "torch": "fused"}[forward]
        found.append(generated(lm))
    assert found[0] == found[1]


def generated(lm: CausalLM, speculative=()) -> list[list[int]]:
    engine = engine_over(lm, speculative=speculative)
    sequences = [engine.add(prompt, GREEDY)[0] for prompt in models.prompts()]
    drain(engine)
    expect_empty(engine)
    return outputs(sequences)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_engine_generates_what_transformers_does_with_and_without_drafts(
    architecture: str,
) -> None:
    lm, path = native(architecture), models.tiny(architecture)
    expected = models.greedy(path, models.prompts(), 16)
    draft_model = DraftTargetDecodingConfig(max_draft_len=3, speculative_model=path)
    ngram = NGramDecodingConfig(max_draft_len=4, max_matching_ngram_size=2)
    for speculative in ((), (ngram,), (draft_model,)):
        assert generated(lm, speculative) == expected


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_a_level_of_a_workspace_is_the_same_as_a_row_over_pages(architecture: str) -> None:
    lm = native(architecture)
    runner, pool = new_runner(lm)
    tables, prompt = [PageTable(pool) for _ in "ab"], tokens()
    for table, length in zip(tables, (11, 6), strict=True):
        table.append(length)
        runner.forward([Row(prompt[:length], 0, table, logits_from=length)])
    workspace = KvWorkspace(runner.storage, tables, [11, 6], 4, lm.windows)
    ids, positions = torch.tensor([prompt[11], prompt[6]]), torch.tensor([11, 6])
    first = lm.run(workspace.level(ids, positions, 0))
    ids, positions = torch.tensor([prompt[12], prompt[7]]), torch.tensor([12, 7])
    second = lm.run(workspace.level(ids, positions, 1))
    seen = torch.tensor([[[True, True, True, False], [True, True, False, True]]] * 2)
    ids, positions = torch.tensor([prompt[13], 7, prompt[8], 7]), torch.tensor([13, 13, 8, 8])
    third = lm.run(workspace.level(ids, positions, 2, seen))
    alone = logits(lm, 1)
    assert torch.equal(first, alone[[11, 6]])
    assert torch.equal(second, alone[[12, 7]])
    assert torch.equal(third[[0, 2]], alone[[13, 8]])


def test_weights_that_bf16_holds_exactly_take_half_and_change_no_bit(monkeypatch, tmp_path) -> None:
    config = loader.load(models.tiny("qwen3")).config
    models.save_random(config, tmp_path / "rounded", dtype=torch.bfloat16)
    found, sizes = [], []
    for stored in (packed_linear._as_stored, lambda weight: weight):
        monkeypatch.setattr(packed_linear, "_as_stored", stored)
        lm = loader.load(tmp_path / "rounded", dtype="float32", forward="native")
        found.append(torch.cat([logits(lm, size) for size in (1, 45)]))
        sizes.append(lm.network.head.num_bytes)
    assert torch.equal(*found)
    assert sizes[0] * 2 == sizes[1]


def test_weights_are_held_once() -> None:
    path = models.tiny("llama_tied_biased")
    models.transformers_model.cache_clear()
    wanted = sum(weight.numel() for weight in models.transformers_model(path).parameters())
    models.transformers_model.cache_clear()
    gc.collect()
    lm = native("llama_tied_biased")
    gc.collect()
    network = lm.network
    assert isinstance(network, NativeNetwork)
    packed = sum(layer.num_bytes for layer in network._layers) + network.head.num_bytes
    assert packed <= 4 * wanted * 1.1  # the vocabulary is padded to whole panels
    assert not list(network._embedding.parameters())


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3_moe", "gemma3", "phi3"])
def test_auto_takes_the_native_forward_and_says_so(architecture: str) -> None:
    lm = loader.load(models.tiny(architecture), forward="auto")
    assert (lm.path.kind, lm.path.reason) == ("native", None)
    assert engine_over(lm).stats.forward_path == "native"


@pytest.mark.parametrize(
    ("weights_of_a_small_model", "native_amx", "torch_amx", "taken"),
    [
        (0, True, True, "native"),
        (0, False, False, "native"),
        (10**9, False, True, "native"),
        (0, False, True, "fused"),
    ],
)
def test_auto_leaves_large_bf16_models_to_torch_where_it_alone_uses_amx(
    monkeypatch, weights_of_a_small_model: int, native_amx: bool, torch_amx: bool, taken: str
) -> None:
    monkeypatch.setattr(loader, "has_fast_matmul", lambda *_: True)
    monkeypatch.setattr(loader, "MAX_SMALL_WEIGHTS", weights_of_a_small_model)
    monkeypatch.setattr(CpuBackend, "uses_amx", lambda: native_amx)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: torch_amx)  # whether the system allows it
    lm = loader.load(models.tiny("llama"), dtype="bfloat16", forward="auto")
    assert lm.path.kind == taken
    assert ("AMX" in str(lm.path.reason)) == (taken == "fused")
    assert native("llama", "bfloat16").path.kind == "native"


def test_auto_leaves_large_int4_models_to_torch_where_bf16_is_fast(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(loader, "has_fast_matmul", lambda *_: True)
    monkeypatch.setattr(CpuBackend, "uses_amx", lambda: True)
    config = loader.load(models.tiny("llama")).config
    config.update({"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8})
    models.save_random(config, tmp_path / "wide")
    settings = {"dtype": "bfloat16", "forward": "auto"}
    plain = loader.load(tmp_path / "wide", dtype="bfloat16", fuse=False)
    count = sum(weight.numel() for weight in plain.network.module.parameters())
    monkeypatch.setattr(loader, "MAX_SMALL_WEIGHTS", count)
    for bits in ("int8", "int4"):
        lm = loader.load(tmp_path / "wide", quantization=bits, **settings)
        assert lm.path.kind == "native"
    monkeypatch.setattr(loader, "MAX_SMALL_WEIGHTS", count - 1)  # quantised weights count
    assert loader.load(tmp_path / "wide", quantization="int8", **settings).path.kind == "native"
    lm = loader.load(tmp_path / "wide", quantization="int4", **settings)
    assert lm.path.kind == "fused"
    assert "4 bits" in str(lm.path.reason)


@pytest.mark.parametrize(
    ("architecture", "settings", "why"),
    [
        ("gpt2", {}, "GPT2LMHeadModel is not among its families"),
        ("llama", {"dtype": "float16"}, "weights in float16"),
        ("llama", {"fuse": False}, "fuse=False"),
        ("llama", {"attention": "reference"}, "attention='reference'"),
    ],
)
def test_what_cannot_be_native_is_refused_and_auto_says_why(architecture, settings, why) -> None:
    with pytest.raises(ModelError, match='forward="native" is not possible') as refused:
        loader.load(models.tiny(architecture), forward="native", **settings)
    assert why in refused.value.why
    lm = loader.load(models.tiny(architecture), forward="auto", **settings)
    assert lm.path.kind != "native"
    assert why in str(lm.path.reason)


def test_without_a_compiler_torch_computes_and_one_warning_says_why(monkeypatch, caplog) -> None:
    monkeypatch.setattr(library, "is_available", lambda: False)
    library.warn_unavailable.cache_clear()
    for _ in range(2):
        lm = loader.load(models.tiny("llama"), forward="auto")
        assert (lm.path.kind, "no C++ compiler" in str(lm.path.reason)) == ("fused", True)
    [warning] = caplog.records
    assert "torch computes in its place" in warning.message
    assert "2 to 3 times" in warning.message
    assert "apt-get install g++" in warning.message


@pytest.mark.parametrize(
    ("architecture", "settings"), [("gpt2", {}), ("llama", {"forward": "torch"})]
)
def test_where_a_compiler_would_change_nothing_none_is_missed(
    monkeypatch, caplog, architecture: str, settings: dict[str, str]
) -> None:
    monkeypatch.setattr(library, "is_available", lambda: False)
    library.warn_unavailable.cache_clear()
    loader.load(models.tiny(architecture), **settings)
    assert not [record for record in caplog.records if record.name.startswith("forethought")]


def test_with_a_failing_compiler_torch_computes_and_a_warning_tells_why(
    monkeypatch, tmp_path, caplog
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\necho In file included from >&2\necho error: no OpenMP here >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("FORETHOUGHT_CACHE", str(tmp_path / "cache"))
    library.load_library.cache_clear()
    library.warn_unavailable.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            lm = loader.load(models.tiny("llama"), forward="auto")
        assert lm.path.kind == "fused"
        assert "no OpenMP here" in caplog.text
        with pytest.raises(ModelError, match="cannot be compiled"):
            loader.load(models.tiny("llama"), forward="native")
    finally:
        library.load_library.cache_clear()


@pytest.mark.parametrize("is_directory", [False, True])
def test_where_nothing_can_be_kept_or_it_is_damaged_it_is_compiled_again(
    monkeypatch, tmp_path, is_directory: bool
) -> None:
    """With a file where the cache should be; with a torn library."""
    library.load_library()
    compiler = library.find_compiler()
    assert compiler is not None
    whole = library.library_path(compiler)
    compiled = []

    def compile_again(compiler: str, path: Path) -> None:
        path.write_bytes(whole.read_bytes())
        compiled.append(path)

    monkeypatch.setattr(library, "compile_library", compile_again)
    monkeypatch.setenv("FORETHOUGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # of the fallback
    if is_directory:
        path = library.library_path(compiler)
        path.parent.mkdir(parents=True)
        path.write_bytes(b"torn")
    else:
        (tmp_path / "cache").write_text("a file")
    library.load_library.cache_clear()
    try:
        library.load_library()
    finally:
        library.load_library.cache_clear()
    assert len(compiled) == 1


def test_another_start_loads_what_was_compiled(monkeypatch) -> None:
    library.load_library()
    library.load_library.cache_clear()
    monkeypatch.setattr(library, "compile_library", lambda *args: pytest.fail("compiled again"))
    library.load_library()


def test_every_file_that_is_included_names_the_library(monkeypatch, tmp_path) -> None:
    texts = {source.name: source.read_text() for source in library.SOURCES}
    included = set(re.findall(r'#include "(?:.*/)?(.+)"', "".join(texts.values())))
    assert {*included, library.SOURCE.name} == texts.keys()
    paths = {library.library_path("c++")}
    for name in texts:
        copies = [tmp_path / each for each in texts]
        for copy in copies:
            copy.write_text(texts[copy.name] + "// changed" * (copy.name == name))
        monkeypatch.setattr(library, "SOURCES", copies)
        paths.add(library.library_path("c++"))
    assert len(paths) == 1 + len(texts)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_every_width_of_vectors_computes_the_same(monkeypatch, tmp_path, lanes: int) -> None:
    """Where the processor has no vectors of a width, the compiler splits them."""
    monkeypatch.setenv("FORETHOUGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, f"-DLANES={lanes}"))
    library.load_library.cache_clear()
    try:
        for architecture in FAMILIES:
            plain = logits(loader.load(models.tiny(architecture), fuse=False), 45)
            lm = native(architecture)
            torch.testing.assert_close(logits(lm, 45), plain, rtol=1e-4, atol=1e-4)
            assert torch.equal(logits(lm, 7), logits(lm, 1))
    finally:
        library.load_library.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["-DNO_AMX", "-DAMX_STATE=99", "-DNO_DOT_PRODUCTS"])
def test_without_amx_or_where_linux_refuses_it_vectors_compute_the_same(
    monkeypatch, tmp_path, flag: str
) -> None:
    monkeypatch.setenv("FORETHOUGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, flag))
    library.load_library.cache_clear()
    try:
        check_bf16_products()
        lm = native("qwen3_moe", "bfloat16")
        assert torch.equal(logits(lm, 7), logits(lm, 1))
    finally:
        library.load_library.cache_clear()


@pytest.mark.slow
def test_code_tuned_for_zen_3_is_batch_invariant_to_the_last_bit(monkeypatch, tmp_path) -> None:
    """GCC's tuning for it would leave some multiplications and additions apart."""
    monkeypatch.setenv("FORETHOUGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-mno-avx512f", "-mtune=znver3"))
    library.load_library.cache_clear()
    try:
        lm = native("llama_mha")
        assert torch.equal(logits(lm, 7), logits(lm, 1))
    finally:
        library.load_library.cache_clear()


@pytest.mark.slow
def test_the_source_compiles_for_processors_with_wider_vectors(tmp_path: Path) -> None:
    compiler = library.find_compiler()
    assert compiler is not None
    for target in ("x86-64", "sapphirerapids"):
        library.compile_library(compiler, tmp_path / "forward.so", [f"-march={target}"])
