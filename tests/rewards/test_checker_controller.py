"""Rewards by a function, and the process reward of the countdown searches."""

import pytest

from forethought import methods
from forethought.bench.countdown_progress import AGAIN, CLOSED, HIT, MISS, OPEN, progress
from forethought.errors import ParameterError, UnknownNameError
from forethought.scaffolding import CheckerController, ScaffoldingLlm, ScriptedWorker

QUESTION = "Use 8, 19, 18 and 5 to make 63."
SEARCH = [
    ("19 + 8 = 27, left 18 5 27", OPEN),
    ("27 + 18 = 45, 45 + 5 = 50, back", OPEN),
    ("18 * 5 = 90, 90 - 27 = 63, yes", HIT),
    ("</think>", HIT),
    (r"The answer is \boxed{(18*5)-(19+8)}.", HIT),
]


def best(checker, *samples):
    controller = methods.create(
        "best_of_n",
        reward_controller={"method": "checker", "checker": checker},
        default_sample_num=len(samples),
    )
    workers = dict.fromkeys(methods.worker_tags(controller), ScriptedWorker(list(samples)))
    with ScaffoldingLlm(controller, workers) as llm:
        return llm.generate(QUESTION).output


def test_the_sample_that_the_function_scores_highest_is_returned():
    output = best(lambda question, text: len(text) if question == QUESTION else 0, "a", "ccc", "bb")
    assert output.text == "ccc"
    assert output.meta["best_of_n"]["scores"] == [1.0, 3.0, 2.0]


def test_an_exact_checker_is_a_reward_by_its_name():
    output = best("countdown", r"\boxed{8+19}", r"\boxed{(18*5)-(19+8)}")
    assert output.meta["best_of_n"]["scores"] == [0.0, 1.0]


def test_what_is_no_checker_or_no_score_is_refused():
    with pytest.raises(UnknownNameError):
        CheckerController("countdwn")
    with pytest.raises(ParameterError, match="checker"):
        CheckerController(3)
    with pytest.raises(ParameterError, match="scores with a number"):
        best(lambda question, text: "good", "a")


def test_the_progress_of_a_search_is_that_of_its_last_line():
    text = ""
    for line, score in SEARCH:
        text += f"{line}\n"
        assert progress(QUESTION, text) == score, line


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("", AGAIN),
        ("19 - 18 = 1, left 8 5 1\n", CLOSED),
        ("19 - 18 = 1, left 8 5 1\n8 + 5 = 13, 13 + 1 = 14, back\n", CLOSED),
        ("19 - 18 = 1, left 8 5 1\nback\n", AGAIN),
        ("19 + 8 = 27, left 18 5 99\n", CLOSED),  # no move leaves that
        ("19 + 8 = 27, left 18 5 27\n18 * 5 = 90, 90 - 27 = 63, back\n", CLOSED),  # it was missed
        ("8 + 5 = 13, 13 + 18 = 31, yes\n", MISS),
        (r"The answer is \boxed{8+5}.", MISS),
        ("19 + ", MISS),
    ],
)
def test_a_search_that_cannot_come_to_the_target_from_here_scores_low(text, score):
    assert progress(QUESTION, text) == score
