"""Cross entropy through an output projection, without the logits of all positions in memory.

For a large vocabulary the logits ``[N, vocab]`` of a batch and their gradient take gigabytes. Here
a chunk of positions at a time is projected, and its gradients with respect to states and projection
are computed at once, so that nothing is computed twice and only a chunk's logits are ever held.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_CHUNK_BYTES = 64 * 2**20
"""Of a chunk's logits in float32; with smaller ones most of the time is the overhead of each."""


def projected_cross_entropy(
    states: Tensor, weight: Tensor, choices: Tensor, probs: Tensor
) -> Tensor:
    """Sum of ``-p log q`` in nats, float32 scalar; q is the softmax of ``states @ weight.T``.

    Products are in the dtype of autocast where it is enabled, else in that of the states; the rest
    is in float32.

    Args:
        states: ``[N, hidden]``.
        weight: ``[vocab, hidden]``, the output projection.
        choices: int64 ``[N, K]``, tokens of p.
        probs: float32 ``[N, K]``, their probabilities; what p is otherwise is left out.
    """
    device = states.device.type
    mixed = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if mixed else states.dtype
    with torch.autocast(device, enabled=False):
        total: Tensor = _ProjectedCrossEntropy.apply(
            states.to(dtype), weight, choices, probs.float()
        )
    return total


class _ProjectedCrossEntropy(torch.autograd.Function):
    """The gradients of a scalar are known up to a factor when it is computed: they are kept."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, choices: Tensor, probs: Tensor) -> Tensor:
        wants_states, wants_weight = ctx.needs_input_grad[:2]
        projection = weight.to(states.dtype)
        total = torch.zeros((), dtype=torch.float32, device=states.device)
        state_gradient = torch.empty_like(states) if wants_states else None
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        for part in _chunks(len(states), len(weight)):
            logits = (states[part] @ projection.T).float()  # [n, vocab]
            logits -= logits.amax(-1, keepdim=True)
            chosen = logits.gather(-1, choices[part])
            exps = logits.exp_()  # computed once, in the place of the logits
            sums = exps.sum(-1, keepdim=True)
            total += (probs[part] * (sums.log() - chosen)).sum()
            if not wants_states and not wants_weight:
                continue
            gradient = exps.mul_(probs[part].sum(-1, keepdim=True) / sums)
            gradient.scatter_add_(-1, choices[part], -probs[part])
            gradient = gradient.to(states.dtype)
            if state_gradient is not None:
                state_gradient[part] = gradient @ projection
            if weight_gradient is not None:
                weight_gradient += gradient.T @ states[part]
        ctx.save_for_backward(state_gradient, weight_gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        [factor] = gradients
        scaled = (None if kept is None else kept * factor for kept in ctx.saved_tensors)
        return *scaled, None, None


def _chunks(count: int, vocab: int) -> Iterator[slice]:
    """Slices of ``count`` positions whose logits take at most ``_CHUNK_BYTES``, or of one."""
    size = max(1, _CHUNK_BYTES // (4 * vocab))
    for begin in range(0, count, size):
        yield slice(begin, begin + size)
