"""Show what forethought is for, on the embedded models and problems that they were not trained on.

First a race: ten problems, one at a time, with drafts and without, as a single user would wait for
them. Then thinking less: Dynasor-CoT against plain decoding. Then thinking deeper: countdown
problems, answered greedily, by a vote, and by sampling until the exact checker accepts. Shows a
progress bar, then three tables, the path of a picture, what to try next, and one JSON line last.
The same seed gives the same tokens and the same counts on the same machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from forethought.cli.options import (
    add_speculation_options,
    check_draft_model,
    llm_opener,
    speculative_config_of,
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--problems",
        type=int,
        metavar="N",
        help="problems of each comparison, drawn by the seed (default: 64 of arithmetic, 40 of "
        "countdown)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of choice and sampling (default: 0)")
    add_speculation_options(parser)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/demo"),
        metavar="DIR",
        help="where picture and JSON are written (default: runs/demo)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo."""
    speculative = speculative_config_of(args)
    if speculative is not None:
        check_draft_model(speculative)

    from forethought.evaluation.demo import Demo, prepare, show

    demo = Demo(llm_opener, speculative, args.problems, args.seed)
    prepare(args.out)
    show(demo.run(), args.out)
    return 0
