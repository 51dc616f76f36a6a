"""Quantised experts in torch: those of transformers with the weights that quantisation leaves."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

import models
from engines import GREEDY, drain, engine_over, expect_empty, outputs
from forethought.errors import ModelError
from forethought.model import loader
from forethought.model.causal_lm import TransformersNetwork
from forethought.model.quantization import (
    BITS,
    QuantizedLinear,
    QuantizedWeight,
    quantize,
)
from forethought.model.quantized_experts import (
    QuantizedExperts,
    quantize_experts,
    routers,
    weights_of,
)

SIZES: dict[str, Any] = {
    "vocab_size": models.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 32,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
NUM_EXPERTS = 4
QWEN: dict[str, Any] = {"num_experts": NUM_EXPERTS, "moe_intermediate_size": 32}
DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": NUM_EXPERTS,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["attention", "mamba", "moe"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "n_routed_experts": NUM_EXPERTS,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "routers that are no linears": ("qwen3_moe", QWEN),
    "shared": ("qwen2_moe", {**QWEN, "shared_expert_intermediate_size": 64}),
    "biased, transposed": ("gpt_oss", {"num_local_experts": NUM_EXPERTS}),
    "transposed": ("aria_text", {"moe_num_experts": NUM_EXPERTS, "moe_topk": 2}),
    "routers that are linears": ("hunyuan_v1_moe", {**QWEN, "moe_topk": 2}),
    "routers of their own": ("phimoe", {"num_local_experts": NUM_EXPERTS}),
    "mixtral": ("mixtral", {"num_local_experts": NUM_EXPERTS}),
    "deepseek": ("deepseek_v3", DEEPSEEK),
    "without gates": ("nemotron_h", NEMOTRON),
}
"""Layout -> a family of transformers that has it, and its sizes beside ``SIZES``."""
SLOW = ("mixtral", "deepseek")


def config_of(layout: str) -> Any:
    family, sizes = LAYOUTS[layout]
    return CONFIG_MAPPING[family](**{**SIZES, **sizes})


def layouts() -> list[Any]:
    return [pytest.param(x, marks=[pytest.mark.slow] if x in SLOW else []) for x in LAYOUTS]


def experts_of(layout: str) -> nn.Module:
    """The experts of a layer with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(config_of(layout))
        for weight in module.parameters():
            weight.data.normal_(0, 0.3)
    return next(x for x in module.modules() if hasattr(x, "down_proj") and _is_3d(x.down_proj))


def _is_3d(weight: object) -> bool:
    return isinstance(weight, nn.Parameter) and weight.dim() == 3


def round_experts(experts: nn.Module, bits: int, rounds_input: bool) -> None:
    """Replace weights by those that quantisation leaves."""
    for name in weights_of(experts):
        for weight in getattr(experts, name).data:
            matrix = weight.T if experts.is_transposed else weight
            matrix.copy_(quantize(matrix, bits, rounds_input=rounds_input).dequantize())


def choices(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, experts of tokens, one of which no token chooses, and their weights."""
    source = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, SIZES["hidden_size"], generator=source)
    chosen = torch.stack([torch.randperm(3, generator=source)[:2] for _ in range(num_tokens)])
    return x, chosen, torch.rand(num_tokens, 2, generator=source)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("layout", layouts())
def test_they_are_the_experts_with_dequantised_weights(layout: str, quantization: str) -> None:
    experts = experts_of(layout)
    reference = copy.deepcopy(experts)
    round_experts(reference, BITS[quantization], rounds_input=False)
    found = QuantizedExperts.of(experts, quantization)
    for num_tokens in (1, 20):
        inputs = choices(num_tokens)
        torch.testing.assert_close(found(*inputs), reference(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantization", ["w8a8", "w4a8"])
def test_they_multiply_integers_where_activations_are_rounded(quantization: str) -> None:
    experts = experts_of("routers that are no linears")
    weights = [
        [quantize(weight, BITS[quantization], rounds_input=True) for weight in part]
        for part in (experts.gate_up_proj.detach(), experts.down_proj.detach())
    ]
    x, chosen, factors = choices(20)
    expected = torch.zeros_like(x)
    for token, (row, numbers) in enumerate(zip(x, chosen, strict=True)):
        for place, expert in enumerate(numbers):
            gate, up = weights[0][expert].integer_product()(row[None]).chunk(2, 1)
            output = weights[1][expert].integer_product()(nn.functional.silu(gate) * up)
            expected[token] += factors[token, place] * output[0]
    found = QuantizedExperts.of(experts, quantization)
    torch.testing.assert_close(found(x, chosen, factors), expected, rtol=1e-5, atol=1e-5)


def rounded(path: Path, quantization: str) -> PreTrainedModel:
    """transformers' model with the weights that quantisation leaves, in float32."""
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    plain, bits = copy.deepcopy(module), BITS[quantization]
    quantize_experts(module, quantization)
    unquantised, head = routers(module), module.get_output_embeddings()
    for name, part in module.named_modules():
        if isinstance(part, QuantizedExperts):
            round_experts(plain.get_submodule(name), bits, rounds_input=False)
        elif isinstance(part, nn.Linear) and part not in unquantised:
            weight = quantize(part.weight.detach(), 8 if part is head else bits)
            plain.get_submodule(name).weight.data = weight.dequantize()
    return plain.eval()


@pytest.mark.parametrize("layout", layouts())
def test_a_whole_model_generates_what_its_rounded_weights_do(tmp_path: Path, layout: str) -> None:
    models.save_random(config_of(layout), tmp_path / "model")
    settings = {"dtype": "float32", "forward": "torch", "quantization": "int8"}
    lm = loader.load(tmp_path / "model", **settings)
    assert isinstance(lm.network, TransformersNetwork)
    engine = engine_over(lm)
    prompts = models.prompts((4, 17))
    sequences = [engine.add(prompt, GREEDY)[0] for prompt in prompts]
    drain(engine)
    expect_empty(engine)
    module = rounded(tmp_path / "model", "int8")
    for prompt, tokens in zip(prompts, outputs(sequences), strict=True):
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.inference_mode():
            likely = module(ids).logits[0, len(prompt) - 1 : -1].argmax(1)
        assert likely.tolist() == tokens


@pytest.mark.parametrize("layout", [*LAYOUTS])
def test_routers_and_gates_of_shared_experts_stay(tmp_path: Path, layout: str) -> None:
    models.save_random(config_of(layout), tmp_path / "model")
    module = loader.load(
        tmp_path / "model", dtype="float32", forward="torch", quantization="int8"
    ).network.module
    plain = {part.out_features for part in module.modules() if isinstance(part, nn.Linear)}
    has_gate, is_linear = layout == "shared", layout.startswith("routers ") and "no" not in layout
    assert plain == {1} if has_gate else plain == ({NUM_EXPERTS} if is_linear else set())
    quantised = [x for x in module.modules() if isinstance(x, QuantizedLinear)]
    assert all(part.out_features not in (1, NUM_EXPERTS) for part in quantised)


def test_a_share_of_their_bytes_counts_as_that_of_experts(tmp_path: Path) -> None:
    models.save_random(config_of("shared"), tmp_path / "model")
    weights = [
        loader.load(tmp_path / "model", dtype="float32", forward="torch", **settings).traits.weights
        for settings in ({}, {"quantization": "int8"})
    ]
    sizes = [[weight for weight in part if weight.is_expert] for part in weights]
    assert sum(x.num_elements for x in sizes[0]) == sum(x.num_elements for x in sizes[1])
    assert sum(x.num_bytes for x in sizes[1]) < 0.3 * sum(x.num_bytes for x in sizes[0])


def test_no_expert_is_held_twice() -> None:
    quantised = QuantizedExperts.of(experts_of("biased, transposed"), "int8")
    assert not [name for name, _ in quantised.named_parameters()]
    assert all(isinstance(linear.weight, QuantizedWeight) for linear in quantised.linears())


@pytest.mark.parametrize(
    ("family", "sizes", "owner"),
    [
        ("llama4_text", {"num_local_experts": 4, "intermediate_size_mlp": 64}, "Llama4TextExperts"),
        ("jetmoe", {"num_local_experts": 4, "kv_channels": 16}, "JetMoeParallelExperts"),
    ],
)
def test_experts_of_another_layout_are_refused_by_name(
    tmp_path: Path, family: str, sizes: dict[str, int], owner: str
) -> None:
    config = CONFIG_MAPPING[family](**{**SIZES, **sizes})
    with torch.random.fork_rng():
        module = AutoModelForCausalLM.from_config(config)
    before = {name: type(part) for name, part in module.named_modules()}
    with pytest.raises(ModelError, match=f"experts in the layout of {owner}"):
        quantize_experts(module, "int8")
    assert {name: type(part) for name, part in module.named_modules()} == before


def test_widths_that_no_group_divides_are_refused_in_four_bits() -> None:
    with pytest.raises(ModelError, match="int8"):
        loader.load(models.tiny("qwen3_moe"), quantization="int4")
