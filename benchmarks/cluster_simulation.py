"""The simulator of ``forethought bench cluster`` beside real replicas: the same trace on both.

    python -m benchmarks.cluster_simulation
    python -m benchmarks.cluster_simulation --requests 200 --rates 10 40 inf

Steps of the embedded reasoner are measured in this process with one thread, beside a second process
that computes as well, as the replicas do that share the machine. Then two replicas on a Ray of this
machine, one thread each, answer a trace of sessions with shared prefixes, at each rate; the
simulator answers the same requests. Replicas place by session and load, without rebalancing. Times
of the replicas are those that a client in this process sees.

The column busy_s has the seconds of all steps. Where other programs load the machine, steps are not
as fast in the replicas as they were when they were measured: the lines "scaled" are of a simulation
with all step times multiplied by one number, with which busy_s is that of the replicas. They show
what is left of the error. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import math
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.report import print_report

from forethought import LLM, SamplingParams
from forethought.bench.arrivals import TraceRequest
from forethought.bench.cluster_simulation import ClusterSettings, simulate
from forethought.bench.serving import Exchange, ServingReport
from forethought.bench.step_times import MeasuredEngine, measure_engine
from forethought.cluster import links_of, open_llm
from forethought.cluster.engine import ClusterEngine
from forethought.evaluation.report import aligned
from forethought.llm.async_llm import AsyncLLM

BLOCK = 16
"""Tokens per block of the trace, and per page of the replicas."""
NUM_REPLICAS, NUM_SESSIONS = 2, 12
NUM_SCALINGS = 20
"""Simulations until the seconds of all steps are those of the replicas."""
FIELDS = {"num_threads": 1, "dtype": "float32", "max_batch_size": 32}
_session = contextvars.ContextVar[str | None]("session", default=None)


def make_trace(count: int, rate: float, seed: int) -> list[TraceRequest]:
    """Requests of sessions; each session begins with the same blocks."""
    source, at, requests = random.Random(seed), 0.0, []
    for number in range(count):
        at += 0.0 if math.isinf(rate) else source.expovariate(rate)
        session, num_blocks = source.randrange(NUM_SESSIONS), source.randrange(8, 16)
        shared = [f"{seed} {rate} {session} {block}" for block in range(6)]
        ids = (*shared, *(f"{seed} {rate} {number} {n}" for n in range(6, num_blocks)))
        length, limit = num_blocks * BLOCK + source.randrange(1, BLOCK), source.randrange(20, 160)
        requests.append(
            TraceRequest(f"{number}", at, length, limit, ids, number, session=str(session))
        )
    return requests


def prompt_ids(request: TraceRequest, vocab_size: int) -> list[int]:
    """Random tokens, the same for the same blocks."""
    tokens: list[int] = []
    for block in (*request.hash_ids, f"rest {request.hash_ids[-1]}"):
        tokens += random.Random(str(block)).choices(range(vocab_size), k=BLOCK)
    return tokens[: request.input_length]


BUSY = """
from benchmarks.cluster_simulation import FIELDS, LLM, SamplingParams
params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
with LLM(**FIELDS) as llm:
    while True:
        llm.generate([[5 + row] * 64 for row in range(8)], params)
        print("busy", flush=True)
"""


def measured_engine() -> MeasuredEngine:
    """Step times beside a second process that decodes all the time."""
    command = [sys.executable, "-c", BUSY]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline(), "it has failed"
            with LLM(**FIELDS) as one:
                return measure_engine(one)
        finally:
            other.kill()


async def answer(llm: AsyncLLM, request: TraceRequest, began: float) -> Exchange:
    """Send a request when its time has come."""
    await asyncio.sleep(request.at - (time.perf_counter() - began))
    _session.set(request.session)
    params = SamplingParams(temperature=0.0, max_tokens=request.output_length, ignore_eos=True)
    exchange = Exchange(time.perf_counter() - began, num_output_tokens=request.output_length)
    async for _ in llm.stream(prompt_ids(request, len(llm.tokenizer)), params, gather=0.05):
        exchange.chunks.append(time.perf_counter() - began)
    exchange.ended = time.perf_counter() - began
    return exchange


async def replay(llm: AsyncLLM, requests: Sequence[TraceRequest]) -> dict[str, Any]:
    """What real replicas show."""
    began, before = time.perf_counter(), llm.stats
    exchanges = await asyncio.gather(*(answer(llm, request, began) for request in requests))
    report = ServingReport(exchanges, max(e.ended for e in exchanges), {}).to_dict()
    after = llm.stats
    num_cached, num_prefilled = after.cached - before.cached, after.prefilled - before.prefilled
    return {
        "tokens_per_second": report["output_tokens_per_second"],
        "ttft_p50_ms": report["ttft_ms"]["p50"],
        "ttft_p99_ms": report["ttft_ms"]["p99"],
        "tpot_p50_ms": report["tpot_ms"]["p50"],
        "tpot_p99_ms": report["tpot_ms"]["p99"],
        "busy_s": round(after.step_seconds - before.step_seconds, 3),
        "hit_share": round(num_cached / (num_cached + num_prefilled), 4),
    }


def simulated(engine: MeasuredEngine, requests: Sequence[TraceRequest]) -> dict[str, Any]:
    """What the simulator says."""
    settings = ClusterSettings(engine, NUM_REPLICAS, BLOCK)
    result = simulate(settings, requests, "placement")
    row = result.to_dict({})
    names = [f"{name}_p{percent}_ms" for name in ("ttft", "tpot") for percent in (50, 99)]
    return {
        "tokens_per_second": row["output_tokens_per_second"],
        **{name: row[name] for name in names},
        "busy_s": round(sum(replica.busy_seconds for replica in result.replicas), 3),
        "hit_share": row["prefix_cache_hit_share"],
    }


def scaled(
    engine: MeasuredEngine, requests: Sequence[TraceRequest], busy_seconds: float
) -> dict[str, Any]:
    """What the simulator says where steps are as fast as they were in the replicas."""
    factor, row = 1.0, simulated(engine, requests)
    for _ in range(NUM_SCALINGS):
        factor *= busy_seconds / row["busy_s"]
        steps = tuple(step._replace(ms=step.ms * factor) for step in engine.steps)
        row = simulated(replace(engine, steps=steps), requests)
    return row


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Measured and simulated figures, and how far they differ."""
    names = [*rows[0]["measured"]]
    cells = [["rate", "", *names]]
    for row in rows:
        for kind in ("measured", "simulated", "scaled"):
            cells.append([row["rate"], kind, *(f"{row[kind][name]:,.2f}" for name in names)])
            if kind != "measured":
                ratios = (row[kind][name] / row["measured"][name] - 1 for name in names)
                cells.append(["", "  difference", *(f"{ratio:+.0%}" for ratio in ratios)])
    print(aligned(cells, left_columns=(0, 1)))


def main() -> None:
    """Measure, simulate, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=120, help="of each rate")
    parser.add_argument("--rates", type=float, nargs="+", default=[10.0, 40.0, math.inf])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    engine = measured_engine()
    llm = open_llm(replicas=NUM_REPLICAS, rebalance=False, **FIELDS)
    rows = []
    try:
        while sum(link.is_up for link in links_of(llm)) < NUM_REPLICAS:
            time.sleep(0.1)
        cluster = llm._frontend.engine
        assert isinstance(cluster, ClusterEngine)
        cluster._key = _session.get
        asyncio.run(replay(llm, make_trace(16, math.inf, args.seed + 1)))  # warms up
        for rate in args.rates:
            requests = make_trace(args.requests, rate, args.seed)
            measured = asyncio.run(replay(llm, requests))
            row = {"rate": str(rate), "measured": measured}
            row["simulated"] = simulated(engine, requests)
            row["scaled"] = scaled(engine, requests, measured["busy_s"])
            rows.append(row)
    finally:
        llm.shutdown()
    print_table(rows)
    print_report("cluster_simulation", rows, requests=args.requests, threads=1)


if __name__ == "__main__":
    main()
