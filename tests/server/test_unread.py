"""What a stream gathers for a client that does not read."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from forethought.server import job as job_module
from forethought.server.endpoints.chat import _prepared
from forethought.server.http import Caller
from forethought.server.job import MethodJob, Unread, Update
from forethought.server.protocol.chat_request import ChatRequest
from forethought.server.service import Service
from http_servers import WAIT, scripted

TEXT, MAX_UNREAD = "word " * 40, 2_000
BODY = {
    "messages": [{"role": "user", "content": "a"}],
    "stream": True,
    "events": True,
    "method": "majority_vote@64",
}


async def updates_of(service: Service) -> tuple[MethodJob, list[Update]]:
    """Of a job whose reader takes the first one, and the others after the end."""
    job = _prepared(service, ChatRequest.model_validate(BODY), Caller())._job
    assert isinstance(job, MethodJob)
    ended = asyncio.Event()
    async with aclosing(job.updates()) as updates:
        taken = [await anext(updates)]
        loop = asyncio.get_running_loop()
        job.on_trace(lambda _: loop.call_soon_threadsafe(ended.set))
        await asyncio.wait_for(ended.wait(), WAIT)
        taken += [update async for update in updates]
    return job, taken


def test_events_that_nobody_reads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "MAX_UNREAD", MAX_UNREAD)
    with scripted(lambda prompt, index: TEXT) as server:
        running = asyncio.run_coroutine_threadsafe(
            updates_of(server.service), server.service.llm.loop
        )
        job, taken = running.result(WAIT)
    events = [event for update in taken for event in update.events]
    assert sum(len(event.get("text", "")) for event in events) <= 2 * MAX_UNREAD
    assert events[-1]["type"] == "omitted"
    assert events[-1]["num_events"] > 0
    assert job.ended().outputs[0].text == TEXT


def test_what_has_been_taken_makes_room() -> None:
    unread = Unread(max_size=10)
    assert [unread.add_event({"n": n}, 6) for n in range(2)] == [True, False]
    assert unread.take(0.5).events == [{"n": 0}, {"type": "omitted", "at": 0.5, "num_events": 1}]
    assert unread.add_event({"n": 2}, 6)
    assert unread.take(0.5).events == [{"n": 2}]
