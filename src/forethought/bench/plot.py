"""The picture of a benchmark of speculation, as a PNG. Draws without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forethought.bench.row import Row
from forethought.bench.variant import PLAIN, Variant
from forethought.evaluation.plot import check_installed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_plot(rows: Sequence[Row], path: Path, title: str = "") -> Path:
    """Draw tokens/s against plain decoding over batch size, and acceptance by position.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    draw(rows, title).savefig(path, dpi=150)
    return path


def draw(rows: Sequence[Row], title: str = "") -> Figure:
    """The figure of ``save_plot``."""
    check_installed()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10.0, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    speed, acceptance = figure.subplots(1, 2)
    batches = sorted({row.batch for row in rows})
    for variant in dict.fromkeys(row.variant for row in rows if row.variant != PLAIN):
        mine = [row for row in rows if row.variant == variant]
        low = [row.ratio - row.ratio_range[0] for row in mine]
        high = [row.ratio_range[1] - row.ratio for row in mine]
        (line, *_) = speed.errorbar(
            [row.batch for row in mine],
            [row.ratio for row in mine],
            yerr=[low, high],
            fmt="o-",
            capsize=3,
            label=variant.label,
        )
        _draw_acceptance(acceptance, variant, mine[0], line.get_color())
    speed.axhline(1.0, color="grey", linewidth=1.0, label="plain")
    speed.set_xscale("log", base=2)
    speed.set_xticks(batches, [str(batch) for batch in batches])
    speed.set_xlabel("batch size")
    speed.set_ylabel("tokens/s, relative to plain decoding")
    acceptance.xaxis.set_major_locator(MaxNLocator(integer=True))
    acceptance.set_xlabel("position in the draft")
    acceptance.set_ylabel(f"accepted, in % of the decode steps (batch {batches[0]})")
    acceptance.set_ylim(0, 100)
    for axes in (speed, acceptance):
        axes.grid(True, alpha=0.25)
        axes.legend(fontsize="small")
    if title:
        figure.suptitle(title)
    return figure


def _draw_acceptance(axes: Any, variant: Variant, row: Row, color: str) -> None:
    rates = [100 * rate for rate in row.acceptance_by_position]
    axes.plot(range(1, len(rates) + 1), rates, "o-", color=color, label=variant.label)
