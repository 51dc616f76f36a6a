"""Rules of acceptance other than the exact one: what they are, and which one a configuration names.

A rule replaces verification where it was asked for by name. What comes out no longer has the law
of plain decoding, so every result that was made with one is marked. Knows nothing about the engine.

[relaxed] Relaxed acceptance: while it thinks, a target puts up with tokens that it likes almost
as well.

TensorRT-LLM's rule for multi-token prediction with reasoning models: between the tokens that begin
and end the thinking, a drafted token stands if it is among the ``topk`` likeliest and not far less
likely than the likeliest. *How far* is said in two ways there, and both are here by name: the
kernels compare probabilities, ``p(x) >= p(top) - delta``; the documentation logarithms,
``log p(top) - log p(x) <= delta``. Elsewhere a token has to be the likeliest. *Lossy*: thoughts are
no longer the target's own. Knows nothing about how drafts were made.

[typical] Typical acceptance: a drafted token stands if the target finds it likely enough.

Cai et al., 2024 (arXiv 2401.10774), section 2.3.1: token x is accepted behind a prefix with law p
if p(x) > min(threshold, alpha * exp(-H(p))), H being the entropy: the less sure the target is, the
less likely a token may be. Of all paths of such tokens the longest is taken. It accepts more than
exact verification and is *lossy*: likely tokens are said more often than their law has it. Knows
nothing about how drafts were made.

[synthetic] Acceptance at random, for studies of speed: how fast decoding would be if drafts were
this good.

Takes the place of verification: what comes out says nothing about the target, and every result
that was made with it has to be marked. Knows nothing about logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from forethought.config.drafters import MedusaDecodingConfig, MTPDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.model.sampling import logits_to_probs
from forethought.model.sampling import uniform_at as toss
from forethought.model.sampling.distribution import edit_logits
from forethought.speculative.draft import Draft

if TYPE_CHECKING:
    from forethought.speculative.verify.verify import VerificationRequest


class AcceptanceRule(Protocol):
    """Decides which drafted tokens stand. The token behind them is drawn by the target as ever."""

    @property
    def synthetic(self) -> bool:
        """Whether its outputs mean nothing at all."""

    def applies_to(self, params: SamplingParams) -> bool:
        """Whether it is to decide for such a request; the others are verified, and not marked."""

    def paths(self, logits: Tensor, candidates: Sequence[VerificationRequest]) -> list[list[int]]:
        """The accepted nodes of each draft, from the root down.

        Args:
            logits: [R, V] float32, the model's own: the 1 + N rows of each candidate in turn.
            candidates: with drafts of any kind; their ``rows`` do not count here.
        """


def rule_of(config: DecodingBaseConfig) -> AcceptanceRule | None:
    """What the configuration names; None: exact verification."""
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

    def applies_to(self, params: SamplingParams) -> bool:
        """Greedy requests: sampled ones have a law to keep, and no single likeliest token."""
        return params.greedy

    def paths(self, logits: Tensor, candidates: Sequence[VerificationRequest]) -> list[list[int]]:
        """See ``AcceptanceRule``; of paths of one length, the first is taken."""
        contexts = [context for candidate in candidates for context in candidate.contexts]
        distributions = edit_logits(logits, contexts).softmax(dim=-1)
        parents, tokens, begin = list[int](), list[int](), 0
        for candidate in candidates:
            draft = candidate.draft
            parents += [begin + 1 + draft.parent(node) for node in range(len(draft))]
            tokens += draft.tokens
            begin += 1 + len(draft)
        rows = torch.tensor(parents, dtype=torch.int64, device=logits.device)
        chosen = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
        likeliest = (
            distributions.max(dim=-1).indices[rows] == chosen
        )  # the first of equals, as ever
        found = torch.stack(
            [likeliest, self.tolerable(distributions[rows], chosen)], dim=1
        ).tolist()
        verdicts = iter(found)
        return [
            self._longest(candidate, [next(verdicts) for _ in candidate.draft.tokens])
            for candidate in candidates
        ]

    def tolerable(self, distributions: Tensor, tokens: Tensor) -> Tensor:
        """bool [R]: whether each token would do while thinking.

        Args:
            laws: [R, V] float32, probabilities.
            tokens: int64 [R].
        """
        chance, top = (
            distributions.gather(1, tokens[:, None]),
            distributions.amax(dim=-1, keepdim=True),
        )
        near = chance >= top - self.delta
        if self.rule == "log_probability":
            near = top.log() - chance.log() <= self.delta
        return (near & ((distributions > chance).sum(dim=-1, keepdim=True) < self.topk))[:, 0]

    def _longest(
        self, candidate: VerificationRequest, found: Sequence[Sequence[bool]]
    ) -> list[int]:
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

    def applies_to(self, params: SamplingParams) -> bool:
        """Sampled requests. A greedy law is a point, of which nothing else is typical."""
        return not params.greedy

    def thresholds(self, distributions: Tensor) -> Tensor:
        """What a token's probability must exceed: laws [R, V] float32 -> [R]."""
        entropy = -(distributions * (distributions + _TINY).log()).sum(dim=-1)
        return (self.alpha * torch.exp(-entropy)).clamp(max=self.threshold)

    def paths(self, logits: Tensor, candidates: Sequence[VerificationRequest]) -> list[list[int]]:
        """See ``AcceptanceRule``; of paths of one length, the likelier is taken."""
        contexts = [context for candidate in candidates for context in candidate.contexts]
        distributions = logits_to_probs(logits, contexts)
        parents, tokens, begin = list[int](), list[int](), 0
        for candidate in candidates:
            draft = candidate.draft
            parents += [begin + 1 + draft.parent(node) for node in range(len(draft))]
            tokens += draft.tokens
            begin += 1 + len(draft)
        rows = torch.tensor(parents, dtype=torch.int64, device=logits.device)
        chosen = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
        chances = distributions[rows, chosen]
        margins = chances - self.thresholds(distributions)[rows]
        found = iter(torch.stack([margins, chances.clamp(min=_TINY).log()], dim=1).tolist())
        return [
            _longest(candidate, [next(found) for _ in candidate.draft.tokens])
            for candidate in candidates
        ]


def _longest(candidate: VerificationRequest, found: Sequence[Sequence[float]]) -> list[int]:
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


SYNTHETIC_USE = 3
"""The ``use`` of its coins; see ``model.sampling.uniform``."""


def synthetic_path(
    draft: Draft, rate: Callable[[int], float], uniform: Callable[[int], float]
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
        if uniform(len(path)) >= rate(len(path)):
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

    def applies_to(self, params: SamplingParams) -> bool:
        """All requests but those whose output must have a shape, which dice would break."""
        return params.guided_decoding is None

    def paths(self, logits: Tensor, candidates: Sequence[VerificationRequest]) -> list[list[int]]:
        """See ``AcceptanceRule``; logits are not looked at."""
        return [
            synthetic_path(candidate.draft, self._rate, self._uniform(candidate))
            for candidate in candidates
        ]

    @staticmethod
    def _uniform(candidate: VerificationRequest) -> Callable[[int], float]:
        seed, stream, first = candidate.seed, candidate.stream, candidate.position
        return lambda depth: toss(seed, stream, first + depth, SYNTHETIC_USE)
