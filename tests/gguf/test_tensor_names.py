"""Every weight of a module comes from a tensor of the file, and every tensor goes to one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from forethought.errors import ModelError
from forethought.gguf.file import GgufFile
from forethought.gguf.model_config import config_of
from forethought.gguf.stored_name import HeadGroups, StoredName
from forethought.gguf.tensor_names import tensor_names
from gguf_files import MODELS, PERMUTED, meta_weights, module_of_case, write_model


def stored(file: GgufFile, name: str) -> Tensor:
    info = file.tensors[name]
    values = np.frombuffer(file.raw(name), np.float32).copy()
    return torch.from_numpy(values).view(info.shape)


def weight(file: GgufFile, entry: StoredName) -> Tensor:
    """The weight that an entry describes, step by step as its docstring says."""
    tensor = stored(file, entry.name)
    if entry.permutes_heads is not None:
        heads = entry.permutes_heads
        size = tensor.shape[0] // heads
        tensor = (
            tensor.reshape(heads, size // 2, 2, *tensor.shape[1:])
            .swapaxes(1, 2)
            .reshape(tensor.shape)
        )
    tensor = tensor + entry.adds
    if entry.joined is not None:
        rows = tensor.ndim + entry.row_dimension
        tensor = torch.cat((tensor, stored(file, entry.joined)), dim=rows)
        if entry.turns:
            tensor = tensor.index_select(rows, torch.tensor(order_of_turns(entry, tensor, rows)))
    if entry.transposes:
        tensor = tensor.transpose(-1, -2)
    if entry.head_groups is not None:
        tensor = with_groups_together(tensor, entry.head_groups, -1 if entry.groups_columns else 0)
    if entry.is_decay:
        tensor = (-tensor).log()
    return tensor.reshape(entry.shape)


def order_of_turns(entry: StoredName, tensor: Tensor, dim: int) -> list[int]:
    """The stored row of each row."""
    count = tensor.shape[dim] // sum(entry.turns)
    begins = [count * sum(entry.turns[:index]) for index in range(len(entry.turns))]
    return [
        begin + turn * size + row
        for turn in range(count)
        for begin, size in zip(begins, entry.turns, strict=True)
        for row in range(size)
    ]


def with_groups_together(tensor: torch.Tensor, groups: HeadGroups, dim: int) -> torch.Tensor:
    """Value head r of key head k is stored at place r * num_groups + k."""
    keys = tensor.narrow(dim, 0, groups.begin)
    values = tensor.narrow(dim, groups.begin, tensor.shape[dim] - groups.begin)
    heads = values.chunk(groups.num_groups * groups.group_size, dim)
    ordered = [
        heads[r * groups.num_groups + k]
        for k in range(groups.num_groups)
        for r in range(groups.group_size)
    ]
    return torch.cat([keys, *ordered], dim)


@pytest.mark.parametrize("case", MODELS)
def test_every_weight_has_a_tensor_and_every_tensor_a_weight(case: str, tmp_path: Path) -> None:
    file = GgufFile.open(write_model(tmp_path / "model.gguf", case))
    names = tensor_names(config_of(file), file)
    assert {name: entry.shape for name, entry in names.items()} == meta_weights(case)
    used = {name for entry in names.values() for name in (entry.name, entry.joined) if name}
    assert used == set(file.tensors)
    assert len(used) == sum(2 if entry.joined else 1 for entry in names.values())


@pytest.mark.parametrize("case", MODELS)
def test_the_weights_come_back_as_they_were_before_the_conversion(
    case: str, tmp_path: Path
) -> None:
    weights = dict(module_of_case(case).state_dict())
    config = {**config_of(GgufFile.open(write_model(tmp_path / "empty.gguf", case)))}
    if config["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    file = GgufFile.open(write_model(tmp_path / "model.gguf", case, weights=weights))
    names = tensor_names(config, file)
    for name, expected in weights.items():
        result = weight(file, names[name])
        tolerance = 1e-6 if names[name].adds or names[name].is_decay else 0.0
        assert torch.allclose(result, expected, rtol=0, atol=tolerance), name
    is_permuted = any(entry.permutes_heads for entry in names.values())
    assert is_permuted == (MODELS[case][0] in PERMUTED)


def test_weights_that_keep_their_rows_are_those_whose_blocks_stay_as_they_are(
    tmp_path: Path,
) -> None:
    file = GgufFile.open(write_model(tmp_path / "model.gguf", "gemma2"))
    names = tensor_names(config_of(file), file)
    assert names["model.layers.0.mlp.up_proj.weight"].keeps_rows
    assert not names["model.norm.weight"].keeps_rows
    file = GgufFile.open(write_model(tmp_path / "experts.gguf", "gpt-oss"))
    names = tensor_names(config_of(file), file)
    assert names["model.layers.1.self_attn.q_proj.weight"].keeps_rows
    assert not names["model.layers.1.mlp.experts.down_proj"].keeps_rows


def test_gates_and_ups_of_experts_may_be_one_tensor(tmp_path: Path) -> None:
    file = GgufFile.open(write_model(tmp_path / "model.gguf", "qwen2moe"))
    config, expected = config_of(file), meta_weights("qwen2moe")
    for index in range(config["num_hidden_layers"]):
        gate = file.tensors.pop(f"blk.{index}.ffn_gate_exps.weight")
        del file.tensors[f"blk.{index}.ffn_up_exps.weight"]
        experts, rows, columns = gate.shape
        name = f"blk.{index}.ffn_gate_up_exps.weight"
        file.tensors[name] = replace(gate, name=name, shape=(experts, 2 * rows, columns))
    names = tensor_names(config, file)
    assert {name: entry.shape for name, entry in names.items()} == expected
    assert names["model.layers.1.mlp.experts.gate_up_proj"].keeps_rows


def test_a_tensor_that_is_missing_or_has_no_place_is_named(tmp_path: Path) -> None:
    file = GgufFile.open(write_model(tmp_path / "model.gguf"))
    config = config_of(file)
    extra = file.tensors["output_norm.weight"]
    file.tensors["blk.1.ssm_conv1d.weight"] = extra
    with pytest.raises(ModelError, match=r"it has blk.1.ssm_conv1d.weight, which a llama model"):
        tensor_names(config, file)
    del file.tensors["blk.1.ssm_conv1d.weight"], file.tensors["blk.2.attn_v.weight"]
    with pytest.raises(ModelError, match=r"it lacks blk.2.attn_v.weight"):
        tensor_names(config, file)


def test_experts_whose_shapes_do_not_fit_are_refused(tmp_path: Path) -> None:
    file = GgufFile.open(write_model(tmp_path / "model.gguf", "qwen3moe"))
    file.tensors["blk.0.ffn_up_exps.weight"] = file.tensors["blk.0.ffn_down_exps.weight"]
    with pytest.raises(ModelError, match="do not fit"):
        tensor_names(config_of(file), file)
