"""The options of ``forethought eval``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from forethought.answers.answer_extraction import AnswerRule
from forethought.cli.backend import (
    configure_choice,
)
from forethought.cli.judge import (
    configure_judge,
)
from forethought.cli.options import (
    add_thinking_options,
)
from forethought.evaluation import IN_FLIGHT, tasks

METHODS, CHAT_METHODS = "plain,dynasor,majority_vote", "plain,majority_vote"
STOP_LEVEL = 0.05
SEARCH_SAMPLES = "2,4,8,16"
SEARCH_TRIALS = 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    configure_choice(parser)
    _configure_problems(parser)
    _configure_methods(parser)
    configure_judge(parser)
    _configure_prompts(parser)
    _configure_run(parser)
    _configure_search(parser)


def _configure_problems(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", choices=tasks.names(), help="problems of a known kind")
    parser.add_argument(
        "--data",
        metavar="FILE|ID",
        help="problems: of a task its published file, or its id on the Hub (default: those that "
        "come with the task's embedded model; without --task those of the reasoner)",
    )
    parser.add_argument("--problems", type=int, metavar="N", help="draw N of them by the seed")
    parser.add_argument(
        "--answer",
        choices=get_args(AnswerRule),
        help="where grader and votes look for the answer in a text: the last box, what follows "
        "####, a phrase such as 'answer is', the last number, or the first of these (default)",
    )
    parser.add_argument(
        "--unsafe-code",
        action="store_true",
        help="run programs of the model also where they cannot be isolated",
    )


def _configure_methods(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--methods",
        metavar="A,B@N,...",
        help=f"the first is what the others are compared with (default: {METHODS}; of a chat with "
        f"a server: {CHAT_METHODS})",
    )
    parser.add_argument("--samples", type=int, default=8, help="of a vote (default: 8)")
    parser.add_argument("--temperature", type=float, default=0.8, help="of samples (default: 0.8)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of each chain of thought")
    add_thinking_options(parser)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="setting of a method"
    )
    parser.add_argument(
        "--budget",
        metavar="tokens=N,seconds=S,calls=N",
        help="limits of each attempt, everything that the method runs included",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        metavar="N",
        help="attempts at each problem, with different seeds (default: 1)",
    )
    parser.add_argument(
        "--all-samples",
        action="store_true",
        help="let methods finish all of their samples, for pass@k",
    )


def _configure_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--instruction",
        metavar="TEXT",
        help="appended to every question (default: the task's, or to box the answer; nothing for "
        "an embedded model)",
    )
    parser.add_argument(
        "--prompt-format",
        metavar="TEXT",
        help="the prompt in the model's own format, with {question} where the question goes "
        "(default: the chat template; a server is then asked for completions)",
    )


def _configure_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--in-flight",
        type=int,
        default=IN_FLIGHT,
        metavar="N",
        help=f"chains of thought at once, of a server at most (default: {IN_FLIGHT})",
    )
    parser.add_argument("--seed", type=int, default=0, help="of choice and sampling (default: 0)")
    parser.add_argument(
        "--stop-when-decided",
        type=float,
        nargs="?",
        const=STOP_LEVEL,
        metavar="LEVEL",
        help="end a method when it is known to be better or worse than the first, with an error of "
        f"at most LEVEL (default: {STOP_LEVEL})",
    )
    parser.add_argument(
        "--columns",
        default="",
        metavar="A,B",
        help="further columns: regret (over tokens), behaviours (counted by a heuristic)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where journal and report are written (default: a folder in runs/eval, which is named "
        "after task and methods)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="DIR",
        help="write what each attempt did there, for 'forethought trace show FILE'",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="begin anew: forget the journal that is there"
    )
    parser.add_argument("--json", action="store_true", help="print the JSON object only")


def _configure_search(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--search",
        action="store_true",
        help="propose a method, its samples and its budget: --methods with each of the samples and "
        "budgets below, by successive halving on half of the problems",
    )
    parser.add_argument(
        "--search-tokens", type=int, metavar="N", help="tokens that the search may generate"
    )
    parser.add_argument(
        "--search-samples",
        metavar="A,B,...",
        help=f"numbers of samples to try (default: {SEARCH_SAMPLES})",
    )
    parser.add_argument(
        "--search-budgets",
        metavar="A,B,...",
        help="budgets of tokens per problem to try; 'none' is no limit (default: none)",
    )
    parser.add_argument(
        "--search-pipelines",
        action="store_true",
        help="propose a pipeline of archon, searched on half of the problems within "
        "--search-tokens; --budget limits each problem, the first of --methods is compared with",
    )
    parser.add_argument(
        "--search-trials",
        type=int,
        metavar="N",
        help=f"pipelines to try at most (default: {SEARCH_TRIALS})",
    )
    parser.add_argument(
        "--search-techniques",
        metavar="A,B,...",
        help="what may follow the samples: unit_tests, verifier, critic, ranker, fuser "
        "(default: all)",
    )
