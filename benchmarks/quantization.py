"""Weights in 16, 8 and 4 bits on one model: speed, perplexity and agreement.

    python -m benchmarks.quantization
    python -m benchmarks.quantization --model DIR --prompts FILE --text README.md --forms auto w8a8

The first form is what the others are compared with. Its greedy answers to held-out questions are
the text of the comparison: *perplexity* is over their tokens, and *agreement* the share of them
that another form gives the highest probability after the same tokens. With ``--text`` perplexity
is over the tokens of files, in pieces of 512. Speed is greedy decoding at each batch size, the
forms interleaved, medians over the rounds. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.report import print_report

from forethought import LLM, SamplingParams
from forethought.bench.prompts import read_prompts

FORMS: dict[str, dict[str, Any]] = {
    "auto": {},
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "w8a8": {"quantization": "w8a8"},
    "w4a8": {"quantization": "w4a8"},
}


def answers(llm: LLM, prompts: list[list[int]], length: int) -> list[list[int]]:
    """Greedy answers of exactly ``length`` tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    return [result.outputs[0].token_ids for result in llm.generate(prompts, params)]


PIECE = 512
"""Tokens of a text that are read at once."""


def perplexity(llm: LLM, texts: list[Path]) -> float:
    """Over the tokens of files, each piece without those before it."""
    params, losses = SamplingParams(max_tokens=1, prompt_logprobs=0), list[float]()
    tokens = [token for path in texts for token in llm.tokenizer.encode(path.read_text())]
    pieces = [tokens[i : i + PIECE] for i in range(0, len(tokens) - PIECE + 1, PIECE)]
    for piece, result in zip(pieces, llm.generate(pieces, params), strict=True):
        pairs = zip(piece[1:], result.prompt_logprobs[1:], strict=True)
        losses.extend(-entry[token].logprob for token, entry in pairs)
    return round(math.exp(statistics.fmean(losses)), 4)


def quality(llm: LLM, prompts: list[list[int]], texts: list[list[int]]) -> dict[str, float]:
    """Perplexity of the texts after their prompts, and the share of top-1 tokens in them."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    losses, agreed = list[float](), 0
    whole = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    for prompt, text, result in zip(prompts, texts, llm.generate(whole, params), strict=True):
        entries = result.prompt_logprobs[len(prompt) :]
        for token, entry in zip(text, entries, strict=True):
            losses.append(-entry[token].logprob)
            agreed += entry[token].rank == 1
    return {
        "perplexity": round(math.exp(statistics.fmean(losses)), 4),
        "agreement": round(agreed / len(losses), 4),
    }


def speeds(llms: dict[str, LLM], prompts: list[list[int]], args: Any) -> dict[str, dict[str, Any]]:
    """Median tokens per second by form and batch size."""
    by_form: dict[str, dict[str, Any]] = {name: {} for name in llms}
    for batch in args.batches:
        chosen = [prompts[n % len(prompts)] for n in range(batch)]
        times: dict[str, list[float]] = {name: [] for name in llms}
        for _ in range(args.rounds + 1):
            for name, llm in llms.items():
                began = time.perf_counter()
                answers(llm, chosen, args.length)
                times[name].append(time.perf_counter() - began)
        for name, seconds in times.items():
            speed = batch * args.length / statistics.median(seconds[1:])
            by_form[name][f"tokens_per_second_{batch}"] = round(speed, 1)
    return by_form


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="directory or Hub id (default: the embedded reasoner)")
    parser.add_argument("--prompts", type=Path, help="one per line (default: held-out questions)")
    parser.add_argument("--text", type=Path, nargs="+", help="files whose perplexity is measured")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--length", type=int, default=128, help="new tokens")
    parser.add_argument("--texts", type=int, default=64, help="answers to compare on")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = {} if args.model is None else {"model": args.model}
    llms = {name: LLM(**model, **FORMS[name]) for name in args.forms}
    first = next(iter(llms.values()))
    questions = read_prompts(args.prompts)
    prompts = [
        first.chat_prompt([{"role": "user", "content": text}]) for text in questions[: args.texts]
    ]
    texts = answers(first, prompts, args.length)
    measured = speeds(llms, prompts, args)
    rows = []
    for name, llm in llms.items():
        row = {"form": name, **measured[name], **quality(llm, prompts, texts)}
        if args.text:
            row["perplexity"] = perplexity(llm, args.text)
        if not rows:
            print("".join(f"{column:>22}" for column in row))
        print("".join(f"{value:>22}" for value in row.values()), flush=True)
        rows.append(row)
    print_report("quantization", rows, threads=args.threads, rounds=args.rounds)


if __name__ == "__main__":
    main()
