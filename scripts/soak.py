"""A server under mixed load for a while, and what is left of it afterwards.

    python scripts/soak.py                 # ten minutes
    SOAK_SECONDS=120 python scripts/soak.py

Clients stream, ask for methods, for several samples and for shapes, and go away in the middle of an
answer. A third of the requests is hostile: those of ``tests/hostile_requests.py``, which are meant
to hold up the server, nonsense, connections that break off, and headers that never end. Then, with
the server idle: its memory has not grown, every page of the KV cache is free, no task, thread or
sequence is left over. The last line is JSON, with the share of the time in which the event loop was
late; the status is 1 if anything is wrong.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import multiprocessing
import os
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from typing import Any

import openai

from forethought import AsyncLLM
from forethought.server.app import create_app
from forethought.server.backends.engine_backend import EngineBackend
from forethought.server.runner import Server, bind, rare_collections
from forethought.server.settings import Settings

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import hostile_requests

NUM_CLIENTS = 16
HOSTILE = list(hostile_requests.requests().values())
HOSTILE_SHARE = 1 / 3
LAG = 0.1
"""Seconds: how often the event loop was later is reported, as other processes may be the cause."""
GROWTH_MIB, GROWTH_SHARE = 32.0, 0.03
"""By which memory may differ between the end of the warm-up and the end of the run."""
WARM_UP = 0.25
"""Of the time: caches fill, and the allocator finds its size."""
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}


def question(source: random.Random) -> list[dict[str, str]]:
    """A sum; some are asked again and again, so that prefixes are found."""
    a, b = source.randrange(20), source.randrange(20)
    return [{"role": "user", "content": f"What is {a} + {b}?"}]


async def whole(chats: Any, source: random.Random) -> None:
    """An answer at once."""
    await chats.create(model="reasoner", messages=question(source), max_tokens=64)


async def streamed(chats: Any, source: random.Random) -> None:
    """A stream, read to its end."""
    async with await chats.create(
        model="reasoner", messages=question(source), max_tokens=64, stream=True
    ) as chunks:
        async for _ in chunks:
            pass


async def abandoned(chats: Any, source: random.Random) -> None:
    """Goes away after a few tokens."""
    method = source.choice([None, "dynasor", "majority_vote@4"])
    body = {"ignore_eos": True} if method is None else {"method": method}
    async with await chats.create(
        model="reasoner", messages=question(source), stream=True, extra_body=body
    ) as chunks:
        num_remaining = source.randrange(1, 6)
        async for _ in chunks:
            num_remaining -= 1
            if num_remaining <= 0:
                return


async def cancelled(chats: Any, source: random.Random) -> None:
    """Goes away before the answer."""
    asking = asyncio.create_task(
        chats.create(model="reasoner", messages=question(source), extra_body={"ignore_eos": True})
    )
    await asyncio.sleep(source.random() / 4)
    asking.cancel()
    await asyncio.wait([asking])


async def method(chats: Any, source: random.Random) -> None:
    """One of the methods."""
    name = source.choice(["dynasor", "majority_vote@4", "self_refine"])
    await chats.create(
        model=f"{name}-reasoner", messages=question(source), max_tokens=96, temperature=0.7
    )


async def samples(chats: Any, source: random.Random) -> None:
    """Several samples with log-probabilities."""
    await chats.create(
        model="reasoner", messages=question(source), max_tokens=32, n=3, logprobs=True
    )


async def shaped(chats: Any, source: random.Random) -> None:
    """JSON of a schema."""
    shape = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    await chats.create(
        model="reasoner", messages=question(source), max_tokens=64, response_format=shape
    )


async def refused(chats: Any, source: random.Random) -> None:
    """What cannot be."""
    wrong = [{"temperature": -1}, {"model": "nothing"}, {"messages": []}, {"no_such_field": 1}]
    body = source.choice(wrong)
    try:
        await chats.create(model="reasoner", messages=question(source), extra_body=body)
    except (openai.BadRequestError, openai.NotFoundError):
        return
    raise AssertionError(f"{body} was not refused")


def connection(chats: Any) -> tuple[str, int]:
    """Where the server listens."""
    url = chats._client.base_url
    return url.host, url.port


async def sent(chats: Any, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection of its own on which ``data`` has been sent."""
    reader, writer = await asyncio.open_connection(*connection(chats))
    writer.write(data)
    return reader, writer


def hostile_request(source: random.Random) -> bytes:
    """One of those that are meant to hold up the server."""
    path, body = source.choice(HOSTILE)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def hostile(chats: Any, source: random.Random) -> None:
    """A hostile request; a third of the clients do not wait for the answer."""
    reader, writer = await sent(chats, hostile_request(source))
    if source.random() < 1 / 3:
        await asyncio.sleep(source.random() / 10)
    else:
        status = (await reader.readline()).split()[1]
        assert status in (b"200", b"400", b"404", b"408", b"413", b"429"), status
    writer.close()


async def broken_off(chats: Any, source: random.Random) -> None:
    """A connection that breaks off somewhere in a request."""
    request = hostile_request(source)
    _, writer = await sent(chats, request[: source.randrange(min(len(request), 1 << 16))])
    await asyncio.sleep(source.random() / 10)
    writer.close()


async def slow(chats: Any, source: random.Random) -> None:
    """Headers that never end: the server closes the connection."""
    reader, writer = await sent(chats, b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
    assert await reader.read() == b""
    writer.close()


FRIENDLY = [whole, streamed, streamed, abandoned, cancelled, method, samples, shaped]
UNFRIENDLY = [hostile, hostile, hostile, refused, broken_off, slow]


def memory_mib() -> float:
    """Resident memory of this process, without what it has freed and the allocator holds."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def client(url: str, seed: int, until: float, counts: Counter[str]) -> None:
    """One client after another, until the time is over."""
    source = random.Random(seed)
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as api:
        while time.monotonic() < until:
            kinds = UNFRIENDLY if source.random() < HOSTILE_SHARE else FRIENDLY
            kind = source.choice(kinds)
            try:
                await kind(api.chat.completions, source)
                counts[kind.__name__] += 1
            except Exception as error:
                counts[f"{kind.__name__} failed: {type(error).__name__}: {error}"[:200]] += 1


async def all_clients(url: str, seconds: float) -> Counter[str]:
    """All clients for a while; how often each kind has been served."""
    counts: Counter[str] = Counter()
    until = time.monotonic() + seconds
    await asyncio.gather(*[client(url, number, until, counts) for number in range(NUM_CLIENTS)])
    return counts


def run_clients(url: str, seconds: float) -> Counter[str]:
    """The same in a process of its own, so that clients do not hold up the server's event loop."""
    return asyncio.run(all_clients(url, seconds))


def load(url: str, seconds: float) -> tuple[Counter[str], list[float]]:
    """Run the clients; what they count, and the memory after the warm-up and then ten times."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        clients = pool.submit(run_clients, url, seconds)
        wait([clients], seconds * WARM_UP)
        memory = []
        while not clients.done():
            memory.append(round(memory_mib(), 1))
            wait([clients], seconds * (1 - WARM_UP) / 10)
        return clients.result(), memory


def leftovers(service: Any, loop: asyncio.AbstractEventLoop, tasks_before: int) -> list[str]:
    """What is wrong with a server that should be idle."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (
        service.load()["requests_unfinished"] or len(asyncio.all_tasks(loop)) > tasks_before
    ):
        time.sleep(0.1)
    engine, wrong = service.backend.llm._frontend.engine, []
    if service.load()["requests_unfinished"]:
        wrong.append(f"{service.load()['requests_unfinished']} requests are unfinished")
    if extra := len(asyncio.all_tasks(loop)) - tasks_before:
        wrong.append(f"{extra} asyncio tasks are left: {asyncio.all_tasks(loop)}"[:2000])
    if sequences := list(engine.scheduler):
        wrong.append(f"{len(sequences)} sequences are left")
    if engine.pool.in_use:
        wrong.append(f"{engine.pool.in_use} pages are in use")
    try:
        engine.check_integrity()
    except AssertionError as error:
        wrong.append(f"the KV cache is inconsistent: {error!r}")
    return wrong


def share_late(service: Any) -> float:
    """The share of measurements in which the event loop was more than ``LAG`` late."""
    (family,) = service.metrics.loop_lag.collect()
    counts = {sample.labels.get("le"): sample.value for sample in family.samples}
    total = counts["+Inf"]
    return (total - counts[str(LAG)]) / total if total else 0.0


def main() -> int:
    """Run, check and report."""
    logging.basicConfig(level=logging.WARNING)
    seconds = float(os.environ.get("SOAK_SECONDS", "600"))
    backend = EngineBackend(AsyncLLM(), "reasoner")
    with closing(backend), bind("127.0.0.1", 0) as opened, rare_collections():
        settings = Settings(max_running=NUM_CLIENTS, receive_seconds=10.0)
        app = create_app(backend, settings)
        server = Server(app, drain_seconds=30.0)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
        thread.start()
        while not server.started:
            time.sleep(0.05)
        service = app.state.service
        loop = service.llm.loop
        tasks_before, threads_before = len(asyncio.all_tasks(loop)), threading.active_count()
        url = f"http://127.0.0.1:{opened.getsockname()[1]}/v1"
        counts, memory = load(url, seconds)
        wrong = leftovers(service, loop, tasks_before)
        before, after = memory[0], memory_mib()
        num_threads = threading.active_count()
        late = share_late(service)
        server.should_exit = True
        thread.join()
    if after - before > max(GROWTH_MIB, GROWTH_SHARE * before):
        wrong.append(f"memory has grown from {before:.0f} to {after:.0f} MiB")
    failed = {name: number for name, number in counts.items() if "failed" in name}
    wrong += [f"{number} x {name}" for name, number in failed.items()]
    report = {
        "check": "soak",
        "seconds": seconds,
        "served": dict(sorted(counts.items())),
        "memory_mib": [*memory, round(after, 1)],
        "threads": [threads_before, num_threads],
        "loop_late": round(late, 4),
        "wrong": wrong,
    }
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    print(json.dumps(report))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
