"""A soak of replicas: streams of all kinds for minutes, while a replica is killed again and again.

    python -m benchmarks.cluster_soak
    python -m benchmarks.cluster_soak --minutes 30 --kill-every 10 --streams 64

Two replicas of the embedded reasoner in float32 on a Ray of this machine, one thread each. What one
engine generates is the reference; ``kill -9`` takes the replica with the most generations. Streams
that fail are lost, those with other tokens or texts than the reference are changed. Memory is that
of the ingress, which is the process that outlives all, after each minute. Prints a line a minute
and, last, one JSON line; exits with 1 if anything was lost or changed.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from benchmarks.report import print_report

from forethought import SamplingParams
from forethought.cluster import links_of, open_llm
from forethought.evaluation.problems import shipped
from forethought.llm.async_llm import AsyncLLM

FIELDS: dict[str, Any] = {"dtype": "float32", "num_threads": 1}
COMMON: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "temperature": 1.0}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"seed": 5},
    {"seed": 6, "n": 3},
    {"seed": 7, "frequency_penalty": 0.4},
    {"seed": 4, "thinking_budget": 150},
    {"seed": 2, "guided_decoding": {"regex": "[a-z ]{200,300}"}, "ignore_eos": False},
)
"""Params of streams: greedy, seeded, several samples, penalties, a budget, a grammar."""
NUM_QUESTIONS = 8

Samples = list[tuple[list[int], str]]


@dataclass
class Soak:
    """What has happened."""

    num_streams: int = 0
    lost: list[str] = field(default_factory=list)
    num_changed: int = 0
    silences: list[float] = field(default_factory=list)
    """The longest of each stream, seconds."""
    num_kills: int = 0
    resident: list[float] = field(default_factory=list)
    """MiB of the ingress, after each minute."""


async def streamed(llm: AsyncLLM, question: str, params: SamplingParams) -> tuple[Samples, float]:
    """The samples of a stream, and its longest silence in seconds."""
    outputs, heard, silence = [], time.monotonic(), 0.0
    async for output in llm.stream(question, params, gather=0.05):
        now = time.monotonic()
        silence, heard, outputs = max(silence, now - heard), now, output.outputs
    return [(sample.token_ids, sample.text) for sample in outputs], silence


async def references(jobs: Sequence[tuple[str, SamplingParams]]) -> list[Samples]:
    """What one engine generates."""
    llm = AsyncLLM(**FIELDS)
    try:
        return [(await streamed(llm, *job))[0] for job in jobs]
    finally:
        llm.shutdown()


async def client(
    llm: AsyncLLM, jobs: list[tuple[str, SamplingParams]], expected: list[Samples], soak: Soak
) -> None:
    """One stream after another, until it is cancelled."""
    for number in cycle(random.sample(range(len(jobs)), len(jobs))):
        try:
            samples, silence = await streamed(llm, *jobs[number])
        except Exception as error:
            soak.lost.append(repr(error))
            continue
        soak.num_streams += 1
        soak.num_changed += samples != expected[number]
        soak.silences.append(silence)


async def kill_every(llm: AsyncLLM, seconds: float, soak: Soak) -> None:
    """Kill the replica with the most generations, again and again."""
    while True:
        await asyncio.sleep(seconds)
        link = max(links_of(llm), key=lambda link: (link.is_up, link.num_generating))
        if link.is_up and link.description is not None:
            os.kill(link.description.process, signal.SIGKILL)
            soak.num_kills += 1


async def run(args: argparse.Namespace) -> Soak:
    """The soak."""
    questions = [problem.question for problem in shipped()[:NUM_QUESTIONS]]
    params = [SamplingParams(**COMMON | kind) for kind in KINDS]
    jobs = [(question, kind) for question in questions for kind in params]
    expected = await references(jobs)
    llm, soak = open_llm(replicas=2, **FIELDS), Soak()
    tasks = [asyncio.create_task(client(llm, jobs, expected, soak)) for _ in range(args.streams)]
    tasks.append(asyncio.create_task(kill_every(llm, args.kill_every, soak)))
    for minute in range(1, args.minutes + 1):
        await asyncio.sleep(60)
        soak.resident.append(round(resident_bytes() / 2**20, 1))
        print(
            f"{minute} min: {soak.num_streams} streams, {soak.num_kills} kills, "
            f"{len(soak.lost)} lost, {soak.num_changed} changed, {soak.resident[-1]} MiB",
            flush=True,
        )
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    llm.shutdown()
    return soak


def resident_bytes() -> int:
    """Of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def start_ray() -> None:
    """A Ray of this machine, with more processors than it has, as replicas that start wait."""
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        namespace="forethought",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
        _system_config={"worker_niceness": 0},  # as a Ray that the server starts
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=int, default=10)
    parser.add_argument("--kill-every", type=float, default=20.0, help="seconds")
    parser.add_argument("--streams", type=int, default=16, help="at a time")
    args = parser.parse_args()
    logging.getLogger("forethought").setLevel(logging.ERROR)
    start_ray()
    soak = asyncio.run(run(args))
    for error in dict.fromkeys(soak.lost):
        print("lost:", error)
    silences = sorted(soak.silences)
    row = {
        "streams": soak.num_streams,
        "kills": soak.num_kills,
        "lost": len(soak.lost),
        "changed": soak.num_changed,
        "median_silence_seconds": round(silences[len(silences) // 2], 2),
        "longest_silence_seconds": round(silences[-1], 2),
        "resident_mib": soak.resident,
    }
    print_report("cluster_soak", [row], minutes=args.minutes, kill_every=args.kill_every)
    sys.exit(bool(soak.lost or soak.num_changed))


if __name__ == "__main__":
    main()
