"""Blocks of GGUF files in float32, and the weights that stay in them."""

from __future__ import annotations

import pytest
import torch

import gguf
from forethought.errors import ModelError
from forethought.gguf.block_type import BlockType
from forethought.model import dequantize as module
from forethought.model.block_weight import BLOCK_TYPES, BlockWeight
from forethought.model.dequantize import dequantize
from forethought.model.quantization import QuantizedLinear, concatenated, product, quantize
from gguf_blocks import quantized_blocks, random_blocks, reference_weights

FLOATS = (BlockType.F32, BlockType.F16, BlockType.BF16)
OTHERS = ("Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4")
READ = (*FLOATS, *BLOCK_TYPES, *(BlockType[name] for name in OTHERS))


def weight_of(kind: BlockType, *, rounds_input: bool = False, seed: int = 0) -> BlockWeight:
    blocks = random_blocks(kind, 20, 512, seed)
    return BlockWeight(blocks, kind, torch.float32, rounds_input)


def is_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """To the last bit, and with the signs of zeros; all NaN are alike."""
    same = (x.view(torch.int32) == y.view(torch.int32)) | (x.isnan() & y.isnan())
    return bool(same.all())


@pytest.mark.parametrize("kind", BlockType)
def test_the_table_has_the_sizes_of_the_format(kind: BlockType) -> None:
    number = gguf.GGMLQuantizationType(kind.number)
    assert number.name == kind.name
    assert gguf.GGML_QUANT_SIZES[number] == (kind.num_weights, kind.num_bytes)


@pytest.mark.parametrize("kind", READ)
def test_random_blocks_are_what_the_reference_implementation_reads(kind: BlockType) -> None:
    raw = random_blocks(kind, 20, 512)
    assert is_same(dequantize(raw, kind), reference_weights(kind, raw))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy
@pytest.mark.parametrize("kind", READ)
def test_scales_that_are_not_finite_or_normal_are_read_as_they_are(kind: BlockType) -> None:
    source = torch.Generator().manual_seed(1)
    size = (200, kind.row_bytes(512))
    raw = torch.randint(0, 256, size, generator=source, dtype=torch.uint8)
    assert is_same(dequantize(raw, kind), reference_weights(kind, raw))


@pytest.mark.parametrize("kind", READ)
def test_quantised_weights_are_what_the_reference_implementation_reads(kind: BlockType) -> None:
    weight = torch.randn(20, 512, generator=torch.Generator().manual_seed(2))
    raw = quantized_blocks(kind, weight)
    if raw is None:
        pytest.skip("the reference implementation does not quantise to it")
    assert is_same(dequantize(raw, kind), reference_weights(kind, raw))


def test_a_large_weight_is_dequantised_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks(BlockType.Q4_K, 20, 512)
    whole = dequantize(raw, BlockType.Q4_K)
    monkeypatch.setattr(module, "DEQUANTIZED_WEIGHTS", 3 * 512)
    assert torch.equal(dequantize(raw, BlockType.Q4_K), whole)


@pytest.mark.parametrize("kind", sorted(set(BlockType) - set(READ), key=lambda kind: kind.number))
def test_other_types_are_refused_by_name(kind: BlockType) -> None:
    raw = torch.zeros(2, kind.row_bytes(512), dtype=torch.uint8)
    with pytest.raises(ModelError, match=f"weights in {kind.name} are not read") as info:
        dequantize(raw, kind)
    assert "Q6_K" in str(info.value)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_a_weight_in_blocks_has_the_shape_and_rows_of_its_weights(kind: BlockType) -> None:
    weight = weight_of(kind)
    whole = reference_weights(kind, weight.blocks)
    assert weight.shape == (20, 512)
    assert torch.equal(weight.dequantize(), whole)
    assert torch.equal(weight.rows(3, 7), whole[3:7])
    assert weight.num_bytes == 20 * kind.row_bytes(512)
    half = BlockWeight(weight.blocks, kind, torch.bfloat16)
    assert torch.equal(half.rows(0, 2), whole[:2].bfloat16())


def test_weights_of_one_kind_are_concatenated() -> None:
    parts = [weight_of(BlockType.Q5_1, seed=seed) for seed in range(3)]
    whole = torch.cat([part.dequantize() for part in parts])
    assert torch.equal(concatenated(parts).dequantize(), whole)
    assert parts[0].kind == parts[1].kind != weight_of(BlockType.Q5_0).kind


def test_the_kind_of_a_weight_says_whether_its_input_is_rounded() -> None:
    assert weight_of(BlockType.Q8_0).kind != weight_of(BlockType.Q8_0, rounds_input=True).kind
    plain = torch.randn(16, 64)
    assert quantize(plain, 8).kind != quantize(plain, 8, rounds_input=True).kind


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_a_product_is_that_of_the_dequantised_weight(kind: BlockType) -> None:
    weight, x = weight_of(kind), torch.randn(5, 512, generator=torch.Generator().manual_seed(3))
    assert torch.equal(product(weight)(x), x @ weight.dequantize().T)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_an_integer_product_is_near_to_that_of_the_dequantised_weight(kind: BlockType) -> None:
    weight = weight_of(kind, rounds_input=True)
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(3))
    expected = x @ weight.dequantize().T
    error = product(weight)(x) - expected
    assert error.norm() < 0.01 * expected.norm()
    whole = (x * 1000).round().clamp_(-127, 127)  # what rounds to itself
    whole[:, ::32] = 127
    exact = whole.double() @ weight.dequantize().double().T
    assert (product(weight)(whole) - exact).norm() < 1e-6 * exact.norm()


def test_a_linear_takes_a_weight_in_blocks() -> None:
    weight, x = weight_of(BlockType.Q6_K, rounds_input=True), torch.randn(2, 3, 512)
    linear = QuantizedLinear(weight, torch.ones(20))
    expected = product(weight)(x.flatten(0, 1)).view(2, 3, 20) + 1
    assert torch.equal(linear(x), expected)
    linear.pack()
    assert torch.equal(linear(x), expected)
    moved = QuantizedLinear(weight).to("meta")
    assert moved.weight is not None
    assert moved.weight.device.type == "meta"
