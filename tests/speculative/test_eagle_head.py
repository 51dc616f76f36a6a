"""EAGLE's heads: layouts that are read and written, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle_heads import new_directory, random_eagle, random_eagle3
from forethought.errors import ModelError
from forethought.speculative.heads.eagle import EagleHead
from forethought.speculative.heads.eagle3 import Eagle3Head, authors_layer_ids, default_layer_ids

Tensors = dict[str, Tensor]


def rewrite(
    directory: Path,
    change: Callable[[Tensors, dict[str, Any]], Any],
) -> Path:
    """Change a checkpoint on disk."""
    tensors = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def saved(**traits: Any) -> Path:
    directory = new_directory()
    random_eagle3(**traits).save(directory)
    return directory


def expect_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    mine, others = one.state_dict(), other.state_dict()
    assert list(mine) == list(others)
    assert all(torch.equal(mine[name], others[name]) for name in mine)


@pytest.mark.parametrize(
    "traits",
    [
        {},
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
        {"own_embedding": True, "attention_bias": True, "layer_ids": (1,)},
        {"draft_vocab": 101},
    ],
    ids=lambda traits: " ".join(traits) or "plain",
)
@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_a_head_is_what_was_saved(layout: Any, traits: dict[str, Any]) -> None:
    head, directory = random_eagle3(**traits), new_directory()
    head.save(directory, layout, "the/target")
    found = Eagle3Head.load(directory)
    expect_same(head, found)
    assert found.traits == head.traits
    names = ("hidden_size", "head_dim", "rms_norm_eps", "rope_parameters", "attention_bias")
    assert all(getattr(found.config, name) == getattr(head.config, name) for name in names)


def test_names_and_config_are_those_of_each_layout() -> None:
    head = random_eagle3()
    for layout, layer in (("eagle3", "midlayer."), ("speculators", "layers.0.")):
        directory = new_directory()
        head.save(directory, layout, "the/target")  # type: ignore[arg-type]
        names = set(load_file(directory / "model.safetensors"))
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        parts = [f"self_attn.{part}_proj" for part in "qkvo"]
        parts += [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
        wanted = {f"{layer}{part}.weight" for part in (*norms, *parts)}
        assert names == wanted | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
        config = json.loads((directory / "config.json").read_text())
        assert config["draft_vocab_size"] == 60
        if layout == "speculators":
            assert config["architectures"] == ["Eagle3Speculator"]
            assert config["speculators_model_type"] == "eagle3"
            assert config["eagle_aux_hidden_state_layer_ids"] == [0, 2, 3]
            assert config["transformer_layer_config"]["num_hidden_layers"] == 1
            verifier = config["speculators_config"]["verifier"]
            assert verifier["name_or_path"] == "the/target"
        else:
            assert config["vocab_size"] == 101
            assert config["num_hidden_layers"] == 1
            nested = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
            assert (nested, config["eagle_aux_hidden_state_layer_ids"]) == ([-1, 1, 2], [0, 2, 3])


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("own_embedding", [True, False])
def test_an_export_says_all_that_vllm_reads_of_it(before: bool, own_embedding: bool) -> None:
    """vLLM takes the sizes from ``transformer_layer_config`` and these from beside it.

    What is left out it takes for something else: a missing ``norm_before_residual`` is true there.
    """
    head = random_eagle3(norm_before_residual=before, own_embedding=own_embedding)
    directory = new_directory()
    head.save(directory, "speculators", "the/target")
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    assert config["norm_before_residual"] is before
    assert config["norm_before_fc"] is config["norm_output"] is False
    assert config.get("fc_norm", False) is False
    says = config["speculators_config"]
    assert says["verifier"]["name_or_path"] == "the/target"
    assert says["proposal_methods"][0]["proposal_type"] == says["default_proposal_method"]
    assert says["proposal_methods"][0]["speculative_tokens"] >= 1
    inputs = config["eagle_aux_hidden_state_layer_ids"]  # states entering these layers
    assert inputs == [0, 2, 3]
    layer = config["transformer_layer_config"]
    assert layer["model_type"] == "llama"
    assert (layer["vocab_size"], layer["hidden_size"]) == (101, 32)
    assert layer["rope_theta"] == 10_000.0
    assert tensors["fc.weight"].shape == (32, len(inputs) * config["target_hidden_size"])
    assert tensors["lm_head.weight"].shape == (config["draft_vocab_size"], layer["hidden_size"])
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert ("embed_tokens.weight" in tensors) == own_embedding
    expect_same(Eagle3Head.load(directory), head)


def test_d2t_are_offsets_and_t2d_marks_the_same_tokens() -> None:
    head = random_eagle3()
    ids = head.ids.tolist()
    assert ids == sorted(set(ids)) == head.t2d.nonzero()[:, 0].tolist()
    assert head.d2t.tolist() == [token - row for row, token in enumerate(ids)]
    shifted = rewrite(saved(), lambda tensors, config: tensors["d2t"].add_(1))
    with pytest.raises(ModelError, match="d2t and t2d name different draft tokens"):
        Eagle3Head.load(shifted)


def test_t2d_may_be_missing_and_d2t_too_where_the_vocabulary_is_whole() -> None:
    directory = rewrite(saved(), lambda tensors, config: tensors.pop("t2d"))
    expect_same(Eagle3Head.load(directory), random_eagle3())

    def pop_both(tensors: Tensors, config: dict[str, Any]) -> None:
        del tensors["d2t"], tensors["t2d"]

    assert Eagle3Head.load(rewrite(saved(draft_vocab=101), pop_both)).ids.tolist() == [*range(101)]
    with pytest.raises(ModelError, match="lacks d2t"):
        Eagle3Head.load(rewrite(saved(), pop_both))


def test_the_authors_pytorch_file_is_read() -> None:
    directory = saved()
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    torch.save(tensors, directory / "pytorch_model.bin")
    expect_same(Eagle3Head.load(directory), random_eagle3())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("own_embedding", [True, False])
def test_an_eagle_1_head_is_what_was_saved(bias: bool, own_embedding: bool) -> None:
    head, directory = random_eagle(0, bias, own_embedding), new_directory()
    head.save(directory)
    assert "layers.0.input_layernorm.weight" not in load_file(directory / "model.safetensors")
    expect_same(EagleHead.load(directory), head)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t, c: t.pop("midlayer.hidden_norm.weight"), r"lacks midlayer\.hidden_norm\.weight"),
        (lambda t, c: t.pop("fc.weight"), r"lacks fc\.weight"),
        (lambda t, c: t.update(extra=torch.ones(1)), "has unexpected extra"),
        (
            lambda t, c: t.update({"norm.weight": torch.ones(31)}),
            r"wrong shape for norm\.weight \[31\], not \[32\]",
        ),
        (lambda t, c: t.update({"fc.weight": torch.ones(32, 95)}), "fc.weight reads 95 values"),
        (lambda t, c: c.update(fc_norm=True), "fc_norm=True is not supported"),
        (lambda t, c: c.update(hidden_act="gelu"), "hidden_act='gelu'"),
        (lambda t, c: c.update(num_hidden_layers=2), "num_hidden_layers=2"),
        (lambda t, c: c.update(model_type="qwen3"), "model_type='qwen3'"),
        (lambda t, c: c.update(layer_types=["sliding_attention"]), "sliding window"),
        (lambda t, c: c.pop("hidden_size"), "config lacks hidden_size"),
        (
            lambda t, c: c.update(eagle_aux_hidden_state_layer_ids=[1, 2], eagle_config=None),
            "fc.weight reads 96 values, not 2 states of 32",
        ),
        (
            lambda t, c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[1, 2, 3]),
            r"are \[0, 2, 3\], and \[1, 2, 3\] in eagle_config: other layers",
        ),
        (
            lambda t, c: c.update(eagle_aux_hidden_state_layer_ids=[1, 1, 2]),
            r"\[1, 1, 2\] are not different layers",
        ),
        (
            lambda t, c: c.update(eagle_aux_hidden_state_layer_ids="2"),
            "'2' are not different layers",
        ),
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_said_by_name(change: Any, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        Eagle3Head.load(rewrite(saved(), change))


def test_a_directory_that_is_none_or_has_no_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        Eagle3Head.load(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="has no weights"):
        Eagle3Head.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot load the head"):
        Eagle3Head.load(tmp_path)


@pytest.mark.parametrize(
    ("layers", "layer_ids"),
    [
        (32, (2, 16, 29)),
        (80, (2, 40, 77)),
        (36, (2, 18, 33)),
        (8, (2, 4, 5)),
        (6, (2, 3, 4)),
        (5, (2, 3, 4)),
        (4, (2, 3, 4)),
        (3, (1, 2, 3)),
        (2, (1, 2)),
        (1, (1,)),
    ],
)
def test_new_heads_capture_the_outputs_of_layers_1_half_minus_1_and_l_minus_4(
    layers: int, layer_ids: tuple[int, ...]
) -> None:
    assert default_layer_ids(layers) == layer_ids
    if layers > 6:  # a layer's output enters the next one
        assert [layer_id - 1 for layer_id in layer_ids] == [1, layers // 2 - 1, layers - 4]
        assert authors_layer_ids(layers) == layer_ids
    else:
        assert authors_layer_ids(layers) is None


def test_a_state_behind_the_final_norm_is_captured_after_a_reload() -> None:
    directory = saved(layer_ids=(1, 2, -1))
    config = json.loads((directory / "config.json").read_text())
    assert Eagle3Head.load(directory).traits.layer_ids == (1, 2, -1)
    assert "eagle_aux_hidden_state_layer_ids" not in config["eagle_config"]  # it has no word for it
