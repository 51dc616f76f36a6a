"""End to end against transformers: the same weights, the same prompts, interleaved.

    python -m benchmarks.generate_vs_transformers
    python -m benchmarks.generate_vs_transformers --threads 1 --clock cpu --case batch16

Each case generates ``--new`` tokens greedily after prompts of ``--prompt`` random tokens. In every
round each contestant generates once, so that other load of the machine falls on all of them. The
ratio is the median over the rounds of (tokens per second here) / (tokens per second there). Prints
a table and, last, one JSON line.

The large model has random weights and the shape of a Qwen3 of about 150 M parameters; the small one
is the embedded reasoner.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmarks.report import device, dtype, print_report
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from forethought import LLM, SamplingParams
from forethought.assets import reasoner_dir

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], list[list[int]]]  # prompts, new tokens -> the new tokens


# On a loaded machine, compare processor seconds on one thread.
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Case:
    """One row of the table: a model, a batch size and what it is compared with.

    Attributes:
        goals: contestant -> ratio to reach.
    """

    name: str
    model: str
    batch: int
    goals: dict[str, float]


CASES = [
    Case("batch1", "random 150M", 1, {"generate": 1.5}),
    Case("batch16", "random 150M", 16, {"generate": 1.35, "generate_batch": 2.0}),
    Case("reasoner", "reasoner", 1, {"generate": 2.0}),
]


def save_random_model(directory: Path) -> None:
    """A Qwen3 of 148 M parameters in bf16 with random weights, and a tokenizer of made-up words."""
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=18,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    words = {f"w{number}": number for number in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2").save_pretrained(directory)


def ours(llm: LLM) -> Generate:
    """Through the public door, streaming and text included."""

    def generate(prompts: Prompts, new_tokens: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        return [result.outputs[0].token_ids for result in llm.generate(prompts, params)]

    return generate


def theirs(module: PreTrainedModel) -> Generate:
    """``model.generate`` with its default cache and attention; the prompts are of one length."""

    def generate(prompts: Prompts, new_tokens: int) -> list[list[int]]:
        tokens = torch.tensor(prompts, device=module.device)
        output = module.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            generation_config=_config(new_tokens),
        )
        return output[:, tokens.shape[1] :].tolist()

    return generate


def theirs_batched(module: PreTrainedModel) -> Generate:
    """``model.generate_batch``: transformers' continuous batching."""
    settings = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=2048)

    def generate(prompts: Prompts, new_tokens: int) -> list[list[int]]:
        results = module.generate_batch(
            prompts,
            generation_config=_config(new_tokens),
            continuous_batching_config=settings,
        )
        return [result.generated_tokens for result in results.values()]

    return generate


def _config(new_tokens: int) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )


def measure(
    case: Case, contestants: dict[str, Generate], vocab: int, args: argparse.Namespace
) -> dict[str, list[float]]:
    """Tokens per second of each contestant in each round; the first round warms up."""
    source = random.Random(0)
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(args.rounds + 1):
        prompts = [
            [source.randrange(3, vocab) for _ in range(args.prompt)] for _ in range(case.batch)
        ]
        for name, generate in contestants.items():
            started = CLOCKS[args.clock]()
            tokens = generate(prompts, args.new)
            seconds = CLOCKS[args.clock]() - started
            assert [len(answer) for answer in tokens] == [args.new] * case.batch, name
            if number:
                speeds[name].append(case.batch * args.new / seconds)
    return speeds


def report(case: Case, speeds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Print the case's lines of the table and return them as dicts."""
    rows = []
    here = speeds.pop("forethought")
    print(f"{case.name:<10}{'forethought':<16}{statistics.median(here):>10.1f}")
    for name, there in speeds.items():
        ratios = [a / b for a, b in zip(here, there, strict=True)]
        row = {
            "case": case.name,
            "against": name,
            "tokens_per_second": round(statistics.median(here), 1),
            "theirs_per_second": round(statistics.median(there), 1),
            "ratio": round(statistics.median(ratios), 2),
            "goal": case.goals[name],
        }
        spread = f"{min(ratios):.2f} .. {max(ratios):.2f}"
        print(
            f"{'':<10}{name:<16}{row['theirs_per_second']:>10.1f}{row['ratio']:>8.2f}"
            f"{row['goal']:>7.2f}   {spread}"
        )
        rows.append(row)
    return rows


def main() -> None:
    """Run the cases and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--prompt", type=int, default=128, help="tokens in each prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens generated")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    rows: list[dict[str, Any]] = []
    print(f"{'case':<10}{'':<16}{'tokens/s':>10}{'ratio':>8}{'goal':>7}   least .. most")
    with tempfile.TemporaryDirectory() as scratch:
        save_random_model(Path(scratch))
        directories = {"random 150M": Path(scratch), "reasoner": reasoner_dir()}
        for case in CASES:
            if args.case and case.name not in args.case:
                continue
            llm = LLM(directories[case.model], dtype=dtype(), max_batch_size=case.batch)
            module = AutoModelForCausalLM.from_pretrained(directories[case.model], dtype=dtype())
            module = module.to(device()).eval()
            contestants = {"forethought": ours(llm), "generate": theirs(module)}
            if "generate_batch" in case.goals:
                contestants["generate_batch"] = theirs_batched(module)
            rows += report(case, measure(case, contestants, module.config.vocab_size, args))
            llm.shutdown()
    settings = {name: getattr(args, name) for name in ("threads", "clock", "prompt", "new")}
    print_report("generate_vs_transformers", rows, **settings, rounds=args.rounds)


if __name__ == "__main__":
    main()
