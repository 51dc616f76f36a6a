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

Requests without drafts, plain decoding, are one call of ``model.sampling.sample``: temperature and
all other parameters of the distribution are applied in ``model.sampling`` in any case.

A walk ends where the target's logits are not finite: no token is drawn there. The last accepted
token is then the last one that the request gains; if the root's logits are not finite it gains
none.

On a GPU the tokens of all nodes are drawn, all children tested and all tokens scored before the
walk, so that a step needs one transfer to the host, which also brings the drafts that are still
there. On a CPU only what a walk can reach is drawn, and only what it emits is scored, and requests
are verified in groups that fit into the cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Any, Protocol

import torch
from torch import Tensor

from forethought.config.sampling import SamplingParams
from forethought.kv.staging import Download, upload
from forethought.model.sampling import DevicePath, TokenContext, invert_cdf, uniform_at
from forethought.model.sampling.distribution import probs_and_max_logits
from forethought.model.sampling.sampler import (
    NO_TOKEN,
    TokenScores,
    draw_tokens,
    report,
    sample,
    where_finite,
)
from forethought.speculative.drafter import DeviceTokens, Draft, DraftKind
from forethought.speculative.verify.accept import (
    Scores,
    VerificationResult,
    accept_points,
    accept_tested,
    result_of,
)
from forethought.speculative.verify.rejection import DrawnDraft, accept_drawn, token_ids
from forethought.speculative.verify.unread_drafts import UnreadDrafts

_NOT_DRAWN = -2
"""In place of a token at a node that no walk can reach."""
_USE_ACCEPTANCE = 2
"""``use`` of the uniform samples that accept or reject; see ``uniform_at``."""
_MAX_GROUP_LOGITS = 2**19
"""Logits of a group on a CPU. To draw from 96 rows of 32,000 tokens took three times as long at
once as in groups of 16: memory beyond the cache costs more than the operations."""


NodeTests = Sequence[Sequence[float]]
"""N rows of ``AcceptanceRule.test_nodes``, on the host."""


class AcceptanceRule(Protocol):
    """A lossy rule that decides which drafted tokens are accepted, in place of exact verification.

    The token after the accepted path is drawn by the target as usual.
    """

    @property
    def synthetic(self) -> bool:
        """Whether the output says nothing about the target."""

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether requests with these params use the rule; all others are verified exactly."""

    def test_nodes(self, logits: Tensor, requests: Sequence[VerificationRequest]) -> Tensor | None:
        """Compute what the rule needs of the drafted nodes; nothing is read from a GPU.

        Args:
            logits: [R, V] float32, the model's own: the 1 + N rows of each request in turn.
            requests: with drafts of any kind; their ``rows`` are not used.

        Returns:
            [nodes, n] of all drafts in turn; None: nothing.
        """

    def path(self, request: VerificationRequest, tests: NodeTests) -> list[int]:
        """The accepted nodes of a draft, from the root down.

        Args:
            request: one of those above.
            tests: of its nodes, from ``test_nodes``.
        """


@dataclass(frozen=True, slots=True)
class SampledToken:
    """How the token after a root is sampled."""

    context: TokenContext
    """Of the root; without prompt and output if the distribution does not depend on them."""
    seed: int
    stream: int
    """The sample's index; with ``seed`` and a position it determines the uniform samples."""
    is_stateful: bool
    """Whether it depends on prompt and output."""

    def after(self, tokens: Sequence[int]) -> SampledToken:
        """The same for a root that further ``tokens`` have led to."""
        if not self.is_stateful:
            return self
        output = [*self.context.output, *tokens]
        return replace(self, context=replace(self.context, output=output))

    def node_contexts(self, draft: Draft) -> list[TokenContext]:
        """The contexts of the root and each of N nodes, 1 + N."""
        root = self.context
        if not self.is_stateful:
            return [root] * (1 + len(draft.tokens))
        if isinstance(draft.tokens, DeviceTokens) and not draft.tokens.is_read:
            paths = DevicePath.of_nodes(draft.tokens.on_device, draft.parents)
            return [root, *(replace(root, path=path) for path in paths)]
        contexts = [root]
        for node, token in enumerate(draft.tokens):
            before = contexts[1 + draft.parent(node)].output
            contexts.append(replace(root, output=[*before, token]))
        return contexts


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

    @classmethod
    def of(
        cls, draft: Draft, begin: int, root: SampledToken, past: Sequence[int]
    ) -> VerificationRequest:
        """An exact verification; ``begin`` is the root's row of the logits."""
        return cls(
            draft=draft,
            rows=range(begin, begin + 1 + len(draft.tokens)),
            contexts=root.node_contexts(draft),
            seed=root.seed,
            stream=root.stream,
            position=len(past),
            past=past,
        )

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
        return _sample_roots(logits, contexts, requests)
    # 1. All that is computed on the device, and one transfer.
    download = Download()
    drafts = UnreadDrafts([request.draft for request in requests], download)
    drawn_tokens, by_q = _test_nodes(logits, contexts, requests)
    drawn_at = download.add(drawn_tokens) if isinstance(drawn_tokens, Tensor) else -1
    by_q_at = None if by_q is None else download.add(by_q)
    by_rule = _RuleTests(logits, requests, download)
    scores = None
    if not logits.is_cpu:
        assert isinstance(drawn_tokens, Tensor)
        scores = _NodeScores(logits, requests, drawn_tokens, download)
    parts = download.read()
    # 2. The walks, on the host.
    drafts.set(parts)
    drawn: list[int] = drawn_tokens if isinstance(drawn_tokens, list) else parts[drawn_at]
    accepted = [] if by_q_at is None else parts[by_q_at]
    paths = by_rule.paths(parts)
    results, origins = list[VerificationResult](), list[int]()
    for number, (request, begin) in enumerate(zip(requests, _begins(requests), strict=True)):
        end = begin + len(request.rows)
        if number in paths:
            path = paths[number]
        elif request.uses_q:
            path = accept_tested(request.draft, accepted[begin:end])
        else:
            path = accept_points(request.draft, drawn[begin:end])
        result = result_of(request.draft, path, drawn[begin:end])
        results.append(result)
        origins += [begin, *(begin + 1 + node for node in result.path)][: len(result.tokens)]
    if scores is not None:
        scores.add_to(results, parts)
    else:
        _add_scores(logits, requests, origins, results)
    return results


def _select(logits: Tensor, rows: list[int]) -> Tensor:
    first, end = rows[0], rows[0] + len(rows)
    if rows != list(range(first, end)):
        return logits[upload(rows, logits.device)]
    return logits if len(rows) == logits.shape[0] else logits[first:end]


def _begins(requests: Sequence[VerificationRequest]) -> list[int]:
    return [0, *accumulate(len(request.rows) for request in requests)][:-1]


def _all_uniforms(requests: Sequence[VerificationRequest]) -> list[float]:
    return [uniform for request in requests for uniform in request.uniforms()]


def _sample_roots(
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


def _listed(scores: Scores | None) -> list[Scores] | None:
    return None if scores is None else [scores]


def _test_nodes(
    logits: Tensor, contexts: Sequence[TokenContext], requests: Sequence[VerificationRequest]
) -> tuple[Tensor | list[int], Tensor | None]:
    """For each of R rows, the token that ends a walk there, and whether its parent accepts it.

    Args:
        logits: [R, V] float32, of the requests one after the other, as are the contexts.

    Returns:
        int64 [R], on a CPU perhaps a list, and bool [R] of the drafts that ``uses_q``, false
        elsewhere; None: there are none.
    """
    drafts = [
        DrawnDraft(request.draft, begin, request.acceptance_uniforms())
        for request, begin in zip(requests, _begins(requests), strict=True)
        if request.uses_q
    ]
    if not drafts:
        return _draw(logits, contexts, requests), None
    probs, peaks = probs_and_max_logits(logits, contexts)
    by_q, uniforms = accept_drawn(probs, drafts), _all_uniforms(requests)
    drawn = where_finite(invert_cdf(probs, uniforms), peaks)
    rows = [
        row
        for request, begin in zip(requests, _begins(requests), strict=True)
        if logits.is_cpu and not request.uses_q
        for row in range(begin, begin + len(request.rows))
    ]
    if rows:  # as without these drafts beside them, to the last bit
        index = torch.tensor(rows)
        row_contexts = [contexts[row] for row in rows]
        drawn[index] = draw_tokens(logits[index], row_contexts, [uniforms[row] for row in rows])
    return drawn, by_q


def _draw(
    logits: Tensor, contexts: Sequence[TokenContext], requests: Sequence[VerificationRequest]
) -> Tensor | list[int]:
    """The target's own token at each row, int64 [R], or ``_NOT_DRAWN`` where no walk can come.

    On a CPU a row's distribution costs more than a second pass: tokens are drawn at the roots
    first, then at the nodes of those drafts of which the root accepts a child.
    """
    greedy = all(request.contexts[0].params.greedy for request in requests)
    if logits.device.type != "cpu" or greedy:
        uniforms = [0.0] * len(contexts) if greedy else _all_uniforms(requests)
        return draw_tokens(logits, contexts, uniforms)
    begins = _begins(requests)
    drawn = [_NOT_DRAWN] * len(contexts)

    def draw(rows: Sequence[int], uniforms: Sequence[float]) -> None:
        index = torch.tensor(rows, dtype=torch.int64)
        drawn_tokens = draw_tokens(logits[index], [contexts[row] for row in rows], uniforms)
        for row, token in zip(rows, drawn_tokens.tolist(), strict=True):
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


def _root_accepts(draft: Draft, token: int) -> bool:
    if draft.parents is None:
        return len(draft) > 0 and draft.tokens[0] == token
    return any(draft.parent(node) < 0 and draft.tokens[node] == token for node in range(len(draft)))


class _RuleTests:
    """What lossy rules need to know of the drafts that they decide on.

    Args:
        logits: [R, V] float32, of the requests one after the other.
        requests: with a rule or without.
        download: brings it to the host, with the rest.
    """

    def __init__(
        self, logits: Tensor, requests: Sequence[VerificationRequest], download: Download
    ) -> None:
        self._requests = requests
        self._by_rule: dict[AcceptanceRule, list[int]] = {}
        self._parts: dict[AcceptanceRule, tuple[int, int]] = {}
        for number, request in enumerate(requests):
            if request.rule is not None and len(request.draft):
                self._by_rule.setdefault(request.rule, []).append(number)
        begins = _begins(requests) if self._by_rule else []
        for rule, numbers in self._by_rule.items():
            group = [requests[number] for number in numbers]
            rows = [begins[n] + row for n in numbers for row in range(len(requests[n].rows))]
            tests = rule.test_nodes(_select(logits, rows), group)
            if tests is not None:
                self._parts[rule] = download.add(tests), tests.shape[1]

    def paths(self, parts: Sequence[Sequence[float]]) -> dict[int, list[int]]:
        """The accepted nodes of the requests with a rule, by their index.

        Args:
            parts: what was read.
        """
        paths: dict[int, list[int]] = {}
        for rule, numbers in self._by_rule.items():
            at, width = self._parts.get(rule, (0, 0))
            values = iter(parts[at] if width else ())
            for number in numbers:
                request = self._requests[number]
                tests = [list(islice(values, width)) for _ in range(len(request.draft))]
                paths[number] = rule.path(request, tests)
        return paths


class _NodeScores:
    """Log-probabilities and confidences of all tokens that a walk may emit, before it is made.

    At a row that is the token drawn there; where acceptance may take another, each drafted one.

    Args:
        logits: [R, V] float32, of the requests one after the other.
        requests: of which some ask for scores.
        drawn: int64 [R], on the device.
        download: brings them to the host, with the rest.
    """

    def __init__(
        self,
        logits: Tensor,
        requests: Sequence[VerificationRequest],
        drawn: Tensor,
        download: Download,
    ) -> None:
        self._requests, self._begins = requests, _begins(requests)
        rows, drafts = list[int](), list[Draft]()
        self._of_drawn, self._of_drafted = dict[int, int](), dict[int, int]()
        """By the index of a request: which token is the one drawn at its root, the first drafted
        one."""
        asking = [n for n, request in enumerate(requests) if _asks_for_scores(request)]
        for number in asking:
            self._of_drawn[number] = len(rows)
            rows += range(self._begins[number], self._begins[number] + len(requests[number].rows))
        sources = list(rows)
        for number in asking:
            request, begin = requests[number], self._begins[number]
            if len(request.draft) and (request.uses_q or request.rule is not None):
                self._of_drafted[number] = len(rows)
                parents = [request.draft.parent(node) for node in range(len(request.draft))]
                rows += [begin + 1 + parent for parent in parents]
                drafts.append(request.draft)
        if not rows:
            return
        contexts = [context for request in requests for context in request.contexts]
        tokens = drawn[upload(sources, drawn.device)]
        if drafts:
            tokens = torch.cat([tokens, token_ids(drafts, drawn.device)])
        row_contexts = [contexts[row] for row in rows]
        self._scores = TokenScores(_select(logits, rows), row_contexts, tokens, download)
        self._tokens_at = download.add(tokens)

    def add_to(self, results: Sequence[VerificationResult], parts: Sequence[Sequence[Any]]) -> None:
        """Add the scores, as read in ``parts``, of the tokens of results, one per request."""
        if not self._of_drawn:
            return
        tokens: Sequence[int] = parts[self._tokens_at]
        logprobs, confidences = self._scores.read(parts, tokens)
        for number in self._of_drawn:
            emitted = self._emitted(number, results[number], tokens)
            results[number].logprobs = _known([logprobs[at] for at in emitted])
            results[number].confidences = _known([confidences[at] for at in emitted])

    def _emitted(self, number: int, result: VerificationResult, tokens: Sequence[int]) -> list[int]:
        """Which of the scored ``tokens`` a result consists of."""
        first, drafted = self._of_drawn[number], self._of_drafted.get(number)
        emitted = [first + 1 + node for node in (-1, *result.path)]
        if drafted is not None:
            emitted = [*(drafted + node for node in result.path), emitted[-1]]
            if result.tokens and tokens[emitted[-1]] != result.tokens[-1]:
                # No token is drawn after it, so the last accepted one is the last of the result.
                last, draft = (-1, *result.path)[-1], self._requests[number].draft
                emitted[-1] = next(
                    drafted + node
                    for node in range(len(draft))
                    if draft.parent(node) == last and draft.tokens[node] == result.tokens[-1]
                )
        return emitted[: len(result.tokens)]


def _asks_for_scores(request: VerificationRequest) -> bool:
    params = request.contexts[0].params
    return params.logprobs is not None or params.confidence is not None


def _add_scores(
    logits: Tensor,
    requests: Sequence[VerificationRequest],
    rows: Sequence[int],
    results: Sequence[VerificationResult],
) -> None:
    """Add log-probabilities and confidence of each emitted token, at the row that it follows.

    Args:
        logits: [R, V] float32, of the requests one after the other.
        requests: of which some ask for scores.
        rows: one per token of the results, one result after the other.
        results: to add to.
    """
    if not any(map(_asks_for_scores, requests)):
        return
    index = upload(rows, logits.device)
    tokens = [token for result in results for token in result.tokens]
    drawn = upload(tokens, logits.device)
    contexts = [context for request in requests for context in request.contexts]
    sampled, begin = report(logits[index], [contexts[row] for row in rows], drawn), 0
    for result in results:
        of_result = slice(begin, begin + len(result.tokens))
        begin = of_result.stop
        result.logprobs = _known(sampled.logprobs[of_result])
        result.confidences = _known(sampled.confidences[of_result])


def _known(scores: Sequence[Scores | None]) -> list[Scores] | None:
    """The scores of one result's tokens, of which all or none are known; None if there are none."""
    return [entry for entry in scores if entry is not None] or None
