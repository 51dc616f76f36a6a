"""Prefill replicas in ``bench cluster``: which prompts they compute, by the rule of
``cluster/prefill.py`` on measured step times; and how many of them a load asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from forethought.bench.simulated_replica import SimulatedReplica, SimulatedSequence
from forethought.bench.step_times import MeasuredEngine, StepTimes, attended_tokens
from forethought.cluster.prefill import Delays, is_apart

MOVE_SECONDS = 0.005
"""Of a pause beside the copy: messages, and a step of the source."""
NUM_CANDIDATES = 6
"""Numbers of prefill replicas that are compared where none is given, one pool among them."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """``Costs`` of an engine: those of a full step's chunk, for each of its tokens."""

    token_seconds: float
    chunk: int
    copy_seconds: float
    """Of the keys and values of one token."""

    @classmethod
    def of(cls, engine: MeasuredEngine, times: StepTimes, bandwidth: float) -> StepCosts:
        """The costs of an engine whose pages go over with ``bandwidth`` bytes per second."""
        chunk = engine.max_num_tokens
        step = times.step(0, 0, chunk, attended_tokens(0, chunk)) + times.call(0)
        return cls(step / chunk, chunk, engine.kv_bytes / bandwidth)

    def prefill_seconds(self, num_tokens: int) -> float:
        """To compute the tokens of prompts."""
        return num_tokens * self.token_seconds

    def move_seconds(self, num_tokens: int) -> float:
        """Until a sequence goes on: all chunks but the last go over while others are computed."""
        return MOVE_SECONDS + min(num_tokens, self.chunk) * self.copy_seconds


@dataclass(slots=True)
class SimulatedSplit:
    """The prompts that prefill replicas compute.

    Attributes:
        sources: the prefill replicas; without one, all prompts are computed where they decode.
        num_apart: prompts that have gone over.
    """

    costs: StepCosts
    sources: Sequence[SimulatedReplica] = ()
    num_apart: int = 0
    _targets: dict[SimulatedSequence, SimulatedReplica] = field(default_factory=dict)

    def begin(self, sequence: SimulatedSequence, target: SimulatedReplica) -> SimulatedReplica:
        """Where a sequence begins that decodes in ``target``: there, or in a prefill replica, which
        it leaves after its prompt.
        """
        source = min(self.sources, key=lambda replica: _num_queued(replica, sequence), default=None)
        if source is None:
            return target
        here = Delays(target.num_queued_tokens, target.num_uncomputed(sequence), target.load)
        apart = Delays(source.num_queued_tokens, source.num_uncomputed(sequence))
        if not is_apart(self.costs, here, apart, sequence.num_tokens):
            return target
        sequence.is_leaving = True
        target.load += 1
        self._targets[sequence] = target
        return source

    def is_arriving(self, sequence: SimulatedSequence) -> bool:
        """Whether a sequence is on its way from a prefill replica."""
        return sequence in self._targets

    def pause(self, sequence: SimulatedSequence) -> float:
        """Seconds from its first token to when it can go on."""
        return self.costs.move_seconds(sequence.request.input_length)

    def arrive(self, sequence: SimulatedSequence) -> SimulatedReplica:
        """A sequence is in its target now, which is returned."""
        self.num_apart += 1
        return self._leave(sequence)

    def drop(self, sequence: SimulatedSequence) -> None:
        """A sequence has ended, perhaps with its first token."""
        if sequence in self._targets:
            self._leave(sequence)

    def _leave(self, sequence: SimulatedSequence) -> SimulatedReplica:
        target = self._targets.pop(sequence)
        target.load -= 1
        return target


def candidates(num_replicas: int) -> list[int]:
    """Numbers of prefill replicas to compare, from one pool up to three quarters."""
    highest = min(num_replicas - 1, max(1, 3 * num_replicas // 4))
    steps = range(NUM_CANDIDATES)
    return sorted({round(highest * step / (NUM_CANDIDATES - 1)) for step in steps})


def best_split(numbers: Iterable[int], goodput: Callable[[int], float]) -> int:
    """The number of prefill replicas with the highest goodput, the fewest of those within 1 %: one
    pool, where no split is better than that.
    """
    measured = {number: goodput(number) for number in numbers}
    limit = 0.99 * max(measured.values())
    return min(number for number, value in measured.items() if value >= limit)


def _num_queued(replica: SimulatedReplica, sequence: SimulatedSequence) -> tuple[int, str]:
    return replica.num_queued_tokens + replica.num_uncomputed(sequence), replica.name
