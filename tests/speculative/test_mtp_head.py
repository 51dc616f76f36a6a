"""MTP modules: every layout is read back to the same predictions; what does not fit is named."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines import load
from forethought.errors import ModelError
from forethought.speculative.heads.mtp import MtpModule, load_modules
from forethought.speculative.heads.mtp_layout import LAYOUTS
from models import tiny
from mtp_modules import random_modules, saved

NUM_INPUTS = 7


def predictions(module: MtpModule, architecture: str = "llama", first: int = 0) -> torch.Tensor:
    """What leaves a module behind some inputs, the first of them at position ``first``."""
    hidden = load(architecture).hidden_size
    embedded, states = torch.randn(
        2, 1, NUM_INPUTS, hidden, generator=torch.Generator().manual_seed(5)
    )
    module.model.set_attn_implementation("eager")
    with torch.inference_mode():
        return module(embedded, states, first + torch.arange(NUM_INPUTS)[None]).normed


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3", "qwen3_moe", "starcoder2"])
def test_a_checkpoint_is_read_back_to_the_same_predictions(layout: str, architecture: str) -> None:
    written = random_modules(architecture, 2, layout)
    stored = load_modules(saved(architecture, 2, layout), load(architecture))
    assert len(stored) == 2
    for mine, other in zip(stored, written, strict=True):
        assert torch.allclose(
            predictions(mine, architecture), predictions(other, architecture), atol=1e-6
        )
    assert not torch.allclose(
        predictions(stored[0], architecture), predictions(stored[1], architecture)
    )


def names(layout: str, architecture: str = "llama") -> set[str]:
    return set(load_file(saved(architecture, 2, layout) / "model.safetensors"))


def test_names_are_the_published_ones() -> None:
    deepseek, moe = names("deepseek"), names("deepseek", "deepseek_v3")
    last = load("llama").num_layers
    for number in (last, last + 1):
        for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "self_attn.q_proj"):
            assert f"model.layers.{number}.{part}.weight" in deepseek
    assert not any(".layers.0." in name for name in deepseek)
    assert "model.layers.3.mlp.experts.0.gate_proj.weight" in moe
    assert "model.layers.3.mlp.shared_experts.down_proj.weight" in moe
    assert "model.layers.3.self_attn.kv_a_proj_with_mqa.weight" in moe
    for part in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"):
        assert f"model.mtp_layers.1.{part}.weight" in names("mimo")
    assert "model.mtp_layers.1.mlp.down_proj.weight" in names("mimo")
    shared = {"mtp.fc.weight", "mtp.norm.weight"}
    shared |= {"mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"}
    assert shared <= names("qwen")
    assert "mtp.layers.0.mlp.down_proj.weight" in names("qwen")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_are_concatenated_in_the_layouts_order(layout: str) -> None:
    """DeepSeek and Qwen read the token first, MiMo the state."""
    [module] = random_modules("llama", 1, layout)
    hidden = module.eh_proj.out_features
    state_half = slice(0, hidden) if layout == "mimo" else slice(hidden, None)
    module.eh_proj.weight.data[:, state_half] = 0.0
    embedded, states = torch.randn(2, 1, 4, hidden)
    positions = torch.arange(1, 5)[None]
    joined = module.join(embedded, states, positions)
    assert torch.equal(joined, module.join(embedded, states + 1.0, positions))
    assert not torch.allclose(joined, module.join(embedded + 1.0, states, positions))


@pytest.mark.parametrize(("layout", "zero"), [("deepseek", True), ("mimo", True), ("qwen", False)])
def test_the_embedding_at_position_zero_and_at_no_other_is_zero(layout: str, zero: bool) -> None:
    [module] = random_modules("llama", 1, layout)
    embedded, states = torch.randn(2, 1, 4, module.eh_proj.out_features)
    here = module.join(embedded, states, torch.arange(4)[None])
    without = module.join(torch.zeros_like(embedded), states, torch.arange(4)[None])
    later = module.join(embedded, states, torch.arange(1, 5)[None])
    assert torch.equal(here[:, 0], without[:, 0]) is zero
    assert torch.equal(here[:, 1:], later[:, 1:])
    assert not torch.allclose(here[:, 1:], without[:, 1:])


def altered(tmp_path: Path, layout: str, change: Any, architecture: str = "llama") -> Path:
    path = tmp_path / "altered"
    shutil.copytree(saved(architecture, 2, layout), path)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


TROUBLE = {
    ("deepseek", "model.layers.3.enorm.weight"): "lacks",
    ("deepseek", "model.layers.4.eh_proj.weight"): "lacks",
    ("deepseek", "model.layers.3.shared_head.norm.weight"): "lacks",
    ("deepseek", "model.layers.4.self_attn.k_proj.weight"): "lacks",
    ("mimo", "model.mtp_layers.0.input_proj.weight"): "lacks",
    ("mimo", "model.mtp_layers.1.mlp.up_proj.weight"): "lacks",
    ("qwen", "mtp.fc.weight"): "lacks",
    ("qwen", "mtp.layers.1.input_layernorm.weight"): "lacks",
}


@pytest.mark.parametrize(("layout", "name"), TROUBLE)
def test_a_missing_tensor_is_named(layout: str, name: str, tmp_path: Path) -> None:
    path = altered(tmp_path, layout, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=f"lacks {name}"):
        load_modules(path, load("llama"))


@pytest.mark.parametrize(("layout", "name"), TROUBLE)
def test_a_misshapen_tensor_is_named(layout: str, name: str, tmp_path: Path) -> None:
    def cut(tensors: dict[str, Any]) -> None:
        tensors[name] = tensors[name][:-1].contiguous()

    with pytest.raises(ModelError, match=f"wrong shape for {name}"):
        load_modules(altered(tmp_path, layout, cut), load("llama"))


@pytest.mark.parametrize("trouble", ["lacks", "wrong shape for"])
def test_a_tensor_of_an_expert_is_named(trouble: str, tmp_path: Path) -> None:
    name = "model.layers.4.mlp.experts.2.gate_proj.weight"

    def change(tensors: dict[str, Any]) -> None:
        whole = tensors.pop(name)
        if trouble != "lacks":
            tensors[name] = whole[:-1].contiguous()

    path = altered(tmp_path, "deepseek", change, "deepseek_v3")
    with pytest.raises(ModelError, match=f"{trouble} {name}"):
        load_modules(path, load("deepseek_v3"))


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("deepseek", "model.layers.3.self_attn.q_norm.weight"),
        ("deepseek", "model.layers.3.eh_proj.bias"),
        ("mimo", "model.mtp_layers.0.surprise.weight"),
        ("qwen", "mtp.surprise.weight"),
    ],
)
def test_an_unexpected_tensor_is_named(layout: str, name: str, tmp_path: Path) -> None:
    def add(tensors: dict[str, Any]) -> None:
        tensors[name] = torch.zeros(3)

    with pytest.raises(ModelError, match=f"unexpected {name}"):
        load_modules(altered(tmp_path, layout, add), load("llama"))


def test_copies_of_the_targets_embedding_and_projection_are_passed_over(tmp_path: Path) -> None:
    def add(tensors: dict[str, Any]) -> None:
        for copy in ("embed_tokens", "shared_head.head"):
            tensors[f"model.layers.3.{copy}.weight"] = torch.zeros(101, 32)

    found = load_modules(altered(tmp_path, "deepseek", add), load("llama"))
    assert torch.equal(
        predictions(found[0]), predictions(load_modules(saved("llama", 2), load("llama"))[0])
    )


def test_modules_are_found_in_any_file_of_a_sharded_checkpoint(tmp_path: Path) -> None:
    shutil.copytree(tiny("llama"), tmp_path / "target")
    tensors = sorted(load_file(saved("llama", 2) / "model.safetensors").items())
    for part in range(3):
        save_file(dict(tensors[part::3]), tmp_path / "target" / f"part-{part}.safetensors")
    found = load_modules(tmp_path / "target", load("llama"))
    for mine, other in zip(found, random_modules("llama", 2), strict=True):
        assert torch.allclose(predictions(mine), predictions(other), atol=1e-6)


def test_modules_of_another_model_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"cannot load the head in .*: its checkpoint"):
        load_modules(saved("deepseek_v3"), load("llama"))


def test_a_directory_without_modules_says_how_to_get_some(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no MTP modules"):
        load_modules(tiny("llama"), load("llama"))
    with pytest.raises(ModelError, match="no safetensors"):
        load_modules(tmp_path, load("llama"))
