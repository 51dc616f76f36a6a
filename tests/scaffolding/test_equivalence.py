r"""Which answers mean the same, how fast it is known, and that it always comes to an end."""

import threading

import pytest

from forethought.errors import DependencyError
from forethought.scaffolding import MathEquivalence, equivalence
from forethought.scaffolding.answers import AnswerPool


@pytest.fixture(scope="module")
def same():
    return MathEquivalence(time_limit=20.0)


@pytest.mark.parametrize(
    ("one", "other", "verdict"),
    [
        ("42", "42", True),
        (" 42. ", "$42$", True),
        ("1/2", "0.5", True),
        (r"\frac{1}{2}", "0.50", True),
        (r"-\dfrac{1}{2}", "-1/2", True),
        ("12,345", "12345", True),
        ("12{,}345", "12345", True),
        ("+3", "3.0", True),
        ("12 345", r"12\,345", True),
        ("- 5", "-5", True),
        ("3 / 4", "0.75", True),
        ("1e3", "1000", True),
        ("-2.5E-1", "-1/4", True),
        ("1e999", "1e998", False),
        ("1e3", "e3", None),
        ("1 1/2", "1.5", True),
        ("-1 1/2", r"-\frac{3}{2}", True),
        ("1 1/2", "11/2", False),
        ("1 2", "12", False),
        ("1 2", "2", False),
        ("1 2", r"\frac{24}{2}", False),
        ("1 23 456", "123456", False),
        ("3", "4", False),
        ("1/3", "0.3333", False),
        ("yes", "Yes", True),
        ("yes", "no", False),
        ("5", "", False),
        ("x" * 3000, "y" * 3000, False),
        (r"1/0", "5", None),
        ("x+1", "1+x", None),
        ("7", "x", None),
        ("50%", "0.5", None),
    ],
)
def test_texts_numbers_and_words_are_settled_at_once(one, other, verdict):
    comparing = MathEquivalence()
    assert comparing.quick(one, other) is verdict
    assert comparing.quick(other, one) is verdict
    assert comparing._process is None


@pytest.mark.parametrize(
    ("one", "other", "verdict"),
    [
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        ("x+1", "1+x", True),
        ("(1,2)", "(1, 2)", True),
        ("x^2", "x^3", False),
        (r"\{1,2\}", r"\{2,1\}", True),
        ("(1,2)", "(2,1)", False),
        (r"\text{yes}", "yes", True),
        ("7", "x", False),
        ("1e3", "10^3", True),
        ("2e-1", "20%", True),
    ],
)
def test_formulas_are_compared_by_what_they_mean(same, one, other, verdict):
    assert same(one, other) is verdict
    assert same.quick(one, other) is verdict  # remembered


def test_nonsense_is_just_different(same):
    assert not same(r"\frac{", "}{")
    assert not same("\x00", r"\\")


def test_a_comparison_that_takes_too_long_counts_as_different_and_the_next_one_works(same):
    assert same("a+b", "b+a")  # started
    same.time_limit = 0.3
    assert not same("9^{9^{9^9}}", "5x")  # would take for ever
    same.time_limit = 20.0
    assert same("a+c", "c+a")


def test_it_works_from_many_threads_at_once(same):
    found = []

    def compare(number):
        found.append(same(f"x+{number}", f"{number}+x") and not same(f"x+{number}", "x-1"))

    threads = [threading.Thread(target=compare, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [True] * 6


def test_without_math_verify_numbers_work_and_formulas_say_what_to_install(monkeypatch):
    monkeypatch.setattr(equivalence.importlib.util, "find_spec", lambda name: None)
    same = MathEquivalence()
    assert same("1/2", "0.5")
    with pytest.raises(DependencyError, match=r"forethought\[eval\]"):
        same("x+1", "1+x")


def test_a_pool_knows_which_answers_it_can_place_at_once(same):
    pool = AnswerPool(same)
    assert pool.quick("1")
    pool.add(0, "1")
    assert pool.quick("2")
    assert not pool.quick("y^2")
    pool.add(1, "y^2")
    pool.add(2, "y*y")
    assert pool.winner.members == [1, 2]
