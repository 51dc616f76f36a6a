"""The demo: its race, its comparisons, and what it says about both."""

import io
import itertools
import json
from dataclasses import replace

import pytest

from forethought.evaluation.demo import Demo, Findings, Heat, draw, notes_of, show, text_of
from forethought.evaluation.journal import Attempt
from forethought.evaluation.problems import Problem
from forethought.evaluation.report import ReportRow
from forethought.evaluation.statistics import Proportion, compare_pairs
from forethought.outputs import Usage

PROBLEMS = [Problem(str(i), f"{i}?", str(i)) for i in range(2)]


def heat(drafts="", texts=("a", "b"), seconds=4.0, method="plain", decoded=10):
    """Both problems, solved one after the other."""
    attempts = [
        Attempt(
            method,
            problem,
            text,
            True,
            number,
            usage=Usage(decoded=decoded),
            elapsed=seconds * (number + 1) / 2,
        )
        for number, (problem, text) in enumerate(zip(PROBLEMS, texts, strict=True))
    ]
    return Heat(drafts, attempts)


def rows(*methods):
    """Rows of (method, problems of 64 that are right, tokens for each), compared with the first."""
    made, baseline = [], []
    for name, right, tokens in methods:
        outcomes = [[number < right] for number in range(64)]
        row = ReportRow(name, Proportion(right, 64), 64 * tokens, 64 * 20, 3.0)
        if made:
            row = replace(row, paired=compare_pairs(made[0].method, baseline, outcomes))
        baseline = baseline or outcomes
        made.append(row)
    return made


FINDINGS = Findings(
    [
        heat(),
        heat("draft_target", seconds=1.0),
        heat("draft_target", seconds=0.8, method="dynasor"),
    ],
    rows(("plain", 56, 217), ("dynasor", 57, 106)),
    rows(("plain", 50, 171), ("majority_vote@8", 63, 1582), ("repeated_sampling@16", 64, 242)),
)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (("a", "b"), "the same answers with ngram drafts, character for character"),
        (("a", "c"), "ngram drafts changed 1 of 2 answers"),
    ],
)
def test_a_race_tells_what_drafts_have_changed_beside_the_time(texts, said):
    [note] = notes_of([heat(), heat("ngram", texts), heat("ngram", texts, method="dynasor")])
    assert note.startswith("plain: ")
    assert said in note


def test_three_short_tables_tell_the_three_stories_in_their_order():
    shown = text_of(FINDINGS)
    race, less, deeper = (shown.index(f"{number}. ") for number in (1, 2, 3))
    assert race < less < deeper
    assert "draft_target  2 of 2          0.50  4.0 times faster" in shown[race:less]
    assert "106      3.0  2.0 times fewer  +1.6 (-3.6 to +6.6)  1" in shown[less:deeper]
    assert "89.1%" in shown[less:deeper]
    assert "9.3 times more   +20.3 (+9.2 to +30.2)  0.00024" in shown[deeper:]
    assert max(map(len, shown.splitlines())) <= 110


def test_the_report_ends_with_what_to_try_next_and_one_json_object(tmp_path):
    out = io.StringIO()
    show(FINDINGS, tmp_path / "new", out)
    *_, picture, following, last = out.getvalue().splitlines()
    assert following.startswith("try next: forethought ")
    assert picture == f"picture: {tmp_path / 'new' / 'demo.png'}"
    assert (tmp_path / "new" / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "new" / "demo.json").read_text() == last + "\n"
    found = json.loads(last)
    assert [(row["task"], row["method"]) for row in found["rows"]] == [
        ("arithmetic", "plain"),
        ("arithmetic", "dynasor"),
        ("countdown", "plain"),
        ("countdown", "majority_vote@8"),
        ("countdown", "repeated_sampling@16"),
    ]
    assert found["rows"][3]["accuracy"] == pytest.approx(63 / 64, abs=1e-4)
    assert found["rows"][3]["paired_p"] == pytest.approx(2 / 2**13, rel=1e-3)
    assert found["rows"][3].keys() >= {"accuracy_ci", "tokens_generated", "tokens_prefilled"}
    assert [row["seconds_per_problem"] for row in found["one_at_a_time"]] == [2.0, 0.5, 0.4]


def test_the_figure_has_three_panels_with_labels_that_do_not_overlap():
    figure = draw(FINDINGS)
    figure.savefig(io.BytesIO())  # which lays it out
    panels = figure.axes
    assert [axes.get_title().splitlines()[1] for axes in panels] == [
        "4.0 times faster with drafts",
        "+2 points (p = 1), 2.0 times fewer tokens",
        "+22 points (p = 0.00012), 1.4 times more tokens",
    ]
    assert [len(axes.texts) for axes in panels] == [3, 2, 3]
    assert "majority_vote@8\n98 %, 1,582 tokens" in {text.get_text() for text in panels[2].texts}
    assert "4.0x" in panels[0].texts[1].get_text()
    for axes in panels:
        boxes = [text.get_window_extent() for text in axes.texts]
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    for axes in panels[1:]:
        for text in axes.texts:
            box = text.get_window_extent()
            assert axes.bbox.containsx(box.x0)
            assert axes.bbox.containsx(box.x1)


NEAR = replace(
    FINDINGS,
    race=[
        heat(),
        heat("draft_target", seconds=1.0),
        heat("draft_target", seconds=1.4, method="dynasor", decoded=4),
    ],
    deeper=rows(
        ("plain", 27, 331), ("majority_vote@8", 53, 2526), ("repeated_sampling@16", 59, 1401)
    ),
)
"""Points whose labels would be on each other's bars; a method that writes less and takes longer."""


def test_no_label_is_on_the_bar_of_another_point():
    figure = draw(NEAR)
    figure.savefig(io.BytesIO())
    for axes in figure.axes[1:]:
        labels = [text.get_window_extent() for text in axes.texts]
        bars = [segment for bars in axes.collections for segment in bars.get_segments()]
        assert len(labels) == len(bars)
        for (x, low), (_, high) in bars:
            (left, bottom), (_, top) = axes.transData.transform([(x, low), (x, high)])
            for box in labels:
                crosses = box.x0 < left < box.x1 and box.y0 < top and bottom < box.y1
                assert not crosses
        assert not any(a.overlaps(b) for a, b in itertools.combinations(labels, 2))


def test_the_race_says_what_each_token_cost_and_why_fewer_take_longer():
    panel = draw(NEAR).axes[0]
    assert panel.texts[2].get_text().splitlines()[1] == "4 tokens written, 175.0 ms each; 0 read"
    caption = " ".join(panel.get_xlabel().splitlines()[1:])
    assert caption == (
        "dynasor writes 2.5 times fewer tokens than plain with drafts, but is 1.4 times slower: "
        "its probes read 0 tokens more, and beside them a token takes 3.5 times as long"
    )
    assert draw(FINDINGS).axes[0].get_xlabel() == "seconds per problem, one problem at a time"


def test_too_many_problems_are_refused_before_a_model_is_loaded():
    with pytest.raises(ValueError, match="1 to 150"):
        Demo(opener=None, num_problems=151)
