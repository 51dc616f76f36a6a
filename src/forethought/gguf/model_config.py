"""What the ``config.json`` of a model in a GGUF file would be.

The metadata of a file has the sizes under the names of its architecture; what it does not have is
what the architecture's code in llama.cpp fixes, which is written down here. A setting that changes
what the model computes, and that transformers' module of it does not have, is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forethought.gguf import recurrent_config
from forethought.gguf.architecture import Architecture, expert_sizes, shared_expert_size
from forethought.gguf.block_type import BlockType
from forethought.gguf.file import GgufFile
from forethought.gguf.metadata import Metadata
from forethought.gguf.rope import head_size, rope_fields, rope_parameters

_DTYPES = {BlockType.BF16: "bfloat16", BlockType.F16: "float16"}
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.key_length_swa": (),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "moe_every_n_layers": (0, 1),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0, 1),
    "rope.dimension_count_swa": (),
    "rope.dimension_sections": (),
    "rope.freq_base_swa": (),
    "router_logit_softcapping": (0,),
    "use_parallel_residual": (False,),
}
"""Settings that change what is computed -> the values with which they do not."""


def config_of(file: GgufFile) -> dict[str, Any]:
    """The configuration, as transformers 5 writes it.

    Raises ModelError for an architecture, or a setting of one, that is not supported, and for a
    value that cannot be.
    """
    metadata = Metadata(file)
    _check_content(metadata)
    architecture = ARCHITECTURES.get(metadata.architecture)
    if architecture is None:
        raise metadata.unsupported(
            f"its architecture is {metadata.architecture:.40}; {', '.join(ARCHITECTURES)} are read"
        )
    _refuse_unhonoured(metadata, architecture)
    return {
        "model_type": architecture.model_type,
        "architectures": [architecture.module],
        **_sizes(metadata),
        **_rope(metadata, architecture),
        **_token_ids(metadata),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
        **architecture.settings(metadata),
    }


def _check_content(metadata: Metadata) -> None:
    """Refuse files that hold something else than a language model."""
    kind = metadata.text("general.type", "model")
    if kind != "model" or metadata.architecture == "clip":
        what = {"adapter": "an adapter", "mmproj": "the image encoder of a model"}
        content = what.get("mmproj" if metadata.architecture == "clip" else kind, f"a {kind:.20}")
        raise metadata.unsupported(f"it holds {content}", "Give the file of the language model")


def _refuse_unhonoured(metadata: Metadata, architecture: Architecture) -> None:
    for key, neutral in _NEUTRAL.items():
        value = metadata.get(key)
        if value is not None and key not in architecture.honoured and value not in neutral:
            why = f"its {metadata.full_key(key)} is {value!r:.60}, which is not supported"
            raise metadata.unsupported(why)


def _sizes(metadata: Metadata) -> dict[str, Any]:
    num_layers, num_heads = metadata.size("block_count"), metadata.size("attention.head_count")
    if num_layers > len(metadata.file.tensors):
        why = f"a number up to {len(metadata.file.tensors)}, of its tensors"
        raise metadata.refused(metadata.full_key("block_count"), num_layers, why)
    head_dim = head_size(metadata)
    value_size = metadata.size("attention.value_length", head_dim)
    if value_size != head_dim:
        key = metadata.full_key("attention.value_length")
        raise metadata.refused(key, value_size, f"{head_dim}, the size of keys")
    return {
        "vocab_size": metadata.num_tokens,
        "hidden_size": metadata.size("embedding_length"),
        "intermediate_size": _intermediate_size(metadata),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": _size_of_some(metadata, "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.size("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
    }


def _intermediate_size(metadata: Metadata) -> int:
    experts = metadata.optional_size("expert_feed_forward_length")
    return _size_of_some(metadata, "feed_forward_length", experts)


def _size_of_some(metadata: Metadata, key: str, default: int | None) -> int:
    """The size in each layer that has such a part: those without have 0."""
    if isinstance(metadata.get(key), tuple):
        sizes = {*metadata.layer_sizes(key)} - {0}
        if len(sizes) == 1:
            return sizes.pop()
    return metadata.size(key, default)


def _rope(metadata: Metadata, architecture: Architecture) -> dict[str, Any]:
    if architecture.rotation is None:
        return {}
    return rope_fields(metadata, architecture.rotation)


def _token_ids(metadata: Metadata) -> dict[str, int | None]:
    return {
        "bos_token_id": metadata.token_id("bos"),
        "eos_token_id": metadata.token_id("eos"),
        "pad_token_id": metadata.token_id("padding"),
    }


def _dtype(file: GgufFile) -> str:
    """That of most weights; float32 for blocks, whose scales have that range."""
    counts: dict[str, int] = {}
    for info in file.tensors.values():
        dtype = _DTYPES.get(info.type, "float32")
        counts[dtype] = counts.get(dtype, 0) + info.num_weights
    return max(counts, key=lambda dtype: counts[dtype])


def _llama(metadata: Metadata) -> dict[str, Any]:
    biases = {
        "attention_bias": metadata.has_part("attn_q.bias"),
        "mlp_bias": metadata.has_part("ffn_gate.bias"),
    }
    window = metadata.optional_size("attention.sliding_window")
    if window is None:
        return {"hidden_act": "silu", **biases}
    if any(biases.values()):
        raise metadata.unsupported("it has a sliding window and biases")
    return {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "hidden_act": "silu",
        "sliding_window": window,
    }


def _qwen2(metadata: Metadata) -> dict[str, Any]:
    return {"hidden_act": "silu", "use_sliding_window": False}


def _qwen3(metadata: Metadata) -> dict[str, Any]:
    return {**_qwen2(metadata), "attention_bias": metadata.has_part("attn_q.bias")}


def _experts(metadata: Metadata) -> dict[str, Any]:
    """Those of mixtures of experts of Qwen, of which every layer is one."""
    return {**expert_sizes(metadata), "decoder_sparse_step": 1, "mlp_only_layers": []}


def _qwen2moe(metadata: Metadata) -> dict[str, Any]:
    return {
        **_qwen2(metadata),
        **_experts(metadata),
        **shared_expert_size(metadata),
        "norm_topk_prob": metadata.flag(metadata.full_key("expert_weights_norm")) or False,
        "qkv_bias": metadata.has_part("attn_q.bias"),
    }


def _qwen3moe(metadata: Metadata) -> dict[str, Any]:
    norm = metadata.flag(metadata.full_key("expert_weights_norm"))
    return {**_qwen3(metadata), **_experts(metadata), "norm_topk_prob": norm is not False}


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    num_layers = metadata.size("block_count")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scalar(metadata, 46),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
        "sliding_window": metadata.size("attention.sliding_window", 4096),
        "layer_types": _layer_types(num_layers, 2),
    }


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    num_layers, window = metadata.size("block_count"), metadata.get("attention.sliding_window")
    rope = rope_parameters(metadata)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scalar(metadata, 62),
        "final_logit_softcapping": metadata.optional_number("final_logit_softcapping"),
        "sliding_window": metadata.size("attention.sliding_window") if window else None,
        "layer_types": _layer_types(num_layers, 6 if window else 1),
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": metadata.number("rope.freq_base_swa", 10000.0),
            },
        },
    }


def _query_scalar(metadata: Metadata, num_layers_27b: int) -> int:
    """The square of what queries are divided by: the size of a head, but for the models of 27
    billion parameters, whose number of layers tells them.
    """
    if metadata.size("block_count") == num_layers_27b:
        return metadata.size("embedding_length") // metadata.size("attention.head_count")
    return head_size(metadata)


def _layer_types(num_layers: int, period: int) -> list[str]:
    """Layers with a sliding window, and after ``period`` - 1 of them one without."""
    return [
        "full_attention" if (index + 1) % period == 0 else "sliding_attention"
        for index in range(num_layers)
    ]


def _phi3(metadata: Metadata) -> dict[str, Any]:
    context_length = metadata.size("context_length")
    length = metadata.size("rope.scaling.original_context_length", context_length)
    window = metadata.optional_size("attention.sliding_window")
    return {
        "hidden_act": "silu",
        "sliding_window": window,
        "original_max_position_embeddings": length,
    }


def _olmo2(metadata: Metadata) -> dict[str, Any]:
    return {"hidden_act": "silu", "attention_bias": metadata.has_part("attn_q.bias")}


def _smollm3(metadata: Metadata) -> dict[str, Any]:
    num_layers = metadata.size("block_count")
    return {
        "hidden_act": "silu",
        "attention_bias": metadata.has_part("attn_q.bias"),
        "mlp_bias": metadata.has_part("ffn_gate.bias"),
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layers": [int((index + 1) % 4 != 0) for index in range(num_layers)],
        "layer_types": ["full_attention"] * num_layers,
    }


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    num_layers, rope = metadata.size("block_count"), rope_parameters(metadata)
    if rope["rope_type"] == "yarn":
        rope = {"beta_fast": 32.0, "beta_slow": 1.0, **rope, "truncate": False}
    layer_types = _layer_types(num_layers, 2)
    return {
        "hidden_act": "silu",
        "intermediate_size": metadata.size("expert_feed_forward_length"),
        "num_local_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "attention_bias": True,
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": layer_types,
        "rope_parameters": rope,
        "swiglu_limit": 7.0,
    }


def _glm4(metadata: Metadata) -> dict[str, Any]:
    return {"hidden_act": "silu", "attention_bias": metadata.has_part("attn_q.bias")}


_SOFT_CAPS = {"attn_logit_softcapping", "final_logit_softcapping"}
_WINDOW = "attention.sliding_window"
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", _llama, frozenset({_WINDOW})),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _qwen2),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _qwen3),
    "qwen2moe": Architecture(
        "qwen2_moe", "Qwen2MoeForCausalLM", _qwen2moe, frozenset({"expert_count"})
    ),
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", _qwen3moe, frozenset({"expert_count"})
    ),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", _gemma2, frozenset({*_SOFT_CAPS, _WINDOW})
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _gemma3,
        frozenset({"final_logit_softcapping", _WINDOW, "rope.freq_base_swa"}),
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _phi3, frozenset({_WINDOW}), "partly"),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", _olmo2),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", _smollm3),
    "gpt-oss": Architecture(
        "gpt_oss", "GptOssForCausalLM", _gpt_oss, frozenset({"expert_count", _WINDOW})
    ),
    "glm4": Architecture("glm4", "Glm4ForCausalLM", _glm4, rotation="partly"),
    **recurrent_config.ARCHITECTURES,
}
"""By ``general.architecture``."""
