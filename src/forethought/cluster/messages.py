"""What the ingress and a replica tell each other: plain values, token ids and no text.

::

    ingress                                     replica
    -------                                     -------
    Branch, Generate, Reach, Stop, Close  -->   sessions of an AsyncLLM, by their handles
                                          <--   Updates: Progress of generations, and the load

    ingress               replica               another replica
    -------               -------               ---------------
    Copy             -->
                          Pages            -->  part of a session, under another handle
                     <--------------------      Copied

Commands are numbered by message, as an actor of Ray may run them in another order. A handle is a
session that lives in one replica, a number that the ingress has chosen; so is that of a generation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from forethought.cluster.entrance import Entrance
from forethought.config.sampling import SamplingParams
from forethought.engine.base import Begun, Capabilities
from forethought.engine.scheduler import Limits
from forethought.engine.snapshot import SequenceSnapshot
from forethought.errors import EngineStopped
from forethought.outputs import (
    DraftedStep,
    EngineLoad,
    EngineStats,
    FinishReason,
    SpeculationMetrics,
    TokenConfidence,
    TokenLogprobs,
    Usage,
)


class IngressForgotten(EngineStopped):
    """A replica has closed what an ingress had there. It lives, and may serve other ingresses."""


class Branch(NamedTuple):
    """A session of the first ``length`` tokens of another one, whose pages it shares."""

    handle: int
    source: int
    length: int


class Generate(NamedTuple):
    """Go on from the first ``length`` tokens of a session, 0 for a new one, and ``rest``."""

    handle: int
    generation: int
    length: int
    rest: Sequence[int]
    params: SamplingParams
    """With a seed, and ``n`` 1."""
    begun: Begun


class Reach(NamedTuple):
    """Somebody waits for ``num_tokens`` of output. At ``hold`` tokens it stops to decode."""

    generation: int
    num_tokens: float
    hold: float


class Stop(NamedTuple):
    """End a generation; nothing more is told of it."""

    generation: int


class Close(NamedTuple):
    """Give the pages of a session back."""

    handle: int


class Copy(NamedTuple):
    """Copy what is stored of the tokens of a session from ``start`` on, for another replica."""

    handle: int
    target: int
    """The handle of the session there."""
    start: int
    stop: float = math.inf
    """Tokens of the session that are copied at most."""
    generation: int | None = None
    """To end first; None: what is generated goes on."""
    prompt_length: int = 0
    """Above 0, these tokens are prefilled for the other replica: wait until some are stored from
    ``start`` on, and end the generation only once it has its first token and few are left."""


class Prepare(NamedTuple):
    """A generation with these params is going to move here: compile its grammar."""

    params: SamplingParams


Command = Branch | Generate | Reach | Stop | Close | Copy | Prepare


class Pages(NamedTuple):
    """What a ``Copy`` has copied, from one replica to another."""

    saved: SequenceSnapshot
    num_left: int
    """Stored tokens after them."""
    has_ended: bool = False
    """The generation has been ended, and they are the last ones."""


class Copied(NamedTuple):
    """The answer of the replica to which a session was copied."""

    handle: int
    num_tokens: int = 0
    """Of the session there now."""
    num_left: int = 0
    num_bytes: int = 0
    error: Exception | None = None
    """It has failed: the session there is as it was."""
    has_ended: bool = False
    """As of ``Pages``."""


@dataclass(slots=True)
class Progress:
    """What has been generated since the last one of the same generation."""

    generation: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token, if asked for; so are ``confidences``."""
    confidences: list[TokenConfidence] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    metrics: SpeculationMetrics | None = None
    """Of the generation as a whole, as it was here."""
    drafted_steps: list[DraftedStep] = field(default_factory=list)
    """New ones."""
    usage: Usage = field(default_factory=Usage)
    """New tokens of the session."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Once, if asked for."""
    error: Exception | None = None
    """It has failed."""


class Updates(NamedTuple):
    """The answer to an ingress that asks what is new."""

    progress: list[Progress]
    load: EngineLoad
    stats: EngineStats
    stalled: float
    """Seconds since the engine made a step, while it has work."""
    is_draining: bool = False
    """Its ingresses are to leave it, with their sequences."""


@dataclass(frozen=True, slots=True)
class Description:
    """What an ingress has to know of a replica.

    Attributes:
        process: by which it is told from one that comes after it.
        eos_ids: end-of-sequence tokens of the model.
        entrance: where it takes commands and questions; None: by calls of the actor alone.
    """

    process: int
    capabilities: Capabilities
    limits: Limits
    eos_ids: frozenset[int]
    entrance: Entrance | None = None
