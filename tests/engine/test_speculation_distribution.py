"""Sampled outputs with drafts have the distribution of plain decoding, measured in the engine.

Statistic: Pearson's chi-square of the joint distribution of the first three tokens after one
prompt, over its 27 outcomes (top_k = 3), against the exact one from transformers' logits. Sample:
2000 independent samples, of which the rarest outcome is expected 38 times. Threshold: p > 1e-4 for
the right rules; the negative control, a drafter that names a distribution that its tokens were not
sampled from, must fall below 1e-8 (it is at 1e-25).
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

import drafters
from engines import drain, engine, expect_empty, outputs
from forethought.config.drafters import DraftTargetDecodingConfig, UserProvidedDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.model.sampling import TokenContext
from forethought.reference.engine import logits_to_probs as reference_probs
from forethought.speculative.drafter import Draft, DraftKind, DraftRequest
from models import VOCAB, tiny, transformers_model

PROMPT = [5, 17, 33, 60, 41]
SAMPLES = 2000
SAMPLING = SamplingParams(
    temperature=3.0, top_k=3, max_tokens=3, seed=3, n=SAMPLES, ignore_eos=True
)


def next_probs(tokens: list[int]) -> list[float]:
    with torch.inference_mode():
        logits = transformers_model(tiny("llama"))(torch.tensor([tokens])).logits[0, -1]
    context = TokenContext(SAMPLING, PROMPT, tokens[len(PROMPT) :], frozenset([2]))
    return reference_probs(logits.tolist(), context)


@functools.cache
def exact() -> dict[tuple[int, ...], float]:
    distributions: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        distributions = {
            (*said, token): mass * chance
            for said, mass in distributions.items()
            for token, chance in enumerate(next_probs([*PROMPT, *said]))
            if chance > 0
        }
    return distributions


def p_value(
    config: DecodingBaseConfig | None, num_steps: int = 1, temperature: float = 3.0
) -> float:
    configs = [] if config is None else [config]
    machine = engine(
        pages=2048, speculative=configs, max_batch_size=400, max_num_tokens=4000, max_length=16
    )
    machine.num_decode_steps = num_steps
    samples = machine.add(PROMPT, SAMPLING.replace(temperature=temperature))
    drain(machine)
    if config is not None:
        accepted = machine.stats.accepted
        assert accepted > SAMPLES / 20, "hardly anything was accepted: nothing is tested"
    counts = Counter(map(tuple, outputs(samples)))
    assert set(counts) <= set(exact())
    expect_empty(machine)
    expected = [SAMPLES * mass for mass in exact().values()]
    return float(chisquare([counts[said] for said in exact()], expected).pvalue)


SAME_MODEL = {"speculative_model": tiny("llama")}
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0]]


@pytest.mark.parametrize(
    "config",
    [
        DraftTargetDecodingConfig(max_draft_len=2, draft_sampling="sampled", **SAME_MODEL),
        DraftTargetDecodingConfig(draft_choices=TREE, draft_sampling="sampled", **SAME_MODEL),
        DraftTargetDecodingConfig(draft_choices=TREE, **SAME_MODEL),
    ],
    ids=["chain with q", "tree without replacement", "tree of points"],
)
def test_sampled_outputs_have_the_distribution_of_plain_decoding(
    config: DecodingBaseConfig,
) -> None:
    assert p_value(config) > 1e-4


@pytest.mark.parametrize(
    "config",
    [None, DraftTargetDecodingConfig(max_draft_len=1, **SAME_MODEL)],
    ids=["plain", "chain of points"],
)
def test_so_have_those_of_several_steps_in_one_call(config: DecodingBaseConfig | None) -> None:
    assert p_value(config, num_steps=8) > 1e-4


def test_the_test_finds_another_temperature_in_several_steps() -> None:
    assert p_value(None, num_steps=8, temperature=2.0) < 1e-8


def test_the_test_finds_a_drafter_whose_tokens_are_not_from_the_distribution_it_names() -> None:
    def wrong_distribution(request: DraftRequest) -> Draft:
        """The most probable token, with the uniform distribution of three as its own."""
        distribution = torch.tensor(next_probs_of(tuple(request.tokens)))
        flat = (distribution > 0) / (distribution > 0).sum()
        return Draft([int(distribution.argmax())], None, DraftKind.IID, flat.float()[None])

    @functools.cache
    def next_probs_of(tokens: tuple[int, ...]) -> list[float]:
        return next_probs(list(tokens))

    config = UserProvidedDecodingConfig(
        max_draft_len=1, drafter=drafters.PerRequest(wrong_distribution)
    )
    assert p_value(config) < 1e-8


def test_the_exact_distribution_has_all_outcomes() -> None:
    assert len(exact()) == 27
    assert sum(exact().values()) == pytest.approx(1.0)
    assert min(exact().values()) * SAMPLES > 5
    assert all(0 <= token < VOCAB for token in itertools.chain(*exact()))
