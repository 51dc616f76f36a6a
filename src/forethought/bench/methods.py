"""All methods on one model at about equal generated tokens: what each makes of the same budget.

A budget of tokens per problem becomes a number of samples (by what a sample takes on average), and
each method gets the settings that spend about as much; what it really spent is in its row. Methods
that end when they are done (those with a checker, adaptive votes) get twice as many samples at
most, and spend what they need. What the model of a task has nothing for is left out, by name and
with the reason (``LEFT_OUT``); methods that instruct a model have tables of their own
(``instruct_methods``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from forethought.bench.method_tasks import MethodTask
from forethought.errors import ParameterError, UnknownNameError
from forethought.evaluation.comparison import Comparison
from forethought.evaluation.journal import Attempt, Journal
from forethought.evaluation.problems import Problem
from forethought.evaluation.recipe import Recipe, recipe
from forethought.evaluation.report import ReportRow, aligned, outcomes_of, row_of
from forethought.evaluation.runner import EvaluationProgress, EvaluationRunner
from forethought.evaluation.statistics import PairedComparison, Proportion, compare_pairs
from forethought.methods.parts.difficulty import PROBES, Policy, fit
from forethought.methods.stack import parameters
from forethought.rewards.checker_controller import CheckerController
from forethought.scaffolding.reward_controller import NativeRewardController
from forethought.scaffolding.worker import Worker

PLAIN = "plain"
PROBE = "plain, sampled"
"""The row whose attempts are the probes of a policy that is fitted."""
TEMPERATURE = 0.8
INSTRUCTED = "a model that follows instructions: --task instruct"
LEFT_OUT: Mapping[str, str] = {
    "tree_of_thoughts": INSTRUCTED,
    "self_refine": INSTRUCTED,
    "sequential_revision": INSTRUCTED,
    "adaptive_compute": INSTRUCTED,
    "genrm": INSTRUCTED,
    "judge": INSTRUCTED,
    "compare": INSTRUCTED,
    "spct": INSTRUCTED,
    "archon": INSTRUCTED,
    "hogwild": INSTRUCTED,
    "hogwild_turns": INSTRUCTED,
    "parallel_thinking": INSTRUCTED,
    "checker": "a reward: it scores the searches and best_of_n of this table",
    "confidence": "a reward: it scores the searches of this table where there is no other",
    "specreason": "two models: forethought bench specreason",
    "sleep_time": "questions about a context: --task context",
    "drag": "documents: --task facts",
    "iterdrag": "documents: --task facts",
}
"""Methods that the models of one task have nothing for -> what they take."""


@dataclass(frozen=True, slots=True)
class MethodBench:
    """Makes the recipes of the table.

    Args:
        tokens: generated per problem, about.
        judge: scores steps and answers; None: the task's checker does, or the model's confidence.
        judge_worker: runs the reward model; None: there is none.
        policy: of ``compute_optimal``, which gets the rewards of the searches; None leaves it out.
    """

    task: MethodTask
    tokens: int
    judge: NativeRewardController | None = None
    judge_worker: Worker | None = None
    policy: Policy | None = None
    left_out: ClassVar[Mapping[str, str]] = LEFT_OUT
    """Methods without a row here -> what they take."""

    @property
    def num_samples(self) -> int:
        """Samples that the budget is worth; at least 2, and even."""
        return max(2, 2 * round(self.tokens / self.task.sample_tokens / 2))

    @property
    def _reward(self) -> NativeRewardController | None:
        """What scores steps and answers; None: confidence."""
        if self.judge is not None or self.task.checker is None:
            return self.judge
        return CheckerController(self.task.checker)

    def recipes(self) -> list[Recipe]:
        """One for each row; plain decoding first, then the vote."""
        n = self.num_samples
        recipes = [
            self.recipe_of(PLAIN),
            self.recipe_of(f"majority_vote@{n}"),
            self.recipe_of(
                f"majority_vote@{2 * n}, statistical stop",
                statistical_stop=0.95,
                concurrency="doubling",
            ),
            self.recipe_of(f"budget_vote@{n}", total_tokens=self.tokens),
            self.recipe_of(f"no_thinking+majority_vote@{n}"),
            self.recipe_of("budget_forcing"),
            self.recipe_of("first_answer"),
            self.recipe_of("dynasor", chunk_size=self.task.chunk_size, certainty_threshold=2),
            self.recipe_of(
                f"dynasor+majority_vote@{n}", chunk_size=self.task.chunk_size, certainty_threshold=2
            ),
            self.recipe_of(f"deepconf@{n}", window=32),
            self.recipe_of(f"deepconf_online@{n}", num_warmup=max(1, n // 2), window=32),
            self.recipe_of(f"fork_think@{n}"),
            *self._chosen(n),
            *self._searches(n),
        ]
        if self.policy is not None:
            recipes.append(self._compute_optimal(self.policy))
        if self.task.verifier is not None:
            recipes += [
                self.recipe_of(f"repeated_sampling@{count}", verifier=self.task.verifier)
                for count in (2 * n, 4 * n)
            ]
        return recipes

    def calibration_recipes(self) -> list[Recipe]:
        """The rows that a policy is fitted on: the probe first, then what it may choose.

        Raises ParameterError without an exact checker, which says how difficult a problem is.
        """
        if self.task.verifier is None:
            raise ParameterError(
                "no policy can be fitted on this task",
                "it has no exact checker to score the probes",
                "Use --task countdown",
            )
        probe = self.recipe_of(PLAIN)
        params = {**probe.sampling_params, "temperature": TEMPERATURE}
        counts = sorted({max(2, self.num_samples // 2), self.num_samples})
        searches = [f"particle_filtering@{count}" for count in counts]
        return [
            replace(probe, name=PROBE, sampling_params=params),
            self.recipe_of(f"best_of_n@{self.num_samples}", judged=True),
            *(self.recipe_of(name, judged=True, step_token="\n") for name in searches),
        ]

    def _compute_optimal(self, policy: Policy) -> Recipe:
        shared_settings = {"step_token": "\n", "reward_controller": self._reward}
        settings = {
            name: {
                key: value
                for key, value in shared_settings.items()
                if value and key in parameters(name)
            }
            for name in policy.methods
            if name != PROBES
        }
        by_score: dict[str, Any] = {}
        if policy.difficulty == "score":
            if self.task.verifier is None:
                raise ParameterError(
                    "the policy cannot be used on this task",
                    "it measures how difficult a problem is by an exact checker of its probe",
                    "Use --task countdown, or leave --policy out",
                )
            by_score["reward_controller"] = CheckerController(self.task.verifier)
        base = self.recipe_of("compute_optimal", policy=policy, settings=settings, **by_score)
        return replace(base, settings={"policy": policy})

    def _chosen(self, n: int) -> list[Recipe]:
        recipes = [
            self.recipe_of(f"best_of_n@{n}, confidence", reward_controller=_confidence()),
        ]
        if self._reward is not None:
            recipes += [
                self.recipe_of(f"best_of_n@{n}", judged=True),
                self.recipe_of(f"best_of_n@{n}, weighted", judged=True, choice="weighted"),
            ]
        return recipes

    def _searches(self, n: int) -> list[Recipe]:
        steps: dict[str, Any] = {"step_token": "\n", "judged": True}
        by = "" if self._reward is not None else ", confidence"
        return [
            self.recipe_of(f"beam_search@{n}{by}", width=2, **steps),
            self.recipe_of(f"particle_filtering@{n}{by}", **steps),
            self.recipe_of(f"dvts@{n}{by}", width=2, **steps),
            self.recipe_of(f"particle_gibbs@{n // 2}{by}", num_iterations=2, **steps),
            self.recipe_of(f"mcts@{n}{by}", width=2, **steps),
        ]

    def recipe_of(self, name: str, judged: bool = False, **settings: Any) -> Recipe:
        """The recipe of a row; what follows a comma in its name distinguishes it."""
        if judged and self._reward is not None:
            settings["reward_controller"] = self._reward
        has_own_limit = "total_tokens" in settings
        base = recipe(
            name.partition(",")[0],
            temperature=TEMPERATURE,
            max_tokens=None if has_own_limit else self.task.max_tokens,
            settings=settings,
        )
        workers = {}
        if judged and self.judge_worker is not None:
            workers = {NativeRewardController.WorkerTag.REWARD: self.judge_worker}
        return replace(base, name=name, workers=workers)


def _confidence() -> Any:
    from forethought.rewards.confidence import ConfidenceRewardController

    return ConfidenceRewardController("bottom_groups", window=32)


@dataclass(frozen=True, slots=True)
class MethodRow:
    """One method of the table."""

    row: ReportRow
    against: Mapping[str, PairedComparison]
    """Name of another row -> the paired comparison with it; none with itself."""
    groups: Mapping[str, tuple[Proportion, float]]
    """Group of problems -> right answers there, and generated tokens per problem."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        fields = self.row.to_dict()
        fields["tokens_per_problem"] = round(self.row.tokens_per_attempt, 1)
        fields["against"] = {name: paired.to_dict() for name, paired in self.against.items()}
        fields["groups"] = {
            name: {
                "accuracy": round(correct.value, 4),
                "accuracy_ci": [round(bound, 4) for bound in correct.interval()],
                "tokens_per_problem": round(tokens, 1),
            }
            for name, (correct, tokens) in self.groups.items()
        }
        return fields


def chosen(recipes: Sequence[Recipe], only: str | None, against: str | None = None) -> list[Recipe]:
    """Plain decoding, the vote, the row ``against``, and those that are named in ``only``.

    A name of no row stands for all rows whose names begin with it; UnknownNameError if there is
    none.
    """
    names = [one.name for one in recipes]
    if against is not None and against not in names:
        raise UnknownNameError("row", against, names)
    if only is None:
        return list(recipes)
    chosen_names = set[str]() if against is None else {against}
    for name in map(str.strip, only.split(",")):
        matches = (
            [name]
            if name in names
            else [row_name for row_name in names if row_name.startswith(name)]
        )
        if not matches:
            raise UnknownNameError("row", name, names)
        chosen_names.update(matches)
    return [*recipes[:2], *(one for one in recipes[2:] if one.name in chosen_names)]


class MethodComparison:
    """Runs the recipes, and compares each with plain decoding, a vote, and others by name.

    Every row has a journal of its own, so that rows can be added; a row whose settings have changed
    is refused while the older one is not finished.

    Args:
        task: whose groups the rows have.
        settings: everything but recipe and reward model that decides the results, as plain values.
        judge: identifies the reward model of the rows that have one.

    Attributes:
        journals: path of each row's journal, by name.
    """

    def __init__(
        self,
        runner: EvaluationRunner,
        problems: Sequence[Problem],
        task: MethodTask,
        settings: Mapping[str, Any],
        judge: Mapping[str, Any],
    ) -> None:
        self._runner, self._problems = runner, problems
        self._task, self._settings, self._judge = task, settings, judge
        self.journals: dict[str, Path] = {}

    def rows(
        self,
        recipes: Sequence[Recipe],
        folder: Path,
        *,
        is_fresh: bool = False,
        bar: EvaluationProgress | None = None,
        against: Sequence[str] = (),
    ) -> list[MethodRow]:
        """One row for each recipe, in their order.

        Args:
            recipes: with different names; each is compared with the first and the second.
            is_fresh: forget the journals in ``folder``.
            bar: shows the progress.
            against: names of further ones that each is compared with.

        Raises:
            ParameterError: a journal is that of a row with other settings, and not finished.
            Exception: of the first attempt that fails; those that are finished are in the journals.
        """
        attempts = {}
        for one in recipes:
            settings = {**self._settings, "recipe": one.to_dict()}
            settings |= {"reward_model": dict(self._judge)} if one.workers else {}
            path = journal_path(folder, one.name)
            with Journal(path, settings, is_fresh) as journal:
                comparison = Comparison(self._runner, self._problems, journal, bar=bar)
                attempts[one.name] = comparison.attempts(one)
                journal.finish()
                self.journals[one.name] = journal.path
        baselines = list(dict.fromkeys([*(one.name for one in recipes[:2]), *against]))
        return [self._row(name, attempts, baselines) for name in attempts]

    def _row(
        self, name: str, attempts_by_name: Mapping[str, Sequence[Attempt]], baselines: Sequence[str]
    ) -> MethodRow:
        attempts = attempts_by_name[name]
        outcomes = outcomes_of(attempts)
        against = {
            other: compare_pairs(other, outcomes_of(attempts_by_name[other]), outcomes)
            for other in baselines
            if other != name
        }
        return MethodRow(row_of(name, attempts), against, self._groups(attempts))

    def _groups(self, attempts: Sequence[Attempt]) -> dict[str, tuple[Proportion, float]]:
        by_group: dict[str, list[Attempt]] = {}
        for attempt in sorted(attempts, key=lambda one: one.number):
            by_group.setdefault(self._task.group_of(attempt.problem), []).append(attempt)
        return {
            name: (
                Proportion(sum(one.correct for one in group), len(group)),
                sum(one.usage.decoded for one in group) / len(group),
            )
            for name, group in sorted(by_group.items())
        }


def journal_path(folder: Path, name: str) -> Path:
    """The journal of the row of this name."""
    return folder / f"{re.sub(r'[^a-z0-9_]+', '-', name.lower())}.jsonl"


def fit_policy(rows: Sequence[MethodRow], journals: Mapping[str, Path]) -> Policy:
    """The most accurate policy with at most half of the tokens of best of N, from the rows of
    ``MethodBench.calibration_recipes``.
    """
    best_of_n = next(one.row for one in rows if one.row.method.startswith("best_of_n"))
    return fit(
        [journals[one.row.method] for one in rows],
        best_of_n.tokens_per_attempt / 2,
        num_probes=1,
        probe=PROBE,
        score=lambda attempt: float(attempt["correct"]),
    )


def cells(rows: Sequence[MethodRow]) -> list[tuple[str, ...]]:
    """The table: head, then a tuple for each row."""
    groups = list(rows[0].groups)
    shown = groups if len(groups) > 1 else []
    compared = {name for one in rows for name in one.against}
    baselines = [one.row.method for one in rows if one.row.method in compared]
    head = ("method", "accuracy", "95 % interval", "tokens", "prefilled", "seconds")
    lines = [(*head, *shown, *(f"p, {name}" for name in baselines))]
    for one in rows:
        low, high = one.row.accuracy_interval
        prefilled = one.row.tokens_prefilled / one.row.correct.trials
        lines.append(
            (
                one.row.method,
                f"{one.row.correct.value:.1%}",
                f"{low:.1%} to {high:.1%}",
                f"{one.row.tokens_per_attempt:,.0f}",
                f"{prefilled:,.0f}",
                f"{one.row.seconds:.1f}",
                *(
                    f"{one.groups[name][0].value:.1%} ({one.groups[name][1]:,.0f})"
                    for name in shown
                ),
                *(_shown_p(one.against.get(name)) for name in baselines),
            )
        )
    return lines


def _shown_p(paired: PairedComparison | None) -> str:
    return "" if paired is None else f"{100 * paired.difference:+.1f}, {paired.p:.2g}"


def text(rows: Sequence[MethodRow], left_out: Mapping[str, str]) -> str:
    """The table for a terminal, and below it what was left out."""
    notes = [f"{name}: left out, it takes {what}" for name, what in left_out.items()]
    return "\n".join([aligned(cells(rows)), "", *notes]) + "\n"


def markdown(rows: Sequence[MethodRow]) -> str:
    """The table in Markdown, as docs/methods/results.md has it."""
    head, *lines = [" | ".join(line) for line in cells(rows)]
    rule = " | ".join(["---", *["---:"] * (len(cells(rows)[0]) - 1)])
    return "\n".join(f"| {line} |" for line in [head, rule, *lines]) + "\n"


def json_line(rows: Sequence[MethodRow], left_out: Mapping[str, str], **settings: Any) -> str:
    """The JSON object on one line, with its end."""
    report = {"benchmark": "methods", **settings, "rows": [row.to_dict() for row in rows]}
    return json.dumps(report | {"left_out": dict(left_out)}) + "\n"
