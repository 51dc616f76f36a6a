"""The law of sampled outputs with drafts is that of plain decoding: measured through the engine.

Statistic: Pearson's chi-square of the joint law of the first three tokens after one prompt, over
its 27 outcomes (top_k = 3), against the exact one from transformers' logits. Sample: 4000
independent samples. Threshold: p > 1e-4 for the right rules; the negative control, a drafter that
names a law which its tokens were not drawn from, must fall below 1e-8.
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
from forethought.model.sampling.reference import reference_probs
from forethought.speculative.draft import Draft, DraftKind
from forethought.speculative.drafter import DraftRequest
from models import VOCAB, tiny, transformers_model

PROMPT = [5, 17, 33, 60, 41]
SAMPLES = 4000
LAW = SamplingParams(temperature=3.0, top_k=3, max_tokens=3, seed=3, n=SAMPLES, ignore_eos=True)


def next_law(tokens: list[int]) -> list[float]:
    with torch.inference_mode():
        logits = transformers_model(tiny("llama"))(torch.tensor([tokens])).logits[0, -1]
    return reference_probs(logits.tolist(), LAW, PROMPT, tokens[len(PROMPT) :], frozenset([2]))


@functools.cache
def exact() -> dict[tuple[int, ...], float]:
    distributions: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        distributions = {
            (*said, token): mass * chance
            for said, mass in distributions.items()
            for token, chance in enumerate(next_law([*PROMPT, *said]))
            if chance > 0
        }
    return distributions


def p_value(config: DecodingBaseConfig) -> float:
    machine = engine(
        pages=2048, speculative=[config], max_batch_size=400, max_num_tokens=4000, max_length=16
    )
    samples = machine.add(PROMPT, LAW)
    drain(machine)
    assert machine.stats.accepted > SAMPLES / 20, "hardly anything was accepted: nothing is tested"
    counts = Counter(map(tuple, outputs(samples)))
    assert set(counts) <= set(exact())
    expect_empty(machine)
    expected = [SAMPLES * mass for mass in exact().values()]
    return float(chisquare([counts[said] for said in exact()], expected).pvalue)


TWIN = {"speculative_model": tiny("llama")}
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0]]


@pytest.mark.parametrize(
    "config",
    [
        DraftTargetDecodingConfig(max_draft_len=2, draft_sampling="sampled", **TWIN),
        DraftTargetDecodingConfig(draft_choices=TREE, draft_sampling="sampled", **TWIN),
        DraftTargetDecodingConfig(draft_choices=TREE, **TWIN),
    ],
    ids=["chain with q", "tree without replacement", "tree of points"],
)
def test_sampled_outputs_follow_the_law_of_plain_decoding(config: DecodingBaseConfig) -> None:
    assert p_value(config) > 1e-4


def test_the_test_finds_a_drafter_that_names_a_law_its_tokens_are_not_from() -> None:
    def liar(request: DraftRequest) -> Draft:
        """The likeliest token, said to be drawn from the flat law of three."""
        distribution = torch.tensor(next_law_of(tuple(request.tokens)))
        flat = (distribution > 0) / (distribution > 0).sum()
        return Draft([int(distribution.argmax())], None, DraftKind.IID, flat.float()[None])

    @functools.cache
    def next_law_of(tokens: tuple[int, ...]) -> list[float]:
        return next_law(list(tokens))

    config = UserProvidedDecodingConfig(max_draft_len=1, drafter=drafters.PerRequest(liar))
    assert p_value(config) < 1e-8


def test_the_exact_law_has_all_outcomes() -> None:
    assert len(exact()) == 27
    assert sum(exact().values()) == pytest.approx(1.0)
    assert min(exact().values()) * SAMPLES > 5
    assert all(0 <= token < VOCAB for token in itertools.chain(*exact()))
