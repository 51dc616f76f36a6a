"""Which answers are right."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from forethought.errors import ParameterError
from forethought.evaluation.graders import CodeGrader, MathGrader
from forethought.evaluation.problems import Problem
from forethought.evaluation.tasks import task
from forethought.sandbox.sandbox import Sandbox


def asked(answer: str) -> Problem:
    return Problem("1", "What is it?", answer)


def test_grading_looks_into_the_last_box_and_knows_mathematics():
    grade = MathGrader().grade
    assert grade("first \\boxed{3}, then \\boxed{1/2}", asked("\\frac{1}{2}"))
    assert not grade("first \\boxed{1/2}, then \\boxed{3}", asked("\\frac{1}{2}"))
    assert grade("the answer is 3", asked("3"))
    assert not MathGrader(answer="boxed").grade("the answer is 3", asked("3"))
    assert not grade(None, asked("3"))


def test_the_rule_for_answers_is_checked():
    with pytest.raises(ParameterError, match="answer"):
        MathGrader(answer="boxes")
    with pytest.raises(ParameterError, match="answer"):
        MathGrader(str.strip, answer="boxed")
    with pytest.raises(ParameterError, match="countdown"):
        task("countdown").grader(answer="number")


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        (r"50\%", "50", True),
        (r"50\%", "0.5", True),
        ("x = 5", "5", True),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        (r"\sqrt{8}", r"2\sqrt{3}", False),
        ("", "5", False),
    ],
)
def test_a_percentage_is_right_with_and_without_its_sign(answer, reference, right, grader):
    assert grader.grade(rf"\boxed{{{answer}}}", asked(reference)) is right


@pytest.fixture(scope="module")
def grader():
    grader = MathGrader()
    yield grader
    grader.close()


def test_grading_plain_answers_takes_no_process():
    grader = MathGrader()
    assert grader.grade(r"\boxed{x = 0.50}", asked("1/2"))
    assert not grader.grade(r"\boxed{0.51}", asked("1/2"))
    assert not grader.grade(r"\boxed{no}", asked("yes"))
    assert not grader._sympy._idle
    assert MathGrader(equivalence=lambda one, other: True).grade(r"\boxed{1}", asked("2"))


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        (r"\frac{2}{4}", r"\frac12", True),
        (r"\dfrac{1}{2}", "0.5", True),
        (r"-\frac{3}{4}", r"\frac{-3}{4}", True),
        (r"1\frac{1}{2}", r"\frac{3}{2}", True),
        (r"\frac{1}{3}", "0.33", False),
        (r"\{1, 2, 3\}", "3, 2, 1", True),
        (r"\{1, 2\}", r"\{1, 2, 3\}", False),
        ("(1, 2)", "(2, 1)", False),
        (r"[0, \infty)", r"[0,\infty)", True),
        ("(0, 1]", "[0, 1]", False),
        (r"(-\infty, -1) \cup (1, \infty)", r"(1,\infty)\cup(-\infty,-1)", True),
        (r"5 \text{ cm}", "5", True),
        (r"12^\circ", "12", True),
        (r"\$1,250.00", "1250", True),
        (r"25\%", "25", True),
        (r"25\%", r"\frac{1}{4}", True),
        (r"25\%", "26", False),
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", True),
        ("x^2 + 2x + 1", "(x+1)^2", True),
        ("x^2 + 1", "(x+1)^2", False),
        ("y = 2x + 3", "y = 3 + 2x", True),
        (r"\text{Evelyn}", "evelyn", True),
        (r"\text{(C)}", "C", True),
        ("007", "7", True),
        ("7", "-7", False),
        (r"\pi", "3.14", False),
    ],
)
def test_answers_are_graded_as_worked_out_by_hand(answer, reference, right, grader):
    assert grader.grade(rf"So it is \boxed{{{answer}}}.", asked(reference)) is right


def test_a_formula_that_takes_for_ever_is_wrong_and_the_next_is_graded(grader, caplog):
    assert not grader.grade(r"\boxed{9^{9^{9^{9}}} + x}", asked("x + 1"))
    assert "too much work" in caplog.text
    assert grader.grade(r"\boxed{\ln 8}", asked(r"3\ln 2"))


# ---- programs ------------------------------------------------------------------------------------

PROMPT = (
    "import math\n\n\ndef helper(x):\n    return x + 1\n\n\n"
    'def area(radius):\n    """The area of a circle."""\n'
)
CHECK = (
    "def check(candidate):\n"
    "    assert abs(candidate(1.0) - 3.14159) < 1e-3\n"
    "    assert candidate(0) == 0\n"
)
PROGRAM = Problem(
    "p", PROMPT, "", {"prompt": PROMPT, "entry_point": "area", "test": "X = 1\n\n" + CHECK}
)
RIGHT = "def area(radius):\n    return math.pi * radius ** 2\n"


@pytest.fixture(scope="module")
def runs():
    return CodeGrader(Sandbox(time_limit=2.0))


@pytest.mark.parametrize(
    "text",
    [
        f"Here it is:\n```python\n{RIGHT}```\nDone.",
        f"```\n{RIGHT}```",
        f"```python\ndef area(radius):\n    return 0\n```\nBetter:\n```python\n{RIGHT}```",
        f"```python\n{RIGHT}```\nUse it so:\n```python\nprint(area(2))\n```",
        f"```py\nfrom math import pi\nimport math\n{RIGHT}```",
        f"- in a list:\n  ```python\n{RIGHT}  ```",
        RIGHT,
        f"{PROMPT}    return math.pi * radius ** 2\n",
        "    return math.pi * radius ** 2\n",
        "    return math.pi * (helper(radius) - 1) ** 2\n\n\ndef other():\n    syntax error here\n",
        "```python\n    return math.pi * radius ** 2\n```",
        "```python\nx = radius ** 2\nif x:\n    return math.pi * x\nreturn 0\n```",
        f"<think>```python\nbroken(\n```</think>\n```Python\r\n{RIGHT}```",
    ],
)
def test_the_program_of_an_answer_is_found_and_passes(runs, text):
    assert runs.grade(text, PROGRAM)


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "  \n",
        "I cannot say.",
        "```python\n```",
        "```python\ndef area(radius):\n    return 3 * radius\n```",
        "    return radius\n",
        "```python\nimport sys\ndef area(radius):\n    sys.exit(0)\n```",
        "```python\nimport os\ndef area(radius):\n    os._exit(0)\n```",
        "```python\nimport sys\nsys.exit()\n```",
        "```python\ndef area(radius):\n    while True: pass\n```",
        "```python\ndef area(radius):\n    return bytearray(10 ** 10)\n```",
        "```python\nimport numpy\n" + RIGHT + "```",
        "```python\ndef area(\n```",
        "    raise SystemExit\n",
    ],
)
def test_a_program_that_does_not_pass_its_tests_is_wrong(runs, text):
    assert not runs.grade(text, PROGRAM)


def test_much_output_does_not_hide_that_the_tests_have_passed(runs):
    assert runs.grade(f"print('x' * 10 ** 6)\n{RIGHT}", PROGRAM)


def test_programs_are_graded_from_several_threads_at_once(runs):
    wrong = RIGHT.replace("pi", "e")
    with ThreadPoolExecutor(6) as threads:
        graded = list(threads.map(lambda text: runs.grade(text, PROGRAM), [RIGHT, wrong] * 6))
    assert graded == [True, False] * 6
