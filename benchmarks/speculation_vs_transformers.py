"""Speculative decoding against transformers' own: same target, same draft model, interleaved.

    python -m benchmarks.speculation_vs_transformers
    python -m benchmarks.speculation_vs_transformers --case reasoner --rounds 5

Batch 1, greedy. In every round each contestant answers the round's prompts once: plain decoding,
prompt lookup (our n-grams, pooled over requests as is their default; ``prompt_lookup_num_tokens``
there) and a draft model (ours; assisted generation there), each of both with the settings that suit
it. No prompt is used in two rounds. Figures are medians over the rounds: tokens per
second; the ratio to the other library's same way; the gain over its own plain decoding. Prints a
table and, last, one JSON line.

The small target is the embedded reasoner with its own draft model. The large one has random weights
in the shape of a Qwen3 of about 150 M parameters, whose later layers change little, so that its
first three layers, with norm and head, predict most of its tokens.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmarks.generate_vs_transformers import save_random_model
from benchmarks.report import device, dtype, print_report
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, Qwen3ForCausalLM

from forethought import (
    LLM,
    DraftTargetDecodingConfig,
    NGramDecodingConfig,
    SamplingParams,
    SpeculationParams,
)
from forethought.assets import drafter_dir, reasoner_dir
from forethought.evaluation.problems import shipped

LAYERS = 3
"""Of the large model's draft."""
WAYS = ("plain", "lookup", "draft model")
Generate = Callable[[list[int], int], int]  # prompt, most new tokens -> new tokens


def save_pair(folder: Path) -> tuple[Path, Path]:
    """The large target and its draft model: directories."""
    target, draft = folder / "target", folder / "draft"
    save_random_model(target)
    module = AutoModelForCausalLM.from_pretrained(target)
    assert isinstance(module, Qwen3ForCausalLM)
    with torch.no_grad():
        for layer in module.model.layers[LAYERS:]:
            layer.self_attn.o_proj.weight.mul_(0.02)
            layer.mlp.down_proj.weight.mul_(0.02)
    module.save_pretrained(target)
    module.model.layers = module.model.layers[:LAYERS]
    module.config.num_hidden_layers = LAYERS
    module.config.layer_types = module.config.layer_types[:LAYERS]
    module.save_pretrained(draft)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (draft / name).write_bytes((target / name).read_bytes())
    return target, draft


def ours(target: Path, draft: Path, length: int) -> dict[str, Generate]:
    """One engine; each way is chosen per request."""
    llm = LLM(
        target,
        dtype=dtype(),
        max_batch_size=1,
        speculative_config=[
            NGramDecodingConfig(
                max_draft_len=10,
                max_matching_ngram_size=3,
                is_use_oldest=False,
            ),
            DraftTargetDecodingConfig(max_draft_len=length, speculative_model=draft),
        ],
    )
    ways = {
        "plain": SpeculationParams(enabled=False),
        "lookup": SpeculationParams(drafter="ngram"),
        "draft model": SpeculationParams(drafter="draft_target"),
    }

    def way(speculation: SpeculationParams) -> Generate:
        def generate(prompt: list[int], new: int) -> int:
            params = SamplingParams(temperature=0.0, max_tokens=new, speculation=speculation)
            return len(llm.generate(prompt, params).outputs[0].token_ids)

        return generate

    return {name: way(speculation) for name, speculation in ways.items()}


def theirs(target: Path, draft: Path) -> dict[str, Generate]:
    """``generate`` as it is, with prompt lookup, and with an assistant."""
    module, assistant = (
        AutoModelForCausalLM.from_pretrained(directory, dtype=dtype()).to(device()).eval()
        for directory in (target, draft)
    )
    extras: dict[str, dict[str, Any]] = {
        "plain": {},
        "lookup": {"prompt_lookup_num_tokens": 10},
        "draft model": {"assistant_model": assistant},
    }

    def way(extra: dict[str, Any]) -> Generate:
        def generate(prompt: list[int], new: int) -> int:
            tokens = torch.tensor([prompt], device=module.device)
            config = GenerationConfig(
                max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=_eos(module)
            )
            with torch.inference_mode():
                output = module.generate(
                    tokens,
                    attention_mask=torch.ones_like(tokens),
                    generation_config=config,
                    **extra,
                )
            return output.shape[1] - len(prompt)

        return generate

    return {name: way(extra) for name, extra in extras.items()}


def _eos(module: PreTrainedModel) -> int | list[int] | None:
    return module.generation_config.eos_token_id


def reasoner_prompts(llm_dir: Path, rounds: int, size: int) -> Iterator[list[list[int]]]:
    """Questions of the held-out set, through the chat template; none comes twice."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(llm_dir)
    questions = [problem.question for problem in shipped()]
    random.Random(0).shuffle(questions)
    for number in range(rounds):
        yield [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}],
                add_generation_prompt=True,
                return_dict=False,
            )
            for question in questions[number * size : (number + 1) * size]
        ]


def random_prompts(rounds: int, size: int) -> Iterator[list[list[int]]]:
    """128 random tokens each."""
    source = random.Random(0)
    for _ in range(rounds):
        yield [[source.randrange(3, 32_000) for _ in range(128)] for _ in range(size)]


def measure(
    contestants: dict[str, Generate], rounds: Iterator[list[list[int]]], new: int
) -> dict[str, list[float]]:
    """Tokens per second of each contestant in each round; the first round warms up."""
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    for number, prompts in enumerate(rounds):
        for name, generate in contestants.items():
            began = time.perf_counter()
            tokens = sum(generate(prompt, new) for prompt in prompts)
            seconds = time.perf_counter() - began
            if number:
                speeds[name].append(tokens / seconds)
    return speeds


def report(case: str, speeds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Print the case's lines and return them as dicts."""
    rows = []
    plain_here, plain_there = speeds["ours plain"], speeds["theirs plain"]
    for way in WAYS:
        here, there = speeds[f"ours {way}"], speeds[f"theirs {way}"]
        row = {
            "case": case,
            "way": way,
            "tokens_per_second": round(statistics.median(here), 1),
            "theirs_per_second": round(statistics.median(there), 1),
            "ratio": _ratio(here, there),
            "gain": _ratio(here, plain_here),
            "their_gain": _ratio(there, plain_there),
        }
        figures = [value for value in row.values() if isinstance(value, float)]
        print(f"{case:<10}{way:<13}" + "".join(f"{figure:>11}" for figure in figures))
        rows.append(row)
    return rows


def _ratio(here: list[float], there: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(here, there, strict=True)), 2)


def main() -> None:
    """Run the cases and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=3, help="prompts in a round")
    parser.add_argument("--new", type=int, default=256, help="most tokens generated per prompt")
    parser.add_argument("--case", action="append", choices=["reasoner", "random"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows: list[dict[str, Any]] = []
    heads = ("tokens/s", "theirs", "ratio", "gain", "their gain")
    print(f"{'case':<10}{'way':<13}" + "".join(f"{head:>11}" for head in heads))
    with tempfile.TemporaryDirectory() as scratch:
        for case in args.case or ("reasoner", "random"):
            if case == "reasoner":
                target, draft, length = reasoner_dir(), drafter_dir(), 16
                rounds = reasoner_prompts(target, args.rounds + 1, args.prompts)
            else:
                (target, draft), length = save_pair(Path(scratch)), 6
                rounds = random_prompts(args.rounds + 1, args.prompts)
            contestants = {f"ours {k}": v for k, v in ours(target, draft, length).items()}
            contestants |= {f"theirs {k}": v for k, v in theirs(target, draft).items()}
            rows += report(case, measure(contestants, rounds, args.new))
    print_report("speculation_vs_transformers", rows, threads=args.threads, rounds=args.rounds)


if __name__ == "__main__":
    main()
