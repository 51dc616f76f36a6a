"""The reasoner's network in plain torch: a Llama whose projections are fused, for fast training.

It computes exactly what ``transformers.LlamaForCausalLM`` computes with the weights that
:meth:`Network.llama_state` exports (a test holds the two together); query, key and value share one
matrix product, gate and up another. It knows nothing about problems, tokenizers or optimisers.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class NetworkShape:
    """Sizes of a network; the names follow the Llama configuration."""

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


def rotary_tables(shape: NetworkShape, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions 0..length-1, each float32 of shape (length, head_dim)."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), shape.rope_theta**-half)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to x of shape (rows, heads, tokens, head_dim)."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class Norm(nn.RMSNorm):
    """RMSNorm whose weight follows the dtype of its input, as autocast does for products."""

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., hidden) -> the same shape and dtype."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Layer(nn.Module):
    """One pre-norm decoder layer: grouped-query attention, then a gated feed-forward."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        self.attention_norm = Norm(shape.hidden_size, eps=shape.norm_eps)
        self.qkv = nn.Linear(shape.hidden_size, width, bias=False)
        self.attention_out = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.feed_norm = Norm(shape.hidden_size, eps=shape.norm_eps)
        self.gate_up = nn.Linear(shape.hidden_size, 2 * shape.intermediate_size, bias=False)
        self.down = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: (rows, tokens, hidden) -> the same shape."""
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


class Network(nn.Module):
    """Token ids (rows, tokens) -> hidden states; the output head is the embedding, transposed."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = Norm(shape.hidden_size, eps=shape.norm_eps)
        cos, sin = rotary_tables(shape, shape.max_positions)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)
            if name.endswith(("attention_out.weight", "down.weight")):
                nn.init.zeros_(weight)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Final normalised states, (rows, tokens, hidden), for int64 ids (rows, tokens)."""
        x = self.embedding(tokens)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        cos = self.cos[: tokens.shape[1]].to(x.dtype)
        sin = self.sin[: tokens.shape[1]].to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (rows, tokens, vocab) for int64 ids (rows, tokens)."""
        return F.linear(self.hidden(tokens), self.embedding.weight)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats over targets (rows, tokens); a target of -100 is left out."""
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

    def llama_config(self, eos_token_id: int) -> dict[str, object]:
        """The ``config.json`` with which transformers loads :meth:`llama_state`."""
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
            "dtype": "bfloat16",
        }
