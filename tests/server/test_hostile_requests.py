"""No request holds up the event loop, and so everybody else's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest

import hostile_requests
from forethought.garbage_collection import left_out_of_collections, rare_collections
from forethought.llm.async_llm import AsyncLLM
from forethought.server.backends.engine_backend import EngineBackend
from forethought.server.protocol.body import check_values
from forethought.server.settings import Settings
from forethought.server.workers import SMALL, Workers
from http_servers import WAIT, Served, eventually, served

LAG = 0.3
"""Seconds that the event loop may be held up; an unbounded request holds it up for many seconds."""
REQUESTS = hostile_requests.requests()
SLOW = {"a thousand samples", "a wide search", "a thousand drafts for one fuser", "a large format"}
SLOW |= {"a vote in a vote in a vote", "many ids to embed"}
"""Each takes as long as another one of its kind, which is among the quick tests."""


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    llm = AsyncLLM(kv_cache_config={"max_tokens": 16384})
    backend = EngineBackend(llm, "reasoner")
    with left_out_of_collections(), rare_collections(), served(backend, Settings()) as running:
        yield running
    backend.close()


@contextmanager
def watched(server: Served) -> Iterator[list[float]]:
    """How long each turn of the event loop takes: the time of this process or of the clock, the
    smaller one, so that other processes on a busy machine do not count."""
    lags: list[float] = []

    async def watch() -> None:
        while True:
            clock, process = time.perf_counter(), time.process_time()
            await asyncio.sleep(0.001)
            lags.append(min(time.perf_counter() - clock, time.process_time() - process))

    watching = asyncio.run_coroutine_threadsafe(watch(), server.service.llm.loop)
    try:
        yield lags
    finally:
        watching.cancel()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in REQUESTS],
)
def test_a_hostile_request_does_not_hold_up_the_event_loop(server: Served, name: str) -> None:
    path, body = REQUESTS[name]
    worst = []
    for _ in range(3):  # a longer turn that does not come again was not the request's
        with watched(server) as lags:
            answer = server.send(path, body)
        assert answer.status in (200, 400, 404, 413), answer.text[:500]
        worst.append(max(lags, default=0.0))
        if worst[-1] < LAG:
            break
    assert min(worst) < LAG, f"{name}: {worst}"
    eventually(lambda: server.send("/v1/load").json["requests_unfinished"] == 0)


def test_a_small_request_is_answered_beside_hostile_ones(server: Served) -> None:
    small = hostile_requests.chat(structured_outputs={"regex": "[0-9]{3}"})
    bomb = hostile_requests.BOMB
    with ThreadPoolExecutor(3) as threads:
        bombs = [
            threads.submit(
                partial(server.send, timeout=4 * WAIT),  # seconds of work each
                hostile_requests.CHAT,
                hostile_requests.chat(structured_outputs={"grammar": f'{bomb} "{number}"'}),
            )
            for number in range(3)  # one more than are compiled at once
        ]
        assert server.send(hostile_requests.CHAT, small).status == 200
        assert {each.result(4 * WAIT).status for each in bombs} == {400}


def test_the_lag_of_the_event_loop_is_a_metric(server: Served) -> None:
    def measured() -> bool:
        text = server.send("/metrics").text
        return "event_loop_lag_seconds_count" in text and "lag_seconds_count 0.0" not in text

    eventually(measured)


# ---- values and workers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "count"),
    [
        (b"[1, 2, 3]", 3),
        (b'{"a": {"b": []}}', 3),
        (b'{"a": ",,,,[[[{{{", "b": 1}', 2),
        (rb'["a\",,,\\", "\\\",,"]', 2),
        (b'{"a": [",", "\\\\", ","]}', 4),
        (b'["no end, , , ', 1),
    ],
)
def test_values_are_counted_outside_of_strings(content: bytes, count: int) -> None:
    check_values(content, count)
    with pytest.raises(ValueError, match="more than"):
        check_values(content, count - 1)


def test_work_of_a_client_that_has_gone_is_not_begun() -> None:
    async def run() -> list[str]:
        workers, held, done = Workers(1), asyncio.Event(), list[str]()
        loop = asyncio.get_running_loop()

        def hold() -> None:
            asyncio.run_coroutine_threadsafe(held.wait(), loop).result(WAIT)

        holding = asyncio.create_task(workers.run(hold, "a", SMALL + 1))
        await asyncio.sleep(0)
        gone = asyncio.create_task(workers.run(lambda: done.append("gone"), "a", SMALL + 1))
        other = asyncio.create_task(workers.run(lambda: done.append("other"), "a", SMALL + 1))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone])
        held.set()
        await asyncio.gather(holding, other)
        workers.close()
        return done

    assert asyncio.run(run()) == ["other"]
