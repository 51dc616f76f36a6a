"""The decoder layers of a module of transformers whose parts are all computed in C++, in one call:
norms, attention, recurrent layers, MLPs and residual connections (``sublayers.h``).

The reference is the module, which calls the same parts one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
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
)
from forethought.backends.cpu.recurrent import (
    NativeRecurrence,
    NativeRecurrentLayer,
    NativeTokenTable,
)
from forethought.backends.cpu.structures import SublayersCallStruct, SublayerStruct
from forethought.model.tolerance import is_close

_Part = NativeAttentionLayer | NativeRecurrentLayer | NativeMlp | NativeMixture
_FIELDS = {
    NativeAttentionLayer: "attention",
    NativeRecurrentLayer: "recurrent",
    NativeMlp: "mlp",
    NativeMixture: "mixture",
}
"""Of ``SublayerStruct``."""


@dataclass(frozen=True, slots=True)
class _Sublayer:
    """``x + scale * part(norm(x))``, or the sum of a recurrent layer and attention, which has
    factors of its own.
    """

    norm: NativeNorm
    parts: Sequence[_Part]
    scale: float
    attention_input: float = 1.0
    attention_scale: float = 1.0

    def struct(self) -> SublayerStruct | None:
        """None: its linears are not packed."""
        packed: dict[str, Any] = {_FIELDS[type(part)]: part.packed_struct() for part in self.parts}
        if None in packed.values():
            return None
        return SublayerStruct(
            norm=self.norm.weight.data_ptr(),
            eps=self.norm.eps,
            scale=self.scale,
            attention_input=self.attention_input,
            attention_scale=self.attention_scale,
            **{name: ctypes.pointer(struct) for name, struct in packed.items()},
        )


class NativeSublayers:
    """The sublayers of a decoder.

    Args:
        layers: those of each decoder layer.
        structs: of them, one after the other.

    Attributes:
        structs: see above.
        hidden: width of what they read and give.
        width: floats of a token between the products of any of them.
    """

    def __init__(
        self, layers: Sequence[Sequence[_Sublayer]], structs: Sequence[SublayerStruct]
    ) -> None:
        parts = _parts_of(layers)
        self._layers, self.structs = layers, (SublayerStruct * len(structs))(*structs)
        self._begins = [0]
        for layer in layers:
            self._begins.append(self._begins[-1] + len(layer))
        self.hidden = parts[0].hidden
        self.width = max(part.width for part in parts)
        self._linears = [linear for part in parts for linear in part.linears()]

    @classmethod
    def of(
        cls, layers: Sequence[nn.Module], attention: NativeAttention, recurrence: NativeRecurrence
    ) -> NativeSublayers | None:
        """Of decoder layers; None: what one of them computes is not known here."""
        by_module = {**attention.by_module, **recurrence.by_module}
        sublayers = [_sublayers_of(layer, by_module) for layer in layers]
        structs = [sublayer.struct() for layer in sublayers for sublayer in layer]
        packed = [struct for struct in structs if struct is not None]
        sizes = {part.hidden for part in _parts_of(sublayers)}
        if not all(sublayers) or len(packed) < len(structs) or len(sizes) > 1:
            return None
        return cls(sublayers, packed)

    def are_hooked(self) -> bool:
        """Whether something, such as an adapter, changes what a linear computes."""
        return are_hooked(self._linears)

    def compute(
        self,
        layers: range,
        x: Tensor,
        batch: BatchCall,
        tokens: NativeTokenTable,
        rotation: Rotation | None,
    ) -> Tensor:
        """x ``[1, T, hidden]`` -> the same, through some decoder layers."""
        rows = float_rows(x)
        rows = rows.clone() if rows.data_ptr() == x.data_ptr() else rows
        normed, y = torch.empty_like(rows), torch.empty_like(rows)
        projected, mixed = torch.empty(2, len(rows) * self.width)
        rotary = None if rotation is None else batch.rotary(rotation)
        begin, end = self._begins[layers.start], self._begins[layers.stop]
        call = SublayersCallStruct(
            sublayers=ctypes.pointer(self.structs[begin]),
            x=rows.data_ptr(),
            normed=normed.data_ptr(),
            y=y.data_ptr(),
            projected=projected.data_ptr(),
            mixed=mixed.data_ptr(),
            rotary=None if rotary is None else rotary.data_ptr(),
            batch=ctypes.pointer(batch.struct),
            tokens=tokens.states,
            rows=tokens.rows,
            num_sublayers=end - begin,
            hidden=self.hidden,
        )
        load_library().sublayers(ctypes.byref(call))
        return rows.to(x.dtype).view(x.shape)

    def agrees(self, layer: int, x: Tensor, expected: Tensor, *arguments: Any) -> bool:
        """Whether a decoder layer gives what its module does; arguments as of ``compute``."""
        return is_close(self.compute(range(layer, layer + 1), x, *arguments), expected)


def _parts_of(layers: Sequence[Sequence[_Sublayer]]) -> list[_Part]:
    return [part for layer in layers for sublayer in layer for part in sublayer.parts]


def _sublayers_of(layer: Any, by_module: dict[nn.Module, Any]) -> list[_Sublayer]:
    """Of a decoder layer: attention, recurrence or both, then an MLP, experts or both, each after a
    norm; empty: it has other parts.
    """
    children = list(layer.children())
    norms = [child.forward for child in children if isinstance(child.forward, NativeNorm)]
    mixers = [by_module[child] for child in children if child in by_module]
    others = NativeMlp | NativeMixture
    mlps = _joined([child.forward for child in children if isinstance(child.forward, others)])
    kinds = [type(part) for part in mixers]
    if any(part.num_outputs != part.hidden for part in [*mixers, *mlps]):
        return []
    if len(kinds) > len({*kinds}) or len(mlps) > 1 or len(norms) != bool(mixers) + len(mlps):
        return []
    sublayers = [_mixing(layer, norms[0], mixers)] if mixers else []
    scale = _factor(layer, "residual_multiplier")
    for mlp in mlps:
        factor = mlp.scale if isinstance(mlp, NativeMlp) else 1.0
        if scale != 1 and factor != 1:
            return []
        sublayers.append(_Sublayer(norms[-1], [mlp], scale * factor))
    return sublayers


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
