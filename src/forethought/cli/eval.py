"""Compare methods on a model and problems of your own: a table, a plot, and one JSON line last.

Problems are JSON lines with the fields 'question' and 'answer'. A method that draws several
samples does so at --temperature; every other one decodes greedily. Methods stack with '+', the
inner one first: dynasor+majority_vote. With --url the model is a server's, and each question a chat
with it; a method that continues its own text needs --prompt-format there. best_of_n needs a judge:
--reward-model DIR, which reads the question and each answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forethought.cli.backend import (
    as_chat,
    check_judge,
    configure_choice,
    configure_judge,
    is_judged,
    judged_by,
    open_judge,
    server_opener,
    wants_server,
)
from forethought.cli.options import llm_args_of, llm_opener, parse_settings
from forethought.errors import ParameterError
from forethought.evaluation import IN_FLIGHT, problems
from forethought.evaluation.recipe import Recipe, recipe
from forethought.methods.stack import parameters
from forethought.scaffolding.controller import NativeRewardController

if TYPE_CHECKING:
    from forethought.llm.async_llm import AsyncLLM
    from forethought.scaffolding.worker import Worker

_METHODS, _CHAT_METHODS = "plain,dynasor,majority_vote", "plain,majority_vote"
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    configure_choice(parser)
    parser.add_argument(
        "--data", type=Path, metavar="FILE", help="problems (default: those of the reasoner)"
    )
    parser.add_argument("--problems", type=int, metavar="N", help="draw N of them by the seed")
    parser.add_argument(
        "--methods",
        metavar="A,B,...",
        help=f"the first is what the others are compared with (default: {_METHODS}; of a chat with "
        f"a server: {_CHAT_METHODS})",
    )
    parser.add_argument("--samples", type=int, default=8, help="of a vote (default: 8)")
    parser.add_argument("--temperature", type=float, default=0.8, help="of samples (default: 0.8)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of each chain of thought")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="setting of a method"
    )
    configure_judge(parser)
    parser.add_argument(
        "--instruction",
        metavar="TEXT",
        help="appended to every question (default: to box the answer; nothing for the "
        "embedded reasoner)",
    )
    parser.add_argument(
        "--prompt-format",
        metavar="TEXT",
        help="the prompt in the model's own format, with {question} where the question goes "
        "(default: the chat template; a server is then asked for completions)",
    )
    parser.add_argument(
        "--in-flight",
        type=int,
        default=IN_FLIGHT,
        metavar="N",
        help=f"chains of thought at once (default: {IN_FLIGHT})",
    )
    parser.add_argument("--seed", type=int, default=0, help="of choice and sampling (default: 0)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/eval"),
        metavar="DIR",
        help="where plot and JSON are written (default: runs/eval)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the comparison."""
    given = problems.load(args.data) if args.data else problems.shipped()
    chosen = problems.choose(given, args.problems, args.seed)
    stand_in = None if args.reward_model is None else NativeRewardController()
    _recipes(args, stand_in)  # checks the options before a model is loaded
    open_llm: Callable[[], AsyncLLM | Worker]
    if wants_server(args):
        open_llm, is_embedded = server_opener(args), False
    else:
        fields = llm_args_of(args, max_batch_size=max(1, 2 * args.in_flight))
        open_llm, is_embedded = llm_opener(fields), fields.get("model") is None

    from forethought.evaluation.runner import EvaluationRunner, compare

    instruction = args.instruction
    if instruction is None:
        instruction = "" if is_embedded else BOXED
    runner = EvaluationRunner(
        open_llm,
        seed=args.seed,
        in_flight=args.in_flight,
        instruction=instruction,
        prompt_format=args.prompt_format,
    )
    with open_judge(args) as judge:
        recipes = _recipes(args, judge.controller if judge else None)
        if judge is not None:
            recipes = [replace(recipe, workers=judge.workers) for recipe in recipes]
        compare(recipes, chosen, runner, args.out)
    return 0


def _recipes(args: argparse.Namespace, judging: NativeRewardController | None) -> list[Recipe]:
    """One recipe per method. A setting goes to every method that has it, and one must."""
    chats = wants_server(args) and args.prompt_format is None
    given = args.methods
    if given is None:
        given = _CHAT_METHODS if chats else _METHODS
    if wants_server(args) and not chats and args.max_tokens is None:
        raise ParameterError(
            "--prompt-format with --url needs --max-tokens",
            "servers end a completion after a few tokens by default",
            "Say how long an answer may be",
        )
    specs = [spec.strip() for spec in given.split(",")]
    settings = parse_settings(args.set)
    known = {spec: parameters(spec) for spec in specs}
    allowed = {name for taken in known.values() for name in taken}
    unknown = settings.keys() - allowed
    if unknown:
        raise ParameterError.unknown(f"methods {given!r}", unknown, allowed)
    check_judge(args, specs, settings)
    recipes = []
    for spec, taken in known.items():
        own = {key: value for key, value in settings.items() if key in taken}
        recipes.append(_recipe(args, spec, judged_by(spec, judging) | own, chats))
    return recipes


def _recipe(args: argparse.Namespace, spec: str, settings: dict[str, Any], chats: bool) -> Recipe:
    """One method under the name given; its prompts are chats if it ``chats`` or has a judge."""
    judged = is_judged(settings)
    instead = "Write the prompt in the model's own format: --prompt-format"
    if judged:
        instead = "Name only methods that decode plainly inside best_of_n"
    made = recipe(
        as_chat(spec, settings, instead) if chats or judged else spec,
        samples=args.samples,
        temperature=args.temperature,
        max_tokens=args.max_tokens,
        settings=settings,
    )
    return replace(made, name=spec, is_chat=judged)
