"""The adapters of a batch's tokens: what is added to products, row by row.

A row of a batch has one adapter or none, and rows of several adapters are beside each other. The
product with the model's own weight is the same for all of them; a token's adapter then adds to it::

    y [T, out] = x W^T;   y[tokens] += (x[tokens] A^T) B^T     for each adapter of the batch

Only the network knows the form in which it multiplies: it places an adapter once, when that is
added.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forethought.model.adapter import LowRank

Addition = Callable[[Tensor], Tensor]
"""x ``[n, in]`` -> ``[n, out]``."""
Adapt = Callable[[str, Tensor, Tensor], None]
"""``adapt(product, x, y)`` adds what adapters do to a product y ``[T, out]`` of x ``[T, in]``."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacedAdapter:
    """An adapter as a network multiplies by it.

    Attributes:
        name: by which requests choose it.
        digest: a hash of its weights.
        parts: of the network alone; of networks in torch ``Additions``.
    """

    name: str
    digest: bytes
    parts: Any


Additions = Mapping[Hashable, Addition]
"""By the key of a product."""


@dataclass(frozen=True, slots=True)
class LowRankProduct:
    """``(x A^T) B^T`` by two products."""

    down: Addition
    up: Addition

    @classmethod
    def of(cls, addition: LowRank, product: Callable[[Tensor], Addition]) -> LowRankProduct:
        """With ``product(weight)`` for each matrix."""
        return cls(product(addition.down), product(addition.up))

    def __call__(self, x: Tensor) -> Tensor:
        """x ``[n, in]`` -> ``[n, out]``."""
        return self.up(self.down(x))


@dataclass(frozen=True, slots=True)
class AdapterTokens:
    """The tokens of a batch that have an adapter.

    Attributes:
        adapter: of them.
        tokens: int64 ``[n]``, their indices in the batch.
        outputs: int64 ``[m]``, their indices among the tokens with logits.
    """

    adapter: PlacedAdapter
    tokens: Tensor
    outputs: Tensor


@dataclass(frozen=True, slots=True)
class TokenAdapters:
    """All tokens of a batch that have adapters."""

    groups: tuple[AdapterTokens, ...]

    @classmethod
    def of(
        cls,
        adapters: Sequence[PlacedAdapter | None],
        logit_index: Sequence[int],
        device: torch.device | str,
    ) -> TokenAdapters:
        """Of the adapter of each token ``[T]``; ``logit_index`` as of a batch."""
        tokens: dict[PlacedAdapter, list[int]] = {}
        for token, adapter in enumerate(adapters):
            if adapter is not None:
                tokens.setdefault(adapter, []).append(token)
        outputs: dict[PlacedAdapter, list[int]] = {adapter: [] for adapter in tokens}
        for output, token in enumerate(logit_index):
            if (adapter := adapters[token]) is not None:
                outputs[adapter].append(output)
        return cls(
            tuple(
                AdapterTokens(
                    adapter,
                    torch.tensor(indices, dtype=torch.int64, device=device),
                    torch.tensor(outputs[adapter], dtype=torch.int64, device=device),
                )
                for adapter, indices in tokens.items()
            )
        )

    def of_tokens(self, tokens: Sequence[int]) -> TokenAdapters:
        """The same of some tokens of the batch, in their order; none is among the outputs."""
        groups = []
        for group in self.groups:
            adapted = set(group.tokens.tolist())
            index = [place for place, token in enumerate(tokens) if token in adapted]
            places = torch.tensor(index, dtype=torch.int64, device=group.tokens.device)
            groups.append(AdapterTokens(group.adapter, places, places[:0]))
        return TokenAdapters(tuple(groups))

    def add(self, key: Hashable, x: Tensor, y: Tensor, *, are_outputs: bool = False) -> None:
        """Add what the adapters do to the product ``key``.

        Args:
            key: of ``Additions``.
            x: ``[T, in]``, or ``[R, in]`` of the tokens with logits if ``are_outputs``.
            y: ``[T, out]`` or ``[R, out]``, which is changed.
        """
        for group in self.groups:
            addition = group.adapter.parts.get(key)
            index = group.outputs if are_outputs else group.tokens
            if addition is not None and len(index):
                y[index] += addition(x[index])


def no_addition(product: str, x: Tensor, y: Tensor) -> None:
    """``Adapt`` where no token has an adapter."""
