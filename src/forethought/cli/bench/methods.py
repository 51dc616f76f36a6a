"""Every method on an embedded model at about equal generated tokens: accuracy with its
95 % interval, tokens, and paired tests against plain decoding and against the vote. Each row has a
journal in --out: the same command goes on where it was ended. The last line is JSON.

forethought bench methods --task countdown --tokens 800
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forethought.cli import machine
from forethought.cli import options as model
from forethought.cli.judge import check_reward_model, open_local_judge
from forethought.errors import ParameterError
from forethought.saved_file import check_file, check_folder, save_text
from forethought.scaffolding.reward_controller import NativeRewardController

if TYPE_CHECKING:
    from forethought.bench.method_tasks import MethodTask
    from forethought.bench.methods import MethodBench
    from forethought.evaluation.problems import Problem
    from forethought.evaluation.recipe import Recipe
    from forethought.methods.parts.difficulty import Policy


def configure(measured: Any) -> None:
    """Declare the command and its arguments."""
    options = measured.add_parser(
        "methods",
        help="every method on the same problems, with samples for about equal tokens",
        description=__doc__,
    )
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    model.add_model_argument(options)
    model.add_model_options(options)
    options.add_argument(
        "--task",
        default="countdown",
        metavar="NAME",
        help="countdown (default), arithmetic, instruct, facts or context",
    )
    options.add_argument(
        "--problems", type=int, default=300, metavar="N", help="held-out problems (default: 300)"
    )
    options.add_argument(
        "--tokens",
        type=int,
        default=800,
        metavar="N",
        help="generated per problem, about (default: 800)",
    )
    options.add_argument(
        "--only",
        metavar="A,B,...",
        help="only rows whose names begin so, plain decoding and the vote included",
    )
    options.add_argument(
        "--against",
        metavar="ROW",
        help="one more row that all others are compared with, as best_of_n@4",
    )
    options.add_argument(
        "--reward-model",
        metavar="DIR",
        help="scores steps and answers (default: the task's embedded one, else confidence)",
    )
    _add_policies(options)
    options.add_argument(
        "--in-flight", type=int, default=64, metavar="N", help="chains at once (default: 64)"
    )
    options.add_argument("--seed", type=int, default=0, help="(default: 0)")
    options.add_argument("--fresh", action="store_true", help="begin anew: forget the journals")
    options.add_argument("--json", action="store_true", help="print the JSON line only")
    options.add_argument(
        "--out",
        type=Path,
        default=Path("runs/methods"),
        metavar="DIR",
        help="of journals and table (default: runs/methods)",
    )
    options.set_defaults(measure=measure)


def _add_policies(options: argparse.ArgumentParser) -> None:
    options.add_argument(
        "--policy", type=Path, metavar="FILE", help="of compute_optimal, which is left out without"
    )
    options.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="fit a policy of compute_optimal on as many other problems, and save it",
    )


def measure(args: argparse.Namespace) -> int:
    """Measure, and report."""
    from forethought.bench import method_tasks as data
    from forethought.bench import methods as bench
    from forethought.bench.instruct_methods import bench_of
    from forethought.evaluation.report import make_folder
    from forethought.evaluation.runner import EvaluationProgress, EvaluationRunner
    from forethought.methods.parts.difficulty import Policy
    from forethought.scaffolding.settings import POSITIVE_INT, validated

    for name in ("problems", "tokens", "in_flight"):
        validated(f"--{name.replace('_', '-')}", getattr(args, name), POSITIVE_INT)
    kind = data.method_task(args.task)
    check_folder(args.out)
    if args.calibrate is not None:
        check_file(args.calibrate, "policy")
        _check_calibration(args, kind.verifier is not None)
    policy = None if args.policy is None else Policy.load(args.policy)
    if args.reward_model is None:
        args.reward_model = kind.reward_model
    fields = model.llm_args_of(args, model=kind.model, max_batch_size=2 * args.in_flight)
    model.check_models(fields)
    check_reward_model(args.reward_model)
    _check_rows(args, kind, policy)
    drawn = data.held_out_problems if args.calibrate is None else data.calibration_problems
    problems = drawn(args.task, args.problems, args.seed)
    folder = args.out / (args.task if args.calibrate is None else f"{args.task}-calibration")
    make_folder(folder)
    grader = kind.grader()
    reward = args.reward_model
    judging = nullcontext() if reward is None else open_local_judge(reward)
    with closing(grader), judging as judge:
        controller = None if judge is None else judge.step_controller("last")
        worker = None if judge is None else judge.worker
        method_bench = bench_of(args.task)(kind, args.tokens, controller, worker, policy)
        recipes = _recipes(args, method_bench)
        runner = EvaluationRunner(
            model.llm_opener(fields), seed=args.seed, in_flight=args.in_flight, grader=grader
        )
        settings = _settings(args, fields, problems)
        total = len(recipes) * len(problems)
        with nullcontext() if args.json else EvaluationProgress(total) as bar:
            table = bench.MethodComparison(
                runner, problems, kind, settings, _files(args.reward_model)
            )
            against = [] if args.against is None else [args.against]
            rows = table.rows(recipes, folder, is_fresh=args.fresh, bar=bar, against=against)
    measured_on = machine.measured_on(fields)
    line = bench.json_line(
        rows, method_bench.left_out, machine=measured_on, tokens=args.tokens, **settings
    )
    save_text(folder / "methods.md", bench.markdown(rows), "report")
    save_text(folder / "methods.json", line, "report")
    if not args.json:
        print(bench.text(rows, method_bench.left_out))
    print(line, end="")
    if args.calibrate is not None:
        bench.fit_policy(rows, table.journals).save(args.calibrate)
    return 0


def _check_rows(args: argparse.Namespace, kind: MethodTask, policy: Policy | None) -> None:
    """Raises UnknownNameError for a name of no row, before the reward model is loaded."""
    from forethought.bench.instruct_methods import bench_of

    judge = None if args.reward_model is None else NativeRewardController()
    _recipes(args, bench_of(args.task)(kind, args.tokens, judge, None, policy))


def _recipes(args: argparse.Namespace, method_bench: MethodBench) -> list[Recipe]:
    """Of the rows; raises UnknownNameError for a name of none."""
    from forethought.bench import methods as bench

    if args.calibrate is not None:
        return method_bench.calibration_recipes()
    return bench.chosen(method_bench.recipes(), args.only, args.against)


def _check_calibration(args: argparse.Namespace, has_checker: bool) -> None:
    """Raises ParameterError for options that a calibration does not use, or without an exact
    checker.
    """
    if not has_checker:
        raise ParameterError(
            f"--calibrate cannot be used with --task {args.task}",
            "it has no exact checker, whose result on a probe says how difficult a problem is",
            "Use --task countdown",
        )
    names = [name for name in ("only", "against", "policy") if getattr(args, name) is not None]
    if names:
        raise ParameterError(
            f"--calibrate cannot be used with --{names[0]}",
            "it runs the rows that a policy chooses from",
            f"Leave --{names[0]} out",
        )


def _settings(
    args: argparse.Namespace, fields: dict[str, Any], problems: Sequence[Problem]
) -> dict[str, Any]:
    """What decides the results beside the recipes, as plain values."""
    from forethought.evaluation.journal import problems_hash

    return {
        "task": args.task,
        "model": model.model_label(fields),
        "files": _files(fields["model"], fields.get("revision")),
        "dtype": str(fields.get("dtype", "auto")),
        "problems": problems_hash(problems),
        "num_problems": len(problems),
        "seed": args.seed,
    }


def _files(directory: Any, revision: str | None = None) -> dict[str, Any]:
    """Identifies a model in a journal; empty if there is none."""
    from forethought.evaluation.journal import fingerprint
    from forethought.model_dir import find_model_dir

    return {} if directory is None else fingerprint(find_model_dir(directory, revision))
