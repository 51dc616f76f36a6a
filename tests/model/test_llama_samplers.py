"""Top-n-sigma and XTC, alone and in the whole order, against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from forethought.config.sampling import SamplingParams
from forethought.model.sampling import TokenContext, logits_to_probs, sample, uniform_at
from sampling_cases import logit_rows, tokens
from slow_samplers import at_an_edge, breakers_of, llama_params, slow_probs, without_top

EOS = frozenset({1})
BREAKERS = [[3], [4, 5]]
P_VALUE = 1e-4

rows = st.tuples(
    logit_rows,
    llama_params,
    st.lists(tokens, min_size=1, max_size=6),
    st.lists(st.integers(3, 6), max_size=12),
)


def context_of(params, prompt, output):
    return TokenContext(params, prompt, output, EOS, breakers=breakers_of(*BREAKERS))


def distribution(logits: list[float], **fields: object) -> list[float]:
    context = TokenContext(SamplingParams(**fields), (2,), (), EOS)
    return logits_to_probs(torch.tensor([logits]), [context])[0].tolist()


def log(*probs: float) -> list[float]:
    return [math.log(p) for p in probs]


@settings(max_examples=150, deadline=None)
@given(st.lists(rows, min_size=1, max_size=4))
def test_the_distribution_agrees_with_the_definition(batch):
    logits = torch.tensor([row[0] for row in batch])
    contexts = [context_of(*row[1:]) for row in batch]
    result = logits_to_probs(logits, contexts)
    for row, (raw, *_) in enumerate(batch):
        assert torch.equal(logits_to_probs(logits[row : row + 1], [contexts[row]])[0], result[row])
        if not at_an_edge(raw, contexts[row], BREAKERS):
            expected = slow_probs(raw, contexts[row], BREAKERS)
            assert result[row].tolist() == pytest.approx(expected, abs=3e-6)


# ---- top-n-sigma -------------------------------------------------------------------------------


def test_top_n_sigma_keeps_what_is_near_the_largest_logit_at_any_temperature():
    logits = [4.0, 3.0, 0.0, -3.0, -4.0]  # mean 0, deviation sqrt(10) = 3.16
    for temperature in (0.1, 1.0, 50.0):
        for num_sigmas, count in ((0.1, 1), (0.5, 2), (1.2, 2), (1.3, 3), (9.0, 5)):
            probs = distribution(logits, top_n_sigma=num_sigmas, temperature=temperature)
            assert [p > 0 for p in probs] == [rank < count for rank in range(5)]
            assert sum(probs) == pytest.approx(1.0)


def test_top_n_sigma_counts_no_token_without_a_logit_and_keeps_equals():
    assert distribution([0.0] * 4, top_n_sigma=0.5) == [0.25] * 4
    assert distribution([7.0], top_n_sigma=0.001) == [1.0]
    logits = [2.0, 2.0, 0.0, 0.0]  # deviation 1
    with_infinite = [2.0, -math.inf, 2.0, 0.0, -math.inf, 0.0]
    assert distribution(logits, top_n_sigma=2.0) == pytest.approx(distribution(logits), abs=1e-6)
    assert distribution(logits, top_n_sigma=1.9) == [0.5, 0.5, 0.0, 0.0]
    assert distribution(with_infinite, top_n_sigma=1.9) == [0.5, 0.0, 0.5, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("fields", [{"top_n_sigma": 0.7}, {"xtc_probability": 0.6}])
@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1.0])
@pytest.mark.parametrize(
    "logits",
    [
        [math.nan] * 4,
        [-math.inf] * 4,
        [0.0, math.nan, 2.0, 1.0],
        [0.0, math.inf, 2.0, -math.inf],
        [3.0e38, -3.0e38, 3.4e38, 0.0],
        [1.0, -math.inf, -math.inf, -math.inf],
    ],
)
def test_any_logits_make_a_distribution(logits, temperature, fields):
    probs = distribution(logits, temperature=temperature, **fields)
    assert sum(probs) == pytest.approx(1.0)
    assert min(probs) >= 0.0


# ---- XTC ---------------------------------------------------------------------------------------


def test_xtc_leaves_out_all_that_reach_the_threshold_but_the_least_probable():
    probs = log(0.4, 0.3, 0.2, 0.1)
    certain = distribution(probs, xtc_probability=1.0, xtc_threshold=0.15)
    assert certain == pytest.approx([0.0, 0.0, 2 / 3, 1 / 3], abs=1e-6)
    half = distribution(probs, xtc_probability=0.5, xtc_threshold=0.15)
    assert half == pytest.approx([0.2, 0.15, 0.1 + 1 / 3, 0.05 + 1 / 6], abs=1e-6)


def test_xtc_changes_nothing_where_fewer_than_two_tokens_reach_the_threshold():
    logits = log(0.6, 0.3, 0.1)
    for threshold in (0.5, 0.7, 1.0):
        probs = distribution(logits, xtc_probability=1.0, xtc_threshold=threshold)
        assert probs == pytest.approx([0.6, 0.3, 0.1], abs=1e-6)


def test_xtc_leaves_the_last_of_all_where_all_reach_the_threshold():
    every = {"xtc_probability": 1.0, "xtc_threshold": 0.0}
    assert distribution(log(0.4, 0.1, 0.3, 0.2), **every) == [0.0, 1.0, 0.0, 0.0]
    assert distribution([0.0] * 4, **every) == [0.0, 0.0, 0.0, 1.0]  # of equals the highest id
    exact = {"xtc_probability": 1.0, "xtc_threshold": 0.25}
    assert distribution([0.0] * 4, **exact) == [0.0, 0.0, 0.0, 1.0]


def test_xtc_never_gives_a_token_of_probability_zero():
    logits = [3.0, 2.0, -math.inf, 1.0]
    every = {"xtc_probability": 1.0, "xtc_threshold": 0.0}
    assert distribution(logits, **every) == [0.0, 0.0, 0.0, 1.0]
    assert distribution(logits, top_k=2, **every) == [0.0, 1.0, 0.0, 0.0]  # of what the cuts keep


def test_xtc_and_top_n_sigma_leave_greedy_tokens_as_they_are():
    both = {"xtc_probability": 1.0, "xtc_threshold": 0.0, "top_n_sigma": 0.1}
    assert distribution([1.0, 4.0, 4.0], temperature=0.0, **both) == [0.0, 1.0, 0.0]


def chi_square_of_xtc(probability: float, drawn_with: float) -> float:
    """p-value of chi-square: 20,000 draws against llama.cpp's procedure, in which a coin of its own
    decides whether the top tokens are left out.
    """
    probs, size = [0.4, 0.3, 0.2, 0.1], 20_000
    context = TokenContext(
        SamplingParams(xtc_probability=drawn_with, xtc_threshold=0.15), (2,), (), EOS
    )
    uniforms = [uniform_at(5, 0, at) for at in range(size)]
    drawn = sample(torch.tensor([log(*probs)] * size), [context] * size, uniforms).tokens
    generator = torch.Generator().manual_seed(7)
    is_out = torch.rand(size, generator=generator) < probability
    kept = torch.tensor([probs, without_top(probs, 0.15)])[is_out.long()]
    tossed = torch.multinomial(kept, 1, generator=generator).squeeze(1)
    table = [torch.bincount(ids, minlength=4).tolist() for ids in (torch.tensor(drawn), tossed)]
    return float(stats.chi2_contingency(table).pvalue)


def test_draws_are_distributed_as_if_a_coin_decided():
    """Two samples of 20,000; p > 1e-4. The control, another probability, must fall below it."""
    assert chi_square_of_xtc(0.4, 0.4) > P_VALUE
    assert chi_square_of_xtc(0.4, 0.45) < P_VALUE
