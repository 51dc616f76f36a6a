"""How long drafts may be by how many sequences run. Knows nothing about requests.

Sequences that run are those with a place in the running batch: those that decode and those whose
prompt is being computed, with drafts or without. Those that wait for a place are not counted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from typing import Literal, Protocol


class Schedule:
    """A length per number of running sequences.

    With ``upper`` bounds {4: 4, 8: 2, 32: 1} means 4 up to 4 sequences, 2 up to 8, 1 up to 32, and
    0 beyond. With ``lower`` bounds {1: 5, 4: 4, 5: 0} means 5 from 1 on, 4 from 4, and 0 from 5 on;
    with fewer sequences than the smallest bound it is that bound's length.

    Args:
        lengths: sequences -> length; not empty.
        bounds: how its keys are meant.
    """

    def __init__(self, lengths: Mapping[int, int], bounds: Literal["upper", "lower"]) -> None:
        self._bounds, self._kind = sorted(lengths), bounds
        self._lengths = [lengths[bound] for bound in self._bounds]

    @property
    def most(self) -> int:
        """The greatest length of all."""
        return max(self._lengths)

    def length(self, running: int) -> int:
        """The length while so many sequences run."""
        if self._kind == "lower":
            return self._lengths[max(bisect_right(self._bounds, running) - 1, 0)]
        place = bisect_left(self._bounds, running)
        return self._lengths[place] if place < len(self._lengths) else 0


class ScheduleConfig(Protocol):
    """The fields of a speculative configuration that go by the number of sequences."""

    @property
    def max_draft_len(self) -> int:
        """Most levels of a draft; at least 1."""

    @property
    def max_concurrency(self) -> int | None:
        """Most running sequences of a step with drafts."""

    @property
    def draft_len_schedule(self) -> Mapping[int, int] | None:
        """Running sequences -> length; without ``max_concurrency``."""

    @property
    def draft_len_schedule_bounds(self) -> Literal["upper", "lower"] | None:
        """How its keys are meant; there is one if there is a schedule."""


def schedule(config: ScheduleConfig) -> Schedule:
    """The schedule that ``config`` describes; of one length where it describes none.

    Args:
        config: checked, every field settled.
    """
    if config.draft_len_schedule is not None:
        assert config.draft_len_schedule_bounds is not None, "settled by the configuration"
        return Schedule(config.draft_len_schedule, config.draft_len_schedule_bounds)
    if config.max_concurrency is not None:
        return Schedule({config.max_concurrency: config.max_draft_len}, "upper")
    return Schedule({1: config.max_draft_len}, "lower")
