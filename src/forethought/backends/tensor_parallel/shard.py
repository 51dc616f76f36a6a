"""The slice of a model's weights that one rank of tensor parallelism holds.

As in Megatron-LM (Shoeybi et al., 2019, section 3): rank r of n has the r-th part of the query
heads, of the KV heads and of the MLP's inner width. Query, key, value, gate and up projections are
cut by their outputs, so that a rank computes its part from the whole hidden state; output and down
projections are cut by their inputs, and what they give is the sum over the ranks::

    hidden [T, H] -> q, k, v [T, heads / n, head_dim] -> attention -> out [T, H]  --sum--> hidden
    hidden [T, H] -> gate, up [T, inner / n]                       -> down [T, H] --sum--> hidden

Embeddings, norms and the output projection are whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forethought.model.attention.layer_profile import LayerProfile
from forethought.model.llama.network import FAMILIES

_NAMES = {
    "num_attention_heads": "query heads",
    "num_key_value_heads": "KV heads",
    "intermediate_size": "as the MLP's inner width",
}
"""What every rank has an equal part of, by its name in the configuration."""


def refusal(config: Any, size: int) -> str | None:
    """Why a config's model cannot be cut into ``size`` shards; None: it can, by the config."""
    if type(config) not in {family.config_class for family in FAMILIES}:
        families = ", ".join(family.__name__.removesuffix("ForCausalLM") for family in FAMILIES)
        return f"a {config.model_type} model has no fused forward; {families} have one"
    for name, meaning in _NAMES.items():
        number = getattr(config, name)
        if number % size:
            return f"it has {number} {meaning}, which {size} ranks cannot have equal parts of"
    return None


@dataclass(frozen=True, slots=True)
class Shard:
    """One of ``size`` slices: that of ``rank``, from 0 on."""

    rank: int
    size: int

    def device(self, device_type: str) -> torch.device:
        """The rank's: a GPU for each, or the CPU for all."""
        return torch.device("cuda", self.rank) if device_type == "cuda" else torch.device("cpu")

    def profiles(self, layers: Sequence[LayerProfile]) -> tuple[LayerProfile, ...]:
        """What the slices of layers need of attention."""
        return tuple(
            replace(
                layer,
                heads=layer.heads // self.size,
                shape=replace(layer.shape, kv_heads=layer.shape.kv_heads // self.size),
            )
            for layer in layers
        )

    def cut(self, module: PreTrainedModel) -> None:
        """Replace the linears of a module that ``is_fusable`` by their slices."""
        for layer in module.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for owner, name in (
                (attention, "q_proj"),
                (attention, "k_proj"),
                (attention, "v_proj"),
                (mlp, "gate_proj"),
                (mlp, "up_proj"),
            ):
                setattr(owner, name, self._by_outputs(getattr(owner, name)))
            attention.o_proj = self._by_inputs(attention.o_proj)
            mlp.down_proj = self._by_inputs(mlp.down_proj)

    def _by_outputs(self, linear: nn.Linear) -> nn.Linear:
        bias = None if linear.bias is None else self._copy(linear.bias, 0)
        return _linear(self._copy(linear.weight, 0), bias)

    def _by_inputs(self, linear: nn.Linear) -> nn.Linear:
        """One rank adds the bias: what the ranks give is summed."""
        bias = linear.bias if self.rank == 0 else None
        return _linear(self._copy(linear.weight, 1), bias)

    def _copy(self, weight: Tensor, dim: int) -> Tensor:
        return self.part(weight.detach(), dim).clone(memory_format=torch.contiguous_format)

    def part(self, whole: Tensor, dim: int) -> Tensor:
        """A view of this rank's part of a dimension."""
        width = whole.shape[dim] // self.size
        return whole.narrow(dim, self.rank * width, width)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    num_outputs, num_inputs = weight.shape
    linear = nn.Linear(num_inputs, num_outputs, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear
