"""Servers side by side: ours, ``transformers serve``, and our engine without a server.

    python -m benchmarks.serving_vs_transformers
    python -m benchmarks.serving_vs_transformers --streams 16 --requests 64 --rounds 3

All have the embedded reasoner, or the model of ``--model``, in the same dtype, and get the same
questions, greedily. Servers are processes of their own, with as many threads each, and are asked in
turn in every round, so that other load of the machine falls on all of them: ``--streams`` streams
at once for throughput, then one after the other for the time to the first token. ``AsyncLLM alone``
is the engine in this process, with as many streams. ``transformers serve`` needs ``accelerate``;
where it does not start it is left out, and the reason is printed. Prints a table of medians over
the rounds and, last, one JSON line.

*CPU* is the processor time of the server's process for a token of the streams at once: the client
of the measurement counts in tokens/s, where it is on the same cores, and not there.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.report import print_report

from forethought import AsyncLLM, SamplingParams
from forethought.assets import reasoner_dir
from forethought.bench.arrivals import poisson
from forethought.bench.prompts import shipped_prompts
from forethought.bench.serving import ServingBench, percentile
from forethought.evaluation.report import aligned
from forethought.server.settings import Settings

OURS, THEIRS, ALONE = "forethought serve", "transformers serve", "AsyncLLM alone"
FIELDS = {"temperature": 0.0}


def environment(threads: int) -> dict[str, str]:
    """Of the processes: as many threads each, and no network."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return {**os.environ, **offline, "OMP_NUM_THREADS": str(threads)}


@contextmanager
def forethought_server(threads: int, options: Sequence[str] = ()) -> Iterator[tuple[str, str, int]]:
    """URL, name of the model and number of the process."""
    command = [sys.executable, "-m", "forethought", "serve", "--port", "0", *options]
    command += ["--served-model-name", "model"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment(threads)
    ) as process:
        try:
            assert process.stderr is not None
            match = None
            while match is None:
                line = process.stderr.readline()
                if not line:
                    raise SystemExit("forethought serve did not start")
                match = re.search(r"(http://\S+) \(the page\)", line)
            drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
            yield f"{match.group(1)}/v1", "model", process.pid
        finally:
            process.terminate()
    drain.wait()


class NotStarted(Exception):
    """``transformers serve`` ended, or did not answer; with the last line that it said."""


@contextmanager
def transformers_server(
    program: str, model: str, threads: int, options: Sequence[str] = ()
) -> Iterator[tuple[str, str, int]]:
    """URL, name of the model and number of the process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, "serve", model]
    command += ["--port", str(port), "--host", "127.0.0.1", "--device", "cpu"]
    command += options
    with (
        tempfile.TemporaryFile("w+") as log_file,
        subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=log_file, env=environment(threads)
        ) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            until = time.monotonic() + 300
            while True:
                try:
                    with urllib.request.urlopen(f"{url}/health", timeout=5):
                        break
                except (urllib.error.URLError, OSError):
                    if process.poll() is not None or time.monotonic() > until:
                        log_file.seek(0)
                        raise NotStarted(" ".join(log_file.read().splitlines()[-1:])) from None
                    time.sleep(0.5)
            yield f"{url}/v1", model, process.pid
        finally:
            process.terminate()


def processor_seconds(pid: int) -> float:
    """That a process has taken, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Measured(NamedTuple):
    """What a round has shown of a server."""

    tokens_per_second: float
    cpu_per_token: float
    """Seconds."""
    firsts: Sequence[float]
    """Seconds to the first token of requests alone."""


def serve(
    url: str, model: str, pid: int, prompts: Sequence[str], args: argparse.Namespace
) -> Callable[[], Measured]:
    """A function that measures a server."""

    def measure() -> Measured:
        before = processor_seconds(pid)
        crowd = ServingBench(url, model, max_concurrency=args.streams, fields=FIELDS)
        arrivals = poisson(prompts, args.requests, math.inf, args.max_tokens)
        report = asyncio.run(crowd.run(arrivals))
        spent = processor_seconds(pid) - before
        alone = ServingBench(url, model, max_concurrency=1, fields=FIELDS)
        few = asyncio.run(alone.run(poisson(prompts, args.singles, math.inf, 8)))
        for exchange in (*report.exchanges, *few.exchanges):
            if exchange.error is not None:
                raise SystemExit(f"{url}: {exchange.error}")
        cpu = spent / sum(exchange.num_output_tokens for exchange in report.exchanges)
        return Measured(
            report.tokens_per_second, cpu, [exchange.ttft for exchange in few.exchanges]
        )

    return measure


def engine(
    llm: AsyncLLM, prompts: Sequence[str], args: argparse.Namespace
) -> Callable[[], Measured]:
    """The same with the engine of this process."""

    async def one(prompt: str, max_tokens: int, limit: asyncio.Semaphore) -> tuple[int, float]:
        async with limit:
            began, times, num_tokens = time.perf_counter(), [], 0
            ids = llm.chat_prompt([{"role": "user", "content": prompt}])
            params = SamplingParams(max_tokens=max_tokens, **FIELDS)
            async for output in llm.stream(ids, params, gather=Settings().stream_interval):
                times.append(time.perf_counter())
                num_tokens = len(output.outputs[0].token_ids)
        return num_tokens, times[0] - began

    async def all_of(count: int, streams: int, max_tokens: int) -> list[tuple[int, float]]:
        limit = asyncio.Semaphore(streams)
        chosen = [prompts[number % len(prompts)] for number in range(count)]
        return await asyncio.gather(*(one(prompt, max_tokens, limit) for prompt in chosen))

    def measure() -> Measured:
        began, before = time.perf_counter(), time.process_time()
        counts = asyncio.run(all_of(args.requests, args.streams, args.max_tokens))
        seconds, spent = time.perf_counter() - began, time.process_time() - before
        num_tokens = sum(count for count, _ in counts)
        alone = asyncio.run(all_of(args.singles, 1, 8))
        return Measured(num_tokens / seconds, spent / num_tokens, [first for _, first in alone])

    return measure


def run(contestants: dict[str, Callable[[], Measured]], rounds: int) -> list[dict[str, Any]]:
    """Rows of the table; the first round warms up."""
    by_contestant: dict[str, list[Measured]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, measure in contestants.items():
            measured = measure()
            if number:
                by_contestant[name].append(measured)
    return [row(name, by_contestant[name], by_contestant[OURS]) for name in contestants]


def row(name: str, measurements: Sequence[Measured], base: Sequence[Measured]) -> dict[str, Any]:
    """Medians over the rounds; ratios are of the same round."""
    pairs = list(zip(base, measurements, strict=True))
    firsts = [seconds for measurement in measurements for seconds in measurement.firsts]
    return {
        "server": name,
        "tokens_per_second": round(
            median(measurement.tokens_per_second for measurement in measurements), 1
        ),
        "ours_to_it": round(
            median(ours.tokens_per_second / it.tokens_per_second for ours, it in pairs), 3
        ),
        "cpu_us_per_token": round(
            1e6 * median(measurement.cpu_per_token for measurement in measurements), 1
        ),
        "our_cpu_to_its": round(
            median(ours.cpu_per_token / it.cpu_per_token for ours, it in pairs), 3
        ),
        "ttft_ms_p50": round(percentile(firsts, 50) * 1000, 1),
        "ttft_ms_p95": round(percentile(firsts, 95) * 1000, 1),
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--requests", type=int, default=48, help="per round")
    parser.add_argument("--singles", type=int, default=8, help="requests alone, per round")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    beside = os.path.join(os.path.dirname(sys.executable), "transformers")
    parser.add_argument(
        "--transformers", default=beside, help="program, of an environment that has accelerate too"
    )
    parser.add_argument("--model", default=str(reasoner_dir()), help="directory of another one")
    parser.add_argument("--dtype", default="bfloat16", help="of all servers")
    parser.add_argument("--ours-only", action="store_true", help="without transformers serve")
    parser.add_argument("--continuous-batching", action="store_true", help="of transformers serve")
    args = parser.parse_args()
    prompts = shipped_prompts()
    model_options = [args.model, "--dtype", args.dtype]
    flags = ["--dtype", args.dtype]
    flags += ["--continuous-batching"] if args.continuous_batching else []
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    with ExitStack() as opened:
        ours = opened.enter_context(forethought_server(args.threads, model_options))
        drafting = forethought_server(args.threads, [*model_options, "--speculative", "ngram"])
        drafts = opened.enter_context(drafting)
        llm = AsyncLLM(args.model, dtype=args.dtype)
        opened.callback(llm.shutdown)
        contestants = {
            OURS: serve(*ours, prompts, args),
            f"{OURS} --speculative ngram": serve(*drafts, prompts, args),
            ALONE: engine(llm, prompts, args),
        }
        if not args.ours_only:
            server = transformers_server(args.transformers, args.model, args.threads, flags)
            try:
                contestants[THEIRS] = serve(*opened.enter_context(server), prompts, args)
            except NotStarted as reason:
                print(f"{THEIRS} is left out, as it does not start: {reason}")
        rows = run(contestants, args.rounds)
    head = ("server", "tokens/s", "ours / it", "CPU us", "ours / its", "TTFT p50 ms", "p95 ms")
    print(aligned([head, *([str(value) for value in row.values()] for row in rows)]))
    print_report("serving_vs_transformers", rows, **vars(args))


if __name__ == "__main__":
    main()
