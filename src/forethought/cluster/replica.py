"""``Replica``: one engine of several, an actor of Ray that runs the sessions of its ingresses.

It does not import Ray: an actor is made of the class by ``cluster.actors``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from forethought.backends.tensor_parallel.launcher import Launcher
from forethought.cluster.connection import Listener, portable
from forethought.cluster.entrance import LOOPBACK, Entrance
from forethought.cluster.messages import (
    Branch,
    Close,
    Command,
    Copied,
    Copy,
    Description,
    Generate,
    IngressForgotten,
    Pages,
    Prepare,
    Progress,
    Reach,
    Stop,
    Updates,
)
from forethought.config.sampling import SamplingParams
from forethought.engine.snapshot import SequenceSnapshot
from forethought.errors import EngineStopped, ForethoughtError, RequestError
from forethought.llm.async_llm import AsyncLLM
from forethought.llm.async_session import AsyncSession, SessionStream
from forethought.llm.frontend import Frontend
from forethought.outputs import CompletionOutput, EngineLoad, Usage

log = logging.getLogger(__name__)

GATHER = 0.05
"""Seconds in which tokens of a generation are gathered, after its first ones and unless somebody
waits for a number of them."""
HEARTBEAT = 0.5
"""Seconds after which an ingress is answered though nothing is new."""
LEASE = 30.0
"""Seconds without a question after which the sessions of an ingress are closed: it has died."""
ORPHAN = 600.0
"""Seconds without any ingress after which a replica retires."""
COPY_BYTES = 8 * 2**20
"""Of keys and values that are copied to another replica at once, while a sequence generates."""
POLL = 0.002
"""Seconds after which a prompt that is copied as it is computed is looked at again."""
MAX_EARLY = 1024
"""Messages of an ingress that may wait for one before them."""


@dataclass(eq=False, slots=True)
class _Generation:
    """A generation, and what has been told of it."""

    number: int
    session: AsyncSession
    stream: SessionStream
    num_begun: int
    num_told: int
    usage: Usage
    """Of its session, as told."""
    num_steps_told: int = 0
    following: asyncio.Task[None] | None = None
    waiting: set[asyncio.Task[None]] = field(default_factory=set)
    is_over: bool = False

    def progress(self, output: CompletionOutput) -> Progress:
        """What is new in an output."""
        first, usage = self.num_told, self.session.usage
        scores = slice(first - self.num_begun, None)
        progress = Progress(
            self.number,
            output.token_ids[first:],
            output.logprobs and output.logprobs[scores],
            output.confidences and output.confidences[scores],
            output.finish_reason,
            output.stop_reason,
            output.metrics,
            output.drafted_steps[self.num_steps_told :],
            usage - self.usage,
        )
        if first == self.num_begun:
            progress.prompt_logprobs = self.session.prompt_logprobs or None
        self.num_told, self.num_steps_told = len(output.token_ids), len(output.drafted_steps)
        self.usage, self.is_over = usage, output.finish_reason is not None
        return progress

    def cancel(self) -> None:
        """Tell nothing more, and end it."""
        self.is_over = True
        for task in (*self.waiting, self.following):
            if task is not None:
                task.cancel()
        self.stream.leave()


@dataclass(eq=False, slots=True)
class _Ingress:
    """The sessions of one ingress, and what it has to be told."""

    sessions: dict[int, AsyncSession] = field(default_factory=dict)
    generations: dict[int, _Generation] = field(default_factory=dict)
    by_handle: dict[int, _Generation] = field(default_factory=dict)
    """The current or last generation of a session, until it goes on."""
    early: dict[int, Sequence[Command]] = field(default_factory=dict)
    """Messages that have come before an earlier one, by their numbers."""
    num_messages: int = 0
    copies: dict[int, asyncio.Future[Pages]] = field(default_factory=dict)
    """Of ``Copy`` commands, by the handle elsewhere, until they are fetched."""
    news: list[Progress] = field(default_factory=list)
    has_news: asyncio.Event = field(default_factory=asyncio.Event)
    last_seen: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class Traffic:
    """What a replica has copied to others, and what they have copied to it.

    Attributes:
        num_sent: generations that have gone on elsewhere.
        num_received: the same, from elsewhere.
        pages_sent: pages of the KV cache that their tokens and those of parked sequences fill.
    """

    num_sent: int = 0
    num_received: int = 0
    pages_sent: int = 0
    pages_received: int = 0


class Status(NamedTuple):
    """Of a replica, for its operator."""

    is_draining: bool
    load: EngineLoad
    traffic: Traffic


class Replica:
    """Runs sessions for ingresses. Raises as ``AsyncLLM``; its methods EngineStopped if the engine
    has died, or the ingress is not known (any more): whatever it had here is gone.

    Args:
        fields: of ``LlmArgs``.
        directory: that paths in them are relative to, if there is one of this name here.
        ranks: where the other ranks are started, if there are some; None: on this machine.
        host: says the address of this machine, at which ingresses connect; None: they do not.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        directory: str | None = None,
        ranks: Launcher | None = None,
        host: Callable[[], str] | None = None,
    ) -> None:
        self._fields, self._directory, self._ranks = fields, directory, ranks
        self._host, self._listener = host, Listener(self)
        self._loading = asyncio.Lock()  # of the model, and of where it listens
        self._loaded: AsyncLLM | None = None
        self._ingresses: dict[str, _Ingress] = {}
        self._steps, self._stepped = 0, time.monotonic()
        self._orphaned = time.monotonic()
        self._guard: asyncio.Task[None] | None = None
        self._unfinished = set[asyncio.Task[None]]()
        self._is_draining = False
        self._traffic = Traffic()

    async def connect(self, ingress: str, machine: str | None = None) -> Description:
        """Begin to take commands of an ingress, which connects from the machine with this address.
        The first one has the model loaded.
        """
        async with self._loading:
            if self._loaded is None:
                self._loaded = await asyncio.to_thread(self._load)
            entrance = await self._entrance(machine)
        self._check()
        self._ingresses[ingress] = _Ingress()
        if self._guard is None:
            self._guard = asyncio.create_task(self._expire())
        engine = self._llm._frontend.local_engine
        eos_ids = frozenset(engine.runner.lm.eos_token_ids)
        return Description(os.getpid(), engine.capabilities, engine.limits, eos_ids, entrance)

    async def tell(self, ingress: str, number: int, commands: Sequence[Command]) -> None:
        """Run commands, after those of the messages before; ``number`` counts messages from 0."""
        self._check()
        asker = self._known(ingress)
        asker.early[number] = commands
        if len(asker.early) > MAX_EARLY:
            raise IngressForgotten("messages of the ingress were lost", "", "It connects again")
        while (commands := asker.early.pop(asker.num_messages, ())) != ():
            asker.num_messages += 1
            for command in commands:
                await self._run(asker, command)

    async def updates(self, ingress: str) -> Updates:
        """What is new: at once, if there is something, or as soon as there is."""
        asker = self._known(ingress)
        asker.last_seen = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT):
                await asker.has_news.wait()
        self._check()
        asker.has_news.clear()
        asker.news, news = [], asker.news
        asker.last_seen = time.monotonic()
        return Updates(news, self._llm.load, self._llm.stats, self._stalled(), self._is_draining)

    async def pages(self, ingress: str, handle: int) -> Pages:
        """What the ``Copy`` with this handle elsewhere has copied, once it has been run."""
        asker = self._known(ingress)
        try:
            return await self._copy_of(asker, handle)
        finally:
            asker.copies.pop(handle, None)

    async def receive(self, ingress: str, handle: int, pages: Pages) -> Copied:
        """Store what another replica has copied, after what is there of the session."""
        asker, saved = self._known(ingress), pages.saved
        session = asker.sessions.get(handle)
        try:
            if session is None:
                session = await AsyncSession.restored(self._llm, self._llm._thread, saved)
                asker.sessions[handle] = session
            else:
                await session.append(saved)
        except Exception as error:
            return Copied(handle, error=portable(error))
        self._traffic.num_received += pages.has_ended
        self._traffic.pages_received += self._num_pages(saved)
        length = len(saved.token_ids)
        return Copied(handle, length, pages.num_left, saved.num_bytes, has_ended=pages.has_ended)

    async def drain(self) -> None:
        """Have all ingresses leave, with their sequences."""
        self._is_draining = True
        for asker in self._ingresses.values():
            asker.has_news.set()

    async def status(self) -> Status:
        """What ``forethought cluster`` shows of it."""
        load = EngineLoad(0, 0, 0.0) if self._loaded is None else self._loaded.load
        return Status(self._is_draining, load, self._traffic)

    async def leave(self, ingress: str) -> int:
        """Close the sessions of an ingress; returns how many others ask for updates."""
        now = time.monotonic()
        if (asker := self._ingresses.pop(ingress, None)) is not None:
            self._orphaned = now
            await self._close(asker)
        recent = now - 4 * HEARTBEAT
        return sum(other.last_seen > recent for other in self._ingresses.values())

    def retire(self) -> None:
        """End the other ranks: no ingress has asked for ``ORPHAN`` seconds."""
        if self._ranks is not None:
            self._ranks.release()

    async def _entrance(self, machine: str | None) -> Entrance | None:
        """Where an ingress connects: from this machine at its loopback, which no other one reaches.
        None: it calls the actor.
        """
        if machine is None or self._host is None:
            return None
        host = self._host()
        try:
            return await self._listener.open(LOOPBACK if machine == host else host)
        except OSError as error:
            log.warning("no connections at %s: %s. Calls of Ray take their place", host, error)
            return None

    def _load(self) -> AsyncLLM:
        if self._directory is not None:
            with contextlib.suppress(OSError):
                os.chdir(self._directory)
        fields = dict(self._fields)
        model = fields.pop("model", None)
        return AsyncLLM.of(Frontend.build(model, fields, launcher=self._ranks))

    @property
    def _llm(self) -> AsyncLLM:
        assert self._loaded is not None, "an ingress has connected"
        return self._loaded

    # ---- commands: none of them waits, so that they run in their order --------------------------

    async def _run(self, asker: _Ingress, command: Command) -> None:
        match command:
            case Branch(handle, source, length):
                if source in asker.sessions:  # else what was to open it has failed
                    asker.sessions[handle] = await asker.sessions[source].branch(length)
            case Generate():
                await self._generate(asker, command)
            case Reach(number, count, hold):
                if (generation := asker.generations.get(number)) is not None:
                    work = self._reach(asker, generation, count, hold)
                    generation.waiting.add(task := asyncio.create_task(work))
                    task.add_done_callback(generation.waiting.discard)
            case Stop(number):
                if (generation := asker.generations.pop(number, None)) is not None:
                    generation.cancel()
            case Copy():
                self._copy(asker, command)
            case Prepare(params):
                self._later(self._prepare(params))
            case Close(handle):
                await self._close_session(asker, handle)

    async def _generate(self, asker: _Ingress, command: Generate) -> None:
        try:
            session = await self._prepared(asker, command)
            stream = session.stream(command.params, begun=command.begun, with_text=False)
        except Exception as error:
            self._fail(asker, command.generation, error)
            return
        begun = command.begun.num_tokens
        usage = Usage() if command.length == 0 else session.usage
        generation = _Generation(command.generation, session, stream, begun, begun, usage)
        asker.generations[command.generation] = asker.by_handle[command.handle] = generation
        generation.following = asyncio.create_task(self._follow(asker, generation))

    async def _prepared(self, asker: _Ingress, command: Generate) -> AsyncSession:
        """The session of a handle with exactly the tokens that the command goes on from."""
        handle, length, rest = command.handle, command.length, list(command.rest)
        before = asker.by_handle.pop(handle, None)
        if length == 0:
            session = AsyncSession(self._llm, self._llm._thread, rest)  # checked by the ingress
            if command.params.prompt_logprobs is not None:  # of what is added to a session
                session = await self._branched(session, 1, rest[1:], command.params)
        else:
            if handle not in asker.sessions:
                raise RequestError("the session cannot go on", "what it is a fork of has failed")
            session = asker.sessions[handle]
            was_stopped = before is not None and before.number not in asker.generations
            if rest or was_stopped or len(session.tokens) != length:
                session = await self._branched(session, length, rest, command.params)
        if before is not None:
            asker.generations.pop(before.number, None)
        asker.sessions[handle] = session
        return session

    async def _branched(
        self, session: AsyncSession, length: int, rest: list[int], params: SamplingParams
    ) -> AsyncSession:
        """Another session in the place of one, which is closed."""
        branch = await session.branch(length, rest, params)
        self._close_soon(session)
        return branch

    def _close_soon(self, session: AsyncSession) -> None:
        self._later(session.close())

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        self._unfinished.add(task := asyncio.create_task(work))
        task.add_done_callback(self._unfinished.discard)

    async def _close_session(self, asker: _Ingress, handle: int) -> None:
        generation = asker.by_handle.pop(handle, None)
        if generation is not None and generation.number in asker.generations:
            del asker.generations[generation.number]
            generation.cancel()
        session = asker.sessions.pop(handle, None)
        if session is not None:
            self._close_soon(session)

    def _copy(self, asker: _Ingress, command: Copy) -> None:
        """Queue a copy on the engine's thread, after the commands before it."""
        pages, session = self._copy_of(asker, command.target), asker.sessions.get(command.handle)
        if session is None:  # what was to open it has failed
            pages.set_exception(RequestError("the session cannot move", "it was never opened"))
            return
        copied = None if command.prompt_length else self._capture(session, command)
        self._later(self._answer_copy(asker, session, command, copied))

    def _capture(
        self, session: AsyncSession, command: Copy, is_last: bool | None = None
    ) -> Future[SequenceSnapshot]:
        ends, start = command.generation is not None if is_last is None else is_last, command.start
        stop = min(command.stop, start + self._copy_tokens())
        try:
            return session.capture(start, stop, ends=ends)
        except Exception as error:
            failed = Future[SequenceSnapshot]()
            failed.set_exception(error)
            return failed

    async def _answer_copy(
        self,
        asker: _Ingress,
        session: AsyncSession,
        command: Copy,
        copied: Future[SequenceSnapshot] | None,
    ) -> None:
        """Give what was copied to the other replica; None: wait for a chunk of the prompt first."""
        pages, is_last = self._copy_of(asker, command.target), command.generation is not None
        try:
            if copied is None:
                is_last = await self._has_chunk(asker, session, command)
                copied = self._capture(session, command, is_last)
            saved = await asyncio.wrap_future(copied)
        except Exception as error:
            if not pages.done():  # else nobody waits for it
                pages.set_exception(portable(error))
            return
        stored = min(command.stop, session.num_computed)
        self._traffic.num_sent += is_last
        self._traffic.pages_sent += self._num_pages(saved)
        if not pages.done():
            num_left = max(0, int(stored) - len(saved.token_ids))
            pages.set_result(Pages(saved, num_left, is_last))

    async def _has_chunk(self, asker: _Ingress, session: AsyncSession, command: Copy) -> bool:
        """Wait until a chunk of a prompt is stored; whether it is the last one, or nothing more
        comes.
        """
        number = command.generation
        generation = asker.generations.get(-1 if number is None else number)
        while generation is not None and asker.generations.get(generation.number) is generation:
            num_new = session.num_computed - command.start
            if generation.is_over or generation.num_told > generation.num_begun:
                return num_new <= self._copy_tokens()
            if num_new > 0:
                return False
            await asyncio.sleep(POLL)
        return True

    async def _prepare(self, params: SamplingParams) -> None:
        with contextlib.suppress(ForethoughtError):  # the generation will tell of it
            await self._llm._frontend.grammars.compiled(params)

    def _copy_of(self, asker: _Ingress, handle: int) -> asyncio.Future[Pages]:
        if handle not in asker.copies:
            asker.copies[handle] = asyncio.get_running_loop().create_future()
        return asker.copies[handle]

    def _num_pages(self, saved: SequenceSnapshot) -> int:
        """That a copied part of a sequence begins or fills."""
        size = self._llm._frontend.local_engine.runner.storage.page_size
        return -(-saved.stop // size) - saved.start // size if saved.num_stored else 0

    def _copy_tokens(self) -> int:
        """Tokens that are copied at once."""
        storage = self._llm._frontend.local_engine.runner.storage
        return max(1, COPY_BYTES * storage.page_size // storage.bytes_per_page)

    # ---- generations --------------------------------------------------------------------------

    async def _follow(self, asker: _Ingress, generation: _Generation) -> None:
        """Tell what is generated: the first tokens at once, others as they are gathered."""
        try:
            async for output in generation.stream:
                self._tell(asker, generation, output)
                await generation.stream.pause(GATHER)
        except Exception as error:
            self._fail(asker, generation.number, error)

    async def _reach(
        self, asker: _Ingress, generation: _Generation, count: float, hold: float
    ) -> None:
        """Tell at once when there are ``count`` tokens."""
        with contextlib.suppress(ForethoughtError):  # ``_follow`` tells of it
            self._tell(asker, generation, await generation.stream.reach(count, hold))

    def _tell(self, asker: _Ingress, generation: _Generation, output: CompletionOutput) -> None:
        is_new = len(output.token_ids) > generation.num_told or output.finish_reason is not None
        if is_new and not generation.is_over:
            asker.news.append(generation.progress(output))
            asker.has_news.set()

    def _fail(self, asker: _Ingress, number: int, error: Exception) -> None:
        if (generation := asker.generations.get(number)) is not None:
            generation.is_over = True
        if not isinstance(error, EngineStopped):  # else all end, and ``_check`` says so
            asker.news.append(Progress(number, error=portable(error)))
        asker.has_news.set()

    # ---- the ends of engine and ingresses -----------------------------------------------------

    def _known(self, ingress: str) -> _Ingress:
        try:
            return self._ingresses[ingress]
        except KeyError:
            why = f"nothing was heard of it for {LEASE:g} s, or it has never connected"
            raise IngressForgotten("the ingress is not known", why, "Connect again") from None

    def _check(self) -> None:
        failure = self._llm._frontend.local_engine.runner.failure
        if self._llm.has_ended or failure is not None:
            what, fix = "the engine of the replica died", "See the log of its process"
            raise EngineStopped(what, failure or "", fix)

    def _stalled(self) -> float:
        engine = self._llm._frontend.local_engine
        now, steps = time.monotonic(), engine.stats.steps
        if steps != self._steps or not engine.scheduler.to_run:
            self._steps, self._stepped = steps, now
        return now - self._stepped

    async def _close(self, asker: _Ingress) -> None:
        for generation in asker.generations.values():
            generation.cancel()
        for pages in asker.copies.values():
            pages.cancel()
        await AsyncSession.close_all(asker.sessions.values())

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(LEASE / 6)
            now = time.monotonic()
            for name, asker in [*self._ingresses.items()]:
                if now - asker.last_seen > LEASE:
                    with contextlib.suppress(EngineStopped):  # then nothing is left to close
                        await self.leave(name)
            if not self._ingresses and now - self._orphaned > ORPHAN:
                return self.retire()
