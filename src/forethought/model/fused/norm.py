"""Root-mean-square normalisation in as few operations as torch allows on each device."""

from __future__ import annotations

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

    def __init__(self, weight: Tensor, eps: float, *, steady: bool = False) -> None:
        self.weight, self.eps, self.steady = weight, eps, steady
        self.signs = torch.tensor([[1.0], [-1.0]], dtype=weight.dtype, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x ``[T, ..., width]`` -> the same shape and dtype, a new tensor."""
        if x.device.type != "cpu":
            return self.plain(x)
        # torch's own RMS norm is a dozen operations on a CPU.
        few = self.steady or x.numel() <= SMALL
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
