"""What the target keeps of a draft, and the token that it adds: exact for chains and for trees.

What comes out follows the law of plain decoding, whatever the drafter was like: a bad one costs
time and nothing else. It rests on one thing that the drafter says, the ``DraftKind``. Rules that
give up the law for more speed take its place only where they were asked for; see ``rule.py``.

``POINT``, and every draft of a greedy request: at each node the target draws its own token with the
coin of that position, and the walk goes to the child that carries it. What comes out are the very
tokens of plain decoding, coin for coin.

The other kinds (see ``rejection.py``): a child that the drafter drew from q is accepted with
probability min(1, p / q); what is left of p after all children of a node were rejected is the law
of the token that ends the walk. More tokens are accepted than with points; the law is the same, the
tokens of one seed are others.

Where the model's logits are not finite no walk goes on, nor is a token drawn: the last accepted
token is then all that a request gains, and where there is none, nothing.

On a GPU every node's token is drawn and every child judged before the walk begins, so that one
transfer to the host serves the whole step. Knows nothing about drafters, sequences or pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forethought.model.sampling import TokenContext, invert_cdf, uniform_at
from forethought.model.sampling.distribution import probs_and_max_logits
from forethought.model.sampling.sampler import NO_TOKEN, draw_tokens, report, sample, where_finite
from forethought.outputs import TokenLogprobs
from forethought.speculative.draft import Draft, DraftKind
from forethought.speculative.tree import TokenTree
from forethought.speculative.verify.rejection import DrawnDraft, settle

if TYPE_CHECKING:
    from forethought.speculative.verify.rules import AcceptanceRule

_UNDRAWN = -2
"""Is no token, nor what a drafter may propose."""
_ACCEPTANCE = 2
"""The use of the coins that accept or reject."""
_CACHED = 2**19
"""Logits of a group on a processor. To draw from 96 rows of 32,000 tokens took three times as long
at once as in groups of 16: memory beyond the cache costs more than the operations."""


@dataclass(slots=True)
class VerificationRequest:
    """One request's draft of N tokens, computed by the target."""

    draft: Draft
    rows: Sequence[int]
    """1 + N rows of the logits: that of the root, then of each node."""
    contexts: Sequence[TokenContext]
    """1 + N, of the token that follows the root, then of the one that follows each node."""
    seed: int
    stream: int
    """With ``seed``, what its coins are drawn from."""
    position: int
    """Of the token that follows the root, counted from the sequence's first."""
    past: Sequence[int] = ()
    """The sequence's tokens, the root the last of them, for rules that look at them."""
    rule: AcceptanceRule | None = None
    """What decides about the draft; None: its law, exactly."""

    @property
    def is_random(self) -> bool:
        """Whether chance of the drafter's own has to be accounted for."""
        points = self.draft.kind is DraftKind.POINT or not len(self.draft)
        exact = self.rule is None
        return exact and not points and not self.contexts[0].params.greedy


@dataclass(slots=True)
class VerificationResult:
    """What one request gains in a step."""

    path: list[int]
    """The accepted nodes, from the root down."""
    tokens: list[int]
    """Theirs, and one more that the target drew itself. None at all: the logits behind the root are
    not finite."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token, under the model's own law, if asked for."""


def verify(logits: Tensor, candidates: Sequence[VerificationRequest]) -> list[VerificationResult]:
    """Decide what each request's draft is worth.

    Args:
        logits: [R, V] float32, the model's own; not modified.
        candidates: any number; their tokens are below V. Rows may be shared.

    Returns:
        One verdict each, of 1 to ``draft.depth + 1`` tokens; of exactly 1 without a draft; of none
        where the logits behind the root are not finite.
    """
    return [
        verdict
        for group in _groups(candidates, logits)
        for verdict in _verify_together(logits, group)
    ]


def _groups(
    candidates: Sequence[VerificationRequest], logits: Tensor
) -> list[Sequence[VerificationRequest]]:
    """A GPU takes all at once; a processor as many as its cache holds, which is much faster."""
    if logits.device.type != "cpu":
        return [candidates] if candidates else []
    groups: list[Sequence[VerificationRequest]] = []
    begin, size = 0, 0
    for place, candidate in enumerate(candidates):
        size += len(candidate.rows) * logits.shape[1]
        if size >= _CACHED or place == len(candidates) - 1:
            groups.append(candidates[begin : place + 1])
            begin, size = place + 1, 0
    return groups


def _verify_together(
    logits: Tensor, candidates: Sequence[VerificationRequest]
) -> list[VerificationResult]:
    rows = [row for candidate in candidates for row in candidate.rows]
    contexts = [context for candidate in candidates for context in candidate.contexts]
    first, past = rows[0], rows[0] + len(rows)
    if rows == list(range(first, past)):
        logits = logits[first:past]
    else:
        logits = logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)]
    if len(rows) == len(candidates):  # no draft at all: plain decoding
        choice = sample(logits, contexts, _all_uniforms(candidates))
        return [
            VerificationResult([], [token], None if entry is None else [entry])
            if token != NO_TOKEN
            else VerificationResult([], [])
            for token, entry in zip(choice.tokens, choice.logprobs, strict=True)
        ]
    drawn, accepted = _decide(logits, contexts, candidates)
    ruled = _paths_by_rule(logits, candidates)
    verdicts, origins, begin = [], [], 0
    for place, candidate in enumerate(candidates):
        end = begin + len(candidate.rows)
        if place in ruled:
            verdict = _verdict(candidate.draft, ruled[place], drawn[begin:end])
        else:
            verdict = _walk(candidate.draft, drawn[begin:end], accepted[begin:end])
        verdicts.append(verdict)
        origins += [begin, *(begin + 1 + node for node in verdict.path)][: len(verdict.tokens)]
        begin = end
    _add_logprobs(logits, contexts, origins, verdicts)
    return verdicts


def _decide(
    logits: Tensor, contexts: Sequence[TokenContext], candidates: Sequence[VerificationRequest]
) -> tuple[list[int], list[bool]]:
    """For each of R rows, the token that ends a walk there, and whether a walk may come there.

    logits: [R, V] float32, of the candidates one after the other, as are the contexts.
    """
    random: list[DrawnDraft] = []
    begin = 0
    for candidate in candidates:
        if candidate.is_random:
            random.append(DrawnDraft(candidate.draft, begin, _acceptance_uniforms(candidate)))
        begin += len(candidate.rows)
    if random:
        distributions, peaks = probs_and_max_logits(logits, contexts)
        settled = settle(distributions, random)
        own = where_finite(invert_cdf(distributions, _all_uniforms(candidates)), peaks)
        drawn, stay = torch.stack([own, settled.long()]).tolist()
        accepted = [bool(each) for each in stay]
    else:
        drawn = _draw(logits, contexts, candidates)
        accepted = [False] * len(drawn)
    begin = 0
    for candidate in candidates:
        draft, begin = candidate.draft, begin + 1
        if not candidate.is_random and _begins_with(draft, drawn[begin - 1]):
            for node, token in enumerate(draft.tokens):
                accepted[begin + node] = drawn[begin + draft.parent(node)] == token
        begin += len(draft)
    return drawn, accepted


def _draw(
    logits: Tensor, contexts: Sequence[TokenContext], candidates: Sequence[VerificationRequest]
) -> list[int]:
    """The target's own token at each row, or ``_UNDRAWN`` where no walk can come.

    A law takes a processor longer than a second look does: it draws at the roots first, and behind
    them only for those whose draft has begun well.
    """
    greedy = all(candidate.contexts[0].params.greedy for candidate in candidates)
    if logits.device.type != "cpu" or greedy:
        uniforms = [0.0] * len(contexts) if greedy else _all_uniforms(candidates)
        tokens: list[int] = draw_tokens(logits, contexts, uniforms).tolist()
        return tokens
    begins = [0, *accumulate(len(candidate.rows) for candidate in candidates)][:-1]
    drawn = [_UNDRAWN] * len(contexts)

    def look(rows: Sequence[int], uniforms: Sequence[float]) -> None:
        index = torch.tensor(rows, dtype=torch.int64)
        found = draw_tokens(logits[index], [contexts[row] for row in rows], uniforms)
        for row, token in zip(rows, found.tolist(), strict=True):
            drawn[row] = token

    look(begins, [_uniform_at(candidate, candidate.position) for candidate in candidates])
    further, uniforms = list[int](), list[float]()
    for begin, candidate in zip(begins, candidates, strict=True):
        if candidate.rule is not None or _begins_with(candidate.draft, drawn[begin]):
            further += range(begin + 1, begin + len(candidate.rows))
            uniforms += _uniforms(candidate)[1:]
    if further:
        look(further, uniforms)
    return drawn


def _begins_with(draft: Draft, token: int) -> bool:
    """Whether a child of the root carries the token."""
    if draft.parents is None:
        return len(draft) > 0 and draft.tokens[0] == token
    return any(draft.parent(node) < 0 and draft.tokens[node] == token for node in range(len(draft)))


def _walk(draft: Draft, drawn: Sequence[int], accepted: Sequence[bool]) -> VerificationResult:
    """From the root to the first child that may stand, and on, until none may.

    Entry 0 of both lists is the root's, entry 1 + n node n's.
    """
    at, path = -1, list[int]()
    if drawn[0] != NO_TOKEN and not any(accepted[1:]):
        return VerificationResult(path, [drawn[0]])
    for node in range(len(draft)):  # younger siblings and children come after a node
        if accepted[1 + node] and draft.parent(node) == at:
            at = node
            path.append(node)
    return _verdict(draft, path, drawn)


def _verdict(draft: Draft, path: list[int], drawn: Sequence[int]) -> VerificationResult:
    """The path's tokens, and the one that is drawn behind them.

    The path ends where no token can be drawn; its last node then counts as drawn, not as accepted.
    """
    nodes = [-1, *path]
    lost = next((place for place, node in enumerate(nodes) if drawn[1 + node] == NO_TOKEN), None)
    tokens = [draft.tokens[node] for node in path]
    if lost is not None:
        return VerificationResult(path[: max(lost - 1, 0)], tokens[:lost])
    return VerificationResult(path, [*tokens, drawn[1 + nodes[-1]]])


def _paths_by_rule(
    logits: Tensor, candidates: Sequence[VerificationRequest]
) -> dict[int, list[int]]:
    """By place among the candidates, the accepted nodes where a rule other than the law decides.

    logits: [R, V] float32, of the candidates one after the other.
    """
    asked: dict[AcceptanceRule, list[tuple[int, int]]] = {}
    begin = 0
    for place, candidate in enumerate(candidates):
        if candidate.rule is not None and len(candidate.draft):
            asked.setdefault(candidate.rule, []).append((place, begin))
        begin += len(candidate.rows)
    found: dict[int, list[int]] = {}
    for rule, places in asked.items():
        mine = [candidates[place] for place, _ in places]
        rows = [row for place, at in places for row in range(at, at + len(candidates[place].rows))]
        index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
        paths = rule.paths(logits[index], mine)
        found.update(zip((place for place, _ in places), paths, strict=True))
    return found


def _positions(candidate: VerificationRequest) -> list[int]:
    """Of the token that follows each row."""
    draft = candidate.draft
    if draft.parents is None:
        return list(range(candidate.position, candidate.position + len(draft) + 1))
    depths = TokenTree(draft.parents).depths
    return [candidate.position, *(candidate.position + depth for depth in depths)]


def _all_uniforms(candidates: Sequence[VerificationRequest]) -> list[float]:
    """One per row of all candidates."""
    return [toss for candidate in candidates for toss in _uniforms(candidate)]


def _uniforms(candidate: VerificationRequest) -> list[float]:
    """One per row: of the token that follows."""
    if candidate.contexts[0].params.greedy:
        return [0.0] * len(candidate.rows)
    return [_uniform_at(candidate, position) for position in _positions(candidate)]


def _uniform_at(candidate: VerificationRequest, position: int) -> float:
    """Of the token at a position. Greedy requests need none."""
    greedy = candidate.contexts[0].params.greedy
    return 0.0 if greedy else uniform_at(candidate.seed, candidate.stream, position)


def _acceptance_uniforms(candidate: VerificationRequest) -> list[float]:
    """One per node, of the position that it would take: another one for each sibling."""
    draft, positions = candidate.draft, _positions(candidate)
    earlier_siblings = Counter[int]()
    uniforms = []
    for node in range(len(draft)):
        parent = draft.parent(node)
        use = _ACCEPTANCE + (earlier_siblings[parent] << 8)
        uniforms.append(uniform_at(candidate.seed, candidate.stream, positions[1 + parent], use))
        earlier_siblings[parent] += 1
    return uniforms


def _add_logprobs(
    logits: Tensor,
    contexts: Sequence[TokenContext],
    rows: Sequence[int],
    verdicts: Sequence[VerificationResult],
) -> None:
    """Score what came out, each token at the row that it follows.

    logits: [R, V] float32; rows: one per token of the verdicts, one verdict after the other.
    """
    if all(contexts[row].params.logprobs is None for row in rows):
        return
    index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    tokens = [token for verdict in verdicts for token in verdict.tokens]
    drawn = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    entries = iter(report(logits[index], [contexts[row] for row in rows], drawn).logprobs)
    for verdict in verdicts:
        found = [next(entries) for _ in verdict.tokens]
        kept = [entry for entry in found if entry is not None]
        verdict.logprobs = kept or None
