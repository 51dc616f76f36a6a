"""How long drafts are: the policies, and the one that a configuration describes.

Fixed length, by acceptance (``gate``), by goodput (``goodput``). They compose: the shortest length
wins. What goes by the number of sequences stands in ``schedule``. Knows nothing about drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from forethought.speculative.length.base import (
    CappedRequest,
    LengthPolicy,
    LengthRequest,
    StepRecord,
)
from forethought.speculative.length.gate import AcceptanceGate
from forethought.speculative.length.goodput import Goodput

__all__ = [
    "FixedLength",
    "LengthConfig",
    "LengthPolicy",
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
