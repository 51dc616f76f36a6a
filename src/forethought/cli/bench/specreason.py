"""SpecReason beside its base model and its small model alone, on held-out problems of an embedded
task: accuracy with its 95 % interval, time of a whole problem at batch 1, and a paired test. Steps
are lines, scored by the base model's own probability of them. The last line is JSON.

forethought bench specreason --base runs/large/model --small forethought/countdown
"""

from __future__ import annotations

import argparse
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from forethought.cli import machine
from forethought.cli import options as model
from forethought.model_dir import checked_model_dir
from forethought.saved_file import save_text


def configure(measured: Any) -> None:
    """Declare the command and its arguments."""
    options = measured.add_parser(
        "specreason", help="SpecReason beside its two models alone", description=__doc__
    )
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument(
        "--base", type=model.model_path, required=True, metavar="DIR|ID", help="the base model"
    )
    options.add_argument(
        "--small", type=model.model_path, required=True, metavar="DIR|ID", help="drafts the steps"
    )
    options.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    options.add_argument(
        "--task", default="countdown", metavar="NAME", help="countdown (default) or arithmetic"
    )
    options.add_argument(
        "--problems", type=int, default=300, metavar="N", help="held-out problems (default: 300)"
    )
    options.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="of all three (default: 0.8)"
    )
    options.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of specreason, as score_threshold=0.05",
    )
    options.add_argument("--seed", type=int, default=0, help="of the problems (default: 0)")
    options.add_argument("--json", action="store_true", help="print the JSON line only")
    options.add_argument(
        "--out",
        type=Path,
        default=Path("runs/bench"),
        metavar="DIR",
        help="of specreason.json (default: runs/bench)",
    )
    options.set_defaults(measure=measure)


def measure(args: argparse.Namespace) -> int:
    """Measure, and report."""
    model.expect_positive(args, "problems")
    from forethought import methods
    from forethought.bench import method_tasks as tasks
    from forethought.evaluation.report import ProgressBar, make_folder
    from forethought.evaluation.tasks import task
    from forethought.methods.specreason import SpecReasonController

    class Bar(ProgressBar):
        def __call__(self) -> None:
            self._bar.update()

    for directory in (args.base, args.small):
        checked_model_dir(directory)
    kind = tasks.method_task(args.task)
    settings = {"scorer": "likelihood", "step_end": "\n", **model.parse_settings(args.set)}
    controller = methods.create("specreason", **settings)
    assert isinstance(controller, SpecReasonController)
    problems = tasks.held_out_problems(args.task, args.problems, args.seed)
    model.check_installed()
    from forethought.bench import specreason as bench
    from forethought.workers.local import EngineWorker

    make_folder(args.out)
    fields: dict[str, Any] = {} if args.dtype == "auto" else {"dtype": args.dtype}
    fields["kv_cache_config"] = {"enable_block_reuse": False}  # each run prefills its prompt
    params = {"temperature": args.temperature, "max_tokens": kind.max_tokens}
    with (
        closing(task(args.task).grader()) as grader,
        EngineWorker.init_with_new_llm(args.base, **fields) as base,
        EngineWorker.init_with_new_llm(args.small, **fields) as small,
        nullcontext() if args.json else Bar(len(problems), "problem") as bar,
    ):
        two = bench.TwoModels(base, small, controller, grader, params)
        attempts = two.solve(problems, bar or (lambda: None))
    table = bench.rows(attempts)
    line = bench.json_line(
        table,
        machine=machine.measured_on(fields),
        base=str(args.base),
        small=str(args.small),
        task=args.task,
        problems=len(problems),
        temperature=args.temperature,
        settings=settings,
    )
    save_text(args.out / "specreason.json", line, "report")
    if not args.json:
        print(bench.text(table))
    print(line, end="")
    return 0
