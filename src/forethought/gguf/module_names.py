"""The modules of transformers' layers, and what GGUF files call them.

Tables alone: how a weight comes out of its tensor is in ``tensor_names``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ATTENTION = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
FEED_FORWARD = {
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
}
NEMOTRON_MLP = {"mixer.up_proj": "ffn_up", "mixer.down_proj": "ffn_down"}
_FUSED_MLP = {"mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_GEMMA_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OLMO_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GLM_NORMS = {
    "input_layernorm": "attn_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
_GPT_OSS_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
}
_FALCON_NORMS = {"input_layernorm": "attn_norm", "pre_ff_layernorm": "ffn_norm"}
_LLAMA = {**ATTENTION, **MLP, **_NORMS}
_MOE = {**ATTENTION, **_NORMS, "mlp.gate": "ffn_gate_inp"}
_SHARED_EXPERT = {
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
_QWEN_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
}
_QWEN_MOE = {**_QWEN_NORMS, **_SHARED_EXPERT, "mlp.gate": "ffn_gate_inp"}
_GATED_ATTENTION = {**ATTENTION, **_HEAD_NORMS}
_GATED_DELTA = {
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
_QWEN35_DELTA = {
    **_GATED_DELTA,
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
}
_LFM2 = {
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
}
_MAMBA2 = {
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
}
_BAMBA = {**_FALCON_NORMS, **FEED_FORWARD}
_GRANITE_EXPERTS = {
    "block_sparse_moe.router": "ffn_gate_inp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}
_GRANITE_MLP = {"shared_mlp.output_linear": "ffn_down"}
_LATENT = {"mixer.fc1_latent_proj": "ffn_latent_down", "mixer.fc2_latent_proj": "ffn_latent_up"}
_LAYERS: Mapping[str, Mapping[str, str]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, **_HEAD_NORMS},
    "qwen2_moe": {**_MOE, **_SHARED_EXPERT},
    "qwen3_moe": {**_MOE, **_HEAD_NORMS},
    "gemma2": {**ATTENTION, **MLP, **_GEMMA_NORMS},
    "gemma3_text": {**ATTENTION, **MLP, **_GEMMA_NORMS, **_HEAD_NORMS},
    "phi3": {
        "self_attn.qkv_proj": "attn_qkv",
        "self_attn.o_proj": "attn_output",
        **_FUSED_MLP,
        **_NORMS,
    },
    "olmo2": {**ATTENTION, **MLP, **_OLMO_NORMS, **_HEAD_NORMS},
    "smollm3": _LLAMA,
    "gpt_oss": {**ATTENTION, **_GPT_OSS_NORMS, "mlp.router": "ffn_gate_inp"},
    "glm4": {**ATTENTION, **_FUSED_MLP, **_GLM_NORMS},
    "falcon_h1": {**ATTENTION, **_MAMBA2, **_FALCON_NORMS, **FEED_FORWARD},
}
"""``model_type`` -> module of a layer -> its name in the file."""
_LAYERS_BY_TYPE: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "qwen3_next": {
        "full_attention": {**_QWEN_MOE, **_GATED_ATTENTION},
        "linear_attention": {
            **_QWEN_MOE,
            **_GATED_DELTA,
            "linear_attn.in_proj_ba": "ssm_ba",
        },
    },
    "qwen3_5_text": {
        "full_attention": {**_QWEN_NORMS, **MLP, **_GATED_ATTENTION},
        "linear_attention": {**_QWEN_NORMS, **MLP, **_QWEN35_DELTA},
    },
    "qwen3_5_moe_text": {
        "full_attention": {**_QWEN_MOE, **_GATED_ATTENTION},
        "linear_attention": {**_QWEN_MOE, **_QWEN35_DELTA},
    },
    "lfm2": {
        "full_attention": {
            **_LFM2,
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.out_proj": "attn_output",
            "self_attn.q_layernorm": "attn_q_norm",
            "self_attn.k_layernorm": "attn_k_norm",
        },
        "conv": {
            **_LFM2,
            "conv.conv": "shortconv.conv",
            "conv.in_proj": "shortconv.in_proj",
            "conv.out_proj": "shortconv.out_proj",
        },
    },
    "bamba": {"attention": {**_BAMBA, **ATTENTION}, "mamba": {**_BAMBA, **_MAMBA2}},
    "granitemoehybrid": {
        "attention": {**_NORMS, **ATTENTION},
        "mamba": {**_NORMS, **_MAMBA2},
    },
    "nemotron_h": {
        "attention": {
            "norm": "attn_norm",
            "mixer.q_proj": "attn_q",
            "mixer.k_proj": "attn_k",
            "mixer.v_proj": "attn_v",
            "mixer.o_proj": "attn_output",
        },
        "mamba": {
            "norm": "attn_norm",
            "mixer.in_proj": "ssm_in",
            "mixer.conv1d": "ssm_conv1d",
            "mixer.norm": "ssm_norm",
            "mixer.out_proj": "ssm_out",
        },
        "mlp": {"norm": "attn_norm", **NEMOTRON_MLP},
        "moe": {
            "norm": "attn_norm",
            "mixer.gate": "ffn_gate_inp",
            "mixer.shared_experts.up_proj": "ffn_up_shexp",
            "mixer.shared_experts.down_proj": "ffn_down_shexp",
        },
    },
}
"""``model_type`` -> type of layer -> module of a layer -> its name in the file."""
EMBEDDINGS = {"nemotron_h": "model.embeddings"}
"""``model_type`` -> the embeddings of tokens, where these are not ``model.embed_tokens``."""
NORMS_AT_THE_END = {
    "lfm2": ("model.embedding_norm", "token_embd_norm"),
    "bamba": ("model.final_layernorm", "output_norm"),
    "falcon_h1": ("model.final_layernorm", "output_norm"),
    "nemotron_h": ("model.norm_f", "output_norm"),
}
"""``model_type`` -> the norm before the output projection and its name in the file, where these are
not ``model.norm`` and ``output_norm``."""


def modules_of(config: Mapping[str, Any], index: int) -> Mapping[str, str]:
    """The modules of a layer that have a ``weight``, and their names in the file."""
    model_type = config["model_type"]
    if model_type == "falcon_h1" and not config["mamba_rms_norm"]:
        return {
            name: stored for name, stored in _LAYERS[model_type].items() if stored != "ssm_norm"
        }
    if model_type in _LAYERS:
        return _LAYERS[model_type]
    kind = _layer_type(config, index)
    modules = _LAYERS_BY_TYPE[model_type][kind]
    if model_type == "granitemoehybrid":
        return {**modules, **(_GRANITE_EXPERTS if config["num_local_experts"] else _GRANITE_MLP)}
    if kind == "moe" and config["moe_latent_size"]:
        return {**modules, **_LATENT}
    return modules


def _layer_type(config: Mapping[str, Any], index: int) -> str:
    if config["model_type"] == "bamba":
        return "attention" if index in config["attn_layer_indices"] else "mamba"
    types = config.get("layer_types") or config["layers_block_type"]
    return str(types[index])
