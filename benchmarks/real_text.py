"""Speculation on real text, by the kind of task: drafters on SmolLM2-135M-Instruct.

    python -m benchmarks.real_text
    python -m benchmarks.real_text --drafter medusa=runs/medusa/drafter --dtype bfloat16

Tasks: repeat a passage; rename a variable in a Python function; summarise a passage; write prose
about a subject; answer a chat. Passages are paragraphs of this documentation, functions are of
Python's library, the chats are written here and in no training text. N-grams and suffixes need
nothing; ``--drafter NAME=DIR`` adds one that was trained for the model (``forethought train NAME
--model smollm2``).

Greedy, batch 1, one engine each, all loaded at once. Goodput control chooses the lengths as
``--speculative NAME`` would; ``--fixed`` takes the drafter's longest instead. In every round plain
decoding and each drafter do the same prompts of a task, beginning with another one each time;
prompts of a round are new to all. Rates are tokens of the answers over the seconds of
``LLM.generate``, prefill included; figures are medians over the rounds after the first, which warms
up, ratios are taken within a round. Tokens per step are of decoding alone. Prints a table and,
last, one JSON line.
"""

from __future__ import annotations

import argparse
import inspect
import re
import shlex
import statistics
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from benchmarks.default_drafters import PLAIN, Contestant
from benchmarks.report import print_report

from forethought import LLM, KvCacheConfig, SamplingParams
from forethought.config import drafter_table
from forethought.config.speculation import named_config

WITHOUT_MODEL = ("ngram", "suffix")
SUBJECTS = (
    "a lighthouse keeper", "the first snow", "a market in the morning", "an old violin",
    "a train through the night", "learning to swim", "the smell of bread", "a lost dog",
    "two sisters", "a garden after rain", "a broken clock", "the last day of school",
    "a letter that came late", "a walk on the beach", "a power cut", "a small bookshop",
)  # fmt: skip
CHATS = (
    "What should I pack for a weekend in the mountains?",
    "Explain to a child why the sky is blue.",
    "Give me three ideas for a cheap dinner with rice.",
    "How do I ask my manager for a day off?",
    "What is the difference between a virus and a bacterium?",
    "Write a short birthday message for my grandmother.",
    "Which exercises can I do at a desk?",
    "What does a compiler do?",
    "Suggest a name for a cat and say why.",
    "How can I sleep better?",
    "Tell me about the city of Lisbon.",
    "What is compound interest?",
    "How do plants make their food?",
    "Draft a polite e-mail that declines an invitation.",
    "What are the advantages of public transport?",
    "How do I start to learn the guitar?",
)


def passages() -> list[str]:
    """Paragraphs of the documentation, of 50 to 110 words."""
    folder = Path(__file__).resolve().parent.parent / "docs"
    texts = [path.read_text() for path in sorted(folder.glob("*.md"))]
    blocks = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", block) for text in texts
              for block in text.split("\n\n")]  # fmt: skip
    return [block for block in blocks if block[0:1].isalpha() and 50 <= len(block.split()) <= 110]


def functions() -> list[str]:
    """Short functions of Python's library."""
    modules: tuple[ModuleType, ...] = (shlex, statistics, textwrap, inspect)
    sources = [
        inspect.getsource(value)
        for module in modules
        for _, value in sorted(vars(module).items())
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    return [source for source in sources if 8 <= source.count("\n") <= 30]


def renaming(source: str) -> str:
    """The prompt that renames the first parameter of a function."""
    match = re.search(r"\((\w+)", source)
    name = match.group(1) if match else "self"
    return f"Rewrite this Python code with {name} renamed to value:\n\n```python\n{source}```"


TASKS: dict[str, Callable[[], list[str]]] = {
    "repeat": lambda: [f"Repeat this text word by word:\n\n{text}" for text in passages()],
    "rename": lambda: list(map(renaming, functions())),
    "summarise": lambda: [f"Summarise this text in two sentences:\n\n{t}" for t in passages()],
    "prose": lambda: [f"Write a story about {subject}." for subject in SUBJECTS],
    "chat": lambda: list(CHATS),
}


def compare(task: str, llms: dict[str, LLM], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a task."""
    contestants = {name: Contestant(llm) for name, llm in llms.items()}
    order, texts = list(contestants.values()), TASKS[task]()
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens)
    for number in range(args.rounds + 1):
        indices = range(number * args.prompts, (number + 1) * args.prompts)
        chats = [[{"role": "user", "content": texts[n % len(texts)]}] for n in indices]
        prompts = list(map(llms[PLAIN].chat_prompt, chats))
        salted = params.replace(cache_salt=f"{task}, round {number}")
        for contestant in order[number % len(order) :] + order[: number % len(order)]:
            contestant.answer([[prompt] for prompt in prompts], salted)
    return [
        {"task": task, "drafter": name, **contestant.row(contestants[PLAIN])}
        for name, contestant in contestants.items()
    ]


def engines(args: argparse.Namespace) -> dict[str, LLM]:
    """Plain decoding and the drafters, by name."""
    settings: dict[str, Any] = {
        "dtype": args.dtype,
        "max_batch_size": 1,
        "kv_cache_config": KvCacheConfig(max_tokens=4096),
    }
    llms = {PLAIN: LLM(args.model, **settings)}
    trained = dict(pair.split("=", 1) for pair in args.drafter)
    for name in (*WITHOUT_MODEL, *trained):
        fields: dict[str, Any] = {"speculative_model": trained[name]} if name in trained else {}
        if args.fixed:
            fields["length_control"] = "fixed"
        config = named_config(name, args.model, **fields)
        llms[name] = LLM(args.model, **settings, speculative_config=config)
    return llms


def main() -> None:
    names = sorted(set(drafter_table.options()) - {"auto", *WITHOUT_MODEL})
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", nargs="+", default=[], metavar="NAME=DIR", help=str(names))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--fixed", action="store_true", help="drafts as long as they may be")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--prompts", type=int, default=4, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    llms, rows = engines(args), list[dict[str, Any]]()
    for task in args.tasks:
        rows += compare(task, llms, args)
        if task == args.tasks[0]:
            print("".join(f"{name:>18}" for name in rows[0]))
        for row in rows[-len(llms) :]:
            print("".join(f"{value!s:>18}" for value in row.values()), flush=True)
    settings = {key: getattr(args, key) for key in ("tokens", "prompts", "threads", "rounds")}
    print_report("real_text", rows, weights=args.dtype, **settings)


if __name__ == "__main__":
    main()
