"""What a step costs outside the network: planning, packing, sampling and bookkeeping.

    python -m benchmarks.step_overhead --model DIR --batch 16 --tokens 100

Each way of sampling is measured without drafts and with drafts of four tokens per sequence, all of
them wrong, so that every step verifies sixteen times five tokens and keeps one. What drafts add is
the median of the differences within a round. The shares of network and drafter are measured by the
engine itself. Then it counts the project's files that one decode step of the embedded reasoner
enters: as many as a reader has to open to follow the step. Prints tables and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from benchmarks.report import print_report

import forethought
from forethought import (
    LLM,
    Drafter,
    EagleDecodingConfig,
    NGramDecodingConfig,
    SamplingParams,
    SpeculationParams,
    UserProvidedDecodingConfig,
)
from forethought.assets import heads_dir, reasoner_dir
from forethought.config.engine import LlmArgs
from forethought.engine import resolve
from forethought.engine.engine import Engine

NUM_NODES = 4
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
}
PACKAGE = f"{Path(forethought.__file__).parent}/"
WARM_UP, COUNTED = 8, 8
"""Steps."""


class Wrong(Drafter):
    """Proposes a token that is hardly ever sampled."""

    def prepare_draft_tokens(self, scheduled_requests: Any, resource_manager: Any = None) -> None:
        for request in scheduled_requests.generation_requests:
            request.py_draft_tokens = [3] * NUM_NODES


def measure(
    llm: LLM, sampling: dict[str, Any], drafts: bool, batch: int, tokens: int
) -> tuple[float, float]:
    """Milliseconds per step inside the network, and outside of network and drafter."""
    speculation = SpeculationParams(enabled=drafts)
    params = SamplingParams(
        max_tokens=tokens, ignore_eos=True, seed=0, speculation=speculation, **sampling
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


def count_files() -> dict[str, int]:
    """Files of the project that one decode step enters after warm-up, by kind of drafting."""
    configs = {
        "plain": [],
        "n-gram": [NGramDecodingConfig(max_draft_len=NUM_NODES)],
        "EAGLE-3": [
            EagleDecodingConfig(max_draft_len=NUM_NODES, speculative_model=heads_dir("eagle3"))
        ],
    }
    params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0)
    num_files = {}
    for kind, config in configs.items():
        engine = resolve.build(LlmArgs.from_dict({"speculative_config": config}), reasoner_dir())
        engine.resume(engine.open([5, 6, 7, 8] * 8), params)
        for _ in range(WARM_UP):
            engine.step()
        num_files[kind] = max(len(files_entered(engine)) for _ in range(COUNTED))
        engine.shutdown()
    return num_files


def files_entered(engine: Engine) -> set[str]:
    """The project's files with a function that one step of the engine calls."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="local directory; the embedded reasoner by default")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    config = UserProvidedDecodingConfig(max_draft_len=NUM_NODES, drafter=Wrong())
    llm = LLM(args.model, max_batch_size=args.batch, speculative_config=config)
    cases = [(name, drafts) for name in SAMPLING for drafts in (False, True)]
    rows = []
    rounds = [
        {case: measure(llm, SAMPLING[case[0]], case[1], args.batch, args.tokens) for case in cases}
        for _ in range(args.rounds + 1)
    ][1:]  # the first one warms up
    heads = ("drafted", "network ms", "outside ms", "added ms")
    print(f"{'sampling':<10}" + "".join(f"{head:>12}" for head in heads), end="   ")
    print(f"median of {args.rounds} rounds")
    for case in cases:
        inside, outside = (
            statistics.median(by_case[case][i] for by_case in rounds) for i in (0, 1)
        )
        added = statistics.median(
            by_case[case][1] - by_case[case[0], False][1] for by_case in rounds
        )
        drafted = NUM_NODES * case[1]
        print(f"{case[0]:<10}{drafted:>12}{inside:>12.2f}{outside:>12.2f}{added:>12.2f}")
        rows.append(
            {
                "sampling": case[0],
                "drafted": drafted,
                "network_ms": round(inside, 3),
                "outside_ms": round(outside, 3),
                "added_ms": round(added, 3),
            }
        )
    files = count_files()
    print(f"\n{'drafting':<10}{'files':>12}   entered in a decode step")
    for kind, number in files.items():
        print(f"{kind:<10}{number:>12}")
    threads = torch.get_num_threads()
    print_report("step_overhead", rows, batch=args.batch, threads=threads, files_entered=files)


if __name__ == "__main__":
    main()
