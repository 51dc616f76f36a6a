"""What sampling costs beside the network: tokens per second of sampled rows against greedy ones.

    python -m benchmarks.sampling --rounds 5

The kinds of a batch size are run in turn; ratios to greedy decoding are medians of those within a
round. The model is the embedded reasoner, or ``--model``. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from benchmarks.report import print_report

from forethought import LLM, SamplingParams

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
    "top-k, min-p": {"temperature": 0.8, "top_k": 40, "min_p": 0.02},
    "penalties": {"temperature": 0.8, "presence_penalty": 0.2, "repetition_penalty": 1.1},
    "logprobs": {"temperature": 0.8, "logprobs": 0},
    "n samples": {"temperature": 0.8},
}


def measure(llm: LLM, kind: str, batch_size: int, num_tokens: int) -> float:
    """Tokens per second of a batch, prefill included."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=1, **KINDS[kind])
    prompts = [[5 + row % 7] * 32 for row in range(batch_size)]
    if kind == "n samples":
        prompts, params = prompts[:1], params.replace(n=batch_size)
    began = time.perf_counter()
    llm.generate(prompts, params)
    return batch_size * num_tokens / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="local directory; the embedded reasoner by default")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    llm, rows = LLM(args.model, max_batch_size=max(args.batch)), list[dict[str, Any]]()
    print(f"{'batch':>5} {'kind':<14}{'tokens/s':>10}{'of greedy':>11}")
    for batch_size in args.batch:
        rounds = [
            {kind: measure(llm, kind, batch_size, args.tokens) for kind in KINDS}
            for _ in range(args.rounds + 1)
        ][1:]
        for kind in KINDS:
            rate = statistics.median(by_kind[kind] for by_kind in rounds)
            ratio = statistics.median(by_kind[kind] / by_kind["greedy"] for by_kind in rounds)
            print(f"{batch_size:>5} {kind:<14}{rate:>10.0f}{ratio:>11.2f}")
            row = {"batch": batch_size, "kind": kind, "tokens_per_s": round(rate)}
            rows.append({**row, "of_greedy": round(ratio, 3)})
    print_report("sampling", rows, tokens=args.tokens, rounds=args.rounds)


if __name__ == "__main__":
    main()
