"""A model in less memory than its weights take: a window of its layers, the others in a file.

    python -m benchmarks.layer_window
    python -m benchmarks.layer_window --layers 48 --windows 2 16 --limit 400

The model is a Llama with random weights in bfloat16. Each window runs in a process of its own,
whose private memory may grow by ``--limit`` MiB and no more (RLIMIT_DATA: weights, keys and values,
and what loading takes); the first process has all layers in memory, without a limit. Layers are
read past the system's cache where the system can do that. Tokens have to be the same. Columns:
milliseconds of a decode step of ``--batch`` sequences, prompt tokens per second, MB that a step
reads, what reading these alone takes, the share of the steps in which the forward waited for the
disk, and the most private memory in MiB beside Python and torch. Prints a table and, last, one JSON
line.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.peers.random_models import save_tokenizer
from benchmarks.report import print_report
from transformers import AutoModelForCausalLM, LlamaConfig

from forethought import LLM, SamplingParams

VOCAB = 2048
PROMPT = 512


def save_model(args: argparse.Namespace, directory: Path) -> int:
    """Save a model of the shape in ``args``, a file to a layer; the bytes of its layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=args.hidden,
        intermediate_size=args.inner,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 128,
        max_position_embeddings=4096,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    num_bytes = sum(weight.nbytes for weight in model.model.layers.parameters())
    # RLIMIT_DATA counts a mapped file, of which the loader maps those of one layer.
    model.save_pretrained(directory, max_shard_size=num_bytes // args.layers)
    save_tokenizer(VOCAB, directory)
    return num_bytes


def private_bytes(field: str) -> int:
    """Of this process, by a field of its status."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(field))
    return int(line.split()[1]) * 1024


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One window, in this process."""
    before, peaks, is_over = private_bytes("RssAnon"), [0], threading.Event()
    if args.window is not None:
        limit = private_bytes("VmData") + args.limit * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    def watch() -> None:
        while not is_over.wait(0.001):
            peaks.append(private_bytes("RssAnon"))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        return rows_of(args) | {"peak_mib": (max(peaks) - before) / 2**20}
    finally:
        is_over.set()
        watching.join()


def rows_of(args: argparse.Namespace) -> dict[str, Any]:
    rng, size = random.Random(0), (args.batch, PROMPT)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(size[1])] for _ in range(size[0])]
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    llm = LLM(
        args.model,
        dtype="bfloat16",
        forward="native",
        layer_window=args.window,
        max_num_tokens=PROMPT,
        kv_cache_config={"max_tokens": (args.batch + 1) * (PROMPT + args.tokens + 64)},
    )
    with llm:
        window: Any = llm.lend("benchmark").engine.runner.lm.network.window
        llm.take_back()
        began = time.perf_counter()
        llm.generate(prompts, params)  # what follows begins after a cached prompt
        prefill = args.batch * PROMPT / (time.perf_counter() - began)
        waited = 0.0 if window is None else window.counts.waited
        began = time.perf_counter()
        outputs = llm.generate(prompts, params.replace(max_tokens=args.tokens))
        seconds = time.perf_counter() - began
        row = {"step_ms": seconds / args.tokens * 1e3, "prompt_tokens_per_s": prefill}
        if window is not None:
            row["read_mb"] = window.file_bytes / 1e6
            row["read_ms"] = window.file_bytes / window.read_speed() * 1e3
            row["waited"] = (window.counts.waited - waited) / seconds
    return row | {"tokens": [output.outputs[0].token_ids for output in outputs]}


def in_process(args: argparse.Namespace, directory: Path, window: int | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.layer_window", "--model", str(directory)]
    command += ["--limit", str(args.limit), "--batch", str(args.batch)]
    command += ["--tokens", str(args.tokens)]
    command += [] if window is None else ["--window", str(window)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 2, 6])
    parser.add_argument("--limit", type=int, default=500, help="MiB of private memory")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32, help="new tokens")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--window", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.model is not None:
        print(json.dumps(measure(args)))
        return
    with tempfile.TemporaryDirectory() as directory:
        num_bytes = save_model(args, Path(directory))
        print(f"{num_bytes / 2**20:.0f} MiB of layers, {args.limit} MiB of memory")
        rows, tokens = [], None
        for window in (None, *args.windows):
            row = in_process(args, Path(directory), window)
            tokens = tokens or row["tokens"]
            assert row.pop("tokens") == tokens, "layers in a file change no token"
            rows.append({"window": window} | {name: round(x, 3) for name, x in row.items()})
            print("".join(f"{name} {value!s:<10}" for name, value in rows[-1].items()))
    print_report("layer_window", rows, layer_mib=num_bytes / 2**20, limit_mib=args.limit)


if __name__ == "__main__":
    main()
