"""Show what forethought is for, on the embedded reasoner and problems that it was not trained on.

First a race: ten problems, one at a time, with drafts and without, as a single user would wait for
them. Then plain decoding, Dynasor-CoT, majority vote and both together on all problems. Shows a
progress bar, then the tables, the path of a plot, and one JSON line last. The same seed gives the
same tokens and the same counts on the same machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from forethought.cli.options import add_speculation_options, llm_opener, speculative_config_of
from forethought.evaluation import IN_FLIGHT
from forethought.evaluation.problems import choose, shipped
from forethought.evaluation.recipe import DRAFTS, demo_recipes


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--problems",
        type=int,
        default=64,
        metavar="N",
        help="solve N of the 200 problems, drawn by the seed (default: 64)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of choice and sampling (default: 0)")
    add_speculation_options(parser)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/demo"),
        metavar="DIR",
        help="where plot and JSON are written (default: runs/demo)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the comparison."""
    chosen = choose(shipped(), args.problems, args.seed)
    given = speculative_config_of(args)
    fields = {"max_batch_size": 2 * IN_FLIGHT}
    open_llm = llm_opener({**fields, "speculative_config": given})

    from forethought.evaluation.runner import EvaluationRunner, Race, compare

    recipes, drafts = demo_recipes(), given or DRAFTS
    alone = {
        "": EvaluationRunner(llm_opener(fields), seed=args.seed, in_flight=1),
        drafts.name: EvaluationRunner(
            llm_opener({**fields, "speculative_config": drafts}), seed=args.seed, in_flight=1
        ),
    }
    races = [Race(recipe, name, runner) for recipe in recipes[:2] for name, runner in alone.items()]
    compare(recipes, chosen, EvaluationRunner(open_llm, seed=args.seed), args.out, races=races)
    return 0
