"""``AsyncSession``: a live sequence that a coroutine generates from, extends, forks and rewinds.

The sequence belongs to the engine thread: every change is a command to it. A generation with a
grammar that is not compiled yet is *reserved*: the sequence refuses changes until compilation ends
and the generation begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from forethought.config.sampling import SamplingParams
from forethought.engine import sequence as engine_sequence
from forethought.engine.base import FRESH, Begun
from forethought.engine.sequence import num_common
from forethought.engine.snapshot import SequenceSnapshot
from forethought.errors import EngineStopped, UsageError
from forethought.llm.engine_thread import EngineThread, OutputStream
from forethought.llm.frontend import Frontend, Generation
from forethought.llm.snapshot import PREFILL
from forethought.llm.tokenizer import LONG_TEXT, read_length
from forethought.model.sampling import Constraints
from forethought.outputs import CompletionOutput, TokenLogprobs, Usage

Result = TypeVar("Result")


@dataclass(eq=False, slots=True)
class _Reservation:
    """A generation of a session that begins once its grammar is compiled."""

    stream: OutputStream[CompletionOutput]
    params: SamplingParams
    begun: Begun = FRESH
    compiling: asyncio.Task[None] | None = None
    """Waits for the grammar; None if there is none or it was compiled before."""


@dataclass(slots=True)
class _Handle:
    """The sequence of a session, once the engine thread has opened it."""

    prompt_ids: list[int]
    sequence: engine_sequence.Sequence | None = None
    dropped: bool = False
    """Whether the session was garbage collected, perhaps before the sequence was opened."""
    reserved: _Reservation | None = None
    """Read and written on the engine thread only."""
    failure: Exception | None = None
    """Of the first command, which opens it."""

    @property
    def opened(self) -> engine_sequence.Sequence:
        """The sequence, in a command, all of which follow the first one; raises its error."""
        if self.failure is not None:
            raise self.failure
        assert self.sequence is not None, "the first command opens it, or fails"
        return self.sequence

    def fail(self, failure: Exception) -> None:
        """The first command has failed."""
        self.failure = failure

    @property
    def idle(self) -> engine_sequence.Sequence:
        """The sequence, unless a generation waits for its grammar (UsageError)."""
        if self.reserved is not None:
            raise UsageError(
                "the session is in use",
                "a generation is in progress, whose grammar is being compiled",
                "Wait for its generation to end, or abort it",
            )
        return self.opened


class AsyncSession:
    """A live sequence of ``AsyncLLM.start``. Closed by ``close``, at the end of an ``async with``,
    or when garbage collected.

    Lengths count tokens from the start of the prompt. One generation at a time; while it goes on
    the session can be forked and read. Methods raise as those of ``Session``, and EngineStopped if
    the engine has ended.

    Args:
        owner: kept alive for as long as the session is.
        token_ids: the prompt; None if ``sequence``, a live sequence of this session, is given.
        source: a session of which it is a fork; its tokens are what ``token_ids`` begins with.
        length: how many of them.
    """

    def __init__(
        self,
        owner: object,
        thread: EngineThread,
        token_ids: list[int] | None = None,
        sequence: engine_sequence.Sequence | None = None,
        *,
        source: AsyncSession | None = None,
        length: int = 0,
    ) -> None:
        self._owner, self._thread = owner, thread
        self._handle = _Handle(token_ids or [], sequence)
        self._finalizer = weakref.finalize(self, _drop, thread, self._handle)
        self._finalizer.atexit = False
        handle, frontend = self._handle, thread.frontend
        if source is not None:
            thread.call_for(handle.fail, _branch, frontend, handle, source._handle, length)
        elif sequence is None:
            thread.call_for(handle.fail, _open, frontend, handle)

    async def generate(self, sampling_params: SamplingParams | None = None) -> CompletionOutput:
        """Continue the sequence; the new tokens become part of it. Cancelling the awaiting task
        ends the generation; its tokens so far stay. UsageError if another one is in progress.
        """
        stream = self.stream(sampling_params)
        try:
            return await stream.finish()
        finally:
            stream.leave()

    def stream(
        self,
        sampling_params: SamplingParams | None = None,
        *,
        begun: Begun = FRESH,
        with_text: bool = True,
    ) -> SessionStream:
        """Continue the sequence; iterate for everything so far.

        The generation begins at once and runs on, iterated or not, until it ends or ``abort`` or
        ``close`` end it. The iterator raises the errors of ``generate``. With a new grammar, or new
        sequence breakers, tokens come once they are compiled. What has ``begun`` elsewhere goes on:
        the session ends with its output so far, with which the outputs begin, without its
        log-probabilities and confidences. Without text, none is decoded for the outputs.
        """
        handle, thread = self._handle, self._thread
        thread.check_process()
        checked = thread.frontend.read_params(sampling_params)
        stream = OutputStream(Generation.completion if with_text else Generation.wordless)
        reservation = _Reservation(stream, checked, begun)
        compiled = thread.frontend.grammars.find(checked)
        is_known = thread.frontend.knows_breakers(checked)
        if is_known and (compiled is not None or checked.guided_decoding is None):
            constraints = thread.frontend.limited(checked, compiled)
            resume = thread.frontend.resume
            thread.begin(stream, lambda: resume(handle.idle, checked, constraints, begun))
        else:
            thread.call_for(stream.fail, _reserve, thread, handle, reservation)
            work = _begin_compiled(thread, handle, reservation)
            reservation.compiling = asyncio.get_running_loop().create_task(work)
            reservation.compiling.add_done_callback(
                lambda done: _leave(thread, handle, reservation) if done.cancelled() else None
            )
        return SessionStream(self, reservation)

    async def attend_to(self, others: Sequence[AsyncSession], length: int | None = None) -> None:
        """Read the tokens of other sessions while they are written; as ``Session.attend_to``."""
        engine, handles = self._thread.frontend.engine, [other._handle for other in others]
        num_shared = None if length is None else read_length(length)

        def attend() -> None:
            reader, read = self._handle.opened, [handle.opened for handle in handles]
            count = num_common([reader, *read]) if num_shared is None else num_shared
            engine.attend_to(reader, dict.fromkeys(read, count))

        await self._do(attend)

    @classmethod
    async def stream_together(
        cls,
        generations: Sequence[tuple[AsyncSession, SamplingParams]],
        others: Sequence[AsyncSession] = (),
        *,
        length: int,
        adds: bool = False,
    ) -> list[SessionStream]:
        """Continue sessions that attend to each other, all from the same step on; as ``stream``.

        Args:
            others: sessions that all of them attend to as well.
            length: of the common beginning, after which the others' tokens are read.
            adds: to what each attends to already; else in place of it.

        Raises:
            UsageError, ModelError: as ``attend_to``.
            ParameterError, ContextLengthError, CapacityError: as ``generate``; none has begun.
        """
        thread = generations[0][0]._thread
        constraints = [await thread.frontend.compiled(params) for _, params in generations]
        reservations = [
            _Reservation(OutputStream(Generation.completion), p) for _, p in generations
        ]
        handles = [session._handle for session, _ in generations]
        if len({id(handle) for handle in handles}) < len(handles):
            raise UsageError(
                "a session has one generation at a time", "it is given twice", "Fork it first"
            )
        read = [*handles, *(other._handle for other in others)]

        def begin() -> None:
            engine, frontend = thread.frontend.engine, thread.frontend
            for handle, reservation in zip(handles, reservations, strict=True):
                engine.check_resume(handle.idle, reservation.params)
            before = [(handle.opened, handle.opened.others) for handle in handles]
            try:
                for handle in handles:
                    others = handle.opened.others if adds else ()
                    earlier = {other.sequence: other.num_common for other in others}
                    new = [other.opened for other in read if other is not handle]
                    engine.attend_to(handle.opened, {**earlier, **dict.fromkeys(new, length)})
            except UsageError:  # the sessions stay as they were
                for sequence, others in before:
                    sequence.others = others
                raise
            for handle, reservation, shape in zip(handles, reservations, constraints, strict=True):
                resume = partial(frontend.resume, handle.opened, reservation.params, shape)
                thread.follow(reservation.stream, resume)

        await generations[0][0]._do(begin)
        pairs = zip(generations, reservations, strict=True)
        return [SessionStream(session, reservation) for (session, _), reservation in pairs]

    async def extend(self, more: str | Sequence[int]) -> None:
        """Append text or token ids; they are computed with the next generation. UsageError if one
        is in progress.
        """
        handle, frontend = self._handle, self._thread.frontend
        if isinstance(more, str) and len(more) > LONG_TEXT:
            token_ids = await asyncio.to_thread(frontend.read_more, more)
        else:
            token_ids = frontend.read_more(more)
        await self._do(lambda: frontend.engine.extend(handle.idle, token_ids))

    async def fork(self, length: int | None = None) -> AsyncSession:
        """Another session with the first ``length`` tokens of this one (all by default), sharing
        pages. Allowed while this session generates, which goes on unchanged.
        """
        owner, thread, handle = self._owner, self._thread, self._handle
        cut = None if length is None else read_length(length)
        # Made on the engine thread: if the caller is cancelled, it is garbage.
        return await self._do(
            lambda: AsyncSession(owner, thread, sequence=thread.frontend.fork(handle.opened, cut))
        )

    async def branch(
        self, length: int, more: str | Sequence[int] = (), params: SamplingParams = PREFILL
    ) -> AsyncSession:
        """Another session with the first ``length`` tokens of this one and ``more`` after them, as
        ``fork`` and ``extend`` make it, before the next step and without waiting for one. If this
        session is closed by then, its tokens are computed again. It has to have room for one token
        more, unless the ``params`` of what it generates next ask for none.

        Raises:
            UsageError: it has fewer tokens now.
            ParameterError, ContextLengthError, CapacityError: as ``AsyncLLM.start``.
        """
        frontend, length = self._thread.frontend, read_length(length)
        if isinstance(more, str) and len(more) > LONG_TEXT:
            new_ids = await asyncio.to_thread(frontend.read_more, more)
        else:
            new_ids = frontend.read_more(more)
        tokens = self.tokens
        if not 0 < length <= len(tokens):
            raise UsageError(
                "cannot branch this session",
                f"it has {len(tokens)} tokens, not {length}",
                "Branch it at one of its own lengths",
            )
        token_ids = [*tokens[:length], *new_ids]
        frontend.engine.check_prompt(token_ids, params)
        return AsyncSession(self._owner, self._thread, token_ids, source=self, length=length)

    async def save(self, name: str) -> Path:
        """Save tokens and KV under a name, as ``Session.save``. A fork computes what is not
        computed yet, so this session may generate meanwhile. Nothing waits for the file.
        """
        thread, handle = self._thread, self._handle
        thread.check_process()
        store, owner = thread.frontend.snapshots, self._owner
        store.path(name)

        def fork() -> tuple[list[int], AsyncSession]:
            token_ids, sequence = thread.frontend.fork_to_save(handle.opened)
            return token_ids, AsyncSession(owner, thread, sequence=sequence)

        token_ids, copy = await self._do(fork)
        async with copy:
            sequence = copy._handle.opened
            if sequence.num_uncomputed:
                await copy.generate(sequence.params)
                await copy.rewind(copy.prompt_length)
            saved = await self._do(lambda: thread.frontend.engine.capture(sequence, token_ids))
        return await asyncio.to_thread(store.save, name, saved)

    @classmethod
    async def restored(
        cls, owner: object, thread: EngineThread, saved: SequenceSnapshot
    ) -> AsyncSession:
        """A session that goes on from a snapshot; see ``AsyncLLM.restore``."""
        # Made on the engine thread: if the caller is cancelled, it is garbage.
        session = thread.call(lambda: cls(owner, thread, sequence=thread.frontend.restore(saved)))
        return await asyncio.shield(asyncio.wrap_future(session))

    def capture(
        self, start: int = 0, stop: float = math.inf, *, ends: bool = False
    ) -> Future[SequenceSnapshot]:
        """Queue a copy of the tokens and their KV from ``start`` on, for ``append`` elsewhere. It
        is taken between two steps, and a generation that is in progress goes on; the copy has what
        is computed by then, ``stop`` tokens at most. ``ends``: that generation is ended before, and
        the copy has all tokens.
        """
        handle, thread = self._handle, self._thread

        def capture() -> SequenceSnapshot:
            if ends:
                _stop(thread, handle)
            sequence = handle.opened
            length = len(sequence.tokens)
            if not ends:
                length = max(start, int(min(stop, sequence.num_computed)))
            token_ids = sequence.tokens[:length]
            return thread.frontend.engine.capture(sequence, token_ids, start)

        return thread.call(capture)

    async def append(self, saved: SequenceSnapshot) -> None:
        """Append what a ``capture`` has that began at the tokens of this session. Raises as
        ``AsyncLLM.restore``, UsageError if a generation is in progress.
        """
        engine, handle = self._thread.frontend.engine, self._handle
        await self._do(lambda: engine.append_snapshot(handle.idle, saved))

    async def rewind(self, length: int) -> None:
        """Drop all tokens from ``length`` on. UsageError if a generation is in progress."""
        handle, frontend, num_kept = self._handle, self._thread.frontend, read_length(length)
        await self._do(lambda: frontend.engine.rewind(handle.idle, num_kept))

    async def abort(self) -> None:
        """End the current generation, if any, with the output so far."""
        handle, thread = self._handle, self._thread
        await self._do(lambda: _stop(thread, handle))

    async def close(self) -> None:
        """Give back the pages; the current generation ends. Closing twice is fine."""
        await self.close_all([self])

    @staticmethod
    async def close_all(sessions: Iterable[AsyncSession]) -> None:
        """Close sessions of one engine with one command."""
        live = [session for session in sessions if session._finalizer.detach()]
        if not live:
            return
        thread = live[0]._thread

        def close() -> None:
            with contextlib.ExitStack() as stack:  # all of them, even if one raises
                for session in live:
                    stack.callback(_close, thread, session._handle)

        with contextlib.suppress(EngineStopped):  # which closed everything
            await live[0]._do(close)

    @property
    def tokens(self) -> list[int]:
        """All token ids so far, prompt and output; may be ahead of what a stream has returned."""
        sequence = self._handle.sequence
        return list(self._handle.prompt_ids if sequence is None else sequence.tokens)

    @property
    def sequence_id(self) -> int | None:
        """Of its sequence in the engine; None: it has not been opened yet."""
        return None if self._handle.sequence is None else self._handle.sequence.id

    @property
    def reads(self) -> frozenset[int]:
        """Ids of the sequences that it attends to beside its own."""
        sequence = self._handle.sequence
        others = () if sequence is None else sequence.others
        return frozenset(other.sequence.id for other in others)

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values are stored now."""
        sequence = self._handle.sequence
        return 0 if sequence is None else sequence.num_computed

    @property
    def prompt_length(self) -> int:
        """Tokens before the current or last generation began."""
        sequence = self._handle.sequence
        return len(self._handle.prompt_ids) if sequence is None else sequence.prompt_length

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None]:
        """Of the current or last generation, if its ``prompt_logprobs`` asked for them: one entry
        per token before it, None for those before the extension."""
        sequence = self._handle.sequence
        return [] if sequence is None else list(sequence.prompt_logprobs)

    @property
    def text(self) -> str:
        """The text of all tokens, special ones included."""
        return self._thread.frontend.tokenizer.decode(self.tokens, skip_special_tokens=False)

    @property
    def usage(self) -> Usage:
        """Tokens prefilled, cached, decoded and discarded for this session so far."""
        sequence = self._handle.sequence
        return Usage() if sequence is None else sequence.usage + Usage()

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _do(self, command: Callable[[], Result]) -> Result:
        # Done even if this task is cancelled meanwhile: a session must not stay half closed.
        return await asyncio.shield(asyncio.wrap_future(self._thread.call(command)))


class SessionStream:
    """An async iterator over one generation of a session: the newest output, everything so far. It
    keeps the session alive; the generation of ``reservation`` may have begun.
    """

    def __init__(self, session: AsyncSession, reservation: _Reservation) -> None:
        self._session, self._reservation = session, reservation
        self._stream = reservation.stream

    def __aiter__(self) -> SessionStream:
        return self

    async def __anext__(self) -> CompletionOutput:
        output = await self._stream.next()
        if output is None:
            raise StopAsyncIteration
        return output

    @property
    def first_token_time(self) -> float | None:
        """When its first tokens came, as of ``time.perf_counter``; None: there are none."""
        return self._stream.first_token_time

    async def finish(self) -> CompletionOutput:
        """The whole output, at the end of the generation."""
        return await self._stream.last()

    async def reach(self, count: float, hold: float = math.inf) -> CompletionOutput:
        """The output so far, once it has ``count`` tokens or the generation has ended. At ``hold``
        tokens, or a few more if there are drafts, the generation stops until the next call.
        """
        return await self._stream.reach(count, hold)

    async def peek(self) -> CompletionOutput:
        """Everything so far, without waiting for a step."""
        thread, handle = self._session._thread, self._session._handle
        future = thread.call(_peek, thread, handle, self._reservation)
        output = await asyncio.wrap_future(future)
        return await self._stream.last() if output is None else output

    async def pause(self, seconds: float) -> None:
        """Wait for the next tick of a clock that ticks every ``seconds``, or for the end."""
        await self._stream.pause(seconds)

    def leave(self) -> None:
        """End the generation if it goes on, or is about to begin; it then ends with ``ABORT``."""
        if self._stream.ended:
            return
        if self._reservation.compiling is not None:
            self._reservation.compiling.cancel()
        _leave(self._session._thread, self._session._handle, self._reservation)


def _leave(thread: EngineThread, handle: _Handle, reservation: _Reservation) -> None:
    try:
        thread.call_for(reservation.stream.fail, _end, thread, handle, reservation)
    except EngineStopped as error:
        reservation.stream.fail(error)


def _open(frontend: Frontend, handle: _Handle) -> None:
    handle.sequence = frontend.open(handle.prompt_ids)
    if handle.dropped:  # set before ``_drop`` looked for the sequence
        frontend.abandon(handle.sequence)


def _branch(frontend: Frontend, handle: _Handle, source: _Handle, length: int) -> None:
    try:
        sequence = frontend.fork(source.opened, length)
    except UsageError:  # it is closed; its tokens are known
        sequence = frontend.open(handle.prompt_ids[:length])
        sequence.adapter = source.opened.adapter
    if len(handle.prompt_ids) > length:
        frontend.engine.extend(sequence, handle.prompt_ids[length:])
    handle.sequence = sequence
    if handle.dropped:
        frontend.abandon(sequence)


def _drop(thread: EngineThread, handle: _Handle) -> None:
    """Called by the garbage collector, at any moment and on any thread: takes no lock."""
    handle.dropped = True
    if handle.sequence is not None:  # else ``_open`` sees ``dropped``
        thread.frontend.abandon(handle.sequence)
        thread.wake()


# ---- on the engine thread -----------------------------------------------------------------------


def _reserve(thread: EngineThread, handle: _Handle, reservation: _Reservation) -> None:
    thread.frontend.engine.check_resume(handle.idle, reservation.params)
    handle.reserved = reservation


async def _begin_compiled(thread: EngineThread, handle: _Handle, reservation: _Reservation) -> None:
    """Begin a generation when its grammar is compiled, or fail its stream."""
    stream = reservation.stream
    try:
        constraints = await thread.frontend.compiled(reservation.params)
        thread.call_for(stream.fail, _begin, thread, handle, reservation, constraints)
    except EngineStopped as error:
        stream.fail(error)
    except Exception as error:
        thread.call_for(stream.fail, _refuse, handle, reservation, error)


def _begin(
    thread: EngineThread,
    handle: _Handle,
    reservation: _Reservation,
    constraints: Constraints | None,
) -> None:
    """Begin the generation, unless it was refused or has been ended in the meantime."""
    if _release(handle, reservation):
        sequence, params, frontend = handle.opened, reservation.params, thread.frontend
        begun = reservation.begun
        thread.follow(
            reservation.stream, lambda: frontend.resume(sequence, params, constraints, begun)
        )


def _refuse(handle: _Handle, reservation: _Reservation, error: Exception) -> None:
    if _release(handle, reservation):
        raise error


def _release(handle: _Handle, reservation: _Reservation) -> bool:
    if handle.reserved is not reservation:
        return False
    handle.reserved = None
    return True


def _peek(
    thread: EngineThread, handle: _Handle, reservation: _Reservation
) -> CompletionOutput | None:
    if handle.reserved is reservation:
        return CompletionOutput(0)
    return thread.peek(reservation.stream)


def _end(thread: EngineThread, handle: _Handle, reservation: _Reservation) -> None:
    """End a generation that may not have begun yet, and publish its output."""
    if handle.reserved is reservation:  # it begins here, and ends before any step
        _begin(thread, handle, reservation, _unconstrained)
    thread.end(reservation.stream)


def _stop(thread: EngineThread, handle: _Handle) -> None:
    """End the current generation, if any, and publish its output."""
    if handle.reserved is not None:
        _end(thread, handle, handle.reserved)
    thread.publish(thread.frontend.stop(handle.opened))


def _close(thread: EngineThread, handle: _Handle) -> None:
    _stop(thread, handle)
    thread.publish(thread.frontend.close(handle.opened))


def _unconstrained(prompt_ids: Sequence[int], count: int) -> list[None]:
    """The constraints of generations that end before their first token."""
    return [None] * count
