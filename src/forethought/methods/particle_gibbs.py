"""Particle Gibbs: particle filtering repeated, each time with an answer of the last time kept.

One sweep of particle filtering depends on its first draws. Here a further sweep follows, in which
one particle is the finished answer that was drawn at the end of the last one, the reference: at
each step it competes with the new particles as it was at that step, can be drawn as their ancestor,
and is never lost. Its steps are not generated again, and on the engine new particles fork from it.

(conditional sequential Monte Carlo of Andrieu et al. 2010). The numbers of particles and sweeps are
our defaults.
"""

from __future__ import annotations

from dataclasses import KW_ONLY

from typing_extensions import override

from forethought.errors import ParameterError
from forethought.methods.parts.particles import (
    ParticleSettings,
    Resampling,
    Weighting,
    draw,
    sweep,
)
from forethought.methods.parts.search import Beam, LookaheadSearchController, Search
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.settings import PositiveInt, setting, with_settings


@with_settings
class ParticleGibbsController(LookaheadSearchController):
    """Repeats particle filtering with an answer of the last sweep as a particle of the next one.

    The answer with the highest score of all sweeps is returned.
    """

    paper = (
        'Puri et al., "A Probabilistic Inference Approach to Inference-Time Scaling of LLMs '
        'using Particle-Based Monte Carlo Methods", 2025. arXiv 2502.01618'
    )

    name = "particle_gibbs"

    default_sample_num: PositiveInt = setting(4, "Particles of a sweep, the references included.")
    num_iterations: PositiveInt = setting(2, "Sweeps.")
    _: KW_ONLY
    num_references: PositiveInt = setting(
        1, "Answers that are kept for the next sweep; fewer than there are particles."
    )
    weighting: Weighting | None = setting(
        None,
        '`"odds"`, r / (1 - r), of scores that are probabilities; `"softmax"`, the exponential '
        "function, of others; None: odds if there is a reward controller.",
    )
    resampling: Resampling = setting(
        "multinomial", '`"multinomial"` draws independently, `"systematic"` with less noise.'
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        weighting = self.weighting or ("softmax" if self.reward_controller is None else "odds")
        self.particles = ParticleSettings(weighting, self.resampling)

    @override
    def check_count(self, count: int) -> None:
        if self.num_iterations > 1 and count <= self.num_references:
            raise ParameterError(
                "particle_gibbs has no particle to draw",
                f"of {count} particles {self.num_references} are references",
                "Give more particles than num_references",
            )

    def fan_out(self) -> int:
        """The particles at each step of each iteration."""
        return super().fan_out() * self.num_iterations

    @override
    def search(self, search: Search, count: int) -> Process:
        references: list[Beam] = []
        for number in range(self.num_iterations):
            particles, shares = yield from sweep(search, count, self.particles, number, references)
            drawn = draw(shares, self.num_references, "multinomial", search.random)
            references = [particles[index] for index in drawn]
