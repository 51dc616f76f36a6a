"""What a step costs outside the network: planning, packing, drawing and bookkeeping.

    python -m benchmarks.step_overhead --model DIR --batch 16 --tokens 100

Each law is measured without drafts and with drafts of four tokens per sequence, all of them wrong,
so that every step verifies sixteen times five tokens and keeps one. What drafts add is the median
of the differences within a round. Prints a table and, last, one JSON line. The shares of network
and drafter are measured by the engine itself.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from benchmarks.report import print_report

from forethought import LLM, Drafter, SamplingParams, SpeculationParams, UserProvidedDecodingConfig

NODES = 4
LAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
}


class Wrong(Drafter):
    """Proposes what is hardly ever said."""

    def prepare_draft_tokens(self, scheduled_requests: Any, resource_manager: Any = None) -> None:
        for request in scheduled_requests.generation_requests:
            request.py_draft_tokens = [3] * NODES


def measure(
    llm: LLM, distribution: dict[str, Any], drafts: bool, batch: int, tokens: int
) -> tuple[float, float]:
    """Milliseconds per step inside the network, and outside of network and drafter."""
    wish = SpeculationParams(enabled=drafts)
    params = SamplingParams(
        max_tokens=tokens, ignore_eos=True, seed=0, speculation=wish, **distribution
    )
    prompts = [[5 + row] * 32 for row in range(batch)]
    before = llm.stats
    llm.generate(prompts, params)
    after = llm.stats
    steps = after.steps - before.steps
    inside = (after.forward_seconds - before.forward_seconds) / steps
    drafting = (after.draft_seconds - before.draft_seconds) / steps
    whole = (after.step_seconds - before.step_seconds) / steps
    return inside * 1e3, (whole - inside - drafting) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="local directory; the embedded reasoner by default")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    config = UserProvidedDecodingConfig(max_draft_len=NODES, drafter=Wrong())
    llm = LLM(args.model, max_batch_size=args.batch, speculative_config=config)
    cases = [(name, drafts) for name in LAWS for drafts in (False, True)]
    rows = []
    rounds = [
        {case: measure(llm, LAWS[case[0]], case[1], args.batch, args.tokens) for case in cases}
        for _ in range(args.rounds + 1)
    ][1:]  # the first one warms up
    heads = ("drafted", "network ms", "outside ms", "added ms")
    print(f"{'law':<10}" + "".join(f"{head:>12}" for head in heads), end="   ")
    print(f"median of {args.rounds} rounds")
    for case in cases:
        inside, outside = (statistics.median(each[case][i] for each in rounds) for i in (0, 1))
        added = statistics.median(each[case][1] - each[case[0], False][1] for each in rounds)
        drafted = NODES * case[1]
        print(f"{case[0]:<10}{drafted:>12}{inside:>12.2f}{outside:>12.2f}{added:>12.2f}")
        rows.append(
            {
                "law": case[0],
                "drafted": drafted,
                "network_ms": round(inside, 3),
                "outside_ms": round(outside, 3),
                "added_ms": round(added, 3),
            }
        )
    print_report("step_overhead", rows, batch=args.batch, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
