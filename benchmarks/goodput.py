"""Goodput control under load: never much slower than plain decoding, at any batch size.

    python -m benchmarks.goodput
    python -m benchmarks.goodput --batches 16 64 --drafter draft_target --rounds 5

For every batch size two engines, one that decodes plainly and one that drafts under goodput
control, answer the same held-out problems, interleaved. Each round has several times as many
prompts as fit into the batch, so that it stays full until near the end, as under a server's load.
Where there are not enough problems they repeat under another cache salt, so that no drafter has
their earlier answers. The first round warms up: in it the control measures the duration of a step.
Figures are medians over the rounds; drafts per step those of all. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence

import torch
from benchmarks.report import print_report

from forethought import (
    LLM,
    DraftTargetDecodingConfig,
    NGramDecodingConfig,
    SamplingParams,
    SuffixDecodingConfig,
)
from forethought.assets import drafter_dir
from forethought.config.speculation import DecodingBaseConfig
from forethought.evaluation.problems import shipped

DRAFTERS: dict[str, DecodingBaseConfig] = {
    "ngram": NGramDecodingConfig(
        max_draft_len=8,
        max_matching_ngram_size=3,
        is_use_oldest=False,
        length_control="goodput",
    ),
    "suffix": SuffixDecodingConfig(max_draft_len=8, length_control="goodput"),
    "draft_target": DraftTargetDecodingConfig(
        max_draft_len=8, speculative_model=drafter_dir(), length_control="goodput"
    ),
}


def asked(questions: Sequence[str], number: int, count: int) -> list[tuple[str, str]]:
    """The questions of a round, each with a salt that it has not had before."""
    indices = range(number * count, (number + 1) * count)
    return [(questions[n % len(questions)], f"lap {n // len(questions)}") for n in indices]


def speed(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> float:
    """Tokens per second over all prompts."""
    began = time.perf_counter()
    results = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    return sum(len(result.outputs[0].token_ids) for result in results) / seconds


def measure(
    batch: int, config: DecodingBaseConfig, args: argparse.Namespace
) -> dict[str, float | int]:
    """One batch size."""
    plain = LLM(max_batch_size=batch)
    drafting = LLM(max_batch_size=batch, speculative_config=config)
    questions = [problem.question for problem in shipped()]
    random.Random(0).shuffle(questions)
    speeds, ratios, count = list[float](), list[float](), max(8, args.fills * batch)
    for number in range(args.rounds + 1):
        chosen = asked(questions, number, count)
        prompts = [
            plain.chat_prompt([{"role": "user", "content": question}]) for question, _ in chosen
        ]
        params = [
            SamplingParams(temperature=args.temperature, seed=0, max_tokens=300, cache_salt=salt)
            for _, salt in chosen
        ]
        engines = [plain, drafting] if number % 2 else [drafting, plain]
        speed_by_llm = {llm: speed(llm, prompts, params) for llm in engines}
        if number:
            speeds.append(speed_by_llm[drafting])
            ratios.append(speed_by_llm[drafting] / speed_by_llm[plain])
    stats = drafting.stats
    for llm in (plain, drafting):
        llm.shutdown()
    return {
        "batch": batch,
        "tokens_per_second": round(statistics.median(speeds), 1),
        "ratio": round(statistics.median(ratios), 3),
        "lowest": round(min(ratios), 3),
        "highest": round(max(ratios), 3),
        "drafted_per_step": round(stats.drafted / stats.steps, 2),
        "accepted_per_step": round(stats.accepted / stats.steps, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--drafter", choices=DRAFTERS, default="ngram")
    parser.add_argument("--fills", type=int, default=4, help="prompts of a round per row")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for batch in args.batches:
        row = measure(batch, DRAFTERS[args.drafter], args)
        if not rows:
            print("".join(f"{name:>19}" for name in row))
        print("".join(f"{value:>19}" for value in row.values()), flush=True)
        rows.append(row)
    print_report(
        "goodput",
        rows,
        drafter=args.drafter,
        temperature=args.temperature,
        threads=args.threads,
        rounds=args.rounds,
    )


if __name__ == "__main__":
    main()
