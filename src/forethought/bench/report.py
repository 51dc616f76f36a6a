"""Results of ``bench speculation``: rows, their table, a recommendation, and a plot as a PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forethought.bench.variant import PLAIN, Variant
from forethought.evaluation.report import ProgressBar, aligned, new_figure
from forethought.outputs import SpeculationMetrics
from forethought.saved_file import saving

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One variant at one batch size; medians over the rounds."""

    variant: Variant
    batch: int
    """Number of concurrent prompts."""
    tokens_per_second: float
    ratio: float
    """To plain decoding in the same round."""
    ratio_range: tuple[float, float]
    """Ratios of the worst round and the best."""
    metrics: SpeculationMetrics
    """Counters of all rounds together."""
    draft_share: float
    """Share of the wall time spent drafting."""
    verify_share: float
    """Share of the wall time in forward passes of the target."""
    identical_share: float
    """Share of the outputs with the tokens of plain decoding."""
    tokens: int
    """Generated in one round."""

    @property
    def rest_share(self) -> float:
        """Share of the wall time for scheduling, sampling, acceptance, detokenization."""
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


def table(rows: Sequence[BenchRow]) -> str:
    """The rows as aligned text."""
    left_aligned = [_HEAD.index(name) for name in ("drafter", "by position")]
    return aligned([_HEAD, *(_cells(row) for row in rows)], left_aligned)


def _cells(row: BenchRow) -> tuple[str, ...]:
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


WORTH_IT = 1.03
"""Below this ratio to plain decoding a drafter is not recommended."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The variant that does best over all batch sizes, and the rows that show it."""

    variant: Variant
    """Plain decoding if no drafter is faster."""
    rows: tuple[BenchRow, ...]
    """Its rows, by batch size."""
    max_concurrency: int | None
    """The largest batch size at which it is faster, if a larger one was measured; else None."""
    best: tuple[BenchRow, ...]
    """The fastest row at each batch size."""

    def lines(self) -> list[str]:
        """For people."""
        if self.variant == PLAIN:
            tried = ", ".join(f"{row.ratio:.2f} at {row.batch}" for row in self.best)
            return [f"Recommended: no speculation; the fastest at each batch size: {tried}"]
        ratios = ", ".join(f"{row.ratio:.2f} x plain at batch {row.batch}" for row in self.rows)
        length = self.rows[0].metrics.mean_acceptance_length or 1.0
        texts = [
            f"Recommended: {self.variant.drafter} with max_draft_len {self.variant.max_draft_len}: "
            f"{ratios} ({length:.2f} tokens per step)"
        ]
        if self.max_concurrency is not None:
            texts.append(
                f"It does not pay at larger batches: set max_concurrency to {self.max_concurrency},"
                " or length_control to goodput"
            )
        other = [row for row in self.best if row.variant not in (self.variant, PLAIN)]
        if other:
            faster = ", ".join(f"{r.variant.label} at {r.batch}: {r.ratio:.2f}" for r in other)
            texts.append(f"Faster at single batch sizes: {faster}")
        return texts

    def to_dict(self) -> dict[str, object]:
        """Plain values."""
        return {
            "drafter": self.variant.drafter or "none",
            "max_draft_len": self.variant.max_draft_len,
            "ratios": {str(row.batch): round(row.ratio, 3) for row in self.rows},
            "max_concurrency": self.max_concurrency,
            "best": {str(row.batch): row.variant.label for row in self.best},
        }


def recommend(rows: Sequence[BenchRow]) -> Recommendation:
    """The variant with the highest geometric mean of its ratios to plain decoding.

    A ratio below 1 counts as 1, since ``max_concurrency`` switches the drafter off there. Rows with
    synthetic acceptance do not count. All variants, and plain decoding, have the same batch sizes.
    """
    rows = [row for row in rows if not row.metrics.synthetic]
    by_variant: dict[Variant, list[BenchRow]] = {}
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


def _score(rows: Sequence[BenchRow]) -> float:
    return math.exp(sum(math.log(max(1.0, row.ratio)) for row in rows) / len(rows))


def _limit(rows: Sequence[BenchRow]) -> int | None:
    """The largest batch size with a ratio of at least 1; None if that is the last of ``rows``."""
    paying = [row.batch for row in rows if row.ratio >= 1.0]
    return None if not paying or paying[-1] == rows[-1].batch else paying[-1]


def save_plot(rows: Sequence[BenchRow], path: Path, title: str = "") -> Path:
    """Draw tokens/s against plain decoding over batch size, and acceptance by position.

    Raises DependencyError if matplotlib is not installed.
    """
    with saving(path, "plot") as file:
        draw(rows, title).savefig(file, dpi=150)
    return path


def draw(rows: Sequence[BenchRow], title: str = "") -> Figure:
    """The figure of ``save_plot``."""
    figure = new_figure(10.0, 4.5)
    from matplotlib.ticker import MaxNLocator

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


def _draw_acceptance(axes: Any, variant: Variant, row: BenchRow, color: str) -> None:
    rates = [100 * rate for rate in row.acceptance_by_position]
    axes.plot(range(1, len(rates) + 1), rates, "o-", color=color, label=variant.label)


class BenchProgress(ProgressBar):
    """One bar over all runs; called after each. Raises DependencyError without tqdm."""

    def __init__(self, total: int) -> None:
        super().__init__(total, "run")

    def __call__(self, variant: Variant, batch: int) -> None:
        """Advance by one run."""
        self._bar.set_description(f"batch {batch}, {variant.label}", refresh=False)
        self._bar.update()
