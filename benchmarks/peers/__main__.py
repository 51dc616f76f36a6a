"""Every inference engine for CPUs that is installed, beside ours, on the same models.

    python -m benchmarks.peers --openvino PY --llamacpp PY --vllm PY
    python -m benchmarks.peers --openvino PY --models 150m --cases decode --quantised 8 --rounds 3
    python -m benchmarks.peers --llamacpp PY --gguf FILE --gguf-types q4_k_m q8_0 --cases decode
    python -m benchmarks.peers --llamacpp PY --models hybrid100m --quantised 8

``PY`` is the interpreter of an environment that has the engine: ``openvino-genai`` with
``optimum-intel``, ``llama-cpp-python`` with ``gguf``, vLLM's CPU build. None is needed: an
engine that is not given is left out. Each engine runs in a process of its own, with as many
threads, weights and KV cache in the same dtype (``--dtype``) and a KV cache for as many tokens;
``--quantised`` adds weights in 8 or 4 bits: int8, w8a8, int4, w4a8 (ours), int8, int4 (OpenVINO),
Q8_0, Q4_0 (llama.cpp). The models have random weights in the shape of a Qwen3, the hybrids (with
recurrent layers) in that of a Qwen3.5, and are made here; ``reasoner`` is the embedded one. With
``--gguf`` the models are that file, or what llama.cpp makes of it (``--gguf-types``), for all
engines that read it, and ratios are to llama.cpp; ``--gguf 600m`` is a file of the random model.

All get the same requests, in turns within a round, so that other load of the machine falls on all.
Where it is heavy, ``--threads 1 --clock processor`` counts seconds that the processor spent.
Ratios are medians over the rounds of speeds relative to ``generate`` of transformers, or to this
engine where ``--transformers ''`` leaves that out. *Agreement* is the share of the tokens before
the first that differs from those of what ratios are to.

=============  ==================================================================================
``decode``     tokens/s of greedy decoding, prompts of 128 tokens, by batch size
``first``      milliseconds to the first token after a prompt of 512
``mixed``      tokens/s of ``--mixed`` requests, prompts of 16 to 256 tokens, answers of 16 to 192
``context``    tokens/s of a long prompt, and of decoding after it
``speculate``  tokens/s of the reasoner on held-out questions: plain, prompt lookup, a draft model
=============  ==================================================================================

Prints tables and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.peers import cases
from benchmarks.peers.cases import Figure, Prompts
from benchmarks.peers.contestant import BASE, Contestant, Entry, Failed, prepared
from benchmarks.peers.random_models import SHAPES, save_random_model
from benchmarks.peers.worker import CLOCKS, DRAFT_MODEL, LOOKUP, PLAIN, Request, Settings
from benchmarks.report import machine

from forethought.assets import drafter_dir, reasoner_dir
from forethought.bench.prompts import as_user_turn, shipped_prompts
from forethought.cli.machine import instruction_sets, num_cores
from forethought.evaluation.report import aligned
from forethought.gguf.file import GgufFile
from forethought.llm.tokenizer import Tokenizer

REASONER = "reasoner"
CASES = ("decode", "first", "mixed", "context", "speculate")
SPECULATING = ("transformers", "forethought", "openvino", "vllm")
"""Engines that are asked to speculate."""
QUANTISED = {
    8: {"forethought": ["int8", "w8a8"], "openvino": ["int8"], "llamacpp": ["q8_0"]},
    4: {"forethought": ["int4", "w4a8"], "openvino": ["int4"], "llamacpp": ["q4_0"]},
}
"""Forms of the weights by their bits."""
GGUF_ENGINES = ("llamacpp", "forethought", "openvino")
"""Engines that read GGUF files, the first one that ratios are to."""
MAX_LEN = 1024
"""Tokens of a sequence in all cases but ``context``."""


class Session:
    """All contestants with one model.

    Args:
        args: of the command.
        model: its name.
        sources: its directory, and that of its draft model where there is one.
        folder: of converted models and of what engines print.
    """

    def __init__(
        self, args: argparse.Namespace, model: str, sources: list[Path], folder: Path
    ) -> None:
        self.args, self.model, self.sources, self.folder = args, model, sources, folder
        self.contestants: list[Contestant] = []
        self.figures: list[Figure] = []
        self.memory: list[dict[str, Any]] = []

    @contextmanager
    def loaded(self, entries: Sequence[Entry], settings: Settings) -> Iterator[None]:
        """With the model loaded by every contestant that can."""
        try:
            for entry in entries:
                self._load(entry, settings, is_base=entry == entries[0])
            yield
            self.memory += [
                {
                    "model": self.model,
                    "max_batch": settings.max_batch,
                    "contestant": peer.label,
                    "version": peer.version,
                    "loaded": peer.loaded,
                    "peak": peer.peak,
                }
                for peer in self.contestants
            ]
        finally:
            for contestant in self.contestants:
                contestant.close()
            self.contestants = []

    def _load(self, entry: Entry, settings: Settings, is_base: bool) -> None:
        contestant = None
        try:
            settings = Settings(**{**vars(settings), "form": entry.form})
            paths = prepared(entry, self.sources, self.folder, settings)
            draft = paths[1] if len(paths) > 1 else ""
            settings = Settings(**{**vars(settings), "model": paths[0], "draft": draft})
            contestant = Contestant(entry, settings.threads, self.folder / f"{entry.engine}.log")
            contestant.load(settings)
            self.contestants.append(contestant)
        except Failed as failure:
            say(f"{entry.label} on {self.model}: {failure}")
            if contestant is not None:
                contestant.close()
            if is_base:
                raise SystemExit(f"{entry.label} did not start; see {self.folder}") from None

    def measure(
        self, case: str, requests: Sequence[Request], how: cases.Measure, *, num_warm: int = 1
    ) -> None:
        """Run the rounds, and keep and print the figures."""
        speculating = any(request.way != PLAIN for request in requests)
        contestants = [
            contestant
            for contestant in self.contestants
            if not speculating or contestant.entry.engine in SPECULATING
        ]
        requests = [replace(request, clock=self.args.clock) for request in requests]
        figures = cases.run(contestants, requests, how, self._failed, num_warm=num_warm)
        for unit, rows in figures.items():
            name = case if unit == "tokens/s" else f"{case} {unit}"
            for label, (value, ratio, agreement) in rows.items():
                figure = Figure(self.model, name, label, value, ratio, agreement)
                self.figures.append(figure)
                say(f"{self.model:<10}{name:<24}{label:<18}{_cell(figure)}")

    def _failed(self, contestant: Contestant, failure: Failed) -> None:
        say(f"{contestant.label} on {self.model}: {failure}")
        is_base = contestant is self.contestants[0]
        contestant.close()
        self.contestants.remove(contestant)
        if is_base:
            raise SystemExit(f"{contestant.label} failed; see {self.folder}")


def say(text: str) -> None:
    """Progress, beside the tables."""
    print(text, file=sys.stderr, flush=True)


def run_random_model(args: argparse.Namespace, name: str, folder: Path) -> Session:
    """All cases but speculation, on random weights."""
    source = save_random_model(name, folder / f"{name}-{args.dtype}", args.dtype)
    session = Session(args, name, [source], folder)
    run_cases(session, chosen_entries(args), SHAPES[name]["vocab_size"])
    return session


def gguf_of(args: argparse.Namespace, name: str, folder: Path) -> Path:
    """A GGUF file, or the model of random weights that is meant instead of one."""
    if name not in SHAPES:
        return Path(name)
    source = save_random_model(name, folder / f"{name}-bfloat16", "bfloat16")
    settings = Settings("", "bfloat16", "", args.threads)
    (path,) = prepared(Entry("llamacpp", args.llamacpp), [source], folder, settings)
    return Path(path)


def run_gguf(args: argparse.Namespace, name: str, kind: str, folder: Path) -> Session:
    """The same on a GGUF file, or on what llama.cpp makes of it in another type of blocks."""
    entries = [Entry(entry.engine, entry.python, "") for entry in chosen_entries(args)]
    entries = sorted(
        {entry for entry in entries if entry.engine in GGUF_ENGINES},
        key=lambda entry: GGUF_ENGINES.index(entry.engine),
    )
    if entries[:1] != [Entry("llamacpp", args.llamacpp)]:
        raise SystemExit("--gguf needs --llamacpp, which ratios are to")
    file = gguf_of(args, name, folder)
    if kind:
        settings = Settings("", args.dtype, kind, args.threads)
        (path,) = prepared(replace(entries[0], form=kind), [file], folder, settings)
        file = Path(path)
    session = Session(args, f"{Path(name).stem} {kind}".strip(), [file], folder)
    run_cases(session, entries, GgufFile.open([file]).tensors["token_embd.weight"].shape[0])
    return session


def run_cases(session: Session, entries: Sequence[Entry], vocab_size: int) -> None:
    """All cases but speculation."""
    args = session.args
    prompts, count = Prompts(vocab_size), args.rounds + 1
    if {"decode", "first", "mixed"} & set(args.cases):
        settings = Settings("", args.dtype, "", args.threads, max(args.batches), MAX_LEN)
        with session.loaded(entries, settings):
            if "decode" in args.cases:
                for batch in args.batches:
                    fixed = [prompts.fixed(batch, args.prompt, args.new) for _ in range(count)]
                    session.measure(f"batch {batch}", fixed, cases.throughput)
            if "first" in args.cases:
                short = [prompts.fixed(1, cases.FIRST_PROMPT, 1) for _ in range(count)]
                session.measure("512 tokens,", short, cases.first_token)
            if "mixed" in args.cases:
                for size in args.mixed:
                    mixed = [prompts.mixed(size) for _ in range(count)]
                    session.measure(f"{size} mixed", mixed, cases.throughput)
    if "context" in args.cases:
        run_contexts(session, entries, prompts)


def run_contexts(session: Session, entries: Sequence[Entry], prompts: Prompts) -> None:
    """Long prompts, and decoding after them."""
    args = session.args
    longest, most = max(args.contexts) + cases.NUM_BEHIND, max(args.context_batches)
    with session.loaded(entries, Settings("", args.dtype, "", args.threads, most, longest)):
        for context, batch in product(args.contexts, args.context_batches):
            long = [
                prompts.fixed(batch, context, cases.NUM_BEHIND, timed=True)
                for _ in range(args.context_rounds)
            ]
            name = f"context {context}," if batch == 1 else f"{batch} of context {context},"
            session.measure(name, long, cases.behind_context, num_warm=0)


def run_reasoner(args: argparse.Namespace, folder: Path) -> Session:
    """Speculation with the embedded reasoner, with its draft model."""
    session = Session(args, REASONER, [reasoner_dir(), drafter_dir()], folder)
    ways = [PLAIN, LOOKUP, DRAFT_MODEL]
    requests = list(question_requests(args))
    settings = Settings(
        *("", args.dtype, "", args.threads, 1, MAX_LEN), ways=ways, num_looked_up=args.looked_up
    )
    with session.loaded(chosen_entries(args), settings):
        for way in ways:
            session.measure(way, cases.with_way(requests, way), cases.throughput)
    return session


def question_requests(args: argparse.Namespace) -> Iterator[Request]:
    """Held-out questions of the reasoner, other ones in each round, one after the other."""
    tokenizer = Tokenizer.load(reasoner_dir())
    eos = json.loads((reasoner_dir() / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
    questions = shipped_prompts()
    for number in range(args.rounds + 1):
        batch = questions[number * args.questions : (number + 1) * args.questions]
        prompts = [as_user_turn(question, tokenizer) for question in batch]
        yield Request(prompts, [args.answer] * len(prompts), eos=eos)


def chosen_entries(args: argparse.Namespace) -> list[Entry]:
    """Who takes part, transformers first."""
    pythons = {
        BASE: args.transformers,
        "forethought": sys.executable,
        "vllm": args.vllm,
        "openvino": args.openvino,
        "llamacpp": args.llamacpp,
    }
    entries = [Entry(engine, python) for engine, python in pythons.items() if python]
    return entries + [
        Entry(entry.engine, entry.python, form)
        for bits in args.quantised
        for entry in entries
        for form in QUANTISED[bits].get(entry.engine, ())
    ]


def tables(figures: Sequence[Figure], memory: Sequence[dict[str, Any]]) -> str:
    """One table per model: contestants down, cases across; speeds with their ratios."""
    blocks = []
    for model in dict.fromkeys(figure.model for figure in figures):
        mine = [figure for figure in figures if figure.model == model]
        names = list(dict.fromkeys(figure.case for figure in mine))
        lines = [(model, *names, "agreement")]
        for label in dict.fromkeys(figure.contestant for figure in mine):
            row = {figure.case: figure for figure in mine if figure.contestant == label}
            cells = [_cell(row[name]) if name in row else "-" for name in names]
            share = min(figure.agreement for figure in row.values())
            lines.append((label, *cells, f"{share:.1%}"))
        blocks.append(aligned(lines))
    lines = [("memory, MiB", "model", "batch", "loaded", "not of files", "peak")]
    for row in memory:
        sizes = (row["loaded"]["resident"], row["loaded"]["anonymous"], row["peak"])
        lines.append((row["contestant"], row["model"], str(row["max_batch"]), *map(str, sizes)))
    return "\n\n".join([*blocks, aligned(lines, left_columns=(0, 1))])


def _cell(figure: Figure) -> str:
    ratio = f" ({figure.ratio:.2f})"
    if figure.case.endswith("first"):
        return f"{1000 / figure.value:.0f} ms{ratio}"
    return f"{figure.value:.1f}{ratio}"


def parsed() -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--transformers", metavar="PY", default=sys.executable)
    for engine in ("vllm", "openvino", "llamacpp"):
        parser.add_argument(f"--{engine}", metavar="PY", help=f"environment that has {engine}")
    parser.add_argument("--models", nargs="+", choices=[*SHAPES, REASONER], default=["15m", "150m"])
    parser.add_argument(
        "--gguf", nargs="+", default=[], metavar="FILE", help="or a model of --models, as a file"
    )
    parser.add_argument(
        "--gguf-types",
        nargs="+",
        default=[""],
        metavar="TYPE",
        help="mixtures that llama.cpp makes of each file, such as q4_k_m",
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--quantised",
        nargs="+",
        type=int,
        choices=QUANTISED,
        default=[],
        help="bits of quantised weights that are measured beside the dtype",
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 2048, 4096, 8192])
    parser.add_argument("--context-batches", nargs="+", type=int, default=[1])
    parser.add_argument("--context-rounds", type=int, default=1)
    parser.add_argument("--mixed", nargs="+", type=int, default=[64], metavar="REQUESTS")
    parser.add_argument("--questions", type=int, default=4, help="of the reasoner, per round")
    parser.add_argument("--answer", type=int, default=256, help="most tokens of its answers")
    parser.add_argument(
        "--looked-up", type=int, default=3, help="draft tokens of prompt lookup, in all engines"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="of all figures")
    parser.add_argument("--cache", type=Path, help="directory in which converted models stay")
    args = parser.parse_args()
    if args.clock == "processor" and (args.threads > 1 or "context" in args.cases):
        parser.error("--clock processor: one thread, and no case that times the first token alone")
    return args


def main() -> None:
    """Measure and report."""
    args = parsed()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    sessions = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.cache or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for name in args.gguf:
            sessions += [run_gguf(args, name, kind, folder) for kind in args.gguf_types]
        for model in () if args.gguf else args.models:
            if model != REASONER:
                sessions.append(run_random_model(args, model, folder))
            elif "speculate" in args.cases:
                sessions.append(run_reasoner(args, folder))
    figures = [figure for session in sessions for figure in session.figures]
    memory = [row for session in sessions for row in session.memory]
    print(tables(figures, memory))
    plain = (int, str, list)
    report = {
        "benchmark": "peers",
        "machine": machine(),
        "instruction_sets": instruction_sets(),
        **{name: value for name, value in vars(args).items() if isinstance(value, plain)},
        "gguf": [Path(name).name for name in args.gguf],
        "versions": dict(sorted({(row["contestant"], row["version"]) for row in memory})),
        "memory": memory,
        "rows": [figure.to_dict() for figure in figures],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
