"""The recommendation of a benchmark, from its rows."""

from forethought.bench.report import BenchRow, recommend
from forethought.bench.variant import PLAIN, Variant
from forethought.outputs import SpeculationMetrics

NGRAM, SUFFIX = Variant("ngram", 4), Variant("suffix", 8)


def row(variant, batch, ratio, synthetic=False):
    metrics = SpeculationMetrics(10, 40, 15, [8, 4, 2, 1], synthetic)
    if variant == PLAIN:
        metrics = SpeculationMetrics(25)
    return BenchRow(variant, batch, 100 * ratio, ratio, (ratio, ratio), metrics, 0.1, 0.8, 1.0, 25)


def rows(**ratios):
    """Rows of plain decoding and of both drafters at the batch sizes 1, 4 and 16."""
    found = []
    for place, batch in enumerate((1, 4, 16)):
        found.append(row(PLAIN, batch, 1.0))
        found += [
            row(variant, batch, ratios[variant.drafter][place])
            for variant in (NGRAM, SUFFIX)
            if variant.drafter in ratios
        ]
    return found


def test_the_best_over_all_batch_sizes_is_recommended_with_its_ratios():
    advice = recommend(rows(ngram=[2.0, 1.8, 1.5], suffix=[2.2, 1.2, 1.1]))
    assert advice.variant == NGRAM
    assert advice.to_dict()["ratios"] == {"1": 2.0, "4": 1.8, "16": 1.5}
    assert advice.max_concurrency is None
    first, second = advice.lines()
    assert "ngram with max_draft_len 4: 2.00 x plain at batch 1" in first
    assert "(2.50 tokens per step)" in first
    assert "suffix 8 at 1: 2.20" in second


def test_a_drafter_that_does_not_pay_is_reported_as_to_be_switched_off():
    advice = recommend(rows(ngram=[2.5, 1.9, 0.5], suffix=[1.5, 1.5, 1.5]))
    assert advice.variant == NGRAM
    assert advice.max_concurrency == 4
    assert "set max_concurrency to 4" in "\n".join(advice.lines())
    assert advice.to_dict()["best"] == {"1": "ngram 4", "4": "ngram 4", "16": "suffix 8"}


def test_where_nothing_pays_nothing_is_recommended():
    advice = recommend(rows(ngram=[1.02, 0.9, 0.8]))
    assert advice.variant == PLAIN
    assert advice.to_dict()["drafter"] == "none"
    assert advice.lines()[0].startswith("Recommended: no speculation")


def test_synthetic_acceptance_is_never_recommended():
    found = rows(ngram=[1.5, 1.5, 1.5])
    found += [row(SUFFIX, batch, 9.0, synthetic=True) for batch in (1, 4, 16)]
    advice = recommend(found)
    assert advice.variant == NGRAM
    assert set(advice.to_dict()["best"].values()) == {"ngram 4"}
