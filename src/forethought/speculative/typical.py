"""Typical acceptance: a drafted token stands if the target finds it likely enough.

Cai et al., 2024 (arXiv 2401.10774), section 2.3.1: token x is accepted behind a prefix with law p
if p(x) > min(threshold, alpha * exp(-H(p))), H being the entropy: the less sure the target is, the
less likely a token may be. Of all paths of such tokens the longest is taken. It accepts more than
exact verification and is *lossy*: likely tokens are said more often than their law has it. Knows
nothing about how drafts were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forethought.model.sampling import logits_to_probs
from forethought.params import SamplingParams

if TYPE_CHECKING:
    from forethought.speculative.verify import Candidate

_TINY = 1e-5
"""Added to a probability before its logarithm is taken, by the authors and so here."""


class TypicalAcceptance:
    """See ``speculative.rule.AcceptanceRule``.

    Args:
        threshold: of probability, where the target is sure; the authors' default is 0.09.
        alpha: what exp(-entropy) is multiplied by; they recommend the threshold's square root.
    """

    synthetic = False

    def __init__(self, threshold: float, alpha: float) -> None:
        self.threshold, self.alpha = threshold, alpha

    def bends(self, params: SamplingParams) -> bool:
        """Sampled requests. A greedy law is a point, of which nothing else is typical."""
        return not params.greedy

    def thresholds(self, laws: Tensor) -> Tensor:
        """What a token's probability must exceed: laws [R, V] float32 -> [R]."""
        entropy = -(laws * (laws + _TINY).log()).sum(dim=-1)
        return (self.alpha * torch.exp(-entropy)).clamp(max=self.threshold)

    def paths(self, logits: Tensor, candidates: Sequence[Candidate]) -> list[list[int]]:
        """See ``AcceptanceRule``; of paths of one length, the likelier is taken."""
        contexts = [context for candidate in candidates for context in candidate.contexts]
        laws = logits_to_probs(logits, contexts)
        parents, tokens, begin = list[int](), list[int](), 0
        for candidate in candidates:
            draft = candidate.draft
            parents += [begin + 1 + draft.parent(node) for node in range(len(draft))]
            tokens += draft.tokens
            begin += 1 + len(draft)
        rows = torch.tensor(parents, dtype=torch.int64, device=logits.device)
        chosen = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
        chances = laws[rows, chosen]
        margins = chances - self.thresholds(laws)[rows]
        found = iter(torch.stack([margins, chances.clamp(min=_TINY).log()], dim=1).tolist())
        return [
            _longest(candidate, [next(found) for _ in candidate.draft.tokens])
            for candidate in candidates
        ]


def _longest(candidate: Candidate, found: Sequence[Sequence[float]]) -> list[int]:
    """The longest path of accepted nodes, the likelier one among equals, then the first.

    found: for each node, by how much its probability exceeds the threshold, and the logarithm of
    its probability.
    """
    draft = candidate.draft
    best: tuple[int, float] = (0, 0.0)
    end = -1
    scores: dict[int, tuple[int, float]] = {-1: best}
    for node, (margin, logprob) in enumerate(found):
        before = scores.get(draft.parent(node))
        if margin > 0 and before is not None:
            scores[node] = (before[0] + 1, before[1] + logprob)
            if scores[node] > best:
                best, end = scores[node], node
    path: list[int] = []
    while end >= 0:
        path.append(end)
        end = draft.parent(end)
    return path[::-1]
