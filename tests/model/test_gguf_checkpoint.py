"""Models in GGUF files are those of transformers with the same, dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import adapters
import gguf
from engines import GREEDY, drain, engine_over, expect_empty
from forethought.errors import ModelError
from forethought.gguf.file import GgufFile
from forethought.model import gguf_checkpoint, loader
from forethought.model.adapter import read_adapter
from forethought.model.block_weight import BlockWeight
from forethought.model.checkpoint_tensors import GgufTensors
from forethought.model_dir import find_model_dir
from gguf_files import MODELS, config_of_case, module_of_case, write_model
from models import prompts
from turns import by_turns

Type = gguf.GGMLQuantizationType
PROMPTS = prompts((3, 17, 40))
NATIVE = {"llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma3_text", "phi3"}
"""Architectures whose layers run in C++."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETHOUGHT_CACHE", str(tmp_path / "cache"))


def in_blocks(kind: Type) -> Any:
    """Matrices in blocks of a type, where their rows are whole blocks, else in Q8_0 or float32."""

    def choose(name: str, data: np.ndarray) -> Type:
        if data.ndim < 2 or "norm" in name or "gate_inp" in name:
            return Type.F32
        size, _ = gguf.GGML_QUANT_SIZES[kind]
        if data.shape[-1] % size == 0:
            return kind
        return Type.Q8_0 if data.shape[-1] % 32 == 0 else Type.F32

    return choose


def view(path: Path, case: str, kind: Type) -> Path:
    """The directory of a file with random weights."""
    weights = dict(module_of_case(case).state_dict())
    if config_of_case(case).tie_word_embeddings:
        del weights["lm_head.weight"]
    return find_model_dir(write_model(path, case, weights=weights, quantize=in_blocks(kind)))


def reference(directory: Path, case: str) -> torch.nn.Module:
    """The module of transformers with the weights of a view, dequantised."""
    module, tensors = module_of_case(case), GgufTensors(directory, rounds_input=False)
    weights = {name: tensors.tensor(name, torch.float32) for name in tensors.names}
    module.load_state_dict(weights, strict=False)
    module.tie_weights()
    return module


def most_probable(module: torch.nn.Module, prompt: list[int], output: list[int]) -> list[int]:
    """The most probable token at each position of an output; greedy decoding gives the output if
    they are its own."""
    with torch.inference_mode():
        logits = module(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
    return logits.argmax(-1).tolist()


@pytest.mark.parametrize("forward", ["native", "torch"])
@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_an_adapter_adds_to_the_weights_of_a_file(
    case: str, forward: loader.Forward, tmp_path: Path
) -> None:
    directory = view(tmp_path / "model.gguf", case, Type.Q8_0)
    module = reference(directory, case)
    matrices = adapters.random_tensors(module)
    lm = loader.load(directory, dtype="float32", forward=forward)
    machine = engine_over(lm)
    machine.adapters.add(lm.place(read_adapter("a", adapters.save(tmp_path / "a", matrices))))
    sequences = [machine.add(prompt, GREEDY.replace(adapter="a"))[0] for prompt in PROMPTS]
    drain(machine)
    adapted = adapters.adapting(module, matrices)
    for prompt, sequence in zip(PROMPTS, sequences, strict=True):
        assert sequence.output == most_probable(adapted, prompt, sequence.output)


@pytest.mark.parametrize(("case", "kind"), by_turns([*MODELS], [Type.F32, Type.BF16, Type.Q4_1]))
def test_tokens_are_those_of_transformers_with_the_dequantised_weights(
    case: str, kind: Type, tmp_path: Path
) -> None:
    directory = view(tmp_path / "model.gguf", case, kind)
    module = reference(directory, case)
    machine = engine_over(loader.load(directory, dtype="float32", forward="auto"))
    sequences = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS]
    drain(machine)
    for prompt, sequence in zip(PROMPTS, sequences, strict=True):
        assert sequence.output == most_probable(module, prompt, sequence.output)
        assert len(sequence.output) == 16
    expect_empty(machine)


RECURRENT = (
    *("qwen3next", "qwen3next_fused", "qwen35", "qwen35moe", "lfm2", "bamba"),
    *("granitehybrid", "granitehybrid_tied", "granitehybrid_moe", "granitehybrid_rotated"),
    *("falcon-h1", "falcon-h1_norm", "nemotron_h", "nemotron_h_moe"),
)


@pytest.mark.parametrize("kind", [Type.Q4_0])
@pytest.mark.parametrize("case", RECURRENT)
def test_logits_of_recurrent_models_are_those_of_transformers(
    case: str, kind: Type, tmp_path: Path
) -> None:
    directory = view(tmp_path / "model.gguf", case, kind)
    config = AutoConfig.from_pretrained(directory)
    module = gguf_checkpoint.read(directory, config, torch.float32, rounds_input=False)
    tokens, expected = torch.tensor([PROMPTS[-1]]), reference(directory, case)
    with torch.inference_mode():
        difference = module.eval()(tokens).logits - expected(tokens).logits
    assert difference.abs().max() < 1e-4


def test_weights_of_two_tensors_stay_in_their_blocks(tmp_path: Path) -> None:
    for case, name in (
        ("granitehybrid", "layers.0.shared_mlp.input_linear"),
        ("qwen3next", "layers.0.linear_attn.in_proj_qkvz"),
    ):
        directory = view(tmp_path / f"{case}.gguf", case, Type.Q8_0)
        weight = GgufTensors(directory, rounds_input=False)
        [blocks] = weight.read([f"model.{name}.weight"], torch.float32).values()
        assert isinstance(blocks, BlockWeight)
        expected = weight.tensor(f"model.{name}.weight", torch.float32)
        assert torch.equal(blocks.dequantize(), expected)


def test_the_multipliers_of_falcon_are_in_its_weights(tmp_path: Path) -> None:
    """The converter's own products, each by the field that transformers multiplies by."""
    config = config_of_case("falcon-h1_norm")
    multipliers: dict[str, Any] = {
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.25,
        "attention_in_multiplier": 0.75,
        "attention_out_multiplier": 1.25,
        "key_multiplier": 0.5,
        "ssm_in_multiplier": 1.5,
        "ssm_out_multiplier": 0.8,
        "mlp_multipliers": [0.9, 1.1],
        "ssm_multipliers": [0.5, 0.7, 1.2, 1.3, 0.6],
    }
    for name, value in multipliers.items():
        setattr(config, name, value)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    weights = module_of_case("falcon-h1_norm").state_dict()
    module.load_state_dict(weights)
    path = write_model(tmp_path / "model.gguf", "falcon-h1_norm", weights=folded(weights, config))
    machine = engine_over(loader.load(find_model_dir(path), dtype="float32", forward="auto"))
    sequences = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS]
    drain(machine)
    for prompt, sequence in zip(PROMPTS, sequences, strict=True):
        assert sequence.output == most_probable(module, prompt, sequence.output)
    plain, output = module_of_case("falcon-h1_norm"), sequences[0].output
    assert output != most_probable(plain, PROMPTS[0], output)


def folded(weights: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """The weights of Falcon-H1 times its multipliers."""
    gate, down = config.mlp_multipliers
    states = config.mamba_n_groups * config.mamba_d_state
    sizes = torch.tensor([config.mamba_d_ssm] * 2 + [states] * 2 + [config.mamba_n_heads])
    rows = torch.tensor(config.ssm_multipliers).repeat_interleave(sizes)[:, None]
    factors = {
        "embed_tokens": config.embedding_multiplier,
        "lm_head": config.lm_head_multiplier,
        "q_proj": config.attention_in_multiplier,
        "k_proj": config.attention_in_multiplier * config.key_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "gate_proj": gate,
        "down_proj": down,
        "in_proj": config.ssm_in_multiplier * rows,
        "out_proj": config.ssm_out_multiplier,
    }
    return {
        name: weight * factors.get((name.split(".")[-2]), 1.0) for name, weight in weights.items()
    }


@pytest.mark.parametrize("case", MODELS)
def test_architectures_of_the_native_forward_run_there(case: str, tmp_path: Path) -> None:
    lm = loader.load(view(tmp_path / "model.gguf", case, Type.Q8_0), forward="auto")
    assert (lm.path.kind == "native") == (MODELS[case][1] in NATIVE)


@pytest.mark.parametrize(
    ("case", "kind"),
    by_turns(
        ["llama", "gemma2", "qwen3moe", "gpt-oss", "nemotron_h_moe"],
        [Type.Q4_0, Type.Q5_0, Type.Q5_1, Type.Q8_0],
    ),
)
def test_products_of_integers_are_lossless_with_drafts_and_in_any_batch(
    case: str, kind: Type, tmp_path: Path
) -> None:
    lm = loader.load(view(tmp_path / "model.gguf", case, kind), forward="auto")
    alone = []
    for prompt in PROMPTS:
        machine = engine_over(lm)
        sequence = machine.add(prompt, GREEDY)[0]
        drain(machine)
        alone.append(sequence.output)
    machine = engine_over(lm)
    sequences = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS]
    drain(machine)
    assert [sequence.output for sequence in sequences] == alone
    expect_empty(machine)


@pytest.mark.parametrize(
    "case", ["qwen2moe", "qwen3moe", "gpt-oss", "qwen3next", "granitehybrid_moe", "nemotron_h_moe"]
)
def test_experts_stay_in_their_blocks(case: str, tmp_path: Path) -> None:
    sizes = [
        loader.load(view(tmp_path / f"{kind.name}.gguf", case, kind), forward="auto").weight_bytes
        for kind in (Type.Q8_0, Type.F32)
    ]
    assert sizes[0] < 0.45 * sizes[1]


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_K])
def test_experts_in_blocks_may_be_left_in_a_file(kind: Type, tmp_path: Path) -> None:
    directory, texts = view(tmp_path / "model.gguf", "qwen3moe", kind), []
    for expert_bytes in (None, 2**20):
        machine = engine_over(loader.load(directory, forward="auto", expert_bytes=expert_bytes))
        sequences = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS]
        drain(machine)
        texts.append([sequence.output for sequence in sequences])
        expect_empty(machine)
    assert texts[0] == texts[1]


def test_a_quantised_file_is_not_quantised_again(tmp_path: Path) -> None:
    directory = view(tmp_path / "model.gguf", "llama", Type.Q8_0)
    with pytest.raises(ModelError, match="quantised already"):
        loader.load(directory, quantization="int8", forward="auto")
    plain = view(tmp_path / "plain.gguf", "llama", Type.F32)
    loader.load(plain, quantization="int8", forward="auto")


def test_weights_that_are_not_finite_are_refused_with_their_name(tmp_path: Path) -> None:
    for number, kind in enumerate((Type.F32, Type.Q8_0)):
        path = write_model(tmp_path / f"{number}.gguf", quantize=in_blocks(kind))
        offset = GgufFile.open(path).tensors["blk.1.ffn_up.weight"].offset
        data = bytearray(path.read_bytes())
        data[offset : offset + 4] = (b"\0\0\x80\x7f", b"\0\x7c\0\0")[number]  # infinity
        path.write_bytes(data)
        with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
            loader.load(find_model_dir(path), forward="auto")
