"""``PrefillSplit``: which prompts are prefilled in a replica of their own (DistServe, OSDI 2024;
Splitwise, ISCA 2024).

::

    prefill replica   [chunk 1][chunk 2][chunk 3] first token
                              \\ pages  \\ pages  \\ pages, states
    decode replica    [decode][decode][decode][decode][goes on with the sequence]

A prompt beside decodes in one replica makes each of their steps longer by what its chunks take
(Sarathi-Serve, OSDI 2024, bounds a step and not the sum). Prefilled apart it delays no decode, but
waits for the prompts before it there, and for its pages to arrive. So a prompt is prefilled apart
where the seconds of delay, of the request and of those beside it, are fewer:

    here     seconds(queued here + uncomputed here) + beside * seconds(uncomputed here)
    apart    seconds(queued there + uncomputed there) + move

``beside`` is the number of generations in the decode replica, at least 1: one that is idle now is
kept free for what comes. Short prompts, probes and turns whose history is in the decode replica
stay there, as their few tokens take less than a move.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import NamedTuple, Protocol

from forethought.cluster.link import Link, Role
from forethought.cluster.prefixes import blocks_of, num_shared_tokens
from forethought.cluster.remote import Remote
from forethought.errors import ParameterError
from forethought.outputs import EngineStats

SECONDS_PER_TOKEN = 2e-4
"""Of a prefill, until it is measured."""
MOVE_SECONDS = 0.02
"""From a prompt's first token to its second one, in another replica, until it is measured."""
NUM_MEASURED = 32
"""Last moves, and last answers of prefill replicas, that count."""
MIN_MEASURED = 3
WINDOW = 60.0
"""Seconds in which they were."""


def check_split(num_replicas: int, num_prefill: int) -> None:
    """Raises ParameterError for a number of prefill replicas that cannot be among the replicas."""
    if num_prefill < 0:
        why = f"got {num_prefill}"
        raise ParameterError("invalid prefill_replicas", why, "Give 0 or more")
    if num_prefill >= num_replicas and num_prefill:
        raise ParameterError(
            "invalid prefill_replicas",
            f"{num_prefill} of {num_replicas} replicas would leave none to decode",
            f"Give at most {num_replicas - 1}, or more replicas: they count the prefill replicas",
        )


class Delays(NamedTuple):
    """What a prompt meets in a replica, in tokens and sequences."""

    num_queued: int
    """Prompt tokens that are computed before it."""
    num_uncomputed: int
    """Of its own tokens: those that no prefix cache has."""
    num_beside: int = 0
    """Generations whose steps its chunks make longer."""


class Costs(Protocol):
    """Seconds of an engine."""

    def prefill_seconds(self, num_tokens: int) -> float:
        """To compute the tokens of prompts."""

    def move_seconds(self, num_tokens: int) -> float:
        """Until a sequence with a prompt that was prefilled apart goes on."""


def is_apart(costs: Costs, here: Delays, apart: Delays, length: int) -> bool:
    """Whether a prompt of ``length`` tokens is delayed less, and delays less, where it is prefilled
    apart.
    """
    seconds = costs.prefill_seconds(here.num_uncomputed)
    waits = costs.prefill_seconds(here.num_queued) + seconds
    delay = waits + max(1, here.num_beside) * seconds
    there = costs.prefill_seconds(apart.num_queued + apart.num_uncomputed)
    return there + costs.move_seconds(length) < delay


class MeasuredCosts:
    """``Costs`` as the replicas tell them: linear in the tokens of a prefill, and the median of the
    moves. What was measured more than ``WINDOW`` seconds ago is forgotten: a costly move would else
    be the last one that is measured.
    """

    def __init__(self) -> None:
        self._counts: dict[str, EngineStats] = {}
        """By replica: as it has told them last."""
        self._prefills = deque[tuple[float, float, int]](maxlen=NUM_MEASURED)
        """When, seconds of steps, and prompt tokens in them."""
        self._moves = deque[tuple[float, float]](maxlen=NUM_MEASURED)
        """When, and seconds."""

    def told(self, name: str, stats: EngineStats) -> None:
        """A prefill replica has answered, with its counts until now."""
        before = self._counts.get(name, stats)
        num_tokens = stats.prefilled - before.prefilled
        seconds = stats.step_seconds - before.step_seconds
        if num_tokens > 0 and seconds > 0.0:
            self._prefills.append((time.monotonic(), seconds, num_tokens))
        self._counts[name] = dataclasses.replace(stats)

    def moved(self, seconds: float) -> None:
        """A sequence has gone on elsewhere after a pause."""
        self._moves.append((time.monotonic(), seconds))

    def forget(self, name: str) -> None:
        """A replica is gone: that which comes in its place counts from 0."""
        self._counts.pop(name, None)

    def prefill_seconds(self, num_tokens: int) -> float:
        """To compute the tokens of prompts."""
        start = time.monotonic() - WINDOW
        recent = [(seconds, count) for at, seconds, count in self._prefills if at > start]
        if len(recent) < MIN_MEASURED:
            return num_tokens * SECONDS_PER_TOKEN
        seconds, tokens = map(sum, zip(*recent, strict=True))
        return num_tokens * seconds / tokens

    def move_seconds(self, num_tokens: int) -> float:
        """The same for all lengths: but for the last chunk, pages go while others are computed."""
        start = time.monotonic() - WINDOW
        recent = [seconds for at, seconds in self._moves if at > start]
        return median(recent) if len(recent) >= MIN_MEASURED else MOVE_SECONDS


class PrefillSplit:
    """Chooses where prompts are prefilled.

    Args:
        costs: of the engines.
        has_prefix_caches: whether replicas find prefixes that they have computed.
    """

    def __init__(self, costs: Costs, has_prefix_caches: bool = True) -> None:
        self._costs, self._has_prefix_caches = costs, has_prefix_caches

    def choose(
        self, remote: Remote, target: Link, links: Sequence[Link], arriving: Sequence[Remote]
    ) -> Link | None:
        """The replica that computes the prompt of a sequence for its target; None: that one does,
        or the sequence waits for its ``origin``, one of those ``arriving`` there.
        """
        is_scored = remote.sequence.params.prompt_logprobs is not None
        if is_scored or target.role is not Role.DECODE:
            return None
        blocks = [*_blocks(remote)]
        num_uncomputed = self._num_uncomputed(remote, target, blocks)
        here = Delays(target.num_queued_tokens, num_uncomputed, target.load)
        sources = [link for link in links if link.takes and link.role is Role.PREFILL]
        apart = [(link, self._num_uncomputed(remote, link, blocks)) for link in sources]
        source = self.source(here, len(remote.sequence.tokens), apart)
        if source is not None and self._has_prefix_caches:
            remote.origin = self._origin(remote, here, apart, arriving)
        return None if remote.origin is not None else source

    def source(self, here: Delays, length: int, apart: Iterable[tuple[Link, int]]) -> Link | None:
        """The prefill replica for a prompt of ``length`` tokens, of those in ``apart``, each with
        the number of its tokens that it would compute; None: it is computed where it decodes.
        """
        link, num_uncomputed = min(
            apart,
            key=lambda pair: (pair[0].num_queued_tokens + pair[1], pair[0].name),
            default=(None, 0),
        )
        if link is None:
            return None
        there = Delays(link.num_queued_tokens, num_uncomputed)
        return link if is_apart(self._costs, here, there, length) else None

    def enqueue(self, remote: Remote, link: Link) -> None:
        """A replica is told to generate for a sequence."""
        blocks = [*_blocks(remote)]
        remote.num_queued_tokens = self._num_uncomputed(remote, link, blocks)
        link.num_queued_tokens += remote.num_queued_tokens
        link.prefixes.add(blocks)

    def ended(self, remote: Remote) -> None:
        """A generation has ended, and its output is in the prefix cache of its replica, too."""
        if remote.link is not None:
            remote.link.prefixes.add(_blocks(remote))

    def _origin(
        self,
        remote: Remote,
        here: Delays,
        apart: Sequence[tuple[Link, int]],
        arriving: Sequence[Remote],
    ) -> Remote | None:
        """A sequence with most of the same prompt, after whose arrival it is computed here."""
        length, blocks = len(remote.sequence.tokens), [*_blocks(remote)]
        for other in arriving:
            rest = max(1, length - num_shared_tokens(blocks, _blocks(other)))
            after = here._replace(num_uncomputed=rest)
            if rest < here.num_uncomputed and self.source(after, length, apart) is None:
                return other
        return None

    def _num_uncomputed(self, remote: Remote, link: Link, blocks: Sequence[bytes]) -> int:
        """Tokens of a sequence that a replica would have to compute, one at least."""
        num_stored = remote.length if remote.link is link else 0
        if self._has_prefix_caches:
            num_stored = max(num_stored, link.prefixes.num_tokens(blocks))
        return max(1, len(remote.sequence.tokens) - num_stored)


def dequeue(remote: Remote) -> None:
    """The prompt of a generation is computed, or is not going to be where it is."""
    if remote.link is not None:
        remote.link.num_queued_tokens -= remote.num_queued_tokens
    remote.num_queued_tokens = 0


def _blocks(remote: Remote) -> Iterator[bytes]:
    """The hashes of the tokens of a sequence, with what their keys and values depend on."""
    salt = remote.sequence.params.cache_salt
    return blocks_of(remote.sequence.tokens, (remote.adapter or "", salt or ""))
