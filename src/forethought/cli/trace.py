"""Show a recorded request: the tree of its branches, tasks and stages; or export it.

    forethought trace show trace.json
    forethought trace show trace.json --html timeline.html
    forethought trace export trace.json --otel spans.json --mooncake load.jsonl

The file is one that Trace.save has written, after ScaffoldingLlm(..., trace=True).
"""

from __future__ import annotations

import argparse

from forethought.errors import UsageError
from forethought.scaffolding.trace import Trace
from forethought.scaffolding.trace_html import save_html
from forethought.scaffolding.trace_mooncake import BLOCK_SIZE, save_mooncake
from forethought.scaffolding.trace_otel import save_otel


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: what to do, and with which file."""
    parser.add_argument(
        "action", choices=["show", "export"], help="show: print the tree; export: see below"
    )
    parser.add_argument("file", help="the trace")
    show = parser.add_argument_group("show")
    show.add_argument("--width", type=int, default=100, help="characters per line")
    show.add_argument("--html", metavar="OUT", help="write a timeline instead, as one HTML file")
    export = parser.add_argument_group("export")
    export.add_argument("--otel", metavar="OUT", help="OpenTelemetry spans (GenAI), as OTLP JSON")
    export.add_argument("--model", help="the model's name for the spans")
    export.add_argument(
        "--content", action="store_true", help="prompts and outputs in the spans too"
    )
    export.add_argument("--mooncake", metavar="OUT", help="the load in Mooncake's format, as JSONL")
    export.add_argument(
        "--block-size", type=int, default=BLOCK_SIZE, help="tokens per block of the load"
    )


def run(args: argparse.Namespace) -> int:
    """Print the tree, or write files."""
    outputs = [args.otel, args.mooncake]
    if args.action == "show":
        _refuse("show", {"--otel": args.otel, "--mooncake": args.mooncake})
    else:
        _refuse("export", {"--html": args.html})
        if not any(outputs):
            raise UsageError("nothing to export", "no format is given", "Give --otel or --mooncake")
    trace = Trace.load(args.file)
    if args.html:
        save_html(trace, args.html)
    elif args.action == "show":
        print(trace.text(args.width))
    if args.otel:
        save_otel(trace, args.otel, model=args.model, content=args.content)
    if args.mooncake:
        save_mooncake([trace], args.mooncake, args.block_size)
    return 0


def _refuse(action: str, options: dict[str, str | None]) -> None:
    for option, value in options.items():
        if value:
            other = "export" if action == "show" else "show"
            raise UsageError(f"trace {action} takes no {option}", f"it belongs to {other}")
