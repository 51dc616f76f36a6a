"""Compare methods on a model and problems of your own: a table, a plot, and one JSON line last.

Problems are JSON lines with the fields 'question' and 'answer'. A method that draws several
samples does so at --temperature; every other one decodes greedily. Methods stack with '+', the
inner one first: dynasor+majority_vote. best_of_n needs a judge: --reward-model DIR, which reads the
question and each answer.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from forethought.cli import backend, model
from forethought.cli.settings import parse_settings
from forethought.errors import ParameterError
from forethought.evaluation import IN_FLIGHT, problems
from forethought.evaluation.recipe import Recipe, recipe
from forethought.methods.stack import parameters
from forethought.scaffolding.controller import NativeRewardController

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    model.configure(parser)
    parser.add_argument(
        "--data", type=Path, metavar="FILE", help="problems (default: those of the reasoner)"
    )
    parser.add_argument("--problems", type=int, metavar="N", help="draw N of them by the seed")
    parser.add_argument(
        "--methods",
        default="plain,dynasor,majority_vote",
        metavar="A,B,...",
        help="the first is what the others are compared with (default: %(default)s)",
    )
    parser.add_argument("--samples", type=int, default=8, help="of a vote (default: 8)")
    parser.add_argument("--temperature", type=float, default=0.8, help="of samples (default: 0.8)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of each chain of thought")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="setting of a method"
    )
    backend.configure_judge(parser)
    parser.add_argument(
        "--instruction",
        metavar="TEXT",
        help="put behind every question (default: a wish for a boxed answer; nothing for the "
        "embedded reasoner)",
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
    _recipes(args, stand_in)  # refuses what cannot be before a model is loaded
    fields = model.fields_of(args, max_batch_size=max(1, 2 * args.in_flight))
    open_llm = model.opener(fields)

    from forethought.evaluation.comparison import compare
    from forethought.evaluation.runner import Runner

    instruction = args.instruction
    if instruction is None:
        instruction = BOXED if fields.get("model") else ""
    runner = Runner(open_llm, seed=args.seed, in_flight=args.in_flight, instruction=instruction)
    with backend.open_judge(args) as judge:
        recipes = _recipes(args, judge.controller if judge else None)
        if judge is not None:
            recipes = [replace(recipe, workers=judge.workers) for recipe in recipes]
        compare(recipes, chosen, runner, args.out)
    return 0


def _recipes(args: argparse.Namespace, judging: NativeRewardController | None) -> list[Recipe]:
    """One recipe per method. A setting goes to every method that has it, and one must."""
    specs = [spec.strip() for spec in args.methods.split(",")]
    settings = parse_settings(args.set)
    known = {spec: parameters(spec) for spec in specs}
    allowed = {name for taken in known.values() for name in taken}
    unknown = settings.keys() - allowed
    if unknown:
        raise ParameterError.unknown(f"methods {args.methods!r}", unknown, allowed)
    backend.check_judge(args, specs, settings)
    recipes = []
    for spec, taken in known.items():
        judged = backend.judged_by(spec, judging)
        own = judged | {key: value for key, value in settings.items() if key in taken}
        instead = "Name only methods that decode plainly inside best_of_n"
        made = recipe(
            backend.as_chat(spec, own, instead) if judged else spec,
            samples=args.samples,
            temperature=args.temperature,
            max_tokens=args.max_tokens,
            settings=own,
        )
        recipes.append(replace(made, name=spec, is_chat=bool(judged)))
    return recipes
