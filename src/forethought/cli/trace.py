"""Show a recorded request: the tree of its branches, tasks and stages; or export it.

    forethought generate "..." --method majority_vote --trace trace.json
    forethought trace show trace.json
    forethought trace show trace.json --price-in 0.15 --price-out 0.60
    forethought trace show trace.json --html
    forethought trace export trace.json --otel spans.json --mooncake load.jsonl

The file is one of --trace, or one that Trace.save has written, after
ScaffoldingLlm(..., trace=True).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forethought.errors import UsageError
from forethought.scaffolding.trace import Prices, Trace
from forethought.tracing.trace_html import save_html
from forethought.tracing.trace_mooncake import BLOCK_SIZE, save_mooncake
from forethought.tracing.trace_otel import save_otel

_PRICES = {
    "in": "prompt tokens",
    "out": "generated tokens",
    "cached": "prompt tokens found in a prefix cache (default: as the others)",
}
"""Options of prices, and what they are for."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: what to do, and with which file."""
    parser.add_argument(
        "action", choices=["show", "export"], help="show: print the tree; export: see below"
    )
    parser.add_argument("file", help="the trace")
    show = parser.add_argument_group("show")
    show.add_argument("--width", type=int, default=100, help="characters per line")
    show.add_argument(
        "--html",
        nargs="?",
        const="",
        metavar="OUT",
        help="write a timeline instead, as one HTML file (default: the trace's name, with .html)",
    )
    for name, of_what in _PRICES.items():
        help_text = f"per million {of_what}, in any currency: shows costs"
        show.add_argument(f"--price-{name}", type=float, metavar="X", help=help_text)
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
        price_options = {f"--price-{name}": getattr(args, f"price_{name}") for name in _PRICES}
        _refuse("export", {"--html": args.html, **price_options})
        if not any(outputs):
            raise UsageError("nothing to export", "no format is given", "Give --otel or --mooncake")
    trace, prices = Trace.load(args.file), _prices(args)
    if args.html is not None:
        save_html(trace, args.html or _page_beside(args.file), prices)
    elif args.action == "show":
        print(trace.text(args.width, prices))
    if args.otel:
        save_otel(trace, args.otel, model=args.model, content=args.content)
    if args.mooncake:
        save_mooncake([trace], args.mooncake, args.block_size)
    return 0


def _prices(args: argparse.Namespace) -> Prices | None:
    if args.price_in is None and args.price_out is None and args.price_cached is None:
        return None
    if args.price_in is None or args.price_out is None:
        raise UsageError(
            "a price is missing",
            "prompts and generated tokens have one each",
            "Give --price-in and --price-out",
        )
    return Prices(args.price_in, args.price_out, args.price_cached)


def _page_beside(file: str) -> Path:
    """Where the timeline of a trace is written by default; says so."""
    path = Path(file).with_suffix(".html")
    if path == Path(file):
        raise UsageError(f"--html would overwrite {file}", "it is the trace", "Name the output")
    print(path)
    return path


def _refuse(action: str, options: Mapping[str, Any]) -> None:
    for option, value in options.items():
        if value is not None:
            other = "export" if action == "show" else "show"
            raise UsageError(f"trace {action} takes no {option}", f"it belongs to {other}")
