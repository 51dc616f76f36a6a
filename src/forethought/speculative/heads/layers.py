"""Layers of draft heads, and the configs of published heads.

Medusa's and ReDrafter's residual block; and EAGLE's decoder layer, Llama's without its first norm,
in two implementations: :class:`LlamaLayer` has the weights under their published names and is used
in training, :class:`DraftLayer` computes the same over pages in few, large operations. Configs with
any other layer are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from forethought.kv.storage import LayerShape
from forethought.model.attention.base import ForwardPass
from forethought.model.llama.layers import FusedLayer, rotary_table
from forethought.speculative.heads.checkpoint import OTHER_KIND, refused


class ResidualBlock(nn.Module):
    """``x + silu(W x + b)``; new ones pass x on as it is."""

    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)
        for weight in self.linear.parameters():
            nn.init.zeros_(weight)

    def forward(self, x: Tensor) -> Tensor:
        """x ``[..., width]`` -> the same shape."""
        return x + F.silu(self.linear(x))


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries ``[..., heads, head_dim]``, keys and values ``[..., kv_heads, head_dim]``, none of them
rotated yet -> what each query has read, ``[..., heads, head_dim]``."""


class Linear(nn.Linear):
    """A product whose weights follow the dtype of its input: no activation is converted."""

    def forward(self, x: Tensor) -> Tensor:
        """x ``[..., in]`` -> ``[..., out]`` in the same dtype."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class Attention(nn.Module):
    """The four projections; how to attend is an argument.

    Args:
        config: sizes and biases.
        width: of its input.
    """

    def __init__(self, config: LlamaConfig, width: int) -> None:
        super().__init__()
        self.head_dim, bias = head_dim(config), config.attention_bias
        self.scaling = self.head_dim**-0.5
        queries = config.num_attention_heads * self.head_dim
        keys = config.num_key_value_heads * self.head_dim
        self.q_proj = Linear(width, queries, bias=bias)
        self.k_proj = Linear(width, keys, bias=bias)
        self.v_proj = Linear(width, keys, bias=bias)
        self.o_proj = Linear(queries, config.hidden_size, bias=bias)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """x ``[..., width]`` -> ``[..., hidden]``."""
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (
            projection(x).view(shape) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(attend(q, k, v).flatten(-2))


class FeedForward(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, inner, bias=bias)
        self.up_proj = Linear(hidden, inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x ``[..., hidden]`` -> the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RmsNorm(nn.RMSNorm):
    """RMSNorm whose weight follows the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """x ``[..., width]`` -> the same shape and dtype."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class LlamaLayer(nn.Module):
    """A layer without its first norm: ``residual + attention(x)``, then the feed-forward.

    Args:
        config: sizes, biases, epsilon.
        width: of the input of its attention.
    """

    def __init__(self, config: LlamaConfig, width: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, width)
        self.mlp = FeedForward(config)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, residual: Tensor, attend: Attend) -> Tensor:
        """x ``[..., width]``, residual ``[..., hidden]`` -> ``[..., hidden]``."""
        x = residual + self.self_attn(x, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftLayer:
    """A :class:`LlamaLayer` over pages.

    Args:
        layer: its weights are taken, in their dtype and on their device.
        config: the layer's.
        max_positions: tokens that a sequence may have.
    """

    def __init__(self, layer: LlamaLayer, config: LlamaConfig, max_positions: int) -> None:
        self._layer, self.shape = FusedLayer(layer), layer_shape(config)
        weight = layer.self_attn.o_proj.weight
        self._rotary = rotary_table(
            LlamaRotaryEmbedding(config).to(weight.device), max_positions, weight
        )

    def __call__(self, x: Tensor, residual: Tensor, forward_pass: ForwardPass) -> Tensor:
        """x ``[T, width]``, residual ``[T, hidden]`` -> ``[R, hidden]``.

        R are the tokens of the pass's batch whose logits are wanted. Layer 0 of its storage.
        """
        batch = forward_pass.batch
        rotation = self._rotary[batch.positions].unbind(1)
        index = batch.logit_index if len(batch.logit_index) < len(x) else None
        return self._layer(0, x, residual, rotation, forward_pass, index)


def layer_shape(config: LlamaConfig) -> LayerShape:
    """The keys and values that its attention stores per token."""
    width = head_dim(config)
    return LayerShape(config.num_key_value_heads, width, width)


def native_rotary(config: LlamaConfig, max_positions: int) -> Tensor:
    """Float32 ``[positions, 2, head_dim]``: cosines and signed sines, for a native module."""
    like = torch.empty(0, dtype=torch.float32)
    return rotary_table(LlamaRotaryEmbedding(config), max_positions, like)[:, :, 0].contiguous()


def head_dim(config: LlamaConfig) -> int:
    """Width of one attention head."""
    stated = getattr(config, "head_dim", None)
    return int(stated or config.hidden_size // config.num_attention_heads)


def rotary_tables(config: LlamaConfig, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[length, head_dim]`` of the positions from 0, whatever the scaling."""
    rotary = LlamaRotaryEmbedding(config).to(like.device)
    with torch.no_grad():
        cos, sin = rotary(like, torch.arange(length, device=like.device)[None])
    return cos[0], sin[0]


_ONLY = {"model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 1}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
_MORE_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps")


def llama_config(directory: Path, config: dict[str, Any]) -> LlamaConfig:
    """Read it from a head's config: at the top, or under ``transformer_layer_config``.

    Raises:
        ModelError: a size is missing, or the layer is none of Llama's.
    """
    fields = dict(config.get("transformer_layer_config") or config)
    for name, value in _ONLY.items():
        if fields.get(name, value) != value:
            raise refused(
                directory,
                f"its layer has {name}={fields[name]!r}, and only {value!r} is supported",
                "Choose a head with one Llama layer",
            )
    missing = [name for name in _SIZES if name not in fields]
    if missing:
        raise refused(directory, f"its config lacks {', '.join(missing)}", OTHER_KIND)
    windows = set(fields.get("layer_types") or ()) - {"full_attention"}
    if windows or fields.get("use_sliding_window"):
        raise refused(directory, "its layer attends through a sliding window")
    names = set(LlamaConfig().to_dict()) | {"rope_theta", "rope_scaling"}
    return LlamaConfig(**{name: fields[name] for name in fields if name in names})


def layer_fields(config: LlamaConfig) -> dict[str, Any]:
    """The fields that :func:`llama_config`, and other libraries, read as a Llama's config."""
    fields = {name: getattr(config, name) for name in (*_SIZES, *_MORE_SIZES)}
    rope = dict(config.rope_parameters or {})
    theta = rope.pop("rope_theta", 10_000.0)
    scaling = None if rope.get("rope_type", "default") == "default" else rope
    return {
        "model_type": "llama",
        **fields,
        **_ONLY,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
    }
