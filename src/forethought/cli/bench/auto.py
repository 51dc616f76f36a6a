"""Measure forms of the weights and numbers of threads without drafts, then drafters and
draft lengths in the best of them, on the given prompts, and write the fastest configuration as a
file for --config. The last line is JSON.

forethought bench auto Qwen/Qwen3-0.6B --prompts mine.txt --allow int8
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forethought.cli import options as model
from forethought.config.quantization import QUANTIZATIONS
from forethought.errors import ParameterError
from forethought.saved_file import save_text

if TYPE_CHECKING:
    from forethought.bench.auto import Choice


def configure(measured: Any) -> None:
    """Declare the command and its arguments."""
    options = measured.add_parser(
        "auto", help="choose threads, weights and drafter by measurement", description=__doc__
    )
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    model.add_model_argument(options)
    model.add_model_options(options)
    options.add_argument(
        "--prompts", type=Path, metavar="FILE", help="one per line, as text or as JSON objects"
    )
    options.add_argument(
        "--batch", type=int, nargs="+", default=[1, 4], metavar="B", help="(default: 1 4)"
    )
    options.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="of each answer (default: 128)"
    )
    options.add_argument("--rounds", type=int, default=3, metavar="R", help="(default: 3)")
    options.add_argument(
        "--threads", type=int, nargs="+", metavar="N", help="(default: powers of two)"
    )
    options.add_argument(
        "--allow",
        nargs="+",
        default=[],
        choices=QUANTIZATIONS,
        help="quantised weights that may be chosen; they change the model",
    )
    options.add_argument("--json", action="store_true", help="print the JSON line only")
    options.add_argument(
        "--out",
        type=Path,
        default=Path("runs/bench"),
        metavar="DIR",
        help="of config.yaml (default: runs/bench)",
    )
    options.set_defaults(measure=measure)


def measure(args: argparse.Namespace) -> int:
    """Measure, and report."""
    fields = _fields(args)
    model.check_models(fields)
    from forethought.bench import prompts, variant

    texts = prompts.read_prompts(args.prompts)
    model.check_installed()
    from forethought.bench import auto
    from forethought.bench.speculation import check_batches
    from forethought.evaluation.problems import user_prompt
    from forethought.evaluation.report import ProgressBar, check_installed, make_folder

    check_installed()
    check_batches(args.batch, len(texts))
    configs = variant.settled(
        fields.pop("speculative_config", ()),
        max(args.batch),
        model.embedded_draft_model() if fields.get("model") is None else None,
    )
    make_folder(args.out)
    bench = auto.AutoBench(
        fields,
        configs,
        quantizations=args.allow,
        threads=args.threads,
        batches=args.batch,
        max_tokens=args.max_tokens,
        rounds=args.rounds,
    )

    class Bar(ProgressBar):
        def __call__(self, doing: str) -> None:
            self._bar.set_description(doing, refresh=False)
            self._bar.update()

    with nullcontext(lambda doing: None) if args.json else Bar(bench.num_runs, "run") as bar:
        choice = bench.run(lambda llm: [user_prompt(llm, text) for text in texts], bar)
    _report(args, model.model_label(fields), choice)
    return 0


def _fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``LlmArgs``; refuses impossible values and options that exclude each other."""
    model.expect_positive(args, "batch", "rounds", "max_tokens")
    if args.threads is not None:
        model.expect_positive(args, "threads")
    fields = model.llm_args_of(args)
    if args.allow and fields.get("quantization"):
        raise ParameterError(
            "--allow and --quantization are two answers to one question",
            "with --quantization the form of the weights is chosen already",
            "Leave one of them out",
        )
    return fields


def _report(args: argparse.Namespace, name: str, choice: Choice) -> None:
    import yaml

    from forethought.bench import auto
    from forethought.bench.report import table

    path = args.out / "config.yaml"
    save_text(path, yaml.safe_dump(choice.config, sort_keys=False), "configuration")
    plot = auto.save_auto_plot(choice, args.batch, args.out / "auto.png", f"choices for {name}")
    report = {
        "benchmark": "auto",
        "model": name,
        "forms": [row.to_dict() for row in choice.forms],
        "rows": [row.to_dict() for row in choice.rows],
        "config": choice.config,
    }
    if not args.json:
        print(f"{auto.form_table(choice.forms, args.batch)}\n\n{table(choice.rows)}\n")
        print("\n".join(choice.advice.lines()))
        print(f"plot: {plot}")
        print(f"written: {path}; use it as --config {path}")
    print(json.dumps(report, ensure_ascii=False))
