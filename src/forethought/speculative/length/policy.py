"""How deep drafts are: the protocol of length policies, the fixed length, and schedules.

Measured lengths are in ``gate.py`` and ``goodput.py``; with several policies the shortest length
wins. Lengths by batch size are a ``Schedule``, applied before these.

Running sequences are those in the running batch: those that decode and those whose prompt is being
computed, with drafts or without. Waiting ones are not counted.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from forethought.config.speculation import DecodingBaseConfig


class LengthRequest(Protocol):
    """A request about to decode, as length policies see it; a ``DraftRequest`` is one."""

    @property
    def request_id(self) -> int:
        """Unique."""

    @property
    def max_draft_len(self) -> int:
        """Greatest depth of its draft in this step, by its settings and the free capacity."""


class CappedRequest(NamedTuple):
    """A request with the length that an earlier policy allows."""

    request_id: int
    max_draft_len: int


@dataclass(slots=True)
class StepRecord:
    """What one drafter's policy learns about a finished call of the engine; never changed.

    That is one step, or several steps with drafts that were made at once: then sizes and seconds
    are means over these.

    Args:
        requests: ``(request_id, depth, accepted)`` for every request and step with a draft of this
            drafter that was verified: its levels and its accepted tokens. The depth is 0 in a step
            of a call in which the request got no draft; one that is missing here got none at all.
        batch_size: sequences of a step.
        tokens: tokens in a forward: roots, draft nodes and prompts.
        context: sum of the sequences' lengths in the KV cache.
        forward_seconds: duration of a step without any drafting.
        draft_seconds: duration of this drafter's work in a step, and of its length policy's.
        num_steps: forwards that were made.
    """

    requests: Sequence[tuple[int, int, int]]
    batch_size: float
    tokens: float
    context: float
    forward_seconds: float
    draft_seconds: float
    num_steps: int = 1


@dataclass(slots=True)
class SkippedSteps:
    """Steps that a length policy was not asked about; those that only decode are measured.

    Attributes:
        num_steps: that have gone by.
        num_decodes: steps of rows that all decode plainly. Some are not among ``num_steps``, where
            a call went on for longer, as none of its rows may have drafts.
        num_calls: calls of the engine that made ``num_decodes``.
        tokens: in the forwards of ``num_decodes``, one per row.
        context: sum of the sequences' lengths in them.
        seconds: of them.
    """

    num_steps: int = 0
    num_decodes: int = 0
    num_calls: int = 0
    tokens: int = 0
    context: int = 0
    seconds: float = 0.0

    def measure(self, num_decodes: int, tokens: int, context: int, seconds: float) -> None:
        """Add a call that made ``num_decodes`` plain decode steps."""
        self.num_calls += 1
        self.num_decodes += num_decodes
        self.tokens += tokens
        self.context += context
        self.seconds += seconds


class LengthPolicy(Protocol):
    """Decides how deep the drafts of one drafter are, step by step."""

    @property
    def reason(self) -> str:
        """Why the last lengths were chosen, in a line, for statistics and logs."""

    def lengths(self, requests: Sequence[LengthRequest], batch_size: int) -> list[int]:
        """The depth of each request's draft in the coming step; 0 is plain decoding.

        Args:
            requests: those that may have a draft.
            batch_size: all sequences about to decode, ``requests`` among them.

        Returns:
            One depth per request, between 0 and its ``max_draft_len``.
        """

    def observe(self, record: StepRecord) -> None:
        """Learn from a finished step, or from several that were one call."""

    def skip(self) -> int:
        """How many coming steps of about the same batch are plain; called after ``observe``.

        In these it need be neither asked nor told of anything, which saves their time.
        """

    def hold(self) -> float:
        """For how many steps, from the one that the last lengths are of, it would choose the same.

        In these, with drafts each as long as its request allows, it need not be asked, and is told
        of all of them at once.
        """

    def skipped(self, steps: SkippedSteps) -> None:
        """Called for steps that it was not called for.

        At most as many as ``skip`` has returned, or that of another policy of the same drafter.
        """

    def age(self, num_steps: int) -> None:
        """Steps have passed in batches that other policies have chosen for."""


class FixedLength:
    """As long as each request allows."""

    reason = "fixed: as long as allowed"

    def lengths(self, requests: Sequence[LengthRequest], batch_size: int) -> list[int]:
        """Each request's ``max_draft_len``."""
        return [request.max_draft_len for request in requests]

    def observe(self, record: StepRecord) -> None:
        """Nothing to learn."""

    def skip(self) -> int:
        """None."""
        return 0

    def hold(self) -> float:
        """For all."""
        return math.inf

    def skipped(self, steps: SkippedSteps) -> None:
        """Nothing to count."""

    def age(self, num_steps: int) -> None:
        """Nothing was learned."""


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

    def skip(self) -> int:
        """As many as any of them: what is plain for one is plain."""
        return max(policy.skip() for policy in self._policies)

    def hold(self) -> float:
        """As long as all of them."""
        return min(policy.hold() for policy in self._policies)

    def skipped(self, steps: SkippedSteps) -> None:
        """Passed on to all policies."""
        for policy in self._policies:
            policy.skipped(steps)

    def age(self, num_steps: int) -> None:
        """Passed on to all policies."""
        for policy in self._policies:
            policy.age(num_steps)


class Schedule:
    """A length per number of running sequences.

    With ``upper`` bounds {4: 4, 8: 2, 32: 1} means 4 up to 4 sequences, 2 up to 8, 1 up to 32, and
    0 beyond. With ``lower`` bounds {1: 5, 4: 4, 5: 0} means 5 from 1 on, 4 from 4, and 0 from 5 on;
    with fewer sequences than the smallest bound it is that bound's length.

    Args:
        lengths: sequences -> length; not empty.
        bounds: how its keys are read.
    """

    def __init__(self, lengths: Mapping[int, int], bounds: Literal["upper", "lower"]) -> None:
        self._bounds, self._kind = sorted(lengths), bounds
        self._lengths = [lengths[bound] for bound in self._bounds]

    @property
    def max_length(self) -> int:
        """The greatest length at any number of sequences."""
        return max(self._lengths)

    def length(self, running: int) -> int:
        """The length while this many sequences run."""
        if self._kind == "lower":
            return self._lengths[max(bisect_right(self._bounds, running) - 1, 0)]
        index = bisect_left(self._bounds, running)
        return self._lengths[index] if index < len(self._lengths) else 0


def schedule(config: DecodingBaseConfig) -> Schedule:
    """The schedule of ``config``; a single length if it has none.

    Args:
        config: validated.
    """
    if config.draft_len_schedule is not None:
        assert config.draft_len_schedule_bounds is not None, "set by the configuration"
        return Schedule(config.draft_len_schedule, config.draft_len_schedule_bounds)
    if config.max_concurrency is not None:
        return Schedule({config.max_concurrency: config.max_draft_len}, "upper")
    return Schedule({1: config.max_draft_len}, "lower")
