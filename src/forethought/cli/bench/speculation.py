"""Drafters against plain decoding, and which of them to use; or the tree that suits a drafter."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forethought.cli import machine
from forethought.cli import options as model
from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError
from forethought.evaluation.report import count_of
from forethought.saved_file import save_text

if TYPE_CHECKING:
    from forethought.bench.report import BenchRow
    from forethought.bench.variant import Variant

BATCHES = (1, 4, 16, 64)
ROUNDS, OUT = 3, Path("runs/bench")
_FIT_PROMPTS = 64
"""Prompts that a tree is fitted on."""


def configure(measured: Any, description: str | None) -> None:
    """Declare the command and its arguments."""
    options = measured.add_parser(
        "speculation", help="drafters against plain decoding", description=description
    )
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    model.add_model_argument(options)
    model.add_model_options(options)
    options.add_argument(
        "--prompts", type=Path, metavar="FILE", help="one per line, as text or as JSON objects"
    )
    options.add_argument(
        "--max-tokens", type=int, default=192, metavar="N", help="of each answer (default: 192)"
    )
    options.add_argument("--rounds", type=int, metavar="R", help="runs of everything (default: 3)")
    options.add_argument(
        "--batch", type=int, nargs="+", metavar="B", help="prompts at once (default: 1 4 16 64)"
    )
    options.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        metavar="K",
        help="draft lengths to try (default: each drafter's longest, its half and its quarter)",
    )
    options.add_argument(
        "--fit-tree",
        type=int,
        metavar="NODES",
        help="instead of timing, find the best static tree of N tokens for the drafter",
    )
    options.add_argument("--json", action="store_true", help="print the JSON line only")
    options.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where plot and JSON are written (default: runs/bench)",
    )
    options.set_defaults(measure=measure)


def measure(args: argparse.Namespace) -> int:
    """Measure, and report."""
    _check(args)
    fields = model.llm_args_of(args)
    model.check_models(fields)
    from forethought.bench import prompts, variant

    texts = prompts.read_prompts(args.prompts)
    model.check_installed()
    from forethought.bench.speculation import check_batches
    from forethought.evaluation.report import check_installed, make_folder

    if args.fit_tree is not None:
        return _fit_tree(args, texts)
    rounds, folder = args.rounds or ROUNDS, args.out or OUT
    batches = args.batch or [batch for batch in BATCHES if batch <= len(texts)]
    check_batches(batches, len(texts))
    fields["max_batch_size"] = max(batches)
    configs = variant.settled(
        fields.get("speculative_config", ()),
        fields["max_batch_size"],
        model.embedded_draft_model() if fields.get("model") is None else None,
    )
    fields["speculative_config"] = configs
    variants = variant.variants_of(configs, args.lengths)
    check_installed()
    make_folder(folder)

    from forethought.bench.report import BenchProgress
    from forethought.bench.speculation import SpeculationBench
    from forethought.evaluation.problems import user_prompt
    from forethought.llm.llm import LLM

    with LLM(**fields) as llm:
        chosen = [user_prompt(llm, text) for text in texts]
        bench = SpeculationBench(llm, chosen, max_tokens=args.max_tokens, rounds=rounds)
        total = bench.num_runs(variants, batches)
        with nullcontext(_ignore) if args.json else BenchProgress(total) as bar:
            rows = bench.run(variants, batches, bar)
        fields["num_threads"] = machine.num_threads(llm)
    fields["dtype"] = _dtype(fields, llm.model_dir)
    _report(args, fields, rows, rounds, folder)
    return 0


def _check(args: argparse.Namespace) -> None:
    SamplingParams(max_tokens=args.max_tokens)
    if args.rounds is not None and args.rounds < 1:
        raise ParameterError("invalid --rounds", f"got {args.rounds}", "Run at least 1")
    if args.fit_tree is None:
        return
    if args.fit_tree < 1:
        raise ParameterError(
            "invalid --fit-tree", f"got {args.fit_tree}", "A tree has at least 1 node"
        )
    for name in ("batch", "lengths", "rounds", "out"):
        if getattr(args, name) is not None:
            raise ParameterError(
                f"--{name} is for timing",
                "--fit-tree decodes once, prints the tree and writes no files",
                f"Leave out --{name}",
            )


def _fit_tree(args: argparse.Namespace, texts: list[str]) -> int:
    from forethought.assets import reasoner_dir
    from forethought.bench.prompts import as_user_turn
    from forethought.bench.tree_fit import drafter_of, fit_static_tree, tree_fit_lines
    from forethought.llm.tokenizer import Tokenizer
    from forethought.model_dir import find_model_dir

    fields = model.llm_args_of(args)
    config = drafter_of(fields.get("speculative_config", ()))
    model_dir = find_model_dir(fields.get("model") or reasoner_dir(), fields.get("revision"))
    tokenizer = Tokenizer.load(model_dir)
    report = fit_static_tree(
        config,
        args.fit_tree,
        model_dir,
        [as_user_turn(text, tokenizer) for text in texts[:_FIT_PROMPTS]],
        args.max_tokens,
        dtype=fields.get("dtype", "auto"),
        device=fields.get("device", "auto"),
    )
    if not args.json:
        print("\n".join(tree_fit_lines(report)))
    print(json.dumps(report))
    return 0


def _dtype(fields: dict[str, Any], model_dir: Path) -> str:
    """Data type of the weights: as given, else as the model's configuration says."""
    if fields.get("dtype", "auto") != "auto":
        return str(fields["dtype"])
    written = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    return str(written.get("dtype") or written.get("torch_dtype") or "auto")


def _report(
    args: argparse.Namespace,
    fields: dict[str, Any],
    rows: list[BenchRow],
    rounds: int,
    folder: Path,
) -> None:
    from forethought.bench.report import recommend, save_plot, table
    from forethought.bench.variant import written

    advice, name = recommend(rows), model.model_label(fields)
    block = written(advice.variant, fields["speculative_config"], advice.max_concurrency)
    report = {
        "benchmark": "speculation",
        "model": name,
        "machine": machine.measured_on(fields),
        "max_tokens": args.max_tokens,
        "rounds": rounds,
        "rows": [row.to_dict() for row in rows],
        "recommendation": advice.to_dict() | {"speculative_config": block},
    }
    line = json.dumps(report, ensure_ascii=False)
    save_text(folder / "speculation.json", line + "\n", "report")
    plot = save_plot(rows, folder / "speculation.png", f"speculation on {name}")
    if not args.json:
        print(f"{table(rows)}\n")
        print("\n".join(_notes(rows, report)))
        print("\n".join(advice.lines()))
        if block is not None:
            print(f"speculative_config: {json.dumps(block)}")
        print(f"plot: {plot}")
    print(line)


def _notes(rows: list[BenchRow], report: dict[str, Any]) -> list[str]:
    where, rounds = report["machine"], report["rounds"]
    device = where["processor"] if where["device"] == "cpu" else where["device"]
    notes = [
        f"{report['model']} in {where['dtype']} on {device}, "
        f"{count_of(where['threads'], 'thread')}, torch {where['torch']}; "
        f"medians of {count_of(rounds, 'round')}; "
        "ratio: to plain decoding in the same round; by position: of the decode steps"
    ]
    if any(row.identical_share < 1.0 for row in rows):
        notes.append(
            "identical: between nearly equal probabilities rounding decides, and it depends on the "
            "other sequences of the batch and on page boundaries, with drafts or without; the rows "
            "of plain decoding show how often it differs from itself (in float32 hardly ever)"
        )
    if any(row.metrics.synthetic for row in rows):
        notes.append("*: synthetic_acceptance is set; the tokens mean nothing")
    return notes


def _ignore(variant: Variant, batch: int) -> None:
    """With --json there is no progress bar."""
