"""Root-mean-square normalisation in as few operations as torch allows on each device.

[projection] Matrix products with fixed weights, prepacked where that helps. Knows nothing about
networks.

oneDNN multiplies bf16 and fp16 matrices in blocks; a weight in ordinary layout is reordered on
every call, which for a few rows costs more than the product. Here it is reordered once, and the
packed weight replaces the ordinary one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

SMALL = 16 * 1024  # elements up to which a CPU is faster through layer norm


class Norm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in float32.

    Args:
        weight: ``[..., width]``, broadcast over tokens.
        eps: added to the mean square.
        steady: round a token the same in any company: one way for all sizes, if not the fastest.
    """

    def __init__(self, weight: Tensor, eps: float, *, batch_invariant: bool = False) -> None:
        self.weight, self.eps, self.batch_invariant = weight, eps, batch_invariant
        self.signs = torch.tensor([[1.0], [-1.0]], dtype=weight.dtype, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x ``[T, ..., width]`` -> the same shape and dtype, a new tensor."""
        if x.device.type != "cpu":
            return self.plain(x)
        # torch's own RMS norm is a dozen operations on a CPU.
        few = self.batch_invariant or x.numel() <= SMALL
        return self.through_layer_norm(x) if few else self.in_float32(x)

    def plain(self, x: Tensor) -> Tensor:
        """One kernel on CUDA."""
        return F.rms_norm(x, self.weight.shape[-1:], None, self.eps) * self.weight

    def through_layer_norm(self, x: Tensor) -> Tensor:
        """Few operations: ``[x, -x]`` has mean 0, and for its variance the mean square of x."""
        doubled = x.unsqueeze(-2) * self.signs
        normal = torch.layer_norm(doubled, doubled.shape[-2:], None, None, self.eps)
        return normal.select(-2, 0) * self.weight

    def in_float32(self, x: Tensor) -> Tensor:
        """Few passes over the data."""
        exact = x.float()
        length = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        scale = length.square_().mul_(1 / x.shape[-1]).add_(self.eps).rsqrt_()
        return (exact * scale).mul_(self.weight).to(x.dtype)


BATCH_INVARIANT_TERMS, BATCH_INVARIANT_ROWS = 512, 32  # up to either, oneDNN sums a row in one way
MAX_BATCHED = 2**20  # elements of a weight up to which one call for several beats packed ones
LARGE_GATE = 2**20  # elements of the merged weight from which two fused products beat one


class Projection(Protocol):
    """``y = x W^T + b`` for a fixed W ``[out, in]``."""

    def __call__(self, x: Tensor) -> Tensor:
        """x ``[T, in]`` -> ``[T, out]``."""
        ...

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """x ``[T, in]``, other ``[T, out]`` -> other + y."""
        ...

    def silu(self, x: Tensor) -> Tensor:
        """x ``[T, in]`` -> ``[T, out]``: y * sigmoid(y)."""
        ...


class PlainProjection:
    """The obvious product, on any device and in any dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """See :class:`Projection`."""
        return F.linear(x, self.weight, self.bias)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """See :class:`Projection`."""
        if self.bias is None:
            return torch.addmm(other, x, self.weight.t())
        return F.linear(x, self.weight, self.bias).add_(other)

    def silu(self, x: Tensor) -> Tensor:
        """See :class:`Projection`."""
        return F.silu(F.linear(x, self.weight, self.bias))


class PackedProjection:
    """The product by oneDNN, with the weight in its blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self.bias = bias
        self._linear = torch.ops.mkldnn._linear_pointwise.default
        self._linear_plus = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        """See :class:`Projection`."""
        result: Tensor = self._linear(x, self.weight, self.bias, "none", [], "")
        return result

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """See :class:`Projection`."""
        result: Tensor = self._linear_plus(x, other, self.weight, self.bias, "add")
        return result

    def silu(self, x: Tensor) -> Tensor:
        """See :class:`Projection`."""
        result: Tensor = self._linear(x, self.weight, self.bias, "swish", [], "")
        return result


class BatchInvariantProjection:
    """A packed product in parts of rows so few that oneDNN rounds each row the same in any company.

    It splits long sums differently for more rows.
    """

    def __init__(self, packed: PackedProjection) -> None:
        self.packed = packed

    def __call__(self, x: Tensor) -> Tensor:
        """See :class:`Projection`."""
        if x.shape[0] <= BATCH_INVARIANT_ROWS:
            return self.packed(x)
        return torch.cat([self.packed(part) for part in x.split(BATCH_INVARIANT_ROWS)])

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """See :class:`Projection`."""
        if x.shape[0] <= BATCH_INVARIANT_ROWS:
            return self.packed.plus(x, other)
        parts = zip(x.split(BATCH_INVARIANT_ROWS), other.split(BATCH_INVARIANT_ROWS), strict=True)
        return torch.cat([self.packed.plus(*part) for part in parts])

    def silu(self, x: Tensor) -> Tensor:
        """See :class:`Projection`."""
        return torch.cat([self.packed.silu(part) for part in x.split(BATCH_INVARIANT_ROWS)])


class BatchedProjection:
    """Several products side by side, each of an input of its own; one call where that is faster.

    Args:
        weights: ``[out, in]`` each.
        biases: ``[out]`` each; None for none.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None) -> None:
        self._alone: list[Projection] = []
        if _packs(weights[0]) and weights[0].numel() > MAX_BATCHED:
            every = biases or [None] * len(weights)
            self._alone = [projection(*pair) for pair in zip(weights, every, strict=True)]
            return
        self._weight = torch.stack([weight.t() for weight in weights])  # [count, in, out]
        self._bias = None if biases is None else torch.stack(list(biases)).unsqueeze(1)

    def __call__(self, x: Tensor) -> Tensor:
        """The first ones: x ``[count, T, in]`` -> ``[count, T, out]``."""
        if self._alone:
            parts = zip(self._alone, x.unbind(0), strict=False)
            return torch.stack([product(part.contiguous()) for product, part in parts])
        if self._bias is None:
            return torch.bmm(x, self._weight[: len(x)])
        return torch.baddbmm(self._bias[: len(x)], x, self._weight[: len(x)])


class GatedActivation(Protocol):
    """``silu(x G^T) * (x U^T)`` for fixed G and U, biases included where there are any."""

    def __call__(self, x: Tensor) -> Tensor:
        """x ``[T, in]`` -> ``[T, out]``."""
        ...


class MergedGatedActivation:
    """One product for both, then the activation; ``product`` has the outputs of G, then of U."""

    def __init__(self, product: Projection) -> None:
        self.product = product

    def __call__(self, x: Tensor) -> Tensor:
        """See :class:`Gate`."""
        gated, up = self.product(x).chunk(2, -1)
        return F.silu(gated).mul_(up)


class PackedGatedActivation:
    """Two products by oneDNN, which applies activation and multiplication as it writes."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        gated, up = weight.chunk(2)
        self.gated = torch.ops.mkldnn._reorder_linear_weight(gated.contiguous())
        self.up = torch.ops.mkldnn._reorder_linear_weight(up.contiguous())
        self.biases = (None, None) if bias is None else bias.chunk(2)
        self._linear = torch.ops.mkldnn._linear_pointwise.default
        self._linear_times = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        """See :class:`Gate`."""
        gated = self._linear(x, self.gated, self.biases[0], "swish", [], "")
        result: Tensor = self._linear_times(x, gated, self.up, self.biases[1], "mul")
        return result


def projection(
    weight: Tensor, bias: Tensor | None = None, *, batch_invariant: bool = False
) -> Projection:
    """The product with weight ``[out, in]`` and bias ``[out]``, packed where that is faster.

    Args:
        weight: of any layout.
        bias: None for none.
        steady: round a row the same in any company, at the cost of further calls.
    """
    if not _packs(weight):
        return PlainProjection(weight, bias)
    packed = PackedProjection(weight, bias)
    return (
        BatchInvariantProjection(packed)
        if batch_invariant and weight.shape[1] > BATCH_INVARIANT_TERMS
        else packed
    )


def gated_activation(
    weight: Tensor, bias: Tensor | None = None, *, batch_invariant: bool = False
) -> GatedActivation:
    """The gate whose G and U are the halves of weight ``[2 * out, in]``; see ``projection``."""
    # A further call costs more than a small activation does.
    if _packs(weight) and weight.numel() >= LARGE_GATE and not batch_invariant:
        return PackedGatedActivation(weight, bias)
    return MergedGatedActivation(projection(weight, bias, batch_invariant=batch_invariant))


def _packs(weight: Tensor) -> bool:
    """Whether it lies on a CPU whose oneDNN has fast products in its dtype."""
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }.get(weight.dtype)
    on_cpu = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    return bool(on_cpu and supported is not None and supported())
