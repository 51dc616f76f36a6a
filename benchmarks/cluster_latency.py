"""What replicas add to the latency of one engine in the same process as its clients.

    python -m benchmarks.cluster_latency
    python -m benchmarks.cluster_latency --streams 1 8 --tokens 300 --rounds 9

One engine with its ``AsyncLLM``, and one replica of the same model on a Ray of this machine behind
``open_llm``, in turns within a round, with as many threads. Greedy streams of the embedded reasoner
with prompts that are new to both; tokens are gathered for 50 ms after the first ones, as the server
does. Milliseconds to the first token and per token after it, medians over the streams of a round;
figures are medians over the rounds, differences and ratios within a round. Prints a table and,
last, one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import time
from typing import NamedTuple

import torch
from benchmarks.cluster_soak import start_ray
from benchmarks.report import print_report

from forethought import SamplingParams
from forethought.cluster import links_of, open_llm
from forethought.evaluation.problems import shipped
from forethought.llm.async_llm import AsyncLLM


class Latency(NamedTuple):
    """Of a stream, milliseconds."""

    first: float
    per_token: float


async def timed(llm: AsyncLLM, question: str, num_tokens: int, salt: str) -> Latency:
    """A stream's latencies."""
    params = SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, cache_salt=salt
    )
    began, first, first_size = time.perf_counter(), 0.0, 0
    async for output in llm.stream(question, params, gather=0.05):
        size = len(output.outputs[0].token_ids)
        if size and not first:
            first, first_size = time.perf_counter(), size
    ended = time.perf_counter()
    return Latency(1e3 * (first - began), 1e3 * (ended - first) / (size - first_size))


async def medians(llm: AsyncLLM, count: int, args: argparse.Namespace, salt: str) -> Latency:
    """Of several streams at once."""
    questions = [problem.question for problem in shipped()[:count]]
    results = await asyncio.gather(*(timed(llm, q, args.tokens, salt) for q in questions))
    firsts, per_tokens = zip(*results, strict=True)
    return Latency(statistics.median(firsts), statistics.median(per_tokens))


async def warm_medians(llm: AsyncLLM, count: int, args: argparse.Namespace, salt: str) -> Latency:
    """``medians`` after a turn that is not counted: memory that the other engine's turn has left
    idle is slow at first on some virtual machines.
    """
    await medians(llm, count, args, f"warm {salt}")
    return await medians(llm, count, args, salt)


async def compare(llms: list[AsyncLLM], args: argparse.Namespace) -> list[dict[str, float]]:
    """A row per number of streams."""
    rows = []
    for count in args.streams:
        rounds = []
        for number in range(args.rounds + 1):  # the first one warms up
            turn = [await warm_medians(llm, count, args, f"{count} {number}") for llm in llms]
            rounds += [turn] if number else []
        alone, apart = (
            Latency(*map(statistics.median, zip(*side, strict=True)))
            for side in zip(*rounds, strict=True)
        )
        rows.append(
            {
                "streams": count,
                "first_ms": round(alone.first, 2),
                "replica_first_ms": round(apart.first, 2),
                "added_first_ms": round(statistics.median(b.first - a.first for a, b in rounds), 2),
                "token_ms": round(alone.per_token, 3),
                "replica_token_ms": round(apart.per_token, 3),
                "token_ratio": round(
                    statistics.median(b.per_token / a.per_token for a, b in rounds), 3
                ),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="of each engine")
    args = parser.parse_args()
    logging.getLogger("forethought").setLevel(logging.ERROR)
    torch.set_num_threads(args.threads)
    start_ray()
    fields = {"num_threads": args.threads}
    llms = [AsyncLLM(**fields), open_llm(replicas=1, **fields)]
    try:
        while not any(link.is_up for link in links_of(llms[1])):
            time.sleep(0.1)
        rows = asyncio.run(compare(llms, args))
    finally:
        for llm in llms:
            llm.shutdown()
    print("".join(f"{name:>18}" for name in rows[0]))
    for row in rows:
        print("".join(f"{value:>18}" for value in row.values()))
    print_report("cluster_latency", rows, tokens=args.tokens, threads=args.threads)


if __name__ == "__main__":
    main()
