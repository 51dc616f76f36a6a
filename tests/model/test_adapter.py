"""Adapters as PEFT saves them: what is read, what is refused, and the logits of each forward."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import adapters
from forethought.errors import ForethoughtError, ModelError, ParameterError
from forethought.kv.pool import PagePool
from forethought.kv.storage import KvStorage
from forethought.kv.table import PageTable
from forethought.model import loader
from forethought.model.adapter import Adapter, read_adapter
from forethought.model.batch import Row
from forethought.model.causal_lm import CausalLM
from forethought.model.runner import ModelRunner
from forethought.model.token_adapters import PlacedAdapter
from models import tiny

MODEL = "llama"
Q = "model.layers.0.self_attn.q_proj"
PROMPT, OTHER = [5, 6, 7, 8, 9, 50, 60], [9, 3, 4]
FORWARDS = {
    "native": {"forward": "native"},
    "fused": {"forward": "torch"},
    "transformers": {"forward": "torch", "fuse": False},
}
TARGETS = {
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "qwen3_moe": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "deepseek_v3": ("q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
}


@functools.cache
def load(architecture: str, forward: str, dtype: str = "float32") -> CausalLM:
    return loader.load(tiny(architecture), dtype=dtype, **FORWARDS[forward])  # type: ignore[arg-type]


@functools.cache
def tensors(architecture: str, seed: int = 0) -> dict[str, Tensor]:
    targets = TARGETS.get(architecture, adapters.ALL)
    return adapters.random_tensors(tiny(architecture), targets, seed=seed)


def logits(
    lm: CausalLM, prompts: Sequence[Sequence[int]], placed: Sequence[PlacedAdapter | None]
) -> list[Tensor]:
    """Of each token of prompts that are computed in one batch."""
    runner = ModelRunner(lm, KvStorage(lm.layer_shapes, 64, 4, lm.dtype))
    pool, rows = PagePool(64, 4), list[Row]()
    for prompt, adapter in zip(prompts, placed, strict=True):
        table = PageTable(pool)
        table.append(len(prompt))
        rows.append(Row(list(prompt), 0, table, adapter=adapter))
    return list(runner.forward(rows).clone().split([len(prompt) for prompt in prompts]))


def expect_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


CASES = [
    *((architecture, forward) for architecture in ("llama", "qwen3") for forward in FORWARDS),
    *(
        ("gemma3", "native"),
        ("phi3", "native"),
        ("qwen3_moe", "native"),
        ("gemma2", "transformers"),
    ),
    *(("llama_tied_biased", "native"), ("llama_tied_biased", "fused")),
    *(("deepseek_v3", "transformers"), ("qwen2", "native"), ("mistral", "fused")),
]


@pytest.mark.parametrize(("architecture", "forward"), CASES)
def test_logits_are_those_of_the_merged_and_of_the_unmerged_model(
    architecture: str, forward: str, tmp_path: Path
) -> None:
    path, lm, matrices = tiny(architecture), load(architecture, forward), tensors(architecture)
    placed = lm.place(read_adapter("a", adapters.save(tmp_path, matrices)))
    ours, plain = logits(lm, [PROMPT, PROMPT], [placed, None])
    with torch.inference_mode():
        ids = torch.tensor([PROMPT])
        merged = adapters.merged(path, matrices)(ids).logits[0]
        unmerged = adapters.unmerged(path, matrices)(ids).logits[0]
        without = adapters.merged(path, {})(ids).logits[0]
    expect_close(ours, merged)
    expect_close(ours, unmerged)
    expect_close(plain, without)
    assert (merged - without).abs().max() > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_the_native_forward_a_row_is_the_same_to_the_last_bit_whatever_runs_beside_it(
    dtype: str, tmp_path: Path
) -> None:
    lm = load("llama", "native", dtype)
    files = [adapters.adapter(tmp_path / str(seed), tiny("llama"), seed=seed) for seed in (1, 2)]
    first, second = (lm.place(read_adapter(file.name, file)) for file in files)
    rows = [(PROMPT, first), (OTHER, None), (PROMPT, second), (OTHER, first), (PROMPT, None)]
    together = logits(lm, *zip(*rows, strict=True))
    for (prompt, adapter), row in zip(rows, together, strict=True):
        [alone] = logits(lm, [prompt], [adapter])
        assert torch.equal(alone, row)
    assert len({tuple(row[-1].tolist()) for row in together}) == len(rows)


@pytest.mark.parametrize("forward", ["fused", "transformers"])
def test_in_torch_a_row_is_the_same_but_for_rounding_whatever_runs_beside_it(
    forward: str, tmp_path: Path
) -> None:
    lm = load("llama", forward)
    placed = lm.place(read_adapter("a", adapters.adapter(tmp_path, tiny("llama"))))
    rows = [(PROMPT, placed), (OTHER, None), (OTHER, placed), (PROMPT, None)]
    together = logits(lm, *zip(*rows, strict=True))
    for (prompt, adapter), row in zip(rows, together, strict=True):
        torch.testing.assert_close(logits(lm, [prompt], [adapter])[0], row, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quantization", ["int8", "w8a8"])
@pytest.mark.parametrize("forward", ["native", "torch"])
def test_an_adapter_adds_to_quantised_weights(
    forward: loader.Forward, quantization: Any, tmp_path: Path
) -> None:
    lm = loader.load(tiny("llama"), dtype="float32", forward=forward, quantization=quantization)
    matrices = {name: 0.0 * tensor for name, tensor in tensors("llama").items()}
    zero = lm.place(read_adapter("zero", adapters.save(tmp_path / "zero", matrices)))
    real = lm.place(read_adapter("real", adapters.save(tmp_path / "real", tensors("llama"))))
    same, adapted, plain = logits(lm, [PROMPT] * 3, [zero, real, None])
    expect_close(same, plain)
    merged = adapters.merged(tiny("llama"), tensors("llama"))
    with torch.inference_mode():
        exact = merged(torch.tensor([PROMPT])).logits[0]
    assert (adapted - exact).abs().mean() < (plain - exact).abs().mean() / 2


# ---- what is read -----------------------------------------------------------------------------


def read(directory: Path, matrices: dict[str, Tensor] | None = None, **config: Any) -> Adapter:
    matrices = tensors(MODEL) if matrices is None else matrices
    return read_adapter("a", adapters.save(directory, matrices, **config))


def scale(adapter: Adapter, linear: str = Q) -> float:
    """By which B is multiplied."""
    up = tensors(MODEL)[f"{adapters.PREFIX}{linear}.lora_B.weight"]
    return float((adapter.additions[linear].up / up).mean())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"lora_alpha": 12}, 4.0),
        ({"lora_alpha": 12, "use_rslora": True}, 12 / math.sqrt(3)),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 9}}, 3.0),
        ({"alpha_pattern": {"q_proj": 9, "layers.0.self_attn.q_proj": 12}}, 3.0),
        ({"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 9}}, 3.0),
        ({"alpha_pattern": {"layers.1.self_attn.q_proj": 9}}, 2.0),
        ({"alpha_pattern": {r"layers\.[01]\..*": 1.5}}, 0.5),
        ({"rank_pattern": {"q_proj": 3}, "r": 3}, 2.0),
        ({"target_modules": r"model\.layers\.\d+\.(self_attn|mlp)\..*"}, 2.0),
        ({"target_modules": "all-linear"}, 2.0),
        ({"init_lora_weights": "gaussian", "revision": "main"}, 2.0),
    ],
)
def test_the_scale_is_as_the_configuration_says(
    config: dict[str, Any], expected: float, tmp_path: Path
) -> None:
    assert scale(read(tmp_path, **config)) == pytest.approx(expected, rel=1e-5)


def test_each_linear_has_the_rank_of_the_pattern(tmp_path: Path) -> None:
    ranks = {"q_proj": 2, "down_proj": 5}
    matrices = {
        **adapters.random_tensors(tiny(MODEL), ["q_proj"], 2),
        **adapters.random_tensors(tiny(MODEL), ["down_proj"], 5),
        **adapters.random_tensors(tiny(MODEL), ["k_proj"], 8),
    }
    adapter = read(tmp_path, matrices, r=8, rank_pattern=ranks, lora_alpha=8)
    assert adapter.additions[Q].rank == 2
    assert adapter.additions["model.layers.2.mlp.down_proj"].rank == 5
    load(MODEL, "fused").place(adapter)


def test_modules_may_be_excluded_and_layers_chosen(tmp_path: Path) -> None:
    chosen = {
        name: tensor
        for name, tensor in tensors(MODEL).items()
        if "layers.1." in name and "down_proj" not in name
    }
    config = {"layers_to_transform": [1], "exclude_modules": ["down_proj"]}
    adapter = read(tmp_path, chosen, target_modules=list(adapters.ALL), **config)
    load(MODEL, "native").place(adapter)
    assert all("layers.1." in name for name in adapter.additions)


def test_equal_adapters_have_one_digest_and_others_another(tmp_path: Path) -> None:
    first, same = read(tmp_path / "1"), read(tmp_path / "2")
    stronger = read(tmp_path / "3", lora_alpha=99)
    assert first.digest == same.digest != stronger.digest


# ---- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"peft_type": None}, "peft_type is None"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
        ({"use_qalora": True}, "use_qalora"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"some_new_field": 3}, "some_new_field, which is not known"),
        ({"r": 0}, "ranks"),
        ({"r": 10**9}, "ranks"),
        ({"r": "3"}, "ranks"),
        ({"rank_pattern": {"q_proj": 10**6}}, "ranks"),
        ({"lora_alpha": math.nan}, "lora_alpha"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"r": 4}, "its rank 4"),
        ({"target_modules": ["q_proj"]}, "none of its target_modules"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"target_modules": [3]}, "target_modules is neither"),
        ({"target_modules": "("}, "no regular expression"),
        ({"target_modules": "x" * 5000}, "more than 4096 characters"),
        ({"layers_to_transform": ["1"]}, "layers_to_transform"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, **config)


def _without(part: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda matrices: {name: t for name, t in matrices.items() if part not in name}


def _with(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda matrices: {**matrices, f"{adapters.PREFIX}{name}": tensor}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("q_proj.lora_B"), "only one of two matrices"),
        (_with(f"{Q}.lora_A.weight", torch.full((3, 32), math.nan)), "not finite"),
        (_with(f"{Q}.lora_B.weight", torch.full((32, 3), math.inf)), "not finite"),
        (_with(f"{Q}.lora_A.weight", torch.zeros(3)), "matrices"),
        (_with(f"{Q}.lora_A.weight", torch.zeros(5, 32)), "matrices"),
        (_with(f"{Q}.lora_A.weight", torch.zeros(3, 32, dtype=torch.int64)), "is in I64"),
        (_with(f"{Q}.lora_magnitude_vector", torch.zeros(32)), "no LoRA of a linear"),
        (_with("model.embed_tokens.lora_embedding_A", torch.zeros(3, 9)), "no LoRA of a linear"),
        (_with(f"{Q}.lora_B.bias", torch.zeros(32)), "no LoRA of a linear"),
        (lambda _: {}, "is empty"),
    ],
)
def test_damaged_matrices_are_refused(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, change(tensors(MODEL)), target_modules=list(adapters.ALL), r=3, lora_alpha=6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with(f"{Q}.lora_A.weight", torch.zeros(3, 16)), "has 32 outputs and 32 inputs"),
        (_with(f"{Q}.lora_B.weight", torch.zeros(64, 3)), "has 32 outputs and 32 inputs"),
        (_without("layers.1.self_attn.q_proj"), "of which it has no matrices"),
        (
            lambda m: {
                **m,
                **{
                    name.replace("layers.0", "layers.7"): t.clone()
                    for name, t in m.items()
                    if "layers.0" in name
                },
            },
            "has no linear model.layers.7",
        ),
    ],
)
@pytest.mark.parametrize("forward", FORWARDS)
def test_an_adapter_of_another_model_is_refused(
    forward: str,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    message: str,
    tmp_path: Path,
) -> None:
    adapter = read(tmp_path, change(tensors(MODEL)))
    with pytest.raises(ModelError, match=message):
        load(MODEL, forward).place(adapter)


def test_the_output_projection_is_not_adapted(tmp_path: Path) -> None:
    pair = {"A": torch.zeros(3, 32), "B": torch.zeros(101, 3)}
    matrices = {f"{adapters.PREFIX}lm_head.lora_{part}.weight": t for part, t in pair.items()}
    with pytest.raises(ModelError, match="no linear lm_head"):
        load(MODEL, "transformers").place(read(tmp_path, matrices))


def test_a_shared_expert_is_adapted_by_the_module_of_transformers_alone(tmp_path: Path) -> None:
    targets = [r"mlp.shared_expert.down_proj"]
    matrices = {
        name: tensor
        for name, tensor in adapters.random_tensors(tiny("qwen2_moe"), ["down_proj"]).items()
        if "shared_expert." in name
    }
    adapter = read_adapter("a", adapters.save(tmp_path, matrices, target_modules=targets))
    with pytest.raises(ModelError, match=r"not adapted in this forward.*fuse=False"):
        load("qwen2_moe", "native").place(adapter)
    path, names = tiny("qwen2_moe"), set(adapter.additions)
    lm = loader.load(path, dtype="float32", forward="auto", adapted=names)
    assert lm.path.kind == "transformers"
    ours = logits(lm, [PROMPT], [lm.place(adapter)])[0]
    with torch.inference_mode():
        expect_close(ours, adapters.merged(path, matrices)(torch.tensor([PROMPT])).logits[0])
    with pytest.raises(ModelError, match="an adapter adds to"):
        loader.load(path, dtype="float32", forward="native", adapted=names)


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    adapters.save(tmp_path, tensors(MODEL))
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"adapter_model\.bin is a pickle"):
        read_adapter("a", tmp_path)


def test_files_that_are_missing_or_damaged_are_refused(tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(ForethoughtError, match=message):
            read_adapter("a", tmp_path)

    refused("there is no adapter_config.json")
    adapters.save(tmp_path, tensors(MODEL))
    config, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    refused("cannot be read")
    weights.write_bytes(b"\xff" * 64)
    refused("cannot be read")
    for text in ("[]", "{", "[" * 5000):
        config.write_text(text)
        refused("cannot load the adapter")
    config.write_text(json.dumps({"x": "y" * 2**20}))
    refused("more than 1048576 bytes")
    config.unlink()
    save_file(tensors(MODEL), weights)
    refused("there is no adapter_config.json")


@pytest.mark.parametrize("name", ["", "a b", "a:b", "../a", "-a", "a" * 101, "ä"])
def test_names_are_plain(name: str, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="invalid name of an adapter"):
        read_adapter(name, tmp_path)


# ---- PEFT itself, where it is installed ---------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "alpha_pattern": {"q_proj": 32}}])
def test_what_peft_saves_computes_what_peft_computes(
    options: dict[str, Any], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed: see CONTRIBUTING.md")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        init_lora_weights=False,
        rank_pattern={"layers.1.mlp.down_proj": 7},
        **options,
    )
    module = peft.get_peft_model(adapters.merged(tiny(MODEL), {}), config).eval()
    module.save_pretrained(tmp_path)
    with torch.inference_mode():
        unmerged = module(torch.tensor([PROMPT])).logits[0]
        merged = module.merge_and_unload()(torch.tensor([PROMPT])).logits[0]
    for forward in FORWARDS:
        lm = load(MODEL, forward)
        ours = logits(lm, [PROMPT], [lm.place(read_adapter("a", tmp_path))])[0]
        expect_close(ours, unmerged)
        expect_close(ours, merged)
