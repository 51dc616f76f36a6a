"""A row of the benchmark: in the table, in JSON, in the plot."""

from forethought.bench.report import BenchRow, draw, table
from forethought.bench.variant import PLAIN, Variant
from forethought.outputs import SpeculationMetrics


def row(variant, metrics, identical=1.0):
    return BenchRow(variant, 4, 1234.56, 1.5, (1.4, 1.6), metrics, 0.125, 0.75, identical, 99)


def test_a_row_is_plain_values():
    metrics = SpeculationMetrics(8, 24, 10, [6, 3, 1])
    assert row(Variant("ngram", 3), metrics, 0.875).to_dict() == {
        "drafter": "ngram",
        "max_draft_len": 3,
        "batch": 4,
        "tokens_per_second": 1234.6,
        "ratio": 1.5,
        "ratio_range": [1.4, 1.6],
        "mean_acceptance_length": 2.25,
        "acceptance_by_position": [0.75, 0.375, 0.125],
        "drafted": 24,
        "accepted": 10,
        "steps": 8,
        "draft_share": 0.125,
        "verify_share": 0.75,
        "rest_share": 0.125,
        "identical": False,
        "identical_share": 0.875,
        "synthetic": False,
        "tokens": 99,
    }


def test_the_ticks_of_the_plot_are_whole_numbers():
    metrics = SpeculationMetrics(8, 24, 10, [6, 3, 1])
    speed, acceptance = draw(
        [row(PLAIN, SpeculationMetrics(8)), row(Variant("ngram", 3), metrics)]
    ).axes
    assert [text.get_text() for text in speed.get_xticklabels()] == ["4"]
    assert all(tick == round(tick) for tick in acceptance.get_xticks())


def test_the_table_has_a_line_per_row_and_marks_failures():
    metrics = SpeculationMetrics(8, 40, 15, [6, 3, 3, 2, 1], synthetic=True)
    lines = table([row(PLAIN, SpeculationMetrics(8)), row(Variant("ngram", 5), metrics, 0.5)])
    head, rule, plain, drafted = lines.splitlines()
    assert head.split()[:5] == ["batch", "drafter", "length", "tokens/s", "ratio"]
    assert set(rule) == {"-", " "}
    assert plain.split()[-1] == "yes"
    assert drafted.split()[-1] == "50.0%"
    assert " 2.88* " in drafted
    assert "75% 38% 38% 25% ..." in drafted
