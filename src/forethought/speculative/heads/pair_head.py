"""What EAGLE's and MTP's heads have in common: they read pairs of a state and the next token.

Pair i is the target's state at position i and the token at i + 1; from it the head guesses the
token at i + 2. A guess's own state takes the target's place in the pair that follows. Knows nothing
about what states are, or what becomes of guesses.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from forethought.kv.storage import LayerShape
from forethought.model.attention.base import ForwardPass


class Guess(NamedTuple):
    """What a head thinks behind R pairs."""

    states: Tensor
    """[R, hidden]: for the pairs that follow."""
    logits: Tensor
    """[R, D]: of the tokens that follow."""


class PairHead(Protocol):
    """A head over pages.

    Attributes:
        dtype: of its weights, states and entries; that of the target's may differ.
        shape: what its one attention layer stores per pair.
        vocab_size: D, tokens that it knows.
        ids: int64 ``[D]``, the target's id of each; None: all there are.
    """

    dtype: torch.dtype
    shape: LayerShape
    vocab_size: int
    ids: Tensor | None

    def enter(self, features: Tensor) -> Tensor:
        """The target's captured states side by side ``[T, width]`` -> ``[T, hidden]``."""
        ...

    def __call__(self, states: Tensor, forward_pass: ForwardPass) -> Guess:
        """Read T pairs, and guess behind the R of them whose logits the pass's batch wants.

        Args:
            states: ``[T, hidden]``, from ``enter`` or from guesses.
            forward_pass: over a storage of one layer; its batch has the pairs' tokens and, as
                positions, those of the states.
        """
        ...
