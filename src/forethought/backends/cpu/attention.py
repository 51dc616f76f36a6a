"""Attention layers of transformers' modules in C++, over the pages of keys and values: products, QK
norms, partial rotary embeddings, gates and the output product in one call (``attention_layer.h``).

A layer is recognised by its attributes, and tried beside its module on a few tokens. The reference
of all is the module.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forethought.backends.cpu.forward import packed_rows, row_capacity
from forethought.backends.cpu.library import load_library
from forethought.backends.cpu.module_parts import (
    are_hooked,
    float_rows,
    native_norm,
    packed_linears,
)
from forethought.backends.cpu.structures import (
    CallStruct,
    LayerStruct,
    LinearStruct,
    ModelStruct,
    ModuleAttentionCallStruct,
    ModuleAttentionStruct,
    RowStruct,
)
from forethought.backends.cpu.weights import KV_TYPES, MAX_GROUP, MAX_HEAD_DIM
from forethought.model.attention.base import ForwardPass
from forethought.model.attention.layer_profile import LayerProfile
from forethought.model.device import native_threads
from forethought.model.tolerance import TOLERANCES, is_close

OUT_NAMES = ("o_proj", "out_proj")
NORM_NAMES = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines ``[1, T, rotary_dim]`` of a batch's tokens, as modules rotate halves."""


@dataclass(slots=True)
class _Description:
    """What an attention layer computes.

    Attributes:
        out: name of the linear that leaves.
        norm_weights: float32 ``[head_dim]`` of queries and keys; None: there are no norms.
        norm_eps: of these.
        has_gates: the outputs for a head of queries are followed by those of its gate.
        key_scale: factor of keys.
        scale: of the scores.
    """

    out: str
    norm_weights: tuple[Tensor, Tensor] | None
    norm_eps: float
    has_gates: bool
    key_scale: float
    scale: float


class NativeAttentionLayer:
    """An attention layer, whose module keeps its linears.

    Args:
        part: the module.
        description: of it.
        profile: of it.
        index: of its keys and values in a storage.

    Attributes:
        hidden, num_outputs: widths of what it reads and gives.
        width: floats of a token between the products.
    """

    def __init__(
        self, part: nn.Module, description: _Description, profile: LayerProfile, index: int
    ) -> None:
        self._part, self._out = part, description.out
        dim, heads, kv_heads = profile.shape.key_dim, profile.heads, profile.shape.kv_heads
        self.num_outputs: int = getattr(part, description.out).out_features
        self._num_mixed = heads * dim
        self.hidden = part.q_proj.in_features
        self._widest = max(self.hidden, self._num_mixed)
        head_width = 2 * dim if description.has_gates else dim
        queries, others = heads * head_width, 2 * kv_heads
        self._projected = queries + others * dim
        self.width = max(self._projected, self._widest)
        at = [*range(0, queries, head_width), *range(queries, self._projected, dim)]
        self._at = torch.tensor(at, dtype=torch.int32)
        self._gates = self._at[:heads] + dim if description.has_gates else None
        self._norms = description.norm_weights
        norms = [] if self._norms is None else [norm.data_ptr() for norm in self._norms]
        self._layer = LayerStruct(
            **dict(zip(("q_norm", "k_norm"), norms, strict=False)),
            scale=description.scale,
            window=profile.window or 0,
        )
        self.model = ModelStruct(
            layers=(LayerStruct * 1)(self._layer),
            num_layers=1,
            hidden=self._widest,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            head_norm_eps=description.norm_eps,
        )
        self._struct = ModuleAttentionStruct(
            model=ctypes.pointer(self.model),
            at=self._at.data_ptr(),
            gates=None if self._gates is None else self._gates.data_ptr(),
            width=self._projected,
            num_inputs=self.hidden,
            num_outputs=self.num_outputs,
            index=index,
            key_scale=description.key_scale,
        )
        self._packed: list[Any] = []
        """What the struct's products point to, once they are packed."""

    def compute(self, x: Tensor, batch: BatchCall, rotation: Rotation | None) -> Tensor:
        """x ``[1, T, inputs]`` -> ``[1, T, outputs]``; keys and values of its tokens are stored."""
        if are_hooked(self.linears()) or self.packed_struct() is None:
            return self.by_linears(x, batch, rotation)
        rows = float_rows(x)
        projected = torch.empty(len(rows), self._projected)
        y = torch.empty(len(rows), self.num_outputs)
        self._call(batch, rotation, projected, x=rows.data_ptr(), y=y.data_ptr())
        return y.to(x.dtype).view(1, *y.shape)

    def by_linears(self, x: Tensor, batch: BatchCall, rotation: Rotation | None) -> Tensor:
        """The same, with the products of the module's linears."""
        *entering, out = self.linears()
        projected = float_rows(torch.cat([linear(x) for linear in entering], -1))
        mixed = self._call(batch, rotation, projected)
        y: Tensor = out(mixed[:, : self._num_mixed].to(x.dtype)[None])
        return y

    def _call(
        self, batch: BatchCall, rotation: Rotation | None, projected: Tensor, **products: int
    ) -> Tensor:
        """Outputs of the heads ``[T, hidden]``."""
        mixed = torch.empty(len(projected), self._widest)
        rotary = None if rotation is None else batch.rotary(rotation)
        self.model.rotary_dim = 0 if rotary is None else rotary.shape[-1]
        call = ModuleAttentionCallStruct(
            projected=projected.data_ptr(),
            mixed=mixed.data_ptr(),
            rotary=None if rotary is None else rotary.data_ptr(),
            batch=ctypes.pointer(batch.struct),
            **products,
        )
        load_library().module_attention(ctypes.byref(self._struct), ctypes.byref(call))
        return mixed

    def linears(self) -> list[nn.Module]:
        """Of the module, which are replaced once they are packed."""
        return [getattr(self._part, name) for name in ("q_proj", "k_proj", "v_proj", self._out)]

    def packed_struct(self) -> ModuleAttentionStruct | None:
        """With the weights of the linears; None: they are not packed."""
        if not self._packed and (packed := packed_linears(self.linears())) is not None:
            *entering, out = packed
            structs = (LinearStruct * len(entering))(*(linear.struct for linear in entering))
            self._packed = [structs, packed]
            self._struct.enter, self._struct.num_enter = structs, len(entering)
            self._struct.out = ctypes.pointer(out.struct)
        return self._struct if self._packed else None


class NativeAttentionCore:
    """The attention of a layer whose other parts torch calls, from queries, keys and values on.

    Torch's kernels would round a query by the number of those beside it.

    Args:
        profile: of the layer.
        index: of its keys and values in a storage, whose values are as wide as its keys.
    """

    def __init__(self, profile: LayerProfile, index: int) -> None:
        dim, heads, kv_heads = profile.shape.key_dim, profile.heads, profile.shape.kv_heads
        self._width = (heads + 2 * kv_heads) * dim
        self._at = torch.arange(0, self._width, dim, dtype=torch.int32)
        window = profile.window or 0
        self._layers = (LayerStruct * 1)(LayerStruct(window=window))
        self.model = ModelStruct(
            layers=self._layers,
            num_layers=1,
            hidden=heads * dim,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
        )
        self._struct = ModuleAttentionStruct(
            model=ctypes.pointer(self.model),
            at=self._at.data_ptr(),
            width=self._width,
            index=index,
            key_scale=1.0,
        )

    @staticmethod
    def takes(profile: LayerProfile) -> bool:
        """Whether a layer may be computed so."""
        shape = profile.shape
        is_narrow = shape.value_dim <= shape.key_dim <= MAX_HEAD_DIM
        return is_narrow and not profile.sinks and profile.heads // shape.kv_heads <= MAX_GROUP

    def attend(self, states: tuple[Tensor, Tensor, Tensor], batch: BatchCall, scoring: Any) -> Any:
        """Queries, keys and values, as of ``ForwardPass.attend`` -> what that returns."""
        q, k, v = states
        value_dim, dim = v.shape[-1], self.model.head_dim
        v = torch.nn.functional.pad(v, (0, dim - value_dim))
        projected = float_rows(torch.cat([x.flatten(1) for x in (q, k, v)], 1))
        self._layers[0].scale, self.model.score_cap = scoring.scale, scoring.softcap or 0.0
        mixed = torch.empty(len(projected), self.model.hidden)
        call = ModuleAttentionCallStruct(
            projected=projected.data_ptr(),
            mixed=mixed.data_ptr(),
            batch=ctypes.pointer(batch.struct),
        )
        load_library().module_attention(ctypes.byref(self._struct), ctypes.byref(call))
        return mixed.view(len(projected), -1, dim)[..., :value_dim].to(q.dtype)


class BatchCall:
    """What all attention layers of a module are told of a batch.

    Args:
        forward_pass: over its pages.
        scratch: where layers compute.
    """

    def __init__(self, forward_pass: ForwardPass, scratch: _Scratch) -> None:
        layout, num_tokens = forward_pass.layout(), len(forward_pass.batch.token_ids)
        rows, self._kept, longest = packed_rows(layout)
        positions = torch.arange(num_tokens)  # in ``rotary``
        max_length, num_threads = row_capacity(longest), native_threads()
        memory = scratch.of(num_tokens, max_length, num_threads)
        keys = layout.addresses.buffer_info()[0]
        self._kept += [layout, positions, memory]
        self._rotation: Rotation | None = None
        self._rotary = torch.empty(0)
        self.struct = CallStruct(
            positions=positions.data_ptr(),
            slots=layout.slots.data_ptr(),
            rows=(RowStruct * len(layout.rows)).from_buffer(rows),
            keys=keys,
            values=keys + layout.addresses.itemsize * (len(layout.addresses) // 2),
            scratch=memory.data_ptr(),
            num_tokens=num_tokens,
            num_rows=len(layout.rows),
            page_size=layout.page_size,
            max_length=max_length,
            num_threads=num_threads,
            kv_type=KV_TYPES[layout.dtype],
        )

    def rotary(self, rotation: Rotation) -> Tensor:
        """Float32 ``[T, 2, rotary_dim]``: cosines and signed sines, the same for most layers."""
        if self._rotation is None or self._rotation[0] is not rotation[0]:
            cosines, sines = (x[0].float() for x in rotation)
            first, second = sines.chunk(2, -1)
            self._rotary = torch.stack([cosines, torch.cat([-first, second], -1)], 1)
            self._rotation = rotation
        return self._rotary


class _Scratch:
    """Memory of calls, one at a time, that is large enough for every layer."""

    def __init__(self, models: Sequence[ModelStruct]) -> None:
        self._models = models
        self._memory = torch.empty(0)
        self._fits = (0, 0, 0)

    def of(self, *sizes: int) -> Tensor:
        """For a number of tokens, a length of rows and a number of threads."""
        if any(size > fits for size, fits in zip(sizes, self._fits, strict=True)):
            self._fits = tuple(map(max, sizes, self._fits))  # type: ignore[assignment]
            size_of = load_library().scratch_size
            sizes_needed = [size_of(ctypes.byref(model), *self._fits) for model in self._models]
            self._memory = torch.empty(max(sizes_needed, default=0))
        return self._memory


class NativeAttention:
    """The attention layers of a module.

    Args:
        modules: of them.
        layers: in the order of their keys and values; None: not known here.
        cores: of the same layers; None: torch attends.

    Attributes:
        by_module: those that are known.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        layers: Sequence[NativeAttentionLayer | None],
        cores: Sequence[NativeAttentionCore | None],
    ) -> None:
        self._layers, self._cores = layers, cores
        pairs = zip(modules, layers, strict=True)
        self.by_module = {part: layer for part, layer in pairs if layer is not None}
        parts = [part for part in (*layers, *cores) if part is not None]
        self._scratch = _Scratch([part.model for part in parts])

    @classmethod
    def of(cls, modules: Sequence[nn.Module], profiles: Sequence[LayerProfile]) -> NativeAttention:
        """Of modules, in the order of their keys and values."""
        pairs = zip(modules, profiles, strict=True)
        descriptions = [describe(part, profile) for part, profile in pairs]
        return cls(
            modules,
            [
                None
                if description is None
                else NativeAttentionLayer(modules[index], description, profiles[index], index)
                for index, description in enumerate(descriptions)
            ],
            [
                NativeAttentionCore(profile, index) if NativeAttentionCore.takes(profile) else None
                for index, profile in enumerate(profiles)
            ],
        )

    def is_known(self, index: int) -> bool:
        """Whether a layer may be computed here."""
        return self._layers[index] is not None

    def has_core(self, index: int) -> bool:
        """Whether queries, keys and values of a layer may be attended with here."""
        return self._cores[index] is not None

    def attend(
        self, index: int, states: tuple[Tensor, Tensor, Tensor], batch: BatchCall, scoring: Any
    ) -> Tensor:
        """Queries, keys and values of a layer -> as ``ForwardPass.attend``, with keys and values in
        a storage whose values are as wide as its keys.
        """
        core = self._cores[index]
        assert core is not None
        outputs: Tensor = core.attend(states, batch, scoring)
        return outputs

    def batch_call(self, forward_pass: ForwardPass) -> BatchCall:
        """Of a pass."""
        return BatchCall(forward_pass, self._scratch)

    def scratch(self, num_tokens: int, max_length: int, num_threads: int) -> Tensor:
        """Memory of a call that is large enough for every layer."""
        return self._scratch.of(num_tokens, max_length, num_threads)

    def compute(self, index: int, x: Tensor, batch: BatchCall, rotation: Rotation | None) -> Tensor:
        """x ``[1, T, inputs]`` -> ``[1, T, outputs]``, through a layer."""
        return self._layer(index).compute(x, batch, rotation)

    def agrees(
        self, index: int, x: Tensor, batch: BatchCall, rotation: Rotation | None, expected: Any
    ) -> bool:
        """Whether a layer gives what its module does."""
        if not isinstance(expected, Tensor) or expected.dtype not in TOLERANCES:
            return False
        if rotation is not None and rotation[0].shape != (1, x.shape[1], rotation[0].shape[-1]):
            return False
        return is_close(self._layer(index).by_linears(x, batch, rotation), expected)

    def _layer(self, index: int) -> NativeAttentionLayer:
        layer = self._layers[index]
        assert layer is not None
        return layer


def describe(part: nn.Module, profile: LayerProfile) -> _Description | None:
    """What an attention layer computes, by its attributes; None: it is not known."""
    try:
        return _description(part, profile)
    except AttributeError:
        return None


def _description(part: Any, profile: LayerProfile) -> _Description | None:
    dim, heads, kv_heads = profile.shape.key_dim, profile.heads, profile.shape.kv_heads
    out = next((name for name in OUT_NAMES if hasattr(part, name)), "")
    widths = [linear.out_features for linear in (part.q_proj, part.k_proj, part.v_proj)]
    gated = [heads * 2 * dim, kv_heads * dim, kv_heads * dim]
    has_gates = widths == gated
    if not has_gates and widths != [heads * dim, *gated[1:]]:
        return None
    if profile.softcap or profile.sinks or profile.shape.value_dim != dim:
        return None
    if getattr(part, out).in_features != heads * dim:
        return None
    if dim > MAX_HEAD_DIM or heads // kv_heads > MAX_GROUP:
        return None
    names = next((names for names in NORM_NAMES if hasattr(part, names[0])), ())
    parts = [getattr(part, name) for name in names]
    norms = [native_norm(norm, norm.weight.dtype) for norm in parts]
    weights = [norm.weight for norm in norms if norm is not None]
    if len(weights) < len(names) or any(len(weight) != dim for weight in weights):
        return None
    eps = {norm.eps for norm in norms if norm is not None}
    if len(eps) > 1:
        return None
    return _Description(
        out=out,
        norm_weights=(weights[0], weights[1]) if weights else None,
        norm_eps=eps.pop() if eps else 0.0,
        has_gates=has_gates,
        key_scale=float(getattr(part, "key_multiplier", 1.0)),
        scale=float(part.scaling),
    )
