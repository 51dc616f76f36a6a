"""``bench cluster``: a trace on N simulated replicas, by events, under several policies.

The clock is that of the events, so that the same trace, step times and policy give the same
figures on any machine. Requests arrive at the times of the trace; a fork not before its parent has
generated the tokens that it keeps. What places them, and what moves them, is the code of
``cluster``. Messages between ingress and replicas take no time.

===============  ===================================================================================
``round_robin``  each request goes to the next replica
``placement``    ``cluster.placement.Placement``: by session and load, as ``serve --replicas``
``rebalancing``  the same, and ``cluster.migration.Rebalancing``: sequences move while they
                 generate. A copy takes its bytes over the bandwidth; the sequence pauses for the
                 last tokens of it and for ``MOVE_SECONDS``
===============  ===================================================================================

All replicas prefill in chunks beside their decodes. With ``num_prefill`` some of them compute the
prompts for which ``cluster.prefill.is_apart`` says so, and the sequences decode in the others.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from forethought.bench.arrivals import TraceRequest
from forethought.bench.serving import TARGETS, percentile
from forethought.bench.simulated_prefill import (
    MOVE_SECONDS,
    SimulatedSplit,
    StepCosts,
    best_split,
)
from forethought.bench.simulated_replica import SimulatedReplica, SimulatedSequence
from forethought.bench.step_times import MeasuredEngine, StepTimes
from forethought.cluster.migration import FEW_TOKENS, MAX_MOVES, PlannedMove, Rebalancing, balance
from forethought.cluster.placement import Placement
from forethought.cluster.prefill import check_split
from forethought.errors import ParameterError, UsageError
from forethought.evaluation.report import aligned

MAX_REPLICAS = 10_000
BANDWIDTH = 1e9
"""Bytes per second between replicas."""


class Placing(Protocol):
    """Chooses replicas, as ``Placement`` does."""

    def choose(
        self,
        places: Iterable[SimulatedReplica],
        key: str | None,
        current: SimulatedReplica | None,
    ) -> SimulatedReplica | None:
        """Where a generation begins; ``current`` has the tokens that it goes on from."""

    def opened(self, key: str | None, place: SimulatedReplica) -> None:
        """A sequence of a key has been opened somewhere."""

    def moved(self, key: str | None, place: SimulatedReplica) -> None:
        """A sequence of a key is somewhere else now."""

    def closed(self, key: str | None) -> None:
        """A sequence of a key has been closed."""


class RoundRobin:
    """Each request goes to the next replica, whatever it is."""

    def __init__(self) -> None:
        self._count = itertools.count()

    def choose(
        self,
        places: Iterable[SimulatedReplica],
        key: str | None,
        current: SimulatedReplica | None,
    ) -> SimulatedReplica | None:
        """The next one."""
        replicas = [*places]
        return replicas[next(self._count) % len(replicas)]

    def opened(self, key: str | None, place: SimulatedReplica) -> None:
        """Nothing depends on it."""

    def moved(self, key: str | None, place: SimulatedReplica) -> None:
        """Nothing depends on it."""

    def closed(self, key: str | None) -> None:
        """Nothing depends on it."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How requests are placed, and when sequences move; None: they stay."""

    placement: Callable[[], Placing]
    rebalancing: Rebalancing | None = None


POLICIES: Mapping[str, Policy] = {
    "round_robin": Policy(RoundRobin),
    "placement": Policy(Placement),
    "rebalancing": Policy(Placement, Rebalancing()),
}


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """What is simulated.

    Attributes:
        engine: of each replica.
        num_replicas: at least 1.
        num_prefill: how many of them prefill for the others.
        block_size: tokens per block of the trace.
        bandwidth: bytes per second between replicas.
    """

    engine: MeasuredEngine
    num_replicas: int
    block_size: int = 512
    bandwidth: float = BANDWIDTH
    num_prefill: int = 0

    def __post_init__(self) -> None:
        check_replicas(self.num_replicas)
        check_split(self.num_replicas, self.num_prefill)
        if self.block_size < 1:
            raise ParameterError("invalid block_size", f"got {self.block_size}", "Give 1 or more")
        if not self.bandwidth > 0:
            raise ParameterError("invalid bandwidth", f"got {self.bandwidth}", "Give more than 0")


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What a trace has come to under one policy.

    Attributes:
        policy: its name.
        sequences: all of them have ended.
        num_moved: sequences that have moved.
        num_prefill: of the replicas, those that prefill for the others.
        num_apart: sequences whose prompts they have computed.
    """

    policy: str
    sequences: Sequence[SimulatedSequence]
    replicas: Sequence[SimulatedReplica]
    num_moved: int = 0
    num_prefill: int = 0
    num_apart: int = 0

    @property
    def seconds(self) -> float:
        """From the first arrival to the last end."""
        return max(_end(sequence) for sequence in self.sequences)

    @property
    def num_output_tokens(self) -> int:
        """Generated by all requests."""
        return sum(sequence.num_output for sequence in self.sequences)

    @property
    def hit_share(self) -> float:
        """Prompt tokens that were found in a prefix cache, of all."""
        num_cached = sum(sequence.num_cached for sequence in self.sequences)
        return num_cached / sum(sequence.request.input_length for sequence in self.sequences)

    @property
    def utilisation(self) -> float:
        """Share of the time in which a replica computes, the mean of all."""
        busy = sum(replica.busy_seconds for replica in self.replicas)
        return busy / (len(self.replicas) * self.seconds)

    def latencies(self) -> dict[str, list[float]]:
        """Seconds of each kind, of the requests that have them."""
        values = defaultdict[str, list[float]](list)
        for sequence in self.sequences:
            for name, seconds in _latencies(sequence).items():
                values[name].append(seconds)
        return dict(values)

    def goodput(self, targets: Mapping[str, float]) -> float:
        """Requests per second that meet all targets, in seconds by the names of ``TARGETS``."""
        measured = map(_latencies, self.sequences)
        num_good = sum(
            all(values.get(TARGETS[name], 0.0) <= limit for name, limit in targets.items())
            for values in measured
        )
        return num_good / self.seconds

    def to_dict(self, targets: Mapping[str, float]) -> dict[str, Any]:
        """Plain values; latencies in milliseconds."""
        latencies = self.latencies()
        times = {
            f"{name}_p{percent}_ms": round(1e3 * percentile(latencies[name], percent), 3)
            for name in ("ttft", "tpot")
            for percent in (50, 99)
            if latencies.get(name)
        }
        return {
            "replicas": len(self.replicas),
            "prefill_replicas": self.num_prefill,
            "policy": self.policy,
            "num_requests": len(self.sequences),
            "num_output_tokens": self.num_output_tokens,
            "seconds": round(self.seconds, 3),
            "requests_per_second": round(len(self.sequences) / self.seconds, 3),
            "output_tokens_per_second": round(self.num_output_tokens / self.seconds, 1),
            **times,
            "goodput": round(self.goodput(targets), 3) if targets else None,
            "prefix_cache_hit_share": round(self.hit_share, 4),
            "utilisation": round(self.utilisation, 4),
            "num_moved": self.num_moved,
            "num_prefilled_apart": self.num_apart,
            "num_preemptions": sum(replica.num_preemptions for replica in self.replicas),
        }


class ClusterSimulation:
    """Runs one trace under one policy.

    Args:
        requests: by their times.

    Raises:
        UsageError: a request cannot be: it does not fit into the KV cache, or continues one that is
            not before it in the trace.
    """

    def __init__(
        self, settings: ClusterSettings, requests: Sequence[TraceRequest], policy: str
    ) -> None:
        times, engine = StepTimes.fit(settings.engine), settings.engine
        self._policy, rules = policy, POLICIES[policy]
        self._placement, size = rules.placement(), settings.block_size
        self.replicas = [
            SimulatedReplica(f"replica-{number}", engine, times, size)
            for number in range(settings.num_replicas)
        ]
        sources = self.replicas[: settings.num_prefill]
        self._decoding = self.replicas[settings.num_prefill :]
        costs = StepCosts.of(engine, times, settings.bandwidth)
        self._split = SimulatedSplit(costs, sources)
        self.sequences = _sequences(requests, engine, size)
        self._children = defaultdict[SimulatedSequence, list[SimulatedSequence]](list)
        self._moves = _Moves(rules.rebalancing, engine.kv_bytes / settings.bandwidth)
        self._events: list[tuple[float, int, Callable[..., None], Any]] = []
        self._order = itertools.count()
        self._due = dict.fromkeys(self.replicas, -1.0)
        """When the segment of each replica ends, or a new one is planned; below 0: never."""

    def run(self) -> SimulationResult:
        """Simulate until all requests have ended."""
        for sequence in self.sequences:
            if sequence.parent is None:
                self._at(sequence.request.at, self._arrive, sequence)
            else:
                self._children[sequence.parent].append(sequence)
        for parent, children in self._children.items():
            children.sort(key=lambda child: (-child.request.fork_at, -child.handle))
            parent.stops = [child.request.fork_at for child in children]
        while self._events:
            now, _, event, subject = heapq.heappop(self._events)
            event(now, subject)
        assert all(sequence.ended is not None for sequence in self.sequences), "nothing waits"
        num_prefill, num_apart = len(self._split.sources), self._split.num_apart
        return SimulationResult(
            self._policy,
            self.sequences,
            self.replicas,
            self._moves.num_moved,
            num_prefill,
            num_apart,
        )

    # ---- events -------------------------------------------------------------------------------

    def _at(self, time: float, event: Callable[..., None], subject: Any) -> None:
        heapq.heappush(self._events, (time, next(self._order), event, subject))

    def _arrive(self, now: float, sequence: SimulatedSequence) -> None:
        parent = sequence.parent
        current = None if parent is None else parent.link
        replica = self._placement.choose(self._decoding, sequence.key, current)
        assert replica is not None, "all replicas take requests"
        self._placement.opened(sequence.key, replica)
        sequence.arrived = now
        self._enter(now, sequence, self._split.begin(sequence, replica))
        self._rebalance(now)

    def _enter(self, now: float, sequence: SimulatedSequence, replica: SimulatedReplica) -> None:
        sequence.link = replica
        replica.load += 1
        replica.add(sequence, now)
        self._schedule(now, replica)

    def _schedule(self, now: float, replica: SimulatedReplica) -> None:
        """Have the replica go on when its segment ends; now, if there is none."""
        due = now if replica.segment is None else replica.segment.end
        if due != self._due[replica]:
            self._due[replica] = due
            self._at(due, self._advance, replica)

    def _advance(self, now: float, replica: SimulatedReplica) -> None:
        if self._due[replica] != now:  # the segment was cut, and has ended
            return
        self._due[replica] = -1.0
        news = [] if replica.segment is None else replica.finish(now)
        for sequence in news:
            self._tell(now, sequence, replica)
        replica.plan(now)
        if replica.segment is not None:
            self._schedule(now, replica)
        if news:
            self._rebalance(now)

    def _tell(self, now: float, sequence: SimulatedSequence, replica: SimulatedReplica) -> None:
        """A sequence has ended, leaves, or has the tokens that a fork waits for."""
        has_ended = sequence.ended is not None
        is_arriving = self._split.is_arriving(sequence) and not has_ended
        if not is_arriving:
            self._begin_forks(now, sequence)
        if has_ended:
            replica.load -= 1
            self._placement.closed(sequence.key)
            self._moves.drop(sequence)
            self._split.drop(sequence)
        elif is_arriving:
            sequence.is_leaving, sequence.has_pages = False, True
            self._at(now + self._split.pause(sequence), self._move_in, sequence)
        elif sequence.is_leaving:
            sequence.is_leaving, sequence.has_pages = False, True
            self._at(now + self._moves.pause, self._move_in, sequence)

    def _begin_forks(self, now: float, sequence: SimulatedSequence) -> None:
        has_ended, children = sequence.ended is not None, self._children.get(sequence, [])
        while children and (has_ended or children[-1].request.fork_at <= sequence.num_output):
            child = children.pop()
            sequence.stops.pop()
            self._at(max(now, child.request.at), self._arrive, child)

    # ---- moves --------------------------------------------------------------------------------

    def _rebalance(self, now: float) -> None:
        for move in self._moves.begin(self._decoding):
            self._at(now + move.copy_seconds, self._move_out, move.sequence)

    def _move_out(self, now: float, sequence: SimulatedSequence) -> None:
        """The copy has arrived: the sequence pauses, unless it has ended meanwhile."""
        replica = sequence.link
        if sequence.ended is not None:
            return
        assert replica is not None, "it has been placed"
        if replica.leave(sequence, now):
            self._at(now, self._move_in, sequence)
        self._schedule(now, replica)

    def _move_in(self, now: float, sequence: SimulatedSequence) -> None:
        """It goes on in the other replica."""
        is_prefilled = self._split.is_arriving(sequence)
        target = (self._split if is_prefilled else self._moves).arrive(sequence)
        assert sequence.link is not None, "it has been placed"
        sequence.link.load -= 1
        self._placement.closed(sequence.key)
        self._placement.opened(sequence.key, target)
        self._placement.moved(sequence.key, target)
        self._enter(now, sequence, target)
        self._rebalance(now)


@dataclass(frozen=True, slots=True)
class _Move:
    sequence: SimulatedSequence
    copy_seconds: float


@dataclass(slots=True)
class _Moves:
    """The moves in progress, by the rule that ``Migration`` has for loads."""

    rule: Rebalancing | None
    token_seconds: float
    """To copy the keys and values of one token."""
    num_moved: int = 0
    _targets: dict[SimulatedSequence, SimulatedReplica] = field(default_factory=dict)
    _planned: deque[PlannedMove] = field(default_factory=deque)

    @property
    def pause(self) -> float:
        """Seconds between the last token in the source and when the target may go on."""
        return MOVE_SECONDS + FEW_TOKENS * self.token_seconds

    def begin(self, replicas: list[SimulatedReplica]) -> list[_Move]:
        """Plan moves once none is in progress, and begin as many as may be at once."""
        if self.rule is None:
            return []
        links = cast(Any, replicas)
        if not self._targets and len(replicas) > 1 and self.rule.applies_to(links):
            most = max(replica.load for replica in replicas)
            fullest = (replica.sequences for replica in replicas if replica.load == most)
            remotes = cast(Any, itertools.chain.from_iterable(fullest))
            self._planned = deque(balance(links, remotes, self.rule))
        moves = []
        while self._planned and len(self._targets) < MAX_MOVES:
            remote, target = cast(tuple[Any, Any], self._planned.popleft())
            if remote.ended is None and remote.link is not target:
                self._targets[remote] = target
                moves.append(_Move(remote, remote.num_tokens * self.token_seconds))
        return moves

    def arrive(self, sequence: SimulatedSequence) -> SimulatedReplica:
        """A sequence is in its target now, which is returned."""
        self.num_moved += 1
        return self._targets.pop(sequence)

    def drop(self, sequence: SimulatedSequence) -> None:
        """A sequence has ended before it moved."""
        self._targets.pop(sequence, None)


def simulate(
    settings: ClusterSettings, requests: Sequence[TraceRequest], policy: str
) -> SimulationResult:
    """The result of a trace under one policy. Raises as ``ClusterSimulation``."""
    return ClusterSimulation(settings, requests, policy).run()


def simulation_table(results: Sequence[SimulationResult], targets: Mapping[str, float]) -> str:
    """A line per result; latencies in milliseconds."""
    has_split = any(result.num_prefill for result in results)
    head = ("replicas", "policy", "req/s", "tokens/s", "TTFT p50", "p99", "TPOT p50", "p99")
    last = ("prefill", "apart") if has_split else ()
    cells: list[tuple[str, ...]] = [(*head, "goodput", "cache hits", "busy", "moves", *last)]
    for result in results:
        row = result.to_dict(targets)
        names = [f"{name}_p{percent}_ms" for name in ("ttft", "tpot") for percent in (50, 99)]
        cells.append(
            (
                f"{row['replicas']:,}",
                result.policy,
                f"{row['requests_per_second']:,.2f}",
                f"{row['output_tokens_per_second']:,.0f}",
                *(f"{row[name]:,.1f}" if name in row else "" for name in names),
                "" if row["goodput"] is None else f"{row['goodput']:,.2f}",
                f"{result.hit_share:.1%}",
                f"{result.utilisation:.1%}",
                f"{result.num_moved:,}",
                *((f"{result.num_prefill:,}", f"{result.num_apart:,}") if has_split else ()),
            )
        )
    return aligned(cells, left_columns=(1,))


def split_lines(results: Sequence[SimulationResult], targets: Mapping[str, float]) -> Iterator[str]:
    """A line for each number of replicas and policy with several numbers of prefill replicas: which
    of them has the highest goodput.
    """
    groups = defaultdict[tuple[int, str], dict[int, float]](dict)
    for result in results:
        goodput = result.goodput(targets)
        groups[len(result.replicas), result.policy][result.num_prefill] = goodput
    for (num_replicas, policy), by_split in groups.items():
        if targets and len(by_split) > 1:
            best = best_split(by_split, by_split.__getitem__)
            words = f"{best} of them for prefill" if best else "one pool"
            others = ", ".join(f"{n}: {value:,.2f}" for n, value in sorted(by_split.items()))
            yield f"{num_replicas} replicas, {policy}: {words}; goodput by their number {others}"


def check_replicas(num_replicas: int) -> None:
    """Raises ParameterError for a number of replicas that is not simulated."""
    if not 1 <= num_replicas <= MAX_REPLICAS:
        why = f"got {num_replicas}"
        raise ParameterError("invalid replicas", why, f"Give 1 to {MAX_REPLICAS:,}")


def check_requests(requests: Sequence[TraceRequest], engine: MeasuredEngine) -> None:
    """Raises UsageError as ``ClusterSimulation``."""
    _sequences(requests, engine, 1)


def _sequences(
    requests: Sequence[TraceRequest], engine: MeasuredEngine, block_size: int
) -> list[SimulatedSequence]:
    sequences: dict[int, SimulatedSequence] = {}
    for handle, request in enumerate(requests):
        _check(request, engine, sequences)
        num_blocks = (request.input_length - 1) // block_size
        blocks = request.hash_ids[:num_blocks]
        sequences[request.number] = SimulatedSequence(handle, request, blocks)
    for sequence in sequences.values():
        _set_parent(sequence, sequences)
    return [*sequences.values()]


def _check(
    request: TraceRequest, engine: MeasuredEngine, earlier: Mapping[int, SimulatedSequence]
) -> None:
    num_tokens = request.input_length + request.output_length
    if num_tokens > engine.kv_tokens:
        raise UsageError(
            f"the request at {request.where} does not fit",
            f"it has {num_tokens:,} tokens, and the KV cache of a replica {engine.kv_tokens:,}",
            "Leave it out, or give step times of an engine with a larger cache",
        )
    if request.number in earlier:
        why = f"number {request.number} is that of {earlier[request.number].request.where}, too"
        raise UsageError(f"the request at {request.where} is there twice", why, "Number them anew")


def _set_parent(sequence: SimulatedSequence, sequences: Mapping[int, SimulatedSequence]) -> None:
    """Find what a request continues, and the key of both: the session, or else the origin."""
    request = sequence.request
    if request.fork_of is None:
        sequence.key = request.session or f"request {request.number}"
        return
    parent = sequences.get(request.fork_of)
    if parent is None or parent.handle >= sequence.handle:
        raise UsageError(
            f"the request at {request.where} continues none",
            f"there is no request {request.fork_of} before it in the trace",
            "Give the whole trace; of requests at one time, the origin comes first",
        )
    sequence.parent, sequence.key = parent, request.session or parent.key


def _latencies(sequence: SimulatedSequence) -> dict[str, float]:
    """Seconds by the names of ``bench serving``."""
    values = {"e2e": _end(sequence) - sequence.arrived}
    if sequence.first_token is not None:
        values["ttft"] = sequence.first_token - sequence.arrived
        if sequence.num_output > 1:
            values["tpot"] = (_end(sequence) - sequence.first_token) / (sequence.num_output - 1)
    return values


def _end(sequence: SimulatedSequence) -> float:
    assert sequence.ended is not None, "the simulation is over"
    return sequence.ended
