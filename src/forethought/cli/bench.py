"""Measure speed on this machine: a progress bar, then a table, a plot, and one JSON line last.

forethought bench speculation: each drafter at several draft lengths against plain decoding,
interleaved in one engine, and which of them to use. Without options: n-grams and suffixes on the
embedded reasoner, answering problems that it was not trained on.

forethought bench serving: load on any OpenAI-compatible server, open loop, and its latencies.

forethought bench methods: every method on an embedded model at equal generated tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forethought.cli import machine
from forethought.cli import options as model
from forethought.cli.backend import open_judge
from forethought.cli.options import embedded_draft_model
from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError
from forethought.evaluation.report import count_of

if TYPE_CHECKING:
    from forethought.bench.arrivals import Arrival
    from forethought.bench.report import BenchRow
    from forethought.bench.serving import ServingReport
    from forethought.bench.variant import Variant
    from forethought.evaluation.problems import Problem
    from forethought.llm.llm import LLM

BATCHES = (1, 4, 16, 64)
ROUNDS, OUT = 3, Path("runs/bench")
_FIT_PROMPTS = 64
"""Prompts that a tree is fitted on."""
_RATE, _NUM_REQUESTS, _MAX_TOKENS = 4.0, 64, 192
_FOR_PROMPTS = ("prompts", "rate", "max_tokens", "seed")
"""Options that a trace stands in place of."""
_ROOFLINE = """Decode steps beside their floor: the time to read weights, keys and values, or to
multiply them, at the bandwidth and peak that this machine reaches. Then what the engine takes, in
the network and outside of it. The last line is JSON.

forethought bench roofline --model Qwen/Qwen3-0.6B --batch 1 8 --context 512 2048"""
_AUTO = """Measure forms of the weights and numbers of threads without drafts, then drafters and
draft lengths in the best of them, on the given prompts, and write the fastest configuration as a
file for --config. The last line is JSON.

forethought bench auto --model Qwen/Qwen3-0.6B --prompts mine.txt --allow int8"""
_METHODS = """Every method on an embedded model at about equal generated tokens: accuracy with its
95 % interval, tokens, and paired tests against plain decoding and against the vote. Each row has a
journal in --out: the same command goes on where it was ended. The last line is JSON.

forethought bench methods --task countdown --tokens 800"""
_SERVING = """Load on any OpenAI-compatible server: requests are sent when their time has come,
however many are under way. The key is read from OPENAI_API_KEY. The last line is JSON.

forethought bench serving --url http://127.0.0.1:8000/v1 --rate 8 --goodput ttft:200 tpot:50"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare what can be measured, and its arguments."""
    measured = parser.add_subparsers(dest="measured", metavar="WHAT", required=True)
    options = measured.add_parser(
        "speculation", help="drafters against plain decoding", description=__doc__
    )
    options.formatter_class = argparse.RawDescriptionHelpFormatter
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
        help="instead of timing, find the best static tree of so many tokens for the drafter",
    )
    options.add_argument("--json", action="store_true", help="print the JSON line only")
    options.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where plot and JSON are written (default: runs/bench)",
    )
    options.set_defaults(measure=_measure_speculation)
    _configure_serving(measured)
    _configure_roofline(measured)
    _configure_auto(measured)
    _configure_methods(measured)


def _configure_serving(measured: Any) -> None:
    options = measured.add_parser(
        "serving", help="latencies of a server under load", description=_SERVING
    )
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--url", required=True, help="of the API, as in http://host:8000/v1")
    options.add_argument(
        "--api-model", metavar="NAME", help="of the model there (default: the first it lists)"
    )
    options.add_argument(
        "--api", choices=("chat", "completions"), default="chat", help="(default: chat)"
    )
    options.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="one per line, as text or as JSON objects (default: those of bench speculation)",
    )
    options.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="requests in Mooncake's format, in place of prompts and a rate",
    )
    options.add_argument(
        "--speed", type=float, metavar="F", help="of the trace's clock (default: 1)"
    )
    options.add_argument(
        "--num-requests", type=int, metavar="N", help="(default: 64, or all of the trace)"
    )
    options.add_argument(
        "--rate", type=float, metavar="R", help="requests per second; inf: all at once (default: 4)"
    )
    options.add_argument("--max-tokens", type=int, metavar="N", help="per answer (default: 192)")
    options.add_argument("--seed", type=int, metavar="S", help="of the arrivals (default: 0)")
    options.add_argument(
        "--max-concurrency", type=int, metavar="N", help="requests at once (default: no limit)"
    )
    options.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="targets for goodput in milliseconds, such as ttft:200 tpot:50 e2el:5000",
    )
    options.add_argument(
        "--extra-body",
        metavar="JSON",
        help="""further fields of each request, such as {"method": "dynasor"}""",
    )
    options.add_argument("--json", action="store_true", help="print the JSON line only")
    options.set_defaults(measure=_measure_serving)


def _configure_roofline(measured: Any) -> None:
    options = measured.add_parser(
        "roofline",
        help="what a decode step costs at least, and what it takes",
        description=_ROOFLINE,
    )
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    model.add_model_options(options)
    options.add_argument(
        "--batch", type=int, nargs="+", default=[1, 4, 16], metavar="B", help="(default: 1 4 16)"
    )
    options.add_argument(
        "--context",
        type=int,
        nargs="+",
        default=[128, 512],
        metavar="C",
        help="tokens in the cache of each sequence (default: 128 512)",
    )
    options.add_argument("--rounds", type=int, default=ROUNDS, metavar="R", help="(default: 3)")
    options.add_argument("--json", action="store_true", help="print the JSON line only")
    options.add_argument(
        "--out",
        type=Path,
        default=OUT,
        metavar="DIR",
        help="of plot and JSON (default: runs/bench)",
    )
    options.set_defaults(measure=_measure_roofline)


def _configure_auto(measured: Any) -> None:
    options = measured.add_parser(
        "auto", help="choose threads, weights and drafter by measurement", description=_AUTO
    )
    options.formatter_class = argparse.RawDescriptionHelpFormatter
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
    options.add_argument("--rounds", type=int, default=ROUNDS, metavar="R", help="(default: 3)")
    options.add_argument(
        "--threads", type=int, nargs="+", metavar="N", help="(default: powers of two)"
    )
    options.add_argument(
        "--allow",
        nargs="+",
        default=[],
        choices=["int8", "int4"],
        help="quantised weights that may be chosen; they change the model",
    )
    options.add_argument("--json", action="store_true", help="print the JSON line only")
    options.add_argument(
        "--out", type=Path, default=OUT, metavar="DIR", help="of config.yaml (default: runs/bench)"
    )
    options.set_defaults(measure=_measure_auto)


def _configure_methods(measured: Any) -> None:
    options = measured.add_parser(
        "methods", help="every method at equal generated tokens", description=_METHODS
    )
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    model.add_model_options(options)
    options.add_argument(
        "--task", default="countdown", metavar="NAME", help="countdown (default) or arithmetic"
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
    options.add_argument(
        "--policy", type=Path, metavar="FILE", help="of compute_optimal, which is left out without"
    )
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
    options.set_defaults(measure=_measure_methods)


def run(args: argparse.Namespace) -> int:
    """Measure, and report."""
    measure: Callable[[argparse.Namespace], int] = args.measure
    return measure(args)


def _measure_speculation(args: argparse.Namespace) -> int:
    _check(args)
    model.check_installed()

    from forethought.bench import prompts, variant
    from forethought.bench.speculation import check_batches
    from forethought.evaluation.report import check_installed, make_folder

    texts = (
        prompts.shipped_prompts() if args.prompts is None else prompts.load_prompts(args.prompts)
    )
    if args.fit_tree is not None:
        return _fit_tree(args, texts)
    rounds, folder = args.rounds or ROUNDS, args.out or OUT
    batches = args.batch or [batch for batch in BATCHES if batch <= len(texts)]
    check_batches(batches, len(texts))
    fields = model.llm_args_of(args)
    fields["max_batch_size"] = max(batches)
    configs = variant.settled(
        fields.get("speculative_config", ()),
        fields["max_batch_size"],
        embedded_draft_model() if fields.get("model") is None else None,
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
        fields["num_threads"] = _num_threads(llm)
    fields["dtype"] = _dtype(fields, llm.model_dir)
    _report(args, fields, rows, rounds, folder)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse impossible values, and options that would be ignored."""
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


def _measure_serving(args: argparse.Namespace) -> int:
    from forethought.bench.serving import ServingBench, read_targets
    from forethought.evaluation.report import ProgressBar
    from forethought.scaffolding.settings import OPTIONAL_POSITIVE_INT, validated
    from forethought.scaffolding.workers.routing import url_error

    if reason := url_error(args.url):
        raise ParameterError(
            f"invalid --url {args.url!r}", reason, "Write it as in http://host:8000/v1"
        )
    targets = read_targets(args.goodput)
    validated("max_concurrency", args.max_concurrency, OPTIONAL_POSITIVE_INT)
    arrivals, fields = _arrivals(args), _extra_body(args.extra_body)
    bench = ServingBench(
        args.url,
        args.api_model,
        chat=args.api == "chat",
        api_key=os.environ.get("OPENAI_API_KEY"),
        max_concurrency=args.max_concurrency,
        fields=fields,
    )

    class Bar(ProgressBar):
        def __call__(self) -> None:
            self._bar.set_description("serving", refresh=False)
            self._bar.update()

    with nullcontext(lambda: None) if args.json else Bar(len(arrivals), "request") as bar:
        report = asyncio.run(bench.run(arrivals, targets, bar))
    return _report_serving(args, report)


def _measure_methods(args: argparse.Namespace) -> int:
    from forethought.bench import methods as bench
    from forethought.evaluation.report import make_folder
    from forethought.evaluation.runner import EvaluationProgress, EvaluationRunner
    from forethought.evaluation.tasks import task
    from forethought.methods.compute_optimal import Policy
    from forethought.scaffolding.settings import POSITIVE_INT, validated

    for name in ("problems", "tokens", "in_flight"):
        validated(f"--{name.replace('_', '-')}", getattr(args, name), POSITIVE_INT)
    kind = bench.method_task(args.task)
    policy = None if args.policy is None else Policy.load(args.policy)
    if args.reward_model is None:
        args.reward_model = kind.reward_model
    fields = model.llm_args_of(
        args, model=task(args.task).embedded_model, max_batch_size=2 * args.in_flight
    )
    problems = bench.held_out_problems(args.task, args.problems, args.seed)
    folder = args.out / args.task
    make_folder(folder)
    grader = task(args.task).grader()
    with closing(grader), open_judge(args) as judge:
        made = bench.MethodBench(
            kind,
            args.tokens,
            None if judge is None else judge.step_controller("last"),
            None if judge is None else judge.worker,
            policy,
        )
        recipes = bench.chosen(made.recipes(), args.only, args.against)
        runner = EvaluationRunner(
            model.llm_opener(fields), seed=args.seed, in_flight=args.in_flight, grader=grader
        )
        settings = _methods_settings(args, fields, problems)
        total = len(recipes) * len(problems)
        with nullcontext() if args.json else EvaluationProgress(total) as bar:
            table = bench.MethodTable(runner, problems, kind, settings, _files(args.reward_model))
            against = [] if args.against is None else [args.against]
            rows = table.rows(recipes, folder, is_fresh=args.fresh, bar=bar, against=against)
    line = bench.json_line(rows, machine=_machine(fields), tokens=args.tokens, **settings)
    (folder / "methods.md").write_text(bench.markdown(rows), encoding="utf-8")
    (folder / "methods.json").write_text(line, encoding="utf-8")
    if not args.json:
        print(bench.text(rows))
    print(line, end="")
    return 0


def _methods_settings(
    args: argparse.Namespace, fields: dict[str, Any], problems: Sequence[Problem]
) -> dict[str, Any]:
    """What decides the rows beside their recipes, as plain values."""
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
    """What tells a model from another, for a journal; empty if there is none."""
    from forethought.evaluation.journal import fingerprint
    from forethought.model_dir import find_model_dir

    return {} if directory is None else fingerprint(find_model_dir(directory, revision))


def _arrivals(args: argparse.Namespace) -> list[Arrival]:
    """The requests to send.

    Raises:
        UsageError: a file that cannot be read, a value out of range, or options that exclude
            each other.
    """
    from forethought.bench import prompts
    from forethought.bench.arrivals import load_mooncake, poisson
    from forethought.scaffolding.settings import OPTIONAL_POSITIVE_INT, validated

    validated("num_requests", args.num_requests, OPTIONAL_POSITIVE_INT)
    if args.trace is not None:
        for name in _FOR_PROMPTS:
            if getattr(args, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise ParameterError(
                    f"{option} and --trace exclude each other",
                    "the trace has prompts, lengths and times",
                    f"Leave out {option}; --speed changes the trace's clock",
                )
        return load_mooncake(args.trace, _given(args.speed, 1.0), args.num_requests)
    if args.speed is not None:
        raise ParameterError(
            "--speed is for --trace", "prompts arrive at --rate", "Leave out --speed"
        )
    texts = (
        prompts.shipped_prompts() if args.prompts is None else prompts.load_prompts(args.prompts)
    )
    return poisson(
        texts,
        _given(args.num_requests, _NUM_REQUESTS),
        _given(args.rate, _RATE),
        _given(args.max_tokens, _MAX_TOKENS),
        _given(args.seed, 0),
    )


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def _extra_body(text: str | None) -> dict[str, Any]:
    """The object that ``--extra-body`` holds.

    Raises:
        ParameterError: it is no JSON object.
    """
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ParameterError("--extra-body is no JSON", str(error), "Quote it for the shell") from (
            error
        )
    if not isinstance(value, dict):
        raise ParameterError("--extra-body is no object", f"got {text}", 'Write {"field": value}')
    return value


def _report_serving(args: argparse.Namespace, report: ServingReport) -> int:
    """Print; the status is 1 if no request has been answered."""
    rate = None if args.trace is not None else _given(args.rate, _RATE)
    values = {
        "benchmark": "serving",
        "url": args.url,
        "api": args.api,
        "rate": "inf" if rate is not None and math.isinf(rate) else rate,
        "trace": None if args.trace is None else str(args.trace),
        "max_concurrency": args.max_concurrency,
        "extra_body": _extra_body(args.extra_body),
    } | report.to_dict()
    if not args.json:
        print("\n".join(report.lines()))
    print(json.dumps(values))
    return 0 if report.completed else 1


def _fit_tree(args: argparse.Namespace, texts: list[str]) -> int:
    """Fit a tree to the drafter, and report."""
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
    """Write the files, and print."""
    from forethought.bench.report import recommend, save_plot, table
    from forethought.bench.variant import written

    advice, name = recommend(rows), model.model_label(fields)
    block = written(advice.variant, fields["speculative_config"], advice.max_concurrency)
    report = {
        "benchmark": "speculation",
        "model": name,
        "machine": _machine(fields),
        "max_tokens": args.max_tokens,
        "rounds": rounds,
        "rows": [row.to_dict() for row in rows],
        "recommendation": advice.to_dict() | {"speculative_config": block},
    }
    line = json.dumps(report, ensure_ascii=False)
    (folder / "speculation.json").write_text(line + "\n", encoding="utf-8")
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
    """Lines below the table."""
    where, rounds = report["machine"], report["rounds"]
    device = where["processor"] if where["device"] == "cpu" else where["device"]
    found = [
        f"{report['model']} in {where['dtype']} on {device}, "
        f"{count_of(where['threads'], 'thread')}, torch {where['torch']}; "
        f"medians of {count_of(rounds, 'round')}; "
        "ratio: to plain decoding in the same round; by position: of the decode steps"
    ]
    if any(row.identical_share < 1.0 for row in rows):
        found.append(
            "identical: between nearly equal probabilities rounding decides, and it depends on the "
            "other sequences of the batch and on page boundaries, with drafts or without; the rows "
            "of plain decoding show how often it differs from itself (in float32 hardly ever)"
        )
    if any(row.metrics.synthetic for row in rows):
        found.append("*: synthetic_acceptance is set; the tokens mean nothing")
    return found


def _num_threads(llm: LLM) -> int:
    """Threads that its steps run on."""
    import torch

    chosen = llm.lend("bench").engine.num_threads
    llm.take_back()
    return chosen or torch.get_num_threads()


def _machine(fields: dict[str, Any]) -> dict[str, Any]:
    """Where it was measured."""
    import torch

    device = fields.get("device", "auto")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else device,
        "processor": machine.processor_name(),
        "threads": fields.get("num_threads") or torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": str(fields.get("dtype", "auto")),
    }


def _ignore(variant: Variant, batch: int) -> None:
    """With --json there is no progress bar."""


def _measure_roofline(args: argparse.Namespace) -> int:
    model.check_installed()
    _expect_positive(args, "batch", "context", "rounds")
    fields = model.llm_args_of(args)
    if fields.pop("speculative_config", None):
        raise ParameterError(
            "a drafter has no meaning here",
            "the roofline is that of plain decoding",
            "Measure drafters by forethought bench speculation",
        )
    fields |= {"max_batch_size": max(args.batch)}

    from forethought.bench import roofline
    from forethought.evaluation.report import check_installed, make_folder
    from forethought.llm.llm import LLM
    from forethought.model.device import computing_threads

    check_installed()
    make_folder(args.out)
    with LLM(**fields) as llm:
        lm = llm.lend("bench roofline").engine.runner.lm
        llm.take_back()
        cost = roofline.ModelCost.of(lm)
        fields["num_threads"] = _num_threads(llm)
        with computing_threads(fields["num_threads"]):
            reached = roofline.Machine.measure(lm.device, lm.dtype)
        steps = roofline.measure_steps(llm, args.batch, args.context, args.rounds)
        rows = [roofline.roofline_row(cost, reached, timed) for timed in steps]
        fields["dtype"] = str(lm.dtype).removeprefix("torch.")
    report = {
        "benchmark": "roofline",
        "model": model.model_label(fields),
        "machine": _machine(fields) | asdict(reached),
        "cost": asdict(cost),
        "rows": [row.to_dict() for row in rows],
    }
    line = json.dumps(report, ensure_ascii=False)
    (args.out / "roofline.json").write_text(line + "\n", encoding="utf-8")
    plot = roofline.save_roofline(rows, args.out / "roofline.png", f"roofline of {report['model']}")
    if not args.json:
        print(
            "\n".join(
                [roofline.roofline_table(rows), "", *_roofline_notes(report), f"plot: {plot}"]
            )
        )
    print(line)
    return 0


def _roofline_notes(report: dict[str, Any]) -> list[str]:
    """Lines below the table of ``bench roofline``."""
    where, cost = report["machine"], report["cost"]
    weights = (cost["dense_bytes"] + cost["expert_bytes"]) / 1e6
    return [
        f"milliseconds; {report['model']} in {where['dtype']}, {weights:.1f} MB of weights, "
        f"{cost['kv_bytes']} bytes of KV per token",
        f"this machine reads {where['bytes_per_second'] / 1e9:.1f} GB/s and computes "
        f"{where['operations_per_second'] / 1e9:.0f} GFLOP/s with "
        f"{count_of(where['threads'], 'thread')}",
    ]


def _measure_auto(args: argparse.Namespace) -> int:
    model.check_installed()
    _expect_positive(args, "batch", "rounds", "max_tokens")
    if args.threads is not None:
        _expect_positive(args, "threads")
    fields = model.llm_args_of(args)
    if args.allow and fields.get("quantization"):
        raise ParameterError(
            "--allow and --quantization are two answers to one question",
            "with --quantization the form of the weights is chosen already",
            "Leave one of them out",
        )

    import yaml

    from forethought.bench import auto, prompts, variant
    from forethought.bench.report import table
    from forethought.bench.speculation import check_batches
    from forethought.evaluation.problems import user_prompt
    from forethought.evaluation.report import ProgressBar, check_installed, make_folder

    check_installed()
    texts = (
        prompts.shipped_prompts() if args.prompts is None else prompts.load_prompts(args.prompts)
    )
    check_batches(args.batch, len(texts))
    configs = variant.settled(
        fields.pop("speculative_config", ()),
        max(args.batch),
        embedded_draft_model() if fields.get("model") is None else None,
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
    path = args.out / "config.yaml"
    path.write_text(yaml.safe_dump(choice.config, sort_keys=False), encoding="utf-8")
    name = model.model_label(fields)
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
    return 0


def _expect_positive(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(args, name)
        if any(each < 1 for each in (value if isinstance(value, list) else [value])):
            option = f"--{name.replace('_', '-')}"
            raise ParameterError(f"invalid {option}", f"got {value}", "Give numbers of at least 1")
