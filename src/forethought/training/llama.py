"""A small Llama in plain torch for training from scratch: the embedded reasoner and draft models.

It computes what ``transformers.LlamaForCausalLM`` computes with the weights that
:meth:`Llama.llama_state` exports (a test compares the two), with fewer and larger matrix products::

    x [R, W, hidden] -> attention_norm -> qkv (one product) -> attention -> attention_out -> + x
                     -> feed_norm -> gate_up (one product) -> silu(gate) * up -> down -> + x
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from forethought.errors import ModelError
from forethought.speculative.heads.layers import RmsNorm
from forethought.training.trainer import ParameterGroup, begin_with

_CONFIG_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
}
"""Fields of ``LlamaShape`` -> those of ``config.json``."""
_LAYER_NAMES = {
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention_out": ("self_attn.o_proj",),
    "feed_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Weights of a layer -> those of ``LlamaForCausalLM``, in this order along the first axis."""


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes; the names follow the Llama configuration."""

    vocab_size: int = 512
    hidden_size: int = 256
    intermediate_size: int = 640
    num_layers: int = 5
    num_heads: int = 4
    num_kv_heads: int = 2
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    max_positions: int = 1024

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @classmethod
    def of(cls, directory: Path) -> Self:
        """The sizes of a model that was trained here; ModelError if it has no ``config.json``."""
        try:
            config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
            return cls(**{name: config[key] for name, key in _CONFIG_NAMES.items()})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"cannot read the sizes of the model in {directory}",
                f"{type(error).__name__}: {error}",
                "Give the directory of a Llama that was trained here",
            ) from error


def rotary_tables(shape: LlamaShape, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0..length-1, each float32 ``[length, head_dim]``."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), shape.rope_theta**-half)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x ``[..., head_dim]``; cos and sin broadcast against it."""
    x0, x1 = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-x1, x0], dim=-1) * sin


class LlamaLayer(nn.Module):
    """One pre-norm decoder layer: grouped-query attention, then a gated feed-forward."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        self.attention_norm = RmsNorm(shape.hidden_size, eps=shape.norm_eps)
        self.qkv = nn.Linear(shape.hidden_size, width, bias=False)
        self.attention_out = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.feed_norm = RmsNorm(shape.hidden_size, eps=shape.norm_eps)
        self.gate_up = nn.Linear(shape.hidden_size, 2 * shape.intermediate_size, bias=False)
        self.down = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x ``[R, W, hidden]``, cos and sin ``[W, head_dim]`` -> ``[R, W, hidden]``."""
        shape, (rows, tokens, _) = self.shape, x.shape
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        packed = self.qkv(self.attention_norm(x)).view(rows, tokens, -1, shape.head_dim)
        packed = packed.transpose(1, 2)
        q = rotate(packed[:, :heads], cos, sin)
        k = rotate(packed[:, heads : heads + kv_heads], cos, sin)
        v = packed[:, heads + kv_heads :]
        group = heads // kv_heads
        mixed = F.scaled_dot_product_attention(
            q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), is_causal=True
        )
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(rows, tokens, -1))
        gate, up = self.gate_up(self.feed_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """A Llama with tied embeddings and random initial weights, in float32."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(shape) for _ in range(shape.num_layers))
        self.norm = RmsNorm(shape.hidden_size, eps=shape.norm_eps)
        cos, sin = rotary_tables(shape, shape.max_positions)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)
            if name.endswith(("attention_out.weight", "down.weight")):
                nn.init.zeros_(weight)

    def hidden(self, tokens: Tensor) -> Tensor:
        """int64 ids ``[R, W]`` -> states after the final norm ``[R, W, hidden]``."""
        x = self.embedding(tokens)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        cos = self.cos[: tokens.shape[1]].to(x.dtype)
        sin = self.sin[: tokens.shape[1]].to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 ids ``[R, W]`` -> logits ``[R, W, vocab]``."""
        return F.linear(self.hidden(tokens), self.embedding.weight)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats over targets int64 ``[R, W]``; -100 is left out."""
        logits = self(tokens).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)

    def llama_state(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        """The weights under the names of ``LlamaForCausalLM`` (tied embeddings: no ``lm_head``)."""
        shape, state = self.shape, {"model.embed_tokens.weight": self.embedding.weight}
        sizes = [n * shape.head_dim for n in (shape.num_heads, *2 * (shape.num_kv_heads,))]
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            q, k, v = layer.qkv.weight.split(sizes)
            gate, up = layer.gate_up.weight.chunk(2)
            state |= {
                prefix + "input_layernorm.weight": layer.attention_norm.weight,
                prefix + "self_attn.q_proj.weight": q,
                prefix + "self_attn.k_proj.weight": k,
                prefix + "self_attn.v_proj.weight": v,
                prefix + "self_attn.o_proj.weight": layer.attention_out.weight,
                prefix + "post_attention_layernorm.weight": layer.feed_norm.weight,
                prefix + "mlp.gate_proj.weight": gate,
                prefix + "mlp.up_proj.weight": up,
                prefix + "mlp.down_proj.weight": layer.down.weight,
            }
        state["model.norm.weight"] = self.norm.weight
        return {name: w.detach().to(dtype).contiguous().clone() for name, w in state.items()}

    @classmethod
    def of(cls, directory: Path) -> Self:
        """The network that :meth:`save` wrote; raises ModelError if there is none."""
        network = cls(LlamaShape.of(directory))
        network.load(directory)
        return network

    def load(self, directory: Path) -> None:
        """Take the weights that :meth:`save` wrote, which bf16 has rounded.

        Raises ModelError if they are missing or of another shape.
        """
        try:
            saved = load_file(directory / "model.safetensors")
            state = {"embedding.weight": saved["model.embed_tokens.weight"]}
            state["norm.weight"] = saved["model.norm.weight"]
            for index in range(self.shape.num_layers):
                names, prefix = _LAYER_NAMES, f"model.layers.{index}."
                for name, parts in names.items():
                    weights = [saved[f"{prefix}{part}.weight"] for part in parts]
                    state[f"layers.{index}.{name}.weight"] = torch.cat(weights)
        except (OSError, KeyError, SafetensorError) as error:
            raise ModelError(
                f"cannot read the weights in {directory}",
                f"{type(error).__name__}: {error}",
                "Give the directory of a Llama that was trained here",
            ) from error
        begin_with(self, state, directory)

    def llama_config(self, eos_token_id: int, dtype: str = "bfloat16") -> dict[str, object]:
        """The ``config.json`` with which transformers loads :meth:`llama_state`.

        ``eos_token_id`` pads, too. ``dtype`` is what the model is to run in, however it is stored.
        """
        shape = self.shape
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": shape.vocab_size,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": shape.max_positions,
            "rms_norm_eps": shape.norm_eps,
            "rope_theta": shape.rope_theta,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": eos_token_id,
            "pad_token_id": eos_token_id,
            "dtype": dtype,
        }

    def save(self, directory: Path, eos_token_id: int, dtype: str = "bfloat16") -> None:
        """Write ``config.json``, and the weights in bf16; for the rest see :meth:`llama_config`."""
        directory.mkdir(parents=True, exist_ok=True)
        config = self.llama_config(eos_token_id, dtype)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        weights = directory / "model.safetensors"
        save_file(self.llama_state(), weights, metadata={"format": "pt"})
        weights.chmod(0o644)  # safetensors makes files that only their owner can read


def muon_groups(network: Llama, weight_decay: float | None = None) -> list[ParameterGroup]:
    """Muon for the matrices of the layers, AdamW without weight decay for embedding and norms."""
    matrices = [weight for weight in network.layers.parameters() if weight.ndim == 2]
    matrix_ids = {id(weight) for weight in matrices}
    others = [weight for weight in network.parameters() if id(weight) not in matrix_ids]
    return [
        ParameterGroup(others, weight_decay=0.0),
        ParameterGroup(matrices, muon=True, weight_decay=weight_decay),
    ]
