"""Exact checks of countdown and 24: hand-computed cases, random expressions, hostile text."""

import random
import time
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.errors import UnknownNameError, UsageError
from forethought.rewards.verifier import (
    MAX_DEPTH,
    MAX_LENGTH,
    names,
    read_countdown,
    read_expression,
    read_game24,
    verifier,
)

QUESTION = "Use 3, 5, 7 and 2 to make 40."


def test_the_last_box_that_holds_something_counts():
    answer = r"\boxed{(3+5)*(7-2)}. I have put it into \boxed{}."
    assert verifier("countdown")(QUESTION, answer)


def accepted(expression, question=QUESTION, name="countdown"):
    return verifier(name)(question, f"So \\boxed{{1}} no, the answer is \\boxed{{{expression}}}.")


@pytest.mark.parametrize(
    "expression",
    [
        "(3+5)*(7-2)",
        "(3 + 5) x (7 - 2)",
        "(5+3)×(7−2)",
        "(3+5)(7-2)",
        "[3+5]*[7-2]",
        "(3+5)*(7-2) = 40",
        r"\left(3+5\right)\times\left(7-2\right)",
        r"(3+5) \cdot (7-2)",
        "5*7+2+3",
        "(7*5)+2+3",
    ],
)
def test_an_expression_with_the_value_of_the_target_is_accepted_in_every_notation(expression):
    assert accepted(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "40",
        "5*(3+5)",
        "3+5+7+2",
        "(3+5)*(7-2)=41",
        "(3+5)*(7-2)*1",
        "(3+5)*(7-2",
        "(3+5]*(7-2)",
        "",
        "-3+5",
        "3 5+5",
        "35+5",
        "8**2",
        "3.0*7",
        "2**3*5",
        "7--2",
        "__import__('os')",
        "3+5 and 7",
        "(3+5)*(7-2)=20*2",
        "=40",
    ],
)
def test_another_value_another_number_or_no_expression_is_refused(expression):
    assert not accepted(expression)


def test_countdown_lets_numbers_go_unused_and_24_does_not():
    assert accepted("5*7+2+3", "Use 2, 3, 5, 7 and 9 to make 40.")
    assert accepted("(10-4)*(13-9)", "4 9 10 13", "game24")
    assert not accepted("4*(10-4)", "4 9 10 13", "game24")
    assert not accepted("4*6", "4 6 10 13", "game24")
    assert accepted("4*6", "Use 4, 6, 10 and 13 to make 24.")


def test_a_number_that_is_given_twice_may_be_used_twice_and_no_more():
    assert accepted("5*5+3", "Use 5, 5 and 3 to make 28.")
    assert not accepted("5+5+5", "Use 5, 5 and 3 to make 15.")


def test_24_is_checked_in_fractions():
    """8 / (3 - 8/3) and 6 / (1 - 3/4): the well-known ones without a way in whole numbers."""
    assert accepted("8/(3-8/3)", "3 3 8 8", "game24")
    assert accepted(r"\frac{6}{1-\frac{3}{4}}", "1 3 4 6", "game24")
    assert not accepted("8/(3-3)*8", "3 3 8 8", "game24")


def test_division_by_zero_is_no_answer_and_no_error():
    assert not accepted("40/(3-3)", "Use 3, 3, 40 and 2 to make 40.")
    assert read_expression("1/0") is None


@pytest.mark.parametrize(
    ("question", "numbers", "target"),
    [
        ("Use 3, 5, 7 and 2 to make 40.", (3, 5, 7, 2), 40),
        ("Make 40 out of 3, 5 and 2.", (3, 5, 2), 40),
        ("Using the numbers [19, 36, 55, 7], create an equation that equals 65. You can use basic"
         " arithmetic operations (+, -, *, /) and each number can only be used once, for example"
         " <answer> (1 + 2) / 3 </answer>.", (19, 36, 55, 7), 65),
        ("Target: 952\nNumbers: 25 50 75 100 3 6", (25, 50, 75, 100, 3, 6), 952),
        ("Use 3, 5, and 7 to make 1", (3, 5, 7), 1),
    ],
)  # fmt: skip
def test_numbers_and_target_are_found_in_the_usual_wordings(question, numbers, target):
    assert read_countdown(question) == (numbers, target)


def test_24_reads_four_numbers_with_or_without_words():
    assert read_game24("1 1 4 6") == (1, 1, 4, 6)
    assert read_game24("Use the numbers 4, 9, 10 and 13 to make 24.") == (4, 9, 10, 13)


@pytest.mark.parametrize("question", ["", "What is 2+2?", "Use 3 to make 4.", "3, 5, 7"])
def test_a_question_without_numbers_or_target_is_an_error_that_shows_the_wording(question):
    with pytest.raises(UsageError, match="Use 3, 5, 7 and 2 to make 40"):
        verifier("countdown")(question, "\\boxed{1}")


def test_24_refuses_a_question_without_four_numbers():
    with pytest.raises(UsageError, match="four numbers"):
        verifier("game24")("1 2 3", "\\boxed{1}")


def test_verifiers_are_found_by_name():
    assert names() == ["countdown", "game24"]
    with pytest.raises(UnknownNameError, match="did you mean 'countdown'"):
        verifier("countdwon")


def test_an_answer_without_a_box_is_not_accepted():
    assert not verifier("countdown")(QUESTION, "(3+5)*(7-2)")
    assert not verifier("countdown")(QUESTION, "\\boxed{(3+5)*(7-2)")


# ---- the parser against a tree of fractions -----------------------------------------------------

SIGNS = {"+": "+", "-": "-", "*": "*", "/": "/", "×": "*", "÷": "/", "\\times ": "*"}


def random_tree(rng, depth):
    """(text in full brackets, value or None, numbers) of a random expression."""
    if depth == 0 or rng.random() < 0.2:
        number = rng.randint(0, 20)
        return str(number), Fraction(number), [number]
    left, one, first = random_tree(rng, depth - 1)
    right, other, second = random_tree(rng, depth - 1)
    sign = rng.choice(list(SIGNS))
    if rng.random() < 0.15:
        text, plain = f"\\frac{{{left}}}{{{right}}}", "/"
    else:
        text, plain = f"({left}{sign}{right})", SIGNS[sign]
    if one is None or other is None or (plain == "/" and other == 0):
        return text, None, first + second
    value = {"+": one + other, "-": one - other, "*": one * other}
    return text, one / other if plain == "/" else value[plain], first + second


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_the_parser_agrees_with_fractions_on_random_expressions(seed):
    text, value, numbers = random_tree(random.Random(seed), 4)
    found = read_expression(text)
    if value is None or len(text) > MAX_LENGTH:
        assert found is None
    else:
        assert (found.value, Counter(found.numbers)) == (value, Counter(numbers))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 99), st.sampled_from("+-*/")), min_size=2, max_size=9))
def test_precedence_and_order_are_those_of_arithmetic(parts):
    """Without brackets, against Python's own arithmetic on Fractions."""
    text = "".join(f"{number}{sign}" for number, sign in parts)[:-1]
    fractions = "".join(f"Fraction({number}){sign}" for number, sign in parts)[:-1]
    assert read_expression(text).value == eval(fractions)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="0123456789+-*/()[]{}=\\frac times.,x$ ", max_size=80) | st.text())
def test_no_text_makes_the_checks_fail(text):
    assert verifier("countdown")(QUESTION, f"\\boxed{{{text}}}") in (True, False)
    read_expression(text)


@pytest.mark.parametrize(
    "text",
    [
        "9" * 10_000,
        "(" * 5_000 + "1" + ")" * 5_000,
        "(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1),
        "1+" * 100_000 + "1",
        "\\frac" * 1_000,
        "9" * 300,
        "*".join(["9" * 10] * 30),
    ],
)
def test_huge_and_deep_expressions_are_refused(text):
    assert read_expression(text) is None


def test_the_largest_expressions_are_worked_out_at_once():
    """40 products of nine digits, and fractions that never cancel: far below a second each."""
    began = time.perf_counter()
    assert read_expression("*".join(["999999999"] * 40)).value == 999999999**40
    assert read_expression("+".join(f"1/{n}" for n in range(900, 956))) is not None
    assert time.perf_counter() - began < 30


def test_a_long_question_full_of_numbers_and_spaces_is_read_in_linear_time():
    began = time.perf_counter()
    read_countdown(QUESTION + " 1" * 20_000 + " " * 20_000 + "x, " * 10_000)
    assert time.perf_counter() - began < 30


@pytest.mark.parametrize(
    "question",
    [
        "Use 3, 5 and 7 to make 1,000.",
        "Use 3, 5 and 7 to make -5.",
        "Use 3.5, 5 and 7 to make 40.",
        "Use 1,000, 5 and 2 to make 40.",
    ],
)
def test_a_question_with_numbers_that_would_be_misread_is_refused(question):
    with pytest.raises(UsageError, match="has the number"):
        verifier("countdown")(question, r"\boxed{3 + 5}")
