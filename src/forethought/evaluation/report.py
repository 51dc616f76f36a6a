"""What a comparison of methods found: rows, a table for people, one line for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from forethought.evaluation.statistics import Proportion


@dataclass(frozen=True, slots=True)
class Row:
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


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text; ``tokens`` compares the generated tokens of two methods: those of
    ``inner+outer`` with those of ``outer`` where that is a row, else with those of the first row.
    """
    return _aligned([_HEAD, *(_cells(row, rows) for row in rows)])


_RACE_HEAD = ("method", "drafts", "right", "generated", "seconds each", "speed")


def race_table(rows: Sequence[tuple[str, Row]], problems: int) -> str:
    """Who drafted and the row, as aligned text; ``speed`` is against the first row."""
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
    return _aligned(cells)


def count_of(number: int, noun: str) -> str:
    """ "1 problem", "2 problems"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def times(value: float, other: float, more: str, less: str) -> str:
    """How ``value`` compares with ``other``: "2.1 times less", "7.8 times more", or "the same"."""
    ratio = 1.0 if value == other else max(value, other) / max(min(value, other), 1e-9)
    if f"{ratio:.1f}" == "1.0":
        return "the same"
    return f"{ratio:.1f} times {more if value > other else less}"


def race_row(drafts: str, row: Row, problems: int) -> dict[str, object]:
    """Plain values of one race."""
    return {
        "method": row.method,
        "drafts": drafts or None,
        "accuracy": round(row.correct.value, 4),
        "tokens_generated": row.tokens_generated,
        "seconds_per_problem": round(row.seconds / problems, 4),
    }


def json_line(rows: Sequence[Row], races: Sequence[dict[str, object]] = ()) -> str:
    """``{"rows": [...]}`` on one line, with ``"one_at_a_time"`` if there were races."""
    found: dict[str, object] = {"rows": [row.to_dict() for row in rows]}
    if races:
        found["one_at_a_time"] = list(races)
    return json.dumps(found)


def _aligned(cells: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            _align(cell, width, i) for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def _cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
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


def _baseline(row: Row, rows: Sequence[Row]) -> Row:
    """The row of the outer method alone, if there is one; else the first row."""
    outer = row.method.partition("+")[2]
    return next((other for other in rows if other.method == outer), rows[0])


def _against(row: Row, other: Row) -> str:
    compared = times(row.tokens_generated, other.tokens_generated, "more", "fewer")
    return f"{compared} {'as' if compared == 'the same' else 'than'} {other.method}"


def _align(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)
