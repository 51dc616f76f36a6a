"""Tiny random models for tests of every layer, and transformers' own answers to compare with.

Every architecture of the equality matrix is here, small enough to generate in milliseconds. The
weights are wide (std 0.3) so that greedy decoding wanders instead of repeating one token.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

VOCAB = 101
_STD = 0.3

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": _STD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

# name -> (transformers model_type, what differs from _BASE)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_mha": ("llama", {"num_key_value_heads": 4}),
    "llama_mqa": ("llama", {"num_key_value_heads": 1}),
    "llama_tied_biased": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ("mistral", {"sliding_window": 6}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen2_moe": (
        "qwen2_moe",
        {**_MOE, "head_dim": None, "shared_expert_intermediate_size": 24},
    ),
    "qwen3_moe": ("qwen3_moe", {**_MOE, "decoder_sparse_step": 1}),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": 6,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "gemma3": ("gemma3_text", {"sliding_window": 6, "query_pre_attn_scalar": 8, **_MIXED}),
    "phi3": ("phi3", {"sliding_window": None, "head_dim": None}),
    "olmo2": ("olmo2", {"head_dim": None}),
    "glm4": ("glm4", {"partial_rotary_factor": 0.5}),
    "gpt_oss": (
        "gpt_oss",
        {
            "sliding_window": 6,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            **_MIXED,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "head_dim": None,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 12,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "granite": (
        "granite",
        {
            "head_dim": None,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 2.0,
            "logits_scaling": 2.0,
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "cohere2": ("cohere2", {"sliding_window": 6, "head_dim": None, **_MIXED}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {"head_dim": None}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "phi": ("phi", {"head_dim": None}),
    "starcoder2": ("starcoder2", {"sliding_window": 6}),
    "llama4": (
        "llama4_text",
        {
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "attention_chunk_size": 6,
            "no_rope_layers": [1, 1, 0],
            "floor_scale": 7,  # so that a few positions scale the queries of the last layer
            "attn_scale": 0.5,
        },
    ),
}

_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8}
_ZAMBA2 = {
    "layers_block_type": ["mamba", "hybrid", "mamba"],
    "head_dim": None,
    "use_mem_rope": True,
    "n_mamba_heads": 4,
    "mamba_d_state": 8,
    "mamba_headdim": 16,
}

RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", _DELTA),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {**_DELTA, **_MOE, "shared_expert_intermediate_size": 24},
    ),
    "qwen3_next": (
        "qwen3_next",
        {**_DELTA, **_MOE, "shared_expert_intermediate_size": 24},
    ),
    "olmo_hybrid": ("olmo_hybrid", {**_DELTA, "head_dim": None}),
    "bamba": ("bamba", {**_MAMBA2, "attn_layer_indices": [1], "head_dim": None}),
    "falcon_h1": ("falcon_h1", {**_MAMBA2, "mamba_d_ssm": 64}),
    "granite_hybrid": (
        "granitemoehybrid",
        {**_MAMBA2, "layer_types": ["mamba", "attention", "mamba"], "head_dim": None}
        | {"num_local_experts": 0, "shared_intermediate_size": 48},
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "head_dim": None}),
    "lfm2_moe": (
        "lfm2_moe",
        {**_MOE, "layer_types": ["conv", "full_attention", "conv"], "head_dim": None}
        | {"num_dense_layers": 1},
    ),
    "kimi_linear": (
        "kimi_linear",
        {**_MOE, "layer_types": ["linear_attention", "linear_attention", "full_attention"]}
        | {"num_key_value_heads": 4, "kv_lora_rank": 12, "qk_rope_head_dim": 4}
        | {"qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": None, "num_local_experts": 4}
        | {"linear_head_dim": 8, "linear_num_heads": 4},
    ),
    "nemotron_h": (
        "nemotron_h",
        {**_MOE, "layer_types": ["mamba", "attention", "mlp", "mamba"], "num_hidden_layers": 4}
        | {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8},
    ),
    "zamba2": ("zamba2", _ZAMBA2),
    "jamba": (
        "jamba",
        {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "head_dim": None}
        | {"num_experts": 4, "mamba_d_state": 8},
    ),
}
"""Those with recurrent layers."""

RECURRENT_MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "granite_hybrid_moe": (
        "granitemoehybrid",
        {**RECURRENT["granite_hybrid"][1], "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "nemotron_h_moe": (
        "nemotron_h",
        {**RECURRENT["nemotron_h"][1], "layer_types": ["mamba", "attention", "moe", "mamba"]}
        | {"n_routed_experts": 4, "moe_shared_expert_intermediate_size": 24},
    ),
}
"""Families of ``RECURRENT`` with experts."""

RECURRENT_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo_hybrid_unrotated": (
        "olmo_hybrid",
        {**RECURRENT["olmo_hybrid"][1], "rope_parameters": {"rope_theta": None}},
    ),
    "kimi_linear_latent_queries": (
        "kimi_linear",
        {**RECURRENT["kimi_linear"][1], "q_lora_rank": 12, "n_group": 2, "topk_group": 1},
    ),
    "zamba2_shared": (
        "zamba2",
        {**_ZAMBA2, "layers_block_type": ["hybrid", "mamba", "hybrid", "hybrid", "mamba", "hybrid"]}
        | {"num_hidden_layers": 6, "num_mem_blocks": 2, "adapter_rank": 8}
        | {"use_shared_attention_adapter": True, "num_key_value_heads": 4}
        | {"tie_word_embeddings": True, "initializer_range": 0.15},
    ),
    "zamba2_unrotated": ("zamba2", {**_ZAMBA2, "use_mem_rope": False, "hidden_act": "silu"}),
}
"""Families of ``RECURRENT`` with other settings."""

ALL_RECURRENT = [*RECURRENT, *RECURRENT_MIXTURES, *RECURRENT_VARIANTS]
"""Names of all of them."""


def save_with_vision(path: Path) -> None:
    """A Qwen3.5 as it is published: its language part under the names of a model that also sees."""
    text = {**_BASE, **_DELTA}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    vision |= {"out_hidden_size": 32, "num_position_embeddings": 16}
    config = Qwen3_5Config(text_config=text, vision_config=vision)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        Qwen3_5ForConditionalGeneration(config).save_pretrained(path)


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tiny-models-")


@functools.cache
def tiny(
    architecture: str, seed: int = 1, kv_heads: int | None = None, vocab_size: int | None = None
) -> Path:
    """Directory of a saved tiny model with random float32 weights; made once per process.

    Args:
        architecture: a key of ``ARCHITECTURES``, ``RECURRENT``, ``RECURRENT_MIXTURES`` or
            ``RECURRENT_VARIANTS``.
        seed: of the weights.
        kv_heads: None for the number that the architecture's entry says.
        vocab_size: the same.
    """
    recurrent = {**RECURRENT, **RECURRENT_MIXTURES, **RECURRENT_VARIANTS}
    model_type, changes = {**ARCHITECTURES, **recurrent}[architecture]
    if kv_heads is not None:
        changes = {**changes, "num_key_value_heads": kv_heads}
    if vocab_size is not None:
        changes = {**changes, "vocab_size": vocab_size}
    settings = {key: value for key, value in {**_BASE, **changes}.items() if value is not None}
    path = Path(_directory().name) / f"{architecture}-{seed}-{kv_heads}-{vocab_size}"
    save_random(CONFIG_MAPPING[model_type](**settings), path, seed)
    return path


_GROUPS: dict[str, Any] = {
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 64,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "adapter_rank": 32,
    "linear_head_dim": 32,
}
"""Widths that groups of 4 bits divide."""


@functools.cache
def tiny_in_groups(architecture: str) -> Path:
    """As ``tiny``, for weights in 4 bits."""
    path = tiny(architecture)
    config = AutoConfig.from_pretrained(path)
    widths = {name: width for name, width in _GROUPS.items() if hasattr(config, name)}
    config = AutoConfig.from_pretrained(path, **widths)
    grouped = path.with_name(f"{architecture}-groups")
    save_random(config, grouped)
    return grouped


_SCALE = 40.0
"""Of the embeddings of ``bigram``, beside what layers add to them."""


@functools.cache
def bigram(architecture: str) -> Path:
    """As ``tiny``, but that layers add little to the embeddings: most tokens depend on the last one
    alone, in the way of all models of this kind, so that one of them drafts well for another.
    """
    path = tiny(architecture).with_name(f"{architecture}-bigram")
    module, like = (
        AutoModelForCausalLM.from_pretrained(tiny(name)) for name in (architecture, "llama")
    )
    embeddings, head = like.get_input_embeddings().weight, like.get_output_embeddings().weight
    module.get_input_embeddings().weight.data.copy_(_SCALE * embeddings)
    module.get_output_embeddings().weight.data.copy_(head)
    [norm] = [part for part in module.get_decoder().children() if "RMSNorm" in type(part).__name__]
    norm.weight.data.fill_(1.0)
    module.save_pretrained(path)
    return path


def new_module(architecture: str, **changes: Any) -> PreTrainedModel:
    """A tiny module in memory, with random weights, nothing left at zero or one."""
    config = AutoConfig.from_pretrained(tiny(architecture), **changes)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        module: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        for name, parameter in module.named_parameters():
            if "conv" in name or "dt_bias" in name:
                nn.init.normal_(parameter)
            elif parameter.dim() == 1:
                parameter.data += 0.2 * torch.randn_like(parameter)
    return module.eval().requires_grad_(False)


def save_random(config: Any, path: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
    """Save a model of ``config`` with random weights, nothing left at zero or one."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(config)
        for weight in module.parameters():
            if weight.ndim == 1 or weight.abs().max() == 0:
                # Norm weights near 1 (or 0, where the norm adds one), biases and sinks near 0.
                weight.data += 0.2 * torch.randn_like(weight)
    module.to(dtype).save_pretrained(path)


@functools.cache
def transformers_model(path: Path, rounded_to: torch.dtype = torch.float32) -> PreTrainedModel:
    """The same model as transformers runs it, in float32, with its own eager attention.

    Args:
        path: of the checkpoint.
        rounded_to: what its weights are rounded to first.
    """
    module = AutoModelForCausalLM.from_pretrained(
        path, dtype=rounded_to, attn_implementation="eager", local_files_only=True
    )
    return module.float().eval()


def greedy(path: Path, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """What ``model.generate`` adds to each prompt, greedily, one prompt at a time, no stop."""
    return [_greedy(path, tuple(prompt), new_tokens) for prompt in prompts]


@functools.cache
def _greedy(path: Path, prompt: tuple[int, ...], new_tokens: int) -> list[int]:
    module = transformers_model(path)
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        output = module.generate(
            tokens,
            use_cache=not _limits_steps(module),
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()


def _limits_steps(module: nn.Module) -> bool:
    """Whether it is Mamba-2 with a limit on the widths of steps, which transformers applies to the
    tokens of a prompt, and not to a token that follows a cache.
    """
    limits = (getattr(part, "time_step_limit", None) for part in module.modules())
    return any(limit is not None and limit[0] > 0 for limit in limits)


def logits_lost(
    path: Path, dtype: torch.dtype, prompt: Sequence[int], output: Sequence[int]
) -> torch.Tensor:
    """By how much the logit of each generated token lies below the greatest one.

    Returns:
        In standard deviations of the token's logits, ``[output]``: computed in float32 by
        transformers, with the weights rounded to ``dtype``.
    """
    exact, tokens = transformers_model(path, dtype), torch.tensor([[*prompt, *output]])
    with torch.inference_mode():
        logits = exact(tokens).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    return (logits.amax(-1) - chosen) / logits.std(-1)


def prompts(lengths: Sequence[int] = (1, 4, 9, 17, 30), seed: int = 0) -> list[list[int]]:
    """Random prompts of the given lengths, without the special ids 0, 1, 2."""
    source = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=source).tolist() for n in lengths]
