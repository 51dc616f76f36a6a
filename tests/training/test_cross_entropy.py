"""The loss through an output projection is that of all logits at once, a chunk at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forethought.training import cross_entropy
from forethought.training.cross_entropy import projected_cross_entropy

N, HIDDEN, VOCAB, K = 37, 24, 101, 5


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States and projection, which get gradients; choices and probabilities."""
    source = torch.Generator().manual_seed(0)
    states = torch.randn(N, HIDDEN, generator=source, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, generator=source, requires_grad=True)
    choices = torch.randint(0, VOCAB, (N, K), generator=source)
    probs = torch.rand(N, K, generator=source) / K
    probs[3] = 0.0
    return states, weight, choices, probs


def reference(states: Tensor, weight: Tensor, choices: Tensor, probs: Tensor) -> Tensor:
    return -(probs * (states @ weight.T).log_softmax(-1).gather(-1, choices)).sum()


def gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(2.0 * loss, inputs))


@pytest.mark.parametrize("rows", [1, 10, 1000])
def test_value_and_gradients_are_those_of_all_logits_at_once(
    inputs: tuple[Tensor, ...], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "_CHUNK_BYTES", 4 * VOCAB * rows)
    loss, expected = projected_cross_entropy(*inputs), reference(*inputs)
    torch.testing.assert_close(loss, expected)
    for mine, other in zip(
        gradients(loss, *inputs[:2]), gradients(expected, *inputs[:2]), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_under_autocast_products_are_in_bf16_and_gradients_in_float32(
    inputs: tuple[Tensor, ...],
) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = projected_cross_entropy(*inputs)
    expected = reference(*inputs)
    assert loss != expected
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0.02)
    for mine, other in zip(
        gradients(loss, *inputs[:2]), gradients(expected, *inputs[:2]), strict=True
    ):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, other, rtol=0.1, atol=0.1)


def test_a_frozen_projection_gets_no_gradient(inputs: tuple[Tensor, ...]) -> None:
    states, weight, *labels = inputs
    loss = projected_cross_entropy(states, weight.detach(), *labels)
    [mine] = gradients(loss, states)
    torch.testing.assert_close(mine, gradients(reference(*inputs), states)[0], rtol=1e-4, atol=1e-5)


def test_no_positions_have_no_loss(inputs: tuple[Tensor, ...]) -> None:
    states, weight, choices, probs = inputs
    loss = projected_cross_entropy(states[:0], weight, choices[:0], probs[:0])
    assert float(loss.detach()) == 0.0
    assert not gradients(loss, weight)[0].any()


class Largest(TorchDispatchMode):
    """The most rows of logits that any operation returned."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor) and output.shape[1:] == (VOCAB,) and len(output) != HIDDEN:
            self.rows = max(self.rows, len(output))
        return output


def test_only_a_chunk_of_the_logits_is_held(
    inputs: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "_CHUNK_BYTES", 4 * VOCAB * 10)
    with Largest() as largest:
        gradients(projected_cross_entropy(*inputs), *inputs[:2])
    assert largest.rows == 10
