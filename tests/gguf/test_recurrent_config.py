"""Which layers of a model are recurrent, of what sizes, and what a file cannot tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forethought.errors import ModelError
from forethought.gguf.file import GgufFile
from forethought.gguf.model_config import config_of
from forethought.gguf.tensor_names import tensor_names
from gguf_files import MODELS, meta_weights, write_model


def opened(path: Path, case: str, **changes: Any) -> GgufFile:
    """A file of a case, with settings of its architecture that differ (two underscores: a dot)."""
    architecture = MODELS[case][0]
    whole = {f"{architecture}.{key.replace('__', '.')}": value for key, value in changes.items()}
    return GgufFile.open(write_model(path / "model.gguf", case, changes=whole))


def config(path: Path, case: str, **changes: Any) -> dict[str, Any]:
    return config_of(opened(path, case, **changes))


@pytest.mark.parametrize("case", ["qwen35", "qwen35moe", "qwen3next"])
def test_layers_for_multi_token_prediction_are_left_out_and_named(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They follow the others, of which the file counts them."""
    file = opened(tmp_path, case, block_count=5, nextn_predict_layers=1)
    file.tensors["blk.4.nextn.eh_proj.weight"] = file.tensors["output.weight"]
    fields = config_of(file)
    assert fields["num_hidden_layers"] == len(fields["layer_types"]) == 4
    assert "1 layers of" in caplog.text
    assert "model.layers.3.self_attn.q_proj.weight" in tensor_names(fields, file)
    with pytest.raises(ModelError, match="nextn_predict_layers"):
        config(tmp_path, case, block_count=5, nextn_predict_layers=5)


@pytest.mark.parametrize("case", ["qwen35", "qwen35moe", "qwen3next"])
def test_flags_of_layers_are_taken_before_the_period(case: str, tmp_path: Path) -> None:
    flags = [True, False, True, False]
    fields = config(tmp_path, case, attention__recurrent_layers=flags)
    kinds = {True: "linear_attention", False: "full_attention"}
    assert fields["layer_types"] == [kinds[flag] for flag in flags]
    fields = config(tmp_path, case, full_attention_interval=2)
    assert fields["layer_types"] == [kinds[flag] for flag in flags]
    with pytest.raises(ModelError, match=r"recurrent_layers is .*, not an array of 4"):
        config(tmp_path, case, attention__recurrent_layers=flags[:3])


@pytest.mark.parametrize(
    ("case", "changes", "key"),
    [
        ("qwen35", {"ssm__inner_size": 100}, "ssm.inner_size"),
        ("qwen35", {"ssm__group_count": 4}, "ssm.time_step_rank"),
        ("qwen35", {"ssm__state_size": 0}, "ssm.state_size"),
        ("qwen3next", {"ssm__group_count": 4}, "ssm.time_step_rank"),
        ("granitehybrid", {"ssm__inner_size": 160}, "ssm.inner_size"),
        ("falcon-h1", {"ssm__time_step_rank": 3}, "ssm.inner_size"),
        ("nemotron_h", {"ssm__group_count": 4}, "ssm.time_step_rank"),
    ],
)
def test_heads_of_recurrent_layers_that_cannot_be_are_refused(
    case: str, changes: dict[str, int], key: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=key):
        config(tmp_path, case, **changes)


@pytest.mark.parametrize("case", ["lfm2", "granitehybrid", "bamba", "nemotron_h"])
@pytest.mark.parametrize("kv_heads", [2, [2], [0.5, 2.5, 0.0], [0, -2, 0]])
def test_heads_of_each_layer_are_numbers_for_all_layers(
    case: str, kv_heads: Any, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="head_count_kv"):
        config(tmp_path, case, attention__head_count_kv=kv_heads)


def test_the_layers_of_nemotron_are_told_by_what_they_do_not_have(tmp_path: Path) -> None:
    fields = config(tmp_path, "nemotron_h_moe")
    assert fields["layers_block_type"] == ["mamba", "moe", "attention", "moe"]
    fields = config(
        tmp_path,
        "nemotron_h",
        attention__head_count_kv=[2, 0, 0, 0, 2],
        feed_forward_length=[0, 0, 96, 96, 0],
    )
    assert fields["layers_block_type"] == ["attention", "mamba", "mlp", "mlp", "attention"]
    assert (fields["num_key_value_heads"], fields["intermediate_size"]) == (2, 96)
    with pytest.raises(ModelError, match="feed_forward_length"):
        config(tmp_path, "nemotron_h", feed_forward_length=[0, 96, 0, 0, 64])


def test_heads_of_nemotron_know_no_positions(tmp_path: Path) -> None:
    """What a file says of rotations, for which its converter takes heads of another size."""
    assert "rope_parameters" not in config(tmp_path, "nemotron_h")


def test_bamba_is_told_from_granite_by_rotations_and_the_lack_of_scales(tmp_path: Path) -> None:
    assert config(tmp_path, "bamba")["model_type"] == "bamba"
    assert config(tmp_path, "bamba", rope__scaling__finetuned=None)["model_type"] == "bamba"
    whole = config(tmp_path, "bamba", rope__dimension_count=16)
    assert whole["rope_parameters"]["partial_rotary_factor"] == 1.0
    for changes in ({"rope__scaling__finetuned": False}, {"logit_scale": 2.0}):
        fields = config(tmp_path, "bamba", rope__dimension_count=16, **changes)
        assert fields["model_type"] == "granitemoehybrid"
        assert fields["position_embedding_type"] == ("rope" if "logit_scale" in changes else None)
    with pytest.raises(ModelError, match=r"rope.dimension_count is 8, not 16"):
        config(tmp_path, "granitehybrid_rotated", rope__dimension_count=8)


def test_scales_of_granite_that_a_file_leaves_out_are_those_of_llama_cpp(tmp_path: Path) -> None:
    scales = dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale"))
    fields = config(tmp_path, "granitehybrid", attention__scale=None, **scales)
    names = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
    assert [fields[name] for name in names] == [1.0] * 3
    assert fields["attention_multiplier"] == 16**-0.5


def test_a_head_of_falcon_that_is_tied_is_refused_for_the_scale_that_is_lost(
    tmp_path: Path,
) -> None:
    file = opened(tmp_path, "falcon-h1")
    del file.tensors["output.weight"]
    with pytest.raises(ModelError, match="lm_head_multiplier, which scales the logits"):
        config_of(file)


def test_weights_of_falcon_without_their_multipliers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"falcon-h1.mlp_gate_multiplier says that"):
        config(tmp_path, "falcon-h1", mlp_gate_multiplier=0.18)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("nemotron_h_moe", {"expert_group_count": 2}),
        ("nemotron_h_moe", {"expert_gating_func": 3}),
        ("nemotron_h", {"nextn_predict_layers": 1}),
        ("granitehybrid_moe", {"expert_weights_scale": 2.0}),
        ("falcon-h1", {"attention__scale": 0.5}),
        ("qwen35moe", {"expert_weights_norm": False}),
    ],
)
def test_what_the_module_of_transformers_has_no_setting_for_is_refused_by_name(
    case: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    [key] = changes
    with pytest.raises(ModelError, match=key.replace("__", r"\.")):
        config(tmp_path, case, **changes)


def test_norms_of_falcon_have_their_name_with_a_suffix_or_without(tmp_path: Path) -> None:
    file = opened(tmp_path, "falcon-h1")
    assert "blk.0.ffn_norm" in file.tensors
    norm = file.tensors.pop("blk.0.ffn_norm")
    file.tensors["blk.0.ffn_norm.weight"] = replace(norm, name="blk.0.ffn_norm.weight")
    names = tensor_names(config_of(file), file)
    assert {name: entry.shape for name, entry in names.items()} == meta_weights("falcon-h1")
    del file.tensors["blk.0.ffn_norm.weight"]
    with pytest.raises(ModelError, match=r"it lacks blk.0.ffn_norm.weight"):
        tensor_names(config_of(file), file)


def test_projections_whose_rows_are_not_those_of_the_heads_are_refused(tmp_path: Path) -> None:
    file = opened(tmp_path, "qwen3next")
    file.tensors["blk.0.attn_gate.weight"] = file.tensors["blk.0.attn_qkv.weight"]
    with pytest.raises(ModelError, match="do not fit"):
        tensor_names(config_of(file), file)


@pytest.mark.parametrize("part", ["attn_q.bias", "ssm_in.bias", "ffn_up_exps.bias"])
def test_biases_that_the_module_does_not_have_are_named(part: str, tmp_path: Path) -> None:
    file = opened(tmp_path, "falcon-h1")
    file.tensors[f"blk.1.{part}"] = file.tensors["output_norm.weight"]
    with pytest.raises(ModelError, match=f"it has blk.1.{part}"):
        tensor_names(config_of(file), file)
