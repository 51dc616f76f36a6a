"""Load on any OpenAI-compatible server: requests are sent when their time has come,
however many are in progress. The key is read from OPENAI_API_KEY. The last line is JSON.

forethought bench serving --url http://127.0.0.1:8000/v1 --rate 8 --goodput ttft:200 tpot:50
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forethought.errors import ParameterError
from forethought.strict_json import read_json
from forethought.workers.routing import shown_url, url_error

if TYPE_CHECKING:
    from forethought.bench.arrivals import Arrival
    from forethought.bench.serving import ServingReport

_RATE, _NUM_REQUESTS, _MAX_TOKENS = 4.0, 64, 192
_FOR_PROMPTS = ("prompts", "rate", "max_tokens", "seed")
"""Options that a trace replaces."""


def configure(measured: Any) -> None:
    """Declare the command and its arguments."""
    options = measured.add_parser(
        "serving", help="latencies of a server under load", description=__doc__
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
    options.set_defaults(measure=measure)


def measure(args: argparse.Namespace) -> int:
    """Measure, and report."""
    from forethought.bench.serving import ServingBench, read_targets
    from forethought.evaluation.report import ProgressBar
    from forethought.scaffolding.settings import OPTIONAL_POSITIVE_INT, validated

    if reason := url_error(args.url):
        raise ParameterError(
            f"invalid --url {shown_url(args.url)!r}", reason, "Write it as in http://host:8000/v1"
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
    return _report(args, report)


def _arrivals(args: argparse.Namespace) -> list[Arrival]:
    """The requests to send; raises UsageError for an unreadable file, a value out of range, or
    options that exclude each other.
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
    return poisson(
        prompts.read_prompts(args.prompts),
        _given(args.num_requests, _NUM_REQUESTS),
        _given(args.rate, _RATE),
        _given(args.max_tokens, _MAX_TOKENS),
        _given(args.seed, 0),
    )


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def _extra_body(text: str | None) -> dict[str, Any]:
    """The object in ``--extra-body``; raises ParameterError if it is no JSON object."""
    try:
        value = read_json(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ParameterError("--extra-body is no JSON", str(error), "Quote it for the shell") from (
            error
        )
    if not isinstance(value, dict):
        raise ParameterError("--extra-body is no object", f"got {text}", 'Write {"field": value}')
    return value


def _report(args: argparse.Namespace, report: ServingReport) -> int:
    """Print; the status is 1 if no request has been answered."""
    rate = None if args.trace is not None else _given(args.rate, _RATE)
    values = {
        "benchmark": "serving",
        "url": shown_url(args.url),
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
