"""Lossy acceptance rules, and which one a configuration asks for.

A rule replaces exact verification only where a configuration names it; results made with one are
marked ``lossy`` or ``synthetic``. Let p be the target's distribution after a prefix.

* Typical acceptance (Cai et al., 2024, arXiv 2401.10774, section 2.3.1): token x is accepted if
  p(x) > min(threshold, alpha * exp(-H(p))), where H is the entropy: the less certain the target,
  the lower the bound. The longest path of accepted tokens is taken. Probable tokens are emitted
  more often than p has them.
* Relaxed acceptance for reasoning models (TensorRT-LLM, for multi-token prediction): between the
  tokens that begin and end the thinking phase, x is accepted if it is among the ``topk`` most
  probable tokens and at most ``delta`` below the most probable one. TensorRT-LLM's kernels compare
  probabilities, ``p(x) >= p(top) - delta``; its documentation compares logarithms, ``log p(top) -
  log p(x) <= delta``. Both are available by name. Elsewhere acceptance is greedy.
* Synthetic acceptance: levels are accepted at random with a given probability, for studies of
  speed. The output says nothing about the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from forethought.config.drafters import MTPDecodingConfig
from forethought.config.medusa import MedusaDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.kv.staging import upload
from forethought.model.sampling import logits_to_probs, uniform_at
from forethought.model.sampling.distribution import edit_logits
from forethought.speculative.drafter import Draft
from forethought.speculative.verify.rejection import token_ids
from forethought.speculative.verify.verify import AcceptanceRule, NodeTests, VerificationRequest


def rule_of(config: DecodingBaseConfig) -> AcceptanceRule | None:
    """The rule that the configuration asks for; None: exact verification."""
    if config.synthetic_acceptance is not None:
        return SyntheticAcceptance.of_rate(config.synthetic_acceptance)
    if config.synthetic_acceptance_length is not None:
        return SyntheticAcceptance.of_length(config.synthetic_acceptance_length)
    if isinstance(config, MedusaDecodingConfig) and config.posterior_threshold is not None:
        assert config.posterior_alpha is not None
        return TypicalAcceptance(config.posterior_threshold, config.posterior_alpha)
    if isinstance(config, MTPDecodingConfig) and config.use_relaxed_acceptance_for_thinking:
        assert config.relaxed_rule is not None
        return RelaxedAcceptance(
            config.relaxed_topk,
            config.relaxed_delta,
            config.relaxed_rule,
            config.begin_thinking_phase_token,
            config.end_thinking_phase_token,
        )
    return None


RelaxedRule = Literal["probability", "log_probability"]
"""What ``delta`` is a difference of."""


def _drafted_nodes(
    requests: Sequence[VerificationRequest], device: torch.device
) -> tuple[Tensor, Tensor]:
    """The parents' rows and the ids of all drafted tokens: int64 [nodes] each."""
    rows, begin = list[int](), 0
    for request in requests:
        draft = request.draft
        rows += [begin + 1 + draft.parent(node) for node in range(len(draft))]
        begin += 1 + len(draft)
    return upload(rows, device), token_ids([request.draft for request in requests], device)


class RelaxedAcceptance(AcceptanceRule):
    """Relaxed acceptance while a reasoning model thinks; an ``AcceptanceRule``.

    Args:
        topk: the token is among this many most probable ones, at temperature 1.
        delta: how far below the most probable token it may be.
        rule: what ``delta`` is a difference of.
        begin, end: the tokens that begin and end the thinking phase.
    """

    synthetic = False

    def __init__(self, topk: int, delta: float, rule: RelaxedRule, begin: int, end: int) -> None:
        self.topk, self.delta, self.rule = topk, delta, rule
        self._begin, self._end = begin, end

    def applies_to(self, params: SamplingParams) -> bool:
        """Greedy requests; sampled ones have no single most probable token to compare with."""
        return params.greedy

    @override
    def test_nodes(self, logits: Tensor, requests: Sequence[VerificationRequest]) -> Tensor:
        """Whether a node is the most probable token, and tolerable."""
        contexts = [context for request in requests for context in request.contexts]
        probs = edit_logits(logits, contexts).softmax(dim=-1)
        rows, tokens = _drafted_nodes(requests, logits.device)
        is_top = probs.max(dim=-1).indices[rows] == tokens  # of equal ones, the first
        return torch.stack([is_top, self.is_tolerable(probs[rows], tokens)], dim=1)

    @override
    def path(self, request: VerificationRequest, tests: NodeTests) -> list[int]:
        """The longest path of accepted nodes, of equal ones the first."""
        draft = request.draft
        paths: dict[int, list[int]] = {-1: []}
        thinking = {-1: self._is_thinking(request.past)}
        for node, (is_top, is_tolerable) in enumerate(tests):
            parent, token = draft.parent(node), draft.tokens[node]
            if parent in paths and (is_top or (is_tolerable and thinking[parent])):
                paths[node] = [*paths[parent], node]
                phase = {self._begin: True, self._end: False}
                thinking[node] = phase.get(token, thinking[parent])
        return max(paths.values(), key=len)

    def is_tolerable(self, probs: Tensor, tokens: Tensor) -> Tensor:
        """bool [R]: whether each token is accepted within the thinking phase.

        Args:
            probs: [R, V] float32.
            tokens: int64 [R].
        """
        token_probs, top = probs.gather(1, tokens[:, None]), probs.amax(dim=-1, keepdim=True)
        near = token_probs >= top - self.delta
        if self.rule == "log_probability":
            near = top.log() - token_probs.log() <= self.delta
        rank = (probs > token_probs).sum(dim=-1, keepdim=True)
        return (near & (token_probs > 0) & (rank < self.topk))[:, 0]  # 0: a constraint forbids it

    def _is_thinking(self, past: Sequence[int]) -> bool:
        """Whether the last of the two phase tokens in ``past`` is the one that begins the phase."""
        backwards = past[::-1]
        if self._begin not in backwards:
            return False
        distance = backwards.index(self._begin)
        return self._end not in backwards[:distance]


_EPSILON = 1e-5
"""Added to a probability before its logarithm is taken, as in the authors' code."""


class TypicalAcceptance(AcceptanceRule):
    """Typical acceptance; an ``AcceptanceRule``.

    Args:
        threshold: greatest bound on the probability; the authors' default is 0.09.
        alpha: what exp(-entropy) is multiplied by; they recommend the threshold's square root.
    """

    synthetic = False

    def __init__(self, threshold: float, alpha: float) -> None:
        self.threshold, self.alpha = threshold, alpha

    def applies_to(self, params: SamplingParams) -> bool:
        """Sampled requests; a greedy distribution is a point mass, with nothing to relax."""
        return not params.greedy

    def thresholds(self, probs: Tensor) -> Tensor:
        """What a token's probability must exceed: probs [R, V] float32 -> [R]."""
        entropy = -(probs * (probs + _EPSILON).log()).sum(dim=-1)
        return (self.alpha * torch.exp(-entropy)).clamp(max=self.threshold)

    @override
    def test_nodes(self, logits: Tensor, requests: Sequence[VerificationRequest]) -> Tensor:
        """By how much p(x) exceeds the threshold, and its logarithm."""
        contexts = [context for request in requests for context in request.contexts]
        probs = logits_to_probs(logits, contexts)
        rows, tokens = _drafted_nodes(requests, logits.device)
        token_probs = probs[rows, tokens]
        margins = token_probs - self.thresholds(probs)[rows]
        return torch.stack([margins, token_probs.clamp(min=_EPSILON).log()], dim=1)

    @override
    def path(self, request: VerificationRequest, tests: NodeTests) -> list[int]:
        """Of paths of equal length, the more probable one is taken."""
        return _most_probable_longest_path(request.draft, tests)


def _most_probable_longest_path(draft: Draft, nodes: NodeTests) -> list[int]:
    """The longest path of accepted nodes; of equal ones the most probable, then the first.

    nodes: for each, by how much its probability exceeds the threshold, and the logarithm of its
    probability.
    """
    best: tuple[int, float] = (0, 0.0)
    end = -1
    scores: dict[int, tuple[int, float]] = {-1: best}
    for node, (margin, logprob) in enumerate(nodes):
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


_USE_SYNTHETIC = 3
"""``use`` of the uniform samples of synthetic acceptance; see ``uniform_at``."""


def synthetic_path(
    draft: Draft, rate: Callable[[int], float], uniform: Callable[[int], float]
) -> list[int]:
    """Accept nodes at random: down the first branch, each level with its probability.

    The first level that fails ends the path, so with one rate r a chain of K has
    sum(r**k for k in 1..K) expected accepted tokens.

    Args:
        draft: any; one without tokens has an empty path.
        rate: depth, from 0 for the children of the root -> probability of acceptance, 0 to 1.
        uniform: depth -> a uniform sample in [0, 1), a pure function of request and position.

    Returns:
        Nodes from the root down.
    """
    path: list[int] = []
    last = -1
    for node in range(len(draft)):  # parents come before their children
        if draft.parent(node) != last:
            continue
        if uniform(len(path)) >= rate(len(path)):
            break
        path.append(node)
        last = node
    return path


class SyntheticAcceptance(AcceptanceRule):
    """Acceptance at random; an ``AcceptanceRule``.

    Args:
        rate: depth -> probability that a level is accepted if those above it are, 0 to 1.
    """

    synthetic = True

    def __init__(self, rate: Callable[[int], float]) -> None:
        self._rate = rate

    @classmethod
    def of_rate(cls, rate: float) -> SyntheticAcceptance:
        """Each level with the same probability, 0 to 1."""
        return cls(lambda depth: rate)

    @classmethod
    def of_length(cls, length: float) -> SyntheticAcceptance:
        """``length`` tokens per step on average, the target's own included, at least 1.

        The first levels are always accepted and the next one with what is left, which keeps the
        variance low.
        """
        return cls(lambda depth: min(1.0, max(0.0, length - 1 - depth)))

    def applies_to(self, params: SamplingParams) -> bool:
        """All requests but those with a grammar or a thinking budget: random tokens break both."""
        return not params.constrains

    @override
    def test_nodes(self, logits: Tensor, requests: Sequence[VerificationRequest]) -> None:
        """Independent of the logits."""

    @override
    def path(self, request: VerificationRequest, tests: NodeTests) -> list[int]:
        return synthetic_path(request.draft, self._rate, self._uniform(request))

    @staticmethod
    def _uniform(request: VerificationRequest) -> Callable[[int], float]:
        seed, stream, first = request.seed, request.stream, request.position
        return lambda depth: uniform_at(seed, stream, first + depth, _USE_SYNTHETIC)
