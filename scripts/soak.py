"""A server under mixed load for a while, and what is left of it afterwards.

    python scripts/soak.py                 # ten minutes
    SOAK_SECONDS=120 python scripts/soak.py

Clients stream, ask for methods, for several samples and for shapes, send nonsense, and go away in
the middle of an answer. Then, with the server idle: its memory has not grown, every page of the KV
cache is free, and no task, thread or sequence is left over. The last line is JSON; the status is 1
if anything is wrong.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import uvicorn

from forethought import AsyncLLM
from forethought.server.app import create_app
from forethought.server.backends import EngineBackend
from forethought.server.runner import listen
from forethought.server.settings import Settings

NUM_CLIENTS = 16
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
        left = source.randrange(1, 6)
        async for _ in chunks:
            left -= 1
            if left <= 0:
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


KINDS = [whole, streamed, streamed, abandoned, cancelled, method, samples, shaped, refused]


def memory_mib() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def client(url: str, seed: int, until: float, counts: Counter[str]) -> None:
    """One client after another, until the time is over."""
    source = random.Random(seed)
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as api:
        while time.monotonic() < until:
            kind = source.choice(KINDS)
            try:
                await kind(api.chat.completions, source)
                counts[kind.__name__] += 1
            except Exception as error:
                counts[f"{kind.__name__} failed: {type(error).__name__}: {error}"[:200]] += 1


async def load(url: str, seconds: float) -> tuple[Counter[str], float]:
    """All clients; how often each kind has been served, and the memory after the warm-up."""
    counts: Counter[str] = Counter()
    until = time.monotonic() + seconds
    clients = [asyncio.create_task(client(url, n, until, counts)) for n in range(NUM_CLIENTS)]
    await asyncio.sleep(seconds * WARM_UP)
    gc.collect()
    before = memory_mib()
    await asyncio.gather(*clients)
    return counts, before


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


def main() -> int:
    """Run, check and report."""
    logging.basicConfig(level=logging.WARNING)
    seconds = float(os.environ.get("SOAK_SECONDS", "600"))
    backend = EngineBackend(AsyncLLM(), "reasoner")
    with closing(backend), listen("127.0.0.1", 0) as opened:
        app = create_app(backend, Settings(max_running=NUM_CLIENTS))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
        thread.start()
        while not server.started:
            time.sleep(0.05)
        service = app.state.service
        loop = service.llm.loop
        tasks_before, threads_before = len(asyncio.all_tasks(loop)), threading.active_count()
        url = f"http://127.0.0.1:{opened.getsockname()[1]}/v1"
        counts, before = asyncio.run(load(url, seconds))
        wrong = leftovers(service, loop, tasks_before)
        gc.collect()
        after, num_threads = memory_mib(), threading.active_count()
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
        "memory_mib": [round(before, 1), round(after, 1)],
        "threads": [threads_before, num_threads],
        "wrong": wrong,
    }
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    print(json.dumps(report))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
