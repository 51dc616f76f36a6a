"""Rows, tables, plot and report of a comparison."""

import io
import itertools
import json
import re
from dataclasses import replace

import pytest

from forethought.evaluation.journal import Attempt
from forethought.evaluation.problems import Problem
from forethought.evaluation.report import (
    Report,
    ReportRow,
    comparison_cells,
    count_of,
    draw,
    front_of,
    outcomes_of,
    row_of,
    save_plot,
    table,
    times,
)
from forethought.evaluation.statistics import Proportion, clustered_interval, compare_pairs
from forethought.outputs import Usage

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


def test_the_json_object_is_one_line_with_the_promised_fields():
    line = Report("three methods", ROWS, further={"problems": 20}).json_line()
    assert line.endswith("}\n")
    assert line.count("\n") == 1
    report = json.loads(line)
    assert [row["method"] for row in report["rows"]] == ["plain", "dynasor", "majority_vote"]
    assert report["rows"][0] == {
        "method": "plain",
        "accuracy": 0.75,
        "accuracy_ci": [0.5313, 0.8881],
        "num_without_answer": None,
        "num_cut": 0,
        "tokens_generated": 50_000,
        "tokens_prefilled": 1_200,
        "tokens_wasted": 0,
        "seconds": 30.25,
    }
    assert report["front"] == ["dynasor", "plain", "majority_vote"]
    assert (report["problems"], report["notes"]) == (20, [])


# ---- rows of made-up attempts --------------------------------------------------------------------


def attempt(number, correct, sample=0, candidates=(), method="plain"):
    """Took 100 tokens and 10 more for each number; its answer has 40."""
    usage = Usage(decoded=100 + 10 * number, prefilled=7)
    problem = Problem(f"{number}", "?", "1")
    return Attempt(
        *(method, problem, "text", correct, number, sample),
        usage=usage,
        num_answer_tokens=40,
        elapsed=1.5 * (number + 1),
        candidates=candidates,
    )


def test_a_row_sums_up_its_attempts():
    row = row_of("plain", [attempt(0, True), attempt(1, False), attempt(2, True)])
    assert (row.correct.successes, row.correct.trials) == (2, 3)
    assert (row.tokens_generated, row.tokens_prefilled, row.tokens_wasted) == (330, 21, 210)
    assert (row.seconds, row.tokens_per_attempt) == (4.5, 110.0)
    assert row.accuracy_interval == row.correct.interval()
    assert row.pass_at_k == {}


def test_repeated_attempts_are_clusters_and_give_pass_at_k():
    outcomes = [[True, True], [True, False], [False, False]]
    made = [attempt(n, right, s) for n, one in enumerate(outcomes) for s, right in enumerate(one)]
    row = row_of("plain", made[::-1])
    assert row.accuracy_interval == clustered_interval(outcomes)
    assert row.pass_at_k == pytest.approx({1: 1 / 2, 2: 2 / 3})


def test_samples_of_a_method_give_pass_at_k_unless_some_were_ended_early():
    drawn = [(True, False, False, False), (False, False, False, False)]
    made = [attempt(n, False, candidates=one) for n, one in enumerate(drawn)]
    assert row_of("vote", made).pass_at_k == pytest.approx({1: 1 / 8, 2: 1 / 4, 4: 1 / 2})
    early = [made[0], attempt(1, True, candidates=(None,) * 4)]
    assert row_of("vote", early).pass_at_k == {}


def test_attempts_without_an_answer_and_those_that_were_cut_are_counted():
    rules = ["boxed", "", "number", ""]
    attempts = [
        replace(attempt(n, n == 0), answer_rule=rule, is_cut=n > 1) for n, rule in enumerate(rules)
    ]
    row = row_of("plain", attempts)
    assert (row.num_without_answer, row.num_cut) == (2, 2)
    head, line = comparison_cells([row])
    counts = dict(zip(head, line, strict=True))
    assert (counts["no answer found"], counts["cut at the limit"]) == ("2", "2")


# ---- the whole report ----------------------------------------------------------------------------

FIRST = [attempt(n, n % 2 == 0) for n in range(8)]
SECOND = [attempt(n, n != 1, candidates=(n > 3, n != 1), method="vote@2") for n in range(8)]


def made_up() -> Report:
    paired = compare_pairs("plain", outcomes_of(FIRST), outcomes_of(SECOND))
    columns = {"regret": 0.125}
    second = replace(row_of("vote@2", SECOND), paired=paired, columns=columns)
    rows = [row_of("plain", FIRST), second]
    return Report("8 problems", rows, ["A note <here>."], {"seed": 0}, {"task": "arithmetic"})


GOLDEN = """\
# 8 problems

| method | accuracy | 95 % interval | no answer found | cut at the limit | generated | prefilled | \
wasted | seconds | difference | p | tokens |
| :-- | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: |
| plain | 50.0% | 21.5% to 78.5% |  | 0 | 1,080 | 56 | 760 | 12.0 |  |  |  |
| vote@2 | 87.5% | 52.9% to 97.8% |  | 0 | 1,080 | 56 | 760 | 12.0 | +37.5 (-9.7 to +69.7) | 0.25 \
| the same as plain |

| method | pass@1 | pass@2 | regret |
| :-- | --: | --: | --: |
| plain |  |  |  |
| vote@2 | 68.8% | 87.5% | 0.125 |

![accuracy over tokens](comparison.png)

A note <here>.

```json
{
  "seed": 0
}
```
"""


def test_the_markdown_of_made_up_attempts():
    assert made_up().markdown("comparison.png") == GOLDEN


def test_the_json_of_made_up_attempts():
    row = made_up().to_dict()["rows"][1]
    assert row.pop("coverage_fit") == {"a": -0.3747, "b": -1.4885}
    assert row == {
        "method": "vote@2",
        "accuracy": 0.875,
        "accuracy_ci": [0.5291, 0.9776],
        "num_without_answer": None,
        "num_cut": 0,
        "tokens_generated": 1080,
        "tokens_prefilled": 56,
        "tokens_wasted": 760,
        "seconds": 12.0,
        "pass_at_k": {"1": 0.6875, "2": 0.875},
        "paired_baseline": "plain",
        "paired_better": 3,
        "paired_worse": 0,
        "paired_difference": 0.375,
        "paired_difference_ci": [-0.0969, 0.6969],
        "paired_p": 0.25,
        "paired_test": "mcnemar",
        "regret": 0.125,
    }


def test_the_page_is_complete_in_itself():
    page = made_up().html()
    assert page == made_up().html()
    assert page.startswith("<!DOCTYPE html>")
    assert "<svg" in page
    assert "<script" not in page
    assert not re.findall(r"""(?:src|href)=["'](?!#)|url\((?!#)|@import""", page)
    assert "A note &lt;here&gt;." in page
    assert "<td>+37.5 (-9.7 to +69.7)</td>" in page


def test_the_report_is_four_files(tmp_path):
    report = made_up()
    page, plot = report.save(tmp_path / "new")
    assert plot is not None
    assert page.suffix == ".html"
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in plot.parent.iterdir()) == [
        f"comparison.{suffix}" for suffix in ("html", "json", "md", "png")
    ]
    assert plot.with_suffix(".json").read_text() == report.json_line()


def test_the_front_is_what_no_method_beats_and_is_drawn():
    worse = ReportRow("worse", Proportion(13, 20), 60_000, 1_200, 30.0)
    assert [row.method for row in front_of([worse, *ROWS])] == ["dynasor", "plain", "majority_vote"]
    lines = draw([worse, *ROWS]).axes[0].lines
    [line] = [line for line in lines if line.get_linestyle() == "--"]
    assert list(line.get_xdata()) == [1_000, 2_500, 20_000]


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
