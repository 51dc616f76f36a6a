"""Goodput of one pool, of chunked prefill with smaller chunks, and of prefill and decode apart.

    python -m benchmarks.prefill_split
    python -m benchmarks.prefill_split --step-times steps.json --replicas 8 --lengths 800

Replicas are simulated (``forethought bench cluster``) on step times of the embedded reasoner, which
are measured first with one thread, or on those of a file. Half of the prompts are short and half
long, none is cached; requests come at random times. Each load is simulated with one pool for
several sizes of chunks (``max_num_tokens``; Sarathi-Serve's way to bound a step), and with each
number of prefill replicas (DistServe), whose own chunks are as long as the engine takes. A cell has
the requests per second that meet both targets. Prints a table per length of long prompts and, last,
one JSON line.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.report import print_report

from forethought import LLM
from forethought.bench.arrivals import TraceRequest
from forethought.bench.cluster_simulation import ClusterSettings, simulate
from forethought.bench.serving import read_targets
from forethought.bench.step_times import MeasuredEngine, measure_engine
from forethought.evaluation.report import aligned

SHORT = 40, 120
"""Tokens of a short prompt, at least and below."""
OUTPUT = 100, 200


def make_trace(count: int, rate: float, length: int, seed: int) -> list[TraceRequest]:
    """Requests of which every second one has a prompt of about ``length`` tokens."""
    source, at, requests = random.Random(seed), 0.0, []
    for number in range(count):
        at += source.expovariate(rate)
        bounds = SHORT if number % 2 else (3 * length // 4, 5 * length // 4)
        size, limit = source.randrange(*bounds), source.randrange(*OUTPUT)
        requests.append(TraceRequest(f"{number}", at, size, limit, (), number))
    return requests


def goodput(
    engine: MeasuredEngine,
    requests: Sequence[TraceRequest],
    targets: dict[str, float],
    num_replicas: int,
    num_prefill: int = 0,
) -> float:
    """Requests per second that meet the targets."""
    settings = ClusterSettings(engine, num_replicas, num_prefill=num_prefill)
    return simulate(settings, requests, "placement").goodput(targets)


def measure(
    engine: MeasuredEngine, requests: Sequence[TraceRequest], args: argparse.Namespace
) -> dict[str, float]:
    """The goodput of each way to serve a load."""
    targets, number = read_targets(args.targets), args.replicas
    sizes = [size for size in args.chunks if engine.max_batch_size <= size < engine.max_num_tokens]
    smaller = {size: replace(engine, max_num_tokens=size) for size in sizes}
    row = {"one pool": goodput(engine, requests, targets, number)}
    row |= {f"chunks of {n}": goodput(e, requests, targets, number) for n, e in smaller.items()}
    row |= {
        f"{part} prefill": goodput(engine, requests, targets, number, part)
        for part in range(1, number // 2 + 1)
    }
    return {name: round(value, 2) for name, value in row.items()}


def measured_engine(args: argparse.Namespace) -> MeasuredEngine:
    """That of the file, or the embedded reasoner's."""
    if args.step_times is not None:
        return MeasuredEngine.load(args.step_times)
    with LLM(num_threads=1) as llm:
        return measure_engine(llm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--step-times", type=Path, help="a file of bench cluster")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--rates", type=float, nargs="+", default=[10, 20, 30, 40, 60])
    parser.add_argument("--lengths", type=int, nargs="+", default=[400, 800])
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 256, 128])
    parser.add_argument("--targets", nargs="+", default=["ttft:500", "tpot:3"])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    engine, rows = measured_engine(args), list[dict[str, Any]]()
    for length in args.lengths:
        for rate in args.rates:
            requests = make_trace(args.requests, rate, length, args.seed)
            rows.append({"length": length, "rate": rate, **measure(engine, requests, args)})
        here = [row for row in rows if row["length"] == length]
        print(aligned([[*here[0]], *([str(value) for value in row.values()] for row in here)]))
    print_report("prefill_split", rows, replicas=args.replicas, targets=args.targets)


if __name__ == "__main__":
    main()
