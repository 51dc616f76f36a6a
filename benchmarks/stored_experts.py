"""A mixture of experts with a part of its experts in memory, and the others in a file.

    python -m benchmarks.stored_experts
    python -m benchmarks.stored_experts --layers 24 --shares 0.5 --skews 1

The model is a Qwen3-MoE with random weights. ``--skews``: how much some experts are preferred: the
router's row of the expert of rank r is divided by (r + 1) to this power, ranks being random in each
layer. The file is read past the system's cache, so that it stands for one that memory has no room
for; where the system cannot do that, a line says so. Decode steps are timed by the wall clock, each
share beside all experts in memory, in turn; tokens have to be the same. Columns: milliseconds of a
step, the ratio of the speed to that of all in memory, the share of the experts that were there when
a layer asked for them, and how many were read ahead for one that was asked for. Prints a table and,
last, one JSON line.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.experts import VOCAB, config_of
from benchmarks.peers.random_models import save_tokenizer
from benchmarks.report import print_report
from transformers import AutoModelForCausalLM

from forethought import LLM, SamplingParams


def save_model(args: argparse.Namespace, skew: float, directory: Path) -> int:
    """Save a model of the shape in ``args``, in bfloat16; the bytes of its experts."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(args), dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            ranks = torch.randperm(args.experts) + 1
            layer.mlp.gate.weight /= ranks[:, None].float() ** skew
    model.save_pretrained(directory)
    save_tokenizer(VOCAB, directory)
    return 3 * args.hidden * args.inner * 2 * args.experts * args.layers


def store_of(llm: LLM) -> Any:
    network: Any = llm.lend("benchmark").engine.runner.lm.network
    llm.take_back()
    return network.experts


def read_directly(store: Any) -> bool:
    """Have the file of a store read past the system's cache; False: the system cannot."""
    try:
        direct = os.open(f"/proc/self/fd/{store.descriptor}", os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    os.dup2(direct, store.descriptor)
    os.close(direct)
    return True


def step(llm: LLM, prompts: list[list[int]], args: argparse.Namespace) -> tuple[float, list[Any]]:
    """Milliseconds of a decode step, and the tokens."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    llm.generate(prompts, params)  # what follows begins after a cached prompt
    began = time.perf_counter()
    outputs = llm.generate(prompts, params.replace(max_tokens=args.tokens))
    seconds = time.perf_counter() - began
    return seconds * 1e3 / args.tokens, [output.outputs[0].token_ids for output in outputs]


def rows_of(args: argparse.Namespace, skew: float) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        num_bytes = save_model(args, skew, Path(directory))
        llms = {1.0: LLM(directory, dtype="bfloat16", forward="native")}
        for share in args.shares:
            gib = share * num_bytes * 1.02 / 2**30
            llms[share] = LLM(directory, dtype="bfloat16", forward="native", expert_memory=gib)
    stores = {share: store_of(llm) for share, llm in llms.items() if share != 1.0}
    is_direct = [read_directly(store) for store in stores.values()]
    print(f"skew {skew}: {num_bytes / 2**30:.2f} GiB of experts, read", end=" ")
    speeds = [store.read_speed() for store in stores.values()]
    print(f"{'past' if all(is_direct) else 'through'} the cache, {max(speeds) / 1e9:.2f} GB/s")
    rng, times = random.Random(0), {share: list[float]() for share in llms}
    for _ in range(args.rounds + 1):
        prompts = [[rng.randrange(3, VOCAB) for _ in range(16)] for _ in range(args.batch)]
        tokens = []
        for share, llm in llms.items():
            milliseconds, texts = step(llm, prompts, args)
            times[share].append(milliseconds)
            tokens.append(texts)
        assert all(texts == tokens[0] for texts in tokens), "experts in a file change no token"
    rows = []
    for share, each in times.items():
        ratios = [first / other for first, other in zip(times[1.0][1:], each[1:], strict=True)]
        row: dict[str, Any] = {"skew": skew, "share": share}
        row |= {"step_ms": statistics.median(each[1:]), "ratio": statistics.median(ratios)}
        if share in stores:
            counts = stores[share].counts
            row["present"] = counts.num_present / counts.num_used
            row["ahead"] = counts.num_read_ahead / counts.num_used
        rows.append({name: round(value, 3) for name, value in row.items()})
        print("".join(f"{name} {value:<10}" for name, value in rows[-1].items()))
    for llm in llms.values():
        llm.shutdown()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=512, help="width of an expert")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8, help="experts of a token")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.75, 0.5, 0.25])
    parser.add_argument("--skews", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rows = [row for skew in args.skews for row in rows_of(args, skew)]
    print_report("stored_experts", rows, rounds=args.rounds, batch=args.batch)


if __name__ == "__main__":
    main()
