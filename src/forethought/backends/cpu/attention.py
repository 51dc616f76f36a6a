"""Attention layers of transformers' modules in C++, over the pages of keys and values: products, QK
norms, latents, partial rotary embeddings, gates and the output product in one call
(``attention_layer.h``).

A layer is recognised by its attributes, and tried beside its module on a few tokens. The reference
of all is the module.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forethought.backends.cpu.forward import packed_rows, row_capacity
from forethought.backends.cpu.library import load_library
from forethought.backends.cpu.module_parts import (
    NativeNorm,
    are_hooked,
    float_rows,
    native_norm,
    packed_linears,
)
from forethought.backends.cpu.projections import Projection, Projections, low_rank_projections
from forethought.backends.cpu.structures import (
    CallStruct,
    LayerStruct,
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
        projections: the products that enter.
        out: name of the linear that leaves.
        at: where each head of queries, keys and values begins among the projections.
        scale: of the scores.
        value_dim: of a head.
        tails: where the dimensions of each head from ``split`` on begin; None: after the others.
        split: see above.
        gates: where the gates of the outputs of each head of queries begin; None: there are none.
        norm_weights: float32 ``[head_dim]`` of queries and keys; None: heads are not normed.
        norm_eps: of these.
        key_scale: factor of keys.
    """

    projections: Projections
    out: str
    at: Tensor
    scale: float
    value_dim: int
    tails: Tensor | None = None
    split: int = 0
    gates: Tensor | None = None
    norm_weights: tuple[Tensor, Tensor] | None = None
    norm_eps: float = 0.0
    key_scale: float = 1.0


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
        self._part, self._description = part, description
        self._projections = projections = description.projections
        self.hidden: int = projections.linears()[0].in_features
        self.num_outputs: int = part.get_submodule(description.out).out_features  # type: ignore[assignment]
        dim, heads = profile.shape.key_dim, profile.heads
        self._num_mixed = heads * description.value_dim
        self._widest = max(projections.widest_input, heads * dim)
        self.width = max(projections.width, self._widest)
        self.model = _model_of(description, profile, self._widest)
        self._tables = {
            name: None if table is None else table.int().contiguous()
            for name in ("at", "tails", "gates")
            for table in [getattr(description, name)]
        }
        self._struct = ModuleAttentionStruct(
            model=ctypes.pointer(self.model),
            **{name: None if x is None else x.data_ptr() for name, x in self._tables.items()},
            width=projections.width,
            num_inputs=self.hidden,
            num_outputs=self.num_outputs,
            index=index,
            split=description.split,
            value_dim=description.value_dim,
            key_scale=description.key_scale,
        )
        self._packed: list[Any] = []
        """What the struct's products point to, once they are packed."""

    def compute(self, x: Tensor, batch: BatchCall, rotation: Rotation | None) -> Tensor:
        """x ``[1, T, inputs]`` -> ``[1, T, outputs]``; keys and values of its tokens are stored."""
        if are_hooked(self.linears()) or self.packed_struct() is None:
            return self.by_linears(x, batch, rotation)
        rows = float_rows(x)
        projected = torch.empty(len(rows), self._projections.width)
        y = torch.empty(len(rows), self.num_outputs)
        self._call(batch, rotation, projected, x=rows.data_ptr(), y=y.data_ptr())
        return y.to(x.dtype).view(1, *y.shape)

    def by_linears(self, x: Tensor, batch: BatchCall, rotation: Rotation | None) -> Tensor:
        """The same, with the products of the module's linears."""
        mixed = self._call(batch, rotation, self._projections.multiply(x))
        y: Tensor = self.linears()[-1](mixed[:, : self._num_mixed].to(x.dtype)[None])
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
        return [*self._projections.linears(), self._part.get_submodule(self._description.out)]

    def packed_struct(self) -> ModuleAttentionStruct | None:
        """With the weights of the linears; None: they are not packed."""
        if not self._packed and (packed := packed_linears(self.linears())) is not None:
            *entering, out = packed
            structs = self._projections.structs(entering)
            self._packed = [structs, packed]
            self._struct.enter, self._struct.num_enter = structs, len(entering)
            self._struct.out = ctypes.pointer(out.struct)
        return self._struct if self._packed else None


def _model_of(description: _Description, profile: LayerProfile, widest: int) -> ModelStruct:
    """Of one layer, whose widest input is given."""
    norms = [norm.data_ptr() for norm in description.norm_weights or ()]
    layer = LayerStruct(
        **dict(zip(("q_norm", "k_norm"), norms, strict=False)),
        scale=description.scale,
        window=profile.window or 0,
    )
    return ModelStruct(
        layers=(LayerStruct * 1)(layer),
        num_layers=1,
        hidden=widest,
        num_heads=profile.heads,
        num_kv_heads=profile.shape.kv_heads,
        head_dim=profile.shape.key_dim,
        head_norm_eps=description.norm_eps,
    )


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
            value_dim=dim,
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
    if not _may_be_native(profile):
        return None
    for describe_kind in (_description, _latent_description):
        try:
            description = describe_kind(part, profile)
        except AttributeError:
            continue
        if description is not None and _is_possible(part, description, profile):
            return description
    return None


def _may_be_native(profile: LayerProfile) -> bool:
    group = profile.heads // profile.shape.kv_heads
    is_plain = not profile.softcap and not profile.sinks
    return is_plain and profile.shape.key_dim <= MAX_HEAD_DIM and group <= MAX_GROUP


def _is_possible(part: nn.Module, description: _Description, profile: LayerProfile) -> bool:
    inputs: Any = part.get_submodule(description.out).in_features
    is_narrow = profile.shape.value_dim == description.value_dim <= profile.shape.key_dim
    return is_narrow and inputs == profile.heads * description.value_dim


def _out_name(part: nn.Module) -> str:
    return next((name for name in OUT_NAMES if hasattr(part, name)), "")


def _description(part: Any, profile: LayerProfile) -> _Description | None:
    """Of queries, keys and values that are products of the inputs."""
    dim, heads, kv_heads = profile.shape.key_dim, profile.heads, profile.shape.kv_heads
    widths = [linear.out_features for linear in (part.q_proj, part.k_proj, part.v_proj)]
    gated = [heads * 2 * dim, kv_heads * dim, kv_heads * dim]
    has_gates = widths == gated
    if not has_gates and widths != [heads * dim, *gated[1:]]:
        return None
    norms, added = _norms_of(part), _added_products(part, widths)
    if norms is None:
        return None
    is_by_head = {len(norm.weight) for norm in norms} == {dim}
    is_whole = [len(norm.weight) for norm in norms] == widths[:2] and not added
    if norms and not is_by_head and not is_whole:
        return None
    items, begin = list[Projection](), 0
    for name, width, norm in itertools.zip_longest("qkv", widths, () if is_by_head else norms):
        items.append(Projection(f"{name}_proj", begin, norm=norm))
        begin += width
    step = 2 * dim if has_gates else dim
    queries = torch.arange(heads) * step
    return _Description(
        projections=Projections(part, [*items, *added]),
        out=_out_name(part),
        at=torch.cat([queries, heads * step + torch.arange(2 * kv_heads) * dim]),
        scale=float(part.scaling),
        value_dim=dim,
        gates=queries + dim if has_gates else None,
        norm_weights=(norms[0].weight, norms[1].weight) if is_by_head else None,
        norm_eps=norms[0].eps if is_by_head else 0.0,
        key_scale=float(getattr(part, "key_multiplier", 1.0)),
    )


def _norms_of(part: Any) -> list[NativeNorm] | None:
    """Of queries and keys, empty: they are not normed; None: the norms are others."""
    names = next((names for names in NORM_NAMES if hasattr(part, names[0])), ())
    parts = [getattr(part, name) for name in names]
    norms = [native_norm(norm, norm.weight.dtype) for norm in parts]
    rms_norms = [norm for norm in norms if norm is not None]
    if len(rms_norms) < len(names) or len({norm.eps for norm in rms_norms}) > 1:
        return None
    return rms_norms


def _added_products(part: Any, widths: Sequence[int]) -> list[Projection]:
    """What Zamba2 adds to queries, keys and values: products of low rank, which each use of shared
    weights has of its own.
    """
    if not hasattr(part, "linear_q_adapter_list"):
        return []
    items, begin, low = list[Projection](), 0, sum(widths)
    for name, width in zip("qkv", widths, strict=True):
        pair = f"linear_{name}_adapter_list.{part.kv_index}"
        items += low_rank_projections(pair, begin, low)
        begin, low = begin + width, low + part.get_submodule(f"{pair}.0").out_features
    return items


def _latent_description(part: Any, profile: LayerProfile) -> _Description | None:
    """Of multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1) without rotation:
    keys and values are products of a latent, and the last dimensions of keys are shared.
    """
    dim, heads, nope = profile.shape.key_dim, profile.heads, part.qk_nope_head_dim
    latent_norm = native_norm(part.kv_a_layernorm, part.kv_a_layernorm.weight.dtype)
    if latent_norm is None or profile.shape.kv_heads != heads:
        return None
    items, queries = [Projection("q_proj", 0)], 0
    if part.q_proj is None:
        norm = native_norm(part.q_a_layernorm, part.q_a_layernorm.weight.dtype)
        if norm is None:
            return None
        queries = part.q_a_proj.out_features
        items = [Projection("q_a_proj", 0, norm=norm), Projection("q_b_proj", queries, source=0)]
    latent = queries + heads * dim
    shared = latent + part.kv_lora_rank
    expanded, step = shared + dim - nope, nope + part.v_head_dim
    items.append(Projection("kv_a_proj_with_mqa", latent, norm=latent_norm))
    items.append(Projection("kv_b_proj", expanded, source=latent))
    numbers = torch.arange(heads)
    keys = expanded + numbers * step
    at = torch.cat([queries + numbers * dim, keys, keys + nope])
    tails = at + nope
    tails[heads : 2 * heads] = shared
    return _Description(
        projections=Projections(part, items),
        out=_out_name(part),
        at=at,
        scale=float(part.scaling),
        value_dim=part.v_head_dim,
        tails=tails,
        split=nope,
    )
