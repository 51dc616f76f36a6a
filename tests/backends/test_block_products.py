"""Products with the blocks of GGUF files: the native ones are the reference's to the last bit."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from forethought.backends.cpu import library, weights
from forethought.backends.cpu.packed_linear import PackedLinear
from forethought.gguf.block_type import BlockType
from forethought.model.block_weight import BLOCK_TYPES, BlockWeight
from forethought.model.quantization import QuantizedLinear, product
from gguf_blocks import quantized_blocks, random_blocks

pytestmark = pytest.mark.skipif(
    library.find_compiler() is None, reason="there is no C++ compiler (c++, g++ or clang++)"
)

SHAPES = ((40, 256), (17, 768), (33, 1536), (5, 288), (64, 576))
"""Outputs and inputs: whole panels and parts of them, an odd number of panels; the last two have
no blocks of 256 inputs."""
COUNTS = (*range(1, 9), 13, 16, 17, 40)
"""Rows: every size of a pass, those that each thread rounds for itself, and more."""
FLAGS = (
    ["-mno-avx512vnni"],
    ["-march=x86-64-v3"],
    ["-march=x86-64-v2"],
    ["-DNO_BYTE_PRODUCTS"],
    ["-DNO_BYTE_PRODUCTS", "-mno-fma"],
)
"""512 bits without VNNI where the processor has them, AVX2, SSE, and plain loops."""


def weight_of(kind: BlockType, size: tuple[int, int], *, rounds_input: bool = True) -> BlockWeight:
    return BlockWeight(random_blocks(kind, *size), kind, torch.float32, rounds_input)


def inputs_of(count: int, num_inputs: int) -> Tensor:
    """Rows of different sizes, with zeros, outliers and numbers that are not normal."""
    source = torch.Generator().manual_seed(count)
    x = torch.randn(count, num_inputs, generator=source)
    x *= torch.logspace(-3, 3, count)[:, None]
    x[0, :40] = 0
    x[-1, 5] = 1e30
    x[-1, 40:64] = 1e-42
    return x


def bias_of(num_outputs: int) -> Tensor:
    return torch.randn(num_outputs, generator=torch.Generator().manual_seed(1))


def shapes_of(kind: BlockType) -> list[tuple[int, int]]:
    return [size for size in SHAPES if size[1] % kind.num_weights == 0]


def check_products(kind: BlockType) -> None:
    for size in shapes_of(kind):
        weight, bias = weight_of(kind, size), bias_of(size[0])
        packed, reference = PackedLinear.pack(weight, bias), product(weight)
        for count in COUNTS:
            x = inputs_of(count, size[1])
            assert torch.equal(packed.multiply(x), reference(x) + bias), (kind, size, count)


def check_float_products(kind: BlockType) -> None:
    """They are those of the weights packed in float32."""
    for size in shapes_of(kind):
        weight, bias = weight_of(kind, size, rounds_input=False), bias_of(size[0])
        packed = PackedLinear.pack(weight, bias)
        plain = PackedLinear.pack(weight.dequantize(), bias)
        for count in COUNTS:
            x = inputs_of(count, size[1])
            assert torch.equal(packed.multiply(x), plain.multiply(x)), (kind, size, count)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_a_native_product_is_the_reference_to_the_last_bit(kind: BlockType) -> None:
    check_products(kind)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_a_float_product_is_that_of_the_dequantised_weight_to_the_last_bit(kind: BlockType) -> None:
    check_float_products(kind)


@pytest.mark.slow
@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_other_instructions_give_the_same_sums(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str]
) -> None:
    monkeypatch.setenv("FORETHOUGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, *flags))
    library.load_library.cache_clear()
    try:
        for kind in BLOCK_TYPES:
            check_products(kind)
            check_float_products(kind)
    finally:
        library.load_library.cache_clear()


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_of_real_weights_are_multiplied(kind: BlockType) -> None:
    weight = torch.randn(40, 512, generator=torch.Generator().manual_seed(4))
    blocks = quantized_blocks(kind, weight)
    if blocks is None:
        pytest.skip("the format's reference implementation does not quantise to it")
    stored, x = BlockWeight(blocks, kind, torch.float32, True), inputs_of(3, 512)
    assert torch.equal(PackedLinear.pack(stored, None).multiply(x), product(stored)(x))


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@pytest.mark.parametrize("rounds_input", [True, False])
def test_a_row_is_the_same_to_the_last_bit_beside_any_others(
    kind: BlockType, rounds_input: bool
) -> None:
    packed = PackedLinear.pack(weight_of(kind, (48, 512), rounds_input=rounds_input), None)
    x = inputs_of(40, 512)
    alone = torch.cat([packed.multiply(row[None]) for row in x])
    for count in range(2, 41):
        assert torch.equal(packed.multiply(x[-count:]), alone[-count:])


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_what_is_not_finite_shows_where_the_reference_has_it(kind: BlockType) -> None:
    """Activations, and scales of one output in 16 bits."""
    weight, x = weight_of(kind, (48, 512)), inputs_of(5, 512)
    x[1, 70], x[2, 3], x[4, 511] = torch.nan, torch.inf, -torch.inf
    for output, bits in ((3, 0x7C00), (20, 0xFC00), (33, 0x7E00)):
        at = 208 if kind == BlockType.Q6_K else 0
        raw = torch.tensor([bits], dtype=torch.uint16).view(torch.uint8)
        weight.blocks[output, at : at + 2] = raw
    packed, reference = PackedLinear.pack(weight, None).multiply(x), product(weight)(x)
    assert reference[[1, 2, 4]].isnan().all()
    assert not reference[:, [3, 20, 33]].isfinite().any()
    assert torch.allclose(packed, reference, rtol=0, atol=0, equal_nan=True)
    assert reference[[0, 3]].isfinite().sum() == 2 * 45


def halves_of(packed: PackedLinear, x: Tensor, half: int) -> Tensor:
    """The outputs of a gate and of what it multiplies, whose panels are in turns."""
    halves = packed.multiply(x).view(len(x), -1, 2, 16).transpose(1, 2).flatten(2)
    return torch.cat([part[:, :half] for part in halves.unbind(1)], 1)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@pytest.mark.parametrize("half", [32, 21])
def test_gate_and_up_are_packed_in_turns(kind: BlockType, half: int) -> None:
    weight, bias = weight_of(kind, (2 * half, 256)), bias_of(2 * half)
    packed = PackedLinear.pack(weight, bias, gated=True)
    for count in (1, 5, 17):
        x = inputs_of(count, 256)
        assert torch.equal(halves_of(packed, x, half), product(weight)(x) + bias)


@pytest.mark.parametrize("rounds_input", [True, False])
@pytest.mark.parametrize("names", [("Q4_K", "Q4_K", "Q6_K"), ("Q5_0", "Q8_0", "Q4_1")])
def test_outputs_in_blocks_of_several_types_are_one_product(
    names: tuple[str, ...], rounds_input: bool
) -> None:
    linears = [
        QuantizedLinear(weight_of(BlockType[name], size, rounds_input=rounds_input), bias)
        for name, size, bias in zip(
            names, ((40, 512), (17, 512), (24, 512)), (bias_of(40), None, bias_of(24)), strict=True
        )
    ]
    packed, alone = PackedLinear.of(*linears), [PackedLinear.of(linear) for linear in linears]
    assert packed.num_outputs == 81
    assert packed.num_bytes <= sum(part.num_bytes for part in alone)  # parts pad their panels
    for count in (1, 4, 5, 16, 17, 40):
        x = inputs_of(count, 512)
        expected = torch.cat([part.multiply(x) for part in alone], 1)
        assert torch.equal(packed.multiply(x), expected), count


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_the_weights_of_an_output_are_an_embedding(kind: BlockType) -> None:
    weight = weight_of(kind, (40, 512))
    packed, tokens = PackedLinear.pack(weight, None), torch.tensor([0, 39, 17, 17, 31])
    embeddings = torch.empty(len(tokens), 512)
    library.load_library().embed(
        ctypes.byref(packed.struct),
        ctypes.c_void_p(tokens.data_ptr()),
        len(tokens),
        ctypes.c_void_p(embeddings.data_ptr()),
    )
    assert torch.equal(embeddings, weight.dequantize()[tokens])


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_panels_take_hardly_more_memory_than_the_file(kind: BlockType) -> None:
    weight = weight_of(kind, (64, 512))
    assert PackedLinear.pack(weight, None).num_bytes <= 1.03 * weight.num_bytes


@pytest.fixture
def module() -> LlamaForCausalLM:
    """A layer with two key-value heads, in blocks as files in Q4_K_M have them."""
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        vocab_size=64,
    )
    module = LlamaForCausalLM(config)
    for name, linear in list(module.model.layers.named_modules()):
        if isinstance(linear, nn.Linear):
            kind = BlockType.Q6_K if name.endswith(("v_proj", "down_proj")) else BlockType.Q4_K
            size = linear.out_features, linear.in_features
            module.model.layers.set_submodule(name, QuantizedLinear(weight_of(kind, size)))
    return module


def test_query_key_and_value_may_be_in_blocks_of_several_types(module: LlamaForCausalLM) -> None:
    assert weights.refusal(module) is None
    attention = module.model.layers[0].self_attn
    packed, x = (
        PackedLinear.of(attention.q_proj, attention.k_proj, attention.v_proj),
        inputs_of(6, 256),
    )
    parts = [attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)]
    assert torch.equal(packed.multiply(x), torch.cat(parts, 1))


def test_gate_and_up_of_several_types_are_refused_by_name(module: LlamaForCausalLM) -> None:
    mlp = module.model.layers[0].mlp
    mlp.up_proj = QuantizedLinear(weight_of(BlockType.Q5_K, (512, 256)))
    assert weights.refusal(module) == "weights of gate and up that were quantised differently"


def test_blocks_are_not_merged_with_other_weights(module: LlamaForCausalLM) -> None:
    attention = module.model.layers[0].self_attn
    attention.k_proj = nn.Linear(256, 128, bias=False)
    assert weights.refusal(module) == "weights that are merged and were quantised differently"
    attention.k_proj = QuantizedLinear(weight_of(BlockType.Q4_K, (128, 256), rounds_input=False))
    assert weights.refusal(module) == "weights that are merged and were quantised differently"
