"""One sequence of token ids: the only mutable state of a request in the engine.

There are no phases, only counters that catch up::

    tokens     [ prompt ............ | output ...... ]
                                     ^ prompt_length
    stored     [ .............. )                       num_computed == table.length
    to compute                 [ ................... )  num_uncomputed; 1 for a plain decode

When a step has computed the last token, the next one is sampled and appended.

A fork shares the first ``num_shared`` tokens of its parent. If the parent has computed them, their
pages are shared at once; else the fork becomes a dependent of the parent, and shares them as soon
as they are computed, so that no prefix is computed twice.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from forethought.config.sampling import SamplingParams
from forethought.kv.table import PageTable
from forethought.outputs import (
    DraftedStep,
    FinishReason,
    SpeculationMetrics,
    TokenLogprobs,
    Usage,
)

if TYPE_CHECKING:
    from forethought.model.sampling import Constraint, SequenceBreakers
    from forethought.model.token_adapters import PlacedAdapter


class Status(Enum):
    """What the engine does with a sequence."""

    WAITING = "waiting"
    """Wants to generate; not in the running batch."""
    RUNNING = "running"
    """In the running batch: has a row in nearly every step."""
    PARKED = "parked"
    """Alive, generates nothing; may be extended, forked, rewound and resumed."""
    CLOSED = "closed"
    """In no queue; holds no page."""


@dataclass(frozen=True, slots=True)
class OtherSequence:
    """A sequence that another one attends to; see ``Engine.attend_to``."""

    sequence: Sequence
    num_common: int
    """Tokens that both begin with, after which its own are read."""


@dataclass(eq=False, slots=True)
class Sequence:
    """Token ids, their page table, and how far they are computed."""

    id: int
    tokens: list[int]
    """Prompt and output together."""
    prompt_length: int
    """Tokens before the current generation began; what follows is its output."""
    params: SamplingParams
    table: PageTable
    status: Status = Status.CLOSED
    """Closed until the engine places it in a queue."""
    keep: bool = False
    """Park when a generation ends, instead of closing."""
    index: int = 0
    """Number among the ``n`` samples of its prompt."""
    arrival: int = 0
    """Order of arrival; the samples of one prompt share theirs."""
    page_digests: list[bytes] = field(default_factory=list)
    """The hashes of the full pages of its tokens when it was last about to be admitted."""
    seed: int = 0
    """The uniform sample for position t is a pure function of (seed, index, t)."""
    limit: int = 0
    """The generation ends when there are this many tokens."""
    end_ids: frozenset[int] = frozenset()
    """Stop tokens: those of the params, and end-of-sequence unless ``ignore_eos``."""
    parent: Sequence | None = None
    """While set, the KV of a shared prefix comes from the parent, which is still computing it."""
    dependents: list[Sequence] = field(default_factory=list)
    """Sequences that wait for this one's KV."""
    num_shared: int = 0
    """Tokens that it has in common with ``parent``."""
    others: tuple[OtherSequence, ...] = ()
    """Sequences whose tokens it attends to as well; their ``num_common`` rise."""
    adapter: PlacedAdapter | None = None
    """What its tokens are computed with beside the model; None: the model alone."""
    num_ever_computed: int = 0
    """Tokens computed at least once; computing them again counts as prefill."""
    sampled_positions: list[int] = field(default_factory=list)
    """The positions of the tokens that were sampled for it, rising."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token that ended the generation, if it was one of ``stop_token_ids``; or
    ``GRAMMAR_COMPLETE``."""
    had_nonfinite_logits: bool = False
    """In this generation. It is then computed again from the first token on, on cleared pages and
    without drafts; the second time is an error."""
    stop_candidates: array[int] | None = None
    """Int64 ids in rising order, of all tokens with which a stop string of the current generation
    may end: several steps in one call end with such a token, so that the text is read. None: they
    are not known, or so frequent that each token is read.
    """
    constraint: Constraint | None = None
    """What restricts the output of the current generation."""
    breakers: SequenceBreakers | None = None
    """What ends a repeat in the current generation, for DRY; None: nothing does."""
    takes_argmax: bool = False
    """Whether each token of the current generation is the argmax of the model's own logits, and no
    score of it is asked for."""
    hold: float = math.inf
    """Length at which it stops to decode until its client wants more."""
    is_streamed: bool = False
    """Whether somebody waits for each token of the current generation."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """One entry per prompt token computed so far, if asked for; of a sequence that was extended,
    None for those before the extension."""
    extended_from: int | None = None
    """Tokens before those that were added since it generated last; None: there are none."""
    usage: Usage = field(default_factory=Usage)
    metrics: SpeculationMetrics = field(default_factory=SpeculationMetrics)
    """Counters of speculative decoding in the current generation."""
    drafted_steps: list[DraftedStep] = field(default_factory=list)
    """Steps with drafts in the current generation."""

    @property
    def has_stateful_distribution(self) -> bool:
        """Whether the next token depends on earlier tokens beyond the logits."""
        params = self.params
        return bool(
            self.constraint is not None
            or params.penalises
            or len(self.tokens) - self.prompt_length < params.min_tokens
        )

    @property
    def adapter_digest(self) -> bytes:
        """Of its adapter; empty without one. Pages are shared only where it is the same."""
        return b"" if self.adapter is None else self.adapter.digest

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values are in the cache."""
        return self.table.length

    @property
    def num_uncomputed(self) -> int:
        """Tokens that a forward has yet to see."""
        return len(self.tokens) - self.table.length

    @property
    def output(self) -> list[int]:
        """The tokens of the current generation, so far."""
        return self.tokens[self.prompt_length :]

    @property
    def active(self) -> bool:
        """Whether it waits or runs: the engine will give it more tokens."""
        return self.status in (Status.WAITING, Status.RUNNING)

    @property
    def num_wanted(self) -> int:
        """Tokens until it ends or is held, at least one."""
        return max(1, int(min(self.limit, self.hold)) - len(self.tokens))

    @property
    def is_held(self) -> bool:
        """Whether it waits for its client, and nothing waits for what it has yet to compute."""
        return len(self.tokens) >= self.hold and self.num_uncomputed == 1 and not self.dependents

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be computed."""
        is_requested = self.params.prompt_logprobs is not None
        return is_requested and len(self.prompt_logprobs) < self.prompt_length

    @property
    def rank(self) -> tuple[int, int, int]:
        """The order of service: priority, arrival, sample."""
        return self.params.priority, self.arrival, self.index


def depend_on(child: Sequence, parent: Sequence, num_shared: int) -> None:
    """``child`` begins with the first ``num_shared`` tokens of ``parent``."""
    child.parent, child.num_shared = parent, num_shared
    parent.dependents.append(child)
    attach_ready_dependents(parent)


def attach_ready_dependents(parent: Sequence, all_of_them: bool = False) -> None:
    """Give dependents of ``parent`` the KV they wait for, if it is there or will not come any more;
    to ``all_of_them`` what there is now, as the parent is about to change.
    """
    for child in list(parent.dependents):
        if all_of_them or not parent.active or parent.num_computed >= child.num_shared:
            attach_to_parent(child)


def attach_to_parent(child: Sequence, has_logits: bool = False) -> None:
    """Share what the parent has computed of the common prefix, and forget the parent.

    ``has_logits``: the next token is sampled from the parent's logits; else one that is about to
    generate has to compute its last token itself.
    """
    parent = child.parent
    assert parent is not None, "only a dependent can be attached"
    parent.dependents.remove(child)
    child.parent = None
    ready = min(child.num_shared, parent.num_computed)
    if child.wants_prompt_logprobs and child.prompt_logprobs:
        ready = min(ready, len(child.prompt_logprobs) - 1)  # the last one's logits are needed
    elif child.wants_prompt_logprobs:
        if len(parent.prompt_logprobs) < child.prompt_length:
            return  # it has to compute its own, from the first token on
        child.prompt_logprobs = list(parent.prompt_logprobs)
    if child.active and not has_logits:
        ready = min(ready, len(child.tokens) - 1)
    child.table = parent.table.fork(ready)


def detach_from_parent(child: Sequence) -> None:
    """Forget the parent without taking anything from it."""
    if child.parent is not None:
        child.parent.dependents.remove(child)
        child.parent = None


def siblings_to_sample(sequence: Sequence) -> list[Sequence]:
    """The sequence and those forks that see the very same tokens and wait to be sampled."""
    if not sequence.dependents:
        return [sequence]
    length = len(sequence.tokens)
    siblings = [
        other
        for other in sequence.dependents
        if other.status is Status.WAITING
        and other.num_shared == len(other.tokens) == length
        and other.others == sequence.others
        and other.adapter is sequence.adapter
    ]
    return [sequence, *siblings]


def num_common(sequences: List[Sequence]) -> int:
    """Tokens that all of the sequences begin with."""
    together = zip(*(sequence.tokens for sequence in sequences), strict=False)
    shortest = min(len(sequence.tokens) for sequence in sequences)
    return next((n for n, ids in enumerate(together) if len(set(ids)) > 1), shortest)
