"""Several methods on the same problems: progress while it runs, then tables, a plot, a JSON line.

Prints its report, as it is what an application shows; everything else in this folder is silent.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from forethought.errors import UsageError
from forethought.evaluation.plot import check_installed, save_plot
from forethought.evaluation.problems import Problem
from forethought.evaluation.progress import ProgressBar
from forethought.evaluation.recipe import Recipe
from forethought.evaluation.report import (
    Row,
    count_of,
    json_line,
    race_row,
    race_table,
    table,
)
from forethought.evaluation.runner import Attempt, Runner

RACE_PROBLEMS = 10
"""Problems of a race: enough for a figure, few enough for a demo."""


@dataclass(frozen=True, slots=True)
class Race:
    """A method that solves problems one at a time, with drafts or without."""

    recipe: Recipe
    drafts: str
    """Who guesses ahead; empty: nobody."""
    runner: Runner
    """With one chain in flight."""


def compare(
    recipes: Sequence[Recipe],
    problems: Sequence[Problem],
    runner: Runner,
    folder: Path,
    out: TextIO | None = None,
    races: Sequence[Race] = (),
) -> list[Row]:
    """Run every recipe on all problems and report.

    Args:
        recipes: the first is what the others' tokens are compared with.
        problems: solved by each.
        runner: runs them.
        folder: where ``comparison.png`` and ``comparison.json`` are written; made if missing.
        out: where the report goes; None: standard output.
        races: run and reported first, one problem at a time, for the time that a single user
            waits.

    Raises:
        DependencyError: matplotlib or tqdm is not installed.
        UsageError: the folder cannot be made.
        Exception: as ``Runner.run``.
    """
    out = out or sys.stdout
    check_installed()
    _make(folder)
    single = list(problems)[:RACE_PROBLEMS]
    with ProgressBar(len(recipes) * len(problems) + len(races) * len(single)) as bar:
        raced = [_run(race, single, bar) for race in races]
        rows = [_solve(runner, recipe, problems, bar)[0] for recipe in recipes]
    plot = save_plot(rows, folder / "comparison.png", f"{count_of(len(problems), 'problem')}")
    line = json_line(rows, [race_row(one.drafts, one.row, len(single)) for one in raced])
    (folder / "comparison.json").write_text(line + "\n", encoding="utf-8")
    if raced:
        table_of = [(one.drafts, one.row) for one in raced]
        out.write(f"{count_of(len(single), 'problem')}, one at a time:\n\n")
        out.write(f"{race_table(table_of, len(single))}\n\n")
        out.writelines(f"{note}\n" for note in _notes(raced))
        out.write("\n")
    out.write(f"{count_of(len(problems), 'problem')}, many at once:\n\n{table(rows)}\n\n")
    out.write(f"plot: {plot}\n{line}\n")
    return rows


@dataclass(frozen=True, slots=True)
class _Raced:
    """A race that has been run."""

    drafts: str
    row: Row
    texts: dict[str, str]
    """Answer by problem."""


def _run(race: Race, problems: Sequence[Problem], bar: ProgressBar) -> _Raced:
    return _Raced(race.drafts, *_solve(race.runner, race.recipe, problems, bar, race.drafts))


def _solve(
    runner: Runner, recipe: Recipe, problems: Sequence[Problem], bar: ProgressBar, drafts: str = ""
) -> tuple[Row, dict[str, str]]:
    """The row and the answers of one method."""
    texts: dict[str, str] = {}

    def on_attempt(attempt: Attempt) -> None:
        texts[attempt.problem.name] = attempt.text
        bar(attempt)

    bar.begin(f"{recipe.name}, {drafts} drafts" if drafts else recipe.name)
    return runner.run(recipe, problems, on_attempt), texts


def _notes(raced: Sequence[_Raced]) -> list[str]:
    """What drafts have changed beside the time, for each method that raced with and without."""
    without = {one.row.method: one for one in raced if not one.drafts}
    notes = []
    for one in raced:
        plain = without.get(one.row.method)
        if one.drafts and plain is not None:
            notes += _changes(one, plain)
    return notes


def _changes(drafted: _Raced, plain: _Raced) -> list[str]:
    """What drafts have changed in the answers of one method and their tokens."""
    method, count = drafted.row.method, len(plain.texts)
    changed = sum(drafted.texts[name] != text for name, text in plain.texts.items())
    if changed:
        return [
            f"{method}: {drafted.drafts} drafts changed {changed} of {count} answers: between "
            "tokens that are nearly as likely rounding decides; in float32 none would change"
        ]
    notes = [f"{method}: the same answers with {drafted.drafts} drafts, character for character"]
    if drafted.row.tokens_generated != plain.row.tokens_generated:
        notes[0] += (
            f"; {drafted.row.tokens_generated:,} tokens generated for them instead of "
            f"{plain.row.tokens_generated:,}: a chain that draws several tokens a step is further "
            "ahead by the time that a probe ends it"
        )
    return notes


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}", str(error), "Give another folder") from error
