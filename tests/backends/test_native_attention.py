"""Attention layers of transformers' modules in C++, over pages, and all layers of a decoder in one
call; the modules are the reference.

``tests/model/test_recurrent_layers.py`` has engines over them: batches, drafts, forks, adapters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from forethought.backends.cpu import attention as cpu_attention
from forethought.backends.cpu import library
from forethought.backends.cpu.mixture import NativeMixture
from forethought.backends.cpu.module_forward import ModuleForward
from forethought.kv.pool import PagePool
from forethought.kv.table import PageTable
from forethought.model import loader, transformers_module
from forethought.model.attention_layers import AttentionLayers
from forethought.model.batch import Batch, Row
from forethought.model.causal_lm import CausalLM, TransformersNetwork
from forethought.model.hidden_states import FINAL
from forethought.model.runner import ModelRunner
from models import (
    ALL_RECURRENT,
    RECURRENT,
    RECURRENT_VARIANTS,
    prompts,
    save_random,
    tiny,
    tiny_in_groups,
    transformers_model,
)
from turns import by_turns

WAYS: tuple[loader.Forward, ...] = ("auto", "torch")
TREE = {"parents": (-1, 0, 0, 1, 2, 1), "num_nodes": 5}

pytestmark = pytest.mark.skipif(
    library.find_compiler() is None, reason="there is no C++ compiler (c++, g++ or clang++)"
)


def load(architecture: str, **settings: Any) -> CausalLM:
    return loader.load(tiny(architecture), **{"dtype": "float32", "forward": "auto"} | settings)


@functools.cache
def loaded(architecture: str) -> CausalLM:
    return load(architecture)


def attention_of(lm: CausalLM) -> AttentionLayers | None:
    assert isinstance(lm.network, TransformersNetwork)
    return lm.network.attention


def part_by_part(lm: CausalLM) -> CausalLM:
    """Which calls the parts of its decoder layers one after the other."""
    assert isinstance(lm.network, TransformersNetwork)
    return CausalLM(replace(lm.network, decoder=None, whole=None), lm.backend, lm.traits)


def layers_in_one_call(lm: CausalLM) -> CausalLM:
    """Whose module calls what is around its decoder layers."""
    assert isinstance(lm.network, TransformersNetwork)
    return CausalLM(replace(lm.network, whole=None), lm.backend, lm.traits)


class Texts:
    """Sequences on pages of four tokens, forward by forward."""

    def __init__(self, lm: CausalLM, count: int, **settings: Any) -> None:
        pool = PagePool(80, 4)
        self.runner = ModelRunner(lm, lm.storage(pool.num_pages, pool.page_size, **settings))
        self._tables = [PageTable(pool) for _ in range(count)]

    def row(self, index: int, tokens: list[int], **draft: Any) -> Row:
        start = self._tables[index].length
        self._tables[index].append(len(tokens))
        return Row(tokens, start, self._tables[index], **draft)


def step_logits(lm: CausalLM, **settings: Any) -> Tensor:
    """Of prompts, one of them longer than a block of queries; decodes, a chunk and a tree."""
    texts, (long, short, other) = Texts(lm, 3, **settings), prompts((90, 7, 26))
    row, runner = texts.row, texts.runner
    logits = [runner.forward([row(0, long), row(1, short)])]
    logits += [runner.forward([row(1, [5]), row(0, [6]), row(2, other[:3])])]
    drafts = [row(0, [7, 8, 9, 10, 11, 12], **TREE), row(1, [7, 8], num_nodes=1)]
    logits += [runner.forward([*drafts, row(2, other[3:])])]
    return torch.cat(logits)


@contextmanager
def beside_modules(lm: CausalLM, check: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Each layer's output, and what its module gives over the same pages, go to ``check``."""
    assert isinstance(lm.network, TransformersNetwork)
    parts: list[Any] = [part for part in lm.network.module.modules() if hasattr(part, "kv_index")]
    forwards = [part.forward for part in parts]

    def both_of(part: nn.Module, forward: Any) -> Any:
        def compute(**arguments: Any) -> Any:
            expected = type(part).forward(part, **arguments)[0]
            y = forward(**arguments)
            check(y[0], expected)
            return y

        return compute

    for part, forward in zip(parts, forwards, strict=True):
        part.forward = both_of(part, forward)
    try:
        yield
    finally:
        for part, forward in zip(parts, forwards, strict=True):
            part.forward = forward


@pytest.mark.parametrize("architecture", [*RECURRENT, *RECURRENT_VARIANTS])
def test_attention_beside_native_recurrent_layers_runs_in_cpp(architecture: str) -> None:
    attention = attention_of(loaded(architecture))
    assert attention is not None
    num_layers = len(loaded(architecture).traits.layers)
    assert attention.num_native == num_layers
    assert "run in C++, and its attention" in (loaded(architecture).path.reason or "")


def test_values_are_stored_as_wide_as_keys_where_cpp_attends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the forward is tried."""
    tried, original = list[Any](), ModuleForward.of

    def of(lm: CausalLM) -> ModuleForward | None:
        tried.extend(lm.layer_shapes)
        return original(lm)

    monkeypatch.setattr(ModuleForward, "of", of)
    [native] = load("kimi_linear").layer_shapes
    [plain] = load("kimi_linear", forward="torch").layer_shapes
    assert (plain.key_dim, plain.value_dim) == (12, 8)
    assert (native.key_dim, native.value_dim) == (12, 12)
    assert tried == [native]


@pytest.mark.parametrize("architecture", ["olmo_hybrid", "kimi_linear"])
def test_of_a_layer_that_is_not_known_cpp_attends_with_queries_keys_and_values(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = loaded(architecture)
    monkeypatch.setattr(cpu_attention, "describe", lambda *_: None)
    lm = load(architecture)
    attention = attention_of(lm)
    assert attention is not None
    assert (attention.num_native, attention.has_native) == (0, True)
    assert lm.layer_shapes == whole.layer_shapes
    torch.testing.assert_close(step_logits(lm), step_logits(whole), rtol=1e-4, atol=1e-3)
    texts, [text] = Texts(lm, 1), prompts((20,))
    pieces = [texts.runner.forward([texts.row(0, [token])]) for token in text]
    at_once = Texts(lm, 1)
    assert torch.equal(torch.cat(pieces), at_once.runner.forward([at_once.row(0, text)]))


KV_DTYPES = {None: 1e-4, torch.bfloat16: 2e-2, torch.int8: 2e-2}
"""Tolerances by the dtype of keys and values: rounding may go either way."""


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("architecture", [*RECURRENT, *RECURRENT_VARIANTS])
def test_a_layer_gives_what_its_module_does_over_pages(
    architecture: str, kv_dtype: torch.dtype | None
) -> None:
    """Of prompts, chunks, decodes and trees, whose nodes see their ancestors alone."""
    shapes = list[torch.Size]()

    def check(y: Tensor, expected: Tensor) -> None:
        tolerance = KV_DTYPES[kv_dtype] * float(expected.abs().max())
        torch.testing.assert_close(y, expected, rtol=0.0, atol=tolerance)
        shapes.append(y.shape)

    lm = part_by_part(loaded(architecture))
    settings = {} if kv_dtype is None else {"stored_dtype": kv_dtype}
    with beside_modules(lm, check):
        step_logits(lm, **settings)
    assert [shape[1] for shape in shapes[:: len(lm.traits.layers)]] == [97, 5, 31]


@pytest.mark.parametrize("quantization", ["w8a8", "int8"])
@pytest.mark.parametrize("architecture", ["qwen3_5", "lfm2", "nemotron_h"])
def test_quantised_layers_give_what_their_modules_do(
    architecture: str, quantization: loader.Quantization
) -> None:
    """Which call the same products; outputs of heads are rounded to 8 bits, either way."""

    def check(y: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(y, expected, rtol=0.0, atol=0.02 * float(expected.abs().max()))

    lm = part_by_part(load(architecture, quantization=quantization))
    assert attention_of(lm) is not None
    with beside_modules(lm, check):
        step_logits(lm)


@pytest.mark.parametrize("architecture", RECURRENT)
def test_logits_do_not_depend_on_the_batch_to_the_last_bit(architecture: str) -> None:
    """A path of a tree beside other rows, the same tokens one by one, and in one chunk."""
    lm, (text, other) = loaded(architecture), prompts((20, 31))
    path = [7, 8, 10, 12]
    alone, chunk, beside = (Texts(lm, 2) for _ in range(3))
    alone.runner.forward([alone.row(0, text)])
    singles = [alone.runner.forward([alone.row(0, [token])]) for token in path]
    whole = chunk.runner.forward([chunk.row(0, text + path)])[-4:]
    beside.runner.forward([beside.row(1, other), beside.row(0, text)])
    tree = beside.row(0, [7, 8, 9, 10, 11, 12], parents=(-1, 0, 0, 1, 2, 3), num_nodes=5)
    nodes = beside.runner.forward([beside.row(1, [5, 6]), tree])[2:]
    assert torch.equal(torch.cat(singles), whole)
    assert torch.equal(nodes[[0, 1, 3, 5]], whole)


@pytest.mark.parametrize("architecture", ["qwen3_5", "falcon_h1"])
def test_a_prompt_has_the_same_bits_however_it_is_cut(architecture: str, tmp_path: Path) -> None:
    """In long runs and short ones, over several chunks of the context."""
    config = AutoConfig.from_pretrained(tiny(architecture), max_position_embeddings=1024)
    save_random(config, tmp_path)
    lm = loader.load(tmp_path, dtype="float32", forward="auto")
    [text] = prompts((310,))
    found = []
    for cuts in ([310], [270, 30, 10], [*[31] * 10], [300, *[1] * 10]):
        texts, rest, logits = Texts(lm, 1), text, []
        for count in cuts:
            logits.append(texts.runner.forward([texts.row(0, rest[:count])]))
            rest = rest[count:]
        found.append(torch.cat(logits))
    assert all(torch.equal(one, found[0]) for one in found[1:])


@pytest.mark.parametrize("quantization", [None, "w8a8", "int8"])
@pytest.mark.parametrize("architecture", ["qwen3_5_moe", "qwen3_next"])
def test_shared_experts_to_which_something_is_added_change_no_other_bit(
    architecture: str, quantization: loader.Quantization | None
) -> None:
    """Routers stay in C++: those of torch round by the number of tokens."""
    lm = load(architecture, quantization=quantization)
    expected = step_logits(lm)
    assert isinstance(lm.network, TransformersNetwork)
    linears = [lm.network.module.get_submodule(name) for name in lm.traits.linears]
    shared = [
        linear for linear, name in zip(linears, lm.traits.linears, strict=True) if "shared" in name
    ]
    assert len(shared) == 4 * lm.num_layers
    for linear in shared:
        hook = linear.register_forward_hook(lambda *_: None)
        assert torch.equal(step_logits(lm), expected)
        hook.remove()
        hook = linear.register_forward_hook(lambda _, __, y: -2 * y)
        assert not torch.equal(step_logits(lm), expected)
        hook.remove()


@pytest.mark.parametrize("architecture", ["qwen3_5", "granite_hybrid"])
def test_linears_to_which_something_is_added_change_no_other_bit(architecture: str) -> None:
    """Rows without an adapter do not depend on those with one."""
    lm = loaded(architecture)
    expected = step_logits(lm)
    assert isinstance(lm.network, TransformersNetwork)
    linears = [
        linear
        for part in lm.network.module.modules()
        if hasattr(part, "kv_index")
        for linear in part.children()
        if hasattr(linear, "packed")
    ]
    assert len(linears) == 4
    hooks = [linear.register_forward_hook(lambda *_: None) for linear in linears]
    try:
        assert torch.equal(step_logits(lm), expected)
        hooks.append(linears[1].register_forward_hook(lambda _, __, y: 2 * y))
        assert not torch.equal(step_logits(lm), expected)
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("architecture", ALL_RECURRENT)
def test_a_decoder_is_one_call(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = loaded(architecture)
    assert isinstance(lm.network, TransformersNetwork)
    decoder = lm.network.decoder
    assert decoder is not None
    calls, original = list[range](), decoder.native.compute

    def compute(layers: range, *arguments: Any) -> Tensor:
        calls.append(layers)
        y: Tensor = original(layers, *arguments)
        return y

    monkeypatch.setattr(decoder.native, "compute", compute)
    logits = step_logits(layers_in_one_call(lm))
    assert calls == [range(lm.num_layers)] * 3
    assert torch.equal(step_logits(part_by_part(lm)), logits)
    assert len(calls) == 3


@pytest.mark.parametrize("quantization", [None, "w8a8"])
def test_weights_that_layers_share_are_packed_once(
    quantization: loader.Quantization | None,
) -> None:
    """Zamba2's, whose layers use two blocks in turns, each with products of low rank of its own."""
    lm = load("zamba2_shared", quantization=quantization)
    assert isinstance(lm.network, TransformersNetwork)
    layers = lm.network.module.get_decoder().layers
    blocks = [layer.shared_transformer for layer in layers if hasattr(layer, "linear")]
    first, other, again, _ = (
        {name: part.packed for name, part in block.named_modules() if hasattr(part, "packed")}
        for block in blocks
    )
    assert len(first) == 4 + 2 + 2 * 2 * 4  # of two uses each
    assert first.keys() == again.keys()
    assert all(again[name] is packed for name, packed in first.items())
    assert not {*map(id, first.values())} & {*map(id, other.values())}


def save_scaled(directory: Path) -> Path:
    """A model with factors of embeddings and logits, and a tied output projection."""
    factors = {"embedding_multiplier": 12.0, "logits_scaling": 3.0, "residual_multiplier": 0.22}
    path = tiny_in_groups("granite_hybrid")
    config = AutoConfig.from_pretrained(path, **factors, tie_word_embeddings=True)
    save_random(config, directory)
    return directory


@pytest.mark.parametrize(
    ("architecture", "dtype", "quantization"),
    by_turns(
        [*ALL_RECURRENT, "scaled granite"],
        ["float32", "bfloat16"],
        [None, "w8a8", "int8", "int4"],
    ),
)
def test_a_forward_is_one_call_that_gives_the_bits_of_the_module(
    architecture: str, dtype: str, quantization: loader.Quantization | None, tmp_path: Path
) -> None:
    is_scaled = architecture == "scaled granite"
    path = save_scaled(tmp_path / "scaled") if is_scaled else tiny_in_groups(architecture)
    lm = loader.load(path, dtype=dtype, quantization=quantization, forward="auto")
    network = lm.network
    assert isinstance(network, TransformersNetwork)
    assert network.whole is not None
    with patched_module(network) as calls:
        logits = step_logits(lm)
        assert not calls
        assert torch.equal(step_logits(layers_in_one_call(lm)), logits)
        assert len(calls) == 3


@contextmanager
def patched_module(network: TransformersNetwork) -> Iterator[list[str]]:
    """The calls of its module."""
    calls = list[str]()
    handle = network.module.register_forward_pre_hook(lambda *_: calls.append("module"))
    yield calls
    handle.remove()


def test_a_module_with_logits_of_its_own_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here soft-capped, as no attribute tells."""
    from transformers import Qwen3_5ForCausalLM

    original = Qwen3_5ForCausalLM.forward

    @functools.wraps(original)
    def capped(self: Any, *arguments: Any, **kwargs: Any) -> Any:
        output = original(self, *arguments, **kwargs)
        output.logits = 0.5 * (output.logits / 0.5).tanh()
        return output

    monkeypatch.setattr(Qwen3_5ForCausalLM, "forward", capped)
    lm = load("qwen3_5")
    assert isinstance(lm.network, TransformersNetwork)
    assert lm.network.decoder is not None
    assert lm.network.whole is None
    assert step_logits(lm).abs().max() <= 0.5


@pytest.mark.parametrize("architecture", ["qwen3_5", "nemotron_h", "olmo_hybrid", "zamba2_shared"])
def test_hidden_states_are_captured_between_layers(architecture: str) -> None:
    """In one call, by a module whose layers are, and part by part."""
    lm, states = loaded(architecture), []
    layer_ids = frozenset({0, 2, lm.num_layers, FINAL})
    for network in (lm, layers_in_one_call(lm), part_by_part(lm)):
        texts = Texts(network, 1)
        batch = Batch.build([texts.row(0, prompts((11,))[0])])
        states.append(network.forward_with_hidden_states(batch, texts.runner.storage, layer_ids)[1])
    assert states[0].keys() == layer_ids
    for layer_id, state in states[0].items():
        assert torch.equal(state, states[1][layer_id])
        assert torch.equal(state, states[2][layer_id])


@pytest.mark.parametrize("is_rotated", [True, False])
def test_decoder_layers_with_rotations_of_their_own_are_called_part_by_part(
    is_rotated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here those of recurrent layers, which read none: logits stay as they are. Where these get
    none, the rotation of the others is that of all.
    """
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer

    original = Qwen3_5DecoderLayer.__call__

    def with_other_rotation(layer: Any, *arguments: Any, **kwargs: Any) -> Any:
        if hasattr(layer, "linear_attn"):
            cosines, sines = kwargs["position_embeddings"]
            kwargs["position_embeddings"] = (sines, cosines) if is_rotated else None
        return original(layer, *arguments, **kwargs)

    expected = step_logits(loaded("qwen3_5"))
    monkeypatch.setattr(Qwen3_5DecoderLayer, "__call__", with_other_rotation)
    lm = load("qwen3_5")
    assert isinstance(lm.network, TransformersNetwork)
    assert (lm.network.decoder is None) == is_rotated
    assert torch.equal(step_logits(lm), expected)


def test_decoder_layers_of_which_attention_without_a_rotation_is_one_are_called_part_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.olmo_hybrid import modeling_olmo_hybrid

    kind = modeling_olmo_hybrid.OlmoHybridAttentionDecoderLayer
    original = kind.__call__

    def unrotated(layer: Any, *arguments: Any, **kwargs: Any) -> Any:
        if layer.self_attn.layer_idx == 2:
            kwargs["position_embeddings"] = None
        return original(layer, *arguments, **kwargs)

    types = ["linear_attention", "full_attention", "full_attention"]
    save_random(AutoConfig.from_pretrained(tiny("olmo_hybrid"), layer_types=types), tmp_path)
    monkeypatch.setattr(kind, "__call__", unrotated)
    lm, torch_lm = (loader.load(tmp_path, dtype="float32", forward=way) for way in WAYS)
    assert isinstance(lm.network, TransformersNetwork)
    assert lm.network.decoder is None
    torch.testing.assert_close(step_logits(lm), step_logits(torch_lm), rtol=1e-4, atol=5e-4)


def test_a_decoder_layer_that_computes_something_else_is_called_part_by_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer

    original = Qwen3_5DecoderLayer.forward

    def scaled(*arguments: Any, **kwargs: Any) -> Any:
        return 1.01 * original(*arguments, **kwargs)

    monkeypatch.setattr(Qwen3_5DecoderLayer, "forward", scaled)
    lm = load("qwen3_5")
    assert attention_of(lm) is not None
    assert isinstance(lm.network, TransformersNetwork)
    assert lm.network.decoder is None
    step_logits(lm)


MULTIPLIERS: dict[str, dict[str, Any]] = {
    "falcon_h1": {
        "attention_in_multiplier": 0.7,
        "attention_out_multiplier": 1.3,
        "embedding_multiplier": 2.0,
        "key_multiplier": 0.3,
        "lm_head_multiplier": 0.6,
        "mlp_multipliers": [0.8, 1.7],
        "ssm_in_multiplier": 1.2,
        "ssm_multipliers": [0.9, 0.8, 1.1, 1.2, 0.7],
        "ssm_out_multiplier": 0.4,
    },
    "granite_hybrid": {"residual_multiplier": 0.3},
}


@pytest.mark.parametrize("architecture", MULTIPLIERS)
def test_multipliers_are_those_of_the_modules(architecture: str, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(tiny(architecture), **MULTIPLIERS[architecture])
    save_random(config, tmp_path)
    lm, torch_lm = (loader.load(tmp_path, dtype="float32", forward=way) for way in WAYS)
    attention = attention_of(lm)
    assert attention is not None
    assert attention.num_native == len(lm.traits.layers)
    assert isinstance(lm.network, TransformersNetwork)
    assert lm.network.whole is not None
    logits = step_logits(lm)
    torch.testing.assert_close(logits, step_logits(torch_lm), rtol=1e-4, atol=5e-4)
    assert torch.equal(step_logits(part_by_part(lm)), logits)


@pytest.mark.parametrize("architecture", ["qwen3_5_moe", "qwen3_next"])
def test_routers_and_shared_experts_are_one_call_with_the_experts(architecture: str) -> None:
    lm, torch_lm = loaded(architecture), load(architecture, forward="torch")
    blocks, expected = (
        [part for part in one.network.module.modules() if hasattr(part, "shared_expert")]
        for one in (lm, torch_lm)
    )
    x = torch.randn(1, 40, lm.hidden_size, generator=torch.Generator().manual_seed(0))
    assert len(blocks) == lm.num_layers
    for block, other in zip(blocks, expected, strict=True):
        assert isinstance(block.forward, NativeMixture)
        torch.testing.assert_close(block(x), other(x), rtol=1e-4, atol=1e-5)
        alone = torch.cat([block(token) for token in x.split(1, 1)], 1)
        assert torch.equal(alone, block(x))
        hook = block.shared_expert.up_proj.register_forward_hook(lambda _, __, y: 0 * y)
        assert not torch.allclose(block(x), other(x), atol=1e-2)
        hook.remove()


SHARED = {"granite_hybrid_moe": "shared_mlp", "nemotron_h_moe": "shared_experts"}
"""Families with an MLP of all tokens beside the experts, and its name."""


@pytest.mark.parametrize("architecture", SHARED)
def test_an_mlp_beside_experts_to_which_something_is_added_changes_no_other_bit(
    architecture: str,
) -> None:
    lm = load(architecture)
    expected = step_logits(lm)
    assert isinstance(lm.network, TransformersNetwork)
    linears = [
        linear
        for name, part in lm.network.module.named_modules()
        if name.endswith(SHARED[architecture])
        for linear in part.children()
        if hasattr(linear, "packed")
    ]
    assert linears
    for linear in linears:
        hook = linear.register_forward_hook(lambda *_: None)
        assert torch.equal(step_logits(lm), expected)
        hook.remove()
        hook = linear.register_forward_hook(lambda _, __, y: -2 * y)
        assert not torch.equal(step_logits(lm), expected)
        hook.remove()


@pytest.mark.parametrize("window", [6, -6, -11])
def test_windows_and_chunks_are_those_of_torch(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No family with recurrent layers has one yet: the probe is told of it."""
    original = transformers_module.probe

    def probe(*arguments: Any) -> Any:
        layers, size = original(*arguments)
        return tuple(replace(layer, window=window) for layer in layers), size

    full = step_logits(loaded("qwen3_5"))
    monkeypatch.setattr(transformers_module, "probe", probe)
    expected = step_logits(load("qwen3_5", forward="torch"))
    lm = load("qwen3_5")
    assert attention_of(lm) is not None
    torch.testing.assert_close(step_logits(lm), expected, rtol=1e-4, atol=5e-4)
    assert not torch.allclose(full, expected, atol=5e-3)


@pytest.mark.parametrize("chunk", [33, 150])
@pytest.mark.parametrize("forward", WAYS)
def test_chunked_attention_to_long_prompts_is_that_of_transformers(
    forward: loader.Forward, chunk: int, tmp_path: Path
) -> None:
    """Over several blocks of positions; chunks begin within one, and within a part of a prompt."""
    config = loader.load(tiny("llama4")).config
    config.update({"attention_chunk_size": chunk, "max_position_embeddings": 512})
    save_random(config, tmp_path)
    lm, [text] = loader.load(tmp_path, dtype="float32", forward=forward), prompts((310,))
    texts, logits = Texts(lm, 1), list[Tensor]()
    for part in (text[:290], text[290:305], text[305:306], text[306:]):
        logits.append(texts.runner.forward([texts.row(0, part)]))
    with torch.inference_mode():
        expected = transformers_model(tmp_path)(torch.tensor([text])).logits[0]
    torch.testing.assert_close(torch.cat(logits), expected, rtol=1e-4, atol=1e-3)


def test_a_layer_that_computes_something_else_stays_in_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Attention

    original = Qwen3_5Attention.forward

    def scaled(*arguments: Any, **kwargs: Any) -> Any:
        y, weights = original(*arguments, **kwargs)
        return 1.01 * y, weights

    monkeypatch.setattr(Qwen3_5Attention, "forward", scaled)
    lm = load("qwen3_5")
    attention = attention_of(lm)
    assert attention is not None
    assert attention.num_native == 0
    assert "recurrent layers run in C++" in (lm.path.reason or "")
