"""Replicas without a model or Ray, in this process: a token is a hash of what it follows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from forethought.cluster.engine import ClusterEngine
from forethought.cluster.fleet import Fleet
from forethought.cluster.link import Link, Reply
from forethought.cluster.messages import (
    Branch,
    Close,
    Command,
    Copied,
    Copy,
    Description,
    Generate,
    IngressForgotten,
    Prepare,
    Progress,
    Reach,
    Stop,
    Updates,
)
from forethought.cluster.migration import Rebalancing
from forethought.config.sampling import SamplingParams
from forethought.engine.base import Capabilities
from forethought.engine.scheduler import Limits
from forethought.engine.sequence import Sequence as EngineSequence
from forethought.errors import EngineStopped
from forethought.outputs import EngineLoad, EngineStats, FinishReason, Usage

GREEDY = {"temperature": 0.0, "max_tokens": 40, "seed": 0}
SEEDED = {"temperature": 1.0, "max_tokens": 40, "seed": 9}
"""Params of most streams."""
VOCABULARY = 1000
END = 0
ENDED = -1
"""In the place of the tokens that are left: the generation has been ended."""
PROCESSES = itertools.count()


def next_token(tokens: Sequence[int], params: SamplingParams, index: int) -> int:
    """A function of what a real engine's next token is a function of."""
    drawn = (params.seed, index) if params.temperature else ()
    digest = blake2b(repr((list(tokens), drawn)).encode(), digest_size=4).digest()
    return int.from_bytes(digest) % VOCABULARY


def expected(prompt: Sequence[int], params: SamplingParams, index: int = 0) -> list[int]:
    """The output that a prompt has."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < (params.max_tokens or 0):
        tokens.append(next_token(tokens, params, index))
        if tokens[-1] == END:
            break
    return tokens[len(prompt) :]


@dataclass
class Running:
    """A generation of a scripted replica."""

    command: Generate
    tokens: list[int]
    prompt_length: int
    num_told: int = 0
    num_uncomputed: int = 0
    """Of its tokens, before its first new one."""
    hold: float = math.inf
    """Tokens of output at which it stops."""


@dataclass
class ScriptedReplica:
    """A channel to itself. It computes one token of each generation when it is asked.

    Attributes:
        size: generations that run at once.
        capacity: tokens of the sequences that run at once; further ones wait.
        silent: it hangs: it answers nothing.
        is_full: it has no room for what is copied to it.
        is_quick: what it copies arrives before it tells of the end of the generation.
        num_computed: tokens of prompts and outputs that it was given or has computed.
        chunk: tokens of a prompt that it computes when it is asked; None: all.
    """

    name: str
    reply: Reply
    size: int = 4
    capacity: int = 4096
    sessions: dict[int, list[int]] = field(default_factory=dict)
    running: dict[int, Running] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    process: int = field(default_factory=lambda: next(PROCESSES))
    is_asked: bool = False
    is_dead: bool = False
    silent: bool = False
    is_full: bool = False
    is_quick: bool = False
    is_draining: bool = False
    has_left: bool = False
    copies: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    """By the handle elsewhere: tokens of a session, and how many it has beyond them."""
    fetching: dict[int, ScriptedReplica] = field(default_factory=dict)
    news: list[Progress] = field(default_factory=list)
    num_computed: int = 0
    num_messages: int = 0
    chunk: int | None = None
    waiting: list[Copy] = field(default_factory=list)
    """For chunks of prompts."""
    late: list[tuple[int, list[int], int]] = field(default_factory=list)
    """What was copied to it while it was silent."""

    def connect(self) -> None:
        capabilities = Capabilities(VOCABULARY, 4096, self.capacity)
        limits = Limits(self.size, 4096, 4096)
        self.reply(Description(self.process, capabilities, limits, frozenset({END})))

    def tell(self, number: int, commands: Sequence[Command]) -> None:
        assert number == self.num_messages, "messages are numbered"
        self.num_messages += 1
        if self.is_dead:
            self.reply(EngineStopped("the replica died"))
            return
        for command in commands:
            self.commands.append(command)
            self._run(command)

    def _run(self, command: Command) -> None:
        match command:
            case Branch(handle, source, length):
                assert length <= len(self.sessions[source])
                self.sessions[handle] = self.sessions[source][:length]
            case Generate(handle, number, length, rest):
                before = self.sessions[handle][:length] if length else []
                assert len(before) == length
                self.num_computed += len(rest)
                tokens = self.sessions[handle] = [*before, *rest]
                num_begun = command.begun.num_tokens
                running = Running(command, tokens, len(tokens) - num_begun, len(tokens))
                running.num_uncomputed = len(rest) if self.chunk else 0
                self.running[number] = running
            case Stop(number):
                self.running.pop(number, None)
            case Copy() if command.prompt_length:
                self.waiting.append(command)
            case Copy(handle, target, _, stop, generation):
                if generation is not None and generation in self.running:
                    self.news.append(self._stop(self.running.pop(generation)))
                tokens = self.sessions[handle]
                num_stored = min(stop, len(tokens) if generation is not None else len(tokens) - 1)
                self.copies[target] = tokens[:num_stored], 0
                if self.is_quick:
                    self._send_copies()
            case Close(handle):
                del self.sessions[handle]
                for number, running in [*self.running.items()]:
                    if running.command.handle == handle:
                        del self.running[number]
            case Reach(number, _, hold):
                if number in self.running:
                    self.running[number].hold = hold
            case Prepare():
                pass

    def _stop(self, running: Running) -> Progress:
        """What it has computed and not told, as it ends for a copy."""
        progress = self._advance(running, 1)
        if progress.finish_reason is None:
            progress.finish_reason = FinishReason.ABORT
        return progress

    def copy(self, handle: int, target: ScriptedReplica) -> None:
        self.fetching[handle] = target
        if self.is_dead:
            self._lose_copies()

    def _copy_chunks(self) -> None:
        """Copy what is computed by now of prompts that are copied as they are."""
        for copy in [*self.waiting]:
            running = self.running.get(-1 if copy.generation is None else copy.generation)
            tokens = self.sessions.get(copy.handle, [])
            has_begun = running is None or len(tokens) > copy.prompt_length
            num_stored = len(tokens) - (0 if running is None else running.num_uncomputed)
            if has_begun:
                if running is not None:
                    del self.running[running.command.generation]
                    self.news.append(Progress(copy.generation, finish_reason=FinishReason.ABORT))
                self.copies[copy.target] = tokens, ENDED
            elif num_stored > copy.start:
                self.copies[copy.target] = tokens[:num_stored], 0
            else:
                continue
            self.waiting.remove(copy)
            if copy.handle not in self.sessions:  # it was closed
                del self.copies[copy.target]
                error = EngineStopped("there is no such session")
                self.fetching.pop(copy.target).reply(Copied(copy.target, error=error))

    def receive(self, handle: int, tokens: list[int], num_left: int) -> None:
        if self.silent:
            self.late.append((handle, tokens, num_left))
            return
        if self.is_dead or self.is_full:
            self.reply(Copied(handle, error=EngineStopped("there is no room, or nobody")))
            return
        before = self.sessions.setdefault(handle, [])
        assert tokens[: len(before)] == before, "parts follow each other"
        num_bytes = 4 * (len(tokens) - len(before))
        has_ended, num_left = num_left == ENDED, max(0, num_left)
        self.reply(Copied(handle, len(tokens), num_left, num_bytes, has_ended=has_ended))
        before[:] = tokens

    def _send_copies(self) -> None:
        for handle in self.copies.keys() & self.fetching.keys():
            self.fetching.pop(handle).receive(handle, *self.copies.pop(handle))

    def _lose_copies(self) -> None:
        for handle, target in self.fetching.items():
            target.reply(Copied(handle, error=EngineStopped("the source died")))
        self.fetching.clear()

    def drain(self) -> None:
        self.is_draining = True

    def ask(self) -> None:
        self.is_asked = True
        if self.is_dead:
            self.reply(EngineStopped("the replica died"))

    def kill(self) -> None:
        self.is_dead = True

    def leave(self) -> None:
        self.has_left = True

    def die(self) -> None:
        """As ``kill -9``: what it has not told is lost."""
        self.is_dead = True
        self.sessions.clear()
        self.running.clear()
        self._lose_copies()
        if self.is_asked:
            self.reply(EngineStopped("the replica died"))

    def forget(self) -> None:
        """As after a lease: it has closed what its ingress had."""
        self.sessions.clear()
        self.running.clear()
        self._lose_copies()
        self.reply(IngressForgotten("the ingress is not known"))

    def work(self, num_tokens: int = 1) -> None:
        """Compute up to ``num_tokens`` of each generation, and answer."""
        if self.is_dead or self.silent:
            return
        while self.late:
            self.receive(*self.late.pop(0))
        if not self.is_asked:
            return
        self.is_asked = False
        self.news, news = [], self.news
        running, waiting, num_held = [*self.running.values()], list[Running](), 0
        for one in running:
            num_held += len(one.tokens)
            is_held = len(one.tokens) - one.prompt_length >= one.hold
            if self._computes_prompt(one) or is_held:
                continue
            if num_held <= self.capacity:
                news.append(self._advance(one, num_tokens))
            else:
                num_held -= len(one.tokens)
                waiting.append(one)
        load = EngineLoad(len(running) - len(waiting), len(waiting), num_held / self.capacity)
        stats = EngineStats(decoded=self.num_computed)
        self._copy_chunks()
        self.reply(Updates(news, load, stats, 0.0, self.is_draining))
        self._send_copies()

    def _computes_prompt(self, running: Running) -> bool:
        """Compute a chunk of a prompt; whether some of it is left."""
        running.num_uncomputed = max(0, running.num_uncomputed - (self.chunk or 0))
        return running.num_uncomputed > 0

    def _advance(self, running: Running, num_tokens: int) -> Progress:
        command, tokens, new = running.command, running.tokens, list[int]()
        limit = running.prompt_length + (command.params.max_tokens or 4096)
        reason = None
        while reason is None and len(new) < num_tokens:
            new.append(next_token(tokens, command.params, command.begun.index))
            tokens.append(new[-1])
            if new[-1] == END:
                reason = FinishReason.STOP
            elif len(tokens) == limit:
                reason = FinishReason.LENGTH
        self.num_computed += len(new)
        if reason is not None:
            self.running.pop(command.generation, None)
        usage = Usage(decoded=len(new))
        return Progress(command.generation, new, finish_reason=reason, usage=usage)


class Scripted:
    """A cluster of scripted replicas, and their engine."""

    def __init__(
        self,
        num_replicas: int = 2,
        *,
        size: int = 4,
        capacity: int = 4096,
        hang_seconds: float = 60.0,
        key: Callable[[], str | None] = lambda: None,
        rebalancing: Rebalancing | None = None,
        num_prefill: int = 0,
        chunk: int | None = None,
    ) -> None:
        self.chunk = chunk
        self.opened: list[ScriptedReplica] = []
        self.size, self.capacity = size, capacity
        self.failure: Exception | None = None
        self.fleet = Fleet(self._open, "replica", num_replicas, hang_seconds, num_prefill)
        self.fleet.wait(num_replicas)
        self.engine = ClusterEngine(self.fleet, 0, key, rebalancing)
        self.outputs: dict[EngineSequence, list[int]] = {}
        self.errors: dict[EngineSequence, Exception] = {}

    def _open(self, name: str, reply: Reply) -> ScriptedReplica:
        if self.failure is not None:
            raise self.failure
        replica = ScriptedReplica(name, reply, self.size, self.capacity, chunk=self.chunk)
        self.opened.append(replica)
        return replica

    @property
    def alive(self) -> list[ScriptedReplica]:
        """The replicas that have not died, by their names."""
        return sorted((r for r in self.opened if not r.is_dead), key=lambda replica: replica.name)

    def link(self, replica: ScriptedReplica) -> Link:
        """The engine's link to a replica."""
        return next(link for link in self.fleet.links if link.channel is replica)

    def start(self, prompt: Sequence[int], **fields: object) -> list[EngineSequence]:
        """Start a generation of a prompt; its tokens are told, but not computed."""
        sequences = self.engine.start(prompt, SamplingParams(**fields))
        self.outputs.update({sequence: [] for sequence in sequences})
        return sequences

    def step(self, num_tokens: int = 1) -> None:
        """Have all replicas compute, and take what they tell."""
        self.engine._flush()
        for replica in self.alive:
            replica.work(num_tokens)
        self.fleet.wake()
        for event in self.engine.step():
            self.outputs.setdefault(event.sequence, []).extend(event.tokens)
            if event.error is not None:
                self.errors[event.sequence] = event.error
        self.engine.check_integrity()

    def steps(self) -> Iterator[int]:
        """Step until nothing generates, at most 500 times."""
        for number in range(500):
            if not (self.engine._running or self.engine._homeless):
                return
            yield number
            self.step()
        raise AssertionError("it generates for ever")

    def finish(self) -> None:
        """Step until nothing generates."""
        for _ in self.steps():
            pass

    def expect_nothing_left(self) -> None:
        """No session is left in any replica, and no move."""
        self.step()
        assert not self.engine.migration._moves
        assert not any(replica.sessions for replica in self.alive)
