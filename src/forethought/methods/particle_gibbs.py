"""Particle Gibbs: particle filtering repeated, each time with an answer of the last time kept.

One sweep of particle filtering depends on its first draws. Here a further sweep follows, in which
one particle is the finished answer that was drawn at the end of the last one, the reference: at
each step it competes with the new particles as it was at that step, can be drawn as their ancestor,
and is never lost. Its steps are not generated again, and on the engine new particles fork from it.

Paper: Puri et al., "A Probabilistic Inference Approach to Inference-Time Scaling of LLMs using
Particle-Based Monte Carlo Methods", 2025. arXiv 2502.01618 (conditional sequential Monte
Carlo of Andrieu et al. 2010). The numbers of particles and sweeps are our defaults.
"""

from __future__ import annotations

from forethought.errors import ParameterError
from forethought.methods.parts.particles import (
    RESAMPLING,
    WEIGHTING,
    ParticleSettings,
    Resampling,
    Weighting,
    draw,
    sweep,
)
from forethought.methods.parts.search import MAX_STEPS, STEP_TOKEN, Beam, Search, SearchController
from forethought.rewards.prm_controller import StepAggregation
from forethought.scaffolding.controller import Controller
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.settings import POSITIVE_INT, OnFailure, validated


class ParticleGibbsController(SearchController):
    """Repeats particle filtering with an answer of the last sweep as a particle of the next one.

    The answer with the highest score of all sweeps is returned.

    Args:
        generation_controller: generates the steps; it is given the tasks of all particles at once.
        reward_controller: scores particles, best as a process reward model; None: the mean
            log-probability of their tokens.
        default_sample_num: particles of a sweep, the references included.
        num_iterations: sweeps.
        num_references: answers that are kept for the next sweep; fewer than there are particles.
        weighting: ``"odds"``, r / (1 - r), of scores that are probabilities; ``"softmax"``: the
            exponential function of scores that are none; None: odds if there is a reward
            controller, else softmax.
        resampling: ``"multinomial"`` draws independently, ``"systematic"`` with less noise.
        lookahead: greedy steps beyond a particle that its score is taken from.
        step_token: text that ends a step.
        max_steps: steps of an answer; the last one goes on to its end.
        aggregation: what makes one score of those of the steps: ``"last"``, ``"min"``,
            ``"product"`` or ``"mean"``.
        on_failure: ``"drop"`` goes on without particles whose generation failed.

    Raises:
        ParameterError: a setting of the wrong kind.
    """

    name = "particle_gibbs"

    def __init__(
        self,
        generation_controller: Controller,
        reward_controller: Controller | None = None,
        default_sample_num: int = 4,
        num_iterations: int = 2,
        *,
        num_references: int = 1,
        weighting: Weighting | None = None,
        resampling: Resampling = "multinomial",
        lookahead: int = 0,
        step_token: str = STEP_TOKEN,
        max_steps: int = MAX_STEPS,
        aggregation: StepAggregation = "last",
        on_failure: OnFailure = "raise",
    ) -> None:
        super().__init__(
            generation_controller,
            reward_controller,
            default_sample_num=default_sample_num,
            lookahead=lookahead,
            step_token=step_token,
            max_steps=max_steps,
            aggregation=aggregation,
            on_failure=on_failure,
        )
        self.num_iterations = validated("num_iterations", num_iterations, POSITIVE_INT)
        self.num_references = validated("num_references", num_references, POSITIVE_INT)
        given = validated("weighting", weighting, WEIGHTING)
        self.particles = ParticleSettings(
            given or ("softmax" if reward_controller is None else "odds"),
            validated("resampling", resampling, RESAMPLING),
        )

    def check_count(self, count: int) -> None:
        """See ``SearchController``."""
        if self.num_iterations > 1 and count <= self.num_references:
            raise ParameterError(
                "particle_gibbs has no particle to draw",
                f"of {count} particles {self.num_references} are references",
                "Give more particles than num_references",
            )

    def fan_out(self) -> int:
        """The particles at each step of each iteration."""
        return super().fan_out() * self.num_iterations

    def search(self, search: Search, count: int) -> Process:
        """See ``SearchController``."""
        references: list[Beam] = []
        for number in range(self.num_iterations):
            particles, shares = yield from sweep(search, count, self.particles, number, references)
            drawn = draw(shares, self.num_references, "multinomial", search.random)
            references = [particles[index] for index in drawn]
