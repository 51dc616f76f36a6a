"""Replicas simulated under the requests of a trace: how many a load needs, and what placing
and moving sequences wins. Step times are measured on the model first, or read from a file. The same
arguments give the same figures. The last line is JSON.

forethought bench cluster --trace load.jsonl --replicas 2 4 8 --goodput ttft:500 tpot:50

forethought bench cluster Qwen/Qwen3-0.6B --trace load.jsonl --save-step-times qwen.json

forethought bench cluster --step-times qwen.json --trace load.jsonl --replicas 100 1000

forethought bench cluster --step-times qwen.json --trace load.jsonl --replicas 8 \
    --prefill-replicas auto --goodput ttft:500 tpot:50
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forethought.cli import machine
from forethought.cli import options as model
from forethought.errors import ParameterError, UnknownNameError, UsageError
from forethought.saved_file import check_file

if TYPE_CHECKING:
    from forethought.bench.cluster_simulation import SimulationResult
    from forethought.bench.step_times import MeasuredEngine

_BLOCK_SIZE, _BANDWIDTH, _AUTO = 512, 1.0, "auto"


def configure(measured: Any) -> None:
    """Declare the command and its arguments."""
    options = measured.add_parser(
        "cluster", help="replicas simulated under a trace", description=__doc__
    )
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    model.add_model_argument(options)
    model.add_model_options(options)
    _add_trace(options)
    _add_step_times(options)
    options.add_argument(
        "--replicas", type=int, nargs="+", default=[1, 2, 4, 8], help="(default: 1 2 4 8)"
    )
    options.add_argument(
        "--prefill-replicas",
        nargs="+",
        default=["0"],
        metavar="M",
        help="of the replicas, compute long prompts for the others; several numbers are compared "
        "with each other, and auto compares some with one pool (default: 0)",
    )
    options.add_argument(
        "--policies",
        nargs="+",
        metavar="NAME",
        help="round_robin, placement, rebalancing (default: all)",
    )
    options.add_argument(
        "--bandwidth",
        type=float,
        default=_BANDWIDTH,
        metavar="GB",
        help="gigabytes per second between replicas, for moves (default: 1)",
    )
    options.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="targets for goodput in milliseconds, such as ttft:200 tpot:50 e2el:5000",
    )
    options.add_argument("--json", action="store_true", help="print the JSON line only")
    options.set_defaults(measure=measure)


def _add_trace(options: argparse.ArgumentParser) -> None:
    options.add_argument(
        "--trace", type=Path, required=True, metavar="FILE", help="requests in Mooncake's format"
    )
    options.add_argument(
        "--speed", type=float, default=1.0, metavar="F", help="of the trace's clock (default: 1)"
    )
    options.add_argument(
        "--num-requests", type=int, metavar="N", help="the first ones only (default: all)"
    )
    options.add_argument(
        "--block-size",
        type=int,
        default=_BLOCK_SIZE,
        metavar="N",
        help=f"tokens per id in hash_ids (default: {_BLOCK_SIZE})",
    )


def _add_step_times(options: argparse.ArgumentParser) -> None:
    options.add_argument(
        "--step-times", type=Path, metavar="FILE", help="of --save-step-times, in place of a model"
    )
    options.add_argument(
        "--save-step-times", type=Path, metavar="FILE", help="write what is measured"
    )


def measure(args: argparse.Namespace) -> int:
    """Measure, simulate, and report."""
    from forethought.bench.arrivals import read_mooncake
    from forethought.bench.serving import read_targets
    from forethought.scaffolding.settings import OPTIONAL_POSITIVE_INT, POSITIVE_INT, validated

    validated("num_requests", args.num_requests, OPTIONAL_POSITIVE_INT)
    validated("block_size", args.block_size, POSITIVE_INT)
    if args.step_times is not None and args.save_step_times is not None:
        why = "nothing is measured where step times are given"
        raise ParameterError("--step-times and --save-step-times exclude each other", why)
    requests = read_mooncake(args.trace, args.speed, args.num_requests)
    targets = read_targets(args.goodput)
    model.check_installed()

    from forethought.bench import cluster_simulation as simulation

    policies = args.policies or [*simulation.POLICIES]
    _check(args, policies)
    splits = _splits(args)
    engine = _engine(args)
    simulation.check_requests(requests, engine)
    results = []
    for number, num_prefill in splits:
        settings = simulation.ClusterSettings(
            engine, number, args.block_size, 1e9 * args.bandwidth, num_prefill
        )
        results += [simulation.simulate(settings, requests, name) for name in policies]
    if not args.json:
        notes = [*simulation.split_lines(results, targets), *_notes(engine)]
        print("\n".join([simulation.simulation_table(results, targets), "", *notes]))
    print(json.dumps(_report(args, engine, results, targets), ensure_ascii=False))
    return 0


def _check(args: argparse.Namespace, policies: list[str]) -> None:
    """Raises UsageError for a value out of range."""
    from forethought.bench.cluster_simulation import POLICIES, check_replicas

    if not 0 < args.bandwidth < float("inf"):
        why = f"got {args.bandwidth}"
        raise ParameterError("invalid --bandwidth", why, "Give gigabytes per second")
    for number in args.replicas:
        check_replicas(number)
    for name in policies:
        if name not in POLICIES:
            raise UnknownNameError("policy", name, POLICIES)


def _splits(args: argparse.Namespace) -> list[tuple[int, int]]:
    """Numbers of replicas, and of prefill replicas among them; raises ParameterError for none."""
    from forethought.bench.simulated_prefill import candidates
    from forethought.cluster.prefill import check_split

    if args.prefill_replicas == [_AUTO]:
        if not args.goodput:
            why = "the numbers are compared by it"
            raise ParameterError("--prefill-replicas auto needs --goodput", why, "Give targets")
        return [(number, part) for number in args.replicas for part in candidates(number)]
    try:
        parts = [int(part) for part in args.prefill_replicas]
    except ValueError:
        why = f"got {' '.join(args.prefill_replicas)}"
        raise ParameterError("invalid --prefill-replicas", why, "Give numbers, or auto") from None
    splits = [(number, part) for number in args.replicas for part in parts]
    for split in splits:
        check_split(*split)
    return splits


def _engine(args: argparse.Namespace) -> MeasuredEngine:
    """The engine of the file, or of the model once its steps are measured."""
    from forethought.bench.step_times import MeasuredEngine

    if args.step_times is None:
        return _measured(args)
    if model.has_model_options(args):
        raise UsageError(
            "--step-times and options of a model exclude each other",
            "the file says what was measured, and with which limits",
            "Leave one of them out",
        )
    return MeasuredEngine.load(args.step_times)


def _measured(args: argparse.Namespace) -> MeasuredEngine:
    from dataclasses import replace

    from forethought.bench.step_times import measure_engine
    from forethought.llm.llm import LLM

    fields = model.llm_args_of(args)
    if fields.pop("speculative_config", None):
        raise ParameterError(
            "a drafter has no meaning here", "replicas decode plainly here", "Leave it out"
        )
    model.check_models(fields)
    if args.save_step_times is not None:
        check_file(args.save_step_times, "step times")
    with LLM(**fields) as llm:
        engine = measure_engine(llm)
        fields["num_threads"] = machine.num_threads(llm)
    where = machine.measured_on(fields)
    device = where["processor"] if where["device"] == "cpu" else where["device"]
    label = f"{model.model_label(fields)}, {device}, {where['threads']} threads"
    engine = replace(engine, label=label)
    if args.save_step_times is not None:
        engine.save(args.save_step_times)
    return engine


def _notes(engine: MeasuredEngine) -> list[str]:
    return [
        "milliseconds; busy: share of the time in which a replica computes",
        f"step times of {engine.label or 'an engine without a label'}; each replica runs "
        f"{engine.max_batch_size:,} sequences, {engine.max_num_tokens:,} tokens per step, and "
        f"holds {engine.kv_tokens:,} tokens",
    ]


def _report(
    args: argparse.Namespace,
    engine: MeasuredEngine,
    results: list[SimulationResult],
    targets: dict[str, float],
) -> dict[str, Any]:
    return {
        "benchmark": "cluster",
        "trace": str(args.trace),
        "speed": args.speed,
        "block_size": args.block_size,
        "bandwidth": 1e9 * args.bandwidth,
        "engine": engine.limits() | {"label": engine.label},
        "targets_ms": {name: round(1e3 * seconds, 3) for name, seconds in targets.items()},
        "rows": [result.to_dict(targets) for result in results],
    }
