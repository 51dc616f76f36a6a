"""Show a recorded request: the tree of its branches, tasks and stages.

    forethought trace show trace.json

The file is one that Trace.save has written, after ScaffoldingLlm(..., trace=True).
"""

from __future__ import annotations

import argparse

from forethought.scaffolding.trace import Trace


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: what to do, and with which file."""
    parser.add_argument("action", choices=["show"], help="show: print the tree")
    parser.add_argument("file", help="the trace")
    parser.add_argument("--width", type=int, default=100, help="characters per line")


def run(args: argparse.Namespace) -> int:
    """Print the tree."""
    print(Trace.load(args.file).text(args.width))
    return 0
