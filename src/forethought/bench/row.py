"""What was found of one variant at one batch size, and the table of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forethought.bench.variant import PLAIN, Variant
from forethought.outputs import SpeculationMetrics


@dataclass(frozen=True, slots=True)
class Row:
    """One variant at one batch size; medians over the rounds."""

    variant: Variant
    batch: int
    """Prompts under way at once."""
    tokens_per_second: float
    ratio: float
    """To plain decoding in the same round."""
    ratio_range: tuple[float, float]
    """Of the worst round and the best."""
    metrics: SpeculationMetrics
    """Of all rounds together."""
    draft_share: float
    """Of the wall time."""
    verify_share: float
    """Of the wall time: inside the target's network."""
    identical_share: float
    """Of the outputs: those that equal the ones of plain decoding, token for token."""
    tokens: int
    """Generated in one round."""

    @property
    def rest_share(self) -> float:
        """Of the wall time: scheduling, drawing, verification, text."""
        return max(0.0, 1.0 - self.draft_share - self.verify_share)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Entry k: share of the decode steps that accepted at least k + 1 tokens."""
        steps = self.metrics.steps
        return [count / steps for count in self.metrics.accepted_by_position] if steps else []

    def to_dict(self) -> dict[str, object]:
        """Plain values."""
        length = self.metrics.mean_acceptance_length
        return {
            "drafter": self.variant.drafter or "none",
            "max_draft_len": self.variant.max_draft_len,
            "batch": self.batch,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "ratio": round(self.ratio, 3),
            "ratio_range": [round(value, 3) for value in self.ratio_range],
            "mean_acceptance_length": None if length is None else round(length, 3),
            "acceptance_by_position": [round(rate, 3) for rate in self.acceptance_by_position],
            "drafted": self.metrics.drafted,
            "accepted": self.metrics.accepted,
            "steps": self.metrics.steps,
            "draft_share": round(self.draft_share, 3),
            "verify_share": round(self.verify_share, 3),
            "rest_share": round(self.rest_share, 3),
            "identical": self.identical_share == 1.0,
            "identical_share": round(self.identical_share, 4),
            "synthetic": self.metrics.synthetic,
            "tokens": self.tokens,
        }


_HEAD = (
    *("batch", "drafter", "length", "tokens/s", "ratio", "rounds", "tokens/step"),
    *("by position", "draft", "verify", "rest", "identical"),
)
_SHOWN_POSITIONS = 4


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    cells = [_HEAD, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if name in ("drafter", "by position") else cell.rjust(width)
            for cell, width, name in zip(line, widths, _HEAD, strict=True)
        ).rstrip()
        for line in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    length = row.metrics.mean_acceptance_length
    shown = row.acceptance_by_position[:_SHOWN_POSITIONS]
    more = len(row.acceptance_by_position) > _SHOWN_POSITIONS
    plain = row.variant == PLAIN
    return (
        str(row.batch),
        row.variant.drafter or "none",
        "" if plain else str(row.variant.max_draft_len),
        f"{row.tokens_per_second:,.1f}",
        f"{row.ratio:.2f}",
        "" if plain else "{:.2f}-{:.2f}".format(*row.ratio_range),
        "" if length is None else f"{length:.2f}" + ("*" if row.metrics.synthetic else ""),
        " ".join(f"{rate:.0%}" for rate in shown) + (" ..." if more else ""),
        f"{row.draft_share:.0%}",
        f"{row.verify_share:.0%}",
        f"{row.rest_share:.0%}",
        "yes" if row.identical_share == 1.0 else f"{row.identical_share:.1%}",
    )
