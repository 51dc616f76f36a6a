"""Attention over several depths: the flash kernel's blocks agree with one plain softmax."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forethought.training.recipes.mtp import attend_depth, attend_depth_reference

WIDTH = 37


def grown(
    rows: Tensor, depths: int, attend: object, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of all inputs."""
    torch.manual_seed(0)
    shapes = [len(rows), WIDTH, WIDTH, *[len(rows)] * 2 * depths]
    inputs = [torch.randn(2, 3, n, 8, dtype=dtype, requires_grad=True) for n in shapes]
    q, k, v, *flat = inputs
    own = list(zip(flat[::2], flat[1::2], strict=True))
    out = attend(q, (k, v), own, rows, 0.4)  # type: ignore[operator]
    (out * torch.randn_like(out)).sum().backward()
    return out, [x.grad for x in inputs]  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("depths", [1, 4])
@pytest.mark.parametrize(
    "rows", [range(WIDTH), range(20, WIDTH), range(36, WIDTH), range(30), (0, 3, 4, 17, 36)]
)
def test_flash_blocks_give_the_output_and_the_gradients_of_one_softmax(
    rows: object, depths: int, dtype: torch.dtype
) -> None:
    at = torch.tensor(list(rows))  # type: ignore[call-overload]
    out, gradients = grown(at, depths, attend_depth, dtype)
    expected, wanted = grown(at, depths, attend_depth_reference, dtype)
    bound = 1e-5 if dtype is torch.float32 else 0.06
    for mine, other in zip([out, *gradients], [expected, *wanted], strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, other, rtol=bound, atol=bound)
