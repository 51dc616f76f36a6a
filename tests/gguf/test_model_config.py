"""Metadata of every architecture becomes the configuration of transformers, and nothing that
changes what a model computes is lost.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import gguf
import gguf_files
from forethought.errors import ModelError
from forethought.gguf.file import GgufFile
from forethought.gguf.metadata import shortest
from forethought.gguf.model_config import config_of
from gguf_files import MODELS, config_of_case, write_model

_COMPUTED = (
    *("architectures", "dtype", "transformers_version", "_name_or_path", "initializer_range"),
    *(
        "max_window_layers",
        "no_rope_layer_interval",
        "partial_rotary_factor",
        "chunk_size_feed_forward",
    ),
)
"""Fields that say nothing of what a checkpoint computes, or that others say again."""


def config(path: Path, case: str = "llama", **arguments: Any) -> dict[str, Any]:
    return config_of(GgufFile.open(write_model(path / "model.gguf", case, **arguments)))


def refusal(path: Path, case: str = "llama", **changes: Any) -> str:
    with pytest.raises(ModelError) as caught:
        config(
            path, case, changes={key.replace("__", "."): value for key, value in changes.items()}
        )
    return str(caught.value)


@pytest.mark.parametrize("case", MODELS)
def test_a_file_gives_the_configuration_that_its_model_had(case: str, tmp_path: Path) -> None:
    fields = config(tmp_path, case)
    expected = config_of_case(case).to_dict()
    result = AutoConfig.for_model(**fields).to_dict()
    for name, value in expected.items():
        if name not in _COMPUTED:
            assert result[name] == value, name
    assert fields["dtype"] == "float32"


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F16", "float16"), ("BF16", "bfloat16"), ("F32", "float32"), ("Q8_0", "float32")],
)
def test_the_dtype_is_that_of_most_weights(kind: str, dtype: str, tmp_path: Path) -> None:
    number = gguf.GGMLQuantizationType[kind]
    matrices = {"quantize": lambda name, data: number if data.ndim > 1 else gguf_files.F32}
    assert config(tmp_path, **matrices)["dtype"] == dtype


def test_stored_numbers_are_the_shortest_that_they_can_stand_for() -> None:
    for value in (1e-5, 1e-6, 0.1, 10000.0, 1e6, 2.0, 1 / 3, 1.0000001):
        stored = float(np.float32(value))
        assert np.float32(shortest(stored)) == np.float32(value)
        assert len(repr(shortest(stored))) <= len(repr(stored))
    assert shortest(float(np.float32(1e-5))) == 1e-5
    assert shortest(1e300) == 1e300
    assert math.isnan(shortest(math.nan))


def llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """What the frequencies of Llama 3.1 are divided by, by transformers' own function."""
    fields = config_of_case("llama")
    fields.rope_parameters, fields.head_dim = rope, head_dim
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](fields, torch.device("cpu"))
    plain = rope["rope_theta"] ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    return (plain / scaled.double()).float().numpy()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_factors_of_llama_3_become_its_settings(factor: float, tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    factors = llama3_factors(rope, 16)
    assert 1 < len(set(factors.tolist())) <= 8
    path = with_factors(tmp_path, {"rope_freqs": factors}, {"llama.rope.freq_base": 500000.0})
    assert config_of(GgufFile.open(path))["rope_parameters"] == rope
    path = with_factors(tmp_path, {"rope_freqs": np.ones(8)})
    assert config_of(GgufFile.open(path))["rope_parameters"]["rope_type"] == "default"
    path = with_factors(tmp_path, {"rope_freqs": factors * 1.01})
    with pytest.raises(ModelError, match="not those of Llama"):
        config_of(GgufFile.open(path))


def with_factors(
    folder: Path,
    factors: dict[str, np.ndarray],
    changes: dict[str, Any] | None = None,
    case: str = "llama",
) -> Path:
    """A file that has tensors of factors beside its weights."""

    def add(writer: gguf.GGUFWriter, size: int) -> None:
        gguf_files.add_byte_vocabulary(writer, size)
        for name, values in factors.items():
            writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    return write_model(folder / "factors.gguf", case, changes=changes, vocabulary=add)


def test_longrope_takes_its_factors_from_the_tensors(tmp_path: Path) -> None:
    long, short = np.linspace(1, 4, 8), np.full(8, 1.5)
    changes = {
        "phi3.rope.dimension_count": 16,
        "phi3.rope.scaling.original_context_length": 128,
        "phi3.rope.scaling.attn_factor": math.sqrt(1 + math.log(2) / math.log(128)),
    }
    path = with_factors(
        tmp_path, {"rope_factors_long": long, "rope_factors_short": short}, changes, "phi3"
    )
    fields = config_of(GgufFile.open(path))
    rope = fields["rope_parameters"]
    assert rope["rope_type"] == "longrope"
    assert np.allclose(rope["long_factor"], long, rtol=1e-7)
    assert rope["short_factor"] == [1.5] * 8
    assert "attention_factor" not in rope
    assert fields["original_max_position_embeddings"] == 128
    AutoConfig.for_model(**fields)
    path = with_factors(tmp_path, {"rope_factors_long": long}, changes, "phi3")
    with pytest.raises(ModelError, match="rope_factors_short"):
        config_of(GgufFile.open(path))


def test_linear_scaling_and_yarn_become_those_of_transformers(tmp_path: Path) -> None:
    linear = {"llama.rope.scaling.factor": 4.0}
    assert config(tmp_path, changes=linear)["rope_parameters"] == {
        "rope_type": "linear",
        "rope_theta": 50000.0,
        "factor": 4.0,
    }
    none = {**linear, "llama.rope.scaling.type": "none"}
    assert config(tmp_path, changes=none)["rope_parameters"]["rope_type"] == "default"
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
        "llama.rope.scaling.yarn_beta_fast": 24.0,
        "llama.rope.scaling.yarn_attn_factor": 1.25,
        "llama.rope.scaling.yarn_log_multiplier": 0.5,
    }
    assert config(tmp_path, changes=yarn)["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 24.0,
        "attention_factor": 1.25,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    }
    assert "scaled in a way that is unknown (su)" in refusal(
        tmp_path, llama__rope__scaling__type="su"
    )
    ext = {**yarn, "llama.rope.scaling.yarn_ext_factor": 0.5}
    with pytest.raises(ModelError, match="extrapolation factor"):
        config(tmp_path, changes=ext)


def test_the_largest_gemmas_divide_queries_by_another_number(tmp_path: Path) -> None:
    sizes = {"gemma2.block_count": 46, "gemma2.attention.head_count": 2}
    file = GgufFile.open(write_model(tmp_path / "model.gguf", "gemma2", changes=sizes))
    file.tensors |= {
        f"blk.{number}.filler": file.tensors["output_norm.weight"] for number in range(60)
    }
    assert config_of(file)["query_pre_attn_scalar"] == 64 // 2


def test_gemma_3_without_a_window_has_full_attention_everywhere(tmp_path: Path) -> None:
    fields = config(tmp_path, "gemma3", changes={"gemma3.attention.sliding_window": None})
    assert set(fields["layer_types"]) == {"full_attention"}
    assert fields["sliding_window"] is None


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    said = refusal(tmp_path, general__architecture="mamba")
    assert "its architecture is mamba; llama, qwen2" in said


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.expert_count", 8),
        ("llama.attention.causal", False),
        ("llama.attention.clamp_kqv", 8.0),
        ("llama.attention.scale", 0.5),
        ("llama.logit_scale", 0.1),
        ("llama.residual_scale", 0.2),
        ("llama.embedding_scale", 12.0),
        ("llama.pooling_type", 3),
        ("llama.nextn_predict_layers", 1),
        ("llama.rope.dimension_sections", [8, 4, 4, 0]),
        ("llama.attn_logit_softcapping", 30.0),
        ("llama.rope.freq_base_swa", 10000.0),
    ],
)
def test_a_setting_that_would_be_lost_is_refused_by_name(
    key: str, value: Any, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=key.replace(".", r"\.")):
        config(tmp_path, changes={key: value})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("llama.block_count", 10**6, "a number up to"),
        ("llama.block_count", -1, "not a whole number"),
        ("llama.block_count", None, "llama.block_count is missing"),
        ("llama.embedding_length", "many", "a whole number"),
        ("llama.attention.head_count", [4, 4, 2], "a whole number"),
        ("llama.attention.layer_norm_rms_epsilon", 0.0, "a number above zero"),
        ("llama.rope.freq_base", float("nan"), "a number above zero"),
        ("llama.rope.dimension_count", 7, "an even number"),
        ("llama.rope.dimension_count", 8, "16, the size of a head"),
        ("llama.attention.value_length", 8, "16, the size of keys"),
        ("general.architecture", 3, "general.architecture is 3, not a string"),
        ("general.type", "adapter", "it holds an adapter"),
        ("general.type", "imatrix", "it holds a imatrix"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_key(
    key: str, value: Any, words: str, tmp_path: Path
) -> None:
    file = GgufFile.open(write_model(tmp_path / "model.gguf"))
    if value is None:
        del file.metadata[key]
    else:
        file.metadata[key] = tuple(value) if isinstance(value, list) else value
    with pytest.raises(ModelError) as caught:
        config_of(file)
    assert words in str(caught.value)


def test_sizes_of_all_layers_that_are_equal_are_one_size(tmp_path: Path) -> None:
    fields = config(tmp_path, changes={"llama.attention.head_count_kv": [2, 2, 2]})
    assert fields["num_key_value_heads"] == 2


def test_ids_that_are_no_tokens_are_left_out(tmp_path: Path) -> None:
    file = GgufFile.open(write_model(tmp_path / "model.gguf"))
    file.metadata["tokenizer.ggml.padding_token_id"] = 2**32 - 1
    assert config_of(file)["pad_token_id"] is None
