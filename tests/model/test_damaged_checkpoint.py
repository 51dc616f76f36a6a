"""A damaged checkpoint is refused with the tensor, the field or the file that is wrong."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import models
from forethought.errors import ModelError
from forethought.model.loader import load

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
Damage = Callable[[Path], object]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A directory of its own, to be damaged."""
    return Path(shutil.copytree(models.tiny("llama"), tmp_path / "llama"))


def expect_refusal(directory: Path, named: str) -> None:
    with pytest.raises(ModelError, match=re.escape(named)) as refused:
        load(directory, "float32")
    assert str(directory) in refused.value.what
    assert refused.value.fix


def edit(name: str, **fields: Any) -> Damage:
    """Changes fields of a JSON file."""

    def damage(directory: Path) -> None:
        path = directory / name
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return damage


def rewrite(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """Changes the tensors."""

    def damage(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        change(tensors)
        save_file(
            {name: x.contiguous() for name, x in tensors.items()},
            directory / WEIGHTS,
            {"format": "pt"},
        )

    return damage


def write(name: str, content: str | bytes) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda directory: (directory / name).write_bytes(data)


def shorten(name: str, count: int) -> Damage:
    return lambda directory: (directory / name).write_bytes((directory / name).read_bytes()[:count])


@pytest.mark.parametrize("value", ["big", -1, 0, 1.5, True, {"a": 1}, 10**9])
@pytest.mark.parametrize(
    "field",
    [
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
        *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    ],
)
def test_a_size_that_cannot_be_is_named(field: str, value: Any, llama: Path) -> None:
    edit("config.json", **{field: value})(llama)
    expect_refusal(llama, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("rms_norm_eps", value) for value in ("big", -1, 0, [], True)],
        *[("tie_word_embeddings", value) for value in ("yes", 1, [])],
        *[("attention_bias", value) for value in ("yes", 1)],
        *[("eos_token_id", value) for value in ("x", -4, 1.5, [], ["x"], True, 101, [2, 101])],
        *[("pad_token_id", value) for value in ("x", 101)],
        *[("hidden_act", value) for value in ("new", 4, [])],
        *[("dtype", value) for value in ("new", 4, "nn", {})],
        *[("model_type", value) for value in (4, [], {})],
        *[("rope_parameters", value) for value in ("x", [], 4)],
    ],
)
def test_a_field_of_the_wrong_kind_is_named(field: str, value: Any, llama: Path) -> None:
    edit("config.json", **{field: value})(llama)
    expect_refusal(llama, field)


@pytest.mark.parametrize("name", ["config.json", WEIGHTS, "model-1.safetensors"])
def test_a_folder_in_the_place_of_a_file_is_named(name: str, llama: Path) -> None:
    if name != "config.json":
        (llama / WEIGHTS).unlink()
    (llama / name).unlink(missing_ok=True)
    (llama / name).mkdir()
    expect_refusal(llama, "config.json" if name == "config.json" else f"{name} cannot be read")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", '"x"', "null", b"\xff\xfe{"])
def test_a_json_file_that_holds_no_object_is_named(
    name: str, content: str | bytes, llama: Path
) -> None:
    write(name, content)(llama)
    expect_refusal(llama, f"{name} ")


@pytest.mark.parametrize("value", ["x", -4, 1.5, [], ["x"], True, 101, [2, 101], {}])
def test_an_end_of_sequence_that_is_no_token_is_named(value: Any, llama: Path) -> None:
    edit("generation_config.json", eos_token_id=value)(llama)
    expect_refusal(llama, "eos_token_id of its generation_config.json")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (edit("config.json", num_hidden_layers=2), "model.layers.2.input_layernorm.weight"),
        (edit("config.json", num_hidden_layers=4), "lacks model.layers.3."),
        (edit("config.json", vocab_size=90), "lm_head.weight [101, 32], not [90, 32]"),
        (edit("config.json", intermediate_size=52), "mlp.down_proj.weight [32, 48], not [32, 52]"),
        (edit("config.json", num_key_value_heads=4), "k_proj.weight [16, 32], not [32, 32]"),
        (edit("config.json", attention_bias=True), "lacks model.layers.0.self_attn.k_proj.bias"),
        (edit("config.json", model_type="qwen3"), "self_attn.k_norm.weight"),
        (rewrite(lambda x: x.pop("model.norm.weight")), "lacks model.norm.weight"),
        (rewrite(lambda x: x.pop("lm_head.weight")), "lacks lm_head.weight"),
        (rewrite(lambda x: x.update({"model.extra": torch.zeros(1)})), "model.extra"),
        (rewrite(lambda x: x.update({"extra": torch.zeros(1)})), "extra"),
        (
            rewrite(lambda x: x.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})),
            "model.layers.0.self_attn.q_proj.bias",
        ),
        (
            rewrite(lambda x: x.update({"model.norm.weight": torch.ones(31)})),
            "model.norm.weight [31], not [32]",
        ),
        (
            rewrite(lambda x: x.update({"model.norm.weight": x["model.norm.weight"][None]})),
            "model.norm.weight [1, 32], not [32]",
        ),
        (
            rewrite(lambda x: x["model.layers.1.mlp.up_proj.weight"][3].fill_(torch.nan)),
            "NaN or infinite in model.layers.1.mlp.up_proj.weight",
        ),
        (
            rewrite(lambda x: x["model.embed_tokens.weight"][50, 3].fill_(-torch.inf)),
            "NaN or infinite in model.embed_tokens.weight",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(damage: Damage, named: str, llama: Path) -> None:
    damage(llama)
    expect_refusal(llama, named)


@pytest.mark.parametrize("count", [0, 5, 40, 1000, -1, -1000])
def test_weights_that_are_cut_short_are_named(count: int, llama: Path) -> None:
    shorten(WEIGHTS, count)(llama)
    expect_refusal(llama, WEIGHTS)


@pytest.mark.parametrize("content", [b"\x08\0\0\0\0\0\0\0nonsense", b"\x02\0\0\0\0\0\0\0[]"])
def test_a_header_that_is_none_is_refused(content: bytes, llama: Path) -> None:
    write(WEIGHTS, content)(llama)
    expect_refusal(llama, f"{WEIGHTS} is no safetensors file")


def sharded(directory: Path) -> list[Path]:
    """Cuts the weights into shards, and returns these."""
    model = models.transformers_model(models.tiny("llama"))
    (directory / WEIGHTS).unlink()
    model.save_pretrained(directory, max_shard_size="20KB")
    shards = sorted(directory.glob("*-of-*.safetensors"))
    assert len(shards) > 1
    return shards


def test_shards_that_are_all_there_load(llama: Path) -> None:
    sharded(llama)
    assert load(llama, "float32").traits.vocab_size == models.VOCAB


def test_a_shard_that_is_missing_is_named(llama: Path) -> None:
    shard = sharded(llama)[1]
    shard.unlink()
    expect_refusal(llama, shard.name)


def test_a_shard_that_is_cut_short_is_named(llama: Path) -> None:
    shard = sharded(llama)[1]
    shorten(shard.name, 900)(llama)
    expect_refusal(llama, shard.name)


def test_a_shard_of_another_checkpoint_is_named(llama: Path) -> None:
    first, second, *_ = sharded(llama)
    shutil.copyfile(first, second)
    expect_refusal(llama, second.name)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}']
)
def test_an_index_that_is_none_is_named(content: str, llama: Path) -> None:
    sharded(llama)
    write(INDEX, content)(llama)
    expect_refusal(llama, INDEX)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "none.safetensors"])
def test_an_index_names_files_of_its_directory_alone(name: str, llama: Path) -> None:
    sharded(llama)
    content = json.loads((llama / INDEX).read_text())
    content["weight_map"]["lm_head.weight"] = name
    write(INDEX, json.dumps(content))(llama)
    expect_refusal(llama, f"names {name}, and there is no such file")


@pytest.mark.parametrize("count", [0, 100, -100])
def test_weights_of_torch_that_are_cut_short_are_named(count: int, llama: Path) -> None:
    torch.save(load_file(llama / WEIGHTS), llama / "pytorch_model.bin")
    (llama / WEIGHTS).unlink()
    assert load(llama, "float32").traits.vocab_size == models.VOCAB
    shorten("pytorch_model.bin", count)(llama)
    expect_refusal(llama, "pytorch_model.bin")


@pytest.mark.parametrize(
    "names",
    [
        ("model.layers.3.enorm.weight", "model.layers.3.mlp.up_proj.weight"),
        ("mtp.fc.weight",),
        ("model.mtp_layers.0.input_proj.weight",),
        ("v_head.summary.weight",),
        ("model.layers.0.self_attn.rotary_emb.inv_freq",),
    ],
)
def test_what_may_be_beside_a_language_model_is_left_out(
    names: tuple[str, ...], llama: Path
) -> None:
    rewrite(lambda tensors: tensors.update({name: torch.zeros(4) for name in names}))(llama)
    assert load(llama, "float32").traits.vocab_size == models.VOCAB
