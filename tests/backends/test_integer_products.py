"""Products of activations in 8 bits: the native ones are the reference's to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import models
from engines import drain, engine_over, expect_empty, outputs
from forethought import LLM, SamplingParams
from forethought.backends.cpu import library
from forethought.backends.cpu.packed_linear import PackedLinear
from forethought.config.drafters import DraftTargetDecodingConfig, NGramDecodingConfig
from forethought.errors import ModelError
from forethought.model import loader
from forethought.model.integer_product import rounded_to_int8
from forethought.model.quantization import QuantizedLinear, QuantizedWeight, quantize

SHAPES = ((40, 64), (17, 96), (64, 576), (33, 1536))
"""Outputs and inputs: whole panels and parts of them."""
COUNTS = (*range(1, 9), 13, 16, 17, 40)
"""Rows: every size of a pass, those that each thread rounds for itself, and more."""

needs_compiler = pytest.mark.skipif(
    library.find_compiler() is None, reason="there is no C++ compiler (c++, g++ or clang++)"
)


def weight_of(bits: int, num_outputs: int, num_inputs: int) -> QuantizedWeight:
    source = torch.Generator().manual_seed(num_inputs)
    weight = torch.randn(num_outputs, num_inputs, generator=source)
    return quantize(weight * torch.rand(num_outputs, 1, generator=source), bits, rounds_input=True)


def inputs_of(count: int, num_inputs: int) -> torch.Tensor:
    """Rows of different sizes, with zeros, outliers and numbers that are not normal."""
    source = torch.Generator().manual_seed(count)
    x = torch.randn(count, num_inputs, generator=source)
    x *= torch.logspace(-3, 3, count)[:, None]
    x[0, :40] = 0
    x[-1, 5] = 1e30
    x[-1, 40:64] = 1e-42
    return x


def check_products(bits: int) -> None:
    shapes = [*SHAPES, (20, 100)] if bits == 8 else SHAPES  # 100 inputs: part of a group
    for num_outputs, num_inputs in shapes:
        weight = weight_of(bits, num_outputs, num_inputs)
        bias = torch.randn(num_outputs, generator=torch.Generator().manual_seed(1))
        packed, reference = PackedLinear.pack(weight, bias), weight.integer_product()
        for count in COUNTS:
            x = inputs_of(count, num_inputs)
            assert torch.equal(packed.multiply(x), reference(x) + bias), (num_inputs, count)


@needs_compiler
@pytest.mark.parametrize("bits", [8, 4])
def test_a_native_product_is_the_reference_to_the_last_bit(bits: int) -> None:
    check_products(bits)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("flags", [["-DNO_BYTE_PRODUCTS"], ["-DNO_BYTE_PRODUCTS", "-mno-fma"]])
def test_without_products_of_bytes_the_sums_are_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str]
) -> None:
    monkeypatch.setenv("FORETHOUGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, *flags))
    library.load_library.cache_clear()
    try:
        check_products(8)
        check_products(4)
    finally:
        library.load_library.cache_clear()


@needs_compiler
@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_is_the_same_to_the_last_bit_beside_any_others(bits: int) -> None:
    packed = PackedLinear.pack(weight_of(bits, 48, 576), None)
    x = inputs_of(40, 576)
    alone = torch.cat([packed.multiply(row[None]) for row in x])
    for count in range(2, 41):
        assert torch.equal(packed.multiply(x[-count:]), alone[-count:])


@needs_compiler
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows_in_all_outputs_of_its_row(bits: int, value: float) -> None:
    weight, x = weight_of(bits, 48, 96), inputs_of(3, 96)
    x[1, 70] = value
    for outputs_of in (PackedLinear.pack(weight, None).multiply, weight.integer_product()):
        assert outputs_of(x).isnan().all(1).tolist() == [False, True, False]


@pytest.mark.parametrize("bits", [8, 4])
def test_the_reference_multiplies_the_rounded_inputs_by_the_dequantised_weight(bits: int) -> None:
    weight, x = weight_of(bits, 33, 96), inputs_of(5, 96)
    values, scales = rounded_to_int8(x)
    assert values.abs().max() == 127
    assert torch.equal(values, values.round())
    inputs = (values * scales[..., None]).flatten(1)
    steps = scales.repeat_interleave(32, 1)
    assert ((inputs - x).abs() <= 0.5001 * steps).all()
    expected = inputs.double() @ weight.dequantize().double().T
    error = (weight.integer_product()(x) - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 1e-6


@pytest.mark.parametrize("bits", [8, 4])
def test_a_linear_multiplies_integers_before_and_after_it_is_packed(bits: int) -> None:
    weight, x = weight_of(bits, 33, 96), inputs_of(5, 96)
    linear = QuantizedLinear(weight, torch.ones(33))
    expected = weight.integer_product()(x) + 1
    assert torch.equal(linear(x), expected)
    linear.pack()
    assert torch.equal(linear(x), expected)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that 4 bits can hold."""
    path = tmp_path_factory.mktemp("wide")
    config = loader.load(models.tiny("qwen3")).config
    config.update({"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8})
    models.save_random(config, path)
    return path


def generated(path: Path, quantization: str, params: SamplingParams, speculative=()) -> list:
    lm = loader.load(path, dtype="float32", quantization=quantization, forward="native")
    engine = engine_over(lm, speculative=speculative)
    sequences = [engine.add(prompt, params)[0] for prompt in models.prompts()]
    drain(engine)
    expect_empty(engine)
    return outputs(sequences)


@needs_compiler
@pytest.mark.parametrize("quantization", ["w8a8", "w4a8"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_no_token(wide: Path, quantization: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True, seed=3)
    expected = generated(wide, quantization, params)
    ngram = NGramDecodingConfig(max_draft_len=4, max_matching_ngram_size=2)
    draft_model = DraftTargetDecodingConfig(
        max_draft_len=3, speculative_model=wide, quantization=quantization
    )
    for drafter in (ngram, draft_model):
        assert generated(wide, quantization, params, [drafter]) == expected


@needs_compiler
@pytest.mark.parametrize("quantization", ["w8a8", "w4a8"])
def test_the_native_forward_is_near_to_the_reference(quantization: str) -> None:
    """Not equal: sums of attention differ in their last bits, which may round an input apart."""
    params, losses = SamplingParams(max_tokens=1, prompt_logprobs=0), []
    for forward in ("native", "torch"):
        with LLM(dtype="float32", quantization=quantization, forward=forward) as llm:
            text = llm.tokenizer.encode("Tom has 12 apples. " * 6)
            entries = llm.generate([text], params)[0].prompt_logprobs
        pairs = zip(text[1:], entries[1:], strict=True)
        losses.append(torch.tensor([entry[token].logprob for token, entry in pairs]))
    assert (losses[0] - losses[1]).abs().mean() < 0.02


def test_it_is_refused_on_other_devices_by_name(wide: Path) -> None:
    with pytest.raises(ModelError, match='quantization="w8a8" is not possible on meta') as info:
        loader.load(wide, quantization="w8a8", device="meta")
    assert 'Use quantization="int8"' in str(info.value)
