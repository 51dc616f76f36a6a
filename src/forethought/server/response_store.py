"""Responses that are kept: their events, for clients that come back, within limits."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from forethought.server.http import HttpError
from forethought.server.limits import Overloaded
from forethought.server.response_journal import JournalFile, Replay, Saved

_MAX_BATCH = 256
"""Events that are encoded without a turn of the event loop between them."""


class Record:
    """One response, which changes as it goes on, and the events that have made it so.

    Attributes:
        messages: the conversation that it answers, without the instructions.
        events: in order; the number of each is its index.
        journal: the file that they are written to before clients see them; None: there is none.
        replay: of the events that a server which has died had made; None: the response is new.
        task: runs it; None before.
        finished: when it ended, by the monotonic clock; None before.
        num_bytes: of memory that the conversation and the events take, roughly.
    """

    def __init__(
        self, response: dict[str, Any], tenant: str, messages: Sequence[Mapping[str, Any]]
    ) -> None:
        self.response, self.tenant, self.messages = response, tenant, list(messages)
        self.events: list[dict[str, Any]] = []
        self.task: asyncio.Task[None] | None = None
        self.finished: float | None = None
        self.num_bytes = _size(self.messages)
        self.journal: JournalFile | None = None
        self.replay: Replay | None = None
        self._num_shown, self._is_ending = 0, False
        self._changed = asyncio.Event()

    @classmethod
    def restored(cls, saved: Saved, tenant: str) -> Record:
        """What there is of a response in its file."""
        request = saved.request
        self = cls(dict(request["response"]), tenant, request["messages"])
        self.events, self.journal = [*saved.events], saved.file
        self._num_shown = len(self.events)
        self.num_bytes += sum(map(_size, self.events))
        if saved.has_ended:
            self.response, self.finished = self.events[-1]["response"], time.monotonic()
        else:
            self.replay = Replay([*saved.events])
        return self

    @property
    def id(self) -> str:
        """Of the response."""
        return str(self.response["id"])

    def add(self, kind: str, **fields: Any) -> Mapping[str, Any]:
        """Append an event, or what of it is new after ``replay``; returns it, or the one that it
        repeats. Raises HttpError where the replay is another one.
        """
        if self.replay is not None:
            if "delta" in fields:
                rest = self.replay.rest(kind, fields)
                if rest is None:
                    return fields
                fields = rest
            elif (event := self.replay.event(kind, fields)) is not None:
                return event
        event = {"type": kind, "sequence_number": len(self.events), **fields}
        if self.journal is not None and self.journal.is_suspended:
            return event  # it will be made again
        self.events.append(event)
        self.num_bytes += _size(event)
        if self.journal is None:
            self._show(len(self.events))
        else:
            self.journal.append(event, self._soon(self._show, len(self.events)))
        return event

    def finish(self) -> None:
        """No further event follows."""
        self._is_ending = True
        if self.journal is None:
            self._end()
        else:
            self.journal.end(self._soon(self._end))

    def _show(self, num_events: int) -> None:
        self._num_shown = num_events
        self._wake()

    def _end(self) -> None:
        self.finished = time.monotonic()
        self._wake()

    def _soon(self, work: Callable[..., None], *arguments: Any) -> Callable[[], None]:
        """Has the event loop do something, from another thread."""
        loop = asyncio.get_running_loop()

        def call() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(work, *arguments)

        return call

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def follow(self, first: int = 0) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The events from number ``first`` on, as they come; up to ``_MAX_BATCH`` at once if they
        are there.
        """
        while True:
            changed = self._changed
            if batch := self.events[first : min(self._num_shown, first + _MAX_BATCH)]:
                first += len(batch)
                yield batch
                await asyncio.sleep(0)
            elif self.finished is not None:
                return
            else:
                await changed.wait()

    async def end(self) -> None:
        """Wait for the end."""
        while self.finished is None:
            await self._changed.wait()

    async def settle(self) -> None:
        """Wait until its end is written, if it is there."""
        if self._is_ending:
            await self.end()

    async def cancel(self) -> None:
        """End it now, and wait until it has."""
        if self.task is not None and not self.task.done():
            self.task.cancel()
            await asyncio.wait([self.task])
            if not self._is_ending:  # it had not begun to run
                self.finish()
            await self.end()


class ResponseStore:
    """Responses by their ids. Each tenant has an equal share, in which only its own are evicted.

    Args:
        max_stored: responses in all; of a tenant's share, the one that finished first is evicted.
        max_bytes: of memory that they take, roughly; the newest of a tenant is always kept.
        seconds: how long a finished one is kept.
        num_tenants: that share these limits.
    """

    def __init__(
        self, max_stored: int, max_bytes: int, seconds: float, num_tenants: int = 1
    ) -> None:
        self._max_stored = max(1, max_stored // num_tenants)
        self._max_bytes, self._seconds = max_bytes // num_tenants, seconds
        self._records: dict[str, Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def make_room(self, tenant: str) -> None:
        """Make capacity for one more response of a tenant.

        Raises Overloaded if its share is full, and none of those that are kept has finished.
        """
        self._expire()
        records = [record for record in self._records.values() if record.tenant == tenant]
        ended = sorted(
            (record for record in records if record.finished is not None),
            key=lambda record: record.finished or 0.0,
        )
        num_left, num_bytes = len(records), sum(record.num_bytes for record in records)
        while num_left >= self._max_stored or (num_left and num_bytes > self._max_bytes):
            if not ended:
                if num_left < self._max_stored:
                    return
                raise Overloaded("too many responses", f"{num_left} are being generated", 10)
            oldest = ended.pop(0)
            self._forget(oldest)
            num_left, num_bytes = num_left - 1, num_bytes - oldest.num_bytes

    def add(self, record: Record) -> None:
        """Keep a response."""
        self._records[record.id] = record

    def __contains__(self, response_id: object) -> bool:
        return response_id in self._records

    def find(self, response_id: str, tenant: str, field: str = "response_id") -> Record:
        """A response of a tenant. Raises HttpError about ``field`` if it has none of this id."""
        self._expire()
        record = self._records.get(response_id)
        if record is None or record.tenant != tenant:
            raise HttpError(
                404,
                f"there is no response {response_id[:80]!r}",
                param=field,
                code="response_not_found",
            )
        return record

    def items(self, tenant: str) -> dict[str, dict[str, Any]]:
        """The output items of a tenant's responses, by their ids."""
        self._expire()
        records = [record for record in self._records.values() if record.tenant == tenant]
        return {item["id"]: item for record in records for item in record.response["output"]}

    async def delete(self, response_id: str, tenant: str) -> None:
        """End a response if it goes on, and forget it; its file is removed then. Raises as
        ``find``, and OSError: the file is still there.
        """
        record = self.find(response_id, tenant)
        await record.cancel()
        if (removal := self._forget(record)) is not None:
            await asyncio.wrap_future(removal)

    def _expire(self) -> None:
        latest = time.monotonic() - self._seconds
        for record in [*self._records.values()]:
            if record.finished is not None and record.finished <= latest:
                self._forget(record)

    def _forget(self, record: Record) -> Future[None] | None:
        """The removal of its file; None: it has none."""
        self._records.pop(record.id, None)
        return None if record.journal is None else record.journal.delete()


def _size(value: Any) -> int:
    """Bytes of memory that a value of JSON takes; what two of them share is counted twice."""
    size = sys.getsizeof(value)
    if isinstance(value, Mapping):
        return size + sum(_size(item) for item in value.values())
    if isinstance(value, list | tuple):
        return size + sum(map(_size, value))
    return size
