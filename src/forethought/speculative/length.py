"""How long drafts are: the policies, and the one that a configuration describes.

Fixed length, none with many requests, by a schedule of batch sizes, by acceptance (``gate``), by
goodput (``goodput``). They compose: the shortest length wins. Knows nothing about drafters.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from forethought.speculative.gate import AcceptanceGate
from forethought.speculative.goodput import Goodput
from forethought.speculative.step_record import (
    CappedRequest,
    LengthPolicy,
    LengthRequest,
    StepRecord,
)

__all__ = [
    "FixedLength",
    "LengthConfig",
    "LengthPolicy",
    "MaxConcurrency",
    "Schedule",
    "Shortest",
    "StepRecord",
    "length_policy",
]


class FixedLength:
    """As long as each request allows."""

    reason = "fixed: as long as allowed"

    def lengths(self, requests: Sequence[LengthRequest], batch_size: int) -> list[int]:
        """Each request's ``max_draft_len``."""
        return [request.max_draft_len for request in requests]

    def observe(self, record: StepRecord) -> None:
        """Nothing is learned."""


class MaxConcurrency:
    """No drafts in a step with more rows than this.

    Args:
        most: rows; at least 1.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.reason = f"max_concurrency: at most {most} rows"

    def lengths(self, requests: Sequence[LengthRequest], batch_size: int) -> list[int]:
        """Each request's ``max_draft_len``, or zeros."""
        return [request.max_draft_len if batch_size <= self._most else 0 for request in requests]

    def observe(self, record: StepRecord) -> None:
        """Nothing is learned."""


class Schedule:
    """A length per batch size.

    With ``upper`` bounds {4: 4, 8: 2, 32: 1} means 4 up to 4 rows, 2 up to 8, 1 up to 32, and 0
    beyond. With ``lower`` bounds {1: 5, 4: 4, 5: 0} means 5 from 1 row on, 4 from 4, and 0 from 5
    on; with fewer rows than the smallest bound it is that bound's length.

    Args:
        schedule: rows -> length; not empty.
        bounds: how its keys are meant.
    """

    def __init__(self, schedule: Mapping[int, int], bounds: Literal["upper", "lower"]) -> None:
        self._bounds, self._kind = sorted(schedule), bounds
        self._lengths = [schedule[bound] for bound in self._bounds]
        self.reason = "schedule: no step yet"

    def length(self, batch_size: int) -> int:
        """The length for so many rows."""
        if self._kind == "lower":
            return self._lengths[max(bisect_right(self._bounds, batch_size) - 1, 0)]
        place = bisect_left(self._bounds, batch_size)
        return self._lengths[place] if place < len(self._lengths) else 0

    def lengths(self, requests: Sequence[LengthRequest], batch_size: int) -> list[int]:
        """The length of the schedule, or each request's ``max_draft_len`` if that is less."""
        length = self.length(batch_size)
        self.reason = f"schedule: {length} with {batch_size} rows"
        return [min(length, request.max_draft_len) for request in requests]

    def observe(self, record: StepRecord) -> None:
        """Nothing is learned."""


class Shortest:
    """The shortest length of several policies, for each request.

    They are asked in order, each one about the requests for which those before it left something,
    and with what they left as ``max_draft_len``: so none waits for drafts that it was not given.

    Args:
        policies: at least one; those that are not about single requests come first.
    """

    def __init__(self, policies: Sequence[LengthPolicy]) -> None:
        self._policies = list(policies)
        self._asked = self._policies

    @property
    def reason(self) -> str:
        """The reasons of those that were asked last, in order."""
        return "; ".join(policy.reason for policy in self._asked)

    def lengths(self, requests: Sequence[LengthRequest], batch_size: int) -> list[int]:
        """The shortest lengths; zero as soon as one policy says so."""
        lengths = [request.max_draft_len for request in requests]
        left: Sequence[LengthRequest] = requests
        places: Sequence[int] = range(len(requests))
        self._asked = []
        for policy in self._policies:
            self._asked.append(policy)
            for place, length in zip(places, policy.lengths(left, batch_size), strict=True):
                lengths[place] = length
            places = [place for place in places if lengths[place] > 0]
            if not places:
                break
            left = [CappedRequest(requests[place].request_id, lengths[place]) for place in places]
        return lengths

    def observe(self, record: StepRecord) -> None:
        """All of them learn."""
        for policy in self._policies:
            policy.observe(record)


class LengthConfig(Protocol):
    """The fields of a speculative configuration that are about length."""

    @property
    def max_draft_len(self) -> int:
        """Most levels of a draft; at least 1."""

    @property
    def max_concurrency(self) -> int | None:
        """Most rows of a step with drafts."""

    @property
    def draft_len_schedule(self) -> Mapping[int, int] | None:
        """Rows -> length."""

    @property
    def draft_len_schedule_bounds(self) -> Literal["upper", "lower"] | None:
        """How its keys are meant; there is one if there is a schedule."""

    @property
    def acceptance_rate_window_size(self) -> int:
        """Drafts over which the gate averages; 0: there is no gate."""

    @property
    def acceptance_rate_threshold(self) -> float | None:
        """Where the gate closes; there is one if there is a window."""

    @property
    def length_control(self) -> Literal["fixed", "goodput"]:
        """Whether lengths follow what is measured."""


def length_policy(config: LengthConfig, nodes: Callable[[int], int] | None = None) -> LengthPolicy:
    """The policy that ``config`` describes, new: each drafter needs its own.

    Args:
        config: checked, every field settled.
        nodes: tokens of a draft of that depth (``Drafter.nodes``); the depth itself by default.
    """
    policies: list[LengthPolicy] = []
    if config.max_concurrency is not None:
        policies.append(MaxConcurrency(config.max_concurrency))
    if config.draft_len_schedule is not None:
        assert config.draft_len_schedule_bounds is not None, "settled by the configuration"
        policies.append(Schedule(config.draft_len_schedule, config.draft_len_schedule_bounds))
    if config.acceptance_rate_window_size:
        assert config.acceptance_rate_threshold is not None, "settled by the configuration"
        policies.append(
            AcceptanceGate(config.acceptance_rate_window_size, config.acceptance_rate_threshold)
        )
    if config.length_control == "goodput":
        policies.append(Goodput(config.max_draft_len, nodes))
    if not policies:
        return FixedLength()
    return policies[0] if len(policies) == 1 else Shortest(policies)
