"""Length policies and the one that a configuration asks for.

``FixedLength``, ``AcceptanceGate`` (``gate.py``) and ``Goodput`` (``goodput.py``); with several,
the shortest length wins. Lengths by batch size are a ``Schedule`` (``base.py``), applied before
these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forethought.config.speculation import DecodingBaseConfig
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
        """Nothing to learn."""


class Shortest:
    """The shortest length of several policies, for each request.

    Each policy sees only the requests that the policies before it allow drafts for, with the length
    that these allow as ``max_draft_len``, so that none waits for drafts that are never made.

    Args:
        policies: at least one, in order; those that treat all requests alike come first.
    """

    def __init__(self, policies: Sequence[LengthPolicy]) -> None:
        self._policies = list(policies)
        self._consulted = self._policies

    @property
    def reason(self) -> str:
        """The reasons of the policies that the last lengths depended on, in order."""
        return "; ".join(policy.reason for policy in self._consulted)

    def lengths(self, requests: Sequence[LengthRequest], batch_size: int) -> list[int]:
        """The shortest lengths; once a policy returns 0, later ones do not see the request."""
        lengths = [request.max_draft_len for request in requests]
        allowed: Sequence[LengthRequest] = requests
        rows: Sequence[int] = range(len(requests))
        self._consulted = []
        for policy in self._policies:
            self._consulted.append(policy)
            for row, length in zip(rows, policy.lengths(allowed, batch_size), strict=True):
                lengths[row] = length
            rows = [row for row in rows if lengths[row] > 0]
            if not rows:
                break
            allowed = [CappedRequest(requests[row].request_id, lengths[row]) for row in rows]
        return lengths

    def observe(self, record: StepRecord) -> None:
        """Passed on to all policies."""
        for policy in self._policies:
            policy.observe(record)


def length_policy(
    config: DecodingBaseConfig, nodes: Callable[[int], int] | None = None
) -> LengthPolicy:
    """A new policy as ``config`` describes it; each drafter needs its own.

    Args:
        config: validated.
        nodes: tokens of a draft of that depth (``Drafter.nodes``); the depth itself by default.
    """
    policies: list[LengthPolicy] = []
    if config.acceptance_rate_window_size:
        assert config.acceptance_rate_threshold is not None, "set by the configuration"
        policies.append(
            AcceptanceGate(config.acceptance_rate_window_size, config.acceptance_rate_threshold)
        )
    if config.length_control == "goodput":
        policies.append(Goodput(config.max_draft_len, nodes))
    if not policies:
        return FixedLength()
    return policies[0] if len(policies) == 1 else Shortest(policies)
