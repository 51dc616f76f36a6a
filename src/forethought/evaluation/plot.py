"""The picture of a comparison: accuracy against tokens, as a PNG. Draws without a display."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forethought.errors import DependencyError
from forethought.evaluation.report import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_installed() -> None:
    """Find out now rather than after minutes of work.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise DependencyError.missing("matplotlib", "the plot", "eval")


def save_plot(rows: Sequence[Row], path: Path, title: str = "") -> Path:
    """Draw accuracy (with its 95 % interval) against generated tokens per problem.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    draw(rows, title).savefig(path, dpi=150)
    return path


def draw(rows: Sequence[Row], title: str = "") -> Figure:
    """The figure of ``save_plot``; every point has its method's name beside its interval."""
    check_installed()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.2, y=0.15)  # room for the names
    # Neighbours have their names on different sides of their points.
    for number, row in enumerate(sorted(rows, key=lambda row: row.tokens_generated)):
        _draw_row(axes, row, above=number % 2 == 0)
    axes.set_xlabel("tokens generated per problem, probes and abandoned samples included")
    axes.set_ylabel("accuracy in %, with 95 % interval")
    axes.grid(True, alpha=0.25)
    if title:
        axes.set_title(title)
    return figure


def _draw_row(axes: Any, row: Row, above: bool) -> None:
    tokens = row.tokens_generated / row.correct.trials
    low, high = (100 * bound for bound in row.correct.interval())
    accuracy = 100 * row.correct.value
    bars = axes.errorbar(tokens, accuracy, yerr=[[accuracy - low], [high - accuracy]], fmt="o")
    axes.annotate(
        row.method,
        (tokens, high if above else low),
        xytext=(0, 6 if above else -6),
        textcoords="offset points",
        ha="center",
        va="bottom" if above else "top",
        color=bars.lines[0].get_color(),
    )
