"""A draft network in C++: packed weights, and how it reads the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from forethought.backends.cpu.forward import NativeForward
from forethought.backends.cpu.norms import norm_rows
from forethought.backends.cpu.packed_linear import PackedLinear
from forethought.model.attention.base import ForwardPass


@dataclass(frozen=True, slots=True)
class NativeEntry:
    """How a draft module reads the target's states, float32.

    Attributes:
        norm: ``[width]``, in front of ``linear``; None: there is none.
        linear: to the module's width; None: they are read as they are.
        eps: of the norm.
    """

    norm: Tensor | None
    linear: PackedLinear | None
    eps: float

    def __call__(self, states: Tensor) -> Tensor:
        """``[T, width]`` -> float32 ``[T, hidden]``."""
        states = states.float()
        if self.norm is not None:
            states = norm_rows(states.contiguous(), self.norm, self.eps)
        return states if self.linear is None else self.linear.multiply(states)


@dataclass(frozen=True, slots=True)
class NativeDraftNetwork:
    """A draft network.

    Attributes:
        forward: its packed weights.
        num_choices: outputs that may be drafted, the first ones.
        num_known: tokens that it knows; others are read as token 0.
        ids: int64 ``[outputs]``, the target's id of each; None: the same.
        entry: of the target's states; None: it is a model, which reads none.
    """

    forward: NativeForward
    num_choices: int
    num_known: int
    ids: Tensor | None = None
    entry: NativeEntry | None = None

    def draft_chains(
        self, forward_pass: ForwardPass, slots: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """Chains after the last known token of each row."""
        return self.forward.draft_chains(forward_pass, None, slots, num_choices=self.num_choices)
