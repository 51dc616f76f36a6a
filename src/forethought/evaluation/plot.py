"""The picture of a comparison: accuracy against tokens, as a PNG. Draws without a display."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from forethought.errors import DependencyError
from forethought.evaluation.report import Row


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
    check_installed()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row in rows:
        tokens = row.tokens_generated / row.correct.trials
        low, high = row.correct.interval()
        accuracy = row.correct.value
        axes.errorbar(
            tokens,
            100 * accuracy,
            yerr=[[100 * (accuracy - low)], [100 * (high - accuracy)]],
            fmt="o",
            capsize=4,
            label=row.method,
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("tokens generated per problem, probes and abandoned samples included (log)")
    axes.set_ylabel("accuracy in %, with 95 % interval")
    axes.grid(True, alpha=0.25)
    axes.legend(loc="lower right")
    if title:
        axes.set_title(title)
    figure.savefig(path, dpi=150)
    return path
