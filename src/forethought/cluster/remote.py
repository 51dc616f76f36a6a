"""``Remote``: a sequence as its ingress keeps it, and where its tokens are computed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from forethought.cluster.link import Link
from forethought.engine.sequence import Sequence
from forethought.outputs import SpeculationMetrics


@dataclass(eq=False, slots=True)
class Remote:
    """Where the tokens of a sequence are computed."""

    sequence: Sequence
    key: str | None
    """Of the request; those of one request stay together."""
    adapter: str | None = None
    """By its name."""
    handle: int = 0
    link: Link | None = None
    """The replica with the session; None: no replica has it."""
    length: int = 0
    """Tokens that the session begins with, of those here."""
    generation: int | None = None
    """Number of the generation in progress there; None: it is parked, or waits for a replica."""
    num_generations: int = 0
    """Of all time, with those that have gone on elsewhere."""
    has_begun: bool = False
    """Whether tokens of that generation have come from there."""
    metrics_before: SpeculationMetrics = field(default_factory=SpeculationMetrics)
    """Of the generation in progress, in other replicas."""
    reach: tuple[float, float] = (math.inf, math.inf)
    """Count and hold of the last ``Reach``."""
    num_unscored: int = 1
    """Tokens that ``prompt_logprobs`` do not score: the first one, or those before an extension. A
    replica scores all that it has not computed before.
    """
    num_queued_tokens: int = 0
    """Of those that its generation in progress has to compute before its first one."""
    origin: Remote | None = None
    """Whose pages it waits for, as they are on their way to where it decodes."""
    is_fork: bool = False
    """Of its origin, whose session it branches; else it finds the pages in the prefix cache."""
    length_before: int = 0
    """Tokens with which its generation in progress has come to its replica."""
    num_deaths: int = 0
    """Of replicas, one after the other, each soon after it had come there."""
    paused_since: float = 0.0
    """When its move has ended the generation where it was, as of ``time.monotonic``; 0: tokens have
    come since."""
    stays_until: float = 0.0
    """No move is tried before, as of ``time.monotonic``: one has failed."""

    @property
    def can_move(self) -> bool:
        """Whether its generation, if there is one, can go on elsewhere: scores of a prompt are told
        once, as a whole, with the first token.
        """
        is_scored = self.sequence.params.prompt_logprobs is not None
        return self.generation is None or self.has_begun or not is_scored
