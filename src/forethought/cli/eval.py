"""Compare methods on a model and a task, or problems of your own: tables, a plot, a report.

Without --task the problems are JSON lines with the fields 'question' and 'answer'. A task brings
its problems, its instruction and its grader; without --model it is solved by its embedded model, if
there is one. A method that draws several samples does so at --temperature; every other one decodes
greedily. Methods stack with '+', the inner one first, and '@' sets the samples of one:
dynasor+majority_vote@8. A method that verifies its samples does so with the task's checker. With
--url the model is a server's, and each question a chat with it; a method that continues its own
text needs --prompt-format there. best_of_n needs a judge: --reward-model DIR, or --reward-url URL
on a server, which reads the question and each answer.

Every finished attempt is written to a journal in the evaluation's folder: started again with the
same arguments, the command goes on where it was ended. The report is written there as HTML,
Markdown, JSON and, where matplotlib is installed, PNG, and the last line of the output is the same
JSON object.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forethought import __version__, assets
from forethought.answers.answer_extraction import AnswerRule
from forethought.cli.backend import (
    check_chats,
    check_thinking_field,
    server_opener,
    wants_server,
)
from forethought.cli.eval_options import (
    CHAT_METHODS,
    METHODS,
    SEARCH_SAMPLES,
    SEARCH_TRIALS,
)
from forethought.cli.eval_options import configure as configure
from forethought.cli.judge import (
    REWARD_SERVER,
    check_judge,
    check_reward_model,
    is_judged,
    judge_settings,
    judged_by,
    open_judge,
    wants_judge,
)
from forethought.cli.options import (
    THINKING,
    llm_args_of,
    llm_opener,
    only_adapter,
    parse_settings,
)
from forethought.config.generation_config import described, sampling_defaults
from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError, UsageError
from forethought.evaluation import problems, tasks
from forethought.evaluation.graders import MathGrader
from forethought.evaluation.journal import Journal, fingerprint, folder_name, problems_hash
from forethought.evaluation.problems import Grader, Problem
from forethought.evaluation.recipe import Recipe, recipe, with_each_count, within_each
from forethought.evaluation.report import Report, count_of, has_progress_bars, make_folder
from forethought.methods.stack import parameters
from forethought.model_dir import find_model_dir, read_json
from forethought.rewards.verifier import verifier
from forethought.saved_file import check_folder
from forethought.scaffolding.budget import Budget
from forethought.scaffolding.reward_controller import NativeRewardController
from forethought.workers.concurrency import AdaptiveConcurrency

if TYPE_CHECKING:
    from forethought.evaluation.comparison import Comparison, ComparisonOptions
    from forethought.evaluation.pipeline_search import PipelineSpace
    from forethought.evaluation.report import ReportRow
    from forethought.evaluation.runner import EvaluationRunner
    from forethought.evaluation.search import Proposal
    from forethought.llm.async_llm import AsyncLLM
    from forethought.scaffolding.worker import Worker

_EARLY_STOP, _VERIFIER, _ANSWER = "early_stop", "verifier", "answer"
FOLDER = Path("runs/eval")
_WAS_COMPLETE = "This evaluation was complete before, and nothing was run. --fresh runs it again."
_NO_LIMIT = "none"


def run(args: argparse.Namespace) -> int:
    """Run the comparison, or the search."""
    plan = _plan(args)
    from forethought.evaluation.comparison import Comparison
    from forethought.evaluation.runner import EvaluationProgress

    runner, options = _runner(args, plan), _options(args)
    folder = _folder(args, plan)
    make_folder(folder)
    if args.trace is not None:
        make_folder(args.trace)
        runner.trace_dir = args.trace
    with (
        closing(plan.grader),
        open_judge(args) as judge,
        Journal(folder / "journal.jsonl", plan.settings, args.fresh) as journal,
    ):
        recipes = _recipes(args, judge.controller if judge else None)
        if judge is not None:
            recipes = [replace(recipe, workers=judge.workers) for recipe in recipes]
        total = sum(recipe.repeats for recipe in recipes) * len(plan.problems)
        shows_bar = has_progress_bars() and not args.json
        with EvaluationProgress(total) if shows_bar else nullcontext() as bar:
            comparison = Comparison(runner, plan.problems, journal, options, bar)
            report = _searched(args, plan, _proposal(args, plan, recipes, comparison))
            if report is None:
                report = _compared(args, plan, comparison.rows(recipes), options)
        page, plot = report.save(folder)
        was_complete = journal.is_finished and journal.num_appended == 0
        journal.finish()
    if not args.json:
        note = f"{_WAS_COMPLETE}\n\n" if was_complete else ""
        shown = plot or "none, as matplotlib is not installed"
        sys.stdout.write(f"{note}{report.text()}\nreport: {page}\nplot: {shown}\n")
    sys.stdout.write(report.json_line())
    return 0


def _folder(args: argparse.Namespace, plan: _Plan) -> Path:
    if args.out is not None:
        return Path(args.out)
    source = args.task or (Path(args.data).stem if args.data else "arithmetic")
    model = args.api_model or args.model
    words = [source, *([Path(model).name] if model else []), *plan.method_names]
    return FOLDER / folder_name("-".join(words), plan.settings)


# ---- what the options stand for, checked before anything is loaded -------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is evaluated, and on what."""

    problems: Sequence[Problem]
    grader: Grader
    open_llm: Callable[[], AsyncLLM | Worker]
    adapter: str | None
    """That answers, of those of the model."""
    instruction: str
    settings: Mapping[str, Any]
    """Everything that decides the results, as plain values."""
    advised_sampling: Mapping[str, float]
    """Sampling defaults of the model's ``generation_config.json``, which are not used."""

    @property
    def method_names(self) -> list[str]:
        """The methods that are compared or searched, in their order."""
        return [str(method["name"]) for method in self.settings["methods"]]

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling parameters of each method, and the model's own defaults, for the report."""
        methods = {str(m["name"]): dict(m["sampling_params"]) for m in self.settings["methods"]}
        return {"methods": methods, "model_defaults": dict(self.advised_sampling)}

    def title(self, task: str | None) -> str:
        return f"{task or 'evaluation'}, {count_of(len(self.problems), 'problem')}"


def _plan(args: argparse.Namespace) -> _Plan:
    task = tasks.task(args.task) if args.task else None
    if task is not None:
        candidates = task.problems(args.data)
    else:
        candidates = problems.load(args.data) if args.data else problems.shipped()
    count = args.problems
    searches = args.search or args.search_pipelines
    if count is None and (searches or args.stop_when_decided is not None):
        count = len(candidates)  # in random order, which both rely on
    chosen = problems.choose(candidates, count, args.seed)
    _check(args)
    recipes = _recipes(args, NativeRewardController() if wants_judge(args) else None)
    _check_verifiers(recipes, chosen)
    check_reward_model(args.reward_model)
    open_llm, adapter, model, is_embedded = _model(args, task)
    instruction = args.instruction
    if instruction is None:
        instruction = tasks.BOXED if task is None else task.instruction
        instruction = "" if is_embedded else instruction
    settings = {
        "forethought": __version__,
        "model": model,
        "task": args.task,
        "problems": problems_hash(chosen),
        "num_problems": len(chosen),
        "methods": [recipe.to_dict() for recipe in recipes],
        "reward_model": judge_settings(args),
        "answer": _answer_rule(args),
        "instruction": instruction,
        "prompt_format": args.prompt_format,
        "seed": args.seed,
    }
    advised = _advised_sampling(args, model)
    return _Plan(chosen, _grader(args, task), open_llm, adapter, instruction, settings, advised)


def _advised_sampling(args: argparse.Namespace, model: Mapping[str, Any]) -> Mapping[str, float]:
    """Of the model on this machine; empty for a server's."""
    if wants_server(args):
        return {}
    directory = find_model_dir(model.get("model") or assets.REASONER, args.revision)
    file = directory / "generation_config.json"
    return sampling_defaults(read_json(file)) if file.is_file() else {}


def _check_verifiers(recipes: Sequence[Recipe], chosen: Sequence[Problem]) -> None:
    """Have the verifiers that are chosen by name read every question now; UsageError if one
    cannot.
    """
    named = [recipe.settings.get(_VERIFIER) for recipe in recipes]
    for accepts in {verifier(name) for name in named if isinstance(name, str)}:
        for problem in chosen:
            accepts(problem.question, "")


def _check(args: argparse.Namespace) -> None:
    """Refuse options without what they belong to, and folders that cannot be written to."""
    for folder in (args.out or FOLDER, args.trace):
        if folder is not None:
            check_folder(folder)
    check_thinking_field(args)
    _check_search(args)
    if args.search and args.budget is not None:
        raise ParameterError(
            "--search goes without --budget", "it tries budgets", "Give --search-budgets"
        )
    if args.repeats < 1:
        raise ParameterError("invalid --repeats", f"got {args.repeats}", "Give at least 1")
    if args.search_pipelines and wants_server(args) and args.prompt_format is None:
        raise ParameterError(
            "--search-pipelines on a server needs --prompt-format",
            "the samples of a pipeline are completions",
            "Write the prompt in the model's own format",
        )


_SEARCH_OPTIONS = {
    "search_tokens": ("search", "search_pipelines"),
    "search_samples": ("search", "search_pipelines"),
    "search_budgets": ("search",),
    "search_trials": ("search_pipelines",),
    "search_techniques": ("search_pipelines",),
}
"""Options of a search -> those that it belongs to."""


def _check_search(args: argparse.Namespace) -> None:
    """Refuse options of a search without it, and a search with options that it decides itself."""
    for name, owners in _SEARCH_OPTIONS.items():
        if getattr(args, name) is not None and not any(getattr(args, owner) for owner in owners):
            options = " or ".join(_option(owner) for owner in owners)
            raise ParameterError(
                f"{_option(name)} needs {options}", "it belongs to a search", f"Add {options}"
            )
    chosen = [name for name in ("search", "search_pipelines") if getattr(args, name)]
    if len(chosen) > 1:
        raise ParameterError(
            "--search and --search-pipelines exclude each other",
            "each is a search of its own",
            "Run one after the other",
        )
    if not chosen:
        return
    option = _option(chosen[0])
    if args.search_tokens is None or args.search_tokens < 1:
        raise ParameterError(
            f"{option} needs --search-tokens",
            f"got {args.search_tokens}",
            "Say how many tokens it may generate",
        )
    if args.columns or args.stop_when_decided is not None or args.repeats > 1:
        raise ParameterError(
            f"{option} goes without --columns, --stop-when-decided and --repeats",
            "it decides itself what is run",
            "Leave them out",
        )
    if args.search_pipelines:
        _space(args)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _answer_rule(args: argparse.Namespace) -> AnswerRule:
    rule: AnswerRule = "auto" if args.answer is None else args.answer
    return rule


def _grader(args: argparse.Namespace, task: tasks.Task | None) -> Grader:
    if task is not None:
        return task.grader(unsafe_code=args.unsafe_code, answer=_answer_rule(args))
    if args.unsafe_code:
        raise ParameterError(
            "--unsafe-code needs a task whose answers are programs",
            "no task is given",
            "Add --task humaneval, or leave it out",
        )
    return MathGrader(answer=_answer_rule(args))


def _model(
    args: argparse.Namespace, task: tasks.Task | None
) -> tuple[Callable[[], AsyncLLM | Worker], str | None, dict[str, Any], bool]:
    """Opens the model; its adapter that answers; its identity, for the journal; whether it is an
    embedded one.
    """
    if wants_server(args):
        concurrency = AdaptiveConcurrency(max(1, args.in_flight))
        described = {"url": args.url, "name": args.api_model, "thinking": args.thinking_field}
        if args.thinks is not None:
            described["thinks"] = args.thinks
        return server_opener(args, concurrency), None, described, False
    defaults: dict[str, Any] = {"max_batch_size": max(1, 2 * args.in_flight)}
    if task is not None and task.embedded_model is not None:
        defaults["model"] = task.embedded_model
    fields = llm_args_of(args, **defaults)
    if task is not None and fields.get("model") is None:
        raise UsageError(
            f"the task {task.name} needs a model",
            "no embedded model is made for it",
            "Give --model, or --url and --api-model",
        )
    model = fields.get("model") or assets.REASONER
    plain = {name: str(value) for name, value in sorted(fields.items()) if name != "max_batch_size"}
    described = {**plain, "files": fingerprint(find_model_dir(model, args.revision))}
    open_llm, adapter = llm_opener(fields), only_adapter(fields)
    if adapter is not None:
        described["adapter_files"] = fingerprint(Path(fields["adapters"][adapter]))
    return open_llm, adapter, described, assets.is_embedded(model)


def _runner(args: argparse.Namespace, plan: _Plan) -> EvaluationRunner:
    from forethought.evaluation.runner import EvaluationRunner

    return EvaluationRunner(
        plan.open_llm,
        seed=args.seed,
        in_flight=args.in_flight,
        instruction=plan.instruction,
        prompt_format=args.prompt_format,
        grader=plan.grader,
        adapter=plan.adapter,
    )


def _options(args: argparse.Namespace) -> ComparisonOptions:
    from forethought.evaluation.comparison import ComparisonOptions

    columns = tuple(name.strip() for name in args.columns.split(",") if name.strip())
    return ComparisonOptions(columns, stop_level=args.stop_when_decided)


# ---- recipes -------------------------------------------------------------------------------------


def _recipes(args: argparse.Namespace, judging: NativeRewardController | None) -> list[Recipe]:
    """One recipe per method. A setting goes to every method that has it, and one must."""
    chats = wants_server(args) and args.prompt_format is None
    method_list = args.methods
    if method_list is None:
        method_list = CHAT_METHODS if chats else METHODS
    specs = _specs(args, method_list, chats)
    settings = parse_settings(args.set)
    allowed = {name for spec in specs for name in parameters(spec)}
    unknown = settings.keys() - allowed
    if unknown:
        raise ParameterError.unknown(f"methods {method_list!r}", unknown, allowed)
    check_judge(args, specs, settings)
    if args.search:
        counts = (args.search_samples or SEARCH_SAMPLES).split(",")
        specs = [variant for spec in specs for variant in with_each_count(spec, counts)]
    checker = tasks.task(args.task).verifier if args.task else None
    recipes = []
    for spec in specs:
        method_settings = {key: value for key, value in settings.items() if key in parameters(spec)}
        if args.all_samples and _EARLY_STOP in parameters(spec):
            method_settings.setdefault(_EARLY_STOP, False)
        if args.answer is not None and _ANSWER in parameters(spec):
            method_settings.setdefault(_ANSWER, args.answer)
        if checker is not None and _VERIFIER in parameters(spec):
            method_settings.setdefault(_VERIFIER, checker)
        base = _recipe(args, spec, judged_by(spec, judging) | method_settings, chats)
        recipes.append(replace(base, repeats=args.repeats))
    recipes = _within_budgets(args, recipes)
    _refuse_equal(recipes)
    return recipes


def _specs(args: argparse.Namespace, method_list: str, chats: bool) -> list[str]:
    if wants_server(args) and not chats and args.max_tokens is None:
        raise ParameterError(
            "--prompt-format with --url needs --max-tokens",
            "servers end a completion after a few tokens by default",
            "Say how long an answer may be",
        )
    specs = [spec.strip() for spec in method_list.split(",")]
    if "" in specs:
        raise ParameterError(
            "invalid --methods",
            f"{method_list!r} has an empty entry",
            "Write names with commas between",
        )
    return specs


def _within_budgets(args: argparse.Namespace, recipes: Sequence[Recipe]) -> list[Recipe]:
    """Each recipe within each budget of a search, or within ``--budget``."""
    if args.search:
        limits = (args.search_budgets or _NO_LIMIT).split(",")
        budgets = [None if one.strip() == _NO_LIMIT else _budget(f"tokens={one}") for one in limits]
        return [variant for base in recipes for variant in within_each(base, budgets)]
    return [replace(base, budget=_budget(args.budget)) for base in recipes]


def _refuse_equal(recipes: Sequence[Recipe]) -> None:
    names = [recipe.name for recipe in recipes]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ParameterError(
            "invalid methods to compare",
            f"{repeated!r} is given twice",
            "Name each once; --repeats N makes N attempts at each problem",
        )


def _recipe(args: argparse.Namespace, spec: str, settings: dict[str, Any], chats: bool) -> Recipe:
    """One method under the name given; its prompts are chats if it ``chats`` or has a judge."""
    judged = is_judged(settings)
    instead = "Write the prompt in the model's own format: --prompt-format"
    if judged:
        instead = "Name only methods that decode plainly inside best_of_n"
    if chats or judged:
        check_chats(spec, instead)
    base = recipe(
        spec,
        samples=args.samples,
        temperature=args.temperature,
        max_tokens=args.max_tokens,
        settings=settings,
    )
    limits = {name: getattr(args, name) for name in THINKING if getattr(args, name) is not None}
    SamplingParams(**limits)  # refuses values outside their ranges before anything runs
    params = {**base.sampling_params, **limits}
    is_chat = chats or judged
    return replace(base, name=spec, is_chat=is_chat, sampling_params=params)


def _budget(text: str | None) -> Budget:
    limits = parse_settings(text.split(","), "--budget") if text else {}
    unknown = limits.keys() - {"tokens", "seconds", "calls"}
    if unknown:
        raise ParameterError.unknown("a budget", unknown, ("tokens", "seconds", "calls"))
    if "seconds" in limits:
        limits["seconds"] = float(limits["seconds"])
    return Budget(**limits)


# ---- reports -------------------------------------------------------------------------------------


def _compared(
    args: argparse.Namespace, plan: _Plan, rows: Sequence[ReportRow], options: ComparisonOptions
) -> Report:
    notes = []
    if options.stop_level is not None:
        notes.append(
            f"Methods were ended as soon as the sequential test at level {options.stop_level:g} "
            "had decided; p is valid whenever one looks. Accuracies at such an end are a little "
            "too far from the first method's."
        )
    if args.repeats > 1:
        notes.append(
            f"{args.repeats} attempts at each problem; intervals take problems as clusters, and p "
            "is that of the sign-flip test over problems."
        )
    early = [
        row.method for row in rows if not row.pass_at_k and _EARLY_STOP in parameters(row.method)
    ]
    if early:
        notes.append(
            f"No pass@k of {', '.join(early)}: samples were ended early, once they could not "
            "change the answer; --all-samples lets them finish."
        )
    notes.append(_sampling_note(plan))
    further = {"task": args.task, "problems": len(plan.problems), "sampling": plan.sampling}
    return Report(plan.title(args.task), rows, notes, plan.settings, further)


def _sampling_note(plan: _Plan) -> str:
    """How the methods sampled, and what the model's maker advises instead."""
    sampling = plan.sampling
    methods = "; ".join(f"{name}: {described(p)}" for name, p in sampling["methods"].items())
    advised = sampling["model_defaults"]
    unused = f" The model's own defaults ({described(advised)}) are not used." if advised else ""
    return f"Sampling: {methods}.{unused}"


def _proposal(
    args: argparse.Namespace, plan: _Plan, recipes: Sequence[Recipe], comparison: Comparison
) -> Proposal | None:
    """What the search proposes; None if there is none to do."""
    if args.search:
        from forethought.evaluation.search import Search

        return Search(comparison, len(plan.problems), args.search_tokens).run(recipes)
    if not args.search_pipelines:
        return None
    from forethought.evaluation.pipeline_search import PipelineSearch

    search = PipelineSearch(comparison, len(plan.problems), args.search_tokens)
    trials = SEARCH_TRIALS if args.search_trials is None else args.search_trials
    return search.propose(recipes[0], num_trials=trials, space=_space(args), seed=args.seed)


def _space(args: argparse.Namespace) -> PipelineSpace:
    """The pipelines among which the options search."""
    from forethought.evaluation.pipeline_search import PipelineSpace

    space = PipelineSpace(temperature=args.temperature)
    if args.search_techniques is not None:
        names = tuple(name.strip() for name in args.search_techniques.split(","))
        space = replace(space, techniques=names)
    if args.search_samples is not None:
        counts = parse_settings([f"samples=[{args.search_samples}]"], "--search-samples")
        space = replace(space, samples=tuple(counts["samples"]))
    return space


def _searched(args: argparse.Namespace, plan: _Plan, proposal: Proposal | None) -> Report | None:
    if proposal is None:
        return None
    notes = [*proposal.notes, f"Use it: {_command(args, proposal.recipe)}"]
    further = {"task": args.task, "problems": len(plan.problems), "search": proposal.to_dict()}
    title = f"search on {plan.title(args.task)}"
    return Report(title, proposal.rows, notes, plan.settings, further)


_KEPT = (
    *("url", "api_model", "thinking_field", "thinks"),
    *("model", "revision", "dtype", "device", "config"),
    *("speculative", "draft_model", "max_draft_len", "task", "data", "max_tokens", *THINKING),
    *("reward_model", "reward_url", *REWARD_SERVER, "answer", "instruction", "prompt_format"),
    "seed",
)
"""Options of a search that the proposed command has, too."""


def _command(args: argparse.Namespace, proposed: Recipe) -> str:
    """A command that runs the proposed method on further problems."""
    method, _, limit = proposed.name.partition(" in ")
    if args.search_pipelines:
        from forethought.evaluation.search import config_of

        method, limit = config_of(proposed)["method"], str(proposed.budget.tokens or "")
    words = ["forethought", "eval", "--methods", method, "--temperature", f"{args.temperature:g}"]
    for name in _KEPT:
        if getattr(args, name) is not None:
            words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    for name, value in proposed.settings.items():
        words += ["--set", f"{name}={json.dumps(value, default=str)}"]
    flags = {"--all-samples": args.all_samples, "--unsafe-code": args.unsafe_code}
    words += [flag for flag, is_given in flags.items() if is_given]
    words += ["--budget", f"tokens={limit}"] if limit else []
    return shlex.join(words)
