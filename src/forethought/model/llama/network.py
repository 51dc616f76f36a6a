"""Llama, Mistral, Qwen2 and Qwen3 in few, large operations.

Per layer: one product for query, key and value, one rotation for query and key together, attention,
an output product that adds the residual, one product for gate and up, and a down product that adds
the residual. The weights are taken over from the transformers module, layer by layer, so that no
two copies of a model are ever held. Cosines and sines come from the module's own rotary embedding,
so every rope scaling stays right. The layer loop has no Python that depends on data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from forethought.model.attention.base import ForwardPass, Scoring
from forethought.model.batch import Batch
from forethought.model.causal_lm import FINAL
from forethought.model.llama.layers import (
    GatedActivation,
    Norm,
    Projection,
    gated_activation,
    projection,
)

BATCH_INVARIANT_WIDTH = 1024
# Exactly these classes: a subclass or a look-alike may compute something else.
FAMILIES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one decoder layer, merged.

    Attributes:
        attention_norm, feed_norm: weights ``[hidden]``.
        head_norm: weight ``[heads + kv_heads, head_dim]`` for queries and keys, or None.
        qkv: ``[hidden]`` -> queries, keys, values: ``[(heads + 2 kv_heads) * head_dim]``.
        out: ``[heads * head_dim]`` -> ``[hidden]``.
        gate: ``[hidden]`` -> ``[intermediate]``: ``silu(gate) * up``.
        down: ``[intermediate]`` -> ``[hidden]``.
    """

    attention_norm: Norm
    head_norm: Norm | None
    qkv: Projection
    out: Projection
    feed_norm: Norm
    gate: GatedActivation
    down: Projection


class FusedNetwork:
    """Token ids to logits; see :class:`~forethought.model.causal_lm.Network`."""

    def __init__(self, module: PreTrainedModel, max_positions: int) -> None:
        assert is_fusable(module)
        model, config = module.model, module.config
        attention = model.layers[0].self_attn
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.batch_invariant = is_batch_invariant(config)
        self.head_dim, self.scoring = attention.head_dim, Scoring(attention.scaling)
        self.embedding = model.embed_tokens.weight
        self.rotary = _rotary_table(model.rotary_emb, max_positions, self.embedding)
        self.layers: list[Layer] = []
        for index in range(len(model.layers)):
            self.layers.append(self._take_over(model.layers[index]))
            model.layers[index] = nn.Identity()  # frees the layer's own weights
        self.norm = self._norm(model.norm)
        self.head = projection(
            module.lm_head.weight, module.lm_head.bias, batch_invariant=self.batch_invariant
        )
        del module.lm_head

    def __call__(self, batch: Batch, forward_pass: ForwardPass) -> Tensor:
        """Logits ``[R, vocab]`` in the model's dtype."""
        size = len(self.layers)
        narrow = forward_pass.layer_ids.isdisjoint((size, FINAL))
        x = self.decode(self.embed(batch.token_ids), forward_pass, narrow)
        forward_pass.capture(size, x)
        x = self.norm(x)
        forward_pass.capture(FINAL, x)
        return self.head(x if narrow else x[batch.logit_index])

    def decode(self, x: Tensor, forward_pass: ForwardPass, narrow: bool) -> Tensor:
        """Through the layers.

        Args:
            x: ``[T, hidden]``, what enters the first one.
            forward_pass: over the batch of the T tokens.
            narrow: only the tokens whose logits are wanted have to leave the last one.

        Returns:
            What leaves the last one: ``[R, hidden]`` if narrow, else ``[T, hidden]``.
        """
        batch = forward_pass.batch
        cos, sin = self.rotary[batch.positions].unbind(1)
        for index, layer in enumerate(self.layers):
            forward_pass.capture(index, x)
            mixed = self._attend(index, layer, x, (cos, sin), forward_pass)
            if narrow and index == len(self.layers) - 1 and len(batch.logit_index) < len(x):
                # What follows concerns each token alone.
                mixed, x = mixed[batch.logit_index], x[batch.logit_index]
            x = layer.out.plus(mixed, x)
            x = layer.down.plus(layer.gate(layer.feed_norm(x)), x)
        return x

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 ``[...]`` -> ``[..., hidden]``."""
        return F.embedding(token_ids, self.embedding)

    def unembed(self, states: Tensor) -> Tensor:
        """States behind the final norm ``[T, hidden]`` -> logits ``[T, vocab]``."""
        return self.head(states)

    def _attend(
        self,
        index: int,
        layer: Layer,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        forward_pass: ForwardPass,
    ) -> Tensor:
        """x ``[T, hidden]`` -> ``[T, heads * head_dim]``."""
        cos, sin = rotation
        tokens = x.shape[0]
        qkv = layer.qkv(layer.attention_norm(x)).view(tokens, -1, self.head_dim)
        qk, v = qkv.split_with_sizes([self.heads + self.kv_heads, self.kv_heads], 1)
        if layer.head_norm is not None:
            qk = layer.head_norm(qk)
        qk = torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin)
        q, k = qk.split_with_sizes([self.heads, self.kv_heads], 1)
        return forward_pass.attend(index, q, k, v, self.scoring).view(tokens, -1)

    def _norm(self, norm: nn.Module) -> Norm:
        return Norm(norm.weight, norm.variance_epsilon, batch_invariant=self.batch_invariant)

    def _take_over(self, layer: nn.Module) -> Layer:
        attention, feed = layer.self_attn, layer.mlp
        head_norm = None
        if hasattr(attention, "q_norm"):
            head_norm = Norm(
                torch.cat(
                    [
                        attention.q_norm.weight.expand(self.heads, -1),
                        attention.k_norm.weight.expand(self.kv_heads, -1),
                    ]
                ),
                attention.q_norm.variance_epsilon,
                batch_invariant=self.batch_invariant,
            )
        return Layer(
            attention_norm=self._norm(layer.input_layernorm),
            head_norm=head_norm,
            qkv=projection(
                *_merged(attention.q_proj, attention.k_proj, attention.v_proj),
                batch_invariant=self.batch_invariant,
            ),
            out=projection(
                attention.o_proj.weight, attention.o_proj.bias, batch_invariant=self.batch_invariant
            ),
            feed_norm=self._norm(layer.post_attention_layernorm),
            gate=gated_activation(
                *_merged(feed.gate_proj, feed.up_proj), batch_invariant=self.batch_invariant
            ),
            down=projection(
                feed.down_proj.weight, feed.down_proj.bias, batch_invariant=self.batch_invariant
            ),
        )


def is_fusable(module: PreTrainedModel) -> bool:
    """Whether the module is of a known family, in full precision, with nothing unusual set."""
    if type(module) not in FAMILIES or module.config.hidden_act != "silu":
        return False
    linears = [m for m in module.modules() if isinstance(m, nn.Linear)]
    expected = 7 * module.config.num_hidden_layers + 1
    return len(linears) == expected and all(
        type(linear) is nn.Linear and linear.weight.dtype == module.dtype for linear in linears
    )


def is_batch_invariant(config: Any) -> bool:
    """Whether a model is so small that rounding a token the same in any company costs little.

    Then prefix hits, batches and drafts change no token even in bf16 and fp16 on a CPU, as long as
    attention keeps to its side of it (``sdpa_plan.EXACT_QUERIES``).
    """
    attention = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    return bool(
        max(config.hidden_size, config.intermediate_size, attention) <= BATCH_INVARIANT_WIDTH
    )


def _merged(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of one linear whose outputs are those of ``linears``, side by side."""
    weight = torch.cat([linear.weight for linear in linears])
    if all(linear.bias is None for linear in linears):
        return weight, None
    biases = [
        weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
        for linear in linears
    ]
    return weight, torch.cat(biases)


def _rotary_table(rotary: nn.Module, max_positions: int, like: Tensor) -> Tensor:
    """``[max_positions, 2, 1, head_dim]``: cosines and sines, the first half of the sines negated.

    With it, rotating is ``x * cos + roll(x, head_dim / 2) * sin``.
    """
    positions = torch.arange(max_positions, device=like.device)[None]
    cos, sin = rotary(like, positions)
    half = sin.shape[-1] // 2
    sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
    return torch.stack([cos[0], sin[0]], 1).unsqueeze(2)
