"""Products of activations in 8 bits with weights that are integers.

Each row of activations is rounded to 8 bits in groups of ``ACTIVATION_GROUP`` inputs. Integers are
multiplied by integers, whose sums are exact, and the sums of the groups are scaled and added in
float32. The rounding is a part of the model: it depends on the row alone, so drafts stay exact.

A weight may want what the rounding leaves of a row, rounded in the same way, as a second row whose
products are added: together they have the precision of about 15 bits, for as many reads of weights.

``IntegerProduct`` defines the result to the last bit. The native forward computes the same
(``integers.h``), whatever the processor, the number of rows and that of threads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATION_GROUP = 32
"""Inputs of a row that share a scale."""


@dataclass(frozen=True, slots=True, eq=False)
class IntegerWeight:
    """A weight ``[out, in]`` as integers, in groups of ``ACTIVATION_GROUP`` inputs: those of an
    output are ``(values * factors * scales + offsets) * output_scales``.

    Attributes:
        values: int8 or uint8 ``[groups, out, ACTIVATION_GROUP]``.
        scales: float32 ``[groups, out]``; None: 1.
        offsets: float32 ``[groups, out]``; None: 0.
        factors: int8 ``[groups, out, 2]``, of the halves of a group; None: 1.
        output_scales: float32 ``[out]``; None: 1.
        multiplies_rest: what rounding leaves of a row is multiplied, too.
    """

    values: Tensor
    scales: Tensor | None = None
    offsets: Tensor | None = None
    factors: Tensor | None = None
    output_scales: Tensor | None = None
    multiplies_rest: bool = False


class IntegerProduct:
    """The sum over the groups g of inputs, in order, every operation in float32 and rounded::

        y += totals[g] * (s[g] * scales[g])      totals[g]: of a[g] * values[g] * factors[g], exact
        y += (s[g] * sum(a[g])) * offsets[g]     if there are offsets

    with the integers a of the activations and their scales s; then ``y * output_scales``. With
    ``multiplies_rest`` the same sum over the rest ``x - a * s`` of the activations is added to it.

    Args:
        weight: whose groups these are.
        dtype: of the outputs.
    """

    def __init__(self, weight: IntegerWeight, dtype: torch.dtype) -> None:
        self.weight, self.dtype = weight, dtype

    def __call__(self, x: Tensor) -> Tensor:
        """x ``[T, in]`` -> ``[T, out]``."""
        values, scales = rounded_to_int8(x)
        y = self._sum(values, scales)
        if self.weight.multiplies_rest:
            padded = F.pad(x.float(), (0, -x.shape[1] % ACTIVATION_GROUP))
            y += self._sum(*rounded_to_int8(padded - (values * scales[..., None]).flatten(1)))
        output_scales = self.weight.output_scales
        return (y if output_scales is None else y * output_scales).to(self.dtype)

    def _sum(self, values: Tensor, scales: Tensor) -> Tensor:
        """Of integers ``[T, groups, ACTIVATION_GROUP]`` with scales ``[T, groups]``."""
        weight = self.weight
        y = values.new_zeros((len(values), weight.values.shape[1]))
        for group in range(len(weight.values)):
            a, scale = values[:, group], scales[:, group, None]
            scaled = scale if weight.scales is None else scale * weight.scales[group]
            y += self._totals(a, group) * scaled
            if weight.offsets is not None:
                y += scale * a.sum(1, keepdim=True) * weight.offsets[group]
        return y

    def _totals(self, a: Tensor, group: int) -> Tensor:
        """Of a group of inputs ``[T, ACTIVATION_GROUP]``: integers below 2^24, ``[T, out]``."""
        values, factors = self.weight.values[group].float(), self.weight.factors
        if factors is not None:
            values = (values.unflatten(1, (2, -1)) * factors[group, :, :, None]).flatten(1)
        return a @ values.T


def rounded_to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Activations ``[T, in]`` in 8 bits, in groups of ``ACTIVATION_GROUP`` inputs.

    Returns:
        integers, float32 ``[T, groups, ACTIVATION_GROUP]``, and scales, float32 ``[T, groups]``:
        the largest magnitude over 127; NaN, with integers 0, where a value is not finite.
    """
    padded = F.pad(x.float(), (0, -x.shape[1] % ACTIVATION_GROUP))
    groups = padded.unflatten(1, (-1, ACTIVATION_GROUP))
    largest = groups.abs().amax(2)
    scales = (largest / 127).clamp(min=torch.finfo(torch.float32).tiny)
    finite = largest.isfinite()
    values = (groups / scales[..., None]).round().where(finite[..., None], 0)
    return values, scales.where(finite, torch.nan)
