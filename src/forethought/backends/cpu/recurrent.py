"""Recurrent layers of transformers' modules in C++: the gated delta rule, Mamba-2, Mamba and short
convolutions, over all tokens of a batch in one call (``recurrent.h``).

A layer is recognised by its attributes, and tried beside its module on a few tokens. The reference
of all is the module.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from forethought.backends.cpu.library import load_library
from forethought.backends.cpu.module_parts import (
    TOLERANCES,
    are_hooked,
    float_rows,
    is_close,
    packed_linears,
)
from forethought.backends.cpu.structures import (
    LinearStruct,
    RecurrentCallStruct,
    RecurrentStruct,
    TokenStateStruct,
)
from forethought.kv.recurrent import LayerState, PackedState, State, StateView
from forethought.model.device import native_threads

DELTA_RULE, STATE_SPACE, SHORT_CONVOLUTION, SELECTIVE_SCAN = range(4)  # enum RecurrentKind
ALL, BEFORE_LATE, AFTER_LATE = range(3)  # enum RecurrentStage
MAX_KERNEL = 16
"""As in structures.h."""
CONV, RECURRENT = ("conv", 0), ("recurrent", 0)


@dataclass(slots=True)
class Description:
    """What ``RecurrentStruct`` says of a layer.

    Attributes:
        entering: names of the linears whose outputs are the projections, in order.
        conv: the convolution.
        fields: numbers.
        integers: int32 tables.
        floats: float32 tables.
        state_shape: of its recurrent state, ``[1, ...]``; None: it has none.
        sources: by the name of a linear that reads projections, where they begin.
        late: names of linears, the last ones, that read what the convolution writes.
        out: name of the linear that multiplies the result.
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
        """Of a layer, by name."""
        return {name: part.get_submodule(name) for name in (*self.entering, self.out)}

    def multiply(self, part: nn.Module, names: Sequence[str], x: Tensor, projected: Tensor) -> None:
        """Write the outputs of some linears of a layer, of x ``[1, T, hidden]``, in their columns
        of ``projected`` ``[T, width]``.
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
        """The parts of a layer's state, in the shapes of its module, from ``offset`` on."""
        channels, [kernel] = self.conv.in_channels, self.conv.kernel_size
        size = kernel * channels
        views = {CONV: StateView((1, channels, kernel), (size, 1, channels), offset)}
        if self.state_shape is not None:
            strides = torch.empty(self.state_shape, device="meta").stride()
            views[RECURRENT] = StateView(self.state_shape, strides, offset + size)
        return views


class NativeRecurrentLayer:
    """A recurrent layer, whose module keeps its linears.

    Args:
        part: the module.
        description: of it.
        offset: of its state among those of all layers, floats.

    Attributes:
        views: its parts of a state, in the shapes of the module.
        state_size: floats of them.
        hidden, num_outputs: widths of what it reads and gives.
        width: floats of a token between the products.
    """

    def __init__(self, part: nn.Module, description: Description, offset: int) -> None:
        self._part, self._description = part, description
        conv, fields = description.conv, description.fields
        channels, [kernel] = conv.in_channels, conv.kernel_size
        self._projected, out = fields["width"], part.get_submodule(description.out)
        self._mixed = int(out.in_features)
        self.width = max(self._projected, self._mixed)
        self.hidden = self.num_outputs = int(out.out_features)
        taps = conv.weight[:, 0].t().float().contiguous()  # [kernel, channels]
        self._tables = {
            "taps": taps,
            "bias": None if conv.bias is None else conv.bias.float().contiguous(),
            **{name: table.int().contiguous() for name, table in description.integers.items()},
            "sources": torch.tensor(
                [description.sources.get(name, -1) for name in description.entering],
                dtype=torch.int32,
            ),
            **{
                name: None if table is None else table.float().contiguous()
                for name, table in description.floats.items()
            },
        }
        self.views = description.views(offset)
        self.state_size = sum(torch.Size(view.size).numel() for view in self.views.values())
        self._struct = RecurrentStruct(
            **{name: None if x is None else x.data_ptr() for name, x in self._tables.items()},
            **{"num_steps": 1, "beta_factor": 1.0, **fields},
            num_late=len(description.late),
            offset=offset,
            kernel=kernel,
            channels=channels,
            hidden=self.hidden,
        )
        self._packed: list[Any] = []
        """What the struct's products point to, once they are packed."""

    def compute(self, x: Tensor, tokens: TokenTable) -> Tensor:
        """x ``[1, T, hidden]`` -> the same, with states from and to where the table says."""
        if are_hooked(self.linears()) or self.packed_struct() is None:
            return self.by_linears(x, tokens)
        rows = float_rows(x)
        num_tokens = rows.shape[0]
        projected = torch.empty(num_tokens, self._projected)
        mixed = torch.empty(num_tokens, self._mixed)
        y = torch.empty(num_tokens, self.hidden)
        self._call(tokens, projected, mixed, x=rows.data_ptr(), y=y.data_ptr())
        return y.to(x.dtype).view(x.shape)

    def by_linears(self, x: Tensor, tokens: TokenTable) -> Tensor:
        """The same, with the products of the module's linears."""
        linears, late = self._description.linears(self._part), self._description.late
        projected = torch.empty(x.shape[1], self._projected)
        mixed = torch.empty(x.shape[1], self._mixed)
        early = [name for name in self._description.entering if name not in late]
        self._description.multiply(self._part, early, x, projected)
        if late:
            self._call(tokens, projected, mixed, stage=BEFORE_LATE)
            self._description.multiply(self._part, late, x, projected)
        self._call(tokens, projected, mixed, stage=AFTER_LATE if late else ALL)
        y: Tensor = linears[self._description.out](mixed.to(x.dtype)[None])
        return y

    def _call(self, tokens: TokenTable, projected: Tensor, mixed: Tensor, **changes: int) -> None:
        call = RecurrentCallStruct(
            projected=projected.data_ptr(),
            mixed=mixed.data_ptr(),
            tokens=tokens.states,
            rows=tokens.rows,
            num_tokens=projected.shape[0],
            num_rows=tokens.num_rows,
            num_threads=native_threads(),
            **changes,
        )
        load_library().recurrent(ctypes.byref(self._struct), ctypes.byref(call))

    def linears(self) -> list[nn.Module]:
        """Of the module, which are replaced once they are packed."""
        return list(self._description.linears(self._part).values())

    def packed_struct(self) -> RecurrentStruct | None:
        """With the weights of the linears; None: they are not packed."""
        if self._packed:
            return self._struct
        packed = packed_linears(self.linears())
        if packed is None or any(linear.following for linear in packed):
            return None
        *entering, out = packed
        structs = (LinearStruct * len(entering))(*(linear.struct for linear in entering))
        self._packed = [structs, packed]
        self._struct.enter, self._struct.num_enter = structs, len(entering)
        self._struct.out = ctypes.pointer(out.struct)
        return self._struct


class TokenTable:
    """Where the states of a batch's tokens are; see ``TokenState`` in structures.h.

    Args:
        layers: whose states they are.
        num_tokens: of the batch.
        rows: where its sequences begin, and the number of tokens.
    """

    def __init__(self, layers: NativeRecurrence, num_tokens: int, rows: Sequence[int]) -> None:
        self._layers, self._kept = layers, list[PackedState]()
        self._fields = array("q", bytes(ctypes.sizeof(TokenStateStruct) * num_tokens))
        self.states = (TokenStateStruct * num_tokens).from_buffer(self._fields)
        self._rows = array("i", rows)
        self.rows, self.num_rows = self._rows.buffer_info()[0], len(rows) - 1

    def add(self, tokens: Sequence[int], before: State | None, after: PackedState) -> None:
        """A run of tokens, their packed indices, from a state or none; and the state after it."""
        in_run = len(tokens) > 1 or before is None
        for place, token in enumerate(tokens):
            self._fields[4 * token + 2 : 4 * token + 4] = array("q", (place > 0, in_run))
        if before is not None:
            packed = self._layers.packed(before)
            self._kept.append(packed)
            self._fields[4 * tokens[0]] = packed.floats.data_ptr()
        self._kept.append(after)
        self._fields[4 * tokens[-1] + 1] = after.floats.data_ptr()


class NativeRecurrence:
    """The recurrent layers of a module, and their states.

    Args:
        modules: of them.
        layers: in order, their states one after the other.

    Attributes:
        by_module: the layers.
    """

    def __init__(self, modules: Sequence[nn.Module], layers: Sequence[Any]) -> None:
        self._layers, self.by_module = layers, dict(zip(modules, layers, strict=True))
        self._views = [layer.views for layer in layers]
        self._state_size = sum(layer.state_size for layer in layers)

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> NativeRecurrence | None:
        """Of modules; None: some are not known here."""
        layers, offset = list[NativeRecurrentLayer](), 0
        for part in modules:
            description = describe(part)
            if description is None:
                return None
            layers.append(layer := NativeRecurrentLayer(part, description, offset))
            offset += layer.state_size
        return cls(modules, layers)

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def state_bytes(self) -> int:
        """Of the states of all layers after one token."""
        return 4 * self._state_size

    def new_state(self) -> PackedState:
        """One that is going to be written."""
        return PackedState(torch.empty(self._state_size), self._views)

    def packed(self, state: State) -> PackedState:
        """A state that is going to be read."""
        return PackedState.of(state, self._state_size, self._views)

    def table(self, num_tokens: int, rows: Sequence[int]) -> TokenTable:
        """The states of a batch; see ``TokenTable``."""
        return TokenTable(self, num_tokens, rows)

    def compute(self, layer: int, x: Tensor, tokens: TokenTable) -> Tensor:
        """x ``[1, T, hidden]`` -> the same, through a layer."""
        return self._layers[layer].compute(x, tokens)

    def agrees(self, layer: int, x: Tensor, expected: Tensor, state: LayerState) -> bool:
        """Whether a layer gives what its module does.

        Args:
            layer: its index.
            x: ``[1, 4, hidden]``, a run of three tokens and a token after it.
            expected: what it is to give.
            state: after it.
        """
        if x.dtype not in TOLERANCES or state.keys() != self._views[layer].keys():
            return False
        table, states = self.table(4, [0, 4]), [self.new_state(), self.new_state()]
        table.add([0, 1, 2], None, states[0])
        table.add([3], states[0], states[1])
        y = self._layers[layer].by_linears(x, table)
        after = states[1][layer]
        return is_close(y, expected) and all(
            after[key].shape == tensor.shape and is_close(after[key], tensor.to(x.dtype))
            for key, tensor in state.items()
        )


def describe(part: nn.Module) -> Description | None:
    """What a recurrent layer computes, by its attributes; None: it is not known."""
    for describe_kind in (_delta_rule, _state_space, _short_convolution, _selective_scan):
        try:
            description = describe_kind(part)
        except AttributeError:
            continue
        if _is_possible(part, description):
            return description
    return None


def _is_possible(part: nn.Module, description: Description) -> bool:
    conv, linears = description.conv, description.linears(part)
    widths = [linears[name].out_features for name in description.entering]
    return (
        conv.kernel_size[0] <= MAX_KERNEL
        and conv.groups == conv.in_channels == conv.out_channels
        and sum(widths) + description.fields.get("value_dim", 0) * bool(description.late)
        == description.fields["width"]
        and getattr(part, "activation", "silu") in ("silu", "swish")
    )


def _delta_rule(part: Any) -> Description:
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
    return Description(
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


def _delta_rule_of_keys(part: Any) -> Description:
    """Of Kimi Linear: a decay for each key, and products of low rank before decays and gates."""
    heads, dim, forget = part.num_heads, part.head_dim, part.forget_gate
    inner, first = heads * dim, torch.arange(heads) * dim
    entering = ("q_proj", "k_proj", "v_proj", "b_proj", "forget_gate.f_a_proj", "g_a_proj")
    low_rank = 3 * inner + heads  # where the outputs of the last two begin
    steps = low_rank + 2 * dim
    return Description(
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


def _state_space(part: Any) -> Description:
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
    return Description(
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


def _short_convolution(part: Any) -> Description:
    """Of LFM2."""
    channels = part.conv.in_channels
    return Description(
        entering=("in_proj",),
        conv=part.conv,
        fields={"kind": SHORT_CONVOLUTION, "width": 3 * channels},
        integers={"at": 2 * channels + torch.arange(channels)},
    )


def _selective_scan(part: Any) -> Description:
    """Of Mamba as in Jamba: step widths, keys and queries are normed."""
    inner, size, rank = part.intermediate_size, part.ssm_state_size, part.time_step_rank
    norms = part.dt_layernorm, part.b_layernorm, part.c_layernorm
    [eps] = {norm.variance_epsilon for norm in norms}
    steps = 2 * inner + rank + 2 * size
    return Description(
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
