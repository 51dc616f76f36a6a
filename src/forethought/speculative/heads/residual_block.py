"""The residual block that Medusa's and ReDrafter's heads are made of. Knows neither."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """``x + silu(W x + b)``; new ones pass x on as it is."""

    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)
        for weight in self.linear.parameters():
            nn.init.zeros_(weight)

    def forward(self, x: Tensor) -> Tensor:
        """x ``[..., width]`` -> the same shape."""
        return x + F.silu(self.linear(x))
