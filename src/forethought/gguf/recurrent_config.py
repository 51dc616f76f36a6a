"""The settings of architectures with recurrent layers (see ``model_config``).

Which layers are recurrent is told by a period, by an array of flags, or by arrays of sizes, one for
each layer, in which 0 says that a layer has no such part.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from forethought.gguf.architecture import Architecture, expert_sizes, shared_expert_size
from forethought.gguf.metadata import Metadata
from forethought.gguf.rope import head_size, rope_fields

logger = logging.getLogger(__name__)

_GRANITE_SCALES = ("embedding_scale", "residual_scale", "logit_scale", "attention.scale")


def _gated_delta(metadata: Metadata) -> dict[str, Any]:
    """What models of Qwen with gated delta rules have in common."""
    num_heads, inner = metadata.size("ssm.time_step_rank"), metadata.size("ssm.inner_size")
    num_groups = metadata.size("ssm.group_count")
    _check_multiple(metadata, "ssm.inner_size", num_heads)
    _check_multiple(metadata, "ssm.time_step_rank", num_groups)
    layer_types = _layer_types(metadata)
    return {
        "num_hidden_layers": len(layer_types),
        "hidden_act": "silu",
        "attention_bias": False,
        "linear_num_key_heads": num_groups,
        "linear_num_value_heads": num_heads,
        "linear_key_head_dim": metadata.size("ssm.state_size"),
        "linear_value_head_dim": inner // num_heads,
        "linear_conv_kernel_dim": metadata.size("ssm.conv_kernel"),
        "layer_types": layer_types,
    }


def _check_multiple(metadata: Metadata, key: str, divisor: int) -> None:
    size = metadata.size(key)
    if size % divisor:
        raise metadata.refused(metadata.full_key(key), size, f"a multiple of {divisor}")


def _layer_types(metadata: Metadata) -> list[str]:
    """Of all layers but those for multi-token prediction, which follow the others."""
    num_layers, key = metadata.size("block_count"), metadata.full_key("nextn_predict_layers")
    num_drafting = metadata.optional_size("nextn_predict_layers") or 0
    if num_drafting >= num_layers:
        raise metadata.refused(key, num_drafting, f"a number below {num_layers}")
    if num_drafting:
        path = metadata.file.path
        logger.warning(
            "%d layers of %s for multi-token prediction are left out", num_drafting, path
        )
    period = metadata.size("full_attention_interval", 4)
    is_recurrent = [(index + 1) % period != 0 for index in range(num_layers)]
    if metadata.get("attention.recurrent_layers") is not None:
        is_recurrent = [bool(flag) for flag in metadata.layer_sizes("attention.recurrent_layers")]
    kinds = ["linear_attention" if recurrent else "full_attention" for recurrent in is_recurrent]
    return kinds[: num_layers - num_drafting]


def _qwen3next(metadata: Metadata) -> dict[str, Any]:
    norm = metadata.flag(metadata.full_key("expert_weights_norm"))
    return {
        **_gated_delta(metadata),
        **expert_sizes(metadata),
        **shared_expert_size(metadata),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": norm is not False,
    }


def _qwen35moe(metadata: Metadata) -> dict[str, Any]:
    key = metadata.full_key("expert_weights_norm")
    if metadata.flag(key) is False:
        raise metadata.unsupported(f"its {key} is False, and transformers' module always divides")
    return {**_gated_delta(metadata), **expert_sizes(metadata), **shared_expert_size(metadata)}


def _lfm2(metadata: Metadata) -> dict[str, Any]:
    kv_heads = metadata.layer_sizes("attention.head_count_kv")
    return {
        "norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": metadata.size("shortconv.l_cache"),
        "conv_bias": metadata.has_part("shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["full_attention" if number else "conv" for number in kv_heads],
    }


class _Mamba2(NamedTuple):
    """The sizes of layers of Mamba-2."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel_size: int
    has_conv_bias: bool

    @classmethod
    def of(cls, metadata: Metadata) -> _Mamba2:
        num_heads, num_groups = (
            metadata.size("ssm.time_step_rank"),
            metadata.size("ssm.group_count"),
        )
        _check_multiple(metadata, "ssm.inner_size", num_heads)
        _check_multiple(metadata, "ssm.time_step_rank", num_groups)
        return cls(
            num_heads,
            metadata.size("ssm.inner_size") // num_heads,
            num_groups,
            metadata.size("ssm.state_size"),
            metadata.size("ssm.conv_kernel"),
            metadata.has_part("ssm_conv1d.bias"),
        )

    def fields(self) -> dict[str, Any]:
        """As configurations of Granite, Bamba and Falcon-H1 name them."""
        return {
            "mamba_n_heads": self.num_heads,
            "mamba_d_head": self.head_dim,
            "mamba_n_groups": self.num_groups,
            "mamba_d_state": self.state_size,
            "mamba_d_conv": self.kernel_size,
            "mamba_conv_bias": self.has_conv_bias,
            "mamba_proj_bias": False,
        }


def _granite_hybrid(metadata: Metadata) -> dict[str, Any]:
    """Granite 4, or Bamba, which files call the same: it has rotary embeddings, and neither experts
    nor scales.
    """
    kv_heads = metadata.layer_sizes("attention.head_count_kv")
    mamba, hidden_size = _Mamba2.of(metadata), metadata.size("embedding_length")
    _check_multiple(metadata, "ssm.inner_size", hidden_size)
    fields = {
        **mamba.fields(),
        "mamba_expand": mamba.num_heads * mamba.head_dim // hidden_size,
        "hidden_act": "silu",
        "attention_bias": metadata.has_part("attn_q.bias"),
    }
    is_rotated = metadata.flag(metadata.full_key("rope.scaling.finetuned")) is not False
    if is_rotated and not any(map(metadata.get, (*_GRANITE_SCALES, "expert_count"))):
        attention = [index for index, number in enumerate(kv_heads) if number]
        return {**fields, **_bamba(metadata), "attn_layer_indices": attention}
    return {
        **fields,
        **_granite(metadata),
        **(rope_fields(metadata, "whole") if is_rotated else {}),
        "position_embedding_type": "rope" if is_rotated else None,
        "layer_types": ["attention" if number else "mamba" for number in kv_heads],
    }


def _bamba(metadata: Metadata) -> dict[str, Any]:
    return {
        "model_type": "bamba",
        "architectures": ["BambaForCausalLM"],
        "mlp_bias": metadata.has_part("ffn_gate.bias"),
        **rope_fields(metadata, "partly"),
    }


def _granite(metadata: Metadata) -> dict[str, Any]:
    num_experts = metadata.optional_size("expert_count") or 0
    width = "expert_shared_feed_forward_length" if num_experts else "feed_forward_length"
    scale = metadata.optional_number("attention.scale")
    experts = {"num_experts_per_tok": metadata.size("expert_used_count")} if num_experts else {}
    return {
        "num_local_experts": num_experts,
        **experts,
        "shared_intermediate_size": metadata.size(width),
        "embedding_multiplier": metadata.optional_number("embedding_scale") or 1.0,
        "residual_multiplier": metadata.optional_number("residual_scale") or 1.0,
        "logits_scaling": metadata.optional_number("logit_scale") or 1.0,
        "attention_multiplier": scale or head_size(metadata) ** -0.5,
    }


def _falcon_h1(metadata: Metadata) -> dict[str, Any]:
    """Its multipliers are in the weights of a file, and 1 here. A head that is tied to embeddings
    would have its own, which is lost.
    """
    if _multipliers(metadata):
        why = f"its {_multipliers(metadata)[0]:.60} says that multipliers are not in its weights"
        raise metadata.unsupported(why, "Get a file of a converter of llama.cpp itself")
    if "output.weight" not in metadata.file.tensors:
        raise metadata.unsupported(
            "its output projection is its embeddings (it lacks output.weight), which are stored "
            "times embedding_multiplier: lm_head_multiplier, which scales the logits, is not in it"
        )
    mamba = _Mamba2.of(metadata)
    return {
        **mamba.fields(),
        "mamba_d_ssm": mamba.num_heads * mamba.head_dim,
        "mamba_rms_norm": metadata.has_part("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "hidden_act": "silu",
    }


def _multipliers(metadata: Metadata) -> list[str]:
    """The keys that the fork of llama.cpp had which Falcon-H1 was first converted with."""
    return [key for key in metadata.file.metadata if key.endswith(("_multiplier", "has_mup"))]


def _nemotron_h(metadata: Metadata) -> dict[str, Any]:
    """Each layer is one of Mamba-2, attention or feed-forward; heads know no positions."""
    mamba, num_experts = _Mamba2.of(metadata), metadata.optional_size("expert_count")
    sizes = zip(
        metadata.layer_sizes("attention.head_count_kv"),
        metadata.layer_sizes("feed_forward_length"),
        strict=True,
    )
    feed_forward = "moe" if num_experts else "mlp"
    return {
        "layers_block_type": [
            feed_forward if width else "attention" if kv_heads else "mamba"
            for kv_heads, width in sizes
        ],
        "mamba_num_heads": mamba.num_heads,
        "mamba_head_dim": mamba.head_dim,
        "n_groups": mamba.num_groups,
        "ssm_state_size": mamba.state_size,
        "conv_kernel": mamba.kernel_size,
        "use_conv_bias": mamba.has_conv_bias,
        "layer_norm_epsilon": metadata.number("attention.layer_norm_rms_epsilon"),
        "mlp_hidden_act": "relu2",
        "mlp_bias": metadata.has_part("ffn_up.bias"),
        **(_nemotron_experts(metadata) if num_experts else {}),
    }


def _nemotron_experts(metadata: Metadata) -> dict[str, Any]:
    norm = metadata.flag(metadata.full_key("expert_weights_norm"))
    return {
        "n_routed_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "n_shared_experts": metadata.size("expert_shared_count", 1),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": metadata.size("expert_shared_feed_forward_length"),
        "moe_latent_size": metadata.optional_size("moe_latent_size"),
        "routed_scaling_factor": metadata.optional_number("expert_weights_scale") or 1.0,
        "norm_topk_prob": bool(norm),
        "n_group": 1,
        "topk_group": 1,
    }


_DRAFTING = "nextn_predict_layers"
_QWEN35 = frozenset({_DRAFTING, "rope.dimension_sections"})
"""The sections are those of images and text; of text alone all positions are the same."""
_EXPERTS = frozenset({"expert_count"})
_NEMOTRON_EXPERTS = frozenset({"expert_count", "expert_weights_scale"})
_NEMOTRON = "NemotronHForCausalLM"
ARCHITECTURES: Mapping[str, Architecture] = {
    "qwen3next": Architecture(
        "qwen3_next", "Qwen3NextForCausalLM", _qwen3next, _EXPERTS | {_DRAFTING}, "partly"
    ),
    "qwen35": Architecture("qwen3_5_text", "Qwen3_5ForCausalLM", _gated_delta, _QWEN35, "partly"),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _qwen35moe, _QWEN35 | _EXPERTS, "partly"
    ),
    "lfm2": Architecture("lfm2", "Lfm2ForCausalLM", _lfm2),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        _granite_hybrid,
        frozenset({*_GRANITE_SCALES, "expert_count"}),
        None,
    ),
    "falcon-h1": Architecture("falcon_h1", "FalconH1ForCausalLM", _falcon_h1),
    "nemotron_h": Architecture("nemotron_h", _NEMOTRON, _nemotron_h, rotation=None),
    "nemotron_h_moe": Architecture("nemotron_h", _NEMOTRON, _nemotron_h, _NEMOTRON_EXPERTS, None),
}
"""By ``general.architecture``."""
