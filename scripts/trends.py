"""The ratios of benchmarks over time, as a page of the site: a table with a line for each ratio.

Runs are those of ``docs/results/figures.jsonl`` and, before them, of ``history.jsonl`` beside it,
to which ``scripts/figures.py --add`` moves the run that a newer one replaces. What is compared is
of one benchmark, processor and settings: command and dtype. ``scripts/site.py`` writes the tables
in place of ``<!-- trends -->``; every ratio is one of speeds, the higher the better.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import figures

MARK = "<!-- trends -->"
MAX_LOSS = 0.1
"""Share of its best value that the newest may lack before it counts as a regression."""
WIDTH, HEIGHT, MARGIN = 96, 24, 3
"""Of a line, in pixels."""
LABELS = ("batch", "prompt", "context", "k")
"""Integers that tell the rows of a table apart; texts do, too."""


class Settings(NamedTuple):
    """What runs that are compared have in common."""

    benchmark: str
    processor: str
    command: str
    dtype: str


class Point(NamedTuple):
    """A ratio of one run."""

    date: str
    commit: str
    value: float


Series = dict[str, list[Point]]
"""Name of a ratio -> its values, the oldest first."""


def by_settings(runs: Iterable[figures.Run]) -> dict[Settings, Series]:
    """The ratios of all runs."""
    groups: dict[Settings, Series] = {}
    for run in sorted(runs, key=lambda one: str(one["date"])):
        ratios = dict(ratios_of(run))
        if not ratios:
            continue
        dtype = str(run["dtype"])
        key = Settings(run["benchmark"], figures.processor(run), run["command"], dtype)
        series = groups.setdefault(key, {})
        for name, value in ratios.items():
            point = Point(run["date"], run.get("commit") or "", value)
            series.setdefault(name, []).append(point)
    return dict(sorted(groups.items()))


def ratios_of(run: figures.Run) -> Iterable[tuple[str, float]]:
    """The ratios in the rows of a run, named by their row; those of plain decoding to itself are
    left out.
    """
    for row in run.get("rows", ()):
        labels = [
            f"{key} {value}" if key in LABELS else str(value)
            for key, value in row.items()
            if key in LABELS or isinstance(value, str)
        ]
        for key, value in row.items():
            is_ratio = key == "ratio" or key.endswith(" ratio")
            if is_ratio and isinstance(value, int | float) and row.get("drafter") != "plain":
                kind = key.removesuffix("ratio").rstrip(", ")
                yield ", ".join([*labels, *([kind] if kind else [])]), float(value)


def loss(points: Sequence[Point]) -> float:
    """Share of the best value that the newest lacks."""
    best = max(point.value for point in points)
    return 1.0 - points[-1].value / best if best > 0 else 0.0


def is_regression(points: Sequence[Point]) -> bool:
    """Whether the newest value is more than ``MAX_LOSS`` below the best."""
    return loss(points) > MAX_LOSS


# ---- the page ------------------------------------------------------------------------------------


def page(runs: Iterable[figures.Run]) -> str:
    """The tables in Markdown, regressions first."""
    groups = by_settings(runs)
    lost = [
        f"* **▼ {100 * loss(points):.0f} %** {settings.benchmark}, {settings.processor}: {name}"
        for settings, series in groups.items()
        for name, points in series.items()
        if is_regression(points)
    ]
    num_series = sum(map(len, groups.values()))
    summary = f"{num_series} ratios, {len(lost)} more than {100 * MAX_LOSS:.0f} % below their best."
    tables = [table(settings, series) for settings, series in groups.items()]
    return "\n\n".join([summary, *(["\n".join(lost)] if lost else []), *tables])


def table(settings: Settings, series: Series) -> str:
    """Of the runs with one setting."""
    cells = [["ratio", "runs", "over time", "best", "newest", "of the run", ""]]
    for name, points in series.items():
        newest = points[-1]
        mark = f"**▼ {100 * loss(points):.0f} %**" if is_regression(points) else ""
        best = max(point.value for point in points)
        run = f"{newest.date} {newest.commit}".strip()
        values = [f"{best:.2f}", f"{newest.value:.2f}", run, mark]
        cells.append([name, str(len(points)), line(points), *values])
    head = f"## {settings.benchmark}, {settings.processor}"
    command = f"`{settings.command}`, {settings.dtype}"
    return f"{head}\n\n{command}:\n\n{figures.table(cells)}"


def line(points: Sequence[Point]) -> str:
    """The values as a small picture, in the colour of the text around it."""
    values = [point.value for point in points]
    low, high = min(values), max(values)
    step = (WIDTH - 2 * MARGIN) / max(1, len(values) - 1)
    scale = (HEIGHT - 2 * MARGIN) / (high - low) if high > low else 0.0
    middle = 0.0 if high > low else HEIGHT / 2 - MARGIN
    places = [
        (MARGIN + step * index, HEIGHT - MARGIN - middle - scale * (value - low))
        for index, value in enumerate(values)
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    x, y = places[-1]
    label = ", ".join(f"{value:.2f}" for value in values)
    return (
        f'<svg class="trend" role="img" aria-label="{label}" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}"><polyline points="{path}" fill="none" '
        f'stroke="currentColor" stroke-width="1.5"/><circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" '
        'fill="currentColor"/></svg>'
    )


def runs() -> list[dict[str, Any]]:
    """All that are stored, those that newer ones have replaced among them."""
    return [*figures.replaced(), *figures.read()]
