"""Results of a comparison of methods: rows, a table, one JSON line, and a plot as a PNG.

Also what every report of the package shares: aligned tables, the progress bar, and the check of
packages and folder before anything runs.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from forethought.errors import DependencyError, ParameterError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Proportion:
    """How many of how many, such as right answers of all problems.

    Raises:
        ParameterError: no trials, or successes outside ``0..trials``.
    """

    successes: int
    trials: int

    def __post_init__(self) -> None:
        if self.trials < 1 or not 0 <= self.successes <= self.trials:
            raise ParameterError(
                "invalid proportion",
                f"got {self.successes} of {self.trials}",
                "Count at least one trial, and successes from 0 to the trials",
            )

    @property
    def value(self) -> float:
        """The observed share, in [0, 1]."""
        return self.successes / self.trials

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """The score interval of Wilson (1927): honest for few trials and for shares near 0 or 1."""
        z = NormalDist().inv_cdf(0.5 + confidence / 2)
        n, p = self.trials, self.value
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        low = 0.0 if self.successes == 0 else centre - half
        high = 1.0 if self.successes == n else centre + half
        return low, high


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One method on all problems.

    ``tokens_generated`` and ``tokens_prefilled`` are the engine's own counters: every token that it
    decoded or prefilled for this method, probes and abandoned branches included. Of a server they
    are what it reports, without what it found in its prefix cache.
    """

    method: str
    correct: Proportion
    tokens_generated: int
    tokens_prefilled: int
    seconds: float
    """Wall time for all problems together, many of them in flight at once."""

    def to_dict(self) -> dict[str, object]:
        """Plain values; the accuracy's interval is Wilson's at 95 %."""
        low, high = self.correct.interval()
        return {
            "method": self.method,
            "accuracy": round(self.correct.value, 4),
            "accuracy_ci": [round(low, 4), round(high, 4)],
            "tokens_generated": self.tokens_generated,
            "tokens_prefilled": self.tokens_prefilled,
            "seconds": round(self.seconds, 2),
        }


_HEAD = ("method", "accuracy", "95 % interval", "generated", "prefilled", "seconds", "tokens")


def table(rows: Sequence[ReportRow]) -> str:
    """The rows as aligned text; ``tokens`` compares the generated tokens of two methods: those of
    ``inner+outer`` with those of ``outer`` where that is a row, else with those of the first row.
    """
    return aligned([_HEAD, *(_cells(row, rows) for row in rows)])


_RACE_HEAD = ("method", "drafts", "right", "generated", "seconds each", "speed")


def race_table(rows: Sequence[tuple[str, ReportRow]], problems: int) -> str:
    """(drafter, row) pairs as aligned text; ``speed`` is against the first row."""
    cells: list[tuple[str, ...]] = [_RACE_HEAD]
    slow = rows[0][1]
    for drafts, row in rows:
        cells.append(
            (
                row.method,
                drafts or "none",
                f"{row.correct.successes} of {row.correct.trials}",
                f"{row.tokens_generated:,}",
                f"{row.seconds / problems:.2f}",
                "" if row is slow else times(row.seconds, slow.seconds, "slower", "faster"),
            )
        )
    return aligned(cells)


def count_of(number: int, noun: str) -> str:
    """The number with its noun: "1 problem", "2 problems"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def times(value: float, other: float, more: str, less: str) -> str:
    """How ``value`` compares with ``other``: "2.1 times less", "7.8 times more", or "the same"."""
    ratio = 1.0 if value == other else max(value, other) / max(min(value, other), 1e-9)
    if f"{ratio:.1f}" == "1.0":
        return "the same"
    return f"{ratio:.1f} times {more if value > other else less}"


def race_row(drafts: str, row: ReportRow, problems: int) -> dict[str, object]:
    """Plain values of one race."""
    return {
        "method": row.method,
        "drafts": drafts or None,
        "accuracy": round(row.correct.value, 4),
        "tokens_generated": row.tokens_generated,
        "seconds_per_problem": round(row.seconds / problems, 4),
    }


def json_line(rows: Sequence[ReportRow], races: Sequence[dict[str, object]] = ()) -> str:
    """``{"rows": [...]}`` on one line, with ``"one_at_a_time"`` if there were races."""
    found: dict[str, object] = {"rows": [row.to_dict() for row in rows]}
    if races:
        found["one_at_a_time"] = list(races)
    return json.dumps(found)


def aligned(cells: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """A table as text: columns padded to one width, and a rule below the head.

    Args:
        cells: one sequence per line, the head first.
        left: indices of the columns that are aligned to the left; the others are to the right.
    """
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def _cells(row: ReportRow, rows: Sequence[ReportRow]) -> tuple[str, ...]:
    low, high = row.correct.interval()
    return (
        row.method,
        f"{row.correct.value:.1%}",
        f"{low:.1%} to {high:.1%}",
        f"{row.tokens_generated:,}",
        f"{row.tokens_prefilled:,}",
        f"{row.seconds:.1f}",
        "" if row is rows[0] else _against(row, _baseline(row, rows)),
    )


def _baseline(row: ReportRow, rows: Sequence[ReportRow]) -> ReportRow:
    """The row of the outer method alone, if there is one; else the first row."""
    outer = row.method.partition("+")[2]
    return next((other for other in rows if other.method == outer), rows[0])


def _against(row: ReportRow, other: ReportRow) -> str:
    compared = times(row.tokens_generated, other.tokens_generated, "more", "fewer")
    return f"{compared} {'as' if compared == 'the same' else 'than'} {other.method}"


def check_installed() -> None:
    """Check for the plot's package before anything runs.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise DependencyError.missing("matplotlib", "the plot", "eval")


def make_folder(folder: Path) -> None:
    """Make the folder that a report is written to, with its parents.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}", str(error), "Give another folder") from error


class ProgressBar:
    """tqdm's bar on standard error, in a ``with`` statement.

    Args:
        total: units there will be.
        unit: what one is called.

    Raises:
        DependencyError: tqdm is not installed.
    """

    def __init__(self, total: int, unit: str) -> None:
        try:
            from tqdm import tqdm
        except ImportError as error:
            raise DependencyError.missing("tqdm", "the progress bar", "eval") from error
        self._bar: Any = tqdm(total=total, desc="warming up", unit=unit, dynamic_ncols=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()


def save_plot(rows: Sequence[ReportRow], path: Path, title: str = "") -> Path:
    """Draw accuracy (with its 95 % interval) against generated tokens per problem.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    draw(rows, title).savefig(path, dpi=150)
    return path


def draw(rows: Sequence[ReportRow], title: str = "") -> Figure:
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
    axes.margins(x=0.2, y=0.15)  # space for the names
    # Neighbours have their names on different sides of their points.
    for number, row in enumerate(sorted(rows, key=lambda row: row.tokens_generated)):
        _draw_row(axes, row, above=number % 2 == 0)
    axes.set_xlabel("tokens generated per problem, probes and abandoned samples included")
    axes.set_ylabel("accuracy in %, with 95 % interval")
    axes.grid(True, alpha=0.25)
    if title:
        axes.set_title(title)
    return figure


def _draw_row(axes: Any, row: ReportRow, above: bool) -> None:
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
