r"""Which answers make a class, what that costs, and whose work it is."""

from concurrent.futures import Future

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.answers import sympy_pool
from forethought.answers.answers import (
    AnswerClasses,
    AnswerPool,
    TextEquivalence,
    checked_equivalence,
)
from forethought.errors import DependencyError, ParameterError
from forethought.scaffolding import MathEquivalence

FORMULAS = [
    (r"\sqrt{8}", r"2\sqrt{2}", r"\frac{4}{\sqrt{2}}"),
    ("x+1", "1+x", "y = x + 1", r"\frac{x^2-1}{x-1}"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"\sin^2 x + \cos^2 x", "1", "2^0"),
    (r"\log_2 8", "3", r"\sqrt[3]{27}", "3!/2"),
    (r"\frac{1}{x}+\frac{1}{y}", r"\frac{x+y}{xy}"),
    ("2x+3y=5", "4x+6y=10", "5=3y+2x"),
    ("x+y<2", "2 > y+x"),
    ("0.1x", r"\frac{x}{10}", "x/10"),
    (r"e^{i\pi}", "-1", "i^2"),
    ("2+3i", "3i+2"),
    (r"\cos(36^\circ)", r"\frac{1+\sqrt{5}}{4}"),
    (r"(\sqrt{8}, x)", r"(2\sqrt{2}, x)"),
    (r"1 \pm \sqrt{2}", r"1-\sqrt{2}, 1+\sqrt{2}"),
    ("x^2", "x*x"),
    ("x^3",),
    (r"\sqrt{x^2}",),
    ("x",),
    (r"\pi",),
    ("3.14159265358979",),
    ("1/0",),
    (r"\frac{",),
    ("2^{2^{20}}", "4^{2^{19}}"),
    ("9^{9^{9^{9}}}",),
    (r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}"),
    (r"\int_0^1 x^2 dx", "1/3"),
    (r"\frac{1}{x+1}+1", r"\frac{x+2}{1+x}"),
    (r"2\sin x\cos x", r"\sin(2x)"),
]


@pytest.fixture
def no_sympy(monkeypatch):
    """No formula may be worked out."""
    asked = []
    monkeypatch.setattr(sympy_pool.SympyPool, "forms", lambda *args: asked.append(args))
    return asked


def test_formulas_are_the_same_if_they_have_the_same_values():
    classes = AnswerClasses(MathEquivalence())
    classes.find([answer for answers in FORMULAS for answer in answers])
    found = [{classes.of(answer) for answer in answers} for answers in FORMULAS]
    assert [len(forms) for forms in found] == [1] * len(FORMULAS)
    assert len(set.union(*found)) == len(FORMULAS)


def test_two_answers_can_be_compared_without_any_vote():
    same = MathEquivalence()
    assert same("1/2", "0.5")
    assert not same("1/2", "2")
    assert same.canonical_form(" x = 5") == same.canonical_form("5.0")
    assert TextEquivalence().canonical_form(" a ") == "a"


def test_without_math_verify_numbers_work_and_formulas_say_what_to_install(monkeypatch):
    monkeypatch.setattr(sympy_pool, "_search_path", list)
    same = MathEquivalence()
    assert same("1/2", "0.5")
    assert same("x+1", "1+x")
    with pytest.raises(DependencyError, match=r"forethought\[eval\]"):
        same(r"\ln 8", r"3\ln 2")


def test_a_thousand_plain_answers_are_pooled_without_sympy_and_without_comparing_pairs(no_sympy):
    looked_up = []

    class Counting(TextEquivalence):
        def canonical_form(self, answer):
            looked_up.append(answer)
            return answer

    for equivalence in (MathEquivalence(), Counting()):
        pool = AnswerPool(equivalence)
        for number in range(1000):
            assert not isinstance(equivalence, MathEquivalence) or not pool.classes.unknown(
                [f"{number}/7"]
            )
            pool.add(number, f"{number}/7")
        assert len(pool.groups) == 1000
    assert len(looked_up) == 1000
    assert no_sympy == []


def test_each_formula_has_the_same_steps_whatever_came_before(monkeypatch):
    asked = []

    def forms(pool, formulas, steps):
        asked.append((list(formulas), steps))
        future = Future()
        future.set_result(sympy_pool.Forms({}, frozenset({r"\sin 1"})))
        return future

    monkeypatch.setattr(sympy_pool.SympyPool, "forms", forms)
    pool = AnswerPool(MathEquivalence(3.0))
    for number, answer in enumerate([r"\sin 1", r"\cos 1, \sin 1", r"\sin 1", r"\tan 1"]):
        pool.add(number, answer)
    texts = [[r"\sin 1"], [r"\cos 1", r"\sin 1"], [r"\tan 1"]]
    assert asked == [(formulas, 3_000_000) for formulas in texts]
    assert [group.members for group in pool.groups.values()] == [[0, 2], [1], [3]]
    assert pool.num_uncompared == 3


def test_where_no_process_starts_formulas_are_compared_as_text_and_counted(monkeypatch, caplog):
    monkeypatch.setattr(sympy_pool._Process, "wait_ready", lambda self: False)
    pool = AnswerPool(MathEquivalence())
    for number, answer in enumerate([r"\ln 8", r"3\ln 2", r"\ln 8", "1/2", "0.5"]):
        pool.add(number, answer)
    assert [group.members for group in pool.groups.values()] == [[0, 2], [1], [3, 4]]
    assert pool.num_uncompared == 3
    assert "does not start" in caplog.text


def test_a_function_of_two_answers_compares_with_the_first_answer_of_each_class():
    asked = []

    def near(first, answer):
        asked.append((first, answer))
        return abs(int(first) - int(answer)) <= 1

    pool = AnswerPool(near)
    for number, answer in enumerate(["1", "2", "3", "2", "4"]):
        pool.add(number, answer)
    assert [group.members for group in pool.groups.values()] == [[0, 1, 3], [2, 4]]
    assert asked == [("1", "2"), ("1", "3"), ("1", "4"), ("3", "4")]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.data())
@settings(deadline=None)
def test_any_function_makes_classes_that_later_answers_do_not_change(answers, data):
    pairs = st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4)))
    equal = data.draw(pairs)  # neither symmetric nor transitive
    classes = AnswerClasses(lambda first, answer: (int(first), int(answer)) in equal)
    texts = [str(answer) for answer in answers]
    seen = []
    for text in texts:
        classes.find([text])
        seen.append(classes.of(text))
    assert seen == [classes.of(text) for text in texts]


def test_an_equivalence_is_a_function_or_has_a_canonical_form():
    def function(one, other):
        return one == other

    class Keyed:
        def canonical_form(self, answer):
            return answer

    keyed = Keyed()
    assert checked_equivalence(function) is function
    assert checked_equivalence(keyed) is keyed
    assert checked_equivalence(None) == MathEquivalence()
    for wrong in ("abc", 7, Keyed):
        with pytest.raises(ParameterError, match="canonical_form"):
            checked_equivalence(wrong)


def test_an_equivalence_that_would_have_to_be_awaited_is_refused():
    async def function(one, other):
        return one == other

    class Keyed:
        async def canonical_form(self, answer):
            return answer

    class Called:
        async def __call__(self, one, other):
            return one == other

    for wrong in (function, Keyed(), Called()):
        with pytest.raises(ParameterError, match="plain function"):
            checked_equivalence(wrong)


@pytest.mark.parametrize("seconds", ["3", None, 0, -1, float("nan"), float("inf")])
def test_a_time_limit_that_is_none_is_refused(seconds):
    with pytest.raises(ParameterError, match="time_limit"):
        MathEquivalence(seconds)


UNLIKE = [
    ("2ab", "2bc"),
    ("2am", "2"),
    (r"\frac12 ab", "1/2"),
    ("3 am", "3 pm"),
    ("1 h", "1"),
    ("1_A", "1_B"),
]


def test_letters_that_a_parser_would_drop_tell_formulas_apart():
    classes = AnswerClasses(MathEquivalence())
    classes.find([answer for pair in UNLIKE for answer in pair] + ["2ab", "2ba", "ab+1", "1+ba"])
    for one, other in UNLIKE:
        assert classes.of(one) != classes.of(other)
    assert classes.of("2ab") == classes.of("2ba")
    assert classes.of("ab+1") == classes.of("1+ba")
