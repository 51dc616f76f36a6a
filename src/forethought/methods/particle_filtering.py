"""Particle filtering: after each step, particles are drawn anew in proportion to their weights.

A beam search keeps what has the best scores, and is misled where these are wrong. Particles are
drawn at random instead: the weight of one is the odds of its score, so scores of .9, .8 and .5 give
it a chance of .643, .286 and .071 in each draw, and a particle may come several times::

    N first steps -> score -> draw N with replacement -> a next step of each -> score -> ...

Finished particles keep their weight and are drawn with the others. The search ends when all are.

``annealing`` is the entropic form: early on, where few particles have most of the weight, the
weights are flattened, so that not all come from the same one. ``lookahead`` takes the score of a
particle from what greedy steps beyond it make of it.

Annealing and look-ahead: Giannone et al., "Mitigating Premature Exploitation in Particle-based
Monte Carlo for Inference-Time Scaling", 2025; its temperature is the one of its_hub. The number of
particles is our default.
"""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Literal

from typing_extensions import override

from forethought.methods.parts.particles import (
    ParticleSettings,
    Resampling,
    Weighting,
    draw,
    sweep,
)
from forethought.methods.parts.search import LookaheadSearchController, Search
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.settings import PositiveInt, setting, with_settings


@with_settings
class ParticleFilteringController(LookaheadSearchController):
    """Draws the beams that go on in proportion to their weights (particle filtering)."""

    paper = (
        'Puri et al., "A Probabilistic Inference Approach to Inference-Time Scaling of LLMs '
        'using Particle-Based Monte Carlo Methods", 2025. arXiv 2502.01618'
    )

    name = "particle_filtering"

    default_sample_num: PositiveInt = setting(8, "Particles.")
    _: KW_ONLY
    weighting: Weighting | None = setting(
        None,
        '`"odds"`, r / (1 - r), of scores that are probabilities; `"softmax"`, the exponential '
        "function, of others; None: odds if there is a reward controller.",
    )
    resampling: Resampling = setting(
        "multinomial", '`"multinomial"` draws independently, `"systematic"` with less noise.'
    )
    annealing: bool = setting(
        False,
        "Entropic particle filtering: flatten the weights early on where few particles have "
        "most of them.",
    )
    selection: Literal["argmax", "sample"] = setting(
        "argmax",
        'Of the finished particles, `"argmax"` returns the one with the highest score, '
        '`"sample"` draws one by their weights.',
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        weighting = self.weighting or ("softmax" if self.reward_controller is None else "odds")
        self.particles = ParticleSettings(weighting, self.resampling, self.annealing)

    @override
    def search(self, search: Search, count: int) -> Process:
        particles, shares = yield from sweep(search, count, self.particles)
        if self.selection == "argmax":
            return None
        (index,) = draw(shares, 1, "multinomial", search.random)
        return particles[index]
