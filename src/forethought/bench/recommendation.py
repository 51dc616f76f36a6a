"""What to configure, given what was measured. Knows nothing about how."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forethought.bench.row import Row
from forethought.bench.variant import PLAIN, Variant

WORTH_IT = 1.03
"""Below this ratio to plain decoding a drafter is not recommended."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The variant that does best over all batch sizes, and the numbers behind it."""

    variant: Variant
    """Plain decoding where nothing pays."""
    rows: tuple[Row, ...]
    """Its rows, by batch size."""
    max_concurrency: int | None
    """The largest batch size measured at which it pays, if it does not at a larger one."""
    best: tuple[Row, ...]
    """The fastest row at each batch size."""

    def lines(self) -> list[str]:
        """For people."""
        if self.variant == PLAIN:
            tried = ", ".join(f"{row.ratio:.2f} at {row.batch}" for row in self.best)
            return [f"Recommended: no speculation; the fastest at each batch size: {tried}"]
        ratios = ", ".join(f"{row.ratio:.2f} x plain at batch {row.batch}" for row in self.rows)
        length = self.rows[0].metrics.mean_acceptance_length or 1.0
        found = [
            f"Recommended: {self.variant.drafter} with max_draft_len {self.variant.max_draft_len}: "
            f"{ratios} ({length:.2f} tokens per step)"
        ]
        if self.max_concurrency is not None:
            found.append(
                f"It does not pay at larger batches: set max_concurrency to {self.max_concurrency},"
                " or length_control to goodput"
            )
        other = [row for row in self.best if row.variant not in (self.variant, PLAIN)]
        if other:
            faster = ", ".join(f"{r.variant.label} at {r.batch}: {r.ratio:.2f}" for r in other)
            found.append(f"Faster at single batch sizes: {faster}")
        return found

    def to_dict(self) -> dict[str, object]:
        """Plain values."""
        return {
            "drafter": self.variant.drafter or "none",
            "max_draft_len": self.variant.max_draft_len,
            "ratios": {str(row.batch): round(row.ratio, 3) for row in self.rows},
            "max_concurrency": self.max_concurrency,
            "best": {str(row.batch): row.variant.label for row in self.best},
        }


def recommend(rows: Sequence[Row]) -> Recommendation:
    """The variant with the highest geometric mean of its ratios, where it may be switched off.

    At batch sizes where a variant is slower than plain decoding it counts as plain decoding, since
    ``max_concurrency`` can switch it off there. Rows with made-up acceptance do not count.

    Args:
        rows: of all variants at the same batch sizes, plain decoding among them.
    """
    rows = [row for row in rows if not row.metrics.synthetic]
    by_variant: dict[Variant, list[Row]] = {}
    for row in rows:
        by_variant.setdefault(row.variant, []).append(row)
    best = max(by_variant, key=lambda variant: _score(by_variant[variant]))
    if _score(by_variant[best]) < WORTH_IT:
        best = PLAIN
    mine = sorted(by_variant[best], key=lambda row: row.batch)
    return Recommendation(
        best,
        tuple(mine),
        _limit(mine) if best != PLAIN else None,
        tuple(
            max((row for row in rows if row.batch == batch), key=lambda row: row.ratio)
            for batch in sorted({row.batch for row in rows})
        ),
    )


def _score(rows: Sequence[Row]) -> float:
    return math.exp(sum(math.log(max(1.0, row.ratio)) for row in rows) / len(rows))


def _limit(rows: Sequence[Row]) -> int | None:
    """The last batch size that pays, in rising order; None if the largest one does."""
    paying = [row.batch for row in rows if row.ratio >= 1.0]
    return None if not paying or paying[-1] == rows[-1].batch else paying[-1]
