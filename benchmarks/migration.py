"""Sequences that move between replicas: the pause of a move, and a skewed load with rebalancing.

    python -m benchmarks.migration
    python -m benchmarks.migration --streams 128 --tokens 600 --rounds 5

Two replicas of the embedded reasoner on a Ray of this machine, one thread each. First single
streams move once they have a number of tokens. A pause is from when the replica that has a stream
is told to end until the first tokens have come from the other one. Then all streams begin in one
replica, as the branches of one request do, with rebalancing and without, interleaved. The time per
token is that of a stream, from its first tokens to its last ones; percentiles are over the streams
of all rounds. Prints tables and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks.report import print_report

from forethought import SamplingParams
from forethought.cluster import links_of, open_llm
from forethought.cluster.engine import ClusterEngine
from forethought.cluster.migration import Rebalancing
from forethought.evaluation.problems import shipped
from forethought.llm.async_llm import AsyncLLM


@dataclass
class Load:
    """What the streams of one kind of load have shown."""

    seconds: list[float] = field(default_factory=list)
    """Of each round."""
    times: list[float] = field(default_factory=list)
    """Per token of each stream after its first tokens, seconds."""
    silences: list[float] = field(default_factory=list)
    """The longest of each stream, seconds."""
    num_moved: int = 0


def engine_of(llm: AsyncLLM) -> ClusterEngine:
    """The engine of replicas."""
    engine = llm._frontend.engine
    assert isinstance(engine, ClusterEngine)
    return engine


def move_to_other(llm: AsyncLLM) -> None:
    """Have every sequence move to the other replica."""

    def move() -> None:
        engine = engine_of(llm)
        for remote in [*engine._remotes.values()]:
            target = next(link for link in links_of(llm) if link is not remote.link)
            engine.migration.move(remote, target)

    llm._thread.call(move).result()


async def moved_once(llm: AsyncLLM, question: str, length: int) -> tuple[float, int]:
    """The pause in seconds and the bytes of the move of a stream with ``length`` tokens."""
    stats = engine_of(llm).migration.stats
    num_pauses, num_bytes, has_moved = len(stats.pauses), stats.num_bytes, False
    params = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
    async for output in llm.stream(question, params, gather=0.01):
        if not has_moved and len(output.outputs[0].token_ids) >= length:
            has_moved = True
            move_to_other(llm)
    assert len(stats.pauses) == num_pauses + 1, "it has ended before it moved: generate more"
    return stats.pauses[-1], stats.num_bytes - num_bytes


async def timed_stream(llm: AsyncLLM, question: str, num_tokens: int) -> tuple[float, float]:
    """Its time per token after the first ones, and its longest silence."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    arrivals: list[tuple[float, int]] = []
    async for output in llm.stream(question, params, gather=0.05):  # as the server
        size = len(output.outputs[0].token_ids)
        if size > (arrivals[-1][1] if arrivals else 0):
            arrivals.append((time.perf_counter(), size))
    (began, first), (ended, last) = arrivals[0], arrivals[-1]
    silence = max(after - before for (before, _), (after, _) in pairwise(arrivals))
    return (ended - began) / (last - first), silence


async def measure(llm: AsyncLLM, load: Load, questions: Sequence[str], num_tokens: int) -> None:
    """Add a round, in which all streams begin in one replica."""
    began, num_moved = time.perf_counter(), llm.stats.migrated
    streams = [timed_stream(llm, question, num_tokens) for question in questions]
    results = await asyncio.gather(*streams)
    load.seconds.append(time.perf_counter() - began)
    load.times += [per_token for per_token, _ in results]
    load.silences += [silence for _, silence in results]
    load.num_moved += llm.stats.migrated - num_moved


def pauses(llm: AsyncLLM, lengths: Sequence[int], num_rounds: int) -> list[dict[str, float]]:
    """A row per length."""
    rows, question = [], shipped()[0].question
    asyncio.run(moved_once(llm, question, lengths[0]))  # the first one loads what moves need
    for length in lengths:
        moves = [asyncio.run(moved_once(llm, question, length)) for _ in range(num_rounds)]
        seconds = [pause for pause, _ in moves]
        row = {
            "tokens": length,
            "kilobytes": round(statistics.median(size for _, size in moves) / 1000),
            "pause_ms": round(1e3 * statistics.median(seconds), 1),
            "max_pause_ms": round(1e3 * max(seconds), 1),
        }
        rows.append(row)
    return rows


def loads(llm: AsyncLLM, args: argparse.Namespace) -> list[dict[str, float | str]]:
    """A row with rebalancing and one without."""
    engine, problems = engine_of(llm), shipped()
    questions = [problems[n % len(problems)].question for n in range(args.streams)]
    engine._key = lambda: "one request"
    rules = {"off": None, "on": Rebalancing()}
    measured = {name: Load() for name in rules}
    for number in range(args.rounds + 1):  # the first one warms up
        for name, rule in rules.items():
            engine.migration.rebalancing = rule
            load = measured[name] if number else Load()
            asyncio.run(measure(llm, load, questions, args.tokens))
    return [
        {
            "rebalancing": name,
            "moved": load.num_moved,
            "seconds": round(statistics.median(load.seconds), 2),
            "token_ms": round(1e3 * statistics.median(load.times), 2),
            "p99_token_ms": round(1e3 * statistics.quantiles(load.times, n=100)[-1], 2),
            "p99_silence_ms": round(1e3 * statistics.quantiles(load.silences, n=100)[-1]),
        }
        for name, load in measured.items()
    ]


def print_table(rows: Sequence[dict]) -> None:
    """A column per entry."""
    print("".join(f"{name:>15}" for name in rows[0]))
    for row in rows:
        print("".join(f"{value:>15}" for value in row.values()))
    print()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=64, help="of the skewed load")
    parser.add_argument("--tokens", type=int, default=800, help="of each stream")
    parser.add_argument("--lengths", type=int, nargs="+", default=[50, 200, 600])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    fields = {"num_threads": 1, "dtype": "float32", "max_batch_size": args.streams}
    llm = open_llm(replicas=2, rebalance=False, **fields)
    while sum(link.is_up for link in links_of(llm)) < 2:
        time.sleep(0.1)
    try:
        by_length = pauses(llm, args.lengths, args.rounds)
        print_table(by_length)
        by_load = loads(llm, args)
        print_table(by_load)
    finally:
        llm.shutdown()
    settings = {"streams": args.streams, "tokens": args.tokens, "threads": 1}
    print_report("migration", by_load, pauses=by_length, **settings)


if __name__ == "__main__":
    main()
