"""What clients and methods cost beside the engine: seconds and tokens, against plain generation.

    python -m benchmarks.methods --parts alone batch vote searches clients

``alone``    problems one at a time: ``LLM.generate``, the same through a worker, Dynasor-CoT,
             without drafts and with those of the draft model
``batch``    the same with all problems at once
``vote``     votes against 16 samples of ``LLM.generate`` at the same temperature: a vote's until
             they end, else as many tokens as the method decodes
``searches`` the same of a beam search and particles, one problem at a time and all at once
``clients``  sampled streams of ``AsyncLLM`` and of ``serve`` against a batch of ``LLM``

All of a part are run in turn, several times; medians. ``times`` compares seconds with those of the
first row, ``rate`` the tokens per second that go through the model, in prefills (of probes too) and
decoding. The model is the embedded reasoner. Prints tables and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection
from typing import Any

from benchmarks.report import print_report

from forethought import LLM, AsyncLLM, SamplingParams
from forethought.assets import drafter_dir
from forethought.config.drafters import DraftTargetDecodingConfig
from forethought.evaluation.problems import Problem, shipped, user_prompt
from forethought.evaluation.recipe import recipe
from forethought.outputs import Usage
from forethought.scaffolding import Controller, EngineWorker, ScaffoldingLlm

GREEDY = SamplingParams(temperature=0.0, max_tokens=450)
PROBING = {"chunk_size": 16, "certainty_threshold": 2}
NUM_STREAMS, NUM_TOKENS = 16, 400
TEMPERATURE = 0.8

Timed = Callable[[], Usage]
"""Runs something; the tokens that it computes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--problems", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    problems, rows = shipped()[: args.problems], list[dict[str, Any]]()
    for part in args.parts:
        rows += PARTS[part](problems, args.rounds)
    print_report("methods", rows, problems=args.problems, rounds=args.rounds)


# ---- problems ------------------------------------------------------------------------------------


def alone(problems: Sequence[Problem], num_rounds: int) -> list[dict[str, Any]]:
    """One problem after the other."""
    return by_drafts(problems, num_rounds, "alone", 1)


def batch(problems: Sequence[Problem], num_rounds: int) -> list[dict[str, Any]]:
    """All problems at once."""
    return by_drafts(problems, num_rounds, "batch", len(problems))


def by_drafts(
    problems: Sequence[Problem], num_rounds: int, part: str, at_once: int
) -> list[dict[str, Any]]:
    draft = DraftTargetDecodingConfig(max_draft_len=16, speculative_model=drafter_dir())
    rows = list[dict[str, Any]]()
    for name, config in (("none", None), ("draft model", draft)):
        llm = LLM(max_batch_size=64, speculative_config=config)
        timed = {
            "LLM.generate": partial(generate, llm, problems, at_once),
            "plain": partial(solve, llm, problems, at_once, "plain", {}),
            "dynasor": partial(solve, llm, problems, at_once, "dynasor", PROBING),
        }
        measured = measure(timed, num_rounds)
        llm.shutdown()
        rows += table(f"{part}, drafts: {name}", measured, len(problems), part=part, drafts=name)
    return rows


def generate(
    llm: LLM, problems: Sequence[Problem], at_once: int, params: SamplingParams = GREEDY
) -> Usage:
    prompts = [user_prompt(llm, problem.question) for problem in problems]
    groups = [prompts[at : at + at_once] for at in range(0, len(prompts), at_once)]
    outputs = [output for group in groups for output in llm.generate(group, params)]
    return sum((output.usage for output in outputs), Usage())


def solve(
    llm: LLM, problems: Sequence[Problem], at_once: int, method: str, settings: dict[str, Any]
) -> Usage:
    """Solve the problems by a method; the tokens that the engine computes."""
    used = recipe(method, max_tokens=GREEDY.max_tokens, temperature=TEMPERATURE, settings=settings)
    prompts = [user_prompt(llm, problem.question) for problem in problems]
    usage = Usage()
    with thinking_with(llm, used.controller) as thinking:
        for at in range(0, len(prompts), at_once):
            results = [
                thinking.generate_async(prompt, sampling_params={**used.sampling_params, "seed": 1})
                for prompt in prompts[at : at + at_once]
            ]
            usage += sum((result.result().usage for result in results), Usage())
    return usage


@contextmanager
def thinking_with(llm: LLM, controller: Controller) -> Iterator[ScaffoldingLlm]:
    worker = EngineWorker(llm)
    try:
        with ScaffoldingLlm(controller, worker) as thinking:
            yield thinking
    finally:
        worker.shutdown()


# ---- samples -------------------------------------------------------------------------------------

Method = tuple[str, dict[str, Any]]
"""Its name, and its settings."""
VOTES: dict[str, Method] = {
    "vote of 16": ("majority_vote@16", {"early_stop": False}),
    "dynasor, vote of 16": ("dynasor+majority_vote@16", {**PROBING, "early_stop": False}),
}
SEARCHES: dict[str, Method] = {
    "beam search": ("beam_search", {}),
    "particles": ("particle_filtering", {}),
}


def vote(problems: Sequence[Problem], num_rounds: int) -> list[dict[str, Any]]:
    """One problem after the other."""
    return by_samples(problems, num_rounds, "vote", 1)


def searches(problems: Sequence[Problem], num_rounds: int) -> list[dict[str, Any]]:
    """One problem after the other, and all at once."""
    sizes = (1, len(problems))
    return [row for size in sizes for row in by_samples(problems, num_rounds, "searches", size)]


def by_samples(
    problems: Sequence[Problem], num_rounds: int, part: str, at_once: int
) -> list[dict[str, Any]]:
    """Methods of a part, each after 16 samples of ``LLM``."""
    llm, rows = LLM(max_batch_size=64), list[dict[str, Any]]()
    for name, (method, settings) in {"vote": VOTES, "searches": SEARCHES}[part].items():
        by_method = partial(solve, llm, problems, at_once, method, settings)
        num_tokens = by_method().decoded // (16 * len(problems))
        is_vote = method.startswith("majority_vote")
        params = {"max_tokens": GREEDY.max_tokens if is_vote else num_tokens}
        by_llm = partial(sample, llm, problems, at_once, {**params, "ignore_eos": not is_vote})
        measured = measure({"LLM, 16 samples": by_llm, name: by_method}, num_rounds)
        rows += table(
            f"{name}, {at_once} at once", measured, len(problems), part=part, at_once=at_once
        )
    llm.shutdown()
    return rows


def sample(llm: LLM, problems: Sequence[Problem], at_once: int, settings: dict[str, Any]) -> Usage:
    params = SamplingParams(n=16, temperature=TEMPERATURE, seed=1, **settings)
    return generate(llm, problems, at_once, params)


# ---- clients -------------------------------------------------------------------------------------


def clients(problems: Sequence[Problem], num_rounds: int) -> list[dict[str, Any]]:
    """Streams of fixed length, each of its own prompt."""
    llm = LLM(max_batch_size=64)
    prompts = [user_prompt(llm, problem.question) for problem in shipped()[:NUM_STREAMS]]
    params = SamplingParams(temperature=TEMPERATURE, seed=1, ignore_eos=True, max_tokens=NUM_TOKENS)

    def of_batch() -> Usage:
        return sum((output.usage for output in llm.generate(prompts, params)), Usage())

    def of_async() -> Usage:
        engine = AsyncLLM.over(llm)
        try:
            return asyncio.run(gather(engine, prompts, params))
        finally:
            engine.shutdown()

    with served() as port:
        measured = measure(
            {
                "LLM": of_batch,
                "AsyncLLM": of_async,
                "serve": lambda: post_all(port, prompts, False),
                "serve, streams": lambda: post_all(port, prompts, True),
            },
            num_rounds,
        )
    llm.shutdown()
    return table(f"{NUM_STREAMS} sampled streams", measured, 1, part="clients")


async def gather(engine: AsyncLLM, prompts: Sequence[Any], params: SamplingParams) -> Usage:
    outputs = await asyncio.gather(*[engine.generate(prompt, params) for prompt in prompts])
    return sum((output.usage for output in outputs), Usage())


@contextmanager
def served() -> Iterator[int]:
    """A server of its own process; its port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "forethought", "serve", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while not is_up(port):
                time.sleep(0.1)
            yield port
        finally:
            server.terminate()


def is_up(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port)
    try:
        connection.request("GET", "/v1/models")
        return connection.getresponse().status == HTTPStatus.OK
    except OSError:
        return False
    finally:
        connection.close()


def post_all(port: int, prompts: Sequence[Any], streams: bool) -> Usage:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return sum(pool.map(lambda prompt: post(port, prompt, streams), prompts), Usage())


def post(port: int, prompt: Any, streams: bool) -> Usage:
    """The tokens of a completion, of which all are read; those of its prompt are not told."""
    body = {"model": "reasoner", "prompt": prompt, "temperature": TEMPERATURE}
    body |= {"seed": 1, "ignore_eos": True, "max_tokens": NUM_TOKENS, "stream": streams}
    connection = HTTPConnection("127.0.0.1", port)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read()
        assert response.status == HTTPStatus.OK, text
    finally:
        connection.close()
    num_tokens = NUM_TOKENS if streams else json.loads(text)["usage"]["completion_tokens"]
    return Usage(decoded=num_tokens)


PARTS = {
    "alone": alone,
    "batch": batch,
    "vote": vote,
    "searches": searches,
    "clients": clients,
}


# ---- measuring -----------------------------------------------------------------------------------


def measure(timed: dict[str, Timed], num_rounds: int) -> dict[str, tuple[float, Usage]]:
    """Median seconds of each, and its tokens; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    usages = dict[str, Usage]()
    for _ in range(num_rounds + 1):
        for name, run in timed.items():
            began = time.perf_counter()
            usages[name] = run()
            seconds[name].append(time.perf_counter() - began)
    return {name: (statistics.median(seconds[name][1:]), usages[name]) for name in timed}


def table(
    title: str, measured: dict[str, tuple[float, Usage]], num_problems: int, **fields: Any
) -> list[dict[str, Any]]:
    print(f"\n{title}")
    print(f"{'':<24}{'ms each':>10}{'decoded':>10}{'prefilled':>10}{'times':>8}{'rate':>8}")
    rows = list[dict[str, Any]]()
    (first, usage), *_ = measured.values()
    first_rate = (usage.decoded + usage.prefilled) / first
    for name, (seconds, usage) in measured.items():
        each, times = seconds / num_problems * 1e3, first / seconds
        rate = (usage.decoded + usage.prefilled) / seconds / first_rate
        counts = f"{usage.decoded:>10}{usage.prefilled:>10}"
        print(f"{name:<24}{each:>10.1f}{counts}{times:>8.2f}{rate:>8.2f}")
        row = {"name": name, "ms_each": round(each, 2), "tokens": usage.decoded}
        row |= {"prefilled": usage.prefilled, "tokens_per_s": round(usage.decoded / seconds)}
        rows.append({**fields, **row, "times": round(times, 3), "rate": round(rate, 3)})
    return rows


if __name__ == "__main__":
    main()
