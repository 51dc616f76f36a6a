"""A mixture of experts on a CPU: prefills and decode steps, in the native forward and in torch.

    python -m benchmarks.experts --forms bfloat16 int4
    python -m benchmarks.experts --hidden 2048 --inner 768 --experts 64 --top-k 8 --layers 2

The model is a Qwen3-MoE with random weights. Columns are milliseconds of processor time, medians
over the rounds, in which forms and forwards are run in turn: of a prefill, and of a decode step at
each batch size, with the engine's part of it. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.peers.random_models import save_tokenizer
from benchmarks.quantization import FORMS
from benchmarks.report import print_report
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from forethought import LLM, SamplingParams

VOCAB, HEAD_DIM = 1024, 64


def config_of(args: argparse.Namespace) -> Qwen3MoeConfig:
    """A model of the shape in ``args``."""
    num_heads = args.hidden // HEAD_DIM
    return Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=args.hidden,
        moe_intermediate_size=args.inner,
        num_experts=args.experts,
        num_experts_per_tok=args.top_k,
        num_hidden_layers=args.layers,
        num_attention_heads=num_heads,
        num_key_value_heads=max(1, num_heads // 4),
        head_dim=HEAD_DIM,
        norm_topk_prob=True,
        bos_token_id=1,
        eos_token_id=2,
    )


def save_model(args: argparse.Namespace, directory: Path) -> None:
    """Save a model of the shape in ``args``, in bfloat16."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(args), dtype=torch.bfloat16)
    model.save_pretrained(directory)
    save_tokenizer(VOCAB, directory)


def milliseconds(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    """Of processor time."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    began = time.process_time()
    llm.generate(prompts, params)
    return (time.process_time() - began) * 1e3


def measure(llm: LLM, rng: random.Random, args: argparse.Namespace) -> dict[str, float]:
    """Of a prefill and of decode steps, on new prompts."""

    def prompts(batch: int, length: int) -> list[list[int]]:
        return [[rng.randrange(3, VOCAB) for _ in range(length)] for _ in range(batch)]

    times = {"prefill": milliseconds(llm, prompts(1, args.prefill), 1)}
    for batch in args.batches:
        texts = prompts(batch, 16)
        prefill = milliseconds(llm, texts, 1)
        steps = milliseconds(llm, texts, args.tokens) - prefill
        times[f"decode_{batch}"] = steps / (args.tokens - 1)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--inner", type=int, default=256, help="width of an expert")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4, help="experts of a token")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["bfloat16", "int8", "int4"])
    parser.add_argument("--forwards", nargs="+", default=["native", "torch"])
    parser.add_argument("--prefill", type=int, default=512, help="tokens")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=33, help="new tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cases = [(form, forward) for form in args.forms for forward in args.forwards]
    with tempfile.TemporaryDirectory() as directory:
        save_model(args, Path(directory))
        llms = {
            (form, forward): LLM(directory, device="cpu", forward=forward, **FORMS[form])
            for form, forward in cases
        }
    rng = random.Random(0)
    rounds = [
        {case: measure(llm, rng, args) for case, llm in llms.items()}
        for _ in range(args.rounds + 1)
    ][1:]  # the first one warms up
    rows = list[dict[str, Any]]()
    for form, forward in cases:
        row: dict[str, Any] = {"form": form, "forward": forward}
        for name in rounds[0][form, forward]:
            median = statistics.median(times[form, forward][name] for times in rounds)
            row[f"{name}_ms"] = round(median, 2)
        if not rows:
            print("".join(f"{column:>14}" for column in row))
        print("".join(f"{value:>14}" for value in row.values()))
        rows.append(row)
    print_report("experts", rows, threads=args.threads, rounds=args.rounds)


if __name__ == "__main__":
    main()
