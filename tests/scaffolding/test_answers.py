r"""Finding answers in texts, pooling them, voting."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forethought.scaffolding import (
    extract_answer_from_boxed,
    extract_answer_with_regex,
    get_digit_majority_vote_result,
)
from forethought.scaffolding.answers import AnswerPool, get_majority_result, unpaired_brace
from forethought.scaffolding.math_utils import extract_answer_from_boxed as same_function


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ 7 }", "7"),
        (r"\boxed {7}", "7"),
        (r"\fbox{7} \fboxed{8}", "8"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"$\boxed 7$", "7"),
        (r"\boxed{}", ""),
        (r"\boxed{unclosed", None),
        (r"\boxed{\frac{1}{2}", None),
        ("no box", None),
        ("", None),
        (r"\boxed", None),
    ],
)
def test_the_answer_is_what_stands_in_the_last_box(text, answer):
    assert extract_answer_from_boxed(text) == answer


def test_the_old_module_name_has_the_same_function():
    assert same_function is extract_answer_from_boxed


def test_an_answer_can_be_found_by_a_pattern():
    text = "The final answer is 3\nThe final answer is 42"
    assert extract_answer_with_regex(text) == "42"
    assert extract_answer_with_regex("A: 7", r"A: (\d)") == "7"
    assert extract_answer_with_regex("nothing") is None


@pytest.mark.parametrize(
    ("text", "place"),
    [("42}", 2), ("{1}}", 3), ("{1}", None), ("", None), (r"\}}", 2), (r"a\\}", 3)],
)
def test_the_brace_that_closes_what_was_opened_before_is_found(text, place):
    assert unpaired_brace(text) == place


def boxed(*answers):
    return [rf"text {i} \boxed{{{a}}}" for i, a in enumerate(answers)]


@pytest.mark.parametrize(
    ("answers", "winner"),
    [
        (["1", "2", "2"], (1, "2")),
        (["1", "2"], (0, "1")),
        (["2", "1", "1", "2"], (0, "2")),
        (["-5", "-5", "3"], (0, "-5")),
        (["0", "0"], (0, "0")),
        (["1.5", "1.5", "3"], (2, "3")),
        (["x", "y"], (0, None)),
        ([], (0, None)),
        (["x", "7"], (1, "7")),
    ],
)
def test_whole_numbers_vote_and_ties_go_to_the_first_seen(answers, winner):
    assert get_digit_majority_vote_result(boxed(*answers)) == winner


def test_texts_that_differ_pool_by_their_answers():
    texts = [r"long way \boxed{4}", r"\boxed{5}", r"short \boxed{4}"]
    assert get_digit_majority_vote_result(texts) == (0, "4")


def test_texts_without_a_box_do_not_vote():
    assert get_digit_majority_vote_result(["nothing", r"\boxed{3}"]) == (1, "3")


def test_any_results_can_vote():
    assert get_majority_result(["b", "a", "a"]) == (1, "a")
    assert get_majority_result(["b", "a", "a"], result_validator=lambda r: r == "b") == (0, "b")
    assert get_majority_result([]) == (None, None)


def full_vote(votes):
    """The obvious way: count all, ties to the answer of the lowest number."""
    voted = [vote for vote in votes if vote is not None]
    if not voted:
        return None
    return max(voted, key=lambda vote: (voted.count(vote), -votes.index(vote)))


def winner_of(pool):
    return None if pool.winner is None else pool.winner.answer


@given(st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=9), st.randoms())
def test_a_decided_vote_has_the_winner_of_the_full_vote_in_any_order(votes, random):
    order = list(range(len(votes)))
    random.shuffle(order)
    pool = AnswerPool()
    for place, number in enumerate(order):
        if pool.decided(order[place:]):
            break
        if votes[number] is not None:
            pool.add(number, votes[number])
    assert pool.decided([]) or pool.decided(order[place:])
    assert winner_of(pool) == full_vote(votes)


@given(st.lists(st.sampled_from(["a", "b", None]), max_size=5), st.integers(1, 3), st.randoms())
def test_a_vote_that_is_not_decided_could_still_turn(known, pending, random):
    """Exactness: it never waits for samples that cannot matter."""
    numbers = list(range(len(known) + pending))
    random.shuffle(numbers)
    pool, votes = AnswerPool(), dict(zip(numbers, known, strict=False))
    for number, vote in votes.items():
        if vote is not None:
            pool.add(number, vote)
    outstanding = numbers[len(known) :]
    outcomes = set()
    for rest in itertools.product(["a", "b", "new", None], repeat=pending):
        whole = votes | dict(zip(outstanding, rest, strict=True))
        outcomes.add(full_vote([whole[n] for n in sorted(whole)]))
    assert pool.decided(outstanding) == (len(outcomes) == 1)


def test_nothing_is_decided_before_the_first_vote():
    assert not AnswerPool().decided([0])
    assert AnswerPool().decided([])
