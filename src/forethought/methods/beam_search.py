"""Beam search over steps: the beams with the best scores are continued, several times each.

With N beams and width M::

    N first steps -> score -> the best N/M -> M next steps of each -> score -> the best N/M -> ...

An answer that is finished keeps its place among the N/M as long as it is one of the best, and the
search ends when all of these are finished. (Where finished beams give up their places at once, as
in search-and-learn, N beams are continued until no one is left.) Beams of the same text are one.

With ``lookahead`` K a beam is ranked by the score of what K further greedy steps make of it, which
are not kept: the lookahead search of the paper, MCTS without its random choices.

Paper: Snell et al., "Scaling LLM Test-Time Compute Optimally can be More Effective than Scaling
Model Parameters", 2024. arXiv 2408.03314. The defaults of ``width``, ``max_steps`` and
``aggregation`` are those of search-and-learn.
"""

from __future__ import annotations

from forethought.methods.parts.search import (
    MAX_STEPS,
    STEP_TOKEN,
    Search,
    SearchController,
    beam_stages,
    best_of,
    expect_multiple,
    merged,
)
from forethought.rewards.prm_controller import StepAggregation
from forethought.scaffolding.controller import Controller
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.settings import POSITIVE_INT, OnFailure, validated


class BeamSearchController(SearchController):
    """Continues the beams with the best scores, step by step, and returns the best answer.

    Args:
        generation_controller: generates the steps; it is given the tasks of all beams at once.
        reward_controller: scores beams, best as a process reward model; None: the mean
            log-probability of their tokens.
        default_sample_num: beams, a multiple of ``width``.
        width: next steps that each continued beam gets.
        lookahead: greedy steps beyond a beam that its score is taken from.
        step_token: text that ends a step.
        max_steps: steps of an answer; the last one goes on to its end.
        aggregation: what makes one score of those of the steps: ``"last"``, ``"min"``,
            ``"product"`` or ``"mean"``.
        on_failure: ``"drop"`` goes on without beams whose generation failed.

    Raises:
        ParameterError: a setting of the wrong kind.
    """

    name = "beam_search"

    def __init__(
        self,
        generation_controller: Controller,
        reward_controller: Controller | None = None,
        default_sample_num: int = 16,
        width: int = 4,
        *,
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
        self.width = validated("width", width, POSITIVE_INT)

    def check_count(self, count: int) -> None:
        """See ``SearchController``."""
        expect_multiple(count, self.width, self.name)

    def search(self, search: Search, count: int) -> Process:
        """See ``SearchController``."""
        kept, width = [search.root], count
        while not all(beam.finished for beam in kept):
            going = [beam for beam in kept if not beam.finished]
            grown = yield from search.step([(b, k) for b in going for k in range(width)])
            beams = merged([*(beam for beam in kept if beam.finished), *grown])
            yield from search.score(beams)
            kept, width = best_of(beams, count // self.width), self.width
            why = f"it is not among the best {len(kept)}"
            yield from beam_stages("pruned", why, [beam for beam in beams if beam not in kept])
