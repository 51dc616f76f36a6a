"""How long a fresh process takes to its first token, and how much memory, against transformers.

    python -m benchmarks.start --rounds 5

Each start is a process of its own that imports the library, loads the model and generates a token;
all of them are run in turn, medians are printed. ``import torch`` alone is the floor. The models
are the embedded reasoner and one of SmolLM2-135M's shape with random weights in bfloat16.
Memory is the most that was resident, less what the process has after ``import torch``; the weights
are what the model holds. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from benchmarks.report import print_report
from transformers import LlamaConfig, LlamaForCausalLM

from forethought.assets import reasoner_dir

BEGIN = """
import json, sys, time
began = time.perf_counter()
path, fields, weights = sys.argv[1], json.loads(sys.argv[2]), 0
import torch
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
before = peak()
"""
TORCH = ""
OURS = """
from forethought import LLM, SamplingParams
llm = LLM(path, **fields)
llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1, temperature=0.0))
weights = llm._frontend.engine.runner.lm.weight_bytes
"""
TRANSFORMERS = """
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(path)
module = AutoModelForCausalLM.from_pretrained(path)
module.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=1, do_sample=False)
weights = sum(weight.nbytes for weight in module.parameters())
"""
END = """
seconds = time.perf_counter() - began
print(json.dumps([seconds, peak() - before, weights, len(sys.modules)]))
"""
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def start(body: str, path: Path, fields: dict[str, Any]) -> list[float]:
    """Seconds, bytes, bytes of weights and imported modules of one process."""
    command = [sys.executable, "-c", BEGIN + body + END, str(path), json.dumps(fields)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    values: list[float] = json.loads(run.stdout.splitlines()[-1])
    return values


def save_random(path: Path) -> None:
    """A checkpoint of SmolLM2-135M's shape, with the tokenizer of the reasoner."""
    LlamaForCausalLM(LlamaConfig(**SMOLLM2)).to(torch.bfloat16).save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(reasoner_dir() / name, path / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        save_random(Path(folder))
        cases: list[tuple[str, str, Path, dict[str, Any]]] = [
            ("import torch", TORCH, reasoner_dir(), {}),
            ("reasoner", OURS, reasoner_dir(), {}),
            ("reasoner, transformers", TRANSFORMERS, reasoner_dir(), {}),
            ("135 M, bfloat16", OURS, Path(folder), {"dtype": "bfloat16"}),
            ("135 M, float32", OURS, Path(folder), {"dtype": "float32"}),
            ("135 M, int8", OURS, Path(folder), {"quantization": "int8"}),
            ("135 M, int4", OURS, Path(folder), {"quantization": "int4", "forward": "native"}),
            ("135 M, transformers", TRANSFORMERS, Path(folder), {}),
        ]
        starts = [[start(*case[1:]) for case in cases] for _ in range(args.rounds + 1)][1:]
    print(f"{'':<24}{'seconds':>9}{'weights MiB':>13}{'peak MiB':>10}{'beyond':>8}{'modules':>9}")
    for number, (name, *_) in enumerate(cases):
        measured = zip(*(by_case[number] for by_case in starts), strict=True)
        seconds, peak, weights, modules = map(statistics.median, measured)
        mib = [size / 2**20 for size in (weights, peak, peak - weights)]
        print(
            f"{name:<24}{seconds:>9.2f}{mib[0]:>13.0f}{mib[1]:>10.0f}{mib[2]:>8.0f}{modules:>9.0f}"
        )
        row = {"name": name, "seconds": round(seconds, 3), "modules": int(modules)}
        rows.append({**row, "weight_bytes": int(weights), "peak_bytes": int(peak)})
    print_report("start", rows, rounds=args.rounds)


if __name__ == "__main__":
    main()
