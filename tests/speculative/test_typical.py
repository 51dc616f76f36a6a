"""Typical acceptance: the paper's thresholds, and which path is taken."""

import math

import pytest
import torch

from forethought.config.sampling import SamplingParams
from forethought.model.sampling import TokenContext
from forethought.speculative.drafter import Draft
from forethought.speculative.verify.rules import SyntheticAcceptance, TypicalAcceptance
from forethought.speculative.verify.verify import VerificationRequest, verify

SAMPLED = SamplingParams(temperature=1.0, seed=3)
PROBS = (0.5, 0.3, 0.15, 0.05)


def accepted(rule: TypicalAcceptance, distribution: tuple[float, ...]) -> list[int]:
    """Which tokens may follow a prefix with this distribution, each tried alone."""
    logits = torch.tensor([distribution, distribution]).log()
    context = TokenContext(SAMPLED, (), (), frozenset())
    found = []
    for token in range(len(distribution)):
        request = VerificationRequest(Draft([token]), range(2), [context] * 2, 3, 0, 5)
        if rule.path(request, rule.test_nodes(logits, [request]).tolist()):
            found.append(token)
    return found


@pytest.mark.parametrize(
    ("distribution", "threshold", "tokens"),
    [
        (PROBS, 0.09, [0, 1, 2]),
        ((0.97, 0.01, 0.01, 0.01), 0.09, [0]),
        ((0.25,) * 4, 0.075, [0, 1, 2, 3]),
        ((0.01,) * 100, 0.003, list(range(100))),
    ],
)
def test_the_threshold_is_the_papers(distribution, threshold, tokens):
    rule = TypicalAcceptance(0.09, 0.3)
    assert float(rule.thresholds(torch.tensor([distribution]))) == pytest.approx(
        threshold, abs=1e-4
    )
    assert accepted(rule, distribution) == tokens


def test_the_threshold_falls_with_the_entropy_as_the_formula_says():
    entropy = -sum(p * math.log(p) for p in PROBS)
    assert entropy == pytest.approx(1.142, abs=1e-3)
    found = TypicalAcceptance(0.5, 0.3).thresholds(torch.tensor([PROBS]))
    assert float(found) == pytest.approx(0.3 * math.exp(-entropy), abs=1e-4)
    assert float(found) == pytest.approx(0.0957, abs=1e-4)


def test_a_token_must_be_more_likely_than_the_threshold():
    assert accepted(TypicalAcceptance(0.5, 1.0), (0.5, 0.5)) == []


def verified(draft: Draft, distributions: list[tuple[float, ...]]) -> tuple[list[int], list[int]]:
    contexts = [TokenContext(SAMPLED, (), (), frozenset())] * (1 + len(draft))
    rule = TypicalAcceptance(0.09, 0.3)
    request = VerificationRequest(draft, range(len(distributions)), contexts, 3, 0, 5, rule=rule)
    [result] = verify(torch.tensor(distributions).log(), [request])
    return result.path, result.tokens


def test_the_longest_typical_path_wins_not_the_most_probable_first_token():
    draft = Draft([0, 1, 1, 0], (-1, -1, 0, 1))
    sure_of_0 = (0.97, 0.01, 0.01, 0.01)
    path, tokens = verified(draft, [PROBS, sure_of_0, sure_of_0, PROBS, PROBS])
    assert path == [1, 3]  # 0 then 1 ends after one token, as 1 is not typical there
    assert tokens[:2] == [1, 0]
    assert len(tokens) == 3


def test_of_paths_of_one_length_the_likelier_wins():
    path, _ = verified(Draft([2, 0, 1], (-1, -1, -1)), [PROBS] * 4)
    assert path == [1]


def test_a_node_behind_one_that_is_not_typical_is_never_accepted():
    path, tokens = verified(Draft([3, 0], (-1, 0)), [PROBS] * 3)
    assert path == []
    assert len(tokens) == 1


def test_the_token_behind_the_path_is_the_one_that_plain_decoding_draws_there():
    contexts = [TokenContext(SAMPLED, (), (), frozenset())]
    plain = VerificationRequest(Draft(()), [0], contexts, 3, 0, 6)
    [result] = verify(torch.tensor([PROBS]).log(), [plain])
    _, tokens = verified(Draft([0]), [PROBS, PROBS])
    assert tokens[1:] == result.tokens


def test_greedy_requests_are_verified_exactly():
    rule = TypicalAcceptance(0.09, 0.3)
    assert rule.applies_to(SAMPLED)
    assert not rule.applies_to(SamplingParams(temperature=0.0))


@pytest.mark.parametrize(
    "constrained",
    [{"thinking_budget": 5}, {"thinking_soft": 5}, {"guided_decoding": {"regex": "a"}}],
)
def test_acceptance_at_random_leaves_out_what_random_tokens_would_break(constrained):
    rule = SyntheticAcceptance.of_rate(0.5)
    assert rule.applies_to(SAMPLED)
    assert not rule.applies_to(SAMPLED.replace(**constrained))
