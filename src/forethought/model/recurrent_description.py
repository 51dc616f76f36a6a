"""What a recurrent layer of a module of transformers computes, by its attributes: the gated delta
rule, Mamba-2, Mamba and short convolutions. Backends compute such layers from these descriptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from forethought.kv.recurrent import StateView

DELTA_RULE, STATE_SPACE, SHORT_CONVOLUTION, SELECTIVE_SCAN = range(4)
"""``enum RecurrentKind`` in structures.h."""
MAX_KERNEL = 16
"""Taps of a convolution; as in structures.h."""
CONV, RECURRENT = ("conv", 0), ("recurrent", 0)
"""Keys of the parts of a layer's state."""


@dataclass(slots=True)
class RecurrentDescription:
    """The linears, convolution and parameters of a layer. ``fields``, ``integers`` and ``floats``
    have the names of the fields of ``RecurrentStruct`` in structures.h, which explains them.

    Attributes:
        entering: names of the linears whose outputs are the projections, in order.
        conv: the convolution over the tokens.
        fields: sizes, flags and constants.
        integers: tables of columns of the projections, which become int32.
        floats: tables of weights, which become float32.
        state_shape: of its recurrent state, ``[1, ...]``; None: it has none.
        sources: by the name of a linear whose inputs are projections, the first column of these.
        late: names of linears, the last ones, that read the output of the convolution.
        out: name of the output projection.
    """

    entering: tuple[str, ...]
    conv: nn.Conv1d
    fields: dict[str, Any]
    integers: dict[str, Tensor] = field(default_factory=dict)
    floats: dict[str, Tensor | None] = field(default_factory=dict)
    state_shape: tuple[int, ...] | None = None
    sources: dict[str, int] = field(default_factory=dict)
    late: tuple[str, ...] = ()
    out: str = "out_proj"

    def linears(self, part: nn.Module) -> dict[str, Any]:
        """The input and output projections of the layer ``part``, by name."""
        return {name: part.get_submodule(name) for name in (*self.entering, self.out)}

    def multiply(self, part: nn.Module, names: Sequence[str], x: Tensor, projected: Tensor) -> None:
        """Write the outputs of the linears ``names``, for x ``[1, T, hidden]``, to their columns of
        ``projected``, float32 ``[T, width]``.
        """
        linears, at = self.linears(part), 0
        for name in self.entering:
            linear = linears[name]
            if name in names:
                inputs, source = x, self.sources.get(name)
                if source is not None:
                    columns = projected[:, source : source + linear.in_features]
                    inputs = columns.to(x.dtype)[None]
                projected[:, at : at + linear.out_features] = linear(inputs)[0]
            at += linear.out_features

    def views(self, offset: int) -> dict[tuple[str, int], StateView]:
        """Where the parts of the layer's state are in a packed state, from float ``offset`` on, in
        the shapes of the module.
        """
        channels, [kernel] = self.conv.in_channels, self.conv.kernel_size
        size = kernel * channels
        views = {CONV: StateView((1, channels, kernel), (size, 1, channels), offset)}
        if self.state_shape is not None:
            strides = torch.empty(self.state_shape, device="meta").stride()
            views[RECURRENT] = StateView(self.state_shape, strides, offset + size)
        return views


def describe(part: nn.Module) -> RecurrentDescription | None:
    """The description of a recurrent layer; None: its kind or sizes are not supported."""
    for describe_kind in (_delta_rule, _state_space, _short_convolution, _selective_scan):
        try:
            description = describe_kind(part)
        except AttributeError:
            continue
        if _is_possible(part, description):
            return description
    return None


def _is_possible(part: nn.Module, description: RecurrentDescription) -> bool:
    conv, linears = description.conv, description.linears(part)
    widths = [linears[name].out_features for name in description.entering]
    return (
        conv.kernel_size[0] <= MAX_KERNEL
        and conv.groups == conv.in_channels == conv.out_channels
        and sum(widths) + description.fields.get("value_dim", 0) * bool(description.late)
        == description.fields["width"]
        and getattr(part, "activation", "silu") in ("silu", "swish")
    )


def _delta_rule(part: Any) -> RecurrentDescription:
    """Of Qwen3-Next and Qwen3.5, OLMo-Hybrid, and Kimi Linear, whose keys have a decay each."""
    if hasattr(part, "forget_gate"):
        return _delta_rule_of_keys(part)
    heads, groups, keys, values = (
        part.num_v_heads,
        part.num_k_heads,
        part.head_k_dim,
        part.head_v_dim,
    )
    ratio = heads // groups
    sizes = {"q": keys, "k": keys, "v": ratio * values, "z": ratio * values, "b": ratio, "a": ratio}
    columns: dict[str, list[int]] = {name: [] for name in sizes}
    if hasattr(part, "in_proj_qkvz"):  # grouped by key head
        entering: tuple[str, ...] = ("in_proj_qkvz", "in_proj_ba")
        at = 0
        for linear in ("qkvz", "ba"):
            for _ in range(groups):
                for name in linear:
                    columns[name] += range(at, at + sizes[name])
                    at += sizes[name]
    else:
        entering = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        if hasattr(part, "q_proj"):
            entering = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
        at = 0
        for name, size in sizes.items():
            columns[name] = [*range(at, at + groups * size)]
            at += groups * size
    norm, out = (part.norm, "out_proj") if hasattr(part, "norm") else (part.o_norm, "o_proj")
    return RecurrentDescription(
        entering=entering,
        conv=part.conv1d,
        fields={
            "kind": DELTA_RULE,
            "width": at,
            "num_heads": heads,
            "num_groups": groups,
            "key_dim": keys,
            "value_dim": values,
            "norm_size": values,
            "norm_first": 1,
            "norm_eps": norm.variance_epsilon,
            "beta_factor": 2.0 if getattr(part, "allow_neg_eigval", False) else 1.0,
        },
        integers={
            "at": torch.tensor(columns["q"] + columns["k"] + columns["v"]),
            "gates": torch.tensor(columns["z"][::values]),
            "steps": torch.tensor(columns["a"]),
            "betas": torch.tensor(columns["b"]),
        },
        floats={
            "decays": -part.A_log.float().exp(),
            "biases": part.dt_bias,
            "norm": norm.weight.repeat(heads),
        },
        state_shape=(1, heads, keys, values),
        out=out,
    )


def _delta_rule_of_keys(part: Any) -> RecurrentDescription:
    """Of Kimi Linear: a decay for each key, and products of low rank before decays and gates."""
    heads, dim, forget = part.num_heads, part.head_dim, part.forget_gate
    inner, first = heads * dim, torch.arange(heads) * dim
    entering = ("q_proj", "k_proj", "v_proj", "b_proj", "forget_gate.f_a_proj", "g_a_proj")
    low_rank = 3 * inner + heads  # where the outputs of the last two begin
    steps = low_rank + 2 * dim
    return RecurrentDescription(
        entering=(*entering, "forget_gate.f_b_proj", "g_b_proj"),
        conv=part.conv1d,
        fields={
            "kind": DELTA_RULE,
            "width": steps + 2 * inner,
            "num_heads": heads,
            "num_groups": heads,
            "num_steps": dim,
            "key_dim": dim,
            "value_dim": dim,
            "norm_size": dim,
            "norm_first": 1,
            "norm_eps": part.o_norm.variance_epsilon,
            "has_sigmoids": part.o_norm.activation == "sigmoid",
        },
        integers={
            "at": torch.arange(3 * inner),
            "gates": steps + inner + first,
            "steps": steps + first,
            "betas": 3 * inner + torch.arange(heads),
        },
        floats={
            "decays": -forget.A_log.flatten().float().exp(),
            "biases": forget.dt_bias,
            "norm": part.o_norm.weight.repeat(heads),
        },
        state_shape=(1, heads, dim, dim),
        sources={"forget_gate.f_b_proj": low_rank, "g_b_proj": low_rank + dim},
        out="o_proj",
    )


def _state_space(part: Any) -> RecurrentDescription:
    """Of Mamba-2 as in Bamba, Nemotron-H, Granite 4, Falcon-H1 and Zamba2."""
    heads, dim, groups, size = part.num_heads, part.head_dim, part.n_groups, part.ssm_state_size
    inner, channels = heads * dim, part.conv1d.in_channels
    norm, scale = part.norm, getattr(part, "mup_vector", None)
    weight, norm_size = getattr(norm, "weight", None), inner
    if weight is not None and hasattr(norm, "n_groups"):
        norm_size = inner // norm.n_groups
    elif weight is not None:
        norm_size = norm.group_size
    if scale is not None:
        scale = scale.flatten().float() * part.ssm_in_multiplier
    at = inner + torch.arange(channels)
    min_step, max_step = part.time_step_limit
    return RecurrentDescription(
        entering=("in_proj",),
        conv=part.conv1d,
        fields={
            "kind": STATE_SPACE,
            "width": inner + channels + heads,
            "num_heads": heads,
            "num_groups": groups,
            "key_dim": size,
            "value_dim": dim,
            "norm_size": norm_size,
            "norm_first": bool(getattr(norm, "norm_before_gate", False)),
            "norm_eps": 0.0 if weight is None else norm.variance_epsilon,
            "min_step": min_step,
            "max_step": max_step,
        },
        integers={
            "at": at,
            "gates": torch.arange(heads) * dim,
            "steps": inner + channels + torch.arange(heads),
        },
        floats={
            "scale": scale,
            "decays": -part.A_log.float().exp(),
            "biases": part.dt_bias,
            "skips": part.D,
            "norm": weight,
        },
        state_shape=(1, heads, dim, size),
    )


def _short_convolution(part: Any) -> RecurrentDescription:
    """Of LFM2."""
    channels = part.conv.in_channels
    return RecurrentDescription(
        entering=("in_proj",),
        conv=part.conv,
        fields={"kind": SHORT_CONVOLUTION, "width": 3 * channels},
        integers={"at": 2 * channels + torch.arange(channels)},
    )


def _selective_scan(part: Any) -> RecurrentDescription:
    """Of Mamba as in Jamba: step widths, keys and queries are normed."""
    inner, size, rank = part.intermediate_size, part.ssm_state_size, part.time_step_rank
    norms = part.dt_layernorm, part.b_layernorm, part.c_layernorm
    [eps] = {norm.variance_epsilon for norm in norms}
    steps = 2 * inner + rank + 2 * size
    return RecurrentDescription(
        entering=("in_proj", "x_proj"),
        conv=part.conv1d,
        fields={
            "kind": SELECTIVE_SCAN,
            "width": steps + inner,
            "num_heads": 1,
            "num_groups": 1,
            "num_steps": inner,
            "key_dim": size,
            "value_dim": inner,
            "norm_size": inner,
            "norm_eps": eps,
            "step_inputs": rank,
        },
        integers={
            "at": torch.arange(inner),
            "gates": torch.tensor([inner]),
            "steps": torch.tensor([steps]),
        },
        floats={
            "decays": -part.A_log.float().exp(),
            "biases": part.dt_proj.bias,
            "skips": part.D,
            "step_product": part.dt_proj.weight.t(),
            "late_norm": torch.cat([norm.weight for norm in norms]),
        },
        state_shape=(1, inner, size),
        sources={"x_proj": 0},
        late=("x_proj",),
    )
