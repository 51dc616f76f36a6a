"""Statistical test: do sampled outputs follow the distribution of plain decoding?

Drafts that are drawn at random change which tokens a seed gives, so distributions are compared in
place of tokens.

Statistic: Pearson's chi-square of the joint distribution of the first ``LENGTH`` tokens after one
prompt against the exact one, with ``top_k`` so small that all outcomes can be listed; outcomes
expected fewer than ``MIN_EXPECTED`` times count as one. Sample: ``NUM_SAMPLES`` independent
generations. Threshold: ``P_VALUE``; one correct drafter in a million falls below it. Power: a
distribution at a total variation of 0.1 is hundreds of standard deviations away.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from forethought.config.sampling import SamplingParams
from forethought.engine.engine import Engine

LENGTH, WIDTH = 4, 3
"""Tokens of an outcome, and possible tokens at each position."""
NUM_SAMPLES, SAMPLES_PER_SEED = 3000, 100
"""Generations in all, and per seed."""
MIN_EXPECTED = 5.0
P_VALUE = 1e-6
TEMPERATURE = 3.0
"""High, so that a model of low entropy has several outcomes too."""
SAMPLED = SamplingParams(
    temperature=TEMPERATURE,
    top_k=WIDTH,
    max_tokens=LENGTH,
    n=SAMPLES_PER_SEED,
    ignore_eos=True,
)

Distribution = Mapping[tuple[int, ...], float]
"""Outcome -> its probability."""


def sample(machine: Engine, prompt: Sequence[int]) -> list[Sequence[int]]:
    """``NUM_SAMPLES`` outputs of the engine."""
    params = [SAMPLED.replace(seed=seed) for seed in range(NUM_SAMPLES // SAMPLES_PER_SEED)]
    samples = [live for one in params for live in machine.add(prompt, one)]
    while machine.has_work:
        for event in machine.step():
            assert event.error is None, event.error
    return [live.output for live in samples]


def exact_distribution(machine: Engine, prompt: Sequence[int]) -> Distribution:
    """The joint distribution of the tokens under ``SAMPLED``, from the model's log-probabilities;
    ``machine`` is an engine without drafters.
    """
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=WIDTH, ignore_eos=True)
    for _ in range(LENGTH):
        live = {machine.add([*prompt, *prefix], params)[0].id: prefix for prefix in distribution}
        longer: dict[tuple[int, ...], float] = {}
        while machine.has_work:
            for event in machine.step():
                assert event.error is None, event.error
                assert event.logprobs is not None, "they were requested"
                prefix = live[event.sequence.id]
                logprobs = {token: entry.logprob for token, entry in event.logprobs[0].items()}
                for token, prob in _top_probs(logprobs).items():
                    longer[(*prefix, token)] = distribution[prefix] * prob
        distribution = longer
    return distribution


def _top_probs(logprobs: Mapping[int, float]) -> dict[int, float]:
    """The distribution over the most probable tokens at ``TEMPERATURE``."""
    best = sorted(logprobs, key=logprobs.__getitem__, reverse=True)[:WIDTH]
    weights = [math.exp((logprobs[token] - logprobs[best[0]]) / TEMPERATURE) for token in best]
    return {token: weight / sum(weights) for token, weight in zip(best, weights, strict=True)}


def p_value(outputs: Iterable[Sequence[int]], distribution: Distribution) -> float:
    """The p-value of the outputs under the distribution; 0 if one of them is impossible."""
    counts = Counter(map(tuple, outputs))
    if not set(counts) <= set(distribution):
        return 0.0
    total = sum(counts.values())
    cells = [
        (counts[outcome], total * mass)
        for outcome, mass in distribution.items()
        if total * mass >= MIN_EXPECTED
    ]
    rest = (
        total - sum(observed for observed, _ in cells),
        total - sum(expected for _, expected in cells),
    )
    if rest[1] >= MIN_EXPECTED:
        cells.append(rest)
    statistic = sum((observed - expected) ** 2 / expected for observed, expected in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
