"""Sampling in C++ draws the tokens of the reference implementation, and gives them its scores.

Probabilities are rounded otherwise there. So a token is right if the uniform sample falls into its
interval of the reference's cumulative distribution, widened by EDGE at both ends.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from forethought.backends.cpu.backend import CpuBackend
from forethought.backends.cpu.library import load_library
from forethought.backends.cpu.sampler import NativeSampler
from forethought.config.engine import LlmArgs
from forethought.config.sampling import SamplingParams
from forethought.engine import resolve
from forethought.model.sampling import TokenContext, logits_to_probs, uniform_at
from forethought.model.sampling.sampler import (
    NO_TOKEN,
    torch_draw_tokens,
    torch_score_confidence,
    torch_score_logprobs,
)
from models import tiny
from sampling_cases import VOCABULARY, logit_rows, sampling_params, tokens
from slow_samplers import at_an_edge, breakers_of, llama_params

EDGE = 2e-6
EOS = frozenset({1})
UNIFORMS = [0.0, *(uniform_at(7, 0, position) for position in range(30)), 1.0 - 2.0**-53]
NAN, INF = math.nan, math.inf


def native(
    logits: Tensor, contexts: Sequence[TokenContext], uniforms: Sequence[float]
) -> list[int]:
    drawn: list[int] = NativeSampler().draw_tokens(logits, contexts, uniforms).tolist()
    return drawn


def expect_reference(logits: Tensor, context: TokenContext) -> None:
    """Each uniform sample gives the token whose interval it falls into."""
    mass = logits_to_probs(logits[None], [context])[0].double()
    ends = mass.cumsum(0) / mass.sum()
    size = len(UNIFORMS)
    drawn = native(logits.expand(size, -1), [context] * size, UNIFORMS)
    for uniform, token in zip(UNIFORMS, drawn, strict=True):
        begin = float(ends[token - 1]) if token else 0.0
        assert begin - EDGE <= uniform <= float(ends[token]) + EDGE
        assert mass[token] > 0


def test_uniform_samples_are_the_reference_s_to_the_last_bit() -> None:
    rng = random.Random(1)
    library = load_library()
    edges = [0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1]
    counters = [
        *((seed, sample, 5) for seed in edges for sample in edges),
        *(tuple(rng.getrandbits(64) for _ in range(3)) for _ in range(2000)),
    ]
    for seed, sample, position in counters:
        assert library.uniform_sample(seed, sample, position) == uniform_at(seed, sample, position)


class Masks:
    """A constraint that allows some tokens."""

    def __init__(self, allowed: Sequence[bool]) -> None:
        self._packed = np.packbits(np.array(allowed, dtype=bool), bitorder="little")
        self._packed.flags.writeable = False

    def mask(self, output: Sequence[int]) -> Any:
        return self._packed

    def is_complete(self, output: Sequence[int]) -> bool:
        return False


@settings(max_examples=300, deadline=None)
@given(
    logit_rows,
    sampling_params,
    st.lists(tokens, min_size=1, max_size=6),
    st.lists(tokens, max_size=6),
    st.none() | st.lists(st.booleans(), min_size=VOCABULARY, max_size=VOCABULARY),
)
def test_tokens_are_the_reference_s_with_every_parameter(
    raw: list[float],
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    allowed: list[bool] | None,
) -> None:
    constraint = None if allowed is None else Masks(allowed)
    context = TokenContext(params, prompt, output, EOS, constraint)
    logits = torch.tensor(raw)
    if not is_at_an_edge(logits, context):
        expect_reference(logits, context)


@settings(max_examples=200, deadline=None)
@given(
    logit_rows,
    llama_params,
    st.lists(tokens, min_size=1, max_size=6),
    st.lists(st.integers(3, 6), max_size=12),
)
def test_so_they_are_with_the_samplers_of_llama_cpp(
    raw: list[float], params: SamplingParams, prompt: list[int], output: list[int]
) -> None:
    breakers = [[3], [4, 5]]
    context = TokenContext(params, prompt, output, EOS, breakers=breakers_of(*breakers))
    if not at_an_edge(raw, context, breakers):
        expect_reference(torch.tensor(raw), context)


def is_at_an_edge(logits: Tensor, context: TokenContext) -> bool:
    """Whether a mass reaches top_p, or a ratio min_p, within the rounding of float32: either side
    of it is right.
    """
    params = context.params
    uncut = TokenContext(
        params.replace(top_k=0, top_p=1.0, min_p=0.0),
        context.prompt,
        context.output,
        EOS,
        context.constraint,
    )
    falling = logits_to_probs(logits[None], [uncut])[0].double().sort(descending=True).values
    near_top_p = bool(((falling.cumsum(0) - params.top_p).abs() < 1e-5).any())
    near_min_p = bool(((falling / falling[0] - params.min_p).abs() < 1e-5).any())
    return (params.top_p < 1.0 and near_top_p) or (params.min_p > 0.0 and near_min_p)


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 30.0])
@pytest.mark.parametrize("size", [1, 5, 255, 257, 4097])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.4},
        {"temperature": 1e-30},
        {"top_k": 3},
        {"top_k": 300},
        {"top_p": 0.9},
        {"top_p": 0.0001},
        {"top_k": 40, "top_p": 0.95, "min_p": 0.02, "temperature": 0.7},
        {"presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.3},
        {"top_n_sigma": 1.5},
        {"xtc_probability": 0.5, "xtc_threshold": 0.05},
        {"top_p": 0.9, "top_n_sigma": 3.0, "xtc_probability": 0.3, "xtc_threshold": 0.0007},
    ],
)
def test_vocabularies_of_any_size_and_distributions_of_any_width_are_drawn_from(
    size: int, spread: float, fields: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = spread * torch.randn(size, generator=generator)
    prompt, output = [0, size - 1], [size // 2] * 2
    expect_reference(logits, TokenContext(SamplingParams(**fields), prompt, output, EOS))


def test_of_equals_at_the_cut_the_lower_ids_stay() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 1.0, 1.0, -5.0, 1.0])
    for fields in ({"top_k": 3}, {"top_p": 0.62}):
        expect_reference(logits, TokenContext(SamplingParams(**fields), [], [], EOS))
    uniform = [1.0 - 2.0**-53]
    assert native(logits[None], [TokenContext(SamplingParams(top_k=3), [], [], EOS)], uniform) == [
        3
    ]


@pytest.mark.parametrize(
    "raw", [[0.0, NAN, 1.0], [INF, 0.0, 0.0], [-INF, -INF, -INF], [NAN, NAN, NAN]]
)
@pytest.mark.parametrize("fields", [{}, {"temperature": 0.0, "logit_bias": {0: 1.0}}, {"top_k": 2}])
def test_no_token_is_drawn_where_the_largest_logit_is_not_finite(
    raw: list[float], fields: dict[str, Any]
) -> None:
    context = TokenContext(SamplingParams(**fields), [], [], EOS)
    assert native(torch.tensor([raw]), [context], [0.5]) == [NO_TOKEN]


def test_where_everything_is_forbidden_or_overflows_the_raw_logits_hold() -> None:
    logits = torch.tensor([1.0, 3.0, -INF, 2.0])
    held = SamplingParams(min_tokens=3, stop_token_ids=[0, 1, 2, 3])
    overflow = SamplingParams(repetition_penalty=1e-38, logit_bias={1: 100.0})
    for params, output in ((held, []), (overflow, [1, 3])):
        expect_reference(logits, TokenContext(params, [], output, EOS))
    masked = TokenContext(held, [], [], EOS, Masks([True, False, False, True]))
    expect_reference(logits, masked)
    expect_reference(logits, TokenContext(held, [], [], EOS, Masks([False] * 4)))


def test_a_row_s_token_does_not_depend_on_the_batch_or_the_threads() -> None:
    logits = 3 * torch.randn(40, 3000, generator=torch.Generator().manual_seed(1))
    contexts = [
        TokenContext(SamplingParams(top_p=0.9, top_k=row % 5), [], [row], EOS) for row in range(40)
    ]
    uniforms = [uniform_at(1, row, 0) for row in range(40)]
    together = native(logits, contexts, uniforms)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert native(logits, contexts, uniforms) == together
    finally:
        torch.set_num_threads(threads)
    for row in range(40):
        assert native(logits[row : row + 1], contexts[row : row + 1], uniforms[row : row + 1]) == [
            together[row]
        ]


def fit(params: SamplingParams, drawn_with: SamplingParams) -> float:
    """p-value of Pearson's chi-square: 20,000 native draws against the reference's distribution."""
    logits = torch.randn(30, generator=torch.Generator().manual_seed(3))
    probs = logits_to_probs(logits[None], [TokenContext(params, [], [], EOS)])[0].double()
    size = 20_000
    context = TokenContext(drawn_with, [], [], EOS)
    drawn = native(
        logits.expand(size, -1), [context] * size, [uniform_at(5, 0, at) for at in range(size)]
    )
    counts = torch.bincount(torch.tensor(drawn), minlength=30)
    possible = probs > 0
    assert not counts[~possible].any() or params != drawn_with
    expected = probs[possible] / probs.sum() * counts[possible].sum()
    return float(stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue)


def test_draws_have_the_distribution_of_the_reference() -> None:
    """Threshold: p > 1e-4; the control, another temperature, must fall below 1e-8."""
    params = SamplingParams(temperature=0.9, top_p=0.95, min_p=0.01)
    assert fit(params, params) > 1e-4
    assert fit(params, params.replace(temperature=1.0)) < 1e-8


@pytest.mark.parametrize("size", [3, 512, 1037])
@pytest.mark.parametrize("k", [0, 1, 7])
def test_scores_are_the_reference_s(size: int, k: int) -> None:
    logits = 4 * torch.randn(6, size, generator=torch.Generator().manual_seed(k))
    logits[0, 1] = -INF
    logits[1] = logits[1].round()  # equals
    tokens = torch.tensor([0, 1, 2, 0, 1, 2])
    found = NativeSampler().score_logprobs(logits, tokens, k)
    expected = torch_score_logprobs(logits, tokens, k)
    top = min(k, size)
    assert found.shape == expected.shape
    torch.testing.assert_close(found[:, : 2 + top], expected[:, : 2 + top], atol=2e-6, rtol=2e-6)
    order = logits.argsort(dim=-1, descending=True, stable=True)[:, :top]
    assert torch.equal(found[:, 2 + top :].long(), order)


@pytest.mark.parametrize("size", [3, 512, 1037])
def test_confidences_are_the_reference_s(size: int) -> None:
    logits = 4 * torch.randn(5, size, generator=torch.Generator().manual_seed(size))
    logits[0, 0] = -INF
    tokens, ks = torch.tensor([1, 2, 0, 1, 2]), [1, 2, 20, 3, 5]
    found = NativeSampler().score_confidence(logits, tokens, ks)
    expected = torch_score_confidence(logits, tokens, ks)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_greedy_rows_beside_sampled_ones_take_the_largest_edited_logit() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    contexts = [
        TokenContext(SamplingParams(temperature=0.0, logit_bias={0: 5.0}), [], [], EOS),
        TokenContext(SamplingParams(temperature=1.0), [], [], EOS),
    ]
    assert native(logits, contexts, [0.9, 0.01]) == [0, 0]
    assert torch_draw_tokens(logits, contexts, [0.9, 0.01]).tolist() == [0, 0]


def test_without_a_library_torch_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    from forethought.model.sampling import sampler

    monkeypatch.setattr(
        sampler, "backends", SimpleNamespace(cpu=lambda: SimpleNamespace(sampler=lambda: None))
    )
    logits, context = torch.randn(4, 50), TokenContext(SamplingParams(), [], [], EOS)
    uniforms = [0.1, 0.3, 0.5, 0.9]
    assert torch.equal(
        sampler.draw_tokens(logits, [context] * 4, uniforms),
        torch_draw_tokens(logits, [context] * 4, uniforms),
    )


def test_the_library_is_loaded_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it has to be compiled, no request waits for that."""
    loaded = list[bool]()
    monkeypatch.setattr(CpuBackend, "sampler", staticmethod(lambda: loaded.append(True)))
    resolve.build(LlmArgs(forward="torch"), tiny("llama")).shutdown()
    assert loaded == [True]
