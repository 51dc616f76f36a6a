"""Acceptance by dice, for studies of speed: how fast decoding would be if drafts were this good.

Takes the place of verification: what comes out says nothing about the target, and every result
that was made with it has to be marked. Knows nothing about logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from forethought.model.sampling import coin as toss
from forethought.params import SamplingParams
from forethought.speculative.draft import Draft

if TYPE_CHECKING:
    from torch import Tensor

    from forethought.speculative.verify import Candidate

SYNTHETIC_USE = 3
"""The ``use`` of its coins; see ``model.sampling.coin``."""


def synthetic_path(
    draft: Draft, rate: Callable[[int], float], coin: Callable[[int], float]
) -> list[int]:
    """The nodes that count as accepted: down the first branch, each level with its chance.

    The first level that fails ends it, so with one rate r a chain of K has sum(r**k for k in 1..K)
    expected accepted tokens. The step emits the tokens of these nodes and one more that the target
    draws itself behind the last of them.

    Args:
        draft: any; one without tokens has an empty path.
        rate: depth, from 0 for the children of the root -> chance from 0, never, to 1, always.
        coin: depth -> a uniform number in [0, 1): a pure
            function of the request and the position, as every coin is.

    Returns:
        Nodes from the root down.
    """
    path: list[int] = []
    last = -1
    for node in range(len(draft)):  # a level's nodes come after their parents
        if draft.parent(node) != last:
            continue
        if coin(len(path)) >= rate(len(path)):
            break
        path.append(node)
        last = node
    return path


class SyntheticAcceptance:
    """See ``speculative.rule.AcceptanceRule``.

    Args:
        rate: depth -> chance that the level is accepted where those above it are, 0 to 1.
    """

    synthetic = True

    def __init__(self, rate: Callable[[int], float]) -> None:
        self._rate = rate

    @classmethod
    def of_rate(cls, rate: float) -> SyntheticAcceptance:
        """Each level with the same chance, 0 to 1."""
        return cls(lambda depth: rate)

    @classmethod
    def of_length(cls, length: float) -> SyntheticAcceptance:
        """``length`` tokens per step on average, the target's own included, at least 1.

        The first levels always and the next one with what is left, so that the number varies as
        little as it can.
        """
        return cls(lambda depth: min(1.0, max(0.0, length - 1 - depth)))

    def bends(self, params: SamplingParams) -> bool:
        """All requests but those whose output must have a shape, which dice would break."""
        return params.guided_decoding is None

    def paths(self, logits: Tensor, candidates: Sequence[Candidate]) -> list[list[int]]:
        """See ``AcceptanceRule``; logits are not looked at."""
        return [
            synthetic_path(candidate.draft, self._rate, self._coin(candidate))
            for candidate in candidates
        ]

    @staticmethod
    def _coin(candidate: Candidate) -> Callable[[int], float]:
        seed, stream, first = candidate.seed, candidate.stream, candidate.position
        return lambda depth: toss(seed, stream, first + depth, SYNTHETIC_USE)
