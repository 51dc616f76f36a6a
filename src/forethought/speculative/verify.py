"""Temporary: point drafts only; the whole one is on its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from forethought.model.sampling import TokenContext, choose, coin
from forethought.outputs import TokenLogprobs
from forethought.speculative.draft import Draft


@dataclass(slots=True)
class Candidate:
    draft: Draft
    rows: Sequence[int]
    contexts: Sequence[TokenContext]
    seed: int
    stream: int
    position: int


@dataclass(slots=True)
class Verdict:
    path: list[int]
    tokens: list[int]
    logprobs: list[TokenLogprobs | None] | None = None


def verify(logits: Tensor, candidates: Sequence[Candidate]) -> list[Verdict]:
    rows, contexts, coins = [], [], []
    for c in candidates:
        depths = [0]
        for node in range(len(c.draft)):
            depths.append(depths[1 + c.draft.parent(node)] + 1)
        rows += c.rows
        contexts += c.contexts
        coins += [coin(c.seed, c.stream, c.position + d) for d in depths]
    if rows != list(range(len(logits))):
        logits = logits[rows]
    choice = choose(logits, contexts, coins)
    out, begin = [], 0
    for c in candidates:
        at, path, tokens, probs = -1, [], [], []
        while True:
            y = choice.tokens[begin + 1 + at]
            tokens.append(y)
            probs.append(choice.logprobs[begin + 1 + at])
            kids = [n for n in range(at + 1, len(c.draft)) if c.draft.parent(n) == at]
            hit = [n for n in kids if c.draft.tokens[n] == y]
            if not hit:
                break
            at = hit[0]
            path.append(at)
        out.append(Verdict(path, tokens, probs if c.contexts[0].params.logprobs is not None else None))
        begin += 1 + len(c.draft)
    return out
