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

    def saved_against(self, other: Row) -> float:
        """Share of the other's generated tokens that this one saved; negative: it spent more."""
        return 1.0 - self.tokens_generated / other.tokens_generated

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


_HEAD = ("method", "accuracy", "95 % interval", "generated", "prefilled", "seconds", "saved")


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text; ``saved`` is against the first row, in generated tokens."""
    return _aligned([_HEAD, *(_cells(row, rows[0]) for row in rows)])


_RACE_HEAD = ("method", "drafts", "accuracy", "generated", "seconds each", "speed")


def race_table(rows: Sequence[tuple[str, Row]], problems: int) -> str:
    """Who drafted and the row, as aligned text; ``speed`` is against the first row of a method."""
    first: dict[str, Row] = {}
    cells: list[tuple[str, ...]] = [_RACE_HEAD]
    for drafts, row in rows:
        slow = first.setdefault(row.method, row)
        cells.append(
            (
                row.method,
                drafts or "none",
                f"{row.correct.value:.1%}",
                f"{row.tokens_generated:,}",
                f"{row.seconds / problems:.2f}",
                "" if row is slow else f"{slow.seconds / row.seconds:.1f}x",
            )
        )
    return _aligned(cells)


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


def _cells(row: Row, first: Row) -> tuple[str, ...]:
    low, high = row.correct.interval()
    return (
        row.method,
        f"{row.correct.value:.1%}",
        f"{low:.1%} to {high:.1%}",
        f"{row.tokens_generated:,}",
        f"{row.tokens_prefilled:,}",
        f"{row.seconds:.1f}",
        "" if row is first else f"{row.saved_against(first):+.0%}",
    )


def _align(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)
