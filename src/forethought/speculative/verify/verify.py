"""Verification: which drafted tokens the target accepts, for chains and trees of many requests.

The emitted tokens follow the target's distribution p exactly, whatever the drafter proposes: a bad
draft costs time and nothing else. How a node's children are tested depends on ``Draft.kind``:

* ``POINT``, and every draft of a greedy request: the target samples its own token at each node,
  with the uniform sample of that position, and the walk follows the child that has this token. The
  output is, token for token, that of plain decoding.
* Other kinds (recursive rejection sampling, ``rejection.py``): a child drawn from q is accepted
  with probability min(1, p / q); the token after the last accepted node is drawn from what is left
  of p once all children of that node are rejected. More tokens are accepted than with points; the
  distribution is the same, but a seed gives other tokens than plain decoding.

An ``AcceptanceRule`` (``rules.py``) replaces both where the configuration asks for lossy
acceptance.

A walk ends where the target's logits are not finite: no token is drawn there. The last accepted
token is then the last one that the request gains; if the root's logits are not finite it gains
none.

On a GPU the tokens of all nodes are drawn and all children tested before the walk, so that a step
needs one transfer to the host, which also brings the drafts that are still there. On a CPU requests
are verified in groups that fit into the cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from forethought.config.sampling import SamplingParams
from forethought.kv.staging import upload
from forethought.model.sampling import TokenContext, invert_cdf, uniform_at
from forethought.model.sampling.distribution import probs_and_max_logits
from forethought.model.sampling.sampler import NO_TOKEN, draw_tokens, report, sample, where_finite
from forethought.outputs import TokenConfidence, TokenLogprobs
from forethought.speculative.drafter import DeviceTokens, Draft, DraftKind
from forethought.speculative.verify.rejection import DrawnDraft, accept_drawn

_Scores = TypeVar("_Scores", TokenLogprobs, TokenConfidence)
_NOT_DRAWN = -2
"""In place of a token at a node that no walk can reach."""
_USE_ACCEPTANCE = 2
"""``use`` of the uniform samples that accept or reject; see ``uniform_at``."""
_MAX_GROUP_LOGITS = 2**19
"""Logits of a group on a CPU. To draw from 96 rows of 32,000 tokens took three times as long at
once as in groups of 16: memory beyond the cache costs more than the operations."""


class AcceptanceRule(Protocol):
    """A lossy rule that decides which drafted tokens are accepted, in place of exact verification.

    The token after the accepted path is drawn by the target as usual.
    """

    @property
    def synthetic(self) -> bool:
        """Whether the output says nothing about the target."""

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether requests with these params use the rule; all others are verified exactly."""

    def paths(self, logits: Tensor, requests: Sequence[VerificationRequest]) -> list[list[int]]:
        """The accepted nodes of each draft, from the root down.

        Args:
            logits: [R, V] float32, the model's own: the 1 + N rows of each request in turn.
            requests: with drafts of any kind; their ``rows`` are not used.
        """


@dataclass(slots=True)
class VerificationRequest:
    """One request's draft of N tokens, and the rows that the target computed for it."""

    draft: Draft
    rows: Sequence[int]
    """1 + N rows of the logits: the root's, then each node's."""
    contexts: Sequence[TokenContext]
    """1 + N: of the token after the root, then of the one after each node."""
    seed: int
    stream: int
    """The sample's index; with ``seed`` and a position it determines the uniform samples."""
    position: int
    """Position of the token after the root, from the first token of the sequence."""
    past: Sequence[int] = ()
    """The sequence's tokens up to the root, for rules that need them."""
    rule: AcceptanceRule | None = None
    """None: exact verification."""

    @property
    def uses_q(self) -> bool:
        """Whether the draft's tokens were drawn from a distribution that acceptance depends on."""
        points = self.draft.kind is DraftKind.POINT or not len(self.draft)
        return self.rule is None and not points and not self.contexts[0].params.greedy

    @property
    def positions(self) -> list[int]:
        """[1 + N]: of the token after each row."""
        depths = self.draft.depths if len(self.draft.tokens) else ()  # most have no draft
        return [self.position, *(self.position + depth for depth in depths)]

    def uniforms(self, rows: slice = slice(None)) -> list[float]:
        """The uniform sample of the token after each of ``rows``; greedy requests use none."""
        if self.contexts[0].params.greedy:
            return [0.0] * len(self.rows[rows])
        return [uniform_at(self.seed, self.stream, position) for position in self.positions[rows]]

    def acceptance_uniforms(self) -> list[float]:
        """[N]: the uniform sample that accepts or rejects each node, another one per sibling."""
        positions, num_siblings = self.positions, Counter[int]()
        uniforms = []
        for node in range(len(self.draft)):
            parent = self.draft.parent(node)
            use = _USE_ACCEPTANCE + (num_siblings[parent] << 8)
            uniforms.append(uniform_at(self.seed, self.stream, positions[1 + parent], use))
            num_siblings[parent] += 1
        return uniforms


@dataclass(slots=True)
class VerificationResult:
    """What one request gains in a step."""

    path: list[int]
    """The accepted nodes, from the root down."""
    tokens: list[int]
    """Their tokens and one more, drawn by the target. Empty: the root's logits are not finite."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token, under the model's own distribution, if requested."""
    confidences: list[TokenConfidence] | None = None
    """The same."""


def verify(logits: Tensor, requests: Sequence[VerificationRequest]) -> list[VerificationResult]:
    """Verify the draft of every request.

    Args:
        logits: [R, V] float32, the model's own; not modified.
        requests: any number; their tokens are below V. Rows may be shared.

    Returns:
        One result per request, of 1 to ``draft.depth + 1`` tokens; of 1 without a draft; of none
        where the root's logits are not finite.
    """
    return [
        result for group in _groups(requests, logits) for result in _verify_group(logits, group)
    ]


def _groups(
    requests: Sequence[VerificationRequest], logits: Tensor
) -> list[Sequence[VerificationRequest]]:
    """All requests at once on a GPU; on a CPU as many as the cache holds, which is much faster."""
    num_logits = sum([len(request.rows) for request in requests]) * logits.shape[1]
    if num_logits < _MAX_GROUP_LOGITS or not logits.is_cpu:
        return [requests] if requests else []
    groups: list[Sequence[VerificationRequest]] = []
    begin, size = 0, 0
    for end, request in enumerate(requests, start=1):
        size += len(request.rows) * logits.shape[1]
        if size >= _MAX_GROUP_LOGITS or end == len(requests):
            groups.append(requests[begin:end])
            begin, size = end, 0
    return groups


def _verify_group(
    logits: Tensor, requests: Sequence[VerificationRequest]
) -> list[VerificationResult]:
    rows = [row for request in requests for row in request.rows]
    contexts = [context for request in requests for context in request.contexts]
    logits = _select(logits, rows)
    if len(rows) == len(requests):  # no draft at all: plain decoding
        return _sample_plainly(logits, contexts, requests)
    drawn, accepted = _test_nodes(logits, contexts, requests)
    rule_paths = _paths_by_rule(logits, requests)
    results, origins = list[VerificationResult](), list[int]()
    for number, (request, begin) in enumerate(zip(requests, _begins(requests), strict=True)):
        rows_of = slice(begin, begin + len(request.rows))
        if number in rule_paths:
            result = _result(request.draft, rule_paths[number], drawn[rows_of])
        else:
            result = _walk(request.draft, drawn[rows_of], accepted[rows_of])
        results.append(result)
        origins += [begin, *(begin + 1 + node for node in result.path)][: len(result.tokens)]
    _add_scores(logits, contexts, origins, results)
    return results


def _select(logits: Tensor, rows: list[int]) -> Tensor:
    """The given rows; a view if they are consecutive."""
    first, end = rows[0], rows[0] + len(rows)
    if rows != list(range(first, end)):
        return logits[upload(rows, logits.device)]
    return logits if len(rows) == logits.shape[0] else logits[first:end]


def _begins(requests: Sequence[VerificationRequest]) -> list[int]:
    """The root's row of each request in the logits of its group."""
    return [0, *accumulate(len(request.rows) for request in requests)][:-1]


def _drafts(requests: Sequence[VerificationRequest]) -> list[Draft]:
    return [request.draft for request in requests]


def _all_uniforms(requests: Sequence[VerificationRequest]) -> list[float]:
    return [uniform for request in requests for uniform in request.uniforms()]


def _sample_plainly(
    logits: Tensor, contexts: Sequence[TokenContext], requests: Sequence[VerificationRequest]
) -> list[VerificationResult]:
    """One token per request, none of which has a draft."""
    sampled = sample(logits, contexts, _all_uniforms(requests))
    return [
        VerificationResult([], [token], _listed(logprobs), _listed(confidence))
        if token != NO_TOKEN
        else VerificationResult([], [])
        for token, logprobs, confidence in zip(
            sampled.tokens, sampled.logprobs, sampled.confidences, strict=True
        )
    ]


def _listed(scores: _Scores | None) -> list[_Scores] | None:
    return None if scores is None else [scores]


def _test_nodes(
    logits: Tensor, contexts: Sequence[TokenContext], requests: Sequence[VerificationRequest]
) -> tuple[list[int], list[bool]]:
    """For each of R rows, the token that ends a walk there, and whether its parent accepts it.

    logits: [R, V] float32, of the requests one after the other, as are the contexts.
    """
    begins = _begins(requests)
    drafts = [
        DrawnDraft(request.draft, begin, request.acceptance_uniforms())
        for request, begin in zip(requests, begins, strict=True)
        if request.uses_q
    ]
    if drafts:
        probs, peaks = probs_and_max_logits(logits, contexts)
        by_q = accept_drawn(probs, drafts)
        tokens = where_finite(invert_cdf(probs, _all_uniforms(requests)), peaks)
        values = read_drafts(_drafts(requests), torch.cat([tokens, by_q.long()]))
        drawn, flags = values[: len(tokens)], values[len(tokens) :]
        accepted = [bool(flag) for flag in flags]
    else:
        drawn = _draw(logits, contexts, requests)
        accepted = [False] * len(drawn)
    for request, begin in zip(requests, begins, strict=True):
        draft = request.draft
        if not request.uses_q and _root_accepts(draft, drawn[begin]):
            for node, token in enumerate(draft.tokens):
                accepted[begin + 1 + node] = drawn[begin + 1 + draft.parent(node)] == token
    return drawn, accepted


def _draw(
    logits: Tensor, contexts: Sequence[TokenContext], requests: Sequence[VerificationRequest]
) -> list[int]:
    """The target's own token at each row, or ``_NOT_DRAWN`` where no walk can come.

    On a CPU a row's distribution costs more than a second pass: tokens are drawn at the roots
    first, then at the nodes of those drafts of which the root accepts a child.
    """
    greedy = all(request.contexts[0].params.greedy for request in requests)
    if logits.device.type != "cpu" or greedy:
        uniforms = [0.0] * len(contexts) if greedy else _all_uniforms(requests)
        return read_drafts(_drafts(requests), draw_tokens(logits, contexts, uniforms))
    begins = _begins(requests)
    drawn = [_NOT_DRAWN] * len(contexts)

    def draw(rows: Sequence[int], uniforms: Sequence[float]) -> None:
        index = torch.tensor(rows, dtype=torch.int64)
        found = draw_tokens(logits[index], [contexts[row] for row in rows], uniforms)
        for row, token in zip(rows, found.tolist(), strict=True):
            drawn[row] = token

    draw(begins, [request.uniforms(slice(1))[0] for request in requests])
    rows, uniforms = list[int](), list[float]()
    for request, begin in zip(requests, begins, strict=True):
        if request.rule is not None or _root_accepts(request.draft, drawn[begin]):
            rows += range(begin + 1, begin + len(request.rows))
            uniforms += request.uniforms(slice(1, None))
    if rows:
        draw(rows, uniforms)
    return drawn


def read_drafts(drafts: Iterable[Draft], values: Tensor | None = None) -> list[int]:
    """Bring the tokens of drafts that are on a GPU to the host, all in one transfer.

    Args:
        drafts: on a GPU or not.
        values: int64 ``[n]``, transferred with them.

    Returns:
        The values.
    """
    unread = {
        id(tokens): tokens
        for draft in drafts
        if isinstance(tokens := draft.tokens, DeviceTokens) and not tokens.is_read
    }
    if not unread:
        found: list[int] = [] if values is None else values.tolist()
        return found
    parts = [tokens.on_device for tokens in unread.values()]
    read = iter(torch.cat(parts if values is None else [values, *parts]).tolist())
    found = list(islice(read, 0 if values is None else len(values)))
    for tokens in unread.values():
        tokens.set(list(islice(read, len(tokens))))
    return found


def _root_accepts(draft: Draft, token: int) -> bool:
    """Whether a child of the root has this token."""
    if draft.parents is None:
        return len(draft) > 0 and draft.tokens[0] == token
    return any(draft.parent(node) < 0 and draft.tokens[node] == token for node in range(len(draft)))


def _walk(draft: Draft, drawn: Sequence[int], accepted: Sequence[bool]) -> VerificationResult:
    """From the root to its first accepted child, and on, until a node has none.

    Entry 0 of both lists is the root's, entry 1 + n node n's.
    """
    last, path = -1, list[int]()
    if drawn[0] != NO_TOKEN and not any(accepted[1:]):
        return VerificationResult(path, [drawn[0]])
    for node in range(len(draft)):  # later siblings and children come after a node
        if accepted[1 + node] and draft.parent(node) == last:
            last = node
            path.append(node)
    return _result(draft, path, drawn)


def _result(draft: Draft, path: list[int], drawn: Sequence[int]) -> VerificationResult:
    """The path's tokens, and the one that is drawn after them.

    The path ends where no token can be drawn; its last node then counts as drawn, not as accepted.
    """
    nodes = [-1, *path]
    end = next((at for at, node in enumerate(nodes) if drawn[1 + node] == NO_TOKEN), None)
    tokens = [draft.tokens[node] for node in path]
    if end is not None:
        return VerificationResult(path[: max(end - 1, 0)], tokens[:end])
    return VerificationResult(path, [*tokens, drawn[1 + nodes[-1]]])


def _paths_by_rule(logits: Tensor, requests: Sequence[VerificationRequest]) -> dict[int, list[int]]:
    """The accepted nodes of requests with a rule, by their index.

    logits: [R, V] float32, of the requests one after the other.
    """
    by_rule: dict[AcceptanceRule, list[int]] = {}
    for number, request in enumerate(requests):
        if request.rule is not None and len(request.draft):
            by_rule.setdefault(request.rule, []).append(number)
    begins, found = _begins(requests), dict[int, list[int]]()
    for rule, numbers in by_rule.items():
        group = [requests[number] for number in numbers]
        rows = [begins[n] + row for n in numbers for row in range(len(requests[n].rows))]
        found.update(zip(numbers, rule.paths(_select(logits, rows), group), strict=True))
    return found


def _add_scores(
    logits: Tensor,
    contexts: Sequence[TokenContext],
    rows: Sequence[int],
    results: Sequence[VerificationResult],
) -> None:
    """Add log-probabilities and confidence of each emitted token, at the row that it follows.

    logits: [R, V] float32; rows: one per token of the results, one result after the other.
    """
    asked = (contexts[row].params for row in rows)
    if all(params.logprobs is None and params.confidence is None for params in asked):
        return
    index = upload(rows, logits.device)
    tokens = [token for result in results for token in result.tokens]
    drawn = upload(tokens, logits.device)
    sampled, begin = report(logits[index], [contexts[row] for row in rows], drawn), 0
    for result in results:
        of_result = slice(begin, begin + len(result.tokens))
        begin = of_result.stop
        result.logprobs = _known(sampled.logprobs[of_result])
        result.confidences = _known(sampled.confidences[of_result])


def _known(scores: Sequence[_Scores | None]) -> list[_Scores] | None:
    """The scores of one result's tokens, of which all or none are known; None if there are none."""
    return [entry for entry in scores if entry is not None] or None
