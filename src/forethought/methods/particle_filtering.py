"""Particle filtering: after each step, particles are drawn anew in proportion to their weights.

A beam search keeps what has the best scores, and is misled where these are wrong. Particles are
drawn at random instead: the weight of one is the odds of its score, so scores of .9, .8 and .5 give
it a chance of .643, .286 and .071 in each draw, and a particle may come several times::

    N first steps -> score -> draw N with replacement -> a next step of each -> score -> ...

Finished particles keep their weight and are drawn with the others. The search ends when all are.

``annealing`` is the entropic form: early on, where few particles have most of the weight, the
weights are flattened, so that not all come from the same one. ``lookahead`` takes the score of a
particle from what greedy steps beyond it make of it.

Paper: Puri et al., "A Probabilistic Inference Approach to Inference-Time Scaling of LLMs using
Particle-Based Monte Carlo Methods", 2025. arXiv 2502.01618. Annealing and look-ahead:
Giannone et al., "Mitigating Premature Exploitation in Particle-based Monte Carlo for Inference-Time
Scaling", 2025; its temperature is the one of its_hub. The number of particles is our default.
"""

from __future__ import annotations

from typing import Literal

from pydantic import TypeAdapter

from forethought.methods.parts.particles import (
    RESAMPLING,
    WEIGHTING,
    ParticleSettings,
    Resampling,
    Weighting,
    draw,
    sweep,
)
from forethought.methods.parts.search import MAX_STEPS, STEP_TOKEN, Search, SearchController
from forethought.rewards.prm_controller import StepAggregation
from forethought.scaffolding.controller import Controller
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.settings import BOOL, OnFailure, validated

Selection = Literal["argmax", "sample"]
_SELECTION: TypeAdapter[Selection] = TypeAdapter(Selection)


class ParticleFilteringController(SearchController):
    """Draws the beams that go on in proportion to weights from their scores (particle filtering).

    Args:
        generation_controller: generates the steps; it is given the tasks of all particles at once.
        reward_controller: scores particles, best as a process reward model; None: the mean
            log-probability of their tokens.
        default_sample_num: particles.
        weighting: ``"odds"``, r / (1 - r), of scores that are probabilities; ``"softmax"``: the
            exponential function of scores that are none; None: odds if there is a reward
            controller, else softmax.
        resampling: ``"multinomial"`` draws independently, ``"systematic"`` with less noise.
        annealing: entropic particle filtering: flatten the weights early on where few particles
            have most of them.
        selection: of the finished particles, ``"argmax"`` returns the one with the highest score,
            ``"sample"`` draws one by their weights.
        lookahead: greedy steps beyond a particle that its score is taken from.
        step_token: text that ends a step.
        max_steps: steps of an answer; the last one goes on to its end.
        aggregation: what makes one score of those of the steps: ``"last"``, ``"min"``,
            ``"product"`` or ``"mean"``.
        on_failure: ``"drop"`` goes on without particles whose generation failed.

    Raises:
        ParameterError: a setting of the wrong kind.
    """

    name = "particle_filtering"

    def __init__(
        self,
        generation_controller: Controller,
        reward_controller: Controller | None = None,
        default_sample_num: int = 8,
        *,
        weighting: Weighting | None = None,
        resampling: Resampling = "multinomial",
        annealing: bool = False,
        selection: Selection = "argmax",
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
        given = validated("weighting", weighting, WEIGHTING)
        self.particles = ParticleSettings(
            given or ("softmax" if reward_controller is None else "odds"),
            validated("resampling", resampling, RESAMPLING),
            validated("annealing", annealing, BOOL),
        )
        self.selection = validated("selection", selection, _SELECTION)

    def search(self, search: Search, count: int) -> Process:
        """See ``SearchController``."""
        particles, shares = yield from sweep(search, count, self.particles)
        if self.selection == "argmax":
            return None
        (index,) = draw(shares, 1, "multinomial", search.random)
        return particles[index]
