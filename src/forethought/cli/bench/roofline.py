"""Decode steps beside their floor: the time to read weights, keys and values, or to
multiply them, at the bandwidth and peak that this machine reaches, or to read experts from the file
where --expert-memory leaves them. Then what the engine takes, in
the network and outside of it. The last line is JSON.

forethought bench roofline Qwen/Qwen3-0.6B --batch 1 8 --context 512 2048
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forethought.cli import machine
from forethought.cli import options as model
from forethought.errors import ParameterError
from forethought.evaluation.report import count_of
from forethought.saved_file import check_folder, save_text


def configure(measured: Any) -> None:
    """Declare the command and its arguments."""
    options = measured.add_parser(
        "roofline",
        help="what a decode step costs at least, and what it takes",
        description=__doc__,
    )
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    model.add_model_argument(options)
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
    options.add_argument("--rounds", type=int, default=3, metavar="R", help="(default: 3)")
    options.add_argument("--json", action="store_true", help="print the JSON line only")
    options.add_argument(
        "--out",
        type=Path,
        default=Path("runs/bench"),
        metavar="DIR",
        help="of plot and JSON (default: runs/bench)",
    )
    options.set_defaults(measure=measure)


def measure(args: argparse.Namespace) -> int:
    """Measure, and report."""
    model.expect_positive(args, "batch", "context", "rounds")
    fields = model.llm_args_of(args)
    if fields.pop("speculative_config", None):
        raise ParameterError(
            "a drafter has no meaning here",
            "the roofline is that of plain decoding",
            "Measure drafters by forethought bench speculation",
        )
    fields |= {"max_batch_size": max(args.batch)}
    model.check_models(fields)
    check_folder(args.out)
    model.check_installed()

    from forethought.bench import roofline
    from forethought.evaluation.report import check_installed, make_folder
    from forethought.llm.llm import LLM
    from forethought.model.device import computing_threads

    check_installed()
    make_folder(args.out)
    with LLM(**fields) as llm:
        runner = llm.lend("bench roofline").local_engine.runner
        llm.take_back()
        lm = runner.lm
        cost = roofline.ModelCost.of(lm, runner.storage.stored_dtype)
        fields["num_threads"] = machine.num_threads(llm)
        with computing_threads(fields["num_threads"]):
            reached = roofline.Machine.measure(lm)
        steps = roofline.measure_steps(llm, args.batch, args.context, args.rounds)
        rows = [roofline.roofline_row(cost, reached, timed) for timed in steps]
        fields["dtype"] = str(lm.dtype).removeprefix("torch.")
    report = {
        "benchmark": "roofline",
        "model": model.model_label(fields),
        "machine": machine.measured_on(fields) | asdict(reached),
        "cost": asdict(cost),
        "rows": [row.to_dict() for row in rows],
    }
    line = json.dumps(report, ensure_ascii=False)
    save_text(args.out / "roofline.json", line + "\n", "report")
    plot = roofline.save_roofline(rows, args.out / "roofline.png", f"roofline of {report['model']}")
    if not args.json:
        print("\n".join([roofline.roofline_table(rows), "", *_notes(report), f"plot: {plot}"]))
    print(line)
    return 0


def _notes(report: dict[str, Any]) -> list[str]:
    where, cost = report["machine"], report["cost"]
    weights = (cost["dense_bytes"] + cost["expert_bytes"]) / 1e6
    speed = where["file_bytes_per_second"]
    in_file = f"{cost['experts_in_file']:.0%} of the experts are in a file, read at"
    if cost["layer_file_bytes"]:
        in_file = f"{cost['layer_file_bytes'] / 1e6:.1f} MB of layers are in a file, read at"
    return [
        f"milliseconds; {report['model']} in {where['dtype']}, {weights:.1f} MB of weights, "
        f"{cost['kv_bytes']} bytes of KV per token",
        f"this machine reads {where['bytes_per_second'] / 1e9:.1f} GB/s and computes "
        f"{where['operations_per_second'] / 1e9:.0f} GFLOP/s with "
        f"{count_of(where['threads'], 'thread')}",
        *([] if speed is None else [f"{in_file} {speed / 1e9:.1f} GB/s"]),
    ]
