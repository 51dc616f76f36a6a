"""``ClusterEngine``: sequences whose tokens replicas compute, and which outlive them.

The ingress keeps of each sequence what it takes to go on with it anywhere: its tokens, its params
with the seed that was drawn here, and how many of the tokens are output of the generation that is
in progress. The uniform sample of a token is a pure function of (seed, sample, position), and
limits, penalties, shapes and thoughts are functions of the output, so that another replica goes on
with the same tokens. What a replica has computed and not told yet is computed again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from collections.abc import Sequence as Ids

from typing_extensions import override

from forethought.cluster.counts import ReplicaCounts, assign
from forethought.cluster.fleet import Fleet
from forethought.cluster.link import Link, Role
from forethought.cluster.messages import Branch, Close, Copied, Generate, Progress, Reach, Stop
from forethought.cluster.migration import Migration, Rebalancing
from forethought.cluster.placement import Placement
from forethought.cluster.prefill import MeasuredCosts, PrefillSplit, dequeue
from forethought.cluster.refusals import ReplicaRefusals
from forethought.cluster.remote import Remote
from forethought.config.sampling import SamplingParams
from forethought.engine.base import FRESH, Begun, Capabilities
from forethought.engine.sequence import Sequence, Status, num_common
from forethought.engine.step import Event
from forethought.errors import RequestError
from forethought.kv.pool import PagePool
from forethought.kv.table import PageTable
from forethought.model.sampling import Constraints, SequenceBreakers
from forethought.outputs import (
    GRAMMAR_COMPLETE,
    EngineLoad,
    EngineStats,
    FinishReason,
    SpeculationMetrics,
)
from forethought.speculative.step_runner import Interrupt

MAX_DEATHS = 3
"""Replicas in a row that may die soon after a generation has come to them: with the next one it
fails, perhaps the cause."""
ENOUGH_TOKENS = 8
"""Of a generation in a replica, after which it is not the cause of that one's death: it goes on
from its last tokens, and would meet what kills replicas at once."""
MAX_STARTS = 5
"""Failed starts in a row, while no replica is up, after which what waits for one fails."""


class _Wake(Interrupt):
    """Ends the wait for replicas."""

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__()
        self._wake = wake

    @override
    def request(self) -> None:
        if not self.is_requested:
            super().request()
            self._wake()


class ClusterEngine(ReplicaRefusals):
    """Has sequences computed by the replicas of a fleet, one of which is up.

    Args:
        key: the key of the request on whose behalf a sequence is opened; None: it has none.
        rebalancing: when sequences move because of the load; None: never.
        has_prefix_caches: whether replicas find prefixes that they have computed.

    Attributes:
        split: where prompts are prefilled, if some replicas are there for that.
        migration: moves sequences between replicas.
        num_moved: generations that have gone on elsewhere, as their replica had died.
    """

    def __init__(
        self,
        fleet: Fleet,
        seed: int | None = None,
        key: Callable[[], str | None] = lambda: None,
        rebalancing: Rebalancing | None = None,
        has_prefix_caches: bool = True,
    ) -> None:
        description = next(link.description for link in fleet.links if link.description)
        super().__init__(description.limits, seed)
        self.fleet, self._description, self._key = fleet, description, key
        self.interrupt, self.stats = _Wake(fleet.wake), EngineStats()
        self._counts = ReplicaCounts()
        self._placement, self._pool = Placement(), PagePool(1, 1)
        self._ids, self._handles, self._generations = (itertools.count() for _ in range(3))
        self._remotes: dict[Sequence, Remote] = {}
        self._running: dict[int, Remote] = {}
        self._homeless: dict[Remote, None] = {}
        """Generations that wait for a replica."""
        self._events: list[Event] = []
        self.num_moved = 0
        self.migration = Migration(self, fleet.links, self._remotes, self._handles, rebalancing)
        self._costs = MeasuredCosts()
        self.split = PrefillSplit(self._costs, has_prefix_caches) if fleet.num_prefill else None

    @property
    @override
    def capabilities(self) -> Capabilities:
        return self._description.capabilities

    @property
    @override
    def load(self) -> EngineLoad:
        loads = [link.engine_load for link in self.fleet.links if link.is_up]
        usage = sum(load.kv_cache_usage for load in loads) / max(1, len(loads))
        num_waiting = sum(load.waiting for load in loads) + len(self._homeless)
        return EngineLoad(sum(load.running for load in loads), num_waiting, usage)

    @property
    def eos_ids(self) -> frozenset[int]:
        """End-of-sequence tokens of the model."""
        return self._description.eos_ids

    @property
    @override
    def has_work(self) -> bool:
        return True  # replicas die and come while nothing generates

    # ---- sequences ----------------------------------------------------------------------------

    @override
    def start(
        self,
        prompt_ids: Ids[int],
        params: SamplingParams,
        *,
        keep: bool = False,
        constraints: Constraints | None = None,
        breakers: SequenceBreakers | None = None,
    ) -> list[Sequence]:
        seed, first = self._seed(params), self._new(prompt_ids, keep)
        samples = [first]
        one = params.replace(n=1, seed=seed)
        self._generate(first, one, FRESH)
        for index in range(1, params.n):
            sample = self._forked(first, len(prompt_ids), keep)
            self._generate(sample, one, Begun(index=index))
            samples.append(sample)
        return samples

    @override
    def open(self, prompt_ids: Ids[int]) -> Sequence:
        return self._new(prompt_ids, keep=True)

    @override
    def resume(
        self,
        sequence: Sequence,
        params: SamplingParams,
        *,
        constraints: Constraints | None = None,
        breakers: SequenceBreakers | None = None,
        begun: Begun = FRESH,
    ) -> None:
        self.check_resume(sequence, params)
        self._generate(sequence, params.replace(seed=self._seed(params)), begun)

    @override
    def fork(self, sequence: Sequence, length: int | None = None) -> Sequence:
        length = self._fork_length(sequence, length)
        return self._forked(sequence, length, keep=True)

    @override
    def rewind(self, sequence: Sequence, length: int) -> None:
        self._check_rewind(sequence, length)
        remote = self._remotes[sequence]
        num_output = len(sequence.tokens) - max(length, sequence.prompt_length)
        sequence.usage.discarded += num_output
        del sequence.tokens[length:]
        sequence.prompt_length = min(sequence.prompt_length, length)
        remote.length = min(remote.length, length)
        if sequence.extended_from is not None and sequence.extended_from >= length:
            sequence.extended_from = None

    @override
    def abort(self, sequence: Sequence) -> None:
        if not sequence.active:
            return
        remote = self._remotes[sequence]
        if remote.generation is not None and remote.link is not None:
            remote.link.send(Stop(remote.generation))
        self._end(remote)

    @override
    def cut(self, sequence: Sequence, length: int) -> None:
        self.abort(sequence)
        if sequence.status is Status.PARKED:
            self.rewind(sequence, length)
        else:
            sequence.usage.discarded += len(sequence.tokens) - length

    @override
    def close(self, sequence: Sequence) -> None:
        self.abort(sequence)
        sequence.status = Status.CLOSED
        if (remote := self._remotes.pop(sequence, None)) is not None:
            self.give_back(remote)

    @override
    def shutdown(self) -> None:
        self.fleet.close()

    def check_integrity(self) -> None:
        """Assert that what runs is counted where it runs, and nowhere else."""
        running = [remote for remote in self._remotes.values() if remote.generation is not None]
        assert {r.generation for r in running} == self._running.keys()
        for link in self.fleet.links:
            assert link.num_generating == sum(remote.link is link for remote in running)
            assert link.num_open == sum(r.link is link for r in self._remotes.values())
            queued = [r.num_queued_tokens for r in self._remotes.values() if r.link is link]
            assert link.num_queued_tokens == sum(queued)
            assert link.num_arriving == len(self.migration.arriving(link))
        active = {remote for s, remote in self._remotes.items() if s.active}
        assert active == {*running, *self._homeless}

    # ---- steps --------------------------------------------------------------------------------

    def wait_for(self, sequence: Sequence, count: float) -> None:
        """Somebody waits for ``count`` tokens of the output of a sequence: for the end, if that is
        infinite. Tokens come anyway, but gathered.
        """
        remote = self._remotes.get(sequence)
        if remote is None or remote.generation is None or self.migration.is_prefilling(remote):
            return
        hold = sequence.hold - sequence.prompt_length
        num_tokens = len(sequence.tokens) - sequence.prompt_length
        if math.isinf(count) or count <= num_tokens + 1:
            # of the first tokens, and of the end, it tells at once
            count = hold if num_tokens < hold < math.inf else remote.reach[0]
        if (count, hold) != remote.reach:
            self._reach(remote, count, hold)

    def _reach(self, remote: Remote, count: float, hold: float) -> None:
        assert remote.generation is not None, "it is running"
        assert remote.link is not None, "it is running"
        remote.reach = count, hold
        remote.link.send(Reach(remote.generation, count, hold))

    @override
    def step(self, max_steps: float = math.inf) -> list[Event]:
        self._flush()
        for link, updates in self.fleet.receive():
            if updates is None:
                self._costs.forget(link.name)
                self._lose(link)
                continue
            if isinstance(updates, Copied):
                self.migration.copied(updates)
                continue
            if link.role is Role.PREFILL:
                self._costs.told(link.name, updates.stats)
            for progress in updates.progress:
                self._take(progress)
        assign(self.stats, self._counts.total(self.fleet, self.migration.stats, self.num_moved))
        self._place_homeless()
        self.migration.step()
        self._flush()
        self._events, events = [], self._events
        return events

    def _flush(self) -> None:
        for link in self.fleet.links:
            link.flush()

    def _take(self, progress: Progress) -> None:
        """What a replica has told of a generation."""
        remote = self._running.get(progress.generation)
        if remote is None:  # it was ended here meanwhile
            return
        sequence, tokens = remote.sequence, progress.tokens
        if progress.error is not None:
            self._fail(remote, progress.error)
            return
        sequence.tokens += tokens
        if not remote.has_begun:
            self.migration.began(remote)
        remote.length, remote.has_begun = len(sequence.tokens), True
        dequeue(remote)
        if remote.paused_since:
            self._costs.moved(self.migration.resumed(remote))
        sequence.usage.prefilled += progress.usage.prefilled
        sequence.usage.cached += progress.usage.cached
        sequence.usage.decoded += len(tokens)
        if (scores := progress.prompt_logprobs) is not None:
            scores[: remote.num_unscored] = [None] * remote.num_unscored
            sequence.prompt_logprobs = scores
        sequence.drafted_steps += progress.drafted_steps
        if progress.metrics is not None:
            assign(sequence.metrics, remote.metrics_before + progress.metrics)
        reason, stop = progress.finish_reason, progress.stop_reason
        if reason is FinishReason.ABORT:  # of a ``Copy``
            reason = None
            self.migration.paused(remote)
        elif reason is not None:
            self._end(remote)
            sequence.finish_reason, sequence.stop_reason = reason, stop
        if reason is FinishReason.STOP and isinstance(stop, str) and stop != GRAMMAR_COMPLETE:
            reason = sequence.stop_reason = None  # a stop string, which the frontend sees as well
        event = Event(sequence, tokens, progress.logprobs, reason, confidences=progress.confidences)
        self._events.append(event)

    def _fail(self, remote: Remote, error: Exception) -> None:
        self._end(remote)
        self.give_back(remote)
        self._events.append(Event(remote.sequence, [], error=error))

    # ---- where sequences are computed ---------------------------------------------------------

    def _new(self, tokens: Ids[int], keep: bool) -> Sequence:
        sequence = Sequence(
            id=next(self._ids),
            tokens=list(tokens),
            prompt_length=len(tokens),
            params=SamplingParams(),
            table=PageTable(self._pool),
            status=Status.PARKED,
            keep=keep,
        )
        self._remotes[sequence] = Remote(sequence, self._key())
        return sequence

    def _forked(self, sequence: Sequence, length: int, keep: bool) -> Sequence:
        child, source = self._new(sequence.tokens[:length], keep), self._remotes[sequence]
        remote = self._remotes[child]
        remote.adapter = source.adapter
        if self.migration.is_prefilling(source):
            remote.origin, remote.is_fork = source, True
        else:
            self._branch(remote, source, length)
        return child

    def _branch(self, remote: Remote, source: Remote, length: int) -> None:
        """Open a sequence where another one has its first tokens."""
        if source.link is not None and source.link.is_up and source.length >= length > 0:
            self._opened(remote, source.link, next(self._handles), length)
            source.link.send(Branch(remote.handle, source.handle, length))

    def _generate(self, sequence: Sequence, params: SamplingParams, begun: Begun) -> None:
        remote = self._remotes[sequence]
        if params.adapter is not None:
            remote.adapter = params.adapter
        sequence.params, sequence.index = params.replace(adapter=remote.adapter or ""), begun.index
        sequence.prompt_length = len(sequence.tokens) - begun.num_tokens
        remote.num_unscored = sequence.extended_from or 1
        sequence.finish_reason = sequence.stop_reason = sequence.extended_from = None
        sequence.hold, sequence.prompt_logprobs = math.inf, []
        is_scored = begun.index > 0 or remote.num_unscored == sequence.prompt_length
        if params.prompt_logprobs is not None and is_scored:  # with the first sample, or not at all
            sequence.prompt_logprobs = [None] * sequence.prompt_length
        sequence.metrics, sequence.drafted_steps = SpeculationMetrics(), []
        sequence.status = Status.WAITING
        remote.metrics_before, remote.num_deaths = SpeculationMetrics(), 0
        if _is_computed(sequence):
            self._homeless[remote] = None  # until the next step, which ends it
        else:
            self._place(remote)

    def _place(self, remote: Remote) -> None:
        """Have a sequence generate in the replica that has it, or elsewhere from its tokens."""
        self._share(remote)
        target, source = self._choose(remote, remote.link), None
        if self.split is not None and target is not None and remote.origin is None:
            arriving = self.migration.arriving(target)
            source = self.split.choose(remote, target, self.fleet.links, arriving)
        if target is None or remote.origin is not None:
            self._homeless[remote] = None
            return
        link = target if source is None else source
        if remote.link is not link:
            self.give_back(remote)
            self._opened(remote, link, next(self._handles), home=target)
        self._begin(remote, link)
        if source is not None and self.migration.move(remote, target):
            num_output = len(remote.sequence.tokens) - remote.sequence.prompt_length
            self._reach(remote, num_output + 1, num_output + 1)

    def _choose(self, remote: Remote, current: Link | None) -> Link | None:
        """Where a sequence decodes. Prefill replicas do so only while no other one takes any."""
        links = [link for link in self.fleet.links if link.decodes or link is current]
        if not any(link.takes for link in links):
            links = self.fleet.links
        return self._placement.choose(links, remote.key, current)

    def _share(self, remote: Remote) -> None:
        """Share the pages of what a sequence waits for, if they have arrived where it decodes."""
        origin = remote.origin
        if origin is None or self.migration.is_prefilling(origin):
            return
        remote.origin = None
        if remote.is_fork:
            remote.is_fork = False
            num_shared = num_common([origin.sequence, remote.sequence])
            self._branch(remote, origin, min(num_shared, origin.length))

    def _begin(self, remote: Remote, link: Link) -> None:
        """Have a sequence generate in the replica that has it."""
        sequence, params = remote.sequence, remote.sequence.params
        if sequence.prompt_logprobs:  # they are known from before
            params = params.replace(prompt_logprobs=None)
        num_output = len(sequence.tokens) - sequence.prompt_length
        remote.generation, remote.has_begun = next(self._generations), False
        remote.num_generations += 1
        if self.split is not None:
            self.split.enqueue(remote, link)
        remote.reach = math.inf, math.inf
        command = Generate(
            remote.handle,
            remote.generation,
            remote.length,
            sequence.tokens[remote.length :],
            params,
            Begun(num_output, sequence.index),
        )
        link.send(command)
        remote.length, sequence.status = len(sequence.tokens), Status.RUNNING
        remote.length_before = len(sequence.tokens)
        self._running[remote.generation] = remote
        link.num_generating += 1
        link.num_begun += 1

    def _opened(
        self, remote: Remote, link: Link, handle: int, length: int = 0, home: Link | None = None
    ) -> None:
        """A session has been opened; ``home`` is where it goes on, if that is another replica."""
        remote.link, remote.handle, remote.length = link, handle, length
        self._placement.opened(remote.key, home or link)
        link.num_open += 1

    def give_back(self, remote: Remote) -> None:
        """Give up the session of a sequence in its replica."""
        if remote.link is not None:
            remote.link.send(Close(remote.handle))
            remote.link.num_open -= 1
            self._placement.closed(remote.key)
        remote.link, remote.length = None, 0

    def relocate(self, remote: Remote, link: Link, handle: int, length: int) -> None:
        """A session of the first ``length`` tokens is in another replica: go on with it there."""
        is_running = remote.generation is not None
        if is_running:
            self._leave(remote)
        self.give_back(remote)
        self._opened(remote, link, handle, length)
        self._placement.moved(remote.key, link)
        if is_running:
            self._begin(remote, link)

    def go_on(self, remote: Remote) -> None:
        """A generation has ended in its replica for a move that failed: go on there."""
        link = remote.link
        assert link is not None, "it was running"
        self._leave(remote)
        self._begin(remote, link)

    def release(self, remote: Remote) -> None:
        """The prompt of a sequence is not going to leave for its target: generate where it is."""
        self._reach(remote, math.inf, math.inf)

    def place_for(self, remote: Remote) -> Link | None:
        """Where a sequence that leaves its replica goes on: with those of its request."""
        return self._choose(remote, None)

    def _leave(self, remote: Remote) -> None:
        """A generation no longer runs where it was."""
        assert remote.generation is not None, "it was running"
        assert remote.link is not None, "it was running"
        dequeue(remote)
        del self._running[remote.generation]
        remote.link.num_generating -= 1
        remote.generation = None
        remote.metrics_before = remote.sequence.metrics.copy()

    def _end(self, remote: Remote) -> None:
        """A generation is over."""
        sequence = remote.sequence
        self._homeless.pop(remote, None)
        remote.origin, remote.is_fork, remote.paused_since = None, False, 0.0
        if remote.generation is not None:
            if self.split is not None:
                self.split.ended(remote)
            self._leave(remote)
        sequence.status = Status.PARKED
        if not sequence.keep:
            sequence.status = Status.CLOSED
            del self._remotes[sequence]
            self.give_back(remote)

    def _lose(self, link: Link) -> None:
        """A replica is gone, or what this ingress had there: its generations go on elsewhere, and
        its other sequences are computed again when they generate next.
        """
        if not link.has_forgotten:
            self._counts.lost(link)
        self.migration.lost(link)
        for remote in [r for r in self._remotes.values() if r.link is link]:
            is_running = remote.generation is not None
            if is_running:
                self._leave(remote)
            remote.link, remote.length = None, 0
            self._placement.closed(remote.key)
            if not is_running:
                continue
            remote.sequence.status = Status.WAITING
            if len(remote.sequence.tokens) - remote.length_before >= ENOUGH_TOKENS:
                remote.num_deaths = 0
            remote.num_deaths += not link.has_forgotten
            self.num_moved += 1
            self._homeless[remote] = None
        self._placement.lost(link)

    def _place_homeless(self) -> None:
        """Let the generations that wait for a replica go on where there is one."""
        is_hopeless = not any(link.is_up for link in self.fleet.links) and all(
            link.num_failures >= MAX_STARTS for link in self.fleet.links
        )
        for remote in [*self._homeless]:
            if _is_computed(remote.sequence):
                self._end(remote)
                remote.sequence.finish_reason = FinishReason.LENGTH
                self._events.append(Event(remote.sequence, [], None, FinishReason.LENGTH))
            elif is_hopeless:
                why = f"none has started after {MAX_STARTS} attempts: {self.fleet.failure}"
                self._fail(remote, RequestError("there is no replica", why, "See their logs"))
            elif remote.num_deaths > MAX_DEATHS:
                self._fail(remote, _fatal(remote.num_deaths))
            elif remote.origin is not None and self.migration.is_prefilling(remote.origin):
                continue
            elif any(link.takes for link in self.fleet.links):
                del self._homeless[remote]
                self._place(remote)


def _is_computed(sequence: Sequence) -> bool:
    """Whether a generation is of no token, and its prompt needs no scores any more."""
    return sequence.params.max_tokens == 0 and bool(sequence.prompt_logprobs)


def _fatal(num_deaths: int) -> RequestError:
    return RequestError(
        "the request was ended",
        f"{num_deaths} replicas have died soon after it had come to them, perhaps of it",
        "See the logs of their processes",
    )
