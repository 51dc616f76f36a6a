"""Whether sampled outputs follow the law of plain decoding: a test of chance, declared beforehand.

Drafts that were drawn change which tokens a seed draws, so tokens cannot be compared; laws can.

Statistic: Pearson's chi-square of the joint law of the first ``LENGTH`` tokens after one prompt
against the exact one, with ``top_k`` so small that all outcomes can be listed; outcomes that are
expected fewer than ``FEWEST`` times count as one. Sample: ``SAMPLES`` independent generations.
Threshold: ``P_VALUE``; one right drafter in a million falls below it. What it finds: a law that
differs by a total variation of 0.1 lies hundreds of standard deviations away. Knows nothing about
drafters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from forethought.config.sampling import SamplingParams
from forethought.engine.engine import Engine

LENGTH, WIDTH = 4, 3
"""Tokens of an outcome, and tokens that each of them can be."""
SAMPLES, AT_ONCE = 3000, 100
"""Generations, and how many of them have one seed in common."""
FEWEST = 5.0
P_VALUE = 1e-6
TEMPERATURE = 3.0
"""High, so that a model that is sure of itself has several outcomes all the same."""
SAMPLED = SamplingParams(
    temperature=TEMPERATURE,
    top_k=WIDTH,
    max_tokens=LENGTH,
    n=AT_ONCE,
    ignore_eos=True,
)

Distribution = Mapping[tuple[int, ...], float]
"""Outcome -> its probability."""


def sample(machine: Engine, prompt: Sequence[int]) -> list[Sequence[int]]:
    """``SAMPLES`` outputs, which the caller's engine is made to draw to the end."""
    params = [SAMPLED.replace(seed=seed) for seed in range(SAMPLES // AT_ONCE)]
    samples = [each for one in params for each in machine.add(prompt, one)]
    while machine.has_work:
        for event in machine.step():
            assert event.error is None, event.error
    return [each.output for each in samples]


def exact_distribution(machine: Engine, prompt: Sequence[int]) -> Distribution:
    """The joint law of the tokens that ``SAMPLED`` draws, from the model's log-probabilities.

    Args:
        machine: an engine without drafters.
        prompt: token ids.
    """
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    look = SamplingParams(temperature=0.0, max_tokens=1, logprobs=WIDTH, ignore_eos=True)
    for _ in range(LENGTH):
        live = {machine.add([*prompt, *said], look)[0].id: said for said in distribution}
        longer: dict[tuple[int, ...], float] = {}
        while machine.has_work:
            for event in machine.step():
                assert event.error is None, event.error
                assert event.logprobs is not None, "they were asked for"
                said = live[event.sequence.id]
                logprobs = {token: entry.logprob for token, entry in event.logprobs[0].items()}
                for token, chance in _chances(logprobs).items():
                    longer[(*said, token)] = distribution[said] * chance
        distribution = longer
    return distribution


def _chances(logprobs: Mapping[int, float]) -> dict[int, float]:
    """The law of the likeliest tokens at ``TEMPERATURE``."""
    best = sorted(logprobs, key=logprobs.__getitem__, reverse=True)[:WIDTH]
    weights = [math.exp((logprobs[token] - logprobs[best[0]]) / TEMPERATURE) for token in best]
    return {token: weight / sum(weights) for token, weight in zip(best, weights, strict=True)}


def p_value(outputs: Iterable[Sequence[int]], distribution: Distribution) -> float:
    """How likely outputs are that are as far from the law as these; 0 if one cannot be at all."""
    counts = Counter(map(tuple, outputs))
    if not set(counts) <= set(distribution):
        return 0.0
    total = sum(counts.values())
    cells = [
        (counts[said], total * mass)
        for said, mass in distribution.items()
        if total * mass >= FEWEST
    ]
    rest = total - sum(seen for seen, _ in cells), total - sum(expected for _, expected in cells)
    if rest[1] >= FEWEST:
        cells.append(rest)
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
