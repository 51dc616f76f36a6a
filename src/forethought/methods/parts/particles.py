"""Particles: answers that are continued, weighted by their scores, and drawn anew after each step.

Sequential Monte Carlo of Puri et al. 2025 ("A Probabilistic Inference Approach to Inference-Time
Scaling of LLMs using Particle-Based Monte Carlo Methods", arXiv 2502.01618): the score r
of a process reward model is the probability that the answer so far is good, and the weight of its
particle is the odds r / (1 - r). Scores of .9, .8 and .5 are odds of 9, 4 and 1, and so
probabilities of .643, .286 and .071 to be drawn.

``sweep`` is one pass from the first steps to finished answers, for the methods that make one or
several of them.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from forethought.errors import ParameterError
from forethought.methods.parts.search import Beam, Search, beam_stages
from forethought.scaffolding.parallel import Process

Weighting = Literal["odds", "softmax"]
Resampling = Literal["multinomial", "systematic"]
_SMALLEST = 1e-7
"""Scores are kept so far away from 0 and 1."""


@dataclass(frozen=True, slots=True)
class ParticleSettings:
    """How particles are weighted and drawn."""

    weighting: Weighting
    resampling: Resampling = "multinomial"
    annealing: bool = False
    """Whether the weights are flattened early on where few particles have most of them."""


def log_weights(scores: Sequence[float], weighting: Weighting) -> list[float]:
    """The logarithm of each particle's weight.

    Args:
        scores: of the particles.
        weighting: ``"odds"`` of scores that have to be probabilities; ``"softmax"``: scores are
            logarithms already.
    """
    if weighting == "softmax":
        return list(scores)
    wrong = [score for score in scores if not 0.0 <= score <= 1.0 and score != -math.inf]
    if wrong:
        raise ParameterError(
            "particles cannot be weighted by odds",
            f"a score is {wrong[0]}, and no probability",
            'Use weighting="softmax"',
        )
    clipped = [min(max(score, _SMALLEST), 1.0 - _SMALLEST) for score in scores]
    return [math.log(score / (1.0 - score)) for score in clipped]


def probabilities(logs: Sequence[float], temperature: float = 1.0) -> list[float]:
    """The probabilities of the particles, proportional to ``weight ** (1/temperature)``.

    Uniform if all weights are 0.
    """
    top = max(logs)
    if top == -math.inf:
        return [1.0 / len(logs)] * len(logs)
    weights = [math.exp((value - top) / temperature) for value in logs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def effective_size(shares: Sequence[float]) -> float:
    """The effective sample size: from 1, one particle has all the weight, to their number."""
    return 1.0 / math.fsum(share * share for share in shares)


def annealing_temperature(shares: Sequence[float], progress: float) -> float:
    """The temperature of the weights of entropic particle filtering, at least 1.

    As in its_hub, it is above 1 in the first half of the steps, where the effective sample size is
    below half of the particles.

    Args:
        shares: probabilities at temperature 1.
        progress: share of the steps that are done.
    """
    ratio = effective_size(shares) / len(shares)
    if ratio >= 0.5 or progress >= 0.5:
        return 1.0
    return max(1.0, (1.0 - progress) / ratio)


def draw(
    shares: Sequence[float], count: int, resampling: Resampling, source: random.Random
) -> list[int]:
    """``count`` indices drawn with replacement.

    Args:
        shares: probabilities.
        count: how many.
        resampling: ``"multinomial"``: independently; ``"systematic"``: at evenly spaced points with
            one random offset, so that an index comes ``count * share`` times, rounded up or down.
        source: of random numbers.
    """
    if resampling == "systematic":
        offset = source.random()
        points = [(number + offset) / count for number in range(count)]
    else:
        points = [source.random() for _ in range(count)]
    ends = list(accumulate(shares))
    last = max(index for index, share in enumerate(shares) if share > 0.0)
    return [min(bisect_right(ends, point * ends[-1]), last) for point in points]


def sweep(
    search: Search,
    count: int,
    settings: ParticleSettings,
    number: int = 0,
    references: Sequence[Beam] = (),
) -> Process:
    """Particles from the first step until all are finished.

    Args:
        search: that they belong to.
        count: of particles.
        settings: how they are weighted and drawn.
        number: of the sweep; each draws other samples.
        references: finished beams that the first particles follow without being drawn anew; their
            steps are not generated again.

    Returns:
        The finished particles, and their probabilities.
    """
    paths = [reference.path for reference in references]
    particles = [search.root] * count
    first, step = number * count, 0
    while True:
        followed = [path[min(step, len(path) - 1)] for path in paths]
        rest = particles[len(paths) :]
        slots = [slot for slot, beam in enumerate(rest) if not beam.finished]
        requests = [(rest[slot], first + len(paths) + slot) for slot in slots]
        grown = (yield from search.step(requests)) if requests else []
        particles = [*followed, *(beam for beam in rest if beam.finished), *grown]
        yield from search.score(particles)
        step += 1
        shares = _shares(particles, settings, step / search.settings.max_steps)
        if all(beam.finished for beam in particles):
            return particles, shares
        drawn = draw(shares, count - len(paths), settings.resampling, search.random)
        before, particles = particles, [*followed, *(particles[index] for index in drawn)]
        dropped = [beam for beam in dict.fromkeys(before) if beam not in particles]
        yield from beam_stages("pruned", "it was not drawn", dropped)


def _shares(beams: Sequence[Beam], settings: ParticleSettings, progress: float) -> list[float]:
    scores = [-math.inf if beam.score is None else beam.score for beam in beams]
    logs = log_weights(scores, settings.weighting)
    shares = probabilities(logs)
    if not settings.annealing:
        return shares
    return probabilities(logs, annealing_temperature(shares, progress))
