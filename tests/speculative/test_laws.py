"""Speculative output has the law of plain decoding: exactly on paper, measurably with real coins.

On paper, every draw of the drafter and every answer of chance is enumerated in fractions through
the slow twin, and total variation from the target's law must be 0. With real coins, thousands of
seeded requests go through the real ``verify``; each such test names its statistic, its size and its
threshold. The classic mistakes are negative controls of the very same functions.
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
from forethought.speculative.draft import Draft, DraftKind
from forethought.speculative.verify.reference import (
    Chance,
    Distribution,
    PlainDraft,
    Rule,
    normalised,
    reference_verify,
    settle_node,
)
from forethought.speculative.verify.verify import VerificationRequest, verify

POINT, IID, WITHOUT = DraftKind.POINT, DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT

# --- on paper ------------------------------------------------------------------------------------

P = [F(1, 2), F(3, 10), F(3, 20), F(1, 20)]
Q = [F(1, 10), F(2, 10), F(3, 10), F(4, 10)]
NARROW = [F(0), F(1, 3), F(0), F(2, 3)]
"""A draft law over the ids 1 and 3 only."""

Drafts = list[tuple[F, PlainDraft]]
"""Every draft that a drafter may come up with, and its probability."""


class Fork(Exception):
    """Chance is asked for the first time: these are the answers, and their probabilities."""

    def __init__(self, answers: list[tuple[int, F]]) -> None:
        self.answers = answers


class Script(Chance):
    """Gives the answers that it was given."""

    def __init__(self, answers: Sequence[int]) -> None:
        self._answers = iter(answers)

    def accepts(self, probability: F, depth: int, sibling: int) -> bool:
        return bool(self._next([(1, probability), (0, 1 - probability)]))

    def draws(self, distribution: Distribution, depth: int) -> int:
        return self._next(list(enumerate(distribution)))

    def _next(self, answers: list[tuple[int, F]]) -> int:
        answer = next(self._answers, None)
        if answer is None:
            raise Fork(answers)
        return answer


def outcomes(run: Callable[[Chance], list[int]]) -> Counter[tuple[int, ...]]:
    """The law of what ``run`` returns, by trying every answer of chance."""
    distribution: Counter[tuple[int, ...]] = Counter()
    branches: list[tuple[tuple[int, ...], F]] = [((), F(1))]
    while branches:
        script, probability = branches.pop()
        try:
            distribution[tuple(run(Script(script)))] += probability
        except Fork as fork:
            branches += [((*script, a), probability * p) for a, p in fork.answers if p > 0]
    return distribution


def emitted(drafts: Drafts, distribution: Distribution, rule: Rule = settle_node) -> list[F]:
    """The distribution of the first token; the target has ``distribution`` at every node."""
    total = [F(0)] * len(distribution)
    for probability, draft in drafts:
        distributions = [distribution] * (1 + len(draft.tokens))
        run = functools.partial(reference_verify, distributions, draft, rule=rule)
        for tokens, chance in outcomes(lambda c, run=run: run(c)[1][:1]).items():
            total[tokens[0]] += probability * chance
    assert sum(total) == 1
    return total


def variation(one: Sequence[F], other: Sequence[F]) -> F:
    """Total variation between two laws."""
    return sum((abs(a - b) for a, b in zip(one, other, strict=True)), F(0)) / 2


def siblings(
    q: Distribution, count: int, drawn: DraftKind, told: DraftKind | None = None
) -> Drafts:
    """``count`` children of the root, drawn in one way and told to be drawn in another."""
    drafts: Drafts = []
    for tokens in itertools.product(range(len(q)), repeat=count):
        probability, left = F(1), list(q)
        for token in tokens:
            probability *= left[token]
            if drawn is WITHOUT:
                left[token] = F(0)
                left = normalised(left)
        if probability:
            kind = told or drawn
            drafts.append((probability, PlainDraft(tokens, (-1,) * count, kind, (q,) * count)))
    return drafts


def points(*tokens: int, kind: DraftKind = POINT, q: Distribution = Q) -> Drafts:
    """Always these children of the root."""
    return [(F(1), PlainDraft(tokens, (-1,) * len(tokens), kind, (q,) * len(tokens)))]


EXACT = {
    "nothing drafted": points(),
    "chain, true q": siblings(Q, 1, IID),
    "two independent siblings": siblings(Q, 2, IID),
    "three independent siblings": siblings(Q, 3, IID),
    "two without replacement": siblings(Q, 2, WITHOUT),
    "four without replacement": siblings(Q, 4, WITHOUT),
    "the two likeliest as points": points(3, 2),
    "one point twice": points(3, 3),
    "a point of no probability in q": points(0, kind=IID, q=NARROW),
    "reduced vocabulary, independent": siblings(NARROW, 2, IID),
    "reduced vocabulary, without replacement": siblings(NARROW, 2, WITHOUT),
    "three independent ones told to be without replacement": siblings(Q, 3, IID, WITHOUT),
    "q equal to p": siblings(P, 2, IID),
    "q equal to p, without replacement": siblings(P, 2, WITHOUT),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(
    "distribution", [P, [F(1, 4)] * 4, [F(0), F(2, 3), F(1, 3), F(0)], [F(0), F(0), F(1), F(0)]]
)
def test_what_comes_out_has_the_targets_law_exactly(name: str, distribution: Distribution):
    assert variation(emitted(EXACT[name], distribution), distribution) == 0


def unnormalised(
    distribution: Distribution,
    children: list[tuple[int, Distribution]],
    kind: DraftKind,
    chance: Chance,
    depth: int,
) -> tuple[int | None, int]:
    """The mistake: what was drawn is taken out of q, and q is not renormalised."""
    gone: list[int] = []
    for place, (token, q) in enumerate(children):
        q = [F(0) if other in gone else weight for other, weight in enumerate(q)]
        gone.append(token)
        if chance.accepts(min(F(1), distribution[token] / q[token]), depth, place):
            return place, token
        distribution = normalised(
            [max(p - weight, F(0)) for p, weight in zip(distribution, q, strict=True)]
        )
    return None, chance.draws(distribution, depth)


def per_path(
    distribution: Distribution,
    children: list[tuple[int, Distribution]],
    kind: DraftKind,
    chance: Chance,
    depth: int,
) -> tuple[int | None, int]:
    """The mistake: each path draws a token of its own, and the best path wins."""
    own = [chance.draws(distribution, depth) for _ in range(max(1, len(children)))]
    for place, (token, _) in enumerate(children):
        if own[place] == token:
            return place, token
    return None, own[0]


WRONG = {
    "the likeliest of q tested with q": (
        points(3, kind=IID),
        settle_node,
        [F(7, 10), F(7, 40), F(0), F(1, 8)],
        F(275, 1000),
    ),
    "the two likeliest of q tested with q": (
        points(3, 2, kind=IID),
        settle_node,
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
def test_the_classic_mistakes_are_caught_with_their_known_laws(name: str):
    drafts, rule, distribution, distance = WRONG[name]
    assert emitted(drafts, P, rule) == distribution
    assert variation(distribution, P) == distance


def test_the_likelihood_of_acceptance_is_one_minus_the_distance_of_the_laws():
    accepted = sum(
        probability * chance
        for probability, draft in siblings(Q, 1, IID)
        for path, chance in outcomes(
            lambda c, draft=draft: reference_verify([P, P], draft, c)[0]
        ).items()
        if path
    )
    assert accepted == 1 - variation(P, Q) == F(1, 2)


START = [F(3, 6), F(2, 6), F(1, 6)]
TARGET = [[F(1, 6), F(2, 6), F(3, 6)], [F(1, 2), F(1, 2), F(0)], [F(1, 4), F(1, 4), F(1, 2)]]
"""The law of the first token, then of the next one after each token: no two positions alike."""
GUESS = [[F(1, 3)] * 3, [F(1, 8), F(1, 8), F(6, 8)], [F(0), F(1, 2), F(1, 2)]]
SHAPES = {
    "chain of three": (-1, 0, 1),
    "two chains of two": (-1, -1, 0, 1),
    "bush": (-1, -1, 0, 0, 1),
}


def grown(parents: Sequence[int], kind: DraftKind) -> Iterator[tuple[F, PlainDraft]]:
    """All drafts of this shape, children drawn from the guess at their parent."""
    size = len(parents)
    for tokens in itertools.product(range(3), repeat=size):
        probability = F(1)
        distributions = [START if p < 0 else GUESS[tokens[p]] for p in parents]
        distributions = [
            [*distribution[1:], distribution[0]] for distribution in distributions
        ]  # not the target's at the root either
        for node in range(size):
            left = list(distributions[node])
            for elder in range(node):
                if kind is WITHOUT and parents[elder] == parents[node]:
                    left[tokens[elder]] = F(0)
            probability *= normalised(left)[tokens[node]]
        if probability:
            yield probability, PlainDraft(tokens, tuple(parents), kind, distributions)


@pytest.mark.parametrize("kind", [IID, WITHOUT])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_joint_law_of_three_tokens_is_exact(shape: str, kind: DraftKind):
    """What the draft does not reach is drawn plainly, as the next step would."""
    joint: Counter[tuple[int, ...]] = Counter()
    for probability, draft in grown(SHAPES[shape], kind):
        distributions = [START, *(TARGET[token] for token in draft.tokens)]
        found = outcomes(lambda c, d=draft, p=distributions: reference_verify(p, d, c)[1][:3])
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


# --- with real coins -----------------------------------------------------------------------------

SAMPLES = 2000
"""Requests per test; a joint law of three tokens of four ids has 64 cells."""
P_VALUE = 1e-4
"""Chi-square over the cells that expect five or more, the others in one: above this p-value a law
counts as right. A negative control has to fall below it."""
V = 4
LOGITS = torch.tensor([[float(p) for p in P[t:] + P[:t]] for t in range(V + 1)]).log()
"""Of the token that follows each token; the last row starts."""
DRAFTED = torch.tensor([[float(q) for q in Q[t:] + Q[:t]] for t in range(V + 1)])


class Guesser(NamedTuple):
    """Draws drafts of one shape."""

    parents: Sequence[int]
    drawn: DraftKind
    """How siblings are drawn."""
    told: DraftKind
    """What is said about it."""
    ids: tuple[int, ...] | None = None
    """The columns of q that the drafter knows."""
    use: int = 1
    """Of the coins that it draws with."""

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
            earlier_siblings = [tokens[n] for n in range(node) if self.parents[n] == parent]
            left = [
                0.0 if self.drawn is WITHOUT and t in earlier_siblings else left[t] for t in ids
            ]
            if self.drawn is POINT:
                ranked = sorted(ids, key=lambda t, distribution=left: -distribution[ids.index(t)])
                tokens.append(ranked[len(earlier_siblings)])
                continue
            use = self.use + (node << 8) if self.use else 0
            toss = uniform_at(9, stream, len(output) + depths[node], use) * sum(left)
            mass = itertools.accumulate(left)
            tokens.append(next(t for t, m in zip(ids, mass, strict=True) if m > toss))
        if self.told is POINT:
            return Draft(tokens, tuple(self.parents))
        columns = None if self.ids is None else torch.tensor(self.ids)
        q = DRAFTED[sources] if columns is None else DRAFTED[sources][:, columns]
        return Draft(tokens, tuple(self.parents), self.told, q, columns)


def generate(guesser: Guesser, params: SamplingParams, length: int = 3) -> Counter[tuple[int, ...]]:
    """The first tokens of ``SAMPLES`` requests, all decoded together."""
    outputs: list[list[int]] = [[] for _ in range(SAMPLES)]
    while active := [stream for stream in range(SAMPLES) if len(outputs[stream]) < length]:
        candidates = []
        for stream in active:
            output = outputs[stream]
            draft = guesser.draft(stream, output)
            prefixes = [output]
            for node, token in enumerate(draft.tokens):
                prefixes.append([*prefixes[1 + draft.parent(node)], token])
            rows = [prefix[-1] if prefix else V for prefix in prefixes]
            contexts = [TokenContext(params, (), prefix, frozenset()) for prefix in prefixes]
            candidates.append(VerificationRequest(draft, rows, contexts, 9, stream, len(output)))
        for stream, verdict in zip(active, verify(LOGITS, candidates), strict=True):
            outputs[stream] += verdict.tokens
    return Counter(tuple(output[:length]) for output in outputs)


def joint_law(params: SamplingParams, length: int = 3) -> dict[tuple[int, ...], float]:
    """What plain decoding gives: the product of the laws along each sequence."""
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
BUSHY = (-1, -1, 0, 0, 1)
GUESSERS = {
    "chain": (Guesser((-1, 0, 1), IID, IID), PLAIN),
    "independent siblings": (Guesser(BUSHY, IID, IID), PLAIN),
    "without replacement": (Guesser(BUSHY, WITHOUT, WITHOUT), PLAIN),
    "points": (Guesser(BUSHY, POINT, POINT), PLAIN),
    "reduced vocabulary": (Guesser(BUSHY, WITHOUT, WITHOUT, ids=(3, 0, 1)), PLAIN),
    "penalties and cuts": (Guesser(BUSHY, WITHOUT, WITHOUT), PICKY),
}


@pytest.mark.parametrize("name", GUESSERS)
def test_three_tokens_of_many_requests_have_the_law_of_plain_decoding(name: str):
    guesser, params = GUESSERS[name]
    assert fit(generate(guesser, params), joint_law(params)) > P_VALUE


MISTAKEN = {
    "the likeliest of q tested with q": Guesser((-1, 0), POINT, IID),
    "the two likeliest of q tested with q": Guesser(BUSHY, POINT, IID),
    "without replacement told to be independent": Guesser((-1, -1), WITHOUT, IID),
    "drafted with the coins that the target draws with": Guesser((-1,), IID, IID, use=0),
    "drafted with the coins that accept": Guesser((-1,), IID, IID, use=2),
}


@pytest.mark.parametrize("name", MISTAKEN)
def test_a_drafter_that_says_something_wrong_about_its_tokens_is_caught(name: str):
    assert fit(generate(MISTAKEN[name], PLAIN), joint_law(PLAIN)) < P_VALUE
