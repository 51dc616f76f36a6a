"""A live sequence in the hand of a coroutine. Knows nothing about other requests."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from forethought.config.sampling import SamplingParams
from forethought.engine import sequence as engine_sequence
from forethought.errors import EngineStopped, UsageError
from forethought.llm.engine_thread import EngineThread, OutputStream
from forethought.llm.frontend import Frontend, Generation
from forethought.llm.tokenizer import read_length
from forethought.model.sampling import Constraints
from forethought.outputs import CompletionOutput, Usage

Result = TypeVar("Result")


@dataclass(eq=False, slots=True)
class _Reservation:
    """A generation of a session that begins once its grammar is compiled."""

    listener: OutputStream[CompletionOutput]
    params: SamplingParams
    beginning: asyncio.Task[None] | None = None
    """Waits for the grammar."""


@dataclass(slots=True)
class _Handle:
    """Where the engine's thread puts the sequence once it has opened it."""

    prompt_ids: list[int]
    sequence: engine_sequence.Sequence | None = None
    forgotten: bool = False
    """Whether nobody holds the session any more, perhaps before the sequence was opened."""
    reserved: _Reservation | None = None
    """Touched by the engine's thread only."""

    @property
    def taken(self) -> engine_sequence.Sequence:
        assert self.sequence is not None, "errands run in order, and the first one opens"
        return self.sequence

    @property
    def idle(self) -> engine_sequence.Sequence:
        """The sequence, to be changed or to generate from.

        Raises:
            UsageError: a generation is about to begin.
        """
        if self.reserved is not None:
            raise UsageError(
                "the session is in use",
                "a generation is under way, whose grammar is being compiled",
                "Wait for its generation to end, or abort it",
            )
        return self.taken


class AsyncSession:
    """Made by ``AsyncLLM.start``. Closed by ``close``, at the end of an ``async with``, or when
    forgotten.

    Lengths count tokens from the start of the prompt. One generation at a time; while it goes on
    the session can be forked and read.

    Args:
        owner: kept alive for as long as the session is.
        thread: of the engine.
        token_ids: the prompt; None if ``sequence`` is given.
        sequence: a live sequence that nobody else holds.
    """

    def __init__(
        self,
        owner: object,
        thread: EngineThread,
        token_ids: list[int] | None = None,
        sequence: engine_sequence.Sequence | None = None,
    ) -> None:
        self._owner, self._thread = owner, thread
        self._handle = _Handle(token_ids or [], sequence)
        self._forgotten = weakref.finalize(self, _forget, thread, self._handle)
        self._forgotten.atexit = False
        if sequence is None:
            thread.call(_open, thread.frontend, self._handle)

    async def generate(self, params: SamplingParams | None = None) -> CompletionOutput:
        """Continue the sequence; the new tokens become part of it.

        Cancelling the awaiting task ends the generation; what it has said stays.

        Raises:
            UsageError: a generation is under way, or the session is closed.
            ContextLengthError, CapacityError: there is no room for another token.
            ParameterError: params that a live sequence cannot honour.
            RequestError: it failed in the engine; the session is closed.
            EngineStopped: the engine has ended.
        """
        stream = self.stream(params)
        try:
            return await stream.finish()
        finally:
            stream.leave()

    def stream(self, params: SamplingParams | None = None) -> SessionStream:
        """Continue the sequence; iterate for everything so far, as often as you ask.

        The generation begins at once and runs on whether or not anybody iterates, until it ends or
        ``abort`` or ``close`` end it. Errors, as of ``generate``, are raised by the iterator. With
        a new grammar, tokens come once that is compiled.
        """
        handle, thread = self._handle, self._thread
        thread.check_process()
        settled = thread.frontend.read_params(params)
        listener = OutputStream(Generation.completion)
        reservation = _Reservation(listener, settled)
        found = thread.frontend.guidance.find(settled)
        if found is not None or settled.guided_decoding is None:
            thread.begin(listener, lambda: thread.frontend.resume(handle.idle, settled, found))
        else:
            thread.call_for(listener, _reserve, thread, handle, reservation)
            work = _begin_compiled(thread, handle, reservation)
            reservation.beginning = asyncio.get_running_loop().create_task(work)
            reservation.beginning.add_done_callback(
                lambda done: _leave(thread, handle, reservation) if done.cancelled() else None
            )
        return SessionStream(self, reservation)

    async def extend(self, more: str | Sequence[int]) -> None:
        """Put text or token ids behind; they are computed with the next generation.

        Raises:
            UsageError: a generation is under way, or the session is closed.
            ContextLengthError, CapacityError: it does not fit.
        """
        token_ids, handle, frontend = (
            self._thread.frontend.read_more(more),
            self._handle,
            self._thread.frontend,
        )
        await self._do(lambda: frontend.engine.extend(handle.idle, token_ids))

    async def fork(self, length: int | None = None) -> AsyncSession:
        """Another session with the first ``length`` tokens of this one (all by default).

        The pages are shared. May be taken while this session generates, which does not notice.

        Raises:
            UsageError: the session does not have this many tokens, or is closed.
        """
        owner, thread, handle = self._owner, self._thread, self._handle
        cut = None if length is None else read_length(length)
        # Made on the engine's thread: if nobody waits for it any more, it is closed as forgotten.
        return await self._do(
            lambda: AsyncSession(owner, thread, sequence=thread.frontend.fork(handle.taken, cut))
        )

    async def rewind(self, length: int) -> None:
        """Forget all tokens from ``length`` on.

        Raises:
            UsageError: a generation is under way, the session is closed or not that long.
        """
        handle, frontend, kept = self._handle, self._thread.frontend, read_length(length)
        await self._do(lambda: frontend.engine.rewind(handle.idle, kept))

    async def abort(self) -> None:
        """End the generation under way, if any; who waits for it gets what it has said."""
        handle, thread = self._handle, self._thread
        await self._do(lambda: _stop(thread, handle))

    async def close(self) -> None:
        """Give back the pages; a generation under way ends. Closing twice is fine."""
        if self._forgotten.detach():
            handle, thread = self._handle, self._thread
            with contextlib.suppress(EngineStopped):  # which closed everything
                await self._do(lambda: _close(thread, handle))

    @property
    def tokens(self) -> list[int]:
        """All token ids so far, prompt and output; may be ahead of what a stream has returned."""
        sequence = self._handle.sequence
        return list(self._handle.prompt_ids if sequence is None else sequence.tokens)

    @property
    def prompt_length(self) -> int:
        """Tokens before the current or last generation began."""
        sequence = self._handle.sequence
        return len(self._handle.prompt_ids) if sequence is None else sequence.prompt_length

    @property
    def text(self) -> str:
        """The text of all tokens, special ones included."""
        return self._thread.frontend.tokenizer.decode(self.tokens, skip_special_tokens=False)

    @property
    def usage(self) -> Usage:
        """Tokens prefilled, cached, decoded and discarded for this session so far."""
        sequence = self._handle.sequence
        return Usage() if sequence is None else dataclasses.replace(sequence.usage)

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _do(self, command: Callable[[], Result]) -> Result:
        # Done even if the asker is cancelled meanwhile: a session must not stay half closed.
        return await asyncio.shield(asyncio.wrap_future(self._thread.call(command)))


class SessionStream:
    """An async iterator over one generation of a session: everything so far, newest first asked.

    Args:
        session: kept alive while somebody iterates.
        reservation: of its generation, which may have begun.
    """

    def __init__(self, session: AsyncSession, reservation: _Reservation) -> None:
        self._session, self._reservation = session, reservation
        self._listener = reservation.listener

    def __aiter__(self) -> SessionStream:
        return self

    async def __anext__(self) -> CompletionOutput:
        output = await self._listener.next()
        if output is None:
            raise StopAsyncIteration
        return output

    async def finish(self) -> CompletionOutput:
        """Wait for the end; the whole of it."""
        return await self._listener.last()

    async def reach(self, count: int) -> CompletionOutput:
        """What has come so far, once it is ``count`` tokens or the end has come."""
        return await self._listener.reach(count)

    async def peek(self) -> CompletionOutput:
        """Everything so far, at once."""
        thread, handle = self._session._thread, self._session._handle
        looking = thread.call(_look, thread, handle, self._reservation)
        found = await asyncio.wrap_future(looking)
        return await self._listener.last() if found is None else found

    def leave(self) -> None:
        """End the generation if it goes on, or is about to begin; it then ends with ``ABORT``."""
        if self._listener.ended:
            return
        if self._reservation.beginning is not None:
            self._reservation.beginning.cancel()
        _leave(self._session._thread, self._session._handle, self._reservation)


def _leave(thread: EngineThread, handle: _Handle, reservation: _Reservation) -> None:
    try:
        thread.call_for(reservation.listener, _end, thread, handle, reservation)
    except EngineStopped as error:
        reservation.listener.fail(error)


def _open(frontend: Frontend, handle: _Handle) -> None:
    handle.sequence = frontend.open(handle.prompt_ids)
    if handle.forgotten:  # set before ``_forget`` looked for the sequence
        frontend.abandon(handle.sequence)


def _forget(thread: EngineThread, handle: _Handle) -> None:
    """Called by the garbage collector, at any moment and on any thread: leave a note only."""
    handle.forgotten = True
    if handle.sequence is not None:  # else ``_open`` sees that it is forgotten
        thread.frontend.abandon(handle.sequence)
        thread.wake()


# ---- on the engine's thread ---------------------------------------------------------------------


def _reserve(thread: EngineThread, handle: _Handle, reservation: _Reservation) -> None:
    """Nothing else may change the sequence before the generation begins."""
    thread.frontend.engine.check_resume(handle.idle, reservation.params)
    handle.reserved = reservation


async def _begin_compiled(thread: EngineThread, handle: _Handle, reservation: _Reservation) -> None:
    """Begin a generation when its grammar is compiled, or tell why it does not begin."""
    listener = reservation.listener
    try:
        constraints = await thread.frontend.guidance.compiled(reservation.params)
        thread.call_for(listener, _begin, thread, handle, reservation, constraints)
    except EngineStopped as error:
        listener.fail(error)
    except Exception as error:
        thread.call_for(listener, _refuse, handle, reservation, error)


def _begin(
    thread: EngineThread,
    handle: _Handle,
    reservation: _Reservation,
    constraints: Constraints | None,
) -> None:
    """Begin the generation, unless it was refused or has been ended in the meantime."""
    if _release(handle, reservation):
        sequence, params, frontend = handle.taken, reservation.params, thread.frontend
        thread.adopt(reservation.listener, lambda: frontend.resume(sequence, params, constraints))


def _refuse(handle: _Handle, reservation: _Reservation, error: Exception) -> None:
    if _release(handle, reservation):
        raise error


def _release(handle: _Handle, reservation: _Reservation) -> bool:
    """Give the reservation up; whether there still was one."""
    if handle.reserved is not reservation:
        return False
    handle.reserved = None
    return True


def _look(
    thread: EngineThread, handle: _Handle, reservation: _Reservation
) -> CompletionOutput | None:
    """What there is of a generation; None if it has ended."""
    if handle.reserved is reservation:
        return CompletionOutput(0)
    return thread.look(reservation.listener)


def _end(thread: EngineThread, handle: _Handle, reservation: _Reservation) -> None:
    """End a generation that may not have begun yet, and tell who waits for it."""
    if handle.reserved is reservation:  # it begins here, and ends before any step
        _begin(thread, handle, reservation, _never_asked)
    thread.end(reservation.listener)


def _stop(thread: EngineThread, handle: _Handle) -> None:
    """End the generation under way, if any, and tell who waits for it."""
    if handle.reserved is not None:
        _end(thread, handle, handle.reserved)
    thread.tell(thread.frontend.stop(handle.taken))


def _close(thread: EngineThread, handle: _Handle) -> None:
    _stop(thread, handle)
    thread.tell(thread.frontend.close(handle.taken))


def _never_asked() -> Any:
    """In place of the constraint of a generation that draws no token."""
    return None
