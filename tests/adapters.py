"""LoRA adapters of tiny models, as PEFT saves them, and what transformers computes with them."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="adapters-")


def new_directory() -> Path:
    """A directory of its own, until the process ends."""
    return Path(tempfile.mkdtemp(dir=_directory().name))


def linears(model: Path | PreTrainedModel) -> dict[str, nn.Linear]:
    """Of the layers of a model, by name."""
    is_saved = isinstance(model, Path)
    module = AutoModelForCausalLM.from_pretrained(model) if is_saved else model
    head = module.get_output_embeddings()
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and part is not head
    }


def random_tensors(
    model: Path | PreTrainedModel, targets: Sequence[str] = ALL, rank: int = 3, seed: int = 0
) -> dict[str, Tensor]:
    """The matrices of a trained adapter, by PEFT's names: none is zero."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, linear in linears(model).items():
        if name.rsplit(".", 1)[-1] in targets:
            sizes = {"A": (rank, linear.in_features), "B": (linear.out_features, rank)}
            for part, size in sizes.items():
                tensors[f"{PREFIX}{name}.lora_{part}.weight"] = 0.2 * torch.randn(
                    size, generator=generator
                )
    return tensors


def save(directory: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    """Write an adapter with these matrices; ``config``: fields of its configuration."""
    directory.mkdir(parents=True, exist_ok=True)
    rank = next((len(t) for name, t in tensors.items() if "lora_A" in name), 3)
    targets = sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in tensors})
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.05,
        "bias": "none",
        "target_modules": targets,
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps({**fields, **config}))
    save_file(dict(tensors), directory / "adapter_model.safetensors")
    return directory


def adapter(
    directory: Path, model: Path, targets: Sequence[str] = ALL, rank: int = 3, seed: int = 0
) -> Path:
    """Write a random adapter of a model, whose scale is 2."""
    return save(directory, random_tensors(model, targets, rank, seed))


def merged(model: Path, tensors: Mapping[str, Tensor], scale: float = 2.0) -> PreTrainedModel:
    """The module of transformers with an adapter merged into its weights."""
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        for name, down in tensors.items():
            if name.endswith("lora_A.weight"):
                up = tensors[name.replace("lora_A", "lora_B")]
                linear = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
                module.get_submodule(linear).weight += scale * (up @ down)
    return module


def unmerged(model: Path, tensors: Mapping[str, Tensor], scale: float = 2.0) -> PreTrainedModel:
    """The module of transformers whose linears add ``scale (x A^T) B^T`` to their outputs."""
    return adapting(merged(model, {}), tensors, scale)


def adapting(
    module: PreTrainedModel, tensors: Mapping[str, Tensor], scale: float = 2.0
) -> PreTrainedModel:
    """A module, whose linears add to their outputs from now on."""
    for name, down in tensors.items():
        if name.endswith("lora_A.weight"):
            up = tensors[name.replace("lora_A", "lora_B")]
            linear = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")

            def add(_: Any, args: Any, y: Tensor, down: Tensor = down, up: Tensor = up) -> Tensor:
                return y + (args[0] @ down.T) @ up.T * scale

            module.get_submodule(linear).register_forward_hook(add)
    return module


def greedy(module: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What a module generates after a prompt, each token from a forward of all before it."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            tokens.append(int(module(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
