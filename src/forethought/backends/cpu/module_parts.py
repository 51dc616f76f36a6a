"""Parts of a module of transformers that are computed in C++ although torch runs the module.

Linears are packed, and their weights leave the module; MLPs and RMS norms become one call each.
What a part computes is found by its attributes and tried on a few inputs: one that computes
something else, such as an MLP with a clamp, stays as it is. Activations between the parts have
the dtype of the module; within an MLP they are float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from forethought.backends.cpu.library import load_library
from forethought.backends.cpu.norms import norm_rows
from forethought.backends.cpu.packed_linear import TYPES, PackedLinear, stored_refusal
from forethought.backends.cpu.projections import (
    Projection,
    Projections,
    low_rank_projections,
)
from forethought.backends.cpu.structures import ExpertsCallStruct, MlpStruct
from forethought.backends.cpu.weights import PackedExperts
from forethought.model.device import native_threads
from forethought.model.quantization import QuantizedLinear, SharedWeights
from forethought.model.quantized_experts import QuantizedExperts, weights_of
from forethought.model.tolerance import TOLERANCES, is_close

MLPS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("input_linear", "output_linear"),
    ("gate_up_proj", "down_proj"),
    ("up_proj", "down_proj"),
)
"""Names of the linears of an MLP: gate, factor and output; gate and factor in one, and output; or
what is activated, and output."""
LOW_RANK = "gate_up_proj_adapter_list"
"""Products of low rank in an MLP whose weights several layers share, by its uses."""
ACTIVATIONS = {
    "SiLU": 0,
    "SiLUActivation": 0,
    "silu": 0,
    "GELUTanh": 1,
    "ReLUSquaredActivation": 2,
    "GELUActivation": 3,
}
"""``enum Activation`` by the classes and functions that modules have."""


class NativeLinear(nn.Module):
    """A packed linear in the place of an ``nn.Linear`` or a ``QuantizedLinear``."""

    def __init__(self, packed: PackedLinear, num_inputs: int) -> None:
        super().__init__()
        self.packed = packed
        self.in_features, self.out_features = num_inputs, packed.num_outputs

    @override
    def forward(self, x: Tensor) -> Tensor:
        """x ``[..., in]`` -> ``[..., out]`` in its dtype."""
        return self.packed.multiply(x).to(x.dtype)


class NativeEmbedding(nn.Module):
    """Embeddings that are the weights of a packed output projection."""

    def __init__(self, packed: PackedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed, self.dtype = packed, dtype
        self.num_embeddings = int(packed.struct.num_outputs)
        self.embedding_dim = int(packed.struct.num_inputs)

    @override
    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 ``[...]`` -> ``[..., hidden]``. Raises IndexError for an unknown token."""
        ids = token_ids.flatten().contiguous()
        if len(ids) and not (ids.min() >= 0 and ids.max() < self.num_embeddings):
            raise IndexError("a token id is outside the vocabulary")
        embeddings = torch.empty(len(ids), self.embedding_dim)
        load_library().embed(
            ctypes.byref(self.packed.struct),
            ctypes.c_void_p(ids.data_ptr()),
            len(ids),
            ctypes.c_void_p(embeddings.data_ptr()),
        )
        return embeddings.to(self.dtype).view(*token_ids.shape, -1)


def packed_linears(linears: Sequence[nn.Module]) -> list[PackedLinear] | None:
    """Their weights; None: some are not packed."""
    packed = [linear.packed for linear in linears if isinstance(linear, NativeLinear)]
    return packed if len(packed) == len(linears) else None


def are_hooked(linears: Sequence[nn.Module]) -> bool:
    """Whether something, such as an adapter, changes what these linears compute."""
    return any(linear._forward_hooks for linear in linears)


def float_rows(x: Tensor) -> Tensor:
    """``[..., size]`` -> float32 ``[T, size]``, contiguous."""
    if x.dtype == torch.float32 and x.is_contiguous():
        return x.view(-1, x.shape[-1])
    return x.reshape(-1, x.shape[-1]).float().contiguous()


@dataclass(slots=True)
class NativeMlp:
    """The forward of an MLP."""

    part: nn.Module
    projections: Projections
    """Of the linears that enter: those of the gate, if there is one, then those of the factor."""
    down: str
    """Name of the linear that leaves."""
    activation: int
    hidden: int
    inner: int
    has_gate: bool
    gate_scale: float = 1.0
    """Factor of the outputs of the gate."""
    scale: float = 1.0
    """Factor of its own."""
    _packed: list[Any] = field(default_factory=list, init=False)
    """The struct with weights, and what it points to; empty: they are not packed."""

    @property
    def num_outputs(self) -> int:
        """As many as inputs."""
        return self.hidden

    @property
    def width(self) -> int:
        """Floats of a token between the products."""
        return self.projections.width

    def __call__(self, x: Tensor, *_: Any) -> Tensor:
        """x ``[..., hidden]`` -> the same."""
        if are_hooked(self.linears()) or (struct := self.packed_struct()) is None:
            return self.by_linears(x)
        rows = float_rows(x)
        activations = torch.empty(rows.shape[0], self.width)
        y = torch.empty(rows.shape[0], self.hidden)
        self._call(struct, rows.data_ptr(), activations, y.data_ptr())
        return self._scaled(y).to(x.dtype).view(x.shape)

    def by_linears(self, x: Tensor) -> Tensor:
        """The same, with the products of the part's linears."""
        activations = self.projections.multiply(x.reshape(1, -1, self.hidden))
        self._call(self._struct_of(), None, activations, None)
        y: Tensor = self.linears()[-1](activations[:, : self.inner].to(x.dtype))
        return self._scaled(y).view(x.shape)

    def _scaled(self, y: Tensor) -> Tensor:
        return y if self.scale == 1 else y * self.scale

    def linears(self) -> list[nn.Module]:
        """Of the part, which are replaced once they are packed."""
        return [*self.projections.linears(), self.part.get_submodule(self.down)]

    def packed_struct(self) -> MlpStruct | None:
        """With the weights of the linears; None: they are not packed."""
        if not self._packed and (packed := packed_linears(self.linears())) is not None:
            *entering, down = packed
            structs = self.projections.structs(entering)
            struct = self._struct_of(enter=structs, num_enter=len(structs), down=down.struct)
            self._packed = [struct, structs, packed]
        return self._packed[0] if self._packed else None

    def _call(self, struct: MlpStruct, x: int | None, activations: Tensor, y: int | None) -> None:
        num_tokens, num_threads = activations.shape[0], native_threads()
        rows = activations.data_ptr()
        load_library().mlp(ctypes.byref(struct), x, num_tokens, rows, y, num_threads)

    def _struct_of(self, **products: Any) -> MlpStruct:
        return MlpStruct(
            activation=self.activation,
            hidden=self.hidden,
            inner=self.inner,
            width=self.width,
            has_gate=self.has_gate,
            gate_scale=self.gate_scale,
            **products,
        )


@dataclass(frozen=True, slots=True)
class NativeNorm:
    """The forward of an RMS norm, whose weight is float32."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """x ``[..., size]`` -> the same."""
        y = norm_rows(float_rows(x), self.weight, self.eps)
        return y.to(x.dtype).view(x.shape)


@dataclass(frozen=True, slots=True)
class NativeActivation:
    """The forward of an activation. Torch computes the last elements of a tensor, which fill no
    vector, by another function, so that a row depends on those beside it.
    """

    activation: int

    def __call__(self, x: Tensor) -> Tensor:
        """x ``[..., size]`` -> the same."""
        rows = x.reshape(-1, x.shape[-1]).to(torch.float32, copy=True).contiguous()
        num_tokens, size = rows.shape
        struct = MlpStruct(activation=self.activation, inner=size, width=size)
        load_library().mlp(
            ctypes.byref(struct), None, num_tokens, rows.data_ptr(), None, native_threads()
        )
        return rows.to(x.dtype).view(x.shape)


class NativeExperts(nn.Module):
    """Packed experts in the place of a module of transformers, whose routers choose them."""

    def __init__(self, packed: PackedExperts, activation: int) -> None:
        super().__init__()
        self.packed, self.activation = packed, activation

    def __len__(self) -> int:
        return int(self.packed.struct.num_experts)

    @override
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Arguments and result as of ``QuantizedExperts``."""
        library, struct = load_library(), self.packed.struct
        struct.top_k = chosen.shape[1]
        rows = float_rows(x)
        num_tokens, hidden = rows.shape
        num_threads = native_threads()
        size = library.experts_scratch_size(ctypes.byref(struct), hidden, num_tokens, num_threads)
        experts, factors = chosen.int().contiguous(), weights.float().contiguous()
        y, scratch = torch.zeros_like(rows), torch.empty(size)
        call = ExpertsCallStruct(
            x=rows.data_ptr(),
            chosen=experts.data_ptr(),
            weights=factors.data_ptr(),
            y=y.data_ptr(),
            scratch=scratch.data_ptr(),
            num_tokens=num_tokens,
            activation=self.activation,
            num_threads=num_threads,
        )
        library.experts(ctypes.byref(struct), ctypes.byref(call))
        return y.to(x.dtype)


def use_native_parts(module: nn.Module, excluded: Collection[nn.Module]) -> None:
    """Have the parts of a module on a CPU computed in C++.

    Args:
        module: a language model of transformers; its linears' weights are taken.
        excluded: linears that are not called.
    """
    if module.dtype not in TOLERANCES:
        return
    uses = _uses_of_mlps(module)
    for part in module.modules():
        forward = (
            _mlp_of(part, module.dtype, uses.get(part))
            or native_norm(part, module.dtype)
            or _activation_of(part, module.dtype)
        )
        if forward is not None:
            part.forward = forward  # type: ignore[assignment]
    # The names alone, as a part is freed before the next one is packed.
    for name in [name for name, part in module.named_modules() if _may_be_experts(part)]:
        experts = _experts_of(module.get_submodule(name), module.dtype)
        if experts is not None:
            module.set_submodule(name, experts)
    _pack_linears(module, excluded)


def _pack_linears(module: nn.Module, excluded: Collection[nn.Module]) -> None:
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    is_tied = type(embedding) is nn.Embedding and getattr(head, "weight", None) is embedding.weight
    unseen = set(excluded).union(
        *(part.modules() for part in module.modules() if isinstance(part, QuantizedExperts))
    )
    names = [name for name, part in module.named_modules() if part not in unseen and _packs(part)]
    shared = SharedWeights[PackedLinear](map(module.get_submodule, names))
    for name in names:
        linear: Any = module.get_submodule(name)
        packed = NativeLinear(shared.made_of(linear, PackedLinear.of), linear.in_features)
        if linear is head and is_tied:
            module.set_input_embeddings(NativeEmbedding(packed.packed, module.dtype))
        module.set_submodule(name, packed)


def _packs(linear: nn.Module) -> bool:
    if type(linear) is nn.Linear:
        return linear.weight.dtype in TYPES
    weight = linear.weight if isinstance(linear, QuantizedLinear) else None
    return weight is not None and stored_refusal(weight) is None


def _uses_of_mlps(module: nn.Module) -> dict[nn.Module, int]:
    """Of MLPs whose weights several layers share, which of these uses each is: the number of the
    attention layer beside it.
    """
    return {
        child: block.self_attn.kv_index  # type: ignore[union-attr,misc]
        for block in module.modules()
        if hasattr(getattr(block, "self_attn", None), "kv_index")
        for child in block.children()
        if hasattr(child, LOW_RANK)
    }


def _mlp_of(part: nn.Module, dtype: torch.dtype, use: int | None) -> NativeMlp | None:
    children = dict(part.named_children())
    if use is not None:
        return _shared_mlp(part, use, dtype)
    for names in MLPS:
        linears = [child for child in children.values() if _is_linear(child)]
        if {*names} <= children.keys() and len(linears) == len(names):
            return _tried_mlp(part, names, dtype)
    return None


def _tried_mlp(part: nn.Module, names: tuple[str, ...], dtype: torch.dtype) -> NativeMlp | None:
    activations = [child for child in part.children() if not _is_linear(child)]
    projections = Projections.beside(part, names[:-1])
    mlp = _described_mlp(part, projections, projections.width, names[-1], activations)
    if mlp is None:
        return None
    return mlp if agrees(part.forward, mlp.by_linears, trial_input(mlp.hidden, dtype)) else None


def _shared_mlp(part: Any, use: int, dtype: torch.dtype) -> NativeMlp | None:
    """Zamba2's: to the gate and the factor a product of low rank is added, which each use of the
    shared weights has of its own.
    """
    names = MLPS[3]
    width = part.gate_up_proj.out_features
    added = low_rank_projections(f"{LOW_RANK}.{use}", 0, width)
    projections = Projections(part, [Projection(names[0], 0), *added])
    mlp = _described_mlp(part, projections, width, names[-1], [part.act_fn])
    [layer_idx] = (layer for layer, number in part.layer_dic.items() if number == use)
    if mlp is None:
        return None
    forward = partial(part.forward, layer_idx=layer_idx)
    return mlp if agrees(forward, mlp.by_linears, trial_input(mlp.hidden, dtype)) else None


def _described_mlp(
    part: nn.Module,
    projections: Projections,
    width: int,
    out: str,
    activations: Sequence[nn.Module],
) -> NativeMlp | None:
    """Of a gate and a factor, or a factor alone, in ``width`` projections; None: it has another
    activation, or other widths.
    """
    known = [ACTIVATIONS.get(type(activation).__name__) for activation in activations]
    if len(known) > 1 or None in known:
        return None
    activation = known[0] if known else ACTIVATIONS["SiLU"]
    assert activation is not None
    down: Any = part.get_submodule(out)
    inner = down.in_features
    if width not in (inner, 2 * inner):
        return None
    sizes = down.out_features, inner, width > inner
    scales = (float(getattr(part, name, 1.0)) for name in ("gate_multiplier", "down_multiplier"))
    return NativeMlp(part, projections, out, activation, *sizes, *scales)


def native_norm(part: nn.Module, dtype: torch.dtype) -> NativeNorm | None:
    """The forward of an RMS norm; None: it is none, or stays in torch."""
    weight, eps = getattr(part, "weight", None), getattr(part, "variance_epsilon", None)
    eps = getattr(part, "eps", None) if eps is None else eps
    if "RMSNorm" not in type(part).__name__ or not isinstance(eps, float):
        return None
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    plain = weight.detach().to(torch.float32, copy=True)
    x = trial_input(len(plain), dtype)
    forwards = (NativeNorm(scale, eps) for scale in (plain, 1 + plain))
    return next((forward for forward in forwards if agrees(part.forward, forward, x)), None)


def _activation_of(part: nn.Module, dtype: torch.dtype) -> NativeActivation | None:
    activation = ACTIVATIONS.get(type(part).__name__)
    if activation is None:
        return None
    native = NativeActivation(activation)
    return native if agrees(part.forward, native, trial_input(32, dtype)) else None


def _may_be_experts(part: nn.Module) -> bool:
    """Whether it has weights of experts in the layout that is packed, of types that are."""
    module = part._activation if isinstance(part, QuantizedExperts) else part
    if not hasattr(module, "has_gate") or module.has_bias or module.is_transposed:
        return False
    if isinstance(part, QuantizedExperts):
        return all(map(_packs, part.linears()))
    weights = (getattr(part, name, None) for name in weights_of(part))
    return all(isinstance(weight, Tensor) and weight.dtype in TYPES for weight in weights)


def _experts_of(part: Any, dtype: torch.dtype) -> NativeExperts | None:
    module = part._activation if isinstance(part, QuantizedExperts) else part
    act = getattr(module, "act_fn", nn.SiLU())
    activation = ACTIVATIONS.get(getattr(act, "__name__", type(act).__name__))
    if activation is None:
        return None
    experts = NativeExperts(PackedExperts.chosen_elsewhere(part), activation)
    last = len(experts) - 1
    x = trial_input(int(experts.packed.struct.gate_up[0].num_inputs), dtype)[0]
    chosen = torch.tensor([[0, last], [last, 0]])
    weights = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).to(dtype)
    expected = part(x, chosen, weights)
    return experts if is_close(experts(x, chosen, weights), expected) else None


def _is_linear(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear | QuantizedLinear)


def trial_input(size: int, dtype: torch.dtype) -> Tensor:
    """Inputs ``[1, 2, size]`` of a part that is tried."""
    return torch.linspace(-3, 3, 2 * size, dtype=torch.float32).to(dtype).view(1, 2, size)


def agrees(
    forward: Callable[[Tensor], Tensor], native: Callable[[Tensor], Tensor], x: Tensor
) -> bool:
    """Whether two forwards give the same of an input."""
    try:
        expected = forward(x)
    except (TypeError, RuntimeError, IndexError, ValueError, AttributeError):  # it takes more
        return False
    same_shape = isinstance(expected, Tensor) and expected.shape == x.shape
    return same_shape and expected.dtype in TOLERANCES and is_close(native(x), expected)
