"""``forethought bench specreason``: what its table says about three runs of the same problems."""

import json

import pytest

from forethought.bench.specreason import (
    BASE,
    SMALL,
    SPECREASON,
    Solved,
    cells,
    json_line,
    ratio_interval,
    rows,
    text,
)
from forethought.cli.main import main

FOUND = {
    BASE: [Solved(True, 2.0, 100, 0), Solved(True, 4.0, 200, 0)],
    SMALL: [Solved(False, 0.5, 0, 100), Solved(True, 0.5, 0, 200)],
    SPECREASON: [Solved(True, 1.0, 20, 90, 9, 1), Solved(True, 2.0, 40, 190, 6, 4)],
}


def test_speedup_is_the_ratio_of_the_summed_times_and_accuracy_is_compared_in_pairs():
    base, small, both = rows(FOUND)
    assert (base.speedup, small.speedup, both.speedup) == (1.0, 6.0, 2.0)
    assert both.speedup_interval == (2.0, 2.0), "the ratio is the same for each problem"
    assert (both.share_accepted, small.share_accepted) == (0.75, None)
    assert (both.base_tokens, both.small_tokens, both.seconds) == (30.0, 140.0, 1.5)
    assert base.paired is None
    assert (small.paired.num_worse, small.paired.difference, both.paired.difference) == (1, -0.5, 0)


def test_the_interval_of_a_ratio_holds_it_and_narrows_with_the_number_of_problems():
    pairs = [(1.0 + n % 3, 1.0 + n % 2) for n in range(24)]
    low, high = ratio_interval(pairs)
    ratio = sum(one for one, _ in pairs) / sum(other for _, other in pairs)
    assert low < ratio < high
    narrow = ratio_interval(pairs * 16)
    assert low < narrow[0] < ratio < narrow[1] < high


def test_the_table_has_a_line_for_each_and_json_the_same():
    table = rows(FOUND)
    assert [line[0] for line in cells(table)[1:]] == [BASE, SMALL, SPECREASON]
    assert {len(line) for line in cells(table)} == {10}
    assert "75.0%" in text(table)
    found = json.loads(json_line(table, task="countdown"))
    assert [row["speedup"] for row in found["rows"]] == [1.0, 6.0, 2.0]
    assert found["rows"][1]["paired_worse"] == 1


@pytest.mark.slow
def test_the_command_measures_a_model_beside_itself(capsys, tmp_path):
    models = ["--base", "forethought/countdown", "--small", "forethought/countdown"]
    sizes = ["--problems", "1", "--temperature", "0", "--json", "--dtype", "float32"]
    assert main(["bench", "specreason", *models, *sizes, "--out", str(tmp_path)]) == 0
    base, small, both = json.loads(capsys.readouterr().out)["rows"]
    assert base["accuracy"] == small["accuracy"] == both["accuracy"]
    assert both["share_accepted"] == 1.0, "its own greedy steps are probable"
    assert json.loads((tmp_path / "specreason.json").read_text())["task"] == "countdown"
