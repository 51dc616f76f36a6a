r"""The canonical form of an answer: numbers, words, lists and relations, without sympy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forethought.answers.canonical_form import Formula, canonical_form, completed, formulas

SAME = [
    ("42", " 42. ", "$42$", "42.0", "+42"),
    (
        "1/2",
        "0.5",
        r"\frac{1}{2}",
        r"\dfrac12",
        "0.50",
        "50%",
        r"50\%",
        ".5",
        "3 / 6",
        "50 percent",
    ),
    (r"-\dfrac{1}{2}", "-1/2", r"\frac{-1}{2}", "-0.5", "- 1/2", "\N{MINUS SIGN}0.5"),
    ("12,345", "12345", "12{,}345", "12 345", r"12\,345", r"\$12,345", "12345 dollars"),
    ("1e3", "1000", "10^3", "10^{3}", r"1 \times 10^3", "1E+3", "1,000"),
    ("1 1/2", "1.5", r"1\frac{1}{2}", "3/2", "x = 1.5"),
    ("-1 1/2", r"-\frac{3}{2}"),
    (r"0.\overline{3}", "1/3", r"0.\overline3", r".\overline{33}"),
    ("1/3", r"0.\dot{3}", r"0.\dot3", "0.(3)", "0.333...", r"0.333\ldots", "0.3333\u2026."),
    ("1/6", r"0.1\dot{6}", "0.1(6)", "0.1666...", r"0.1\overline{6}", r"$0.1666\dots$"),
    ("1/7", r"0.\dot{1}4285\dot{7}", "0.(142857)", "0.142857142857..."),
    ("5/2", "2\u00bd", "2 \u00bd", "2.5"),
    ("-5", "\N{EN DASH}5", "\N{MINUS SIGN}5"),
    ("1234.56", "1.234,56", "1.234,56 \u20ac"),
    ("1234567", "1.234.567", "12,34,567"),
    ("17.5", "\u20ac17,50", "17,50 \u20ac"),
    ("1500", "1.5 x 10^3", "1.5x10^{3}", "15 X 100", "1.5\u00d710\u00b3"),
    ("12:30 PM", "12:30pm", "12:30 p.m.", "12 : 30 PM"),
    ("3 PM", "3:00 pm", "3 p.m."),
    ("3:4", "3 : 4"),
    (r"\emptyset", r"\varnothing", "\u2205", r"\{\}", r"\{ \}"),
    (r"\mathbb{R}", r"(-\infty, \infty)", r"x \in \mathbb{R}"),
    ("a < b", "b > a"),
    ("5", "x=5", "y = 5", "5 = z", r"x \approx 5", "AB=5", r"\theta=5", "x_1 = 5"),
    ("5", "5 cm", r"5\text{ m}", r"5\,\mathrm{kg}", "5 meters", r"5\text{ cm}^2", r"5^\circ", "5°"),
    ("5", "5 square units", "(5)", r"\{5\}", "{5}", r"\left( 5 \right)", "5 km/h"),
    ("yes", "Yes", r"\text{Yes}", r"\textbf{yes}", "yes."),
    ("A", "(A)", r"\text{(A)}", "A.", "(A) 5", r"\textbf{(A)}", "A) red"),
    ("1, 2", "2,1", r"\{1, 2\}", "1 or 2", r"1 \text{ and } 2", "x = 1, x = 2", "x=1,2", "1, 2, 2"),
    (r"\pm 3", "3, -3", r"x = \pm 3", r"\{-3,3\}"),
    ("x=1, y=2", "y=2, x=1", "x=1 and y=2"),
    ("(1, 2)", "(1,2)", r"\left(1,\,2\right)", r"(x,y)=(1,2)", r"\langle 1, 2 \rangle"),
    ("1001_2", "1001_{2}", "1001 _ { 2 }"),
    ("x > 1", "1 < x", r"(1, \infty)", r"x \in (1, \infty)", r"(1,+\infty)"),
    (r"1 < x \le 2", "(1, 2]", r"2 \ge x > 1", r"1 < y \leq 2", "1<x<=2"),
    (r"x < 1 \text{ or } x > 2", r"(-\infty, 1) \cup (2, \infty)"),
    ("36", "36 trees", r"36\text{ trees}", "36 red balls of wool"),
    ("12 million", "12000000", r"12\text{ million}", r"\$12 million dollars", "12 million people"),
    (r"\sqrt{8}", r"2\sqrt{2}", r"\frac{4}{\sqrt{2}}", "8^{1/2}", "2 sqrt(2)"),
    (r"\frac{1}{1+\sqrt{2}}", r"\sqrt{2}-1", r"-1+\sqrt2"),
    (r"\sqrt[3]{-8}", "-2"),
    ("5!", "120", r"\binom{10}{3}", r"2^3\cdot 15", "6*7+78", "(2)(60)", "6*7+78 = 120"),
    ("10^{10^{10}}", "10**10**10", "2^{10^{10}}5^{10^{10}}", "100^{5000000000}"),
    ("p-q", "-q+p", "p - q", "-(q-p)"),
    ("(x+1)^2", "x^2+2x+1", "1+x(x+2)"),
    ("2x+3y=5", "4x+6y=10", "5=3y+2x"),
    ("x+y<2", "2 > y+x"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
]


@pytest.mark.parametrize("answers", SAME, ids=lambda answers: answers[0])
def test_answers_that_mean_the_same_have_one_form_that_takes_no_sympy(answers):
    found = {canonical_form(answer) for answer in answers}
    assert len(found) == 1
    assert not list(formulas(found.pop()))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("0.(3)", "0"),
        ("0.(3)", "0.3"),
        ("0.333...", "0.333"),
        ("0.1(6)", "0.6"),
        ("12:30 PM", "12:30 AM"),
        ("12:30 PM", "12:30"),
        ("3:4", "3/4"),
        ("a < b", "a > b"),
        (r"\emptyset", "0"),
        ("1.234,56", "1.234"),
        (r"50\%", "50"),
        ("1e999", "1e998"),
        ("1 1/2", "11/2"),
        ("1 2", "12"),
        ("1 2", "2"),
        ("1 2", r"\frac{24}{2}"),
        ("1 23 456", "123456"),
        ("1/3", "0.3333"),
        ("yes", "no"),
        ("5", ""),
        ("x" * 3000, "y" * 3000),
        ("(1,2)", "(2,1)"),
        ("(1,2)", "[1,2]"),
        ("(1,2)", "1,2"),
        ("x=1, y=2", "x=2, y=1"),
        ("x > 1", "x < 1"),
        ("x > 1", r"x \ge 1"),
        (r"x \ne 1", "x = 1"),
        ("7 AM", "7 PM"),
        ("5 apples", "6 apples"),
        ("5 red, 3 blue", "3 red, 5 blue"),
        ("5 more than x", "5"),
        ("12 million", "12"),
        ("1/2004!", "1/2006!"),
        (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
        ("10_2", "10"),
        ("p-q", "q-p"),
        ("10^{10^{10}}", "10^{10^{10}+1}"),
        ("(10,000)", "10000"),
        ("1001_2", "1001_3"),
        ("1001_2", "1001"),
        ("x'", "x''"),
        (r"x \equiv 2 \pmod 7", r"x \equiv 2 \pmod 5"),
        ("192.168.0.1", "192.168.0.2"),
        ("2023-01-01", "2021"),
        ("12:30", "12:45"),
        (r"\infty", r"-\infty"),
    ],
)
def test_answers_that_mean_something_else_have_another(one, other):
    assert canonical_form(one) != canonical_form(other)


@pytest.mark.parametrize(
    ("answer", "texts"),
    [
        ("x+1", []),
        ("2ab", []),
        ("1/x", []),
        (r"\frac{1}{x+1}", [r"\frac{1}{x+1}"]),
        (r"\sin^2 x", [r"\sin^2 x"]),
        ("x = x+1", ["x = x+1"]),
        ("x^y", ["x^y"]),
        (r"\sqrt{x}", [r"\sqrt{x}"]),
        (r"(\log 2, 3)", [r"\log 2"]),
        (r"1 \pm \sqrt{x}", [r"1 +\sqrt{x}", r"1 -\sqrt{x}"]),
        ("sin(x)", [r"\sin (x)"]),
        ("2pi", []),
        (r"\cos(36^\circ)", [r"\cos((\frac{36\pi}{180}))"]),
        ("1/0", ["1/0"]),
        ("what a day", []),
    ],
)
def test_only_formulas_are_left_for_sympy(answer, texts):
    assert sorted(formulas(canonical_form(answer))) == texts


def test_the_forms_of_formulas_take_their_places_and_text_does_where_there_is_none():
    form = canonical_form(r"\{\ln 8, \sqrt{x}, 3\ln 2, 1\}")
    known = {r"\ln 8": ("real", "2.8"), r"3\ln 2": ("real", "2.8")}
    assert completed(form, known) == ("set", frozenset({("real", "2.8"), r"\sqrt{x}", 1}))
    assert completed(Formula("x"), {}) == "x"
    assert completed(canonical_form(r"\ln 2, \log 2"), {r"\ln 2": 3, r"\log 2": 3}) == 3


@pytest.mark.parametrize(
    "answer",
    [
        "(" * 500 + ")" * 500,
        "{" * 300,
        "1" + ",1" * 400,
        "x=" * 400,
        "5" + " per" * 200 + "!",
        "1 " * 450 + "x",
        r"\frac{" * 150,
        r"\text{" * 150,
        "1" + r"\times 10^9" * 80,
        "9" * 900 + "e999",
        "\x00\\",
        "10^{10^{10}}+1",
        "9^{9^{9^{9}}}",
        "100000!",
        "2500!" + "*2500!" * 150,
        "(" * 29 + "x" + ")^{2}" * 29,
        "(x+y)" * 190,
        r"\sqrt{999999999999989}+" * 40 + "1",
        "1/2500!" + "+1/2400!" * 100,
        "5" + " of apples" * 90 + "!",
    ],
)
@pytest.mark.timeout(20)
def test_no_answer_takes_long(answer):
    hash(canonical_form(answer))


@given(st.text(alphabet=r"01.,%/\{}()[] xyefrac=<>$-+^_pmtd", max_size=60))
def test_every_text_has_a_form_and_it_is_the_same_each_time(answer):
    assert hash(canonical_form(answer)) == hash(canonical_form(f" {answer}"))
    assert canonical_form(answer) == canonical_form(f" {answer}")
