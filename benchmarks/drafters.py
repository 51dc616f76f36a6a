"""Every drafter on the embedded reasoner, side by side, against plain decoding.

    python -m benchmarks.drafters
    python -m benchmarks.drafters --only mtp eagle3 --rounds 9 --threads 1
    python -m benchmarks.drafters --batch 16 --prompts 16 --rounds 3

The rows with fixed lengths have the settings of ``DRAFTERS``; those with ``default`` are what
``--speculative NAME`` makes of the drafter, whose lengths goodput control chooses.

Greedy, bf16, one engine each, all loaded at once, ``--batch`` requests at a time. In every round
plain decoding and each drafter answer the same held-out problems, beginning with another one each
time; the prompts of a round are new. Figures are medians over the rounds; a ratio is taken within
its round. Tokens per step, of all requests of a batch together, include those that follow the
accepted drafts. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch
from benchmarks.report import print_report

from forethought import LLM, SamplingParams
from forethought.assets import drafter_dir, reasoner_dir
from forethought.config import drafter_table
from forethought.config.drafters import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    PearlDecodingConfig,
    ReDrafterDecodingConfig,
    SuffixDecodingConfig,
)
from forethought.config.medusa import MedusaDecodingConfig
from forethought.config.speculation import DecodingBaseConfig, named_config
from forethought.evaluation.problems import shipped

HEADS = reasoner_dir().parent
PLAIN = "plain"
DRAFTERS: dict[str, DecodingBaseConfig] = {
    "ngram": NGramDecodingConfig(max_draft_len=8, max_matching_ngram_size=3, is_use_oldest=False),
    "suffix": SuffixDecodingConfig(max_draft_len=8),
    "draft_target": DraftTargetDecodingConfig(max_draft_len=16, speculative_model=drafter_dir()),
    "pearl": PearlDecodingConfig(max_draft_len=8, speculative_model=drafter_dir(), overlap=False),
    "eagle3": EagleDecodingConfig(max_draft_len=8, speculative_model=HEADS / "eagle3"),
    "eagle3, tree": EagleDecodingConfig(
        max_draft_len=5,
        speculative_model=HEADS / "eagle3",
        use_dynamic_tree=True,
        dynamic_tree_max_topK=4,
        max_total_draft_tokens=15,
    ),
    "mtp": MTPDecodingConfig(max_draft_len=10, speculative_model=HEADS / "mtp"),
    "medusa": MedusaDecodingConfig(
        speculative_model=HEADS / "medusa", tree="most_probable", max_total_draft_tokens=10
    ),
    "medusa, static": MedusaDecodingConfig(speculative_model=HEADS / "medusa"),
    "redrafter": ReDrafterDecodingConfig(
        speculative_model=HEADS / "redrafter",
        num_beams=5,
        draft_len_per_beam=4,
        max_total_draft_tokens=12,
    ),
}


def with_defaults(names: list[str]) -> dict[str, DecodingBaseConfig]:
    """The drafters of these names, each with its default beside it."""
    configs: dict[str, DecodingBaseConfig] = {}
    for name in names:
        configs[name] = DRAFTERS[name]
        if name in drafter_table.options():
            configs[f"{name}, default"] = named_config(name)
    return configs


class Contestant:
    """An engine, and what its rounds took.

    Args:
        config: its drafter; None: plain decoding.
        batch_size: requests at a time.
    """

    def __init__(self, config: DecodingBaseConfig | None, batch_size: int = 1) -> None:
        self.llm = LLM(max_batch_size=batch_size, speculative_config=config)
        self._batch_size = batch_size
        self.speeds: list[float] = []
        self.outputs: list[list[int]] = []
        self.tokens = self.steps = 0

    def answer(self, prompts: list[list[int]], counts: bool) -> None:
        """One round; ``counts`` is False to warm up."""
        params = SamplingParams(temperature=0.0, max_tokens=300)
        began, before = time.perf_counter(), self.llm.stats
        outputs: list[list[int]] = []
        for start in range(0, len(prompts), self._batch_size):
            batch = self.llm.generate(prompts[start : start + self._batch_size], params)
            outputs += [request_output.outputs[0].token_ids for request_output in batch]
        seconds, after = time.perf_counter() - began, self.llm.stats
        if counts:
            self.outputs += outputs
            self.tokens += sum(map(len, outputs))
            self.steps += after.steps - before.steps
            self.speeds.append(sum(map(len, outputs)) / seconds)

    def row(self, name: str, plain: Contestant) -> dict[str, Any]:
        """One row of the table."""
        ratios = [a / b for a, b in zip(self.speeds, plain.speeds, strict=True)]
        same = sum(a == b for a, b in zip(self.outputs, plain.outputs, strict=True))
        return {
            "drafter": name,
            "tokens_per_second": round(statistics.median(self.speeds), 1),
            "ratio": round(statistics.median(ratios), 2),
            "lowest": round(min(ratios), 2),
            "highest": round(max(ratios), 2),
            "tokens_per_step": round(self.tokens / self.steps, 2),
            "identical": round(same / len(self.outputs), 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=6, help="in a round")
    parser.add_argument("--batch", type=int, default=1, help="requests at a time")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    questions = [problem.question for problem in shipped()]
    random.Random(0).shuffle(questions)
    if (args.rounds + 1) * args.prompts > len(questions):
        parser.error(f"there are {len(questions)} problems, too few for new ones in every round")
    contestants = {PLAIN: Contestant(None, args.batch)}
    drafters = with_defaults(args.only)
    contestants |= {name: Contestant(config, args.batch) for name, config in drafters.items()}
    plain = contestants[PLAIN]
    for number in range(args.rounds + 1):
        start = number * args.prompts
        chosen = questions[start : start + args.prompts]
        prompts = [
            plain.llm.chat_prompt([{"role": "user", "content": question}]) for question in chosen
        ]
        order = list(contestants.values())
        first = number % len(order)
        for contestant in order[first:] + order[:first]:
            contestant.answer(prompts, counts=number > 0)
    rows = [contestant.row(name, plain) for name, contestant in contestants.items()]
    print("".join(f"{name:>21}" for name in rows[0]))
    for row in rows:
        print("".join(f"{value:>21}" for value in row.values()))
    settings = {"threads": args.threads, "rounds": args.rounds, "batch": args.batch}
    print_report("drafters", rows, **settings)


if __name__ == "__main__":
    main()
