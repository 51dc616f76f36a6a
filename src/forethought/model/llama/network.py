"""Llama, Mistral, Qwen2 and Qwen3 as a stack of fused layers.

The weights are taken from the transformers module, layer by layer, so that no two copies of a model
are ever held. Cosines and sines come from the module's own rotary embedding, so every rope scaling
is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
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

from forethought.model.adapter import Adapter, layer_additions
from forethought.model.attention.base import ForwardPass
from forethought.model.batch import Batch
from forethought.model.device import owned
from forethought.model.hidden_states import FINAL
from forethought.model.llama.layers import (
    FusedLayer,
    Norm,
    fused_norm,
    own_projection,
    projection,
    rotary_table,
)
from forethought.model.quantization import QuantizedLinear
from forethought.model.token_adapters import LowRankProduct, PlacedAdapter

BATCH_INVARIANT_WIDTH = 1024  # largest width of a model with batch-invariant products
# Exactly these classes: a subclass may compute something else.
FAMILIES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


class FusedNetwork:
    """Token ids to logits; see :class:`~forethought.model.causal_lm.Network`."""

    def __init__(self, module: PreTrainedModel, max_positions: int) -> None:
        assert is_fusable(module)
        model, invariant = module.model, is_batch_invariant(module.config)
        self.is_batch_invariant = invariant
        is_tied = module.lm_head.weight is model.embed_tokens.weight
        self.embedding = owned(model.embed_tokens.weight)
        self.rotary = rotary_table(model.rotary_emb, max_positions, self.embedding)
        self.rotations = self.rotary[:, :, 0]
        self.layers: list[tuple[Norm, FusedLayer]] = []
        for index, layer in enumerate(model.layers):
            norm = fused_norm(layer.input_layernorm, batch_invariant=invariant)
            self.layers.append((norm, FusedLayer(layer, batch_invariant=invariant)))
            model.layers[index] = nn.Identity()  # frees the layer's own weights
        self.norm = fused_norm(model.norm, batch_invariant=invariant)
        tied = self.embedding if is_tied else None
        self.head = own_projection(module.lm_head, invariant, tied)
        del module.lm_head, model.embed_tokens

    @torch.inference_mode()
    def __call__(self, batch: Batch, forward_pass: ForwardPass) -> Tensor:
        """Logits ``[R, vocab]`` in the model's dtype."""
        x = self.run_layers(forward_pass)
        forward_pass.capture(len(self.layers), x)
        x = self.norm(x)
        forward_pass.capture(FINAL, x)
        return self.head(x if self._is_narrow(forward_pass) else x[batch.logit_index])

    @torch.inference_mode()
    def run_layers(self, forward_pass: ForwardPass) -> Tensor:
        """The last layer's output: ``[R, hidden]``, or ``[T, hidden]`` if all of it is captured."""
        x = self.embed(forward_pass.batch.token_ids)
        return self.decode(x, forward_pass, self._is_narrow(forward_pass))

    def _is_narrow(self, forward_pass: ForwardPass) -> bool:
        return forward_pass.layer_ids.isdisjoint((len(self.layers), FINAL))

    def decode(self, x: Tensor, forward_pass: ForwardPass, narrow: bool) -> Tensor:
        """Run the layers on x ``[T, hidden]``, the input of the first one.

        Returns the last layer's output ``[T, hidden]``; if ``narrow``, ``[R, hidden]`` of the
        tokens whose logits are computed.
        """
        batch = forward_pass.batch
        rotation = self.rotary[batch.positions].unbind(1)
        for index, (norm, layer) in enumerate(self.layers):
            forward_pass.capture(index, x)
            last = index == len(self.layers) - 1
            output_index = (
                batch.logit_index if narrow and last and len(batch.logit_index) < len(x) else None
            )
            x = layer(index, norm(x), x, rotation, forward_pass, output_index)
        return x

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 ``[...]`` -> ``[..., hidden]``."""
        return F.embedding(token_ids, self.embedding)

    def unembed(self, states: Tensor) -> Tensor:
        """Final-norm states ``[T, hidden]`` -> logits ``[T, vocab]``."""
        return self.head(states)

    def place(self, adapter: Adapter, linears: Mapping[str, tuple[int, int]]) -> PlacedAdapter:
        """An adapter by layer and merged product; see ``Network``."""
        dtype, device = self.embedding.dtype, self.embedding.device
        product = partial(projection, batch_invariant=self.is_batch_invariant)
        parts = {
            place: LowRankProduct.of(addition.to(device, dtype), product)
            for place, addition in layer_additions(adapter, linears).items()
        }
        return PlacedAdapter(adapter.name, adapter.digest, parts)


def is_fusable(module: PreTrainedModel) -> bool:
    """Whether the module is of a known family, with nothing unusual set. Its weights may be
    quantised, if those that are merged were quantised alike.
    """
    if type(module) not in FAMILIES or module.config.hidden_act != "silu":
        return False
    linears = [m for m in module.modules() if isinstance(m, nn.Linear | QuantizedLinear)]
    expected = 7 * module.config.num_hidden_layers + 1
    return (
        len(linears) == expected
        and all(_is_plain(linear, module.dtype) for linear in linears)
        and all(map(_merges, module.model.layers))
    )


def _is_plain(linear: nn.Module, dtype: torch.dtype) -> bool:
    """Whether it is exactly a linear of the network's dtype, or a quantised one."""
    return type(linear) in (nn.Linear, QuantizedLinear) and linear.weight.dtype == dtype


def _merges(layer: nn.Module) -> bool:
    """Whether query, key and value can become one product, and gate and up as well."""
    attention, mlp = layer.self_attn, layer.mlp
    return all(
        len({_kind(linear) for linear in group}) == 1
        for group in (
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (mlp.gate_proj, mlp.up_proj),
        )
    )


def _kind(linear: nn.Module) -> tuple[object, ...]:
    weight = linear.weight
    return (16,) if isinstance(weight, Tensor) else weight.kind


def is_batch_invariant(config: Any) -> bool:
    """Whether a model is so small that batch-invariant products cost little. Then prefix hits,
    batches and drafts change no token even in bf16 and fp16 on a CPU, where attention is
    batch-invariant, too (``sdpa.BATCH_INVARIANT_QUERIES``).
    """
    attention = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    return bool(
        max(config.hidden_size, config.intermediate_size, attention) <= BATCH_INVARIANT_WIDTH
    )
