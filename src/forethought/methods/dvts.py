"""Diverse verifier tree search: independent greedy searches, so that not all beams become alike.

N samples of width M are N/M subtrees. Each begins with M first steps of its own, keeps the best of
them, continues it M times, keeps the best, and so on until that one is finished. No subtree waits
for another one. All answers that were finished on the way are candidates.

Hugging Face blog; the defaults of ``width``, ``max_steps`` and ``aggregation`` are those of its
code, search-and-learn. There ``lookahead`` is a part of the algorithm too, 0 by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Any

from typing_extensions import override

from forethought.methods.parts.search import (
    LookaheadSearchController,
    Search,
    beam_stages,
    best_of,
    expect_multiple,
)
from forethought.scaffolding.parallel import ParallelProcess, Process
from forethought.scaffolding.settings import OnFailure, PositiveInt, setting, with_settings


@with_settings
class DVTSController(LookaheadSearchController):
    """Searches greedily in several independent subtrees, and returns the best of their answers."""

    paper = 'Beeching, Tunstall and Rush, "Scaling test-time compute with open models", 2024'

    name = "dvts"

    default_sample_num: PositiveInt = setting(
        16, "Beams of all subtrees together, a multiple of `width`."
    )
    width: PositiveInt = setting(4, "Next steps among which a subtree chooses.")
    _: KW_ONLY
    on_failure: OnFailure = setting(
        "raise", '`"drop"` goes on without what failed: a beam, or a subtree with all its beams.'
    )

    @override
    def check_count(self, count: int) -> None:
        expect_multiple(count, self.width, self.name)

    @override
    def search(self, search: Search, count: int) -> Process:
        starts = range(0, count, self.width)
        subtrees = [_Subtree(search, range(start, start + self.width)) for start in starts]
        process = ParallelProcess(
            subtrees, [[] for _ in subtrees], on_failure=search.settings.on_failure
        )
        yield process
        if not search.answers:
            raise next(branch.error for branch in process.branches if branch.error is not None)


class _Subtree:
    """One greedy search: a part of ``search``, with the first steps of these ``numbers``."""

    def __init__(self, search: Search, numbers: range) -> None:
        self._search, self._numbers = search, numbers

    def process(self, tasks: Sequence[Any], **kwargs: Any) -> Process:
        search, beam, numbers = self._search, self._search.root, self._numbers
        while not beam.finished:
            grown = yield from search.step([(beam, number) for number in numbers])
            beams = yield from search.merge(grown)
            yield from search.score(beams)
            (beam,), numbers = best_of(beams, 1), range(len(self._numbers))
            others = [other for other in beams if other is not beam]
            yield from beam_stages("pruned", "it is not the best of its subtree", others)
