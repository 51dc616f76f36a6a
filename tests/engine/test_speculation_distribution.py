"""Sampled outputs with drafts have the distribution of plain decoding, measured in the engine.

Statistic: Pearson's chi-square of the joint distribution of the first three tokens after one
prompt, over its 27 outcomes (top_k = 3), against the exact one from transformers' logits. Sample:
2000 independent samples, of which the rarest outcome is expected 38 times. Threshold: p > 1e-4 for
the right rules; the negative control, a drafter that names a distribution that its tokens were not
sampled from, must fall below 1e-8 (it is at 1e-25).

Of a model with recurrent layers it is the joint distribution of four tokens, over its 16 outcomes
(top_k = 2), in 500 samples, of which the rarest is expected 16 times: drafts are two tokens long,
so that there are states after rejected tokens. Thresholds are the same. Its negative controls are
the drafter above (at 1e-80), and layers that go on from the state after a rejected token (which
give outcomes that cannot be). A draft model with recurrent layers is the target with noise on its
weights; its negative control names a distribution at a sixteenth of the temperature
(at 5e-11).
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

import drafters
from engines import drain, engine, expect_empty, outputs
from forethought.config.drafters import DraftTargetDecodingConfig, UserProvidedDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.engine.engine import Engine
from forethought.kv.recurrent import RecurrentStates
from forethought.model.sampling import TokenContext
from forethought.reference.engine import logits_to_probs as reference_probs
from forethought.speculative.drafter import Draft, Drafter, DraftKind, DraftRequest
from forethought.speculative.sampled_draft import SampledDrafts
from models import VOCAB, tiny, transformers_model
from slow_samplers import slow_probs

PROMPT = [5, 17, 33, 60, 41]
SAMPLES = 2000
SAMPLING = SamplingParams(
    temperature=3.0, top_k=3, max_tokens=3, seed=3, n=SAMPLES, ignore_eos=True
)


HYBRID = SAMPLING.replace(top_k=2, max_tokens=4, n=500)
"""Of the model with recurrent layers."""


@functools.cache
def next_logits(said: tuple[int, ...], architecture: str = "llama") -> list[float]:
    """Of the token after the prompt and what was said."""
    with torch.inference_mode():
        model, tokens = transformers_model(tiny(architecture)), torch.tensor([[*PROMPT, *said]])
        logits: list[float] = model(tokens).logits[0, -1].tolist()
    return logits


@functools.cache
def next_probs(said: tuple[int, ...], architecture: str = "llama") -> tuple[float, ...]:
    """Of the same."""
    sampling = HYBRID if architecture == "qwen3_5" else SAMPLING
    context = TokenContext(sampling, PROMPT, said, frozenset([2]))
    return tuple(reference_probs(next_logits(said, architecture), context))


@functools.cache
def exact(architecture: str = "llama") -> dict[tuple[int, ...], float]:
    distributions: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(HYBRID.max_tokens if architecture == "qwen3_5" else SAMPLING.max_tokens):
        distributions = {
            (*said, token): mass * chance
            for said, mass in distributions.items()
            for token, chance in enumerate(next_probs(said, architecture))
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
    return p_value_of(machine, SAMPLING.replace(temperature=temperature))


def hybrid_p_value(drafter: Drafter | None) -> float:
    """Of the model with recurrent layers; samples that share a prefill are in one batch."""
    configs = [UserProvidedDecodingConfig(max_draft_len=2, drafter=drafter)] if drafter else []
    limits = {"max_batch_size": HYBRID.n, "max_num_tokens": 8000, "max_length": 16}
    machine = engine("qwen3_5", pages=4096, speculative=configs, **limits)
    return p_value_of(machine, HYBRID, "qwen3_5")


def p_value_of(machine: Engine, sampling: SamplingParams, architecture: str = "llama") -> float:
    samples = machine.add(PROMPT, sampling)
    drain(machine)
    if machine.stats.drafted:
        accepted = machine.stats.accepted
        assert accepted > sampling.n / 20, "hardly anything was accepted: nothing is tested"
    counts, probs = Counter(map(tuple, outputs(samples))), exact(architecture)
    expect_empty(machine)
    if set(counts) - set(probs):
        return 0.0
    expected = [sampling.n * mass for mass in probs.values()]
    return float(chisquare([counts[said] for said in probs], expected).pvalue)


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


EXCLUDING = SAMPLING.replace(xtc_probability=0.5, xtc_threshold=0.2)


@functools.cache
def exact_with_xtc() -> dict[tuple[int, ...], float]:
    distributions: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        distributions = {
            (*said, token): mass * chance
            for said, mass in distributions.items()
            for token, chance in enumerate(
                slow_probs(next_logits(said), TokenContext(EXCLUDING, PROMPT, said, frozenset([2])))
            )
            if chance > 0
        }
    return distributions


def p_value_with_xtc(
    config: DecodingBaseConfig | None, probability: float = 0.5, num_steps: int = 1
) -> float:
    configs = [] if config is None else [config]
    limits = {"max_batch_size": 400, "max_num_tokens": 4000, "max_length": 16}
    machine = engine(pages=2048, speculative=configs, **limits)
    machine.num_decode_steps = num_steps
    samples = machine.add(PROMPT, EXCLUDING.replace(xtc_probability=probability))
    drain(machine)
    assert config is None or machine.stats.accepted > SAMPLES / 20
    counts, probs = Counter(map(tuple, outputs(samples))), exact_with_xtc()
    expect_empty(machine)
    assert set(counts) <= set(probs)
    expected = [SAMPLES * mass for mass in probs.values()]
    return float(chisquare([counts[said] for said in probs], expected).pvalue)


@pytest.mark.parametrize(
    ("config", "num_steps"),
    [
        (None, 8),
        (DraftTargetDecodingConfig(draft_choices=TREE, draft_sampling="sampled", **SAME_MODEL), 1),
    ],
    ids=["plain", "tree without replacement"],
)
def test_outputs_with_xtc_have_the_distribution_of_its_definition(
    config: DecodingBaseConfig | None, num_steps: int
) -> None:
    """Of the 27 outcomes, the rarest is expected more than five times in 2000 samples."""
    assert min(exact_with_xtc().values()) * SAMPLES > 5
    assert p_value_with_xtc(config, num_steps=num_steps) > 1e-4


def test_the_test_finds_xtc_with_another_probability() -> None:
    assert p_value_with_xtc(None, probability=0.65) < 1e-8


def test_the_test_finds_another_temperature_in_several_steps() -> None:
    assert p_value(None, num_steps=8, temperature=2.0) < 1e-8


def said_to(request: DraftRequest) -> tuple[int, ...]:
    return tuple(request.tokens[len(PROMPT) :])


def misnamed(architecture: str) -> Drafter:
    """The most probable token, with the uniform distribution of three as its own."""

    def answer(request: DraftRequest) -> Draft:
        distribution = torch.tensor(next_probs(said_to(request), architecture))
        flat = (distribution > 0) / (distribution > 0).sum()
        return Draft([int(distribution.argmax())], None, DraftKind.IID, flat.float()[None])

    return drafters.PerRequest(answer)


def test_the_test_finds_a_drafter_whose_tokens_are_not_from_the_distribution_it_names() -> None:
    config = UserProvidedDecodingConfig(max_draft_len=1, drafter=misnamed("llama"))
    assert p_value(config) < 1e-8


def support(said: tuple[int, ...]) -> list[int]:
    """The tokens that may follow in the model with recurrent layers, the rarest first."""
    probs = next_probs(said, "qwen3_5")
    tokens = [token for token, chance in enumerate(probs) if chance > 0]
    return sorted(tokens, key=lambda token: probs[token])


def flat_chain() -> Drafter:
    """Two tokens, each drawn from the uniform distribution of those that may follow."""
    source = random.Random(5)

    def answer(request: DraftRequest) -> Draft:
        tokens, q = list[int](), torch.zeros(request.max_draft_len, VOCAB)
        for row in q:
            following = support((*said_to(request), *tokens))
            row[following] = 1 / len(following)
            tokens.append(source.choice(following))
        return Draft(tokens, None, DraftKind.IID, q)

    return drafters.PerRequest(answer)


def tree_of_points() -> Drafter:
    """A token that cannot follow and the rarer one that may, and after each of them both."""

    def answer(request: DraftRequest) -> Draft:
        said = said_to(request)
        rarest, other = support(said)
        wrong = next(token for token in range(3, VOCAB) if token not in (rarest, other))
        if request.max_draft_len == 1:
            return Draft([wrong, rarest], (-1, -1))
        return Draft([wrong, rarest, rarest, *support((*said, rarest))], (-1, -1, 0, 1, 1))

    drafter = drafters.PerRequest(answer)
    drafter.nodes = lambda depth: 2 if depth == 1 else 5  # type: ignore[method-assign]
    return drafter


@pytest.mark.parametrize(
    "make",
    [lambda: None, flat_chain, tree_of_points],
    ids=["plain", "chain with q", "tree of points"],
)
def test_samples_of_a_model_with_recurrent_layers_have_the_distribution_of_plain_decoding(
    make: Callable[[], Drafter | None],
) -> None:
    assert hybrid_p_value(make()) > 1e-4


HYBRID_TREE = [[0], [1], [0, 0], [0, 1], [1, 0]]


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with recurrent layers, with other weights by a tenth of their spread."""
    module = copy.deepcopy(transformers_model(tiny("qwen3_5")))
    source = torch.Generator().manual_seed(4)
    for weight in module.parameters():
        noise = torch.randn(weight.shape, generator=source)
        weight.data += 0.1 * noise * weight.std() * (weight.dim() > 1)
    module.save_pretrained(path := tmp_path_factory.mktemp("noisy"))
    return path


def draft_model_p_value(model: Path, **fields: Any) -> float:
    """Of the model with recurrent layers, with such a draft model."""
    config = DraftTargetDecodingConfig(speculative_model=model, **fields)
    limits = {"max_batch_size": HYBRID.n, "max_num_tokens": 8000, "max_length": 16}
    machine = engine("qwen3_5", pages=4096, speculative=[config], **limits)
    p_value = p_value_of(machine, HYBRID, "qwen3_5")
    assert machine.stats.accepted < machine.stats.drafted - HYBRID.n / 20, "nothing is rejected"
    return p_value


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"max_draft_len": 2, "draft_sampling": "sampled"}, marks=pytest.mark.slow),
        {"draft_choices": HYBRID_TREE, "draft_sampling": "sampled"},
        pytest.param({"draft_choices": HYBRID_TREE}, marks=pytest.mark.slow),
    ],
    ids=["chain with q", "tree without replacement", "tree of points"],
)
def test_so_have_samples_with_a_draft_model_that_has_recurrent_layers_too(
    noisy: Path, fields: dict[str, Any]
) -> None:
    assert draft_model_p_value(noisy, **fields) > 1e-4


def test_the_test_finds_a_draft_model_whose_samples_are_not_from_the_distribution_it_names(
    monkeypatch: pytest.MonkeyPatch, noisy: Path
) -> None:
    named = SampledDrafts.q

    def sharper(drafts: SampledDrafts) -> dict[int, Tensor]:
        return {row: (16 * q.log()).softmax(-1) for row, q in named(drafts).items()}

    monkeypatch.setattr(SampledDrafts, "q", sharper)
    assert draft_model_p_value(noisy, max_draft_len=2, draft_sampling="sampled") < 1e-8


def test_the_test_finds_that_drafter_for_a_model_with_recurrent_layers() -> None:
    assert hybrid_p_value(misnamed("qwen3_5")) < 1e-8


def test_the_test_finds_layers_that_go_on_from_a_rejected_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The token after the last one of a row, where it was drafted and has a state."""
    state = RecurrentStates.get
    monkeypatch.setattr(
        RecurrentStates,
        "get",
        lambda states, slot: state(states, slot + 1 if slot + 1 in states else slot),
    )
    assert hybrid_p_value(flat_chain()) < 1e-8


def test_the_exact_distribution_has_all_outcomes() -> None:
    for architecture, samples, outcomes in (("llama", SAMPLES, 27), ("qwen3_5", HYBRID.n, 16)):
        probs = exact(architecture)
        assert len(probs) == outcomes
        assert sum(probs.values()) == pytest.approx(1.0)
        assert min(probs.values()) * samples > 5
        assert all(0 <= token < VOCAB for token in itertools.chain(*probs))
