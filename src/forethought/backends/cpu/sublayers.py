"""The decoder layers of a module of transformers whose parts are all computed in C++, in one call:
norms, attention, recurrent layers, MLPs and residual connections (``sublayers.h``).

The reference is the module, which calls the same parts one by one.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from forethought.backends.cpu.attention import (
    BatchCall,
    NativeAttention,
    NativeAttentionLayer,
    Rotation,
)
from forethought.backends.cpu.library import load_library
from forethought.backends.cpu.mixture import NativeMixture
from forethought.backends.cpu.module_parts import (
    NativeMlp,
    NativeNorm,
    are_hooked,
    float_rows,
    packed_linears,
)
from forethought.backends.cpu.recurrent import (
    NativeRecurrence,
    NativeRecurrentLayer,
    NativeTokenTable,
)
from forethought.backends.cpu.structures import (
    LinearStruct,
    SublayersCallStruct,
    SublayerStruct,
)
from forethought.model.tolerance import is_close

HIDDEN, SIDE, HIDDEN_AND_SIDE, HIDDEN_AND_EMBEDDINGS = range(4)
"""``enum SublayerInput`` in structures.h."""


@dataclass(frozen=True, slots=True)
class _Linear:
    """A linear as a sublayer.

    Attributes:
        part: the module that has it.
        name: of it.
        hidden, num_outputs: widths of what it reads and gives.
        width: floats of a token between the products, of which there are none.
    """

    part: nn.Module
    name: str
    hidden: int
    num_outputs: int
    width: int = 0

    def linears(self) -> list[nn.Module]:
        """Itself."""
        return [self.part.get_submodule(self.name)]

    def packed_struct(self) -> LinearStruct | None:
        """With its weights; None: they are not packed."""
        packed = packed_linears(self.linears())
        return None if packed is None else packed[0].struct


_Part = NativeAttentionLayer | NativeRecurrentLayer | NativeMlp | NativeMixture | _Linear
_FIELDS = {
    NativeAttentionLayer: "attention",
    NativeRecurrentLayer: "recurrent",
    NativeMlp: "mlp",
    NativeMixture: "mixture",
    _Linear: "linear",
}
"""Of ``SublayerStruct``."""


@dataclass(frozen=True, slots=True)
class _Sublayer:
    """``x + output_norm(scale * part(norm(input)))``, or with the sum of a recurrent layer and
    attention, which has factors of its own.

    Attributes:
        norm, output_norm: None: there is none.
        parts: one, or a recurrent layer and attention.
        input: HIDDEN, SIDE, HIDDEN_AND_SIDE or HIDDEN_AND_EMBEDDINGS.
        to_side: its outputs are side states, and not added to x.
    """

    norm: NativeNorm | None
    parts: Sequence[_Part]
    scale: float = 1.0
    output_norm: NativeNorm | None = None
    attention_input: float = 1.0
    attention_scale: float = 1.0
    input: int = HIDDEN
    to_side: bool = False

    @property
    def hidden(self) -> int:
        """Width of the hidden states; 0: parts read and give other widths."""
        factor = 2 if self.input == HIDDEN_AND_EMBEDDINGS else 1
        [*sizes] = {part.num_outputs for part in self.parts}
        fits = all(part.hidden == factor * part.num_outputs for part in self.parts)
        return sizes[0] if fits and len(sizes) == 1 else 0

    @property
    def is_packed(self) -> bool:
        """Whether the linears of all parts are."""
        return all(part.packed_struct() is not None for part in self.parts)

    def struct(self, begins: int = -1) -> SublayerStruct:
        """With its weights, once it is packed; ``begins``: as in structures.h."""
        packed: dict[str, Any] = {_FIELDS[type(part)]: part.packed_struct() for part in self.parts}
        return SublayerStruct(
            **_norm_fields("norm", "eps", self.norm),
            **_norm_fields("output_norm", "output_eps", self.output_norm),
            scale=self.scale,
            attention_input=self.attention_input,
            attention_scale=self.attention_scale,
            input=self.input,
            to_side=self.to_side,
            begins=begins,
            **{name: ctypes.pointer(struct) for name, struct in packed.items()},
        )


def _norm_fields(weight: str, eps: str, norm: NativeNorm | None) -> dict[str, Any]:
    return {} if norm is None else {weight: norm.weight.data_ptr(), eps: norm.eps}


_Layer = list[_Sublayer]
"""The sublayers of a decoder layer."""


class NativeSublayers:
    """The sublayers of a decoder.

    Args:
        layers: for each decoder layer what it may be, as many sublayers each. ``agrees`` finds out.

    Attributes:
        num_layers: decoder layers.
        structs: of the sublayers, one after the other.
        hidden: width of what they read and give.
        width: floats of a token between the products of any of them.
    """

    def __init__(self, layers: Sequence[Sequence[_Layer]]) -> None:
        self._layers, self.num_layers = layers, len(layers)
        first = [sublayer for [layer, *_] in layers for sublayer in layer]
        structs = [
            struct for index, [layer, *_] in enumerate(layers) for struct in _structs(index, layer)
        ]
        self.structs = (SublayerStruct * len(structs))(*structs)
        self._begins = [0, *itertools.accumulate(len(layer) for [layer, *_] in layers)]
        parts = [part for sublayer in first for part in sublayer.parts]
        self.hidden = first[0].hidden
        self.width = max(part.width for part in parts)
        self._linears = [linear for part in parts for linear in part.linears()]
        self._reads_embeddings = any(sublayer.input == HIDDEN_AND_EMBEDDINGS for sublayer in first)

    @classmethod
    def of(
        cls,
        layers: Sequence[nn.Module],
        attention: NativeAttention,
        recurrence: NativeRecurrence | None,
    ) -> NativeSublayers | None:
        """Of decoder layers; None: what one of them computes is not known here. ``recurrence``:
        None if there are no recurrent layers.
        """
        by_module: dict[nn.Module, Any] = {**attention.by_module}
        if recurrence is not None:
            by_module |= recurrence.by_module
        candidates = [_candidates(layer, by_module) for layer in layers]
        sublayers = list(itertools.chain.from_iterable(itertools.chain(*candidates)))
        sizes = {sublayer.hidden for sublayer in sublayers}
        if not all(candidates) or len(sizes) > 1 or 0 in sizes:
            return None
        if not all(sublayer.is_packed for sublayer in sublayers):
            return None
        return cls(candidates)

    def has_attention(self, layer: int) -> bool:
        """Whether a decoder layer reads the rotation."""
        begin, end = self._begins[layer], self._begins[layer + 1]
        return any(struct.attention for struct in self.structs[begin:end])

    def are_hooked(self) -> bool:
        """Whether something, such as an adapter, changes what a linear computes."""
        return are_hooked(self._linears)

    def compute(
        self,
        layers: range,
        x: Tensor,
        batch: BatchCall,
        tokens: NativeTokenTable | None,
        rotation: Rotation | None,
        embeddings: Tensor | None = None,
    ) -> Tensor:
        """x ``[1, T, hidden]`` -> the same, through some decoder layers; embeddings ``[1, T,
        hidden]`` of the tokens, where they are read; tokens: None without recurrent layers.
        """
        rows = float_rows(x)
        rows = rows.clone() if rows.data_ptr() == x.data_ptr() else rows
        inputs = float_rows(x if embeddings is None else embeddings)
        normed = torch.empty(1 + self._reads_embeddings, *rows.shape)
        y, side = torch.empty(2, *rows.shape)
        projected, mixed = torch.empty(2, len(rows) * self.width)
        rotary = None if rotation is None else batch.rotary(rotation)
        begin, end = self._begins[layers.start], self._begins[layers.stop]
        call = SublayersCallStruct(
            sublayers=ctypes.pointer(self.structs[begin]),
            x=rows.data_ptr(),
            normed=normed.data_ptr(),
            y=y.data_ptr(),
            side=side.data_ptr(),
            embeddings=inputs.data_ptr(),
            projected=projected.data_ptr(),
            mixed=mixed.data_ptr(),
            rotary=None if rotary is None else rotary.data_ptr(),
            batch=ctypes.pointer(batch.struct),
            tokens=None if tokens is None else tokens.states,
            rows=None if tokens is None else tokens.rows,
            num_sublayers=end - begin,
            hidden=self.hidden,
        )
        load_library().sublayers(ctypes.byref(call))
        return rows.to(x.dtype).view(x.shape)

    def agrees(self, layer: int, x: Tensor, expected: Tensor, *arguments: Any) -> bool:
        """Whether a decoder layer gives what its module does, as one of the things that it may be,
        which it is from then on; arguments as of ``compute``.
        """
        begin, end = self._begins[layer], self._begins[layer + 1]
        if self._reads_embeddings and arguments[-1] is None:
            return False
        for sublayers in self._layers[layer]:
            self.structs[begin:end] = _structs(layer, sublayers)
            if is_close(self.compute(range(layer, layer + 1), x, *arguments), expected):
                return True
        return False


def _structs(layer: int, sublayers: _Layer) -> list[SublayerStruct]:
    """Those of a decoder layer."""
    return [
        sublayer.struct(layer if number == 0 else -1) for number, sublayer in enumerate(sublayers)
    ]


def _candidates(layer: Any, by_module: dict[nn.Module, Any]) -> list[_Layer]:
    """What a decoder layer may be, by its children; empty: it has other parts."""
    return _shared_block(layer, by_module) or _mixer_and_mlps(layer, by_module)


def _mixer_and_mlps(layer: Any, by_module: dict[nn.Module, Any]) -> list[_Layer]:
    """Attention, recurrence or both, then an MLP, experts or both, with a norm of the inputs of
    each, or of the outputs.
    """
    children = list(layer.children())
    norms = [child.forward for child in children if isinstance(child.forward, NativeNorm)]
    mixers = [by_module[child] for child in children if child in by_module]
    others = NativeMlp | NativeMixture
    mlps = _joined([child.forward for child in children if isinstance(child.forward, others)])
    kinds = [type(part) for part in mixers]
    if len(kinds) > len({*kinds}) or len(mlps) > 1 or len(norms) != bool(mixers) + len(mlps):
        return []
    sublayers = [_mixing(layer, norms[0], mixers)] if mixers else []
    scale = _factor(layer, "residual_multiplier")
    for mlp in mlps:
        factor = mlp.scale if isinstance(mlp, NativeMlp) else 1.0
        if scale != 1 and factor != 1:
            return []
        sublayers.append(_Sublayer(norms[-1], [mlp], scale * factor))
    return [sublayers, [*map(_norming_outputs, sublayers)]] if sublayers else []


def _norming_outputs(sublayer: _Sublayer) -> _Sublayer:
    """With the norm after the parts."""
    return replace(sublayer, norm=None, output_norm=sublayer.norm)


def _shared_block(layer: Any, by_module: dict[nn.Module, Any]) -> list[_Layer]:
    """Zamba2's: a block of attention and an MLP, whose weights several layers share, reads hidden
    states and embeddings; a linear brings what it gives to the inputs of a recurrent layer. Empty:
    it is another one.
    """
    block, mamba = (getattr(layer, name, None) for name in ("shared_transformer", "mamba_decoder"))
    if block is None or mamba is None:
        return []
    norms = block.input_layernorm, block.pre_ff_layernorm, mamba.input_layernorm
    attention, recurrent = by_module.get(block.self_attn), by_module.get(mamba.mamba)
    mlp, linear = block.feed_forward.forward, layer.linear
    are_norms = all(isinstance(norm.forward, NativeNorm) for norm in norms)
    if not are_norms or not isinstance(mlp, NativeMlp) or attention is None or recurrent is None:
        return []
    entering, between, before = (norm.forward for norm in norms)
    leaving = _Linear(layer, "linear", linear.in_features, linear.out_features)
    to_side: dict[str, Any] = {"input": SIDE, "to_side": True}
    return [
        [
            _Sublayer(entering, [attention], input=HIDDEN_AND_EMBEDDINGS, to_side=True),
            _Sublayer(between, [mlp], mlp.scale, **to_side),
            _Sublayer(None, [leaving], **to_side),
            _Sublayer(before, [recurrent], input=HIDDEN_AND_SIDE),
        ]
    ]


def _mixing(layer: Any, norm: NativeNorm, mixers: list[Any]) -> _Sublayer:
    """Of attention, a recurrent layer, or both."""
    if len(mixers) == 1:
        return _Sublayer(norm, mixers, _factor(layer, "residual_multiplier"))
    return _Sublayer(
        norm,
        mixers,
        scale=_factor(layer, "ssm_out_multiplier"),
        attention_input=_factor(layer, "attention_in_multiplier"),
        attention_scale=_factor(layer, "attn_out_multiplier"),
    )


def _factor(layer: Any, name: str) -> float:
    return float(getattr(layer, name, 1.0))


def _joined(mlps: list[NativeMlp | NativeMixture]) -> list[Any]:
    """Experts and an MLP of the same inputs as one."""
    if len(mlps) != 2:
        return mlps
    for one, other in (mlps, mlps[::-1]):
        if isinstance(one, NativeMixture) and isinstance(other, NativeMlp):
            joined = one.beside(other)
            return mlps if joined is None else [joined]
    return mlps
