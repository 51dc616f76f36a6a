"""Sampling: the distribution, uniform samples, inversion of the CDF and log-probabilities.

Statistical tests are deterministic (every uniform sample is a pure function of its counter). Each
names its statistic, its size and its threshold, and has a negative control that fails it.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from exact_confidence import exact_confidence
from forethought.config.sampling import SamplingParams
from forethought.model.sampling import (
    TokenContext,
    edit_logits,
    invert_cdf,
    logits_to_probs,
    most_probable,
    prompt_logprobs,
    sample,
    uniform_at,
)
from forethought.model.sampling.sampler import NO_TOKEN
from forethought.reference.engine import logits_to_probs as reference_probs
from sampling_cases import logit_rows, sampling_params, tokens

EOS = frozenset({1})
P_VALUE = 1e-4
"""A test of fit passes above this p-value; its negative control must fall below it."""


def context(
    params: SamplingParams | None = None,
    prompt: tuple[int, ...] = (2, 3),
    output: tuple[int, ...] = (),
    **fields: object,
) -> TokenContext:
    return TokenContext(params or SamplingParams(**fields), prompt, output, EOS)


def distribution(logits: list[float], **fields: object) -> list[float]:
    return logits_to_probs(torch.tensor([logits]), [context(**fields)])[0].tolist()


def log(*probs: float) -> list[float]:
    return [math.log(p) for p in probs]


# --- the distribution ----------------------------------------------------------------------------

rows = st.tuples(
    logit_rows,
    sampling_params,
    st.lists(tokens, min_size=1, max_size=6),
    st.lists(tokens, max_size=6),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(rows, min_size=1, max_size=5))
def test_the_vectorised_distribution_agrees_with_the_reference(batch):
    logits = torch.tensor([row[0] for row in batch])
    contexts = [TokenContext(params, prompt, output, EOS) for _, params, prompt, output in batch]
    found = logits_to_probs(logits, contexts)
    for row, (raw, params, prompt, output) in enumerate(batch):
        expected = reference_probs(raw, TokenContext(params, prompt, output, EOS))
        # A mass that reaches top_p, or a ratio that reaches min_p, within the rounding of float32
        # may fall on either side of it; the distribution is then another one and both are right.
        if at_an_edge(raw, params, prompt, output):
            continue
        assert found[row].tolist() == pytest.approx(expected, abs=2e-6)


def at_an_edge(raw, params, prompt, output):
    uncut = params.replace(top_k=0, top_p=1.0, min_p=0.0)
    whole = reference_probs(raw, TokenContext(uncut, prompt, output, EOS))
    falling = sorted(whole, reverse=True)
    masses = [math.fsum(falling[:count]) for count in range(len(falling) + 1)]
    ratios = [p / falling[0] for p in falling]
    near_top_p = any(abs(mass - params.top_p) < 1e-5 for mass in masses) and params.top_p < 1.0
    near_min_p = any(abs(ratio - params.min_p) < 1e-5 for ratio in ratios) and params.min_p > 0.0
    return near_top_p or near_min_p


@settings(max_examples=50, deadline=None)
@given(st.lists(rows, min_size=2, max_size=6))
def test_the_distribution_of_a_row_does_not_depend_on_the_batch(batch):
    logits = torch.tensor([row[0] for row in batch])
    contexts = [TokenContext(params, prompt, output, EOS) for _, params, prompt, output in batch]
    together = logits_to_probs(logits, contexts)
    for row in range(len(batch)):
        alone = logits_to_probs(logits[row : row + 1], contexts[row : row + 1])
        assert torch.equal(alone[0], together[row])


def test_the_logits_are_left_as_they_were():
    logits = torch.randn(3, 9)
    before = logits.clone()
    many = {
        "logit_bias": {4: 2.0},
        "repetition_penalty": 1.5,
        "presence_penalty": 1.0,
        "min_tokens": 3,
        "temperature": 0.5,
        "top_k": 2,
    }
    logits_to_probs(logits, [context(output=(5,), **many) for _ in range(3)])
    sample(logits, [context(output=(5,), logprobs=2, **many) for _ in range(3)], [0.1, 0.2, 0.3])
    assert torch.equal(logits, before)


def test_rows_that_ask_for_nothing_are_not_even_copied():
    logits = torch.randn(4, 9)
    assert edit_logits(logits, [context(temperature=0.5, top_p=0.9)] * 4) is logits


def test_top_k_and_top_p_truncate_the_same_distribution():
    """Cutting to top_k and renormalising first would drop the fourth token: .80 / .85 > .82."""
    probs = distribution(
        log(0.35, 0.25, 0.20, 0.05, 0.03, 0.03, 0.03, 0.03, 0.03), top_k=4, top_p=0.82
    )
    assert [p > 0 for p in probs] == [True] * 4 + [False] * 5
    assert sum(probs) == pytest.approx(1.0)


def test_top_k_keeps_exactly_k_and_prefers_lower_ids_among_equals():
    assert distribution([1.0, 2.0, 1.0, 1.0, 1.0], top_k=3)[3:] == [0.0, 0.0]
    assert sum(p > 0 for p in distribution([0.0] * 7, top_k=3)) == 3


def test_top_p_always_leaves_the_most_probable_token():
    assert distribution(log(0.3, 0.6, 0.1), top_p=1e-6) == [0.0, 1.0, 0.0]


def test_min_p_keeps_tokens_with_that_share_of_the_largest_probability():
    probs = distribution(log(0.5, 0.3, 0.11, 0.09), min_p=0.21)
    assert probs == pytest.approx([0.5 / 0.91, 0.3 / 0.91, 0.11 / 0.91, 0.0], abs=1e-6)


def test_top_p_keeps_no_token_behind_exactly_its_mass():
    assert distribution([1.0, 1.0, 1.0, 1.0], top_p=0.5) == [0.5, 0.5, 0.0, 0.0]


def test_top_k_may_exceed_the_vocabulary():
    assert distribution([1.0, 1.0], top_k=50) == [0.5, 0.5]


def test_min_p_keeps_what_is_just_likely_enough():
    assert distribution([1.0, 4.0, 4.0, 2.0], min_p=1.0) == [0.0, 0.5, 0.5, 0.0]


def test_temperature_zero_is_the_limit_of_low_temperatures():
    logits = [0.3, 0.9, 0.1]
    assert (
        distribution(logits, temperature=0.0)
        == distribution(logits, temperature=1e-9)
        == [0.0, 1.0, 0.0]
    )
    assert distribution(logits, temperature=1e-300) == [0.0, 1.0, 0.0]


def test_equals_go_to_the_lowest_id_when_greedy():
    assert distribution([1.0, 4.0, 4.0, 4.0], temperature=0.0) == [0.0, 1.0, 0.0, 0.0]
    flat = torch.zeros(3, 5000)
    assert sample(flat, [context(temperature=0.0)] * 3, [0.5] * 3).tokens == [0, 0, 0]


def test_penalties_count_the_prompt_for_repetition_and_only_the_output_otherwise():
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0, -1.0]])
    prefix = {"prompt": (2, 4), "output": (3, 3)}
    repeated = edit_logits(logits, [context(repetition_penalty=2.0, **prefix)])
    assert repeated.tolist() == [[1.0, 1.0, 0.5, 0.5, -2.0]]
    present = edit_logits(logits, [context(presence_penalty=0.25, **prefix)])
    assert present.tolist() == [[1.0, 1.0, 1.0, 0.75, -1.0]]
    frequent = edit_logits(logits, [context(frequency_penalty=0.25, **prefix)])
    assert frequent.tolist() == [[1.0, 1.0, 1.0, 0.5, -1.0]]


def test_ends_are_forbidden_until_min_tokens():
    def allowed(output, **fields):
        probs = distribution([0.0] * 5, output=output, min_tokens=2, stop_token_ids=(3,), **fields)
        return [p > 0 for p in probs]

    assert allowed((4,)) == [True, False, True, False, True]
    assert allowed((4, 4)) == [True] * 5
    # With ignore_eos an end-of-sequence token ends nothing, so there is nothing to forbid.
    assert allowed((4,), ignore_eos=True) == [True, True, True, False, True]


def test_ignore_eos_does_not_change_the_distribution():
    assert distribution([0.0] * 4, ignore_eos=True) == [0.25] * 4


def test_an_end_of_sequence_id_outside_the_vocabulary_is_harmless():
    beyond = TokenContext(SamplingParams(min_tokens=1), (2,), (), frozenset({99}))
    assert logits_to_probs(torch.zeros(1, 4), [beyond]).tolist() == [[0.25] * 4]


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0])
@pytest.mark.parametrize(
    "logits",
    [
        [math.nan] * 4,
        [-math.inf] * 4,
        [0.0, math.nan, 2.0, 1.0],
        [0.0, math.inf, 2.0, -math.inf],
        [3.0e38, -3.0e38, 3.4e38, 0.0],
    ],
)
def test_any_logits_make_a_distribution(logits, temperature):
    probs = distribution(logits, temperature=temperature, top_p=0.9, top_k=3)
    assert sum(probs) == pytest.approx(1.0)
    assert min(probs) >= 0.0
    params = SamplingParams(temperature=temperature, top_p=0.9, top_k=3)
    expected = reference_probs(logits, TokenContext(params, (2,), (), EOS))
    assert probs == pytest.approx(expected, abs=1e-6)


def test_a_row_whose_every_token_is_forbidden_falls_back_to_the_raw_logits():
    everything = context(min_tokens=1, stop_token_ids=(0, 1, 2), logit_bias={0: 50.0})
    probs = logits_to_probs(torch.tensor([log(0.2, 0.3, 0.5)]), [everything])
    assert probs[0].tolist() == pytest.approx([0.2, 0.3, 0.5])


def test_a_broken_row_leaves_its_neighbours_alone():
    logits = torch.tensor([log(0.2, 0.8), [math.nan, math.nan]])
    assert logits_to_probs(logits, [context()] * 2)[0].tolist() == pytest.approx([0.2, 0.8])
    assert sample(logits, [context(temperature=0.0)] * 2, [0.0, 0.0]).tokens == [1, NO_TOKEN]


PARAMETERS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logit_bias": {1: -100.0}},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8, "top_k": 2},
    {"temperature": 0.8, "min_tokens": 1, "stop_token_ids": (1,), "logprobs": 0},
]


@pytest.mark.parametrize("sampling_params", PARAMETERS)
def test_no_token_is_drawn_where_the_largest_logit_is_not_finite(sampling_params):
    fine = [0.0, 5.0, -math.inf, 9.0]
    broken = [
        [math.nan] * 4,
        [-math.inf] * 4,
        [0.0, math.nan, 2.0, 9.0],
        [0.0, math.inf, 2.0, -math.inf],
    ]
    logits = torch.tensor([fine, *broken, fine])
    found = sample(logits, [context(**sampling_params)] * 6, [0.5] * 6).tokens
    assert found == [3, *[NO_TOKEN] * 4, 3]
    assert sample(logits[:1], [context(**sampling_params)], [0.5]).tokens == [3]


def test_the_most_probable_tokens_are_those_that_edited_greedy_rows_draw():
    random_rows = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).tolist()
    ties = [[1.0, 3.0, 3.0, 0.0, 3.0, 2.0], [0.0] * 6]
    broken = [[math.nan] * 6, [-math.inf] * 6, [0.0, math.nan, *[9.0] * 4], [math.inf, *[0.0] * 5]]
    logits = torch.tensor([*random_rows, *ties, *broken, *random_rows])
    edited = context(temperature=0.0, logit_bias={0: 0.0})  # of no effect, but it takes that way
    expected = sample(logits, [edited] * len(logits), [0.0] * len(logits)).tokens
    assert most_probable(logits) == expected
    assert expected[5:11] == [1, 0, *[NO_TOKEN] * 4]


@pytest.mark.gpu
def test_the_distribution_and_the_tokens_are_the_same_on_a_gpu():
    torch.manual_seed(3)
    logits = torch.randn(6, 2000).round(decimals=1)  # with many equals at every edge
    logits[5] = torch.nan
    contexts = [
        context(temperature=0.0, logprobs=3),
        context(temperature=0.7, top_k=40, top_p=0.9),
        context(top_k=3, repetition_penalty=1.3, output=(4, 5)),
        context(min_p=0.1, logit_bias={7: 3.0}, presence_penalty=0.5, output=(7,)),
        context(min_tokens=2, frequency_penalty=1.0, output=(9,)),
        context(temperature=0.3),
    ]
    uniforms = [uniform_at(1, 0, row) for row in range(6)]
    expected = logits_to_probs(logits, contexts)
    torch.testing.assert_close(logits_to_probs(logits.cuda(), contexts).cpu(), expected)
    host, device = sample(logits, contexts, uniforms), sample(logits.cuda(), contexts, uniforms)
    assert device.tokens == host.tokens
    assert next(iter(device.logprobs[0])) == next(iter(host.logprobs[0]))


# --- uniform samples -----------------------------------------------------------------------------


def test_a_uniform_sample_is_a_pure_function_of_its_counter():
    assert uniform_at(7, 0, 3) == uniform_at(7, 0, 3)
    counters = list(itertools.product((0, 1), repeat=3))
    assert len({uniform_at(*counter) for counter in counters}) == len(counters)


def test_uniform_samples_are_uniform():
    """Kolmogorov-Smirnov, 20,000 of them: 20 seeds, 10 samples, 100 positions."""
    uniforms = [uniform_at(s, k, t) for s in range(20) for k in range(10) for t in range(100)]
    assert min(uniforms) >= 0.0
    assert max(uniforms) < 1.0
    assert stats.kstest(uniforms, "uniform").pvalue > P_VALUE
    assert stats.kstest([u**1.1 for u in uniforms], "uniform").pvalue < P_VALUE  # negative control


@pytest.mark.parametrize(
    "step", [(1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=["seed", "sample", "position"]
)
def test_neighbouring_uniform_samples_are_independent(step):
    """Chi-square of 8 x 8 cells on 16,000 pairs of neighbours along one argument."""
    ds, dk, dt = step
    counters = [
        (s, k, t) for s in range(0, 40, 2) for k in range(0, 16, 2) for t in range(0, 200, 2)
    ]
    firsts = [uniform_at(*counter) for counter in counters]
    seconds = [uniform_at(s + ds, k + dk, t + dt) for s, k, t in counters]
    assert joint_p_value(firsts, seconds) > P_VALUE
    leaning = [(u + 0.1 * v) % 1.0 for u, v in zip(seconds, firsts, strict=True)]
    dependent = [0.9 * u + 0.1 * v for u, v in zip(leaning, firsts, strict=True)]
    assert joint_p_value(firsts, dependent) < P_VALUE  # negative control


def joint_p_value(firsts, seconds):
    cells = Counter((int(u * 8), int(v * 8)) for u, v in zip(firsts, seconds, strict=True))
    table = [[cells[i, j] for j in range(8)] for i in range(8)]
    return stats.chi2_contingency(table).pvalue


# --- the draw ------------------------------------------------------------------------------------


def test_a_token_is_sampled_by_inverting_the_cdf():
    probs = torch.tensor([[0.25, 0.0, 0.5, 0.25]] * 5)
    assert invert_cdf(probs, [0.0, 0.2499, 0.25, 0.7499, 0.75]).tolist() == [0, 0, 2, 2, 3]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1e-30, 1e-8, 0.1, 0.3, 1.0]), min_size=2, max_size=9),
    st.sampled_from([0.0, 1e-17, 0.5, 1 - 2**-53]) | st.floats(0.0, 1.0, exclude_max=True),
)
def test_pick_never_takes_a_token_of_probability_zero(weights, u):
    if sum(weights) > 0.0:
        token = int(invert_cdf(torch.tensor([weights]), [u]))
        assert weights[token] > 0.0


def draws(logits, params, seed, count):
    """Tokens drawn for ``count`` positions of one sample."""
    uniforms = [uniform_at(seed, 0, position) for position in range(count)]
    return sample(logits.expand(count, -1), [context(params)] * count, uniforms).tokens


def fit(tokens, probs):
    """p-value of the chi-square test of the drawn tokens against exact probabilities."""
    support = [token for token, p in enumerate(probs) if p > 0]
    counts = Counter(tokens)
    if set(counts) - set(support):
        return 0.0
    expected = [probs[token] * len(tokens) / sum(probs) for token in support]
    return stats.chisquare([counts[token] for token in support], expected).pvalue


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.5, "top_k": 5},
        {"temperature": 0.8, "top_p": 0.9},
        {"min_p": 0.1},
        {"temperature": 0.7, "top_k": 6, "top_p": 0.95, "min_p": 0.02},
    ],
    ids=str,
)
def test_sampled_tokens_follow_the_exact_distribution(fields):
    """Chi-square on 20,000 draws; negative control: a temperature that is 30 % higher."""
    logits = torch.tensor([1.5, 0.2, -0.4, 0.9, 0.0, 1.1, -1.0, 0.6])
    params = SamplingParams(**fields)
    drawn = draws(logits, params, seed=11, count=20_000)
    exact = reference_probs(logits.tolist(), TokenContext(params, (2, 3), (), EOS))
    assert fit(drawn, exact) > P_VALUE
    warmer = params.replace(temperature=params.temperature * 1.3)
    assert fit(draws(logits, warmer, seed=11, count=20_000), exact) < P_VALUE


def test_a_seed_gives_the_same_tokens_in_every_batch():
    torch.manual_seed(0)
    logits = torch.randn(64, 300)
    params = SamplingParams(temperature=0.9, top_p=0.95)
    others = [SamplingParams(temperature=t, top_k=k) for t in (0.0, 0.5, 1.3) for k in (0, 7)]
    alone = [
        sample(logits[t : t + 1], [context(params)], [uniform_at(5, 0, t)]).tokens[0]
        for t in range(64)
    ]
    mixed = [context(params) if row % 2 else context(others[row % 6]) for row in range(64)]
    together = sample(logits, mixed, [uniform_at(5, 0, t) for t in range(64)]).tokens
    assert together[1::2] == alone[1::2]


# --- log-probabilities ---------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_logits_whatever_the_parameters():
    logits = torch.tensor([log(0.5, 0.3, 0.15, 0.05)])
    choice = sample(logits, [context(logprobs=2, temperature=0.0, logit_bias={3: 90.0})], [0.0])
    entries = choice.logprobs[0]
    assert choice.tokens == [3]
    assert list(entries) == [3, 0, 1]  # the sampled token first, then the top tokens in order
    assert [entry.rank for entry in entries.values()] == [4, 1, 2]
    assert [entry.logprob for entry in entries.values()] == pytest.approx(log(0.05, 0.5, 0.3))


def test_zero_logprobs_are_those_of_the_chosen_token_and_none_is_none():
    logits = torch.tensor([log(0.5, 0.3, 0.2)] * 3)
    sampling_params = [SamplingParams(logprobs=k, temperature=0.0) for k in (0, None, 3)]
    zero, none, three = sample(
        logits, [context(params) for params in sampling_params], [0.0] * 3
    ).logprobs
    assert none is None
    assert list(zero) == [0]
    assert list(three) == [0, 1, 2]


def test_tokens_that_tie_share_a_rank():
    logits = torch.tensor([[0.0, 1.0, 1.0, -1.0]])
    (entries,) = sample(logits, [context(logprobs=4, temperature=0.0)], [0.0]).logprobs
    assert {token: entry.rank for token, entry in entries.items()} == {1: 1, 2: 1, 0: 3, 3: 4}


def test_more_logprobs_than_tokens_gives_all_tokens():
    (entries,) = sample(torch.zeros(1, 3), [context(logprobs=20)], [0.9]).logprobs
    assert sorted(entries) == [0, 1, 2]


# --- confidence ----------------------------------------------------------------------------------


def test_confidences_are_of_the_raw_logits_and_agree_with_the_reference():
    torch.manual_seed(5)
    logits = torch.randn(6, 50) * 4
    ks, biased = (1, None, 20, 3, 64, 2), {7: 90.0}
    contexts = [context(confidence=k, temperature=0.0, logit_bias=biased) for k in ks]
    found = sample(logits, contexts, [0.0] * 6)
    assert found.tokens == [7] * 6
    assert found.confidences[1] is None
    for row, k in enumerate(ks):
        if k is not None:
            expected = exact_confidence(logits[row].tolist(), 7, k)
            assert found.confidences[row] == pytest.approx(expected, abs=1e-5)


def test_confidences_of_a_known_distribution():
    logits = torch.tensor([log(0.5, 0.25, 0.125, 0.125)])
    (found,) = sample(logits, [context(confidence=2, temperature=0.0)], [0.0]).confidences
    assert found.value == pytest.approx(1.5 * math.log(2))  # of 1/2 and 1/4
    assert found.logprob == pytest.approx(-math.log(2))
    assert found.entropy == pytest.approx(1.75 * math.log(2))
    assert found.self_certainty == pytest.approx(0.25 * math.log(2))  # 9/4 - 2 bits
    (flat,) = sample(torch.zeros(1, 8), [context(confidence=20)], [0.9]).confidences
    assert flat == pytest.approx((math.log(8), -math.log(8), math.log(8), 0.0), abs=1e-6)


def test_tokens_without_probability_do_not_count_in_confidence_and_entropy():
    logits = torch.tensor([[0.0, -math.inf, 0.0, -math.inf]])
    (found,) = sample(logits, [context(confidence=4, temperature=0.0)], [0.0]).confidences
    assert found[:3] == pytest.approx((math.log(2), -math.log(2), math.log(2)))
    assert found.self_certainty == math.inf


def test_logprobs_and_confidences_of_one_step_do_not_mix():
    torch.manual_seed(6)
    logits = torch.randn(3, 40)
    asked = [{"logprobs": 2}, {"confidence": 3}, {"logprobs": 1, "confidence": 5}]
    contexts = [context(temperature=0.0, **fields) for fields in asked]
    together = sample(logits, contexts, [0.0] * 3)
    for row, one in enumerate(contexts):
        alone = sample(logits[row : row + 1], [one], [0.0])
        assert together.logprobs[row] == alone.logprobs[0]
        assert together.confidences[row] == pytest.approx(alone.confidences[0])


def test_prompt_logprobs_score_the_tokens_that_follow():
    torch.manual_seed(1)
    logits, following = torch.randn(5, 40), [3, 39, 0, 7, 7]
    entries = prompt_logprobs(logits, following, k=2)
    expected = logits.log_softmax(-1)
    for position, token in enumerate(following):
        assert next(iter(entries[position])) == token
        assert entries[position][token].logprob == pytest.approx(float(expected[position, token]))
        best = entries[position][int(expected[position].argmax())]
        assert best.rank == 1


def test_no_rows_give_no_tokens():
    assert sample(torch.zeros(0, 8), [], []).tokens == []


def test_draws_do_not_touch_the_random_state_of_torch_or_python():
    states = torch.get_rng_state(), random.getstate()
    sample(
        torch.randn(2, 9, generator=torch.Generator().manual_seed(0)), [context()] * 2, [0.3, 0.6]
    )
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
