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
    """``x + scale * part(norm(x))``."""

    norm: NativeNorm
    part: _Part
    scale: float

    def struct(self) -> SublayerStruct | None:
        """None: its linears are not packed."""
        packed = self.part.packed_struct()
        if packed is None:
            return None
        return SublayerStruct(
            norm=self.norm.weight.data_ptr(),
            eps=self.norm.eps,
            scale=self.scale,
            **{_FIELDS[type(self.part)]: ctypes.pointer(packed)},
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
        parts = [sublayer.part for layer in layers for sublayer in layer]
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
        sizes = {sublayer.part.hidden for layer in sublayers for sublayer in layer}
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


def _sublayers_of(layer: Any, by_module: dict[nn.Module, Any]) -> list[_Sublayer]:
    """Of a decoder layer: attention or recurrence, then an MLP, experts or both, each after a norm;
    empty: it has other parts.
    """
    children = list(layer.children())
    norms = [child.forward for child in children if isinstance(child.forward, NativeNorm)]
    mixers = [by_module[child] for child in children if child in by_module]
    others = NativeMlp | NativeMixture
    mlps = [child.forward for child in children if isinstance(child.forward, others)]
    parts: list[_Part] = mixers + _joined(mlps)
    if len(mixers) > 1 or len(parts) - len(mixers) > 1 or len(parts) != len(norms):
        return []
    if any(part.num_outputs != part.hidden for part in parts):
        return []
    scale = float(getattr(layer, "residual_multiplier", 1.0))
    return [_Sublayer(norm, part, scale) for norm, part in zip(norms, parts, strict=True)]


def _joined(mlps: list[NativeMlp | NativeMixture]) -> list[Any]:
    """Experts and an MLP of the same inputs as one."""
    if len(mlps) != 2:
        return mlps
    for one, other in (mlps, mlps[::-1]):
        if isinstance(one, NativeMixture) and isinstance(other, NativeMlp):
            joined = one.beside(other)
            return mlps if joined is None else [joined]
    return mlps
