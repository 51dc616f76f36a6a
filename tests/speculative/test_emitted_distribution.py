"""The output of speculative decoding has the distribution of plain decoding.

Exactly: every draw of the drafter and every random decision of the reference implementation is
enumerated in fractions, and the total variation from the target's distribution must be 0.
Statistically: thousands of seeded requests go through the real ``verify``; each such test names its
statistic, its sample size and its threshold. The classic mistakes are negative controls of the very
same functions.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction as F
from typing import NamedTuple

import pytest
import torch
from scipy import stats

from forethought.config.sampling import SamplingParams
from forethought.model.sampling import TokenContext, logits_to_probs, uniform_at
from forethought.reference.engine import Draft as ReferenceDraft
from forethought.reference.engine import NodeRule, Probs, RandomSource, normalised, verify_node
from forethought.reference.engine import verify as reference_verify
from forethought.speculative.drafter import Draft, DraftKind
from forethought.speculative.verify.verify import VerificationRequest, verify

POINT, IID, WITHOUT = DraftKind.POINT, DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT

# --- on paper ------------------------------------------------------------------------------------

P = [F(1, 2), F(3, 10), F(3, 20), F(1, 20)]
Q = [F(1, 10), F(2, 10), F(3, 10), F(4, 10)]
NARROW = [F(0), F(1, 3), F(0), F(2, 3)]
"""A draft distribution over the ids 1 and 3 only."""

Drafts = list[tuple[F, ReferenceDraft]]
"""Every draft that a drafter may come up with, and its probability."""


def after(node_probs: Sequence[Probs]) -> Callable[[int], Probs]:
    """The distributions by node, of which the first is the root's."""
    return lambda node: node_probs[1 + node]


class Fork(Exception):
    """The first decision without an answer: the possible ones, and their probabilities."""

    def __init__(self, answers: list[tuple[int, F]]) -> None:
        self.answers = answers


class Script(RandomSource):
    """Gives the answers that it was given."""

    def __init__(self, answers: Sequence[int]) -> None:
        self._answers = iter(answers)

    def accepts(self, probability: F, depth: int, sibling: int) -> bool:
        return bool(self._next([(1, probability), (0, 1 - probability)]))

    def draws(self, distribution: Probs, depth: int) -> int:
        return self._next(list(enumerate(distribution)))

    def _next(self, answers: list[tuple[int, F]]) -> int:
        answer = next(self._answers, None)
        if answer is None:
            raise Fork(answers)
        return answer


def outcomes(run: Callable[[RandomSource], list[int]]) -> Counter[tuple[int, ...]]:
    """The distribution of what ``run`` returns, by enumerating every random decision."""
    distribution: Counter[tuple[int, ...]] = Counter()
    branches: list[tuple[tuple[int, ...], F]] = [((), F(1))]
    while branches:
        script, probability = branches.pop()
        try:
            distribution[tuple(run(Script(script)))] += probability
        except Fork as fork:
            branches += [((*script, a), probability * p) for a, p in fork.answers if p > 0]
    return distribution


def emitted(drafts: Drafts, distribution: Probs, rule: NodeRule = verify_node) -> list[F]:
    """The distribution of the first token; the target has ``distribution`` at every node."""
    total = [F(0)] * len(distribution)
    for probability, draft in drafts:
        node_probs = [distribution] * (1 + len(draft.tokens))
        run = functools.partial(reference_verify, after(node_probs), draft, rule=rule)
        for tokens, chance in outcomes(lambda c, run=run: run(c)[1][:1]).items():
            total[tokens[0]] += probability * chance
    assert sum(total) == 1
    return total


def variation(one: Sequence[F], other: Sequence[F]) -> F:
    """Total variation between two distributions."""
    return sum((abs(a - b) for a, b in zip(one, other, strict=True)), F(0)) / 2


def siblings(q: Probs, count: int, drawn: DraftKind, declared: DraftKind | None = None) -> Drafts:
    """``count`` children of the root, drawn in one way and declared to be drawn in another."""
    drafts: Drafts = []
    for tokens in itertools.product(range(len(q)), repeat=count):
        probability, left = F(1), list(q)
        for token in tokens:
            probability *= left[token]
            if drawn is WITHOUT:
                left[token] = F(0)
                left = normalised(left)
        if probability:
            kind = declared or drawn
            drafts.append((probability, ReferenceDraft(tokens, (-1,) * count, kind, (q,) * count)))
    return drafts


def points(*tokens: int, kind: DraftKind = POINT, q: Probs = Q) -> Drafts:
    """Always these children of the root."""
    return [(F(1), ReferenceDraft(tokens, (-1,) * len(tokens), kind, (q,) * len(tokens)))]


EXACT = {
    "nothing drafted": points(),
    "chain, true q": siblings(Q, 1, IID),
    "two independent siblings": siblings(Q, 2, IID),
    "three independent siblings": siblings(Q, 3, IID),
    "two without replacement": siblings(Q, 2, WITHOUT),
    "four without replacement": siblings(Q, 4, WITHOUT),
    "the two most_probable as points": points(3, 2),
    "one point twice": points(3, 3),
    "a point of no probability in q": points(0, kind=IID, q=NARROW),
    "reduced vocabulary, independent": siblings(NARROW, 2, IID),
    "reduced vocabulary, without replacement": siblings(NARROW, 2, WITHOUT),
    "three independent ones declared to be without replacement": siblings(Q, 3, IID, WITHOUT),
    "q equal to p": siblings(P, 2, IID),
    "q equal to p, without replacement": siblings(P, 2, WITHOUT),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(
    "distribution", [P, [F(1, 4)] * 4, [F(0), F(2, 3), F(1, 3), F(0)], [F(0), F(0), F(1), F(0)]]
)
def test_what_comes_out_has_the_targets_distribution_exactly(name: str, distribution: Probs):
    assert variation(emitted(EXACT[name], distribution), distribution) == 0


def unnormalised(
    distribution: Probs,
    children: list[tuple[int, Probs]],
    kind: DraftKind,
    source: RandomSource,
    depth: int,
) -> tuple[int | None, int]:
    """The mistake: what was drawn is taken out of q, and q is not renormalised."""
    removed: list[int] = []
    for number, (token, q) in enumerate(children):
        q = [F(0) if other in removed else weight for other, weight in enumerate(q)]
        removed.append(token)
        if source.accepts(min(F(1), distribution[token] / q[token]), depth, number):
            return number, token
        distribution = normalised(
            [max(p - weight, F(0)) for p, weight in zip(distribution, q, strict=True)]
        )
    return None, source.draws(distribution, depth)


def per_path(
    distribution: Probs,
    children: list[tuple[int, Probs]],
    kind: DraftKind,
    source: RandomSource,
    depth: int,
) -> tuple[int | None, int]:
    """The mistake: each path draws a token of its own, and the best path wins."""
    own = [source.draws(distribution, depth) for _ in range(max(1, len(children)))]
    for number, (token, _) in enumerate(children):
        if own[number] == token:
            return number, token
    return None, own[0]


WRONG = {
    "the most probable of q tested with q": (
        points(3, kind=IID),
        verify_node,
        [F(7, 10), F(7, 40), F(0), F(1, 8)],
        F(275, 1000),
    ),
    "the two most probable of q tested with q": (
        points(3, 2, kind=IID),
        verify_node,
        [F(7, 8), F(0), F(0), F(1, 8)],
        F(45, 100),
    ),
    "without replacement, not renormalised": (
        siblings(Q, 2, WITHOUT),
        unnormalised,
        [F(37, 84), F(151, 420), F(3, 20), F(1, 20)],
        F(25, 420),
    ),
    "a token of its own for each path": (
        points(0, 1),
        per_path,
        [F(1, 2), F(9, 25), F(21, 200), F(7, 200)],
        F(6, 100),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_classic_mistakes_are_caught_with_their_known_distributions(name: str):
    drafts, rule, distribution, distance = WRONG[name]
    assert emitted(drafts, P, rule) == distribution
    assert variation(distribution, P) == distance


def test_the_likelihood_of_acceptance_is_one_minus_the_distance_of_the_distributions():
    accepted = sum(
        probability * chance
        for probability, draft in siblings(Q, 1, IID)
        for path, chance in outcomes(
            lambda c, draft=draft: reference_verify(after([P, P]), draft, c)[0]
        ).items()
        if path
    )
    assert accepted == 1 - variation(P, Q) == F(1, 2)


START = [F(3, 6), F(2, 6), F(1, 6)]
TARGET = [[F(1, 6), F(2, 6), F(3, 6)], [F(1, 2), F(1, 2), F(0)], [F(1, 4), F(1, 4), F(1, 2)]]
"""Probs of the first token, then of the next one after each token: no two positions alike."""
DRAFT_PROBS = [[F(1, 3)] * 3, [F(1, 8), F(1, 8), F(6, 8)], [F(0), F(1, 2), F(1, 2)]]
SHAPES = {
    "chain of three": (-1, 0, 1),
    "two chains of two": (-1, -1, 0, 1),
    "bush": (-1, -1, 0, 0, 1),
}


def grown(parents: Sequence[int], kind: DraftKind) -> Iterator[tuple[F, ReferenceDraft]]:
    """All drafts of this shape, children drawn from the drafter's distribution at their parent."""
    size = len(parents)
    for tokens in itertools.product(range(3), repeat=size):
        probability = F(1)
        distributions = [START if p < 0 else DRAFT_PROBS[tokens[p]] for p in parents]
        distributions = [
            [*distribution[1:], distribution[0]] for distribution in distributions
        ]  # not the target's at the root either
        for node in range(size):
            left = list(distributions[node])
            for earlier in range(node):
                if kind is WITHOUT and parents[earlier] == parents[node]:
                    left[tokens[earlier]] = F(0)
            probability *= normalised(left)[tokens[node]]
        if probability:
            yield probability, ReferenceDraft(tokens, tuple(parents), kind, distributions)


@pytest.mark.parametrize("kind", [IID, WITHOUT])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_joint_distribution_of_three_tokens_is_exact(shape: str, kind: DraftKind):
    """What the draft does not reach is drawn plainly, as the next step would."""
    joint: Counter[tuple[int, ...]] = Counter()
    for probability, draft in grown(SHAPES[shape], kind):
        distributions = [START, *(TARGET[token] for token in draft.tokens)]
        found = outcomes(
            lambda c, d=draft, p=distributions: reference_verify(after(p), d, c)[1][:3]
        )
        for tokens, chance in found.items():
            joint[tokens] += probability * chance
    while short := [tokens for tokens in joint if len(tokens) < 3]:
        for tokens in short:
            mass = joint.pop(tokens)
            for token, p in enumerate(TARGET[tokens[-1]]):
                joint[(*tokens, token)] += mass * p
    expected = {
        (a, b, c): START[a] * TARGET[a][b] * TARGET[b][c]
        for a, b, c in itertools.product(range(3), repeat=3)
    }
    assert {tokens: mass for tokens, mass in joint.items() if mass} == {
        tokens: mass for tokens, mass in expected.items() if mass
    }


# --- with real uniform samples --------------------------------------------------------------------

SAMPLES = 2000
"""Requests per test; a joint distribution of three tokens of four ids has 64 cells."""
P_VALUE = 1e-4
"""Chi-square over the cells that expect five or more, the others in one. Above it the outputs
have the right distribution. A negative control has to fall below it."""
V = 4
LOGITS = torch.tensor([[float(p) for p in P[t:] + P[:t]] for t in range(V + 1)]).log()
"""Of the token that follows each token; the last row starts."""
DRAFTED = torch.tensor([[float(q) for q in Q[t:] + Q[:t]] for t in range(V + 1)])


class SimulatedDrafter(NamedTuple):
    """Draws drafts of one shape."""

    parents: Sequence[int]
    drawn: DraftKind
    """How siblings are drawn."""
    declared: DraftKind
    """What the draft says about it."""
    ids: tuple[int, ...] | None = None
    """The columns of q that the drafter knows."""
    use: int = 1
    """Of the uniform samples that it draws with."""

    def draft(self, stream: int, output: Sequence[int]) -> Draft:
        tokens: list[int] = []
        sources: list[int] = []
        depths: list[int] = []
        ids = self.ids or tuple(range(V))
        for node, parent in enumerate(self.parents):
            depths.append(0 if parent < 0 else depths[parent] + 1)
            before = tokens[parent] if parent >= 0 else (output[-1] if output else V)
            sources.append(before)
            left = DRAFTED[before].tolist()
            earlier = [tokens[n] for n in range(node) if self.parents[n] == parent]
            left = [0.0 if self.drawn is WITHOUT and t in earlier else left[t] for t in ids]
            if self.drawn is POINT:
                ranked = sorted(ids, key=lambda t, distribution=left: -distribution[ids.index(t)])
                tokens.append(ranked[len(earlier)])
                continue
            use = self.use + (node << 8) if self.use else 0
            uniform = uniform_at(9, stream, len(output) + depths[node], use) * sum(left)
            mass = itertools.accumulate(left)
            tokens.append(next(t for t, m in zip(ids, mass, strict=True) if m > uniform))
        if self.declared is POINT:
            return Draft(tokens, tuple(self.parents))
        columns = None if self.ids is None else torch.tensor(self.ids)
        q = DRAFTED[sources] if columns is None else DRAFTED[sources][:, columns]
        return Draft(tokens, tuple(self.parents), self.declared, q, columns)


def generate(
    drafter: SimulatedDrafter, params: SamplingParams, length: int = 3
) -> Counter[tuple[int, ...]]:
    """The first tokens of ``SAMPLES`` requests, all decoded together."""
    outputs: list[list[int]] = [[] for _ in range(SAMPLES)]
    while active := [stream for stream in range(SAMPLES) if len(outputs[stream]) < length]:
        requests = []
        for stream in active:
            output = outputs[stream]
            draft = drafter.draft(stream, output)
            prefixes = [output]
            for node, token in enumerate(draft.tokens):
                prefixes.append([*prefixes[1 + draft.parent(node)], token])
            rows = [prefix[-1] if prefix else V for prefix in prefixes]
            contexts = [TokenContext(params, (), prefix, frozenset()) for prefix in prefixes]
            requests.append(VerificationRequest(draft, rows, contexts, 9, stream, len(output)))
        for stream, result in zip(active, verify(LOGITS, requests), strict=True):
            outputs[stream] += result.tokens
    return Counter(tuple(output[:length]) for output in outputs)


def joint_distribution(params: SamplingParams, length: int = 3) -> dict[tuple[int, ...], float]:
    """What plain decoding gives: the product of the distributions along each sequence."""
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        contexts = [TokenContext(params, (), prefix, frozenset()) for prefix in distribution]
        rows = [prefix[-1] if prefix else V for prefix in distribution]
        probs = logits_to_probs(LOGITS[rows], contexts).double().tolist()
        distribution = {
            (*prefix, token): mass * p
            for (prefix, mass), row in zip(distribution.items(), probs, strict=True)
            for token, p in enumerate(row)
        }
    return distribution


def fit(found: Counter[tuple[int, ...]], distribution: dict[tuple[int, ...], float]) -> float:
    """The p-value of chi-square."""
    assert all(distribution[cell] > 0 for cell in found)
    total = found.total()
    large = [cell for cell, p in distribution.items() if p * total >= 5]
    observed = [found[cell] for cell in large]
    expected = [distribution[cell] * total for cell in large]
    if total - sum(expected) > 1e-6 * total:
        observed.append(total - sum(observed))
        expected.append(total - sum(expected))
    scale = total / sum(expected)
    return float(stats.chisquare(observed, [e * scale for e in expected]).pvalue)


PLAIN = SamplingParams()
PICKY = SamplingParams(temperature=0.8, top_p=0.9, frequency_penalty=1.5, repetition_penalty=1.2)
EXCLUDING = SamplingParams(temperature=1.5, xtc_probability=0.5, xtc_threshold=0.2, top_n_sigma=2.5)
REPEATING = SamplingParams(dry_multiplier=1.5, dry_allowed_length=1, dry_sequence_breakers=())
BUSHY = (-1, -1, 0, 0, 1)
DRAFTERS = {
    "chain": (SimulatedDrafter((-1, 0, 1), IID, IID), PLAIN),
    "independent siblings": (SimulatedDrafter(BUSHY, IID, IID), PLAIN),
    "without replacement": (SimulatedDrafter(BUSHY, WITHOUT, WITHOUT), PLAIN),
    "points": (SimulatedDrafter(BUSHY, POINT, POINT), PLAIN),
    "reduced vocabulary": (SimulatedDrafter(BUSHY, WITHOUT, WITHOUT, ids=(3, 0, 1)), PLAIN),
    "penalties and cuts": (SimulatedDrafter(BUSHY, WITHOUT, WITHOUT), PICKY),
    "XTC": (SimulatedDrafter(BUSHY, WITHOUT, WITHOUT), EXCLUDING),
    "XTC, points": (SimulatedDrafter(BUSHY, POINT, POINT), EXCLUDING),
    "DRY": (SimulatedDrafter(BUSHY, WITHOUT, WITHOUT), REPEATING),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_three_tokens_of_many_requests_have_the_distribution_of_plain_decoding(name: str):
    drafter, params = DRAFTERS[name]
    assert fit(generate(drafter, params), joint_distribution(params)) > P_VALUE


def test_the_fit_tells_xtc_with_another_probability_apart():
    other = EXCLUDING.replace(xtc_probability=0.4)
    drafter = SimulatedDrafter(BUSHY, WITHOUT, WITHOUT)
    assert fit(generate(drafter, other), joint_distribution(EXCLUDING)) < P_VALUE


MISTAKEN = {
    "the most probable of q tested with q": SimulatedDrafter((-1, 0), POINT, IID),
    "the two most probable of q tested with q": SimulatedDrafter(BUSHY, POINT, IID),
    "without replacement declared to be independent": SimulatedDrafter((-1, -1), WITHOUT, IID),
    "drafted with the uniform samples that the target draws with": SimulatedDrafter(
        (-1,), IID, IID, use=0
    ),
    "drafted with the uniform samples that accept": SimulatedDrafter((-1,), IID, IID, use=2),
}


@pytest.mark.parametrize("name", MISTAKEN)
def test_a_drafter_that_declares_a_wrong_kind_is_caught(name: str):
    assert fit(generate(MISTAKEN[name], PLAIN), joint_distribution(PLAIN)) < P_VALUE
