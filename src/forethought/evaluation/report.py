"""Results of a comparison of methods: rows, tables, a plot; as text, Markdown, HTML and JSON.

Also the parts that all reports of the package share: aligned tables, empty figures, the progress
bar, and the check of packages and folder before anything runs.
"""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from forethought.errors import DependencyError, UsageError
from forethought.evaluation.journal import Attempt
from forethought.evaluation.statistics import (
    CoverageFit,
    PairedComparison,
    Proportion,
    clustered_interval,
    mean_pass_at_k,
    pareto_front,
)
from forethought.saved_file import check_folder, save_text, saving

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One method on all problems.

    Tokens are those of all work for the attempts, probes and abandoned branches included: on the
    engine every token that it decoded or prefilled, on a server what it reports, without
    prefix-cache hits.
    """

    method: str
    correct: Proportion
    """Attempts with the right answer."""
    tokens_generated: int
    tokens_prefilled: int
    seconds: float
    """Wall time for all problems together, many of them in flight at once."""
    tokens_wasted: int = 0
    """Generated tokens that are in no returned answer, such as probes and other samples."""
    interval: tuple[float, float] | None = None
    """95 % interval of the accuracy over several attempts per problem; None: Wilson's is used."""
    pass_at_k: Mapping[int, float] = field(default_factory=dict)
    """By k; empty where no problem has several graded samples."""
    num_without_answer: int | None = None
    """Attempts in whose text no answer is found; None where the grader does not say."""
    num_cut: int = 0
    """Attempts whose text ends at its limit of tokens."""
    paired: PairedComparison | None = None
    """Against the first method; None for that."""
    columns: Mapping[str, float] = field(default_factory=dict)
    """Further figures, by name."""

    @property
    def accuracy_interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the accuracy."""
        return self.interval or self.correct.interval()

    @property
    def tokens_per_attempt(self) -> float:
        """Generated tokens for one attempt at one problem."""
        return self.tokens_generated / self.correct.trials

    def to_dict(self) -> dict[str, object]:
        """Plain values; intervals are at 95 %."""
        low, high = self.accuracy_interval
        fields: dict[str, object] = {
            "method": self.method,
            "accuracy": round(self.correct.value, 4),
            "accuracy_ci": [round(low, 4), round(high, 4)],
            "num_without_answer": self.num_without_answer,
            "num_cut": self.num_cut,
            "tokens_generated": self.tokens_generated,
            "tokens_prefilled": self.tokens_prefilled,
            "tokens_wasted": self.tokens_wasted,
            "seconds": round(self.seconds, 2),
        }
        if self.pass_at_k:
            fit = CoverageFit.of(self.pass_at_k)
            fields["pass_at_k"] = {str(k): round(share, 4) for k, share in self.pass_at_k.items()}
            fields["coverage_fit"] = fit and {"a": round(fit.a, 4), "b": round(fit.b, 4)}
        if self.paired is not None:
            fields |= self.paired.to_dict()
        return fields | {name: round(value, 4) for name, value in self.columns.items()}


def row_of(method: str, attempts: Sequence[Attempt]) -> ReportRow:
    """The row of a method's attempts.

    Args:
        method: its name.
        attempts: at least one; of each problem equally many.
    """
    outcomes = outcomes_of(attempts)
    several = len(outcomes[0]) > 1
    generated = [attempt.usage.decoded for attempt in attempts]
    answers = [attempt.num_answer_tokens for attempt in attempts]
    return ReportRow(
        method,
        Proportion(sum(map(sum, outcomes)), len(attempts)),
        sum(generated),
        sum(attempt.usage.prefilled for attempt in attempts),
        max(attempt.elapsed for attempt in attempts),
        sum(max(0, all_ - answer) for all_, answer in zip(generated, answers, strict=True)),
        clustered_interval(outcomes) if several else None,
        _pass_at_k(attempts, outcomes),
        _num_without_answer(attempts),
        sum(attempt.is_cut for attempt in attempts),
    )


def _num_without_answer(attempts: Sequence[Attempt]) -> int | None:
    rules = [attempt.answer_rule for attempt in attempts]
    return None if None in rules else rules.count("")


def outcomes_of(attempts: Iterable[Attempt]) -> list[list[bool]]:
    """Whether the attempts at each problem are right, by number of the problem."""
    by_number: dict[int, list[bool]] = {}
    for attempt in sorted(attempts, key=lambda attempt: attempt.key):
        by_number.setdefault(attempt.number, []).append(attempt.correct)
    return [by_number[number] for number in sorted(by_number)]


def _pass_at_k(attempts: Sequence[Attempt], outcomes: Sequence[Sequence[bool]]) -> dict[int, float]:
    """pass@k over the samples of the method, or else over the attempts at a problem.

    Over the samples if each attempt has as many and all were graded.
    """
    drawn = [[bool(right) for right in one.candidates if right is not None] for one in attempts]
    sizes = {len(one.candidates) for one in attempts} | set(map(len, drawn))
    if len(sizes) == 1 and max(sizes) > 1:
        return mean_pass_at_k(drawn)
    return mean_pass_at_k(outcomes) if len(outcomes[0]) > 1 else {}


_HEAD = (
    *("method", "accuracy", "95 % interval", "no answer found", "cut at the limit"),
    *("generated", "prefilled", "wasted", "seconds"),
    *("difference", "p", "tokens"),
)
Cells = list[tuple[str, ...]]
"""A table: the head, and one tuple for each row."""


def table(rows: Sequence[ReportRow]) -> str:
    """The rows as aligned text.

    ``tokens`` compares the generated tokens of two methods: those of ``inner+outer`` with those of
    ``outer`` where that is a row, else with those of the first row.
    """
    return aligned(comparison_cells(rows))


def comparison_cells(rows: Sequence[ReportRow]) -> Cells:
    """The cells of ``table``; without the columns of paired comparisons where there is none."""
    cells: Cells = [_HEAD, *(_cells(row, rows) for row in rows)]
    if any(row.paired is not None for row in rows):
        return cells
    unpaired = [index for index, name in enumerate(_HEAD) if name not in ("difference", "p")]
    return [tuple(line[index] for index in unpaired) for line in cells]


def further_cells(rows: Sequence[ReportRow]) -> Cells:
    """A table of pass@k and of the further columns; empty if there are none."""
    sizes = sorted({k for row in rows for k in row.pass_at_k})
    names = list(dict.fromkeys(name for row in rows for name in row.columns))
    if not sizes and not names:
        return []
    cells: Cells = [("method", *(f"pass@{k}" for k in sizes), *names)]
    for row in rows:
        shares = [f"{row.pass_at_k[k]:.1%}" if k in row.pass_at_k else "" for k in sizes]
        values = [f"{row.columns[name]:.3f}" if name in row.columns else "" for name in names]
        cells.append((row.method, *shares, *values))
    return cells


def count_of(number: int, noun: str) -> str:
    """The number with its noun: "1 problem", "2 problems"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def times(value: float, other: float, more: str, less: str) -> str:
    """How ``value`` compares with ``other``: "2.1 times less", "7.8 times more", or "the same"."""
    ratio = 1.0 if value == other else max(value, other) / max(min(value, other), 1e-9)
    if f"{ratio:.1f}" == "1.0":
        return "the same"
    return f"{ratio:.1f} times {more if value > other else less}"


def aligned(cells: Sequence[Sequence[str]], left_columns: Sequence[int] = (0,)) -> str:
    """A table as text: columns padded to one width, and a rule below the head.

    Args:
        cells: one sequence per line, the head first.
        left_columns: indices of the columns that are aligned to the left; the others are to the
            right.
    """
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i in left_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def _cells(row: ReportRow, rows: Sequence[ReportRow]) -> tuple[str, ...]:
    low, high = row.accuracy_interval
    paired = row.paired
    return (
        row.method,
        f"{row.correct.value:.1%}",
        f"{low:.1%} to {high:.1%}",
        "" if row.num_without_answer is None else f"{row.num_without_answer:,}",
        f"{row.num_cut:,}",
        f"{row.tokens_generated:,}",
        f"{row.tokens_prefilled:,}",
        f"{row.tokens_wasted:,}",
        f"{row.seconds:.1f}",
        "" if paired is None else _difference(paired),
        "" if paired is None else f"{paired.p:.2g}",
        "" if row is rows[0] else _against(row, _baseline(row, rows)),
    )


def _difference(paired: PairedComparison) -> str:
    low, high = (100 * bound for bound in paired.interval)
    return f"{100 * paired.difference:+.1f} ({low:+.1f} to {high:+.1f})"


def _baseline(row: ReportRow, rows: Sequence[ReportRow]) -> ReportRow:
    """The row of the outer method alone, if there is one; else the first row."""
    outer = row.method.partition("+")[2]
    return next((other for other in rows if other.method == outer), rows[0])


def _against(row: ReportRow, other: ReportRow) -> str:
    compared = times(row.tokens_generated, other.tokens_generated, "more", "fewer")
    return f"{compared} {'as' if compared == 'the same' else 'than'} {other.method}"


def has_plots() -> bool:
    """Whether plots can be drawn: matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def has_progress_bars() -> bool:
    """Whether progress bars can be shown: tqdm is installed."""
    return importlib.util.find_spec("tqdm") is not None


def check_installed() -> None:
    """Raise ``DependencyError`` unless matplotlib is installed."""
    if not has_plots():
        raise DependencyError.missing("matplotlib", "the plot", "eval")


def make_folder(folder: Path) -> None:
    """Make the folder of a report, with its parents; ``UsageError`` if that fails."""
    check_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}", str(error), "Give another folder") from error


class ProgressBar:
    """tqdm's bar on standard error, in a ``with`` statement; tqdm has to be installed.

    Args:
        total: number of units.
        unit: name of one.
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
    """Draw accuracy (with its 95 % interval) against generated tokens, by matplotlib."""
    with saving(path, "plot") as file:
        draw(rows, title).savefig(file, dpi=150)
    return path


def plot_svg(rows: Sequence[ReportRow], title: str = "") -> str:
    """The same plot as an ``<svg>`` element without scripts or references to other files."""
    from matplotlib import rc_context

    figure, written = draw(rows, title), io.StringIO()
    with rc_context({"svg.hashsalt": "forethought"}):  # the same names in every run
        figure.savefig(written, format="svg", metadata=dict.fromkeys(_SVG_METADATA))
    text = written.getvalue()
    return text[text.index("<svg") :]


_SVG_METADATA = ("Date", "Creator", "Format", "Type")


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches, which needs no display, by matplotlib."""
    check_installed()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw(rows: Sequence[ReportRow], title: str = "") -> Figure:
    """The figure of ``save_plot``.

    Every point has its method's name beside its interval, and a line connects the Pareto front.
    """
    figure = new_figure(7.0, 4.5)
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.2, y=0.15)  # space for the names
    tokens = {row.tokens_per_attempt for row in rows}
    if len(tokens) == 1:  # which spans no axis
        axes.set_xlim(max(tokens) / 2, max(tokens) * 2)
    _draw_front(axes, front_of(rows))
    # Neighbours have their names on different sides of their points.
    for number, row in enumerate(sorted(rows, key=lambda row: row.tokens_per_attempt)):
        _draw_row(axes, row, above=number % 2 == 0)
    axes.set_xlabel("tokens generated per problem, probes and abandoned samples included")
    axes.set_ylabel("accuracy in %, with 95 % interval")
    axes.grid(True, alpha=0.25)
    if title:
        axes.set_title(title)
    return figure


def front_of(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """The rows that no other beats in both accuracy and generated tokens, by rising tokens."""
    points = [(row.tokens_per_attempt, row.correct.value) for row in rows]
    return [rows[index] for index in pareto_front(points)]


def _draw_front(axes: Any, front: Sequence[ReportRow]) -> None:
    tokens = [row.tokens_per_attempt for row in front]
    shares = [100 * row.correct.value for row in front]
    axes.plot(tokens, shares, linestyle="--", color="grey", alpha=0.6, zorder=1)


def _draw_row(axes: Any, row: ReportRow, above: bool) -> None:
    tokens = row.tokens_per_attempt
    low, high = (100 * bound for bound in row.accuracy_interval)
    accuracy = 100 * row.correct.value
    bars = axes.errorbar(
        tokens, accuracy, yerr=[[max(0, accuracy - low)], [max(0, high - accuracy)]], fmt="o"
    )
    axes.annotate(
        row.method,
        (tokens, high if above else low),
        xytext=(0, 6 if above else -6),
        textcoords="offset points",
        ha="center",
        va="bottom" if above else "top",
        color=bars.lines[0].get_color(),
    )


# ---- the report in a folder ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """An evaluation, as text, Markdown, HTML and JSON."""

    title: str
    rows: Sequence[ReportRow]
    notes: Sequence[str] = ()
    """Sentences on how to read the figures."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What decided the results, by name; plain values."""
    further: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the JSON object; plain values."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values; ``rows`` first."""
        front = [row.method for row in front_of(self.rows)]
        rows = [row.to_dict() for row in self.rows]
        return {"rows": rows, "front": front, **self.further, "notes": list(self.notes)}

    def tables(self) -> list[Cells]:
        """The cells of its tables."""
        tables = comparison_cells(self.rows), further_cells(self.rows)
        return [cells for cells in tables if cells]

    def text(self) -> str:
        """The report for a terminal."""
        parts = [f"{self.title}:", *(aligned(cells) for cells in self.tables()), *self.notes]
        return "\n\n".join(parts) + "\n"

    def markdown(self, plot: str | None) -> str:
        """The report for a page beside ``plot``, the name of a file; None: there is no plot."""
        parts = [f"# {self.title}", *map(_markdown_table, self.tables())]
        parts += [] if plot is None else [f"![accuracy over tokens]({plot})"]
        parts += self.notes
        parts.append(f"```json\n{json.dumps(self.settings, indent=2)}\n```")
        return "\n\n".join(parts) + "\n"

    def html(self) -> str:
        """A self-contained page without scripts; the plot is part of it where it can be drawn."""
        title = escape(self.title)
        parts = [f"<h1>{title}</h1>", *map(_html_table, self.tables())]
        parts += [plot_svg(self.rows)] if has_plots() else []
        parts += [f"<p>{escape(note)}</p>" for note in self.notes]
        parts.append(f"<pre>{escape(json.dumps(self.settings, indent=2))}</pre>")
        head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        begin = f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>'
        return "\n".join([begin, *parts, "</body></html>\n"])

    def save(self, folder: Path) -> tuple[Path, Path | None]:
        """Write ``comparison.html``, ``.md``, ``.json`` and, where it can be drawn, ``.png``.

        Returns:
            The page, and the plot.
        """
        make_folder(folder)
        page, plot = folder / "comparison.html", folder / "comparison.png"
        plot.unlink(missing_ok=True)  # of an earlier run, in whose place there may be none
        drawn = save_plot(self.rows, plot, self.title) if has_plots() else None
        markdown = self.markdown(None if drawn is None else drawn.name)
        texts = {"html": self.html(), "md": markdown, "json": self.json_line()}
        for suffix, text in texts.items():
            save_text(page.with_suffix(f".{suffix}"), text, "report")
        return page, drawn

    def json_line(self) -> str:
        """The JSON object on one line, with its end."""
        return json.dumps(self.to_dict()) + "\n"


_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0}"
    "td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ccc}"
    "td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}"
)


def _markdown_table(cells: Cells) -> str:
    head, *lines = [" | ".join(cell.replace("|", "\\|") for cell in line) for line in cells]
    rule = " | ".join([":--", *["--:"] * (len(cells[0]) - 1)])
    return "\n".join(f"| {line} |" for line in [head, rule, *lines])


def _html_table(cells: Cells) -> str:
    lines = []
    for number, line in enumerate(cells):
        tag = "td" if number else "th"
        lines.append("".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in line))
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
