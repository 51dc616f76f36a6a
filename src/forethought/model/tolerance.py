"""How much the results of a backend may differ from those of torch, by rounding."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Greatest difference by the dtype of torch's result, relative to its greatest absolute value."""


def is_close(y: Tensor, expected: Tensor) -> bool:
    """Whether a result differs from torch's by rounding alone, in torch's dtype."""
    tolerance = TOLERANCES[expected.dtype] * float(expected.float().abs().max())
    difference = (y.float() - expected.float()).abs().max()
    return bool(difference <= tolerance)  # False where it is not finite
