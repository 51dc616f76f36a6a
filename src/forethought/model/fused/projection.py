"""Matrix products with fixed weights, prepacked where that helps. Knows nothing about networks.

oneDNN multiplies bf16 and fp16 matrices in blocks; a weight in ordinary layout is reordered on
every call, which for a few rows costs more than the product. Here it is reordered once, and the
packed weight replaces the ordinary one.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Projection(Protocol):
    """``y = x W^T + b`` for a fixed W ``[out, in]``."""

    def __call__(self, x: Tensor) -> Tensor:
        """x ``[T, in]`` -> ``[T, out]``."""
        ...

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """x ``[T, in]``, other ``[T, out]`` -> other + y."""
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
        return F.linear(x, self.weight, self.bias).add_(other)


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


def projection(weight: Tensor, bias: Tensor | None = None) -> Projection:
    """Packed on a CPU whose oneDNN has fast products in the weight's dtype, plain elsewhere."""
    fast = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    usable = (
        weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and weight.dtype in fast
        and fast[weight.dtype]()
    )
    return PackedProjection(weight, bias) if usable else PlainProjection(weight, bias)
