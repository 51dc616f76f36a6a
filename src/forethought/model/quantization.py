"""Weights in 8 and 4 bits, multiplied by activations in 32, 16 or 8 bits.

A quantised weight W ``[out, in]`` is stored as integers q with a scale s and a zero point z per
group of inputs of one output: ``W[o, i] = (q[o, i] - z[o, g]) * s[o, g]`` with
``g = i // group_size``. With ``int8`` and ``int4`` activations are not quantised, so the model is
the one that the stored weights describe, and speculative decoding stays exact with respect to it.

With ``w8a8`` and ``w4a8`` (weights and activations, as vLLM names them) each row of activations is
rounded to 8 bits, too, and integers are multiplied by integers (``model.integer_product``).

* ``quantize`` rounds a weight to the nearest (``LlmArgs.quantization``); ``QuantizedWeight`` may
  also come from a checkpoint (``model.quantized_checkpoint``).
* ``StoredWeight`` is the protocol of weights that are not plain tensors: ``QuantizedWeight``, and
  ``BlockWeight`` of a GGUF file.
* ``QuantizedLinear`` replaces an ``nn.Linear`` in a transformers module.
* ``QuantizedProjection`` multiplies: by torch's kernels for packed weights on CPU
  (``_weight_int8pack_mm``, ``_weight_int4pack_mm_for_cpu``), or by dequantising blocks of rows of
  W, which is also the reference implementation. ``IntegerProduct`` is that of activations in 8
  bits, which the native forward computes to the last bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forethought.config.quantization import Quantization
from forethought.errors import ModelError
from forethought.model import backends
from forethought.model.integer_product import ACTIVATION_GROUP, IntegerProduct, IntegerWeight

BITS = {"int8": 8, "int4": 4, "w8a8": 8, "w4a8": 4}
"""Of weights."""
INT4_GROUP_SIZES = (128, 64, 32)
"""Inputs that share a scale in 4 bits: the first that divides the width is taken."""
KERNEL_GROUP_SIZES = (32, 64, 128, 256)
"""Group sizes of torch's 4-bit kernel."""
KERNEL_OUTPUTS = 32
"""torch's 4-bit kernel takes a multiple of as many outputs."""
INT8_KERNEL_INPUTS = 16
"""torch's 8-bit kernel takes a multiple of as many inputs: with AVX-512 it reads past others."""
ALIGNMENT = 64
"""Bytes; with AVX-512 torch's 8-bit kernel faults on operands that begin elsewhere, as those of a
mapped safetensors file may."""
MAX_INT8_KERNEL_ROWS = 12
"""Rows up to which the 8-bit kernel is faster than dequantising, and multiplying in 16 bits."""
BLOCK = 2**20
"""Elements of a weight that are dequantised at once on a CPU."""
CUDA_BLOCK = 2**26
"""The same on CUDA, where each block costs several kernel launches."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight ``[out, in]`` as integers.

    Attributes:
        values: int8 ``[out, in]`` (8 bits, -128 to 127), or uint8 ``[out, in]`` (4 bits, 0 to 15).
        scales: ``[out, groups]`` in the dtype of the model.
        zeros: float32 ``[out, groups]``, the integer that stands for 0; None: 0 in 8 bits, 8 in 4.
        bits: 8 or 4.
        rounds_input: activations are rounded to 8 bits. In 8 bits scales are per output; in 4 they
            are values of bfloat16, and groups multiples of ``ACTIVATION_GROUP`` inputs.
        is_native: integers are multiplied in C++, whatever computes the rest of a layer.
        dtype: of activations.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    rounds_input: bool = False
    is_native: bool = False

    @property
    def shape(self) -> torch.Size:
        """``[out, in]``."""
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return self.scales.dtype

    @property
    def device(self) -> torch.device:
        """Of all tensors."""
        return self.values.device

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def offset(self) -> int:
        """The integer that stands for 0 where there are no zero points."""
        return 0 if self.bits == 8 else 8

    def rows(self, start: int, stop: int) -> Tensor:
        """Outputs ``start`` to ``stop``, dequantised: ``[stop - start, in]`` in ``dtype``."""
        values = self.values[start:stop].unflatten(1, (-1, self.group_size)).float()
        zeros = self.offset if self.zeros is None else self.zeros[start:stop, :, None]
        scaled = (values - zeros) * self.scales[start:stop, :, None].float()
        return scaled.flatten(1).to(self.dtype)

    def dequantize(self) -> Tensor:
        """The whole weight ``[out, in]`` in ``dtype``."""
        return self.rows(0, self.shape[0])

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """The same on another device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        values, scales = self.values.to(device), self.scales.to(device)
        return replace(self, values=values, scales=scales, zeros=zeros)

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors, 4-bit values counted as half a byte."""
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.values.numel() * self.bits // 8 + self.scales.nbytes + zeros

    @property
    def kind(self) -> tuple[object, ...]:
        """What weights have in common that can be concatenated."""
        return self.bits, self.group_size, self.zeros is None, self.rounds_input

    def followed_by(self, others: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """One weight of its outputs and then those of ``others``, which are of its ``kind``."""
        weights = [self, *others]
        zeros = [weight.zeros for weight in weights if weight.zeros is not None]
        assert len(zeros) in (0, len(weights))
        return replace(
            self,
            values=torch.cat([weight.values for weight in weights]),
            scales=torch.cat([weight.scales for weight in weights]),
            zeros=torch.cat(zeros) if zeros else None,
        )

    def integer_product(self) -> IntegerProduct:
        """The product with activations in 8 bits."""
        values = F.pad(self.values, (0, -self.shape[1] % ACTIVATION_GROUP))
        groups = values.unflatten(1, (-1, ACTIVATION_GROUP)).transpose(0, 1)
        if self.bits == 8:
            weight = IntegerWeight(groups, output_scales=self.scales[:, 0].float())
            return IntegerProduct(weight, self.dtype)
        zeros = self.offset if self.zeros is None else self.zeros
        num_groups = self.group_size // ACTIVATION_GROUP
        scales, offsets = (
            x.repeat_interleave(num_groups, 1).T
            for x in (self.scales.float(), -self.scales.float() * zeros)
        )
        return IntegerProduct(IntegerWeight(groups, scales, offsets), self.dtype)


class StoredWeight(Protocol):
    """A weight ``[out, in]`` that is not a plain tensor."""

    @property
    def shape(self) -> torch.Size:
        """``[out, in]``."""

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""

    @property
    def device(self) -> torch.device:
        """Of its tensors."""

    @property
    def rounds_input(self) -> bool:
        """Whether activations are rounded to 8 bits."""

    @property
    def is_native(self) -> bool:
        """Whether integers are multiplied in C++, whatever computes the rest of a layer."""

    @property
    def kind(self) -> tuple[object, ...]:
        """What weights have in common that can be concatenated."""

    @property
    def num_bytes(self) -> int:
        """Of its tensors."""

    def rows(self, start: int, stop: int) -> Tensor:
        """Outputs ``start`` to ``stop``, dequantised: ``[stop - start, in]`` in ``dtype``."""

    def dequantize(self) -> Tensor:
        """The whole weight ``[out, in]`` in ``dtype``."""

    def to(self, device: torch.device | str) -> Self:
        """A copy on another device."""

    def followed_by(self, others: Sequence[Self]) -> Self:
        """One weight of its outputs and then those of ``others``, which are of its ``kind``."""

    def integer_product(self) -> IntegerProduct:
        """The product with activations in 8 bits."""


QUANTIZED_ELEMENTS = 2**21
"""Of a weight, at a time."""


def quantize(weight: Tensor, bits: int, *, rounds_input: bool = False) -> QuantizedWeight:
    """Round a weight ``[out, in]`` to the nearest integers.

    8 bits: one scale per output, symmetric (``max |W| / 127``). 4 bits: one scale and one zero
    point per group of ``INT4_GROUP_SIZES`` inputs, from the group's minimum and maximum; ModelError
    if no group size divides the width.
    """
    quantized = _to_int8 if bits == 8 else partial(_to_int4, has_short_scales=rounds_input)
    rows = max(1, QUANTIZED_ELEMENTS // max(1, weight.shape[1]))  # small copies in float32
    whole = concatenated([quantized(part) for part in weight.split(rows)])
    return replace(whole, rounds_input=rounds_input)


def _to_int8(weight: Tensor) -> QuantizedWeight:
    exact = weight.float()
    scales = _positive(exact.abs().amax(1, keepdim=True) / 127, weight.dtype)
    values = (exact / scales.float()).round_().clamp_(-127, 127).to(torch.int8)
    return QuantizedWeight(values, scales, None, 8)


def _to_int4(weight: Tensor, has_short_scales: bool) -> QuantizedWeight:
    size = int4_group_size(weight.shape[1])
    if size is None:
        raise ModelError(
            "this model cannot be quantised to int4",
            f"a weight has {weight.shape[1]} inputs, which no group size of "
            f"{', '.join(map(str, INT4_GROUP_SIZES))} divides",
            'Use quantization="int8"',
        )
    groups = weight.float().unflatten(1, (-1, size))
    low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)
    exact = (high - low) / 15
    scales = _positive(exact.bfloat16() if has_short_scales else exact, weight.dtype)
    zeros = (-low / scales.float()).round_().clamp_(0, 15)
    values = (groups / scales.float()[:, :, None] + zeros[:, :, None]).round_().clamp_(0, 15)
    return QuantizedWeight(values.to(torch.uint8).flatten(1), scales, zeros, 4)


def has_output_scales(weight: QuantizedWeight) -> bool:
    """Whether it is in 8 bits, symmetric, with one scale per output."""
    return weight.bits == 8 and weight.scales.shape[1] == 1 and weight.zeros is None


def _positive(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in ``dtype``, none of them 0: weights that are all 0 are divided by them."""
    return scales.to(dtype).clamp_(min=torch.finfo(dtype).tiny)


def has_rounded_input(quantization: Quantization) -> bool:
    """Whether activations are quantised, too."""
    return quantization in ("w8a8", "w4a8")


def int4_group_size(width: int) -> int | None:
    """The group size of a weight with ``width`` inputs; None: it cannot be quantised to 4 bits."""
    return next((size for size in INT4_GROUP_SIZES if width % size == 0), None)


W = TypeVar("W", bound=StoredWeight)


def concatenated(weights: Sequence[W]) -> W:
    """One weight whose outputs are those of ``weights``, which are of one ``kind``."""
    return weights[0] if len(weights) == 1 else weights[0].followed_by(weights[1:])


class _Product(Protocol):
    """``x W^T`` for x ``[T, in]``."""

    def __call__(self, x: Tensor) -> Tensor: ...


class PackedInt4:
    """The 4-bit values of a weight, kept two in a byte."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self.packed = _pack_int4(weight.values)
        self.scales, self.zeros = weight.scales, weight.zeros

    def rows(self, start: int, stop: int) -> Tensor:
        """Outputs ``start`` to ``stop``, dequantised: ``[stop - start, in]``."""
        values, scales = _unpack_int4(self.packed[start:stop]), self.scales[start:stop]
        zeros = None if self.zeros is None else self.zeros[start:stop]
        return QuantizedWeight(values, scales, zeros, 4).dequantize()


class BlockwiseProduct:
    """Dequantises blocks of outputs and multiplies each: any device, dtype and number of rows.

    In bf16, 8-bit values with one scale per output are multiplied as they are, which is exact for
    them, and the products are scaled.
    """

    def __init__(self, weight: StoredWeight) -> None:
        block = CUDA_BLOCK if weight.device.type == "cuda" else BLOCK
        self.num_outputs, self.out_features = max(1, block // weight.shape[1]), weight.shape[0]
        self.source: StoredWeight | PackedInt4 = weight
        self.scaled: QuantizedWeight | None = None  # whose products are
        if isinstance(weight, QuantizedWeight):
            if weight.bits == 4:
                self.source = PackedInt4(weight)
            if has_output_scales(weight) and weight.dtype == torch.bfloat16:
                self.scaled = weight

    def __call__(self, x: Tensor) -> Tensor:
        """x ``[T, in]`` -> ``[T, out]``."""
        starts = range(0, self.out_features, self.num_outputs)
        parts = [self._part(x, start, start + self.num_outputs) for start in starts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _part(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Outputs ``start`` to ``stop``."""
        if self.scaled is None:
            return F.linear(x, self.source.rows(start, stop))
        values = self.scaled.values[start:stop].to(x.dtype)
        return F.linear(x, values).mul_(self.scaled.scales[start:stop, 0])


class Int8Product:
    """torch's 8-bit kernel for few rows, blocks for many; with ``batch_invariant`` the kernel for
    any number of rows. The weight has one scale per output.
    """

    def __init__(self, weight: QuantizedWeight, *, batch_invariant: bool) -> None:
        weight = replace(weight, values=_aligned(weight.values.contiguous()))
        self.values = weight.values
        self.scales = weight.scales.flatten().contiguous()  # the kernel reads no strides
        self.blockwise = None if batch_invariant else BlockwiseProduct(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x ``[T, in]`` -> ``[T, out]``."""
        if self.blockwise is not None and x.shape[0] > MAX_INT8_KERNEL_ROWS:
            return self.blockwise(x)
        return torch._weight_int8pack_mm(_aligned(x.contiguous()), self.values, self.scales)


class Int4Product:
    """torch's 4-bit kernel; the packed weight replaces the values."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self.group_size = weight.group_size
        self.packed = torch._convert_weight_to_int4pack_for_cpu(weight.values.int(), 1)
        zeros = weight.offset if weight.zeros is None else weight.zeros
        shift = (weight.offset - zeros) * weight.scales.float()  # W = (q - 8) s + shift
        shift = shift.to(weight.dtype)
        self.scales_and_shifts = (
            torch.stack([weight.scales, shift], -1).transpose(0, 1).contiguous()
        )  # [groups, out, 2]

    def __call__(self, x: Tensor) -> Tensor:
        """x ``[T, in]`` -> ``[T, out]``."""
        return torch._weight_int4pack_mm_for_cpu(
            x.contiguous(), self.packed, self.group_size, self.scales_and_shifts
        )


class NativeProduct:
    """``IntegerProduct`` in C++."""

    def __init__(self, weight: StoredWeight) -> None:
        self.packed, self.dtype = backends.cpu().linear(weight), weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """x ``[T, in]`` -> ``[T, out]``."""
        y: Tensor = self.packed.multiply(x)
        return y.to(self.dtype)


def product(weight: StoredWeight, *, batch_invariant: bool = False) -> _Product:
    """The fastest product for the weight's device, dtype, bits and groups. torch's kernels are
    vectorised for bf16 alone; elsewhere, and for widths that they do not take, blocks are
    dequantised, whose rounding in bf16 may depend on the number of rows.
    """
    if weight.rounds_input:
        return NativeProduct(weight) if weight.is_native else weight.integer_product()
    if not isinstance(weight, QuantizedWeight):
        return BlockwiseProduct(weight)
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return BlockwiseProduct(weight)
    if weight.bits == 8:
        if has_output_scales(weight) and weight.shape[1] % INT8_KERNEL_INPUTS == 0:
            return Int8Product(weight, batch_invariant=batch_invariant)
        return BlockwiseProduct(weight)
    fits = weight.group_size in KERNEL_GROUP_SIZES and weight.shape[0] % KERNEL_OUTPUTS == 0
    return Int4Product(weight) if fits else BlockwiseProduct(weight)


def _aligned(x: Tensor) -> Tensor:
    """The tensor, or a copy that begins at a multiple of ``ALIGNMENT`` bytes."""
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


class QuantizedProjection:
    """A product with a quantised weight and a bias ``[out]`` or None, batch-invariant if asked; see
    ``model.llama.layers.Projection``.
    """

    def __init__(
        self, weight: StoredWeight, bias: Tensor | None = None, *, batch_invariant: bool = False
    ) -> None:
        self.product = product(weight, batch_invariant=batch_invariant)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x ``[T, in]`` -> ``[T, out]``."""
        result = self.product(x)
        return result if self.bias is None else result.add_(self.bias)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """x ``[T, in]``, other ``[T, out]`` -> other + y."""
        return self(x).add_(other)

    def silu(self, x: Tensor) -> Tensor:
        """x ``[T, in]`` -> ``[T, out]``: y * sigmoid(y)."""
        return F.silu(self(x), inplace=True)


class QuantizedLinear(nn.Module):
    """Replaces an ``nn.Linear`` in a transformers module, with bias ``[out]`` or None.

    Until ``pack`` is called it dequantises its whole weight in each forward, and a fused network
    may take ``weight`` and ``bias`` and merge them with others.
    """

    bias: Tensor | None

    def __init__(self, weight: StoredWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight: StoredWeight | None = weight
        self.register_buffer("bias", bias, persistent=False)
        self.out_features, self.in_features = weight.shape
        self._projection: QuantizedProjection | None = None

    def pack(self) -> None:
        """Replace the weight by what multiplies fast."""
        assert self.weight is not None
        self._projection, self.weight = QuantizedProjection(self.weight, self.bias), None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        """Follow ``module.to(device)``; the dtype of activations is fixed with the scales."""
        super()._apply(fn, recurse)
        if self.weight is not None:
            probe = torch.empty(0, dtype=self.weight.dtype, device=self.weight.device)
            self.weight = self.weight.to(fn(probe).device)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """x ``[..., in]`` -> ``[..., out]``."""
        projection = self._projection
        if projection is None:
            assert self.weight is not None
            if not self.weight.rounds_input:
                return F.linear(x, self.weight.dequantize(), self.bias)
            projection = QuantizedProjection(self.weight, self.bias)
        result = projection(x.reshape(-1, self.in_features))
        return result.view(*x.shape[:-1], self.out_features)


def use_native_products(module: nn.Module) -> None:
    """Multiply integers in C++ in a module that torch computes."""
    for layer in module.modules():
        if isinstance(layer, QuantizedLinear) and layer.weight is not None:
            weight: Any = layer.weight
            layer.weight = replace(weight, is_native=weight.rounds_input)


def pack_linears(module: nn.Module) -> None:
    """Pack the quantised linears of a module that is run as it is."""
    for layer in module.modules():
        if isinstance(layer, QuantizedLinear):
            layer.pack()


Made = TypeVar("Made")


class SharedWeights(Generic[Made]):
    """What is made of linears, once of those that have the same weight and bias.

    Args:
        linears: all of them, which keep their weights until something is made of them.
    """

    def __init__(self, linears: Iterable[nn.Module]) -> None:
        self._num_left = Counter(map(self._key, linears))
        self._made: dict[tuple[int, int], Made] = {}

    def made_of(self, linear: nn.Module, make: Callable[[nn.Module], Made]) -> Made:
        """What ``make`` gives of a linear, or gave of another one; kept until the last of them."""
        key = self._key(linear)
        if key not in self._made:
            self._made[key] = make(linear)
        self._num_left[key] -= 1
        return self._made[key] if self._num_left[key] else self._made.pop(key)

    @staticmethod
    def _key(linear: nn.Module) -> tuple[int, int]:
        return id(linear.weight), id(linear.bias)


def quantize_linears(
    module: nn.Module, quantization: Quantization, plain: Collection[nn.Module] = ()
) -> int:
    """Replace every ``nn.Linear`` of a language model by its quantised form, one after the other;
    returns how many.

    The output projection is quantised to 8 bits even where others have 4: its errors are those of
    the logits. Embeddings, norms, biases and the linears in ``plain`` stay.
    """
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    linears = [
        (name, layer)
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and layer not in plain
    ]
    rounds_input = has_rounded_input(quantization)
    shared = SharedWeights[StoredWeight]([linear for _, linear in linears])

    def quantized(linear: nn.Module) -> StoredWeight:
        bits = 8 if linear is head else BITS[quantization]
        return quantize(linear.weight.detach(), bits, rounds_input=rounds_input)  # type: ignore[operator]

    for name, linear in linears:
        bias = None if linear.bias is None else linear.bias.detach()
        replacement = QuantizedLinear(shared.made_of(linear, quantized), bias)
        module.set_submodule(name, replacement)
    return len(linears)


def is_quantised(module: nn.Module) -> bool:
    """Whether any of its layers was read from quantised weights, dequantised or not."""
    return any(
        isinstance(layer, QuantizedLinear) or getattr(layer, "is_dequantised", False)
        for layer in module.modules()
    )


def check_quantizable(module: nn.Module, quantization: Quantization) -> None:
    """Raises ModelError if weights of a model are quantised already, or it has no linears."""
    what = f'quantization="{quantization}" is not possible for this model'
    if is_quantised(module):
        raise ModelError(
            what, "its weights are quantised already", "Leave the argument out, or give 16 bits"
        )
    if not any(isinstance(layer, nn.Linear) for layer in module.modules()):
        raise ModelError(what, "it has no linear layers", "Leave the argument out")


def _pack_int4(values: Tensor) -> Tensor:
    """uint8 ``[out, in]`` with values 0 to 15 -> uint8 ``[out, ceil(in / 2)]``, the first low."""
    even = F.pad(values, (0, values.shape[1] % 2))
    return even[:, ::2] | (even[:, 1::2] << 4)


def _unpack_int4(packed: Tensor) -> Tensor:
    """The inverse of ``_pack_int4`` for even widths."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1)
