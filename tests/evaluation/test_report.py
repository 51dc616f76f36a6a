"""The table, the JSON line and the plot of a comparison."""

import json

import pytest

from forethought.evaluation.plot import save_plot
from forethought.evaluation.report import Row, json_line, table
from forethought.evaluation.statistics import Proportion

ROWS = [
    Row("plain", Proportion(15, 20), 50_000, 1_200, 30.25),
    Row("dynasor", Proportion(14, 20), 20_000, 2_000, 12.0),
    Row("majority_vote", Proportion(18, 20), 400_000, 1_200, 99.999),
]


def test_the_table_lines_up_and_counts_savings_against_the_first_row():
    head, rule, *lines = table(ROWS).splitlines()
    assert head.split()[0] == "method"
    assert len(lines) == len(ROWS)
    assert set(rule) == {"-", " "}
    assert len({len(line) for line in [rule, *lines[1:]]}) == 1
    assert "+60%" in lines[1]
    assert "-700%" in lines[2]
    assert "%" not in lines[0].split("%")[-1]


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


def test_saving_tokens_is_a_share_of_the_others_tokens():
    assert ROWS[1].saved_against(ROWS[0]) == pytest.approx(0.6)
    assert ROWS[0].saved_against(ROWS[0]) == 0.0
