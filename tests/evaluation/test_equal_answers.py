r"""One table of answers for grader and vote, ``tests/data/equal_answers.jsonl``.

Each line has a reference answer with answers that mean the same and answers that do not: final
answers of GSM8K as models write them, answers as in MATH, and those of public reports on graders.
The lines of the source ``percentage`` have answers that a grader takes and a vote keeps apart.
"""

import json
from pathlib import Path

import pytest

from forethought.answers.answers import AnswerClasses, MathEquivalence
from forethought.evaluation.graders import MathGrader
from forethought.evaluation.problems import Problem

PATH = Path(__file__).parents[1] / "data" / "equal_answers.jsonl"
LINES = [json.loads(line) for line in PATH.read_text(encoding="utf-8").splitlines()]
PAIRS = [
    (line["source"], line["reference"], answer, is_equal)
    for line in LINES
    for name, is_equal in (("equal", True), ("unequal", False))
    for answer in line[name]
]


@pytest.fixture(scope="module")
def classes():
    classes = AnswerClasses(MathEquivalence())
    classes.find([text for _, *texts, _ in PAIRS for text in texts])
    return classes


@pytest.fixture(scope="module")
def grader():
    grader = MathGrader(answer="boxed")
    yield grader
    grader.close()


def test_the_table_has_more_than_five_hundred_pairs():
    assert len(PAIRS) == len(set(PAIRS)) > 500
    assert {source for source, *_ in PAIRS} == {"GSM8K", "MATH", "report", "percentage"}


@pytest.mark.parametrize("line", LINES, ids=lambda line: line["reference"])
def test_a_vote_pools_the_answers_that_mean_the_same(line, classes):
    reference = classes.of(line["reference"])
    assert [text for text in line["equal"] if classes.of(text) != reference] == []
    assert [text for text in line["unequal"] if classes.of(text) == reference] == []


@pytest.mark.parametrize("line", LINES, ids=lambda line: line["reference"])
def test_a_grader_takes_the_answers_that_mean_the_same(line, grader):
    def takes(answer, reference):
        return grader.grade(rf"\boxed{{{answer}}}", Problem("1", "?", reference))

    reference, is_percentage = line["reference"], line["source"] == "percentage"
    for text in line["equal"]:
        assert takes(text, reference), text
        assert takes(reference, text), text
    for text in line["unequal"]:
        assert takes(text, reference) == takes(reference, text) == is_percentage, text


def test_nothing_in_the_table_is_compared_as_text_for_want_of_work(classes):
    assert [text for _, *texts, _ in PAIRS for text in texts if classes.is_uncompared(text)] == []
