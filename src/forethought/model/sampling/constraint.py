"""Which tokens may follow a prefix: what the law asks of a grammar.

Knows nothing about text, grammars or who follows one; ``text.guidance`` makes constraints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Constraint(Protocol):
    """A rule for the output of one generation, as pure functions of the output so far.

    It may keep what it has worked out, so that asking along one path, or about the nodes of a tree,
    costs little; in whichever order it is asked, the answers are the same.
    """

    def mask(self, output: Sequence[int]) -> NDArray[np.uint8]:
        """Which tokens may come after ``output``.

        An end-of-sequence token that ends the generation is among them exactly where the rule
        allows an end. Behind an output that breaks the rule, nothing may come.

        Returns:
            [ceil(V / 8)] bytes, V the width of the model's logits: bit ``t % 8`` of byte ``t // 8``
            is token t's, the lowest bit first. Not to be written to.
        """
        ...

    def is_complete(self, output: Sequence[int]) -> bool:
        """Whether no text may follow ``output``, which keeps to the rule: it ends here.

        Raises:
            ParameterError: ``output`` breaks the rule, as it could not be kept to any longer.
        """
        ...


Constraints = Callable[[], Constraint]
"""Makes the constraints of generations that keep to the same rule, one for each."""


def unpack(masks: NDArray[np.uint8], width: int) -> NDArray[np.bool_]:
    """[..., ceil(width / 8)] bytes as of ``Constraint.mask`` -> [..., width] booleans."""
    bits = np.unpackbits(masks, axis=-1, count=width, bitorder="little")
    return bits.view(np.bool_)
