"""Beam search over steps: the beams with the best scores are continued, several times each.

With N beams and width M::

    N first steps -> score -> the best N/M -> M next steps of each -> score -> the best N/M -> ...

An answer that is finished keeps its place among the N/M as long as it is one of the best, and the
search ends when all of these are finished. (Where finished beams give up their places at once, as
in search-and-learn, N beams are continued until no one is left.) Beams of the same text are one.

With ``lookahead`` K a beam is ranked by the score of what K further greedy steps make of it, which
are not kept: the lookahead search of the paper, MCTS without its random choices.

The defaults of ``width``, ``max_steps`` and ``aggregation`` are those of search-and-learn.
"""

from __future__ import annotations

from typing_extensions import override

from forethought.methods.parts.search import (
    LookaheadSearchController,
    Search,
    beam_stages,
    best_of,
    expect_multiple,
)
from forethought.scaffolding.parallel import Process
from forethought.scaffolding.settings import PositiveInt, setting, with_settings


@with_settings
class BeamSearchController(LookaheadSearchController):
    """Continues the beams with the best scores, step by step, and returns the best answer."""

    paper = (
        'Snell et al., "Scaling LLM Test-Time Compute Optimally can be More Effective than '
        'Scaling Model Parameters", 2024. arXiv 2408.03314'
    )

    name = "beam_search"

    default_sample_num: PositiveInt = setting(16, "Beams, a multiple of `width`.")
    width: PositiveInt = setting(4, "Next steps that each continued beam gets.")

    @override
    def check_count(self, count: int) -> None:
        expect_multiple(count, self.width, self.name)

    @override
    def search(self, search: Search, count: int) -> Process:
        beams_kept, width = [search.root], count
        while not all(beam.finished for beam in beams_kept):
            going = [beam for beam in beams_kept if not beam.finished]
            grown = yield from search.step([(b, k) for b in going for k in range(width)])
            ended = [beam for beam in beams_kept if beam.finished]
            beams = yield from search.merge([*ended, *grown])
            yield from search.score(beams)
            beams_kept, width = best_of(beams, count // self.width), self.width
            why = f"it is not among the best {len(beams_kept)}"
            yield from beam_stages(
                "pruned", why, [beam for beam in beams if beam not in beams_kept]
            )
