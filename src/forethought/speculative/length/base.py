"""What a length policy is told of a step that is over. Knows nothing about policies.

[schedule] How long drafts may be by how many sequences run. Knows nothing about requests.

Sequences that run are those with a place in the running batch: those that decode and those whose
prompt is being computed, with drafts or without. Those that wait for a place are not counted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol


class LengthRequest(Protocol):
    """What a length policy sees of a request that is about to decode; a ``DraftRequest`` is one."""

    @property
    def request_id(self) -> int:
        """Tells it from all others."""

    @property
    def max_draft_len(self) -> int:
        """Most depth of its draft in this step, from its own settings and the room that it has."""


class CappedRequest(NamedTuple):
    """A request whose draft may be no longer than an earlier policy allows."""

    request_id: int
    max_draft_len: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, as one drafter's policy is told of it.

    Args:
        requests: ``(request_id, depth, accepted)`` of every draft of this drafter that was
            verified: its levels, at least 1, and the tokens taken from it. A request that was
            asked for and is not here got no draft.
        batch_size: rows of the step.
        tokens: tokens in the forward: roots, draft nodes and prompts.
        context: sum of the rows' lengths in the KV cache.
        forward_seconds: what the step took without any drafting.
        draft_seconds: what this drafter took.
    """

    requests: Sequence[tuple[int, int, int]]
    batch_size: int
    tokens: int
    context: int
    forward_seconds: float
    draft_seconds: float


class LengthPolicy(Protocol):
    """Decides how deep the drafts of one drafter are, step by step."""

    @property
    def reason(self) -> str:
        """Why the last lengths were chosen, in a line, for statistics and logs."""

    def lengths(self, requests: Sequence[LengthRequest], batch_size: int) -> list[int]:
        """The depth of each request's draft in the coming step; 0 is plain decoding.

        Args:
            requests: those that may have a draft.
            batch_size: all rows about to decode, ``requests`` among them.

        Returns:
            One depth per request, between 0 and its ``max_draft_len``.
        """

    def observe(self, record: StepRecord) -> None:
        """The step is over."""


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
