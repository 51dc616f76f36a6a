"""What a generation returns, and the engine's counters. Plain values; needs no torch."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token, a stop string, or a shape that is complete."""
    LENGTH = "length"
    """``max_tokens``, the context or the KV cache is full."""
    ABORT = "abort"
    """Its owner ended it."""


GRAMMAR_COMPLETE = "grammar"
"""The ``stop_reason`` of a generation whose last token completed the shape asked for."""


class ThoughtEnd(StrEnum):
    """How a thought was closed."""

    NATURAL = "natural"
    """The model wrote its closing marker."""
    SOFT = "soft"
    """At a natural boundary after ``thinking_soft`` tokens."""
    BUDGET = "budget"
    """At ``thinking_budget`` tokens."""


@dataclass(frozen=True, slots=True)
class ThinkingOutput:
    """The thought of one sample under a thinking budget."""

    num_tokens: int
    """Tokens of thought, without markers and closing text; of an open thought in the prompt, those
    in the prompt too. All thoughts of the output together, if there are several."""
    end: ThoughtEnd | None
    """How the last thought was closed; None: it is open, or there was none."""


@dataclass(slots=True, unsafe_hash=True)  # frozen ones take three times as long to make
class Logprob:
    """Natural log-probability of one token under the model's own distribution (raw logits)."""

    logprob: float
    rank: int | None = None
    """Rank of the token by probability; 1 is the most probable."""
    token: str | None = None
    """Its text, if there is a tokenizer."""
    raw: bytes | None = field(default=None, compare=False, repr=False)
    """Its bytes, where they are no text: of a part of a character."""


TokenLogprobs = dict[int, Logprob]
"""Log-probabilities at one position by token id: the chosen token and the top k."""


class TokenConfidence(NamedTuple):
    """How certain the model was where it chose a token, under its own distribution (raw logits). Of
    p over V tokens, in nats; larger is more certain, but for ``entropy``.
    """

    value: float
    """Minus the mean log-probability of the k most probable tokens: token confidence (DeepConf,
    arXiv 2508.15260, section 2). Those of probability 0 are left out."""
    logprob: float
    """Log-probability of the token itself."""
    entropy: float | None = None
    """-sum(p log p); None where only the most probable tokens are known, as from a server."""
    self_certainty: float | None = None
    """KL(uniform || p) = -log V - mean(log p) (arXiv 2502.18581, section 3); infinite if a token
    has probability 0, None as ``entropy``."""


@dataclass(slots=True)
class Usage:
    """Tokens counted by the engine; every token that went through the network is in one of them.

    ``prefilled`` and ``decoded`` are forward passes paid for; ``cached`` was found in the prefix
    index instead of being prefilled; ``discarded`` (a part of ``decoded``) was generated and is
    not in any returned text.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prefilled: int = 0
    cached: int = 0
    decoded: int = 0
    discarded: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.prefilled + other.prefilled,
            self.cached + other.cached,
            self.decoded + other.decoded,
            self.discarded + other.discarded,
        )

    def __sub__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens - other.prompt_tokens,
            self.completion_tokens - other.completion_tokens,
            self.prefilled - other.prefilled,
            self.cached - other.cached,
            self.decoded - other.decoded,
            self.discarded - other.discarded,
        )

    def add(self, other: Usage) -> None:
        """Add the counts of another to these, in place."""
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.prefilled += other.prefilled
        self.cached += other.cached
        self.decoded += other.decoded
        self.discarded += other.discarded

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together, as OpenAI-compatible servers count them."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(slots=True)
class SpeculationMetrics:
    """Acceptance of the drafts of one generation. Without drafts every step yields one token."""

    steps: int = 0
    """Decode steps, with a draft or without; the prefill that yields the first token is none."""
    drafted: int = 0
    """Tokens proposed, all branches of a tree together."""
    accepted: int = 0
    """Proposed tokens that were kept. A step yields one more than it accepts."""
    accepted_by_position: list[int] = field(default_factory=list)
    """Entry k: steps in which at least k + 1 tokens in a row were accepted."""
    synthetic: bool = False
    """Acceptance was synthetic (``synthetic_acceptance``, or its length): the tokens are
    meaningless."""
    lossy: bool = False
    """Drafts were accepted by another rule than the exact one, which was asked for: the tokens do
    not have the distribution of plain decoding."""

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per decode step: 1 + accepted / steps; None before the first."""
        return 1 + self.accepted / self.steps if self.steps else None

    def record(self, drafted: int, accepted: int) -> None:
        """One more step, in which ``accepted`` of ``drafted`` tokens were kept."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        if not accepted:
            return
        self.accepted_by_position += [0] * (accepted - len(self.accepted_by_position))
        for position in range(accepted):
            self.accepted_by_position[position] += 1

    def copy(self) -> SpeculationMetrics:
        """The counts as they are now."""
        return self + SpeculationMetrics()

    def __add__(self, other: SpeculationMetrics) -> SpeculationMetrics:
        mine, others = self.accepted_by_position, other.accepted_by_position
        return SpeculationMetrics(
            self.steps + other.steps,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            [a + b for a, b in itertools.zip_longest(mine, others, fillvalue=0)],
            self.synthetic or other.synthetic,
            self.lossy or other.lossy,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ``mean_acceptance_length`` among them."""
        length = self.mean_acceptance_length
        rounded = None if length is None else round(length, 3)
        return {**dataclasses.asdict(self), "mean_acceptance_length": rounded}


class DraftedStep(NamedTuple):
    """A decode step of a generation for which tokens were drafted."""

    start: int
    """Number, in the output, of the first token that the step gave."""
    num_accepted: int
    """Drafted tokens that were kept, from ``start`` on."""
    drafter: str
    """By its name in the engine."""
    rejected: tuple[int, ...]
    """Of a chain, the drafted tokens after those; of a tree, the children of the last of those."""


@dataclass(slots=True)
class CompletionOutput:
    """One sample of one prompt, complete or partial."""

    index: int
    """Which of the ``n`` samples, from 0."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Generated ids; with a stop string, up to the token that completed it."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry per generated token, if asked for."""
    cumulative_logprob: float | None = None
    """Sum of the chosen tokens' log-probabilities (nats), if asked for."""
    confidences: list[TokenConfidence] | None = None
    """One entry per generated token, if asked for."""
    finish_reason: FinishReason | None = None
    """None while it goes on."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it, or ``GRAMMAR_COMPLETE``; None for
    end-of-sequence and length."""
    metrics: SpeculationMetrics | None = None
    """Acceptance of its drafts; None where nothing is known of its steps."""
    drafted_steps: list[DraftedStep] = field(default_factory=list)
    """The steps with drafts, in order."""
    thinking: ThinkingOutput | None = None
    """Its thought; None without ``thinking_budget`` and ``thinking_soft``."""


@dataclass(slots=True)
class RequestOutput:
    """All samples of one prompt."""

    request_id: str
    prompt: str | None
    """The prompt as text; None if ids were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    usage: Usage = field(default_factory=Usage)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry per prompt token, None for the first, which nothing predicts."""


class EngineLoad(NamedTuple):
    """How busy an engine is at a moment."""

    running: int
    """Sequences that decode or are prefilled."""
    waiting: int
    """Sequences in the waiting queue, for a slot of the batch or for pages."""
    kv_cache_usage: float
    """Share of the pages of the KV cache that are in use, in 0 to 1."""


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine was built. Token counts are forward passes really made.

    ``prefilled + decoded`` is not the number of tokens that went through the network: the last
    token drawn in a generation is counted in ``decoded`` and never computed.
    """

    steps: int = 0
    """Forwards."""
    prefilled: int = 0
    """Prompt tokens computed, those computed again after a preemption included."""
    cached: int = 0
    """Prompt tokens found in the prefix index instead."""
    decoded: int = 0
    """Tokens drawn."""
    discarded: int = 0
    """Decoded tokens removed by a rewind, or decoded after the caller had cancelled."""
    embedded: int = 0
    """Tokens of inputs whose embeddings were computed."""
    thoughts_closed: int = 0
    """Thoughts that a thinking budget has closed, softly or at the cap."""
    preemptions: int = 0
    """Times that a running sequence lost its pages to an earlier one."""
    dropped: int = 0
    """Times that a parked or waiting sequence lost its pages to another one."""
    drafted: int = 0
    """Tokens proposed by drafters and verified."""
    accepted: int = 0
    """Proposed tokens that were accepted; they are in ``decoded`` too."""
    draft_failures: int = 0
    """Times that a drafter, its resource manager or its length policy raised or was refused."""
    failed_forwards: int = 0
    """Forwards that raised; they were made again with fewer rows, or without a draft."""
    failures: int = 0
    """Sequences that ended with an error."""
    replicas_lost: int = 0
    """Replicas that have died or were given up; the other counts are those of all replicas."""
    moved: int = 0
    """Generations that have gone on in another replica, as theirs was lost."""
    migrated: int = 0
    """Sequences that were moved to another replica, with their KV."""
    migrated_tokens: int = 0
    """Stored tokens of them."""
    prefilled_apart: int = 0
    """Those of them whose prompts a prefill replica has computed."""
    forward_seconds: float = 0.0
    """Time of the target's network: wall time, or on CUDA the GPU's."""
    draft_seconds: float = 0.0
    """Wall time of drafting, a draft model's network included."""
    step_seconds: float = 0.0
    """Wall time of whole steps."""
    forward_path: str = ""
    """What computes the layers of the target: ``native``, ``fused`` or ``transformers``."""
    draft_paths: dict[str, str] = field(default_factory=dict)
    """What computes the networks that draft, by drafter: as ``forward_path`` for a draft model,
    ``native`` or ``torch`` for heads. Drafters without a network are not in it."""

    def to_dict(self) -> dict[str, Any]:
        """All counts by name."""
        return asdict(self)


class DraftSpan(NamedTuple):
    """A draft in a text: its accepted characters, and the text that was rejected after them."""

    start: int
    end: int
    """Behind its accepted characters; ``start`` if none was accepted."""
    drafter: str
    rejected: str

    def within(self, start: int, end: int) -> DraftSpan | None:
        """Its part between two positions, relative to the first; None if it has none there."""
        first, last = max(start, self.start), min(end, self.end)
        rejected = self.rejected if start <= self.end < end else ""
        if first >= last and not rejected:
            return None
        return DraftSpan(first - start, max(first, last) - start, self.drafter, rejected)


def spans_within(spans: Sequence[DraftSpan], start: int, end: int) -> list[DraftSpan]:
    """The parts of spans between two positions, relative to the first; it reads the end only."""
    parts: deque[DraftSpan] = deque()
    for span in reversed(spans):
        if span.end < start:
            break
        part = span.within(start, end)
        if part is not None:
            parts.appendleft(part)
    return list(parts)
