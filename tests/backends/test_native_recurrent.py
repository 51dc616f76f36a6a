"""Recurrent layers and other parts of transformers' modules in C++; the modules are the reference.

``tests/model/test_recurrent_layers.py`` has engines over them: batches, drafts, forks, adapters.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engines import GREEDY, drain, engine_over, expect_empty
from forethought.backends.cpu import library
from forethought.backends.cpu.backend import CpuBackend
from forethought.backends.cpu.module_parts import NativeEmbedding, NativeLinear, NativeMlp
from forethought.backends.cpu.recurrent import NativeRecurrence
from forethought.kv.pool import PagePool
from forethought.kv.recurrent import PackedState
from forethought.kv.table import PageTable
from forethought.llm.snapshot import SnapshotStore
from forethought.model import loader
from forethought.model.batch import Row
from forethought.model.causal_lm import CausalLM, TransformersNetwork
from forethought.model.quantization import QuantizedLinear
from forethought.model.quantized_experts import QuantizedExperts
from forethought.model.recurrent_layers import RecurrentLayers, find_recurrent_layers
from forethought.model.runner import ModelRunner
from models import (
    ALL_RECURRENT,
    RECURRENT,
    VOCAB,
    greedy,
    new_module,
    prompts,
    tiny,
    tiny_in_groups,
)
from turns import by_turns

WIDE: dict[str, dict[str, Any]] = {
    "qwen3_5": {"linear_key_head_dim": 20, "linear_value_head_dim": 72},
    "qwen3_next": {"linear_key_head_dim": 16, "linear_value_head_dim": 32},
    "olmo_hybrid": {"linear_key_head_dim": 20, "linear_value_head_dim": 24},
    "kimi_linear": {"linear_head_dim": 36, "linear_num_heads": 3},
    "bamba": {"mamba_d_state": 40},
    "jamba": {"mamba_d_state": 20, "mamba_dt_rank": 5, "mamba_expand": 3},
    "lfm2": {"conv_L_cache": 5, "conv_bias": True},
}
"""Sizes of layers that are no multiples of a vector, or several vectors."""

pytestmark = pytest.mark.skipif(
    library.find_compiler() is None, reason="there is no C++ compiler (c++, g++ or clang++)"
)


@functools.cache
def loaded(architecture: str, forward: loader.Forward, dtype: str = "float32") -> CausalLM:
    return loader.load(tiny(architecture), dtype=dtype, forward=forward)


def recurrent_of(lm: CausalLM) -> RecurrentLayers:
    assert isinstance(lm.network, TransformersNetwork)
    assert lm.network.recurrent is not None
    return lm.network.recurrent


@pytest.mark.parametrize("architecture", RECURRENT)
def test_layers_of_all_families_run_in_cpp(architecture: str) -> None:
    lm = loaded(architecture, "auto")
    assert recurrent_of(lm).is_native
    assert "recurrent layers run in C++" in (lm.path.reason or "")
    assert not recurrent_of(loaded(architecture, "torch")).is_native


def step_logits(lm: CausalLM) -> Tensor:
    """Of a batch of prompts, then of decodes, a draft tree and a chunk of a prompt."""
    pool = PagePool(64, 4)
    runner = ModelRunner(lm, lm.storage(pool.num_pages, pool.page_size))
    tables = [PageTable(pool) for _ in range(3)]
    texts = prompts((90, 7, 26))

    def row(index: int, tokens: list[int], **draft: Any) -> Row:
        start = tables[index].length
        tables[index].append(len(tokens))
        return Row(tokens, start, tables[index], **draft)

    tree = {"parents": (-1, 0, 0, 1, 2, 1), "num_nodes": 5}
    logits = [runner.forward([row(0, texts[0]), row(1, texts[1])])]
    logits += [runner.forward([row(1, [5]), row(0, [6]), row(2, texts[2][:3])])]
    drafts = [row(0, [7, 8, 9, 10, 11, 12], **tree), row(1, [7, 8], num_nodes=1)]
    logits += [runner.forward([*drafts, row(2, texts[2][3:])])]
    return torch.cat(logits)


@pytest.mark.parametrize("architecture", RECURRENT)
def test_logits_of_batches_and_trees_are_those_of_the_modules(architecture: str) -> None:
    """Up to the rounding of the chunks in which torch computes the delta rule, which is several
    times that of a recurrence token by token.
    """
    expected = step_logits(loaded(architecture, "torch"))
    logits = step_logits(loaded(architecture, "auto"))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=5e-4)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("architecture", ALL_RECURRENT)
def test_rounded_weights_are_multiplied_in_cpp_and_give_the_logits_of_torch(
    architecture: str, quantization: loader.Quantization
) -> None:
    """Experts among them; torch dequantises the same integers."""
    path = tiny_in_groups(architecture)
    lm, torch_lm = (
        loader.load(path, dtype="float32", quantization=quantization, forward=way)
        for way in ("auto", "torch")
    )
    assert isinstance(lm.network, TransformersNetwork)
    parts = {type(part) for part in lm.network.module.modules()}
    assert NativeLinear in parts
    assert not parts & {QuantizedLinear, QuantizedExperts}
    torch.testing.assert_close(step_logits(lm), step_logits(torch_lm), rtol=1e-4, atol=1e-3)


def test_weights_in_4_bits_are_multiplied_in_cpp_in_models_of_any_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those of other families are not."""
    monkeypatch.setattr(loader, "MAX_SMALL_WEIGHTS", 0)
    monkeypatch.setattr(loader, "has_fast_matmul", lambda *_: True)
    settings: dict[str, Any] = {"dtype": "bfloat16", "quantization": "int4", "forward": "auto"}
    network = loader.load(tiny_in_groups("qwen3_5"), **settings).network
    assert isinstance(network, TransformersNetwork)
    assert network.whole is not None


MIXTURES = ["qwen3_5_moe", "qwen3_next", "lfm2_moe"]


@pytest.mark.parametrize("quantization", [None, "w8a8", "int8"])
@pytest.mark.parametrize("architecture", MIXTURES)
def test_experts_are_computed_in_cpp(
    architecture: str, quantization: loader.Quantization | None
) -> None:
    """The logits of plain ones are compared above; 8 bits round what torch computes otherwise."""
    arguments: dict[str, Any] = {"dtype": "float32", "quantization": quantization}
    lm = loader.load(tiny(architecture), **arguments, forward="auto")
    assert isinstance(lm.network, TransformersNetwork)
    kinds = {type(part).__name__ for part in lm.network.module.modules()}
    assert "NativeExperts" in kinds
    assert not any(kind.endswith("Experts") for kind in kinds - {"NativeExperts"})
    if quantization is not None:
        expected = step_logits(loader.load(tiny(architecture), **arguments, forward="torch"))
        tolerance = 0.03 * float(expected.abs().max())
        torch.testing.assert_close(step_logits(lm), expected, rtol=0.0, atol=tolerance)


def native_layers(module: PreTrainedModel) -> NativeRecurrence:
    layers = CpuBackend.recurrence(find_recurrent_layers(module))
    assert layers is not None
    CpuBackend.use_native_parts(module, ())
    return layers


def run(
    layers: NativeRecurrence, x: Tensor, rows: Sequence[int], runs: Sequence[tuple[list[int], Any]]
) -> tuple[Tensor, dict[int, PackedState]]:
    """The outputs of the first layer ``[T, hidden]``, and the states after runs, by their last
    tokens. A run has the last token of the one before it, or a state, or None.
    """
    table = layers.table(len(x), [*rows, len(x)])
    after = {tokens[-1]: layers.new_state() for tokens, _ in runs}
    for tokens, before in runs:
        table.add(tokens, after[before] if isinstance(before, int) else before, after[tokens[-1]])
    for layer in range(1, len(layers)):
        layers.compute(layer, x[None], table)
    return layers.compute(0, x[None], table)[0], after


def check_batches(layers: NativeRecurrence, hidden: int) -> None:
    """Tokens 0 to 11 of a sequence: in one run, in two calls, one by one in a batch with others,
    and as a path of a tree whose other nodes lie between.
    """
    x = torch.randn(12, hidden, generator=torch.Generator().manual_seed(0))
    y, after = run(layers, x, [0], [([*range(12)], None)])
    first, halfway = run(layers, x[:5], [0], [([*range(5)], None)])
    rest, end = run(layers, x[5:], [0], [([*range(7)], halfway[4])])
    assert torch.equal(torch.cat([first, rest]), y)
    assert torch.equal(end[6].floats, after[11].floats)
    others = torch.randn(12, hidden, generator=torch.Generator().manual_seed(1))
    both = torch.stack([others, x], 1).flatten(0, 1)  # of each pair of tokens the second
    alone = [([2 * n + 1], 2 * n - 1 if n else None) for n in range(12)]
    aside = [([2 * n], max(2 * n - 3, 1) if n > 1 else None) for n in range(12)]
    runs = [run for pair in zip(aside, alone, strict=True) for run in pair]
    mixed, nodes = run(layers, both, [0], runs)
    assert torch.equal(mixed[1::2], y)
    assert torch.equal(nodes[23].floats, after[11].floats)
    rows = torch.cat([others, x])
    beside, ends = run(layers, rows, [0, 12], [([*range(12)], None), ([*range(12, 24)], None)])
    assert torch.equal(beside[12:], y)
    assert torch.equal(ends[23].floats, after[11].floats)


@pytest.mark.parametrize(("architecture", "num_threads"), by_turns([*RECURRENT], [1, 3]))
def test_a_token_of_a_layer_is_the_same_to_the_last_bit_in_every_batch(
    architecture: str, num_threads: int
) -> None:
    before = torch.get_num_threads()
    module = new_module(architecture, **WIDE.get(architecture, {}))
    torch.set_num_threads(num_threads)
    try:
        check_batches(native_layers(module), module.config.hidden_size)
    finally:
        torch.set_num_threads(before)


def layers_of(module: PreTrainedModel) -> RecurrentLayers:
    recurrent = RecurrentLayers.of(module, is_native=True)
    assert recurrent is not None
    return recurrent


@pytest.mark.parametrize("architecture", WIDE)
def test_layers_of_any_size_compute_what_their_modules_do(architecture: str) -> None:
    """Those that did not would not be computed in C++."""
    assert layers_of(new_module(architecture, **WIDE[architecture])).is_native


def test_step_widths_are_limited_in_runs_as_their_modules_do() -> None:
    """Of a token after a run they are not."""
    assert layers_of(new_module("nemotron_h", time_step_min=3.0)).is_native


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_every_width_of_vectors_computes_what_modules_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lanes: int
) -> None:
    monkeypatch.setenv("FORETHOUGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, f"-DLANES={lanes}"))
    library.load_library.cache_clear()
    try:
        for architecture, changes in WIDE.items():
            assert layers_of(new_module(architecture, **changes)).is_native
            module = new_module(architecture, **changes)
            check_batches(native_layers(module), module.config.hidden_size)
    finally:
        library.load_library.cache_clear()


@pytest.mark.parametrize("architecture", ["qwen3_5", "bamba", "lfm2"])
def test_a_layer_that_computes_something_else_stays_in_torch(architecture: str) -> None:
    module = new_module(architecture)
    part: Any = find_recurrent_layers(module)[-1]
    original = part.forward
    part.forward = functools.wraps(original)(lambda x, **cache: 1.01 * original(x, **cache))
    assert not layers_of(module).is_native


def test_an_mlp_has_the_multipliers_of_its_module() -> None:
    plain = new_module("falcon_h1", mlp_multipliers=[2.0, 0.5])
    module = new_module("falcon_h1", mlp_multipliers=[2.0, 0.5])
    CpuBackend.use_native_parts(module, ())
    mlp, expected = module.model.layers[0].feed_forward, plain.model.layers[0].feed_forward
    assert isinstance(mlp.forward, NativeMlp)
    assert mlp.forward.packed_struct() is not None
    x = torch.randn(1, 3, module.config.hidden_size)
    torch.testing.assert_close(mlp(x), expected(x), rtol=1e-4, atol=1e-5)
    hook = mlp.down_proj.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(mlp(x), expected(x), rtol=1e-4, atol=1e-5)
    hook.remove()


def test_an_mlp_that_computes_something_else_stays_in_torch() -> None:
    module = new_module("falcon_h1")
    mlp: Any = module.model.layers[0].feed_forward
    original = mlp.forward
    mlp.forward = functools.wraps(original)(lambda x: 1.01 * original(x))
    CpuBackend.use_native_parts(module, ())
    assert not isinstance(mlp.forward, NativeMlp)
    assert isinstance(mlp.gate_proj, NativeLinear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["qwen3_5", "nemotron_h", "granite_hybrid"])
def test_an_mlp_is_computed_alike_where_something_is_added_to_its_linears(
    architecture: str, dtype: torch.dtype
) -> None:
    """In float32 to the last bit: rows without an adapter do not depend on those with one."""
    module = new_module(architecture).to(dtype)
    CpuBackend.use_native_parts(module, ())
    [mlp, *_] = [part for part in module.modules() if isinstance(part.forward, NativeMlp)]
    x = torch.randn(1, 5, module.config.hidden_size).to(dtype)
    plain = mlp(x)
    for linear in mlp.forward.linears():
        linear.register_forward_hook(lambda *_: None)
    hooked = mlp(x)
    tolerance = 0.0 if dtype == torch.float32 else 0.02 * float(plain.abs().max())
    torch.testing.assert_close(hooked, plain, rtol=0.0, atol=tolerance)
    mlp.forward.linears()[-1].register_forward_hook(lambda _, inputs, y: 2 * y)
    torch.testing.assert_close(mlp(x), 2 * hooked)


def test_embeddings_that_are_the_weights_of_the_output_projection_are_held_once() -> None:
    module = new_module("qwen3_5", tie_word_embeddings=True)
    table = module.get_input_embeddings().weight.clone()
    CpuBackend.use_native_parts(module, ())
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    assert isinstance(embedding, NativeEmbedding)
    assert embedding.packed is head.packed
    ids = torch.tensor([[3, 0, VOCAB - 1]])
    assert torch.equal(embedding(ids), table[ids])
    for unknown in (-1, VOCAB):
        with pytest.raises(IndexError, match="vocabulary"):
            embedding(torch.tensor([3, unknown]))


@pytest.mark.parametrize("ways", [("torch", "auto"), ("auto", "torch")])
@pytest.mark.parametrize("architecture", ["qwen3_5", "bamba", "lfm2"])
def test_snapshots_of_states_are_those_of_torch(
    architecture: str, ways: tuple[loader.Forward, loader.Forward], tmp_path: Path
) -> None:
    writer, reader = (engine_over(loaded(architecture, way), pages=40) for way in ways)
    [sequence] = writer.add(prompts((30,))[0], GREEDY.replace(max_tokens=5), keep=True)
    drain(writer)
    store = SnapshotStore(tmp_path, tiny(architecture), writer.runner.storage)
    store.save("one", writer.capture(sequence, sequence.tokens))
    restored = reader.restore(store.load("one"))
    reader.resume(restored, GREEDY.replace(max_tokens=6))
    drain(reader)
    assert restored.output == greedy(tiny(architecture), [sequence.tokens], 6)[0]
    assert restored.usage.prefilled == 1
    writer.close(sequence)
    reader.close(restored)
    expect_empty(writer)
    expect_empty(reader)
