"""Weights in 8 and 4 bits: rounding, products, whole models, and speculation on them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Qwen3Config

from engines import GREEDY, drain, engine_over, expect_empty, outputs
from forethought import LLM, SamplingParams
from forethought.config.drafters import NGramDecodingConfig
from forethought.errors import ModelError, ParameterError
from forethought.model import auto_dtype, loader
from forethought.model.causal_lm import TransformersNetwork
from forethought.model.device import free_host_memory
from forethought.model.llama.network import FusedNetwork
from forethought.model.quantization import (
    BlockwiseProduct,
    Int4Product,
    Int8Product,
    QuantizedLinear,
    QuantizedProjection,
    QuantizedWeight,
    concatenated,
    product,
    quantize,
)
from models import prompts

BITS = [8, 4]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen")
    config = Qwen3Config(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def weight_of(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def test_eight_bits_divide_each_output_by_a_127th_of_its_maximum():
    found = quantize(torch.tensor([[1.27, -0.5, 0.014], [0.0, 0.0, 0.0]]), 8)
    assert found.values.tolist() == [[127, -50, 1], [0, 0, 0]]
    assert found.scales[0].item() == pytest.approx(0.01)
    assert found.dequantize()[1].tolist() == [0, 0, 0]


def test_four_bits_map_each_groups_minimum_to_0_and_its_maximum_to_15():
    row = torch.linspace(-0.5, 1.0, 16).repeat_interleave(2)[None]
    found = quantize(torch.cat([row, 2 * row], 1), 4)
    assert found.group_size == 64
    assert (found.values.min(), found.values.max()) == (0, 15)
    assert found.scales.item() == pytest.approx(3.0 / 15)
    assert found.zeros.item() == pytest.approx(5)
    assert torch.equal(found.values[0, 32:34], torch.tensor([0, 0], dtype=torch.uint8))


@pytest.mark.parametrize("bits", BITS)
def test_no_value_is_further_from_its_weight_than_half_a_step(bits):
    weight = weight_of(48, 96)
    found = quantize(weight, bits)
    steps = found.scales.repeat_interleave(found.group_size, 1)
    assert ((found.dequantize() - weight).abs() <= 0.5001 * steps + (bits == 4) * 0.5 * steps).all()


def test_a_width_that_no_group_divides_is_refused_in_four_bits():
    with pytest.raises(ModelError, match="int8"):
        quantize(weight_of(4, 48), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 5, 16])
@pytest.mark.parametrize("bits", BITS)
def test_every_product_is_that_with_the_dequantised_weight(bits, num_rows, dtype):
    weight = quantize(weight_of(64, 128).to(dtype), bits)
    x = weight_of(num_rows, 128, 1).to(dtype)
    expected = x.float() @ weight.dequantize().float().t()
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    for found in (product(weight)(x), BlockwiseProduct(weight)(x)):
        assert found.dtype == dtype
        assert (found.float() - expected).norm() <= bound * expected.norm()


def test_the_kernels_are_chosen_for_bf16_and_blocks_for_the_rest():
    by_dtype = {
        (bits, dtype): type(product(quantize(weight_of(64, 128).to(dtype), bits)))
        for bits in BITS
        for dtype in (torch.bfloat16, torch.float32)
    }
    assert by_dtype == {
        (8, torch.bfloat16): Int8Product,
        (4, torch.bfloat16): Int4Product,
        (8, torch.float32): BlockwiseProduct,
        (4, torch.float32): BlockwiseProduct,
    }
    odd = quantize(weight_of(40, 128).bfloat16(), 4)  # the kernel takes multiples of 32 outputs
    assert isinstance(product(odd), BlockwiseProduct)
    narrow = quantize(weight_of(64, 40).bfloat16(), 8)  # and that for 8 bits of 16 inputs
    assert isinstance(product(narrow), BlockwiseProduct)


def at_an_odd_address(x: torch.Tensor) -> torch.Tensor:
    bytes_ = torch.empty(x.nbytes + 128, dtype=torch.uint8)
    start = -bytes_.data_ptr() % 64 + 4
    view = bytes_[start : start + x.nbytes].view(x.dtype).view(x.shape)
    return view.copy_(x)


def test_the_8_bit_kernel_takes_operands_wherever_they_begin():
    """With AVX-512 it faults on addresses that are no multiple of 16 or 32 bytes."""
    weight = quantize(weight_of(64, 128).bfloat16(), 8)
    x = weight_of(5, 128, 1).bfloat16()
    mapped = replace(weight, values=at_an_odd_address(weight.values))
    found = Int8Product(mapped, batch_invariant=True)(at_an_odd_address(x))
    assert torch.equal(found, Int8Product(weight, batch_invariant=True)(x))


@pytest.mark.parametrize("bits", BITS)
def test_a_batch_invariant_product_rounds_a_row_the_same_in_every_batch(bits):
    projection = QuantizedProjection(
        quantize(weight_of(64, 128).bfloat16(), bits), batch_invariant=True
    )
    x = weight_of(40, 128, 1).bfloat16()
    alone = torch.cat([projection(row[None]) for row in x])
    assert torch.equal(projection(x), alone)
    assert torch.equal(projection(x[:17]), alone[:17])


@pytest.mark.parametrize("bits", BITS)
def test_several_blocks_are_one_product(bits, monkeypatch):
    monkeypatch.setattr("forethought.model.quantization.BLOCK", 1024)
    weight, x = quantize(weight_of(50, 128), bits), weight_of(3, 128, 1)
    whole = x @ weight.dequantize().t()
    assert torch.allclose(BlockwiseProduct(weight)(x), whole, atol=1e-5)


@pytest.mark.parametrize("bits", BITS)
def test_weights_are_merged_by_outputs(bits):
    parts = [quantize(weight_of(rows, 64, rows), bits) for rows in (32, 16)]
    whole = concatenated(parts).dequantize()
    assert torch.equal(whole, torch.cat([part.dequantize() for part in parts]))


@pytest.mark.parametrize("bits", BITS)
def test_bias_residual_and_activation_are_added_as_by_any_projection(bits):
    weight, bias = quantize(weight_of(32, 64), bits), torch.arange(32.0)
    projection, x, other = QuantizedProjection(weight, bias), weight_of(3, 64), weight_of(3, 32)
    expected = x @ weight.dequantize().t() + bias
    assert torch.allclose(projection(x), expected, atol=1e-4)
    assert torch.allclose(projection.plus(x, other), expected + other, atol=1e-4)
    assert torch.allclose(projection.silu(x), torch.nn.functional.silu(expected), atol=1e-4)


def rounded(path, quantization):
    """transformers' model with the weights that quantisation leaves, in float32."""
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    head = module.get_output_embeddings()
    for found in module.modules():
        if isinstance(found, torch.nn.Linear):
            bits = 8 if found is head or quantization == "int8" else 4
            weight = quantize(found.weight.detach(), bits).dequantize()
            found.weight = torch.nn.Parameter(weight)
    return module.eval()


def generated(lm, params=GREEDY, speculative=()):
    engine = engine_over(lm, speculative=speculative)
    sequences = [engine.add(prompt, params)[0] for prompt in prompts()]
    drain(engine)
    expect_empty(engine)
    return outputs(sequences)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_engine_generates_what_transformers_does_with_the_rounded_weights(
    qwen, quantization, fuse
):
    lm = loader.load(qwen, dtype="float32", fuse=fuse, quantization=quantization)
    assert isinstance(lm.network, FusedNetwork if fuse else TransformersNetwork)
    module, expected = rounded(qwen, quantization), []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        found = module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=16,
            min_new_tokens=16,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected.append(found[0, len(prompt) :].tolist())
    assert generated(lm) == expected


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_drafts_change_no_token_of_a_quantised_model(qwen, quantization, temperature):
    lm = loader.load(qwen, dtype="float32", quantization=quantization)
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True, seed=3)
    drafts = NGramDecodingConfig(max_draft_len=4, max_matching_ngram_size=2)
    assert generated(lm, params, [drafts]) == generated(lm, params)


def test_the_argument_reaches_the_model_from_the_llm(qwen, tmp_path):
    with pytest.raises(ParameterError, match="quantization"):
        LLM(model=qwen, quantization="int2")


def test_a_cpu_multiplies_quantised_weights_by_bf16(qwen):
    assert loader.load(qwen, quantization="int8").dtype == torch.bfloat16
    assert loader.load(qwen, dtype="float32", quantization="int8").dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", BITS)
def test_weights_that_are_all_zero_stay_so(bits, dtype):
    found = quantize(torch.zeros(4, 64, dtype=dtype), bits)
    assert (found.scales > 0).all()
    assert torch.equal(found.dequantize(), torch.zeros(4, 64, dtype=dtype))


def test_one_scale_for_all_outputs_may_be_an_expanded_one():
    values = torch.randint(-127, 128, (64, 128), dtype=torch.int8)
    scales = torch.full((1, 1), 0.01, dtype=torch.bfloat16).expand(64, 1)
    weight = QuantizedWeight(values, scales, None, 8)
    x = weight_of(2, 128).bfloat16()
    expected = F.linear(x.float(), weight.dequantize().float())
    assert (product(weight)(x).float() - expected).norm() < 1e-2 * expected.norm()


def test_a_quantised_linear_moves_with_its_bias():
    linear = QuantizedLinear(quantize(weight_of(32, 64), 4), torch.ones(32)).to("meta")
    assert linear.bias.device.type == linear.weight.device.type == "meta"
    assert not linear.state_dict()


def test_a_quantised_linear_computes_the_same_before_and_after_it_is_packed():
    linear = QuantizedLinear(quantize(weight_of(32, 64), 4), torch.ones(32))
    x = weight_of(6, 64).view(2, 3, 64)
    before = linear(x)
    linear.pack()
    assert linear.weight is None
    assert torch.allclose(linear(x), before, atol=1e-5)


def test_four_bits_take_half_a_byte_each():
    weight = quantize(weight_of(32, 128), 4)
    assert weight.num_bytes == 32 * 128 // 2 + 32 * 4 + 32 * 4
    assert isinstance(weight, QuantizedWeight)
    assert BlockwiseProduct(weight).source.packed.nbytes == 32 * 128 // 2


def test_weights_in_16_bits_run_in_float32_where_the_cpu_converts_them(qwen, tmp_path, monkeypatch):
    module = AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.bfloat16)
    module.save_pretrained(tmp_path)
    monkeypatch.setattr(auto_dtype, "has_fast_matmul", lambda dtype, device: False)
    assert loader.load(tmp_path).dtype == torch.float32
    assert loader.load(tmp_path, dtype="bfloat16").dtype == torch.bfloat16
    monkeypatch.setattr(auto_dtype, "free_host_memory", lambda: 1)
    assert loader.load(tmp_path).dtype == torch.bfloat16
    monkeypatch.setattr(auto_dtype, "has_fast_matmul", lambda dtype, device: True)
    assert loader.load(tmp_path).dtype == torch.bfloat16


def test_weights_in_pytorch_files_count_as_well(qwen, tmp_path, monkeypatch):
    module = AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.bfloat16)
    module.config.save_pretrained(tmp_path)
    torch.save(module.state_dict(), tmp_path / "pytorch_model.bin")
    size = (tmp_path / "pytorch_model.bin").stat().st_size
    monkeypatch.setattr(auto_dtype, "has_fast_matmul", lambda dtype, device: False)
    monkeypatch.setattr(auto_dtype, "free_host_memory", lambda: 4 * size)
    assert loader.load(tmp_path).dtype == torch.float32
    monkeypatch.setattr(auto_dtype, "free_host_memory", lambda: 4 * size - 4)
    assert loader.load(tmp_path).dtype == torch.bfloat16


@pytest.mark.parametrize("limit", ["1048576", "max"])
def test_free_memory_is_what_is_available_within_the_control_group(tmp_path, limit):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4096 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    group = tmp_path / "sys/fs/cgroup/a"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{limit}\n")
    assert free_host_memory(tmp_path) == (4096 * 1024 if limit == "max" else 2**20)


@pytest.mark.parametrize("num_rows", [1, 12, 13, 40])
def test_eight_bits_are_scaled_after_they_are_summed(num_rows):
    values = torch.zeros(32, 64, dtype=torch.int8)
    values[:, 0], values[:, 1] = 101, -100
    scales = torch.full((32, 1), 0.0103, dtype=torch.bfloat16)
    found = product(QuantizedWeight(values, scales, None, 8))(torch.ones(num_rows, 64).bfloat16())
    assert torch.equal(found, scales.flatten().expand(num_rows, -1))  # 1 s, not 1.0391 - 1.0312
