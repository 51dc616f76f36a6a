"""A model with recurrent layers on a CPU, beside transformers.

    python -m benchmarks.recurrent --threads 1 --rounds 3

The model has random weights, a shape of 100 million in Qwen3.5's layout (three layers of the gated
delta rule to one of attention). Rows: prefill and decoding by batch, in float32 here and in
transformers, and with ``quantization="w8a8"``; decode steps after short and long contexts; steps
one by one and sixteen in a call, plain and with drafts of a random MTP module; a fork of a long
sequence; a step with drafts of 4 and 8 tokens against one without. Runs are interleaved, numbers
are medians over the rounds and ratios those within a round. Prints a table and, last, one JSON
line.

``python -m benchmarks.peers --models hybrid100m --llamacpp PY`` has the same model in llama.cpp.
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
from benchmarks.peers.random_models import SHAPES, save_random_model
from benchmarks.report import print_report
from transformers import AutoModelForCausalLM, PreTrainedModel

from forethought import LLM, KvCacheConfig, SamplingParams
from forethought.config.drafters import MTPDecodingConfig
from forethought.speculative.drafter import Draft, Drafter, ResourceManager, ScheduledRequests
from forethought.speculative.heads.mtp import MtpModule, save_modules
from forethought.training.teacher import Teacher

CONTEXT = 8192
DRAFT_LEN = 3
"""Tokens that an MTP module drafts in a step."""
VOCAB = SHAPES["hybrid100m"]["vocab_size"]

Row = dict[str, Any]


class ArbitraryChain(Drafter):
    """Drafts tokens that the model would hardly generate."""

    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        for request in scheduled_requests.generation_requests:
            length = len(request.tokens)
            request.draft = Draft([(length * 7 + n) % VOCAB for n in range(request.max_draft_len)])


def seconds(engine: Ours | Transformers, prompts: list[list[int]], num_tokens: int) -> float:
    began = time.perf_counter()
    engine.generate(prompts, num_tokens)
    return time.perf_counter() - began


class Ours:
    """This engine. ``options`` are those of ``LLM``."""

    def __init__(self, directory: Path, **options: Any) -> None:
        cache = KvCacheConfig(max_tokens=4 * CONTEXT, enable_block_reuse=False)
        self.llm = LLM(directory, device="cpu", kv_cache_config=cache, **options)

    def generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        self.llm.generate(prompts, params)


class Transformers:
    """``model.generate`` of transformers."""

    def __init__(self, directory: Path) -> None:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory).eval()
        model.generation_config.eos_token_id = None
        self._model = model

    def generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        with torch.inference_mode():
            self._model.generate(
                torch.tensor(prompts),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )


def prompts_of(count: int, length: int, rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for _ in range(count)]


def speeds(engines: dict[str, Any], prompts: list[list[int]], args: argparse.Namespace) -> Row:
    """Milliseconds of a prefill, tokens/s from the second token on, and ratios to transformers."""
    rounds: list[dict[str, tuple[float, float]]] = []
    for _ in range(args.rounds):
        measured = {}
        for name, engine in engines.items():
            prefill, whole = (seconds(engine, prompts, n) for n in (1, args.tokens))
            measured[name] = (prefill, (args.tokens - 1) * len(prompts) / (whole - prefill))
        rounds.append(measured)
    row: Row = {"batch": len(prompts), "prompt": len(prompts[0])}
    for name in engines:
        row[f"{name}, prefill ms"] = _median(1e3 * figures[name][0] for figures in rounds)
        row[f"{name}, tokens/s"] = _median(figures[name][1] for figures in rounds)
    for name in [name for name in engines if name != "transformers"]:
        row[f"{name}, prefill ratio"] = _median(
            figures["transformers"][0] / figures[name][0] for figures in rounds
        )
        row[f"{name}, ratio"] = _median(
            figures[name][1] / figures["transformers"][1] for figures in rounds
        )
    return row


def forks(ours: Ours, length: int, args: argparse.Namespace) -> Row:
    """Microseconds of a fork of a sequence of ``length`` tokens."""
    engine = ours.llm.lend("benchmark").engine
    params = SamplingParams(max_tokens=1, temperature=0.0)
    [parent] = engine.add(prompts_of(1, length, random.Random(0))[0], params, keep=True)
    while engine.has_work:
        engine.step()
    used, spent = engine.pool.in_use, list[float]()
    for _ in range(20 * args.rounds):
        began = time.perf_counter()
        child = engine.fork(parent)
        spent.append(time.perf_counter() - began)
        assert engine.pool.in_use == used
        engine.close(child)
    engine.close(parent)
    ours.llm.take_back()
    return {"fork of": length, "us": _median(1e6 * one for one in spent)}


def in_calls(
    directory: Path, args: argparse.Namespace, rng: random.Random, mtp: Path | None = None
) -> list[Row]:
    """Tokens/s of steps one by one, and of sixteen in a call, by batch; with ``mtp`` each step
    verifies ``DRAFT_LEN`` tokens of the module in that directory.
    """
    rows: list[Row] = []
    drafts = {} if mtp is None else {"speculative_config": _drafts_of(mtp)}
    options = {"dtype": "float32", "num_threads": args.threads, **drafts}
    single, several = (
        Ours(directory, num_continuous_decode_steps=count, **options) for count in (1, 16)
    )
    for batch in args.batches:
        prompts = prompts_of(batch, args.prompts[0], rng)
        speeds = [
            (_speed(single, prompts, args), _speed(several, prompts, args))
            for _ in range(args.rounds)
        ]
        rows.append(
            {
                **({} if mtp is None else _drafted_by(several.llm)),
                "batch": batch,
                "1 step, tokens/s": _median(one for one, _ in speeds),
                "16 steps, tokens/s": _median(many for _, many in speeds),
                "ratio": _median(many / one for one, many in speeds),
            }
        )
    single.llm.shutdown()
    several.llm.shutdown()
    return rows


def _drafts_of(module: Path) -> MTPDecodingConfig:
    return MTPDecodingConfig(speculative_model=str(module), max_draft_len=DRAFT_LEN)


def _drafted_by(llm: LLM) -> Row:
    """Of all rounds so far."""
    stats = llm.stats
    return {"MTP drafts": DRAFT_LEN, "accepted": round(stats.accepted / stats.drafted, 3)}


def save_mtp_module(target: Path, directory: Path) -> Path:
    """Save an MTP module of random weights for a target; returns its directory."""
    torch.manual_seed(1)
    save_modules([MtpModule.fresh(Teacher.load(target, "float32").lm, "qwen")], directory, "qwen")
    return directory


def _speed(ours: Ours, prompts: list[list[int]], args: argparse.Namespace) -> float:
    """Tokens/s from the second token on."""
    prefill, whole = (seconds(ours, prompts, n) for n in (1, args.tokens))
    return (args.tokens - 1) * len(prompts) / (whole - prefill)


def drafted(directory: Path, args: argparse.Namespace, prompts: list[list[int]]) -> list[Row]:
    """Milliseconds of a step by the length of its draft, of which nothing is accepted."""
    rows: list[Row] = []
    for length in (0, 4, 8):
        chain = {"decoding_type": "User_Provided", "max_draft_len": length}
        options = {"speculative_config": {**chain, "drafter": ArbitraryChain()}} if length else {}
        ours = Ours(directory, dtype="float32", num_continuous_decode_steps=1, **options)
        ours.generate(prompts, 2)
        spent = []
        for _ in range(args.rounds):
            prefill, whole = (seconds(ours, prompts, n) for n in (1, args.tokens))
            spent.append(1e3 * (whole - prefill) / (args.tokens - 1))
        ours.llm.shutdown()
        rows.append({"draft": length, "ms/step": _median(spent)})
    return rows


def _median(numbers: Any) -> float:
    return round(statistics.median(numbers), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=33)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--small", action="store_true", help="to see in seconds that it works")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rng, rows = random.Random(0), list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        save_random_model("hybrid2m" if args.small else "hybrid100m", directory, "float32")
        ours = Ours(directory, dtype="float32", num_threads=args.threads)
        quantised = Ours(directory, quantization="w8a8", num_threads=args.threads)
        engines = {"float32": ours, "w8a8": quantised, "transformers": Transformers(directory)}
        for engine in engines.values():
            engine.generate(prompts_of(1, 8, rng), 2)
        for batch in args.batches:
            rows.append(speeds(engines, prompts_of(batch, args.prompts[0], rng), args))
        for length in args.prompts[1:]:
            rows.append(speeds(engines, prompts_of(1, length, rng), args))
        rows.append(forks(ours, 4096 if not args.small else 256, args))
        rows += in_calls(directory, args, rng)
        rows += in_calls(directory, args, rng, save_mtp_module(directory, directory / "mtp"))
        rows += drafted(directory, args, prompts_of(1, args.prompts[0], rng))
    for row in rows:
        print("  ".join(f"{name}: {value}" for name, value in row.items()))
    print_report("recurrent", rows, threads=args.threads)


if __name__ == "__main__":
    main()
