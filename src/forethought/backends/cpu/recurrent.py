"""Recurrent layers of transformers' modules in C++: the gated delta rule, Mamba-2 and short
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

DELTA_RULE, STATE_SPACE, SHORT_CONVOLUTION = range(3)  # enum RecurrentKind
MAX_KERNEL = 16
"""As in structures.h."""
CONV, RECURRENT = ("conv", 0), ("recurrent", 0)


@dataclass(slots=True)
class _Description:
    """What ``RecurrentStruct`` says of a layer.

    Attributes:
        entering: names of the linears whose outputs are the projections, in order.
        conv: the convolution.
        fields: numbers.
        integers: int32 tables.
        floats: float32 tables.
        state_shape: of its recurrent state, ``[1, ...]``; None: it has none.
    """

    entering: tuple[str, ...]
    conv: nn.Conv1d
    fields: dict[str, Any]
    integers: dict[str, Tensor] = field(default_factory=dict)
    floats: dict[str, Tensor | None] = field(default_factory=dict)
    state_shape: tuple[int, ...] | None = None


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

    def __init__(self, part: nn.Module, description: _Description, offset: int) -> None:
        self._part, self._description = part, description
        conv, fields = description.conv, description.fields
        channels, [kernel] = conv.in_channels, conv.kernel_size
        self._projected, self._mixed = fields["width"], part.out_proj.in_features
        self.width = max(self._projected, self._mixed)
        self.hidden = self.num_outputs = part.out_proj.out_features
        taps = conv.weight[:, 0].t().float().contiguous()  # [kernel, channels]
        self._tables = {
            "taps": taps,
            "bias": None if conv.bias is None else conv.bias.float().contiguous(),
            **{name: table.int().contiguous() for name, table in description.integers.items()},
            **{
                name: None if table is None else table.float().contiguous()
                for name, table in description.floats.items()
            },
        }
        size = kernel * channels
        self.views = {CONV: StateView((1, channels, kernel), (size, 1, channels), offset)}
        if description.state_shape is not None:
            shape = description.state_shape
            strides = torch.empty(shape, device="meta").stride()
            self.views[RECURRENT] = StateView(shape, strides, offset + size)
        self.state_size = sum(torch.Size(view.size).numel() for view in self.views.values())
        self._struct = RecurrentStruct(
            **{name: None if x is None else x.data_ptr() for name, x in self._tables.items()},
            **fields,
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
        *entering, out = self.linears()
        projected = float_rows(torch.cat([linear(x) for linear in entering], -1))
        mixed = torch.empty(len(projected), self._mixed)
        self._call(tokens, projected, mixed)
        y: Tensor = out(mixed.to(x.dtype)[None])
        return y

    def _call(self, tokens: TokenTable, projected: Tensor, mixed: Tensor, **products: int) -> None:
        call = RecurrentCallStruct(
            projected=projected.data_ptr(),
            mixed=mixed.data_ptr(),
            tokens=tokens.states,
            rows=tokens.rows,
            num_tokens=projected.shape[0],
            num_rows=tokens.num_rows,
            num_threads=native_threads(),
            **products,
        )
        load_library().recurrent(ctypes.byref(self._struct), ctypes.byref(call))

    def linears(self) -> list[nn.Module]:
        """Of the module, which are replaced once they are packed."""
        return [getattr(self._part, name) for name in (*self._description.entering, "out_proj")]

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

    def __init__(
        self, modules: Sequence[nn.Module], layers: Sequence[NativeRecurrentLayer]
    ) -> None:
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


def describe(part: nn.Module) -> _Description | None:
    """What a recurrent layer computes, by its attributes; None: it is not known."""
    for describe_kind in (_delta_rule, _state_space, _short_convolution):
        try:
            description = describe_kind(part)
        except AttributeError:
            continue
        if _is_possible(part, description):
            return description
    return None


def _is_possible(part: nn.Module, description: _Description) -> bool:
    conv = description.conv
    widths = [getattr(part, name).out_features for name in description.entering]
    return (
        conv.kernel_size[0] <= MAX_KERNEL
        and conv.groups == conv.in_channels == conv.out_channels
        and sum(widths) == description.fields["width"]
        and getattr(part, "activation", "silu") in ("silu", "swish")
    )


def _delta_rule(part: Any) -> _Description:
    """Of Qwen3-Next and Qwen3.5: projections of Qwen3-Next are grouped by key head."""
    heads, groups, keys, values = (
        part.num_v_heads,
        part.num_k_heads,
        part.head_k_dim,
        part.head_v_dim,
    )
    ratio = heads // groups
    sizes = {"q": keys, "k": keys, "v": ratio * values, "z": ratio * values, "b": ratio, "a": ratio}
    if hasattr(part, "in_proj_qkvz"):
        entering: tuple[str, ...] = ("in_proj_qkvz", "in_proj_ba")
        linears = ["qkvz", "ba"]
        columns: dict[str, list[int]] = {name: [] for name in sizes}
        at = 0
        for linear in linears:
            for _ in range(groups):
                for name in linear:
                    columns[name] += range(at, at + sizes[name])
                    at += sizes[name]
    else:
        entering = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        columns, at = {}, 0
        for name, size in sizes.items():
            columns[name] = [*range(at, at + groups * size)]
            at += groups * size
    return _Description(
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
            "norm_eps": part.norm.variance_epsilon,
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
            "norm": part.norm.weight.repeat(heads),
        },
        state_shape=(1, heads, keys, values),
    )


def _state_space(part: Any) -> _Description:
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
    return _Description(
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


def _short_convolution(part: Any) -> _Description:
    """Of LFM2."""
    channels = part.conv.in_channels
    return _Description(
        entering=("in_proj",),
        conv=part.conv,
        fields={"kind": SHORT_CONVOLUTION, "width": 3 * channels},
        integers={"at": 2 * channels + torch.arange(channels)},
    )
