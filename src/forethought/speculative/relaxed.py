"""Relaxed acceptance: while it thinks, a target puts up with tokens that it likes almost as well.

TensorRT-LLM's rule for multi-token prediction with reasoning models: between the tokens that begin
and end the thinking, a drafted token stands if it is among the ``topk`` likeliest and not far less
likely than the likeliest. *How far* is said in two ways there, and both are here by name: the
kernels compare probabilities, ``p(x) >= p(top) - delta``; the documentation logarithms,
``log p(top) - log p(x) <= delta``. Elsewhere a token has to be the likeliest. *Lossy*: thoughts are
no longer the target's own. Knows nothing about how drafts were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from forethought.model.sampling.law import edit_logits
from forethought.params import SamplingParams

if TYPE_CHECKING:
    from forethought.speculative.verify import Candidate

RelaxedRule = Literal["probability", "log_probability"]
"""What ``delta`` is a difference of."""


class RelaxedAcceptance:
    """See ``speculative.rule.AcceptanceRule``.

    Args:
        topk: the token is among so many likeliest ones, at temperature 1.
        delta: how much less likely than the likeliest it may be.
        rule: what that is a difference of.
        begin, end: the tokens around the thinking.
    """

    synthetic = False

    def __init__(self, topk: int, delta: float, rule: RelaxedRule, begin: int, end: int) -> None:
        self.topk, self.delta, self.rule = topk, delta, rule
        self._begin, self._end = begin, end

    def bends(self, params: SamplingParams) -> bool:
        """Greedy requests: sampled ones have a law to keep, and no single likeliest token."""
        return params.greedy

    def paths(self, logits: Tensor, candidates: Sequence[Candidate]) -> list[list[int]]:
        """See ``AcceptanceRule``; of paths of one length, the first is taken."""
        contexts = [context for candidate in candidates for context in candidate.contexts]
        laws = edit_logits(logits, contexts).softmax(dim=-1)
        parents, tokens, begin = list[int](), list[int](), 0
        for candidate in candidates:
            draft = candidate.draft
            parents += [begin + 1 + draft.parent(node) for node in range(len(draft))]
            tokens += draft.tokens
            begin += 1 + len(draft)
        rows = torch.tensor(parents, dtype=torch.int64, device=logits.device)
        chosen = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
        likeliest = laws.max(dim=-1).indices[rows] == chosen  # the first of equals, as ever
        found = torch.stack([likeliest, self.tolerable(laws[rows], chosen)], dim=1).tolist()
        verdicts = iter(found)
        return [
            self._longest(candidate, [next(verdicts) for _ in candidate.draft.tokens])
            for candidate in candidates
        ]

    def tolerable(self, laws: Tensor, tokens: Tensor) -> Tensor:
        """bool [R]: whether each token would do while thinking.

        Args:
            laws: [R, V] float32, probabilities.
            tokens: int64 [R].
        """
        chance, top = laws.gather(1, tokens[:, None]), laws.amax(dim=-1, keepdim=True)
        near = chance >= top - self.delta
        if self.rule == "log_probability":
            near = top.log() - chance.log() <= self.delta
        return (near & ((laws > chance).sum(dim=-1, keepdim=True) < self.topk))[:, 0]

    def _longest(self, candidate: Candidate, found: Sequence[Sequence[bool]]) -> list[int]:
        """The longest path of accepted nodes, the first among equals.

        found: for each node, whether it is the likeliest, and whether it is tolerable.
        """
        draft = candidate.draft
        paths: dict[int, list[int]] = {-1: []}
        thinking = {-1: self._thinks(candidate.past)}
        for node, (likeliest, tolerable) in enumerate(found):
            parent, token = draft.parent(node), draft.tokens[node]
            if parent in paths and (likeliest or (tolerable and thinking[parent])):
                paths[node] = [*paths[parent], node]
                around = {self._begin: True, self._end: False}
                thinking[node] = around.get(token, thinking[parent])
        return max(paths.values(), key=len)

    def _thinks(self, past: Sequence[int]) -> bool:
        """Whether the last of the two tokens in a text is the one that begins the thinking."""
        backwards = past[::-1]
        if self._begin not in backwards:
            return False
        distance = backwards.index(self._begin)
        return self._end not in backwards[:distance]
