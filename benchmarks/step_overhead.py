"""What a step costs outside the network: planning, packing, drawing and bookkeeping.

    python -m benchmarks.step_overhead --model DIR --batch 16 --tokens 100

Prints a table and, last, one JSON line. The network's share is measured by the engine itself.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from typing import Any

from forethought import LLM, SamplingParams

LAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
}


def measure(llm: LLM, law: dict[str, Any], batch: int, tokens: int) -> tuple[float, float]:
    """Milliseconds per step inside and outside the network."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=0, **law)
    prompts = [[5 + row] * 32 for row in range(batch)]
    before = llm.stats
    llm.generate(prompts, params)
    after = llm.stats
    steps = after.steps - before.steps
    inside = (after.forward_seconds - before.forward_seconds) / steps
    whole = (after.step_seconds - before.step_seconds) / steps
    return inside * 1e3, (whole - inside) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="local directory; the embedded reasoner by default")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    llm = LLM(args.model, max_batch_size=args.batch)
    rows = []
    rounds = [
        {name: measure(llm, law, args.batch, args.tokens) for name, law in LAWS.items()}
        for _ in range(args.rounds + 1)
    ][1:]  # the first one warms up
    print(f"{'law':<10}{'network ms':>12}{'outside ms':>12}   median of {args.rounds} rounds")
    for name in LAWS:
        inside, outside = (statistics.median(each[name][i] for each in rounds) for i in (0, 1))
        print(f"{name:<10}{inside:>12.2f}{outside:>12.2f}")
        rows.append({"law": name, "network_ms": round(inside, 3), "outside_ms": round(outside, 3)})
    print(
        json.dumps(
            {
                "benchmark": "step_overhead",
                "batch": args.batch,
                "machine": platform.machine(),
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
