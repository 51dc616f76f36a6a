"""Every drafter with its defaults against plain decoding: never much slower, at any batch size.

    python -m benchmarks.default_drafters
    python -m benchmarks.default_drafters --only eagle3 mtp --batch 16 --rounds 9

A default is what ``--speculative NAME`` makes of a drafter for the embedded reasoner: goodput
control chooses the lengths, 0 included. Greedy, one engine each, all loaded at once. In every round
plain decoding and each drafter answer the same held-out problems, ``--batch`` at a time, beginning
with another one each time. A rate is the tokens of the answers over the seconds of
``LLM.generate``, prefills included, as the prompts are new to every engine: problems that come
again have another cache salt. The cache is small, and each engine has written all of it before, as
the system gives memory when it is first used. The first round of a batch size warms up; figures are
medians over the others, and ratios are taken within a round. Prints a table and, last, one JSON
line.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from benchmarks.report import print_report

from forethought import LLM, KvCacheConfig, SamplingParams
from forethought.config import drafter_table
from forethought.config.speculation import named_config
from forethought.evaluation.problems import shipped

PLAIN = "plain"
PROMPTS = 24
"""Of a round, at least: in shorter ones a pause of the machine decides."""
CACHE = 32_768
"""Tokens."""


@dataclass(slots=True)
class Contestant:
    """An engine and its rounds of a batch size, or of a task."""

    llm: LLM
    rates: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_steps: int = 0
    num_drafted: int = 0

    def answer(self, batches: list[list[list[int]]], params: SamplingParams) -> None:
        """Answer the prompts of a round, batch after batch."""
        began, before = time.perf_counter(), self.llm.stats
        outputs = [output for batch in batches for output in self.llm.generate(batch, params)]
        seconds, after = time.perf_counter() - began, self.llm.stats
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        self.rates.append(num_tokens / seconds)
        self.num_tokens += num_tokens
        self.num_steps += after.steps - before.steps
        self.num_drafted += after.drafted - before.drafted

    def row(self, plain: Contestant) -> dict[str, Any]:
        """Figures of the rounds, without the first one."""
        pairs = zip(self.rates[1:], plain.rates[1:], strict=True)
        ratios = [rate / of_plain for rate, of_plain in pairs]
        return {
            "tokens_per_second": round(statistics.median(self.rates[1:]), 1),
            "ratio": round(statistics.median(ratios), 3),
            "lowest": round(min(ratios), 3),
            "highest": round(max(ratios), 3),
            "drafted_per_step": round(self.num_drafted / self.num_steps, 2),
            "tokens_per_step": round(self.num_tokens / self.num_steps, 2),
        }


def compare(
    llms: dict[str, LLM], batch_size: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """The rows of a batch size."""
    contestants = {name: Contestant(llm) for name, llm in llms.items()}
    questions = [problem.question for problem in shipped()]
    random.Random(0).shuffle(questions)
    count = batch_size * max(1, PROMPTS // batch_size)
    for number in range(args.rounds + 1):
        indices = range(number * count, (number + 1) * count)
        chats = [[{"role": "user", "content": questions[n % len(questions)]}] for n in indices]
        prompts = list(map(llms[PLAIN].chat_prompt, chats))
        batches = [prompts[at : at + batch_size] for at in range(0, count, batch_size)]
        salt = f"batch {batch_size}, round {number}"
        params = SamplingParams(temperature=0.0, max_tokens=args.tokens, cache_salt=salt)
        order = list(contestants.values())
        first = number % len(order)
        for contestant in order[first:] + order[:first]:
            contestant.answer(batches, params)
    return [
        {"batch": batch_size, "drafter": name, **contestant.row(contestants[PLAIN])}
        for name, contestant in contestants.items()
    ]


def fill_cache(llm: LLM) -> None:
    """Write every page of the cache, and more."""
    length = llm.max_length // 2
    count = 1 + CACHE // length
    params = [
        SamplingParams(max_tokens=length, ignore_eos=True, cache_salt=str(index), seed=index)
        for index in range(count)
    ]
    prompt = llm.chat_prompt([{"role": "user", "content": "Count."}])
    llm.generate([prompt] * count, params)


def main() -> None:
    names = [name for name in drafter_table.options() if name != "auto"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=int, default=300, help="of an answer, at most")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    settings = {
        "max_batch_size": max(args.batch),
        "kv_cache_config": KvCacheConfig(max_tokens=CACHE),
    }
    llms = {PLAIN: LLM(**settings)}
    for name in args.only:
        llms[name] = LLM(**settings, speculative_config=named_config(name))
    for llm in llms.values():
        fill_cache(llm)
    rows = list[dict[str, Any]]()
    for batch_size in args.batch:
        rows += compare(llms, batch_size, args)
        if batch_size == args.batch[0]:
            print("".join(f"{name:>18}" for name in rows[0]))
        for row in rows[-len(llms) :]:
            print("".join(f"{value:>18}" for value in row.values()), flush=True)
    print_report(
        "default_drafters", rows, tokens=args.tokens, threads=args.threads, rounds=args.rounds
    )


if __name__ == "__main__":
    main()
