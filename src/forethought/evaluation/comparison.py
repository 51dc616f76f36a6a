"""Several methods on the same problems: progress while it runs, then a table, a plot, a JSON line.

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
from forethought.evaluation.report import Row, json_line, race_row, race_table, table
from forethought.evaluation.runner import Runner

RACE_PROBLEMS = 10
"""Problems of a race: enough for a figure, few enough for a demo."""
RACE_NOTE = "drafts change no token, only the time"


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
        recipes: the first is what the others' savings are counted against.
        problems: solved by each.
        runner: runs them.
        folder: where ``comparison.png`` and ``comparison.json`` are written; made if missing.
        out: where the report goes; None: standard output.
        races: run afterwards, one problem at a time, for the time that a single user waits.

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
        rows = [runner.run(recipe, problems, bar) for recipe in recipes]
        raced = [(race, race.runner.run(race.recipe, single, bar)) for race in races]
    plot = save_plot(rows, folder / "comparison.png", f"{len(problems)} problems")
    line = json_line(rows, [race_row(race.drafts, row, len(single)) for race, row in raced])
    (folder / "comparison.json").write_text(line + "\n", encoding="utf-8")
    out.write(f"{table(rows)}\n\n")
    out.write(f"{len(problems)} problems; saved: generated tokens, against {rows[0].method}\n")
    if raced:
        out.write(f"\n{race_table([(race.drafts, row) for race, row in raced], len(single))}\n\n")
        out.write(
            f"{len(single)} problems, one at a time; drafts change no answer, only the time\n"
        )
    out.write(f"plot: {plot}\n{line}\n")
    return rows


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}", str(error), "Give another folder") from error
