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
import itertools
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from statistics import median
from typing import NamedTuple, Protocol, TypeVar

from forethought.errors import ParameterError
from forethought.outputs import EngineStats

SECONDS_PER_TOKEN = 2e-4
"""Of a prefill, until it is measured."""
MOVE_SECONDS = 0.02
"""From a prompt's first token to its second one, in another replica, until it is measured."""
NUM_MEASURED = 32
"""Last moves, and last answers of prefill replicas, that count."""
MIN_MEASURED = 3
BLOCK = 64
"""Tokens of the prefixes that are remembered."""
MAX_BLOCKS = 1 << 16
"""Of the prefixes that are remembered of a replica."""


class Role(StrEnum):
    """What a replica does, by its name: all ingresses of it agree."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @classmethod
    def of(cls, name: str) -> Role:
        """That of the replica ``PREFIX-prefill-0``, ``PREFIX-decode-0`` or ``PREFIX-0``."""
        word = name.rpartition("-")[0].rpartition("-")[2]
        return cls(word) if word in (cls.PREFILL, cls.DECODE) else cls.BOTH


def model_of(name: str) -> str:
    """The beginning of the names of all replicas of a model, by that of one of them."""
    prefix = name.rpartition("-")[0]
    return prefix.removesuffix(f"-{Role.PREFILL}").removesuffix(f"-{Role.DECODE}")


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
    own = costs.prefill_seconds(here.num_uncomputed)
    waits = costs.prefill_seconds(here.num_queued) + own
    delay = waits + max(1, here.num_beside) * own
    there = costs.prefill_seconds(apart.num_queued + apart.num_uncomputed)
    return there + costs.move_seconds(length) < delay


class MeasuredCosts:
    """``Costs`` as the replicas tell them: linear in the tokens of a prefill, and the median of the
    last moves.

    Args:
        pauses: seconds of the last moves, which the list gets as they are measured.
    """

    def __init__(self, pauses: Sequence[float] | deque[float]) -> None:
        self._pauses = pauses
        self._counts: dict[str, EngineStats] = {}
        """By replica: as it has told them last."""
        self._prefills = deque[tuple[float, int]](maxlen=NUM_MEASURED)
        """Seconds of steps, and prompt tokens in them."""

    def told(self, name: str, stats: EngineStats) -> None:
        """A prefill replica has answered, with its counts until now."""
        before = self._counts.get(name, stats)
        num_tokens, seconds = (
            stats.prefilled - before.prefilled,
            stats.step_seconds - before.step_seconds,
        )
        if num_tokens > 0 and seconds > 0.0:
            self._prefills.append((seconds, num_tokens))
        self._counts[name] = dataclasses.replace(stats)

    def forget(self, name: str) -> None:
        """A replica is gone: that which comes in its place counts from 0."""
        self._counts.pop(name, None)

    def prefill_seconds(self, num_tokens: int) -> float:
        """To compute the tokens of prompts."""
        if len(self._prefills) < MIN_MEASURED:
            return num_tokens * SECONDS_PER_TOKEN
        seconds, tokens = map(sum, zip(*self._prefills, strict=True))
        return num_tokens * seconds / tokens

    def move_seconds(self, num_tokens: int) -> float:
        """The same for all lengths: but for the last chunk, pages go while others are computed."""
        if len(self._pauses) < MIN_MEASURED:
            return MOVE_SECONDS
        first = max(0, len(self._pauses) - NUM_MEASURED)
        return median(itertools.islice(self._pauses, first, None))


class PrefixMemory:
    """Which prefixes a replica has computed, as its ingress knows it: hashes of blocks of tokens,
    the least recently used of which are forgotten. What it has evicted may still be here.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks = OrderedDict[bytes, None]()

    def add(self, blocks: Iterable[bytes]) -> None:
        """A sequence with these blocks is computed there."""
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def num_tokens(self, blocks: Iterable[bytes]) -> int:
        """Tokens at the beginning of a sequence with these blocks that are known there."""
        return BLOCK * sum(1 for _ in itertools.takewhile(self._blocks.__contains__, blocks))


def blocks_of(tokens: Sequence[int], root: tuple[str, ...] = ()) -> Iterator[bytes]:
    """The hash of each full block of tokens and all before it. ``root``: what else keys and values
    depend on, or who may share them.
    """
    digest = repr(root).encode()
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        block = array("q", tokens[start : start + BLOCK]).tobytes()
        digest = blake2b(digest + block, digest_size=16).digest()
        yield digest


def num_shared_tokens(blocks: Iterable[bytes], others: Iterable[bytes]) -> int:
    """Tokens that two sequences with these blocks begin with, in full blocks."""
    pairs = zip(blocks, others, strict=False)
    return BLOCK * sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


class Prefiller(Protocol):
    """A prefill replica, as the split sees it."""

    name: str
    num_queued_tokens: int
    """Of prompts that it has yet to compute."""


_P = TypeVar("_P", bound=Prefiller)


@dataclass(frozen=True, slots=True)
class PrefillSplit:
    """Chooses where prompts are prefilled.

    Attributes:
        costs: measured.
        has_prefix_caches: whether replicas find prefixes that they have computed.
    """

    costs: Costs
    has_prefix_caches: bool = True

    def choose(
        self, here: Delays, length: int, places: Iterable[tuple[_P, int]]
    ) -> _P | None:
        """The prefill replica for a prompt of ``length`` tokens; None: it is computed where it
        decodes. ``places`` are those that take prompts, and how many of its tokens they lack.
        """
        place, num_uncomputed = min(
            places,
            key=lambda item: (item[0].num_queued_tokens + item[1], item[0].name),
            default=(None, 0),
        )
        if place is None:
            return None
        apart = Delays(place.num_queued_tokens, num_uncomputed)
        return place if is_apart(self.costs, here, apart, length) else None
