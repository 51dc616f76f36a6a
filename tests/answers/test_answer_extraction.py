r"""Finding the final answer in a text."""

import json
from pathlib import Path

import pytest

from forethought.answers.answer_extraction import extract_answer, unpaired_brace
from forethought.answers.answer_spaces import MathAnswers, answer_space, rule_of
from forethought.compat.tensorrt_llm.math_utils import extract_answer_from_boxed as same_function
from forethought.errors import ParameterError
from forethought.scaffolding import extract_answer_from_boxed, extract_answer_with_regex


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ 7 }", "7"),
        (r"\boxed {7}", "7"),
        (r"\fbox{7} \fboxed{8}", "7"),
        (r"so $\fbox{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{1}, no: \fbox{2}", "2"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"$\boxed 7$", "7"),
        (r"$\boxed7$", "7"),
        (r"\boxed -7.5 m", "-7.5"),
        (r"\boxed $7$", "7"),
        ("\\boxed\n$$7$$", "7"),
        (r"\boxed \frac{1}{2}", r"\frac{1}{2}"),
        (r"${\boxed x}$", "x"),
        (r"\boxed $", None),
        (r"I put it in \boxed notation.", None),
        (r"I put it in a \boxed. It is 7.", None),
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


def by_rule(text, **options):
    extracted = extract_answer(text, **options)
    return None if extracted is None else (extracted.rule, extracted.text)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"I get \boxed{5}. Wait, \fbox{6}.", "6"),
        (r"The answer is 5, so \boxed{6}. As I said, the answer is 7.", "6"),
        (r"\boxed{6}. I have put it into \boxed{}.", "6"),
        (r"\boxed{6}, in the form \boxed{...}", "6"),
        (r"\boxed{1} then \boxed{2", "1"),
        ("\\boxed{" * 5000, None),
    ],
)
def test_a_box_comes_first_and_the_last_one_that_holds_something_counts(text, answer):
    assert by_rule(text) == (answer and ("boxed", answer))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 72", "72"),
        ("So 5+3=8\n#### $8.50", "$8.50"),
        ("stuff #### 1,234", "1,234"),
        ("earns 9 * 2 = $<<9*2=18>>18 every day.\n#### 18", "18"),
        ("The answer is 5.\n#### 6", "6"),
        ("#### yes", "yes"),
        (r"#### \frac{1}{2}", r"\frac{1}{2}"),
    ],
)
def test_four_hashes_mark_an_answer(text, answer):
    assert by_rule(text) == ("hash", answer)


@pytest.mark.parametrize(
    "text", ["#### Step 2: Add\n5 + 3 = 8.", "#### 1. First\nSo 8.", "#### Conclusion\nIt is 8."]
)
def test_four_hashes_of_a_heading_mark_none(text):
    assert by_rule(text) == ("number", "8")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 36.", "36"),
        ("The answer is $18.", "18"),
        ("The answer is $10 because he paid.", "10"),
        ("The answer is 36 trees in the orchard.", "36"),
        (r"The final answer is: $\frac{1}{2}$.", r"\frac{1}{2}"),
        (r"Thus the answer is \(x^2+1\).", "x^2+1"),
        (r"The answer is $3 \times 4 = 12$.", r"3 \times 4 = 12"),
        ("The answer is x^2 + 1.", "x^2 + 1"),
        ("The correct answer is x = 5, since 2x=10.", "x = 5"),
        ("**Answer:** 42", "42"),
        ("**Final Answer**\n42", "42"),
        ("### Final Answer\n\n36 trees", "36"),
        ("**The answer is 8.**", "8"),
        ("The answer is **72**.", "72"),
        ("The answer is `8`", "8"),
        ("final answer: 3.5", "3.5"),
        ("Answer = 12", "12"),
        ("The answer is: \n\n42", "42"),
        ("Answer: (B)", "(B)"),
        ("So the answer is (B) 5 apples.", "(B) 5 apples"),
        ("So the answer is B) 5 apples.", "B) 5 apples"),
        ('The answer is 4 <tool_call>{"name": "f"}</tool_call>', "4"),
        ("the answer is that she has 12 eggs.", "12"),
        ("The answer to the question is 5.", "5"),
        ("The answer is therefore -5.", "-5"),
        ("The answer is 2\N{SQUARE ROOT}3.", "2\N{SQUARE ROOT}3"),
        ("The answer is 1 000.", "1 000"),
        ("The answer is yes.", "yes"),
        ("the answer is Paris", "Paris"),
        ("The answer is (1, 2).", "(1, 2)"),
        ("The answer is 1,2,3", "1,2,3"),
        ("answer is {1, 2}", "{1, 2}"),
        ("The answers are 3 and 4.", "3 and 4"),
        ("The answer is 0.5.", "0.5"),
        ("The answer is 2/3 cup", "2/3"),
        ("The answer is 5 PM", "5 PM"),
        ("Answer: 7 days (one week)", "7"),
        ("the answer is 5. But wait, actually the answer is 6.", "6"),
        ("The answer is 7. Is that answer right?", "7"),
        ("<think>The answer is 5</think>The answer is 7", "7"),
        ("\N{CJK UNIFIED IDEOGRAPH-7B54}answer\N{FULLWIDTH COLON} 5", "5"),
    ],
)
def test_what_is_said_to_be_the_answer_is_it(text, answer):
    assert by_rule(text) == ("phrase", answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So, the farmer has 36 trees.", "36"),
        ("It costs $1,250.50.", "1,250.50"),
        ("The total is **15**.", "15"),
        ("= $$12$$", "12"),
        ("temperature is -5 degrees", "-5"),
        ("Therefore 2 x 3 = 6 apples and 10-3 = 7.", "7"),
        ("which leaves 10-3", "3"),
        ("x = 3/4", "3/4"),
        (r"x = \frac{3}{4}", r"\frac{3}{4}"),
        ("It grew by 50%.", "50%"),
        ("about 2 million people", "2 million"),
        ("The area is 12 cm^2.", "12"),
        ("The length is 100cm, the 2nd time.", "100"),
        ("1. First\n2. Second we get 9\n3. Done", "9"),
        ("The answer is not 5. It is 6", "6"),
        ("at 3:30", "3:30"),
        (r"the profit is \(\$70{,}000\).", "70,000"),
        ("<think>5 or 6</think>It is 7", "7"),
        ("That makes 3 1/2 cups.", "3 1/2"),
        ("That makes 2\u00bd cups.", "2\u00bd"),
        ("which is 1.5e-3 m", "1.5e-3"),
        ("about 3 x 10^5 people", "3 x 10^5"),
        (r"about $3 \times 10^{-5}$", r"3 \times 10^{-5}"),
        ("a total of 2^10", "2^10"),
        (r"equals -\frac12.", r"-\frac12"),
        (r"equals \frac{-1}{2}.", r"\frac{-1}{2}"),
        (r"we get $2\sqrt{3}$.", r"2\sqrt{3}"),
        ("in the ratio 12:5.", "12:5"),
        ("It was on 2024-05-06.", "2024-05-06"),
        ("It costs \u20ac1.234,56.", "1.234,56"),
        ("It costs \u20ac17,50.", "17.50"),
        ("It costs 17,50 \u20ac.", "17.50"),
        ("They are 1.000.000 people.", "1.000.000"),
        ("They are 12,34,567 people.", "12,34,567"),
        ("\u7b54\u6848\u662f17\u3002", "17"),
        ("we get __17__, _18_", "18"),
        ('It is 4. <tool_call>{"name": "f", "arguments": {"x": 9}}</tool_call>', "4"),
    ],
)
def test_the_last_number_is_the_answer_where_nothing_else_says_it(text, answer):
    assert by_rule(text) == ("number", answer)


@pytest.mark.parametrize(
    "text",
    ["", None, "none", r"\boxed{}", r"\boxed{\frac{1}{2}", "<think>5", "<think>5</think>", "v2.x"],
)
def test_a_text_without_an_answer_has_none(text):
    assert by_rule(text) is None


def test_a_text_that_was_cut_has_no_last_number():
    assert by_rule("First 3 + 4", is_cut=True) is None
    assert by_rule("The answer is 7. And 3", is_cut=True) == ("phrase", "7")
    assert by_rule(r"\boxed{7} and 3", is_cut=True) == ("boxed", "7")


@pytest.mark.parametrize("text", ["#### 12", "The answer is 12", "answer: $12", "Answer: **12"])
def test_the_last_word_of_a_text_that_was_cut_may_go_on(text):
    assert by_rule(text, is_cut=True) is None
    assert by_rule(f"The answer is 7, no. {text}", is_cut=True) == ("phrase", "7")


@pytest.mark.parametrize(
    "text", ["#### 12\n", "The answer is 12 app", "answer: $12$", "answer: **12**"]
)
def test_an_answer_before_the_cut_counts(text):
    assert by_rule(text, is_cut=True)[1] == "12"


def test_a_rule_may_be_chosen():
    text = "#### 1\nThe answer is 2.\nIt is 3."
    rules = ("auto", "boxed", "hash", "phrase", "number")
    found = [by_rule(text, rule=rule) for rule in rules]
    assert found == [("hash", "1"), None, ("hash", "1"), ("phrase", "2"), ("number", "3")]


@pytest.mark.parametrize("number", range(0, 200, 7))
def test_answers_of_gsm8k_are_found_however_they_are_written(number):
    """Data: GSM8K (MIT licence, ``tests/data/gsm8k_LICENSE``)."""
    path = Path(__file__).parents[1] / "data" / "gsm8k_test_200.jsonl"
    record = json.loads(path.read_text().splitlines()[number])
    steps, _, answer = record["answer"].rpartition("####")
    answer = answer.strip()
    assert by_rule(record["answer"]) == ("hash", answer)
    for ending in ("The answer is {}.", "**Final Answer:** ${}", "Answer: {} in all"):
        assert by_rule(steps + ending.format(answer)) == ("phrase", answer)
    assert by_rule(rf"{steps} so $\boxed{{{answer}}}$") == ("boxed", answer)
    assert by_rule(f"{steps} So there are {answer} of them.") == ("number", answer)


@pytest.mark.parametrize(
    "text",
    [
        "answer is ",
        "$",
        "#### ",
        "\\boxed{",
        "*",
        "answer\n",
        "1,111",
        "answer is (",
        "\\frac{1}{",
        " ",
        "* ",
        "\n ",
        "<tool_call>",
        "_1",
        "1.111",
        "11,",
        "1\\sqrt",
    ],
)
@pytest.mark.timeout(60)
def test_no_text_takes_long(text):
    extract_answer(text * 20_000)
    extract_answer("answer" + text * 20_000)


@pytest.mark.parametrize("text", ["the answer is $", "answer: not "])
@pytest.mark.timeout(60)
def test_many_phrases_take_time_in_proportion_to_the_text(text):
    extract_answer(text * 200_000)


def test_the_rule_belongs_to_the_answers_of_mathematics():
    assert isinstance(answer_space("math", "number"), MathAnswers)
    for wrong in (("text", "number"), ("math", "boxes"), ("math", "number", str.strip)):
        with pytest.raises(ParameterError, match="answer"):
            answer_space(*wrong)
    assert rule_of(answer_space("text"), None) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is minus 5.", ("phrase", "-5")),
        ("The answer is negative $5.", ("phrase", "-$5")),
        ("So we get Minus 3.5 degrees", ("number", "-3.5")),
        ("So we get 10 minus 5", ("number", "5")),
        ("We need x minus 5", ("number", "5")),
        ("x minus 4 is negative 2", ("number", "-2")),
    ],
)
def test_a_sign_in_words_is_one_and_a_difference_has_none(
    text: str, expected: tuple[str, str]
) -> None:
    assert by_rule(text) == expected


@pytest.mark.parametrize(
    "stated",
    [
        *("half of 10", "between 3 and 5", "5 squared", "3 times 5", "3 and a half"),
        *("2 hours and 30 minutes", "2 hours 30 minutes", "12 apples and 3 pears"),
    ],
)
def test_what_words_make_of_numbers_is_none_of_these_numbers(stated: str) -> None:
    assert by_rule(f"The answer is {stated}.") == ("phrase", stated)
    assert by_rule("The answer is 5, which is half of 10.") == ("phrase", "5")
