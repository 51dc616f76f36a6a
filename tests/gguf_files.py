"""Small GGUF files of every architecture, written as llama.cpp's converter does.

The weights are those of a tiny transformers model. ``write_model`` names them by the converter's
own table (``gguf.get_tensor_name_map``) and changes them as its classes do, so that reading a file
back is checked against another implementation of the format's conventions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import gguf
from forethought.gguf.tokenizer import TokenType

F32 = gguf.GGMLQuantizationType.F32
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}
"""Of all models; the fields of transformers."""
LEFT_OUT = object()
"""In place of a field that a configuration does not have."""
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
_PARTLY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 48}
_DELTA = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rope_parameters": {**_PARTLY, "partial_rotary_factor": 0.25},
}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 16}
_GRANITE = {
    **_MAMBA2,
    "layer_types": ["mamba", "attention", "mamba"],
    "position_embedding_type": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 2**20,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 1.5,
    "attention_multiplier": 0.125,
    "num_local_experts": 0,
    "shared_intermediate_size": 96,
}
_FALCON = {**_MAMBA2, "mamba_d_ssm": 128, "mamba_norm_before_gate": False}
_NEMOTRON = {
    "rope_parameters": LEFT_OUT,
    "head_dim": 32,
    "layers_block_type": ["mamba", "mlp", "attention", "mamba", "mlp"],
    "num_hidden_layers": 5,
    "mamba_num_heads": 6,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 16,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {}),
    "llama_tied_biased": (
        "llama",
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ("llama", "mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", "qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 32}),
    "qwen2moe": ("qwen2moe", "qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 48}),
    "qwen3moe": ("qwen3moe", "qwen3_moe", {**_EXPERTS, "norm_topk_prob": True}),
    "gemma2": (
        "gemma2",
        "gemma2",
        {
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        {
            "num_hidden_layers": 6,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "rope_parameters": _LOCAL_ROPE,
        },
    ),
    "phi3": ("phi3", "phi3", {"sliding_window": None, "rope_parameters": _PARTLY}),
    "olmo2": ("olmo2", "olmo2", {}),
    "smollm3": ("smollm3", "smollm3", {"no_rope_layers": [1, 1, 1]}),
    "gpt-oss": (
        "gpt-oss",
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 8,
                "rope_theta": 150000.0,
            },
        },
    ),
    "glm4": ("glm4", "glm4", {"attention_bias": True, "rope_parameters": _PARTLY}),
    "qwen35": ("qwen35", "qwen3_5_text", _DELTA),
    "qwen35moe": ("qwen35moe", "qwen3_5_moe_text", {**_DELTA, **_SHARED}),
    "qwen3next": ("qwen3next", "qwen3_next", {**_DELTA, **_SHARED}),
    "qwen3next_fused": ("qwen3next", "qwen3_next", {**_DELTA, **_SHARED}),
    "granitehybrid": ("granitehybrid", "granitemoehybrid", _GRANITE),
    "granitehybrid_tied": (
        "granitehybrid",
        "granitemoehybrid",
        {**_GRANITE, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "granitehybrid_moe": (
        "granitehybrid",
        "granitemoehybrid",
        {
            **_GRANITE,
            "num_local_experts": 4,
            "intermediate_size": 32,
            "shared_intermediate_size": 64,
        },
    ),
    "granitehybrid_rotated": (
        "granitehybrid",
        "granitemoehybrid",
        {**_GRANITE, "position_embedding_type": "rope", "mamba_conv_bias": False}
        | {"rope_parameters": SIZES["rope_parameters"]},
    ),
    "bamba": (
        "granitehybrid",
        "bamba",
        {
            **_MAMBA2,
            "attn_layer_indices": [1],
            "mlp_bias": True,
            "rope_parameters": _PARTLY,
        },
    ),
    "falcon-h1": ("falcon-h1", "falcon_h1", _FALCON),
    "falcon-h1_norm": ("falcon-h1", "falcon_h1", {**_FALCON, "mamba_rms_norm": True}),
    "nemotron_h": ("nemotron_h", "nemotron_h", {**_NEMOTRON, "mlp_bias": True}),
    "nemotron_h_moe": (
        "nemotron_h_moe",
        "nemotron_h",
        {
            **_NEMOTRON,
            "layers_block_type": ["mamba", "moe", "attention", "moe"],
            "num_hidden_layers": 4,
            "intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 64,
            "moe_latent_size": 32,
            "routed_scaling_factor": 2.5,
        },
    ),
    "lfm2": (
        "lfm2",
        "lfm2",
        {
            "norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention", "conv"],
        },
    ),
}
"""Name of a case -> ``general.architecture``, ``model_type``, and what differs from ``SIZES``."""


def config_of_case(case: str) -> Any:
    """The configuration of transformers."""
    _, model_type, changes = MODELS[case]
    fields = {**SIZES, **changes}
    return CONFIG_MAPPING[model_type](
        **{name: value for name, value in fields.items() if value is not LEFT_OUT}
    )


def module_of_case(case: str) -> torch.nn.Module:
    """A module with random weights, none of them at zero or one."""
    generator = torch.Generator().manual_seed(1)
    module = AutoModelForCausalLM.from_config(config_of_case(case), dtype=torch.float32)
    with torch.no_grad():
        for weight in module.state_dict().values():
            weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    return module.eval()


def meta_weights(case: str) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the weights of a module, but of a tied head."""
    config = config_of_case(case)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    weights = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    return weights


def write_model(
    path: Path,
    case: str = "llama",
    *,
    changes: Mapping[str, Any] | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
    quantize: Callable[[str, np.ndarray], gguf.GGMLQuantizationType] = lambda name, data: F32,
    vocabulary: Callable[[gguf.GGUFWriter, int], None] | None = None,
    tensors_per_file: int = 0,
) -> Path:
    """Write a GGUF file, or a series of files of at most ``tensors_per_file`` tensors; returns the
    path of the first.

    Args:
        path: of the file.
        case: a key of ``MODELS``.
        changes: metadata by whole key, which replaces what the case has; None leaves a key out.
        weights: by name of transformers; None: zeros.
        quantize: the type of a tensor, by its name in the file and its values.
        vocabulary: adds the tokenizer; None: ``add_byte_vocabulary``.
    """
    architecture, _, _ = MODELS[case]
    config = config_of_case(case)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_per_file)
    for key, value in {**metadata_of(case), **(changes or {})}.items():
        add_value(writer, key, value)
    (vocabulary or add_byte_vocabulary)(writer, config.vocab_size)
    if weights is None:
        weights = {name: torch.zeros(shape) for name, shape in meta_weights(case).items()}
    for name, tensor in converted(case, weights).items():
        data = np.ascontiguousarray(tensor.float().numpy())
        kind = quantize(name, data)
        stored = data if kind is F32 else gguf.quants.quantize(data, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if tensors_per_file else path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add metadata with the type that the value has."""
    kinds = gguf.GGUFValueType
    if isinstance(value, bool):
        writer.add_key_value(key, value, kinds.BOOL)
    elif isinstance(value, int):
        writer.add_key_value(key, value, kinds.UINT32)
    elif isinstance(value, float):
        writer.add_key_value(key, value, kinds.FLOAT32)
    elif isinstance(value, str):
        writer.add_key_value(key, value, kinds.STRING)
    elif value is not None:
        writer.add_array(key, list(value))


def metadata_of(case: str) -> dict[str, Any]:
    """The settings of a case under the names of the format."""
    architecture, _, _ = MODELS[case]
    config = config_of_case(case)
    rope = getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 1e4}
    full = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    norms = ("norm_eps", "layer_norm_epsilon", "rms_norm_eps")
    settings: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": next(
            getattr(config, name) for name in norms if hasattr(config, name)
        ),
        "rope.freq_base": full["rope_theta"],
        "rope.dimension_count": int(head_dim * full.get("partial_rotary_factor", 1.0)),
    }
    if full["rope_type"] != "default":
        settings["rope.scaling.type"] = full["rope_type"]
        settings["rope.scaling.factor"] = full["factor"]
    if full["rope_type"] == "yarn":
        original = full["original_max_position_embeddings"]
        settings["rope.scaling.original_context_length"] = original
    if architecture == "phi3":
        original = config.original_max_position_embeddings
        settings["rope.scaling.original_context_length"] = original
    if getattr(config, "sliding_window", None):
        settings["attention.sliding_window"] = config.sliding_window
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        settings[name] = getattr(config, name, None)
    if architecture in ("qwen2moe", "qwen3moe", "qwen35moe", "qwen3next", "gpt-oss"):
        width = getattr(config, "moe_intermediate_size", config.intermediate_size)
        settings["expert_count"] = config.to_dict().get("num_experts") or config.num_local_experts
        settings["expert_used_count"] = config.num_experts_per_tok
        settings["expert_feed_forward_length"] = width
        shared = getattr(config, "shared_expert_intermediate_size", None)
        settings["expert_shared_feed_forward_length"] = shared
    settings |= _RECURRENT.get(architecture, lambda config: {})(config)
    if architecture == "lfm2":
        kv_heads = config.num_key_value_heads
        settings["attention.head_count_kv"] = [
            kv_heads if kind == "full_attention" else 0 for kind in config.layer_types
        ]
        settings["shortconv.l_cache"] = config.conv_L_cache
    return {f"{architecture}.{key}": value for key, value in settings.items()}


def _delta_settings(config: Any) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "full_attention_interval": 4,
    }


def _qwen35_settings(config: Any) -> dict[str, Any]:
    return {**_delta_settings(config), "rope.dimension_sections": [1, 1, 0, 0]}


def _mamba2_settings(config: Any) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.time_step_rank": config.mamba_n_heads,
        "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
    }


def _granite_settings(config: Any) -> dict[str, Any]:
    """Of Granite and Bamba: sizes of heads are left out, and the scales that a model has."""
    kv_heads, is_bamba = config.num_key_value_heads, config.model_type == "bamba"
    kinds = config.layers_block_type
    settings = {
        **_mamba2_settings(config),
        "attention.key_length": None,
        "attention.value_length": None,
        "attention.head_count_kv": [
            kv_heads if kind in ("attention", "full_attention") else 0 for kind in kinds
        ],
        "rope.scaling.finetuned": is_bamba or config.position_embedding_type == "rope",
    }
    if is_bamba:
        return settings
    if config.num_local_experts:
        settings["expert_count"] = config.num_local_experts
        settings["expert_used_count"] = config.num_experts_per_tok
    return settings | {
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "attention.scale": config.attention_multiplier,
    }


def _nemotron_settings(config: Any) -> dict[str, Any]:
    """The size of rotated heads is another one, which nothing reads."""
    kinds, kv_heads = config.layers_block_type, config.num_key_value_heads
    width = config.intermediate_size
    return {
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.time_step_rank": config.mamba_num_heads,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "attention.head_count_kv": [
            kv_heads if kind in ("attention", "full_attention") else 0 for kind in kinds
        ],
        "feed_forward_length": [width if kind in ("mlp", "moe") else 0 for kind in kinds],
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "rope.scaling.finetuned": False,
    }


def _nemotron_moe_settings(config: Any) -> dict[str, Any]:
    return {
        **_nemotron_settings(config),
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "expert_count": config.n_routed_experts,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_group_count": config.n_group,
        "moe_latent_size": config.moe_latent_size,
    }


_RECURRENT: dict[str, Callable[[Any], dict[str, Any]]] = {
    "qwen3next": _delta_settings,
    "qwen35": _qwen35_settings,
    "qwen35moe": _qwen35_settings,
    "granitehybrid": _granite_settings,
    "falcon-h1": _mamba2_settings,
    "nemotron_h": _nemotron_settings,
    "nemotron_h_moe": _nemotron_moe_settings,
}
"""``general.architecture`` -> the settings of recurrent layers."""


def add_byte_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """A byte-level tokenizer: three control tokens, 256 bytes, two merges, and what fills it up."""
    control = ["<pad>", "<s>", "</s>"]
    tokens = [*control, *byte_letters(), "th", "the"]
    kinds = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * 258
    for token_id in range(len(tokens), size):
        tokens.append(f"[PAD{token_id}]")
        kinds.append(TokenType.UNUSED)
    add_tokenizer(writer, "gpt2", tokens, kinds, merges=["t h", "th e"], pre="qwen2")


def add_tokenizer(
    writer: gguf.GGUFWriter,
    model: str,
    tokens: Sequence[str],
    kinds: Iterable[int],
    *,
    pre: str | None = "default",
    merges: Sequence[str] | None = None,
    scores: Sequence[float] | None = None,
) -> None:
    """The arrays of a tokenizer, with the ids of ``add_byte_vocabulary``'s control tokens."""
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tokens))
    writer.add_token_types([int(kind) for kind in kinds])
    if merges is not None:
        writer.add_token_merges(list(merges))
    if scores is not None:
        writer.add_token_scores(list(scores))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


def byte_letters() -> list[str]:
    """The letters that byte-level tokenizers write bytes with, by byte."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]


def converted(case: str, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a file, as llama.cpp's converter makes them of a checkpoint."""
    architecture, _, _ = MODELS[case]
    config = config_of_case(case)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _as_published(case, weights):
        renamed = name.replace(".dt_bias", ".dt_proj.bias")
        stored = names.get_name(renamed, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if architecture in PERMUTED and name.split(".")[-2] in ("q_proj", "k_proj"):
            tensor = _permuted(name, tensor, config)
        if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if architecture in ("qwen35", "qwen35moe", "qwen3next"):
            tensor = _of_qwen(name, tensor, config, tiles=architecture != "qwen3next")
        if "conv" in name and tensor.dim() == 3:
            tensor = tensor.squeeze(1)
        if stored.endswith((".ssm_a", ".ssm_d")) and ".linear_attn." not in name:
            tensor = (-tensor.exp() if stored.endswith("a") else tensor)[:, None]
        if stored.endswith("ssm_norm.weight") and ".linear_attn." not in name:
            num_groups = _RECURRENT[architecture](config)["ssm.group_count"]
            tensor = tensor.view(num_groups, -1)
        tensors[stored] = tensor[0] if "gate_inp_shexp" in stored else tensor
    if architecture == "granitehybrid" and getattr(config, "num_local_experts", 1) == 0:
        return {name.replace("_shexp", ""): tensor for name, tensor in tensors.items()}
    return tensors


PERMUTED = ("llama", "smollm3", "granitehybrid", "nemotron_h", "nemotron_h_moe")
"""Architectures of Llama's converter."""


def _of_qwen(name: str, tensor: torch.Tensor, config: Any, tiles: bool) -> torch.Tensor:
    """Norms plus 1, decays instead of their logarithms, and in Qwen3.5 value heads with those of
    one key head as far apart as there are key heads.
    """
    if name.endswith("norm.weight") and ".linear_attn." not in name:
        return tensor + 1
    if ".linear_attn." not in name or name.endswith("linear_attn.norm.weight"):
        return tensor
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if not tiles:
        return tensor
    num_groups, num_heads = config.linear_num_key_heads, config.linear_num_value_heads
    dim = 1 if "out_proj" in name else 0
    has_keys = "in_proj_qkv" in name or "conv1d" in name
    num_keys = 2 * num_groups * config.linear_key_head_dim if has_keys else 0
    keys, values = tensor.split([num_keys, tensor.shape[dim] - num_keys], dim)
    size = values.shape[dim] // num_heads
    order = torch.arange(values.shape[dim]).view(num_groups, num_heads // num_groups, size)
    return torch.cat([keys, values.index_select(dim, order.transpose(0, 1).flatten())], dim)


def _as_published(
    case: str, weights: Mapping[str, torch.Tensor]
) -> Iterable[tuple[str, torch.Tensor]]:
    """The weights under the names, and in the parts, in which the converter's table has them."""
    split = {
        "granitemoehybrid": _granite_parts,
        "nemotron_h": _nemotron_parts,
        "qwen3_next": _qwen3next_parts,
    }.get(MODELS[case][1])
    for name, tensor in weights.items():
        parts = None if split is None else list(split(case, name, tensor))
        yield from parts or _expert_parts(case, name, tensor)


def _granite_parts(case: str, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, Any]]:
    """Gates and ups apart, those of experts in one tensor for each."""
    layer = name.rsplit(".", 3)[0]
    if name.endswith("block_sparse_moe.router.weight"):
        yield f"{layer}.block_sparse_moe.router.layer.weight", tensor
    elif name.endswith("experts.down_proj"):
        yield f"{layer}.block_sparse_moe.output_linear.weight", tensor
    elif name.endswith("experts.gate_up_proj"):
        gate, up = tensor.chunk(2, dim=1)
        yield f"{layer}.mlp.experts.gate_proj.weight", gate
        yield f"{layer}.mlp.experts.up_proj.weight", up
    elif name.endswith("shared_mlp.input_linear.weight"):
        gate, up = tensor.chunk(2)
        yield f"{layer}.mlp.shared_expert.gate_proj.weight", gate
        yield f"{layer}.mlp.shared_expert.up_proj.weight", up


def _nemotron_parts(case: str, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, Any]]:
    """The names of the published checkpoints, and experts stacked."""
    if ".mixer.experts." in name:
        yield f"{name.replace('.mixer.', '.mlp.')}.weight", tensor
    elif name != "lm_head.weight":
        name = name.replace("model.", "backbone.", 1)
        yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor


def _qwen3next_parts(case: str, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, Any]]:
    """Queries, keys, values and gates of all heads, which older files have head by head."""
    if not name.endswith("in_proj_qkvz.weight") or case == "qwen3next_fused":
        return
    config = config_of_case(case)
    num_groups, keys = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // num_groups * config.linear_value_head_dim
    heads = tensor.view(num_groups, -1, tensor.shape[-1])
    parts = [part.flatten(0, 1) for part in heads.split([keys, keys, values, values], 1)]
    layer = name.rsplit(".", 3)[0]
    yield f"{layer}.linear_attn.in_proj_qkv.weight", torch.cat(parts[:3])
    yield f"{layer}.linear_attn.in_proj_z.weight", parts[3]


def _expert_parts(case: str, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
    """The weights with experts, and those of gpt-oss, in the layouts of the converter."""
    is_gpt_oss = MODELS[case][0] == "gpt-oss"
    if name.endswith("self_attn.sinks"):
        yield f"{name}.weight", tensor
        return
    if ".mlp.experts." not in name:
        yield name, tensor
        return
    prefix, part = name.rsplit(".", 1)
    suffix = "bias" if part.endswith("_bias") else "weight"
    part = part.removesuffix("_bias")
    if is_gpt_oss and suffix == "weight":
        tensor = tensor.transpose(-1, -2)
    if part == "down_proj":
        yield f"{prefix}.down_proj.{suffix}", tensor
        return
    dimension = 1 if suffix == "weight" else -1
    if is_gpt_oss:
        length = tensor.shape[dimension]
        gate = tensor.index_select(dimension, torch.arange(0, length, 2))
        up = tensor.index_select(dimension, torch.arange(1, length, 2))
    else:
        gate, up = tensor.chunk(2, dim=dimension)
    yield f"{prefix}.gate_proj.{suffix}", gate
    yield f"{prefix}.up_proj.{suffix}", up


def _permuted(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Queries and keys with the two halves of each head in turns."""
    heads = {
        "q_proj": config.num_attention_heads,
        "k_proj": config.num_key_value_heads,
    }.get(name.split(".")[-2])
    if heads is None:
        return tensor
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)
