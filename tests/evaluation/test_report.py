"""The table, the JSON line and the plot of a comparison."""

import io
import itertools
import json

from forethought.evaluation.report import (
    Proportion,
    ReportRow,
    count_of,
    draw,
    json_line,
    race_table,
    save_plot,
    table,
    times,
)

ROWS = [
    ReportRow("plain", Proportion(15, 20), 50_000, 1_200, 30.25),
    ReportRow("dynasor", Proportion(14, 20), 20_000, 2_000, 12.0),
    ReportRow("majority_vote", Proportion(18, 20), 400_000, 1_200, 99.999),
]


def test_the_table_lines_up_and_compares_tokens_in_plain_words():
    head, rule, *lines = table(ROWS).splitlines()
    assert head.split()[0] == "method"
    assert len(lines) == len(ROWS)
    assert set(rule) == {"-", " "}
    assert len({len(line) for line in [rule, *lines[1:]]}) == 1
    assert lines[0].endswith("30.2")
    assert lines[1].endswith("2.5 times fewer than plain")
    assert lines[2].endswith("8.0 times more than plain")


def test_a_method_inside_a_vote_is_compared_with_the_vote():
    inside = ReportRow("dynasor+majority_vote", Proportion(18, 20), 200_000, 1_200, 50.0)
    assert table([*ROWS, inside]).endswith("2.0 times fewer than majority_vote")


def test_nearly_equal_is_the_same():
    assert times(1_000, 1_001, "more", "fewer") == "the same"
    assert times(0, 0, "more", "fewer") == "the same"


def test_one_is_no_plural():
    assert [count_of(number, "problem") for number in (1, 2, 1_000)] == [
        "1 problem",
        "2 problems",
        "1,000 problems",
    ]


def test_a_race_says_how_many_times_faster_than_the_first():
    slow = ReportRow("plain", Proportion(10, 10), 2_000, 300, 4.0)
    fast = ReportRow("dynasor", Proportion(9, 10), 1_000, 900, 1.0)
    last = race_table([("", slow), ("ngram", fast)], 10).splitlines()[-1]
    assert "9 of 10" in last
    assert last.endswith("0.10  4.0 times faster")


def test_the_json_line_is_one_line_with_the_promised_fields():
    line = json_line(ROWS)
    assert "\n" not in line
    rows = json.loads(line)["rows"]
    assert [row["method"] for row in rows] == ["plain", "dynasor", "majority_vote"]
    assert rows[0] == {
        "method": "plain",
        "accuracy": 0.75,
        "accuracy_ci": [0.5313, 0.8881],
        "tokens_generated": 50_000,
        "tokens_prefilled": 1_200,
        "seconds": 30.25,
    }


def test_the_plot_is_a_png(tmp_path):
    path = save_plot(ROWS, tmp_path / "plot.png", title="three methods")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_every_point_of_the_plot_has_a_name_that_covers_no_other():
    rows = [*ROWS, ReportRow("dynasor+majority_vote", Proportion(18, 20), 200_000, 1_200, 50.0)]
    figure = draw(rows, "four methods")
    figure.savefig(io.BytesIO())  # which lays it out
    [axes] = figure.axes
    assert axes.get_legend() is None
    assert {text.get_text() for text in axes.texts} == {row.method for row in rows}
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    assert all(axes.bbox.containsx(x) for box in boxes for x in (box.x0, box.x1))


def test_the_ticks_of_the_plot_are_whole_numbers():
    axes = draw(ROWS).axes[0]
    shown = [axes.xaxis.get_major_formatter()(tick) for tick in axes.get_xticks()]
    assert "2,000" in shown
    assert not any("." in tick for tick in shown)
