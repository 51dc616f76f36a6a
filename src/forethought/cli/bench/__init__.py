"""Measure speed on this machine: a progress bar, then a table, a plot, and one JSON line last.

forethought bench speculation: each drafter at several draft lengths against plain decoding,
interleaved in one engine, and which of them to use. Without options: n-grams and suffixes on the
embedded reasoner, answering problems that it was not trained on.

forethought bench serving: load on any OpenAI-compatible server, open loop, and its latencies.

forethought bench methods: every method on an embedded model at equal generated tokens.

forethought bench cluster: replicas simulated under a trace, by measured step times.

forethought bench specreason: SpecReason beside its two models alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from forethought.cli.bench import (
    auto,
    cluster,
    methods,
    roofline,
    serving,
    specreason,
    speculation,
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare what can be measured, and its arguments."""
    measured = parser.add_subparsers(dest="measured", metavar="WHAT", required=True)
    speculation.configure(measured, __doc__)
    for part in (serving, cluster, roofline, auto, methods, specreason):
        part.configure(measured)


def run(args: argparse.Namespace) -> int:
    """Measure, and report."""
    measure: Callable[[argparse.Namespace], int] = args.measure
    return measure(args)
