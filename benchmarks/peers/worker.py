"""The process of one engine: reads requests as lines of JSON, answers each with one line.

    python -m benchmarks.peers.worker vllm

It runs in the engine's own environment, so nothing here needs more than Python. What an engine
prints goes to the standard error stream; the original output stream carries answers alone.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TextIO

PLAIN, LOOKUP, DRAFT_MODEL = "plain", "lookup", "draft model"
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
"""Seconds that pass, and seconds that processors spend on all threads of the process."""

MODULES = {
    "transformers": "transformers_engine",
    "forethought": "forethought_engine",
    "vllm": "vllm_engine",
    "openvino": "openvino_engine",
    "llamacpp": "llamacpp_engine",
}
"""Engine -> module here that has a class ``PeerEngine``."""


@dataclass(frozen=True)
class Settings:
    """What an engine is loaded with."""

    model: str
    """Path of the model as ``prepare`` returned it."""
    dtype: str
    """``float32`` or ``bfloat16``: of weights that are not quantised, and of the KV cache."""
    form: str = ""
    """Quantisation of the weights as the engine calls it; empty: none."""
    threads: int = 1
    max_batch: int = 1
    max_len: int = 2048
    """Tokens of the longest sequence."""
    draft: str = ""
    """Path of a draft model as ``prepare`` returned it; empty: none."""
    num_looked_up: int = 3
    """Draft tokens of prompt lookup."""
    ways: list[str] = field(default_factory=lambda: [PLAIN])
    """Of speculation that will be asked for."""


@dataclass(frozen=True)
class Request:
    """Prompts to continue greedily, up to ``max_batch`` of them at once."""

    prompts: list[list[int]]
    lengths: list[int]
    """New tokens of each prompt."""
    way: str = PLAIN
    eos: int | None = None
    """Token that ends an answer early; None: none does."""
    timed: bool = False
    """Whether the time of the first token is wanted."""
    clock: str = "wall"
    """Of ``CLOCKS``: which seconds are told."""


@dataclass(frozen=True)
class Answer:
    """What an engine generated."""

    tokens: list[list[int]]
    first: float | None = None
    """``time.perf_counter()`` when all prompts had one token, and none more; None: not known."""


class Engine(Protocol):
    """One engine."""

    caches_prefixes: bool
    """Whether it computes nothing of a prompt again. Of one that does, ``generate`` tells ``first``
    where a request is timed.
    """

    def prepare(self, source: Path, folder: Path, settings: Settings) -> Path:
        """Convert the Hugging Face directory ``source``; the path that ``load`` will be given.

        Args:
            source: config, tokenizer and safetensors.
            folder: may be written to; what lies there already is used again.
            settings: of which dtype and form matter.
        """

    def load(self, settings: Settings) -> None:
        """Load the model."""

    def generate(self, request: Request) -> Answer:
        """Generate."""

    def version(self) -> str:
        """Name and version of the library."""


def memory() -> dict[str, int]:
    """MiB of this process: resident now, of that not of files, and the highest ever resident."""
    names = {"VmRSS": "resident", "RssAnon": "anonymous", "VmHWM": "peak"}
    sizes = {}
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").split("\n"):
        name, _, value = line.partition(":")
        if name in names:
            sizes[names[name]] = int(value.split()[0]) // 1024
    return sizes


def answer(engine: Engine, line: dict[str, Any]) -> dict[str, Any]:
    """The answer to one line."""
    verb, values = line["verb"], line["values"]
    began = time.perf_counter()
    if verb == "prepare":
        settings = Settings(**values["settings"])
        path = engine.prepare(Path(values["source"]), Path(values["folder"]), settings)
        return {"path": str(path)}
    if verb == "load":
        engine.load(Settings(**values))
        return {"seconds": time.perf_counter() - began, "version": engine.version(), **memory()}
    request = Request(**values)
    clock = CLOCKS[request.clock]
    started = clock()
    generated = timed(engine, request) if request.timed else engine.generate(request)
    seconds = clock() - started
    first = None if generated.first is None else generated.first - began
    return {"seconds": seconds, "first": first, "tokens": generated.tokens, **memory()}


def timed(engine: Engine, request: Request) -> Answer:
    """The first token of all prompts, and then the others of all together: an engine that begins
    with one prompt while it reads the next would decode less than a batch.
    """
    if not engine.caches_prefixes:
        return engine.generate(request)
    heads = engine.generate(replace(request, lengths=[1] * len(request.prompts))).tokens
    first = time.perf_counter()
    prompts = [prompt + head for prompt, head in zip(request.prompts, heads, strict=True)]
    lengths = [length - 1 for length in request.lengths]
    tails = engine.generate(replace(request, prompts=prompts, lengths=lengths)).tokens
    return Answer([head + tail for head, tail in zip(heads, tails, strict=True)], first)


def serve(engine: Engine, requests: TextIO, write: Callable[[str], object]) -> None:
    """Answer line by line until the stream ends. An error is an answer, too."""
    for line in requests:
        try:
            answered = answer(engine, json.loads(line))
        except Exception as error:
            traceback.print_exc()
            answered = {"error": f"{type(error).__name__}: {error}"}
        write(json.dumps(answered) + "\n")


def main() -> None:
    """Serve the engine that is named."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    module = importlib.import_module(f"benchmarks.peers.{MODULES[sys.argv[1]]}")
    serve(module.PeerEngine(), sys.stdin, answers.write)


if __name__ == "__main__":
    main()
