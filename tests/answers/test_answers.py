r"""Pooling answers, voting."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forethought.answers.answers import AnswerPool, MathEquivalence, get_majority_result
from forethought.scaffolding import get_digit_majority_vote_result


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


def test_a_vote_without_voters_says_so(caplog):
    info = AnswerPool().info()
    assert info["answer"] is None
    assert info["num_voters"] == 0
    assert "no sample has an answer" in info["warning"]
    assert info["warning"] in caplog.text


def test_a_vote_reports_voters_rule_and_text_comparisons():
    pool = AnswerPool(MathEquivalence())
    for number, answer in enumerate(["1/2", "0.5", "9^{9^{9^{9}}}"]):
        pool.add(number, answer)
    info = pool.info("number")
    assert info.pop("warning").startswith("1 answers take too much work")
    assert info == {"answer": "1/2", "answer_rule": "number", "num_voters": 3, "num_uncompared": 1}
