"""Responses that are kept: their events, for clients that come back, within limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from forethought.server.http import HttpError
from forethought.server.limits import Overloaded


class Record:
    """One response: what it is now, and the events that have made it so.

    Args:
        response: in OpenAI's form; changed as it goes on.
        tenant: whose it is.
        messages: the conversation that it answers, without the instructions.

    Attributes:
        events: in order; the number of each is its index.
        task: runs it; None before.
        finished: when it ended, by the monotonic clock; None before.
    """

    def __init__(
        self, response: dict[str, Any], tenant: str, messages: Sequence[Mapping[str, Any]]
    ) -> None:
        self.response, self.tenant, self.messages = response, tenant, list(messages)
        self.events: list[dict[str, Any]] = []
        self.task: asyncio.Task[None] | None = None
        self.finished: float | None = None
        self._changed = asyncio.Event()

    @property
    def id(self) -> str:
        """Of the response."""
        return str(self.response["id"])

    def add(self, kind: str, **fields: Any) -> None:
        """Append an event."""
        self.events.append({"type": kind, "sequence_number": len(self.events), **fields})
        self._wake()

    def finish(self) -> None:
        """No further event follows."""
        self.finished = time.monotonic()
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def follow(self, first: int = 0) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The events from number ``first`` on, as they come; several at once if they are there."""
        while True:
            changed = self._changed
            if batch := self.events[first:]:
                first += len(batch)
                yield batch
            elif self.finished is not None:
                return
            else:
                await changed.wait()

    async def end(self) -> None:
        """Wait for the end."""
        while self.finished is None:
            await self._changed.wait()

    async def cancel(self) -> None:
        """End it now, and wait until it has."""
        if self.task is not None and not self.task.done():
            self.task.cancel()
            await asyncio.wait([self.task])


class ResponseStore:
    """Responses by their ids.

    Args:
        max_stored: that are kept; the one that finished first makes room.
        seconds: how long a finished one is kept.
    """

    def __init__(self, max_stored: int, seconds: float) -> None:
        self._max_stored, self._seconds = max_stored, seconds
        self._records: dict[str, Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def make_room(self) -> None:
        """Let one more in.

        Raises:
            Overloaded: there is no place, and none of those that are kept has finished.
        """
        self._expire()
        if len(self._records) < self._max_stored:
            return
        ended = [record for record in self._records.values() if record.finished is not None]
        if not ended:
            raise Overloaded("too many responses", f"{len(self)} are being generated", 10)
        del self._records[min(ended, key=lambda record: record.finished or 0.0).id]

    def add(self, record: Record) -> None:
        """Keep a response."""
        self._records[record.id] = record

    def find(self, response_id: str, tenant: str) -> Record:
        """A response of a tenant.

        Raises:
            HttpError: it has none of this id.
        """
        self._expire()
        record = self._records.get(response_id)
        if record is None or record.tenant != tenant:
            raise HttpError(
                404,
                f"there is no response {response_id[:80]!r}",
                param="response_id",
                code="response_not_found",
            )
        return record

    async def delete(self, response_id: str, tenant: str) -> None:
        """End a response if it goes on, and forget it. Raises as ``find``."""
        record = self.find(response_id, tenant)
        await record.cancel()
        self._records.pop(response_id, None)

    def _expire(self) -> None:
        latest = time.monotonic() - self._seconds
        self._records = {
            key: record
            for key, record in self._records.items()
            if record.finished is None or record.finished > latest
        }
