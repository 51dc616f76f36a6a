"""Decoding after long contexts on a CPU, by the dtype of keys and values.

    python -m benchmarks.long_context --contexts 4096 8192 --rounds 5

The model has SmolLM2-135M's shape and random weights, or is ``--model``. Prompts are stored before;
dtypes are run in turn, and ratios to ``auto`` are medians of those within a round. Prints a table
and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.random_models import save_random_model
from benchmarks.report import print_report

from forethought import LLM, SamplingParams

DTYPES = ("auto", "bfloat16", "int8")


def seconds(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    """Of decoding, with the prefill of what is not stored."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - began


def measure(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    """Tokens per second of a batch, from its second token on."""
    prefill = seconds(llm, prompts, 1)
    decoding = seconds(llm, prompts, num_tokens) - prefill
    return len(prompts) * (num_tokens - 1) / decoding


def compare(
    llms: dict[str, LLM], prompts: list[list[int]], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row per dtype."""
    for llm in llms.values():
        seconds(llm, prompts, args.tokens)  # stores the prompts
    rounds = [
        {name: measure(llm, prompts, args.tokens) for name, llm in llms.items()}
        for _ in range(args.rounds)
    ]
    return [
        {
            "context": len(prompts[0]),
            "batch": len(prompts),
            "kv_dtype": name,
            "tokens_per_s": round(statistics.median(rates[name] for rates in rounds), 1),
            "of_auto": round(statistics.median(r[name] / r["auto"] for r in rounds), 3),
        }
        for name in llms
    ]


def load(directory: Path, name: str, args: argparse.Namespace) -> LLM:
    """The model, with a cache for the largest batch."""
    num_tokens = max(args.batch) * (max(args.contexts) + args.tokens + 64)
    cache = {"dtype": name, "max_tokens": num_tokens}
    return LLM(directory, device="cpu", max_batch_size=max(args.batch), kv_cache_config=cache)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="local directory")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=33)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rng, rows = random.Random(0), list[dict[str, Any]]()
    longest = max(args.contexts)
    texts = [[rng.randrange(20, 10_000) for _ in range(longest)] for _ in range(max(args.batch))]
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or save_random_model("135m", Path(scratch), "bfloat16")
        llms = {name: load(model, name, args) for name in DTYPES}
    print(f"{'context':>8}{'batch':>6} {'keys and values':<16}{'tokens/s':>9}{'of auto':>9}")
    for context in args.contexts:
        for batch in args.batch:
            for row in compare(llms, [text[:context] for text in texts[:batch]], args):
                print(
                    f"{row['context']:>8}{row['batch']:>6} {row['kv_dtype']:<16}"
                    f"{row['tokens_per_s']:>9}{row['of_auto']:>9}",
                    flush=True,
                )
                rows.append(row)
    print_report("long_context", rows, tokens=args.tokens, rounds=args.rounds)


if __name__ == "__main__":
    main()
