"""The fused forward computes what the transformers module does, from the weights that it took."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import models
from forethought.kv.pool import PagePool
from forethought.kv.storage import KvStorage
from forethought.kv.table import PageTable
from forethought.model.batch import Row
from forethought.model.causal_lm import CausalLM, TransformersNetwork
from forethought.model.llama import layers as projections
from forethought.model.llama.layers import (
    BatchedProjection,
    MergedGatedActivation,
    Norm,
    PackedGatedActivation,
    PackedProjection,
    PlainProjection,
    gated_activation,
    projection,
)
from forethought.model.llama.network import FusedNetwork
from forethought.model.loader import load
from forethought.model.runner import ModelRunner

FUSED = ["llama", "llama_tied_biased", "mistral", "qwen2", "qwen3"]


def all_logits(lm: CausalLM) -> torch.Tensor:
    """Logits of every token of a prefill, a chunk and a decode, packed in two steps."""
    pool = PagePool(64, 3)
    runner = ModelRunner(lm, KvStorage(lm.layer_shapes, pool.num_pages, 3, lm.dtype))
    prompts = models.prompts((21, 13, 8))
    tables = [PageTable(pool) for _ in prompts]
    steps = []
    for cuts in ((0, 20), (0, 6), (0, 8)), ((20, 21), (6, 13)):
        rows = []
        for prompt, table, (start, stop) in zip(prompts, tables, cuts, strict=False):
            table.append(stop - start)
            rows.append(Row(prompt[start:stop], start, table))
        steps.append(runner.forward(rows))
    return torch.cat(steps)


@pytest.mark.parametrize("architecture", FUSED)
def test_fused_logits_equal_plain_logits(architecture: str) -> None:
    fused = load(models.tiny(architecture))
    plain = load(models.tiny(architecture), fuse=False)
    assert isinstance(fused.network, FusedNetwork)
    assert isinstance(plain.network, TransformersNetwork)
    torch.testing.assert_close(all_logits(fused), all_logits(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", FUSED)
def test_the_fused_forward_in_half_precision_is_as_near_to_float32_as_the_plain_one(
    architecture: str, dtype: str
) -> None:
    """Both have the same rounded weights: the mean error may differ by a factor of 1.5."""
    exact = all_logits(load(models.tiny(architecture), fuse=False))
    errors = [
        (all_logits(load(models.tiny(architecture), dtype=dtype, fuse=fuse)) - exact).abs().mean()
        for fuse in (True, False)
    ]
    assert errors[0] < 1.5 * errors[1]


@pytest.mark.parametrize("architecture", ["gemma2", "granite", "olmo2", "qwen3_moe", "smollm3"])
def test_only_known_families_are_fused(architecture: str) -> None:
    assert isinstance(load(models.tiny(architecture)).network, TransformersNetwork)


def test_a_known_family_with_another_activation_is_not_fused(tmp_path: Path) -> None:
    config = models.transformers_model(models.tiny("llama")).config
    changed = type(config)(**{**config.to_dict(), "hidden_act": "gelu"})
    models.save_random(changed, tmp_path / "gelu")
    assert isinstance(load(tmp_path / "gelu").network, TransformersNetwork)


def test_rope_scaling_of_the_model_survives_fusing(tmp_path: Path) -> None:
    config = models.transformers_model(models.tiny("llama")).config
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    changed = type(config)(**{**config.to_dict(), "rope_parameters": rope})
    models.save_random(changed, tmp_path / "yarn")
    fused, plain = (all_logits(load(tmp_path / "yarn", fuse=fuse)) for fuse in (True, False))
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(fused, all_logits(load(models.tiny("llama"))), atol=1e-2)


def test_a_fused_model_holds_its_weights_once() -> None:
    path = models.tiny("llama")
    models.transformers_model.cache_clear()
    wanted = sum(weight.numel() for weight in models.transformers_model(path).parameters())
    models.transformers_model.cache_clear()
    gc.collect()
    before = _held()
    lm = load(path)
    gc.collect()
    rotary = lm.network.rotary.nbytes  # type: ignore[attr-defined]
    assert _held() - before - rotary <= 4 * wanted * 1.02


def _held() -> int:
    """Bytes of all distinct tensor storages that are alive."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_products_equal_plain_ones(dtype: torch.dtype, biased: bool) -> None:
    source = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 32, generator=source).to(dtype)
    bias = torch.randn(48, generator=source).to(dtype) if biased else None
    packed = projection(weight, bias)
    if not isinstance(packed, PackedProjection):
        pytest.skip(f"oneDNN has no fast {dtype} products on this CPU")
    plain = PlainProjection(weight, bias)
    for rows in (1, 5, 33):
        x = torch.randn(rows, 32, generator=source).to(dtype)
        other = torch.randn(rows, 48, generator=source).to(dtype)
        torch.testing.assert_close(packed(x), plain(x), rtol=0.02, atol=0.05)
        torch.testing.assert_close(packed.plus(x, other), plain.plus(x, other), rtol=0.02, atol=0.1)
        torch.testing.assert_close(packed.silu(x), plain.silu(x), rtol=0.02, atol=0.1)


@pytest.mark.parametrize("biased", [False, True])
def test_a_packed_gate_equals_the_merged_one(biased: bool) -> None:
    source = torch.Generator().manual_seed(0)
    weight = (torch.randn(96, 32, generator=source) / 4).bfloat16()
    bias = torch.randn(96, generator=source).bfloat16() if biased else None
    if not isinstance(projection(weight), PackedProjection):
        pytest.skip("oneDNN has no fast bfloat16 products on this CPU")
    packed, merged = (
        PackedGatedActivation(weight, bias),
        MergedGatedActivation(PlainProjection(weight, bias)),
    )
    for rows in (1, 33):
        x = torch.randn(rows, 32, generator=source).bfloat16()
        torch.testing.assert_close(packed(x), merged(x), rtol=0.03, atol=0.03)


def test_large_gates_are_packed_and_small_ones_merged() -> None:
    small, large = (torch.zeros(2048, width, dtype=torch.bfloat16) for width in (64, 512))
    assert isinstance(gated_activation(small), MergedGatedActivation)
    packs = isinstance(projection(large), PackedProjection)
    assert isinstance(
        gated_activation(large), PackedGatedActivation if packs else MergedGatedActivation
    )


@pytest.mark.parametrize("shape", [(5, 48), (3, 6, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ways_to_normalise_agree(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(shape, generator=source)).to(dtype)
    x[0] = 0
    before = x.clone()
    norm = Norm(torch.randn(shape[1:], generator=source).to(dtype), 1e-5)
    wide, weight = x.double(), norm.weight.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for way in (norm.plain, norm.through_layer_norm, norm.in_float32, norm):
        result = way(x)
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=tolerance)
        assert torch.equal(x, before)


def test_products_in_float32_are_plain() -> None:
    weight, x = torch.randn(8, 4), torch.randn(3, 4)
    product = projection(weight)
    assert isinstance(product, PlainProjection)
    assert torch.equal(product(x), F.linear(x, weight))


@pytest.mark.parametrize("most", [0, 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_batched_products_equal_each_product_alone(
    most: int, dtype: torch.dtype, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projections, "MAX_BATCHED", most)
    torch.manual_seed(0)
    weights = [torch.randn(24, 16).to(dtype) for _ in range(3)]
    biases = [torch.randn(24).to(dtype) for _ in range(3)] if biased else None
    batched, x = BatchedProjection(weights, biases), torch.randn(3, 5, 16).to(dtype)
    for count in (1, 2, 3):
        alone = [
            F.linear(x[each], weights[each], None if biases is None else biases[each])
            for each in range(count)
        ]
        with torch.inference_mode():
            found = batched(x[:count])
        torch.testing.assert_close(found, torch.stack(alone), rtol=2e-2, atol=2e-2)
