"""The demo: drafts, probes and a checker, on the embedded models.

===============  ==================================================================================
the race         one problem at a time, with drafts and without: the same answer, sooner
thinking less    Dynasor-CoT on the reasoner: the accuracy of plain decoding with fewer tokens
thinking deeper  the countdown model searches; a vote of its samples, or sampling until its exact
                 checker accepts one, solves what a single greedy answer does not
===============  ==================================================================================

None of the problems was trained on. The reasoner's chains have some hundreds of tokens, so they are
probed more often than a large model's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from forethought.config.drafters import DraftTargetDecodingConfig
from forethought.config.speculation import DecodingBaseConfig
from forethought.evaluation import IN_FLIGHT
from forethought.evaluation.journal import Attempt
from forethought.evaluation.problems import Problem, choose
from forethought.evaluation.recipe import Recipe, recipe
from forethought.evaluation.report import (
    ReportRow,
    aligned,
    check_installed,
    count_of,
    make_folder,
    new_figure,
    outcomes_of,
    row_of,
    times,
)
from forethought.evaluation.runner import EvaluationProgress, EvaluationRunner
from forethought.evaluation.statistics import compare_pairs
from forethought.evaluation.tasks import task
from forethought.rewards.verifier import read_countdown
from forethought.saved_file import save_text, saving

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

    from forethought.llm.async_llm import AsyncLLM

RACE_PROBLEMS = 10
"""Problems of the race: enough for a figure, few enough for a demo."""
PROBLEMS = {"arithmetic": 64, "countdown": 40}
"""Problems of each comparison, by task."""
PROBING = {"chunk_size": 16, "certainty_threshold": 2}
TEMPERATURE = 0.8
SEARCH_TOKENS = 450
"""Most tokens of one search of the countdown model; a longer one hardly ever ends."""
CHECKING = {"verifier": "countdown", "concurrency": 2}
NEXT = (
    "try next: forethought eval --task countdown --max-tokens 450 --all-samples "
    "--methods plain,majority_vote@16,repeated_sampling@16"
)


def drafts() -> DecodingBaseConfig:
    """The default drafter of the race: the reasoner's draft model."""
    from forethought.assets import drafter_dir

    return DraftTargetDecodingConfig(max_draft_len=16, speculative_model=drafter_dir())


@dataclass(frozen=True, slots=True)
class Heat:
    """One method in the race: a problem at a time, with drafts or without."""

    drafts: str
    """Name of the drafter; empty: plain decoding."""
    attempts: Sequence[Attempt]

    @property
    def method(self) -> str:
        """Its name."""
        return self.attempts[0].method

    @property
    def row(self) -> ReportRow:
        """Its counts."""
        return row_of(self.method, self.attempts)

    @property
    def seconds_per_problem(self) -> float:
        """Wall time."""
        return self.row.seconds / len(self.attempts)

    @property
    def num_read(self) -> float:
        """Tokens of prompts that are prefilled for a problem."""
        return self.row.tokens_prefilled / len(self.attempts)

    @property
    def ms_per_token(self) -> float:
        """Wall time of a token, in milliseconds."""
        return 1000 * self.seconds_per_problem / max(1.0, self.row.tokens_per_attempt)

    @property
    def texts(self) -> dict[str, str]:
        """Answer by problem."""
        return {attempt.problem.name: attempt.text for attempt in self.attempts}

    @property
    def label(self) -> str:
        """The method with its drafter."""
        return f"{self.method}, {self.drafts} drafts" if self.drafts else self.method

    def to_dict(self) -> dict[str, object]:
        """Plain values."""
        return {
            "method": self.method,
            "drafts": self.drafts or None,
            "accuracy": round(self.row.correct.value, 4),
            "tokens_generated": self.row.tokens_generated,
            "seconds_per_problem": round(self.seconds_per_problem, 4),
        }


@dataclass(frozen=True, slots=True)
class Findings:
    """What the demo has measured."""

    race: Sequence[Heat]
    """The first is the one that the others are compared with."""
    less: Sequence[ReportRow]
    """Thinking less, on arithmetic; each row but the first is compared with the first."""
    deeper: Sequence[ReportRow]
    """Thinking deeper, on countdown, likewise."""

    def to_dict(self) -> dict[str, object]:
        """Plain values; every row says its task."""
        parts = {"arithmetic": self.less, "countdown": self.deeper}
        rows = [
            {"task": task, "problems": row.correct.trials, **row.to_dict()}
            for task, part in parts.items()
            for row in part
        ]
        return {"rows": rows, "one_at_a_time": [heat.to_dict() for heat in self.race]}


Opener = Callable[[Mapping[str, Any]], Callable[[], "AsyncLLM"]]
"""Makes a function that builds a model of fields of ``LlmArgs``."""


class Demo:
    """Runs the three parts.

    Args:
        opener: of models.
        speculative: the drafter of race and comparisons; None: the reasoner's draft model in the
            race, none in the comparisons.
        num_problems: of each comparison; None: ``PROBLEMS``.
        seed: of the choice of problems, and of sampling.

    Raises:
        ParameterError: there are fewer problems.
    """

    def __init__(
        self,
        opener: Opener,
        speculative: DecodingBaseConfig | None = None,
        num_problems: int | None = None,
        seed: int = 0,
    ) -> None:
        self._opener, self._speculative, self._seed = opener, speculative, seed
        self._problems = {
            name: choose(_problems(name), count if num_problems is None else num_problems, seed)
            for name, count in PROBLEMS.items()
        }

    def run(self) -> Findings:
        """Run everything, with a progress bar on standard error; raises the error of the first
        failure.
        """
        raced = self._problems["arithmetic"][:RACE_PROBLEMS]
        drafter = self._speculative or drafts()
        heats = [(recipe("plain"), None), (recipe("plain"), drafter), (_dynasor(), drafter)]
        less = [recipe("plain"), _dynasor()]
        search = partial(recipe, temperature=TEMPERATURE, max_tokens=SEARCH_TOKENS)
        deeper = [
            search("plain"),
            search("majority_vote@8"),
            search("repeated_sampling@16", settings=CHECKING),
        ]
        num_compared = sum(
            len(self._problems[name]) * len(recipes)
            for name, recipes in (("arithmetic", less), ("countdown", deeper))
        )
        with EvaluationProgress(len(heats) * len(raced) + num_compared) as bar:
            race = [self._heat(one, drafter, raced, bar) for one, drafter in heats]
            return Findings(
                race,
                self._compare("arithmetic", less, bar),
                self._compare("countdown", deeper, bar),
            )

    def _heat(
        self,
        method: Recipe,
        drafter: DecodingBaseConfig | None,
        problems: Sequence[Problem],
        bar: EvaluationProgress,
    ) -> Heat:
        name = drafter.name if drafter else ""
        bar.begin(f"{method.name}, {name} drafts" if name else method.name)
        runner = self._runner("arithmetic", 1, drafter)
        return Heat(name, runner.attempts(method, problems, bar))

    def _compare(
        self, name: str, recipes: Sequence[Recipe], bar: EvaluationProgress
    ) -> list[ReportRow]:
        runner, rows = self._runner(name, IN_FLIGHT, self._speculative), list[ReportRow]()
        baseline: list[list[bool]] = []
        for method in recipes:
            bar.begin(f"{name}: {method.name}")
            attempts = runner.attempts(method, self._problems[name], bar)
            row, outcomes = row_of(method.name, attempts), outcomes_of(attempts)
            if baseline:
                row = replace(row, paired=compare_pairs(rows[0].method, baseline, outcomes))
            baseline = baseline or outcomes
            rows.append(row)
        return rows

    def _runner(
        self, name: str, in_flight: int, drafter: DecodingBaseConfig | None
    ) -> EvaluationRunner:
        chosen = task(name)
        fields: dict[str, Any] = {
            "model": chosen.embedded_model,
            "max_batch_size": 2 * IN_FLIGHT,
            "speculative_config": drafter,
        }
        return EvaluationRunner(
            self._opener(fields), seed=self._seed, in_flight=in_flight, grader=chosen.grader()
        )


def _problems(name: str) -> list[Problem]:
    """The shipped problems of a task; of countdown those of four numbers, which need a search."""
    problems = task(name).problems()
    if name == "countdown":
        problems = [
            problem for problem in problems if len(read_countdown(problem.question)[0]) == 4
        ]
    return problems


def _dynasor() -> Recipe:
    return recipe("dynasor", settings=PROBING)


def show(findings: Findings, folder: Path, out: TextIO | None = None) -> None:
    """Write the three tables, the path of the picture, next steps, and one JSON line.

    Args:
        findings: of ``Demo.run``.
        folder: for ``demo.png`` and ``demo.json``; made if missing.
        out: None: standard output.

    Raises:
        DependencyError: matplotlib is not installed.
        UsageError: the folder cannot be made.
    """
    out = out or sys.stdout
    prepare(folder)
    picture, line = folder / "demo.png", json.dumps(findings.to_dict())
    with saving(picture, "picture") as file:
        draw(findings).savefig(file, dpi=150)
    save_text(picture.with_suffix(".json"), line + "\n", "findings")
    out.write(f"{text_of(findings)}\npicture: {picture}\n{NEXT}\n{line}\n")


def prepare(folder: Path) -> None:
    """Check that matplotlib is installed and make the folder, before anything runs."""
    check_installed()
    make_folder(folder)


# ---- as text -------------------------------------------------------------------------------------


def text_of(findings: Findings) -> str:
    """The three tables, each below its title and above its conclusions."""
    race, less, deeper = findings.race, findings.less, findings.deeper
    num_raced, num_less, num_deeper = (
        count_of(number, "problem")
        for number in (len(race[0].attempts), less[0].correct.trials, deeper[0].correct.trials)
    )
    parts = [
        f"1. The race: arithmetic, {num_raced}, one at a time",
        race_table(race),
        "\n".join(notes_of(race)),
        f"2. Thinking less: arithmetic, {num_less}, many at once",
        comparison_table(less),
        f"3. Thinking deeper: countdown with four numbers, {num_deeper}, many at once",
        comparison_table(deeper),
        "Points: difference of the accuracies, with its 95 % interval; p: exact McNemar test, "
        "on the same problems.",
    ]
    return "\n\n".join(parts) + "\n"


_RACE_HEAD = ("method", "drafts", "right", "seconds each", "speed")


def race_table(race: Sequence[Heat]) -> str:
    """One line for each heat; ``speed`` is against the first."""
    cells: list[tuple[str, ...]] = [_RACE_HEAD]
    for heat in race:
        right, seconds = heat.row.correct, heat.seconds_per_problem
        speed = times(seconds, race[0].seconds_per_problem, "slower", "faster")
        cells.append(
            (
                heat.method,
                heat.drafts or "none",
                f"{right.successes} of {right.trials}",
                f"{seconds:.2f}",
                "" if heat is race[0] else speed,
            )
        )
    return aligned(cells, (0, 1))


def notes_of(race: Sequence[Heat]) -> list[str]:
    """How drafts have changed the answers of each method that ran with and without."""
    without = {heat.method: heat for heat in race if not heat.drafts}
    return [
        _change(heat, without[heat.method])
        for heat in race
        if heat.drafts and heat.method in without
    ]


def _change(drafted: Heat, plain: Heat) -> str:
    changed = sum(drafted.texts[name] != text for name, text in plain.texts.items())
    if changed:
        return (
            f"{drafted.method}: {drafted.drafts} drafts changed {changed} of {len(plain.texts)} "
            "answers: between tokens that are nearly as likely rounding decides; in float32 none "
            "would change"
        )
    return (
        f"{drafted.method}: the same answers with {drafted.drafts} drafts, character for character"
    )


_HEAD = ("method", "accuracy", "interval", "tokens", "seconds", "ratio", "points", "p")


def comparison_table(rows: Sequence[ReportRow]) -> str:
    """One line for each method: the 95 % interval of its accuracy, tokens of a problem, seconds of
    all; ``ratio`` of the tokens, ``points`` and ``p`` are against the first.
    """
    cells: list[tuple[str, ...]] = [_HEAD]
    for row in rows:
        low, high = row.accuracy_interval
        cells.append(
            (
                row.method,
                f"{row.correct.value:.1%}",
                f"{low:.0%} to {high:.0%}",
                f"{row.tokens_per_attempt:,.0f}",
                f"{row.seconds:.1f}",
                *(_against(row, rows[0]) if row.paired else ("", "", "")),
            )
        )
    return aligned(cells)


def _against(row: ReportRow, first: ReportRow) -> tuple[str, str, str]:
    assert row.paired is not None
    low, high = (100 * bound for bound in row.paired.interval)
    return (
        times(row.tokens_per_attempt, first.tokens_per_attempt, "more", "fewer"),
        f"{100 * row.paired.difference:+.1f} ({low:+.1f} to {high:+.1f})",
        f"{row.paired.p:.2g}",
    )


# ---- as a picture --------------------------------------------------------------------------------


def draw(findings: Findings) -> Figure:
    """One picture of three panels, with a label at every point."""
    figure = new_figure(13.0, 4.8)
    first, second, third = figure.subplots(1, 3)
    _draw_race(first, findings.race)
    _draw_comparison(second, findings.less)
    _draw_comparison(third, findings.deeper)
    seconds = [heat.seconds_per_problem for heat in findings.race]
    fastest = times(seconds[1], seconds[0], "slower", "faster")
    first.set_title(f"1. The race\n{fastest} with drafts", size=11)
    second.set_title(f"2. Thinking less, on arithmetic\n{_claim(findings.less)}", size=11)
    third.set_title(f"3. Thinking deeper, on countdown\n{_claim(findings.deeper)}", size=11)
    figure.draw_without_rendering()
    _label_points(second, findings.less)
    _label_points(third, findings.deeper)
    return figure


def _draw_race(axes: Axes, race: Sequence[Heat]) -> None:
    seconds = [heat.seconds_per_problem for heat in race]
    colors = [f"C{number}" for number in range(len(race))]
    bars = axes.barh(range(len(race)), seconds, 0.4, color=colors)
    for heat, bar, value in zip(race, bars, seconds, strict=True):
        speed = "" if heat is race[0] else f", {seconds[0] / value:.1f}x"
        axes.annotate(
            f"{heat.label}: {value:.2f} s{speed}\n{_work(heat)}",
            (0, bar.get_y()),
            xytext=(3, 4),
            textcoords="offset points",
            va="bottom",
            size=9,
        )
    lines = ["seconds per problem, one problem at a time", *_waits(race)]
    axes.set_xlabel("\n".join(lines), size=9)
    axes.set_yticks([])
    axes.set_ylim(len(race) - 0.6, -0.9)


def _work(heat: Heat) -> str:
    """What a problem took, in tokens and milliseconds."""
    tokens, read = heat.row.tokens_per_attempt, heat.num_read
    return f"{tokens:,.0f} tokens written, {heat.ms_per_token:.1f} ms each; {read:,.0f} read"


def _waits(race: Sequence[Heat]) -> list[str]:
    """Why a method that writes fewer tokens than plain decoding with its drafts takes longer."""
    plain = {heat.drafts: heat for heat in race if heat.method == "plain"}
    pairs = [(heat, plain[heat.drafts]) for heat in race if heat.drafts in plain]
    return [
        _why_slower(heat, other)
        for heat, other in pairs
        if heat.seconds_per_problem > other.seconds_per_problem
        and heat.row.tokens_per_attempt < other.row.tokens_per_attempt
    ]


def _why_slower(heat: Heat, plain: Heat) -> str:
    tokens = times(heat.row.tokens_per_attempt, plain.row.tokens_per_attempt, "more", "fewer")
    speed = times(heat.seconds_per_problem, plain.seconds_per_problem, "slower", "faster")
    return (
        f"{heat.method} writes {tokens} tokens than plain with drafts,\n"
        f"but is {speed}: its probes read {heat.num_read - plain.num_read:,.0f} tokens more, and\n"
        f"beside them a token takes {heat.ms_per_token / plain.ms_per_token:.1f} times as long"
    )


def _claim(rows: Sequence[ReportRow]) -> str:
    """The conclusion about the last row relative to the first."""
    tokens, _, p = _against(rows[-1], rows[0])
    points = 100 * (rows[-1].correct.value - rows[0].correct.value)
    return f"{points:+.0f} points (p = {p}), {tokens} tokens"


def _draw_comparison(axes: Axes, rows: Sequence[ReportRow]) -> None:
    """Accuracy with its interval over tokens."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.35, y=0.3)
    for number, row in enumerate(rows):
        low, high = (100 * bound for bound in row.accuracy_interval)
        value = 100 * row.correct.value
        errors = [[max(0.0, value - low)], [max(0.0, high - value)]]
        axes.errorbar(row.tokens_per_attempt, value, yerr=errors, fmt="o", color=f"C{number}")
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in axes.get_yticks() if low <= tick <= 100])
    axes.grid(True, alpha=0.25)
    axes.set(xlabel="tokens generated per problem", ylabel="right in %, with 95 % interval")


_BAR = 6
"""Pixels on each side of an interval's bar in which no label is."""


def _label_points(axes: Axes, rows: Sequence[ReportRow]) -> None:
    """A label above or below each point's interval, on no bar and no other label where one of the
    places is free; the panel has been laid out.
    """
    boxes = [_bar_box(axes, row) for row in rows]
    for number, row in enumerate(rows):
        sides = "center", "right", "left"
        positions = [(end, side) for side in sides for end in _ENDS[number % 2]]
        labels = (_label(axes, row, f"C{number}", *position) for position in positions)
        for label in labels:
            box = label.get_window_extent()
            is_inside = axes.bbox.containsx(box.x0) and axes.bbox.containsx(box.x1)
            if is_inside and not any(box.overlaps(other) for other in boxes):
                break
            label.remove()
        else:
            box = _label(axes, row, f"C{number}", *positions[0]).get_window_extent()
        boxes.append(box)


_ENDS = (("below", "above"), ("above", "below"))


def _label(axes: Axes, row: ReportRow, color: str, end: str, side: str) -> Annotation:
    low, high = (100 * bound for bound in row.accuracy_interval)
    is_above = end == "above"
    return axes.annotate(
        f"{row.method}\n{100 * row.correct.value:.0f} %, {row.tokens_per_attempt:,.0f} tokens",
        (row.tokens_per_attempt, high if is_above else low),
        xytext=(0, 5 if is_above else -5),
        textcoords="offset points",
        ha=side,
        va="bottom" if is_above else "top",
        color=color,
    )


def _bar_box(axes: Axes, row: ReportRow) -> Bbox:
    from matplotlib.transforms import Bbox

    low, high = (100 * bound for bound in row.accuracy_interval)
    x = row.tokens_per_attempt
    (left, bottom), (right, top) = axes.transData.transform([(x, low), (x, high)])
    return Bbox.from_extents(left - _BAR, bottom, right + _BAR, top)
