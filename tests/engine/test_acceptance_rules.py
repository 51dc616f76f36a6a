"""Rules that give up exactness: on where asked for, marked, and nowhere else."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import drafters
from engines import drain, engine, expect_empty, outputs
from forethought.config.drafters import UserProvidedDecodingConfig
from forethought.config.medusa import MedusaDecodingConfig
from forethought.config.sampling import SamplingParams, SpeculationParams
from forethought.config.speculation import DecodingBaseConfig
from medusa_heads import random_heads
from models import greedy, prompts, tiny

PROMPTS = prompts((4, 9, 17))
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
SAMPLED = GREEDY.replace(temperature=0.8, seed=4)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_heads(tmp_path_factory.mktemp("heads"))


def run(configs: list[DecodingBaseConfig], params: SamplingParams) -> list[Any]:
    machine = engine(pages=128, speculative=configs)
    sequences = [machine.add(prompt, params)[0] for prompt in PROMPTS]
    drain(machine)
    expect_empty(machine)
    return sequences


def typical(heads: Path, threshold: float = 1e-4) -> list[DecodingBaseConfig]:
    return [MedusaDecodingConfig(speculative_model=heads, posterior_threshold=threshold)]


def test_typical_acceptance_accepts_more_and_marks_what_it_made(heads: Path) -> None:
    exact = run([MedusaDecodingConfig(speculative_model=heads)], SAMPLED)
    loose = run(typical(heads), SAMPLED)
    assert sum(each.metrics.accepted for each in loose) > 20
    assert sum(each.metrics.accepted for each in loose) > sum(e.metrics.accepted for e in exact)
    assert all(each.metrics.lossy and not each.metrics.synthetic for each in loose)
    assert not any(each.metrics.lossy for each in exact)
    assert outputs(exact) == outputs(run([], SAMPLED))
    assert outputs(loose) != outputs(exact)


def test_greedy_requests_stay_exact_under_typical_acceptance(heads: Path) -> None:
    found = run(typical(heads), GREEDY)
    assert outputs(found) == greedy(tiny("llama"), PROMPTS, 60)
    assert not any(each.metrics.lossy for each in found)


def test_a_request_without_drafts_is_exact_and_not_marked(heads: Path) -> None:
    off = SAMPLED.replace(speculation=SpeculationParams(enabled=False))
    found = run(typical(heads), off)
    assert outputs(found) == outputs(run([], SAMPLED))
    assert not any(each.metrics.lossy for each in found)


def synthetic(rate: float | None = None, length: float | None = None) -> list[DecodingBaseConfig]:
    drafter = drafters.PerRequest(lambda request: [7] * request.max_draft_len)
    synthetic = {"synthetic_acceptance": rate, "synthetic_acceptance_length": length}
    return [UserProvidedDecodingConfig(max_draft_len=3, drafter=drafter, **synthetic)]


@pytest.mark.parametrize(("rate", "per_step"), [(0.0, 1.0), (1.0, 4.0)])
def test_synthetic_acceptance_takes_all_or_none_at_its_ends(rate: float, per_step: float) -> None:
    for each in run(synthetic(rate), GREEDY.replace(max_tokens=61)):
        assert each.metrics.mean_acceptance_length == per_step
        assert each.metrics.synthetic
        assert each.metrics.lossy


def test_synthetic_acceptance_has_its_rate() -> None:
    """Mean over 3 x 200 tokens with rate 0.7: 1 + 0.7 + 0.49 + 0.343 = 2.533, within 0.25."""
    machine = engine(pages=256, speculative=synthetic(0.7), max_length=230)
    params = GREEDY.replace(max_tokens=200)
    sequences = [machine.add(prompt, params)[0] for prompt in PROMPTS]
    drain(machine)
    found = sum((each.metrics for each in sequences[1:]), sequences[0].metrics)
    assert found.mean_acceptance_length == pytest.approx(2.533, abs=0.25)


@pytest.mark.parametrize("length", [1.0, 2.0, 2.6, 3.25, 4.0])
def test_a_forced_length_is_the_tokens_of_a_step_on_average(length: float) -> None:
    """Mean over about 200 steps; each takes one of the two whole numbers around the length."""
    machine = engine(pages=512, speculative=synthetic(length=length), max_length=430)
    params = GREEDY.replace(max_tokens=int(70 * length))
    sequences = [machine.add(prompt, params)[0] for prompt in PROMPTS]
    drain(machine)
    found = sum((each.metrics for each in sequences[1:]), sequences[0].metrics)
    assert found.mean_acceptance_length == pytest.approx(length, abs=0.12)
    assert found.synthetic
    surely = found.accepted_by_position[: int(length) - 1]
    ends = 3 * len(PROMPTS)  # where the generation is nearly over, drafts are shorter
    assert all(steps >= found.steps - ends for steps in surely)
    assert len(found.accepted_by_position) <= math.ceil(length) - 1


def test_synthetic_acceptance_is_a_function_of_the_seed() -> None:
    lengths = [
        [each.metrics.accepted_by_position for each in run(synthetic(0.5), SAMPLED)]
        for _ in range(2)
    ]
    assert lengths[0] == lengths[1]
