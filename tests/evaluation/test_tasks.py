"""Tasks: small files in the published formats, as their authors write them, and what is refused."""

import gzip
import json

import pytest

from forethought.errors import IsolationError, ParameterError, UnknownNameError, UsageError
from forethought.evaluation import tasks
from forethought.evaluation.tasks import task
from forethought.sandbox import sandbox

GSM8K = {
    "question": "Natalia sold 48 clips in April and half as many in May. How many altogether?",
    "answer": "In May she sold 48/2 = <<48/2=24>>24.\nAltogether 48+24 = <<48+24=72>>72.\n#### 72",
}
MATH = {
    "problem": "Compute $\\frac{1}{3} + \\frac16$.",
    "solution": "It is $\\boxed{\\frac{2}{6}} + \\ldots = \\boxed{\\frac{1}{2}}.$",
    "answer": "\\frac{1}{2}",
    "subject": "Algebra",
    "level": 2,
    "unique_id": "test/algebra/1.json",
}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'from typing import List\n\n\ndef total(values: List[int]) -> int:\n    """Sum."""\n',
    "canonical_solution": "    return sum(values)\n",
    "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1, 2]) == 3\n",
    "entry_point": "total",
}
GAME24 = (
    "Rank,Puzzles,AMT (s),Solved rate,1-sigma Mean (s),1-sigma STD (s)\n"
    "1,1 1 4 6,4.4,99.20%,4.67,1.48\n"
    '2,1 1 11 11,4.41,99.60%,4.68,"1,45"\n'
)


def write(path, *records):
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_every_task_is_found_by_name_and_another_name_is_refused():
    assert tasks.names() == (
        *("arithmetic", "countdown", "gsm8k", "math500", "aime24", "humaneval", "game24"),
    )
    assert [task(name).name for name in tasks.names()] == list(tasks.names())
    with pytest.raises(UnknownNameError, match="did you mean 'gsm8k'"):
        task("gsm8")


def test_every_instruction_asks_for_what_its_grader_looks_for():
    for name in tasks.names():
        wanted = "fenced" if name == "humaneval" else "\\boxed{}"
        assert wanted in task(name).instruction


def test_the_shipped_problems_are_those_of_the_embedded_model():
    problems = task("arithmetic").problems()
    assert task("arithmetic").embedded_model == "forethought/reasoner"
    assert problems[0].question
    assert len({problem.name for problem in problems}) == len(problems)


@pytest.mark.parametrize("name", ["gsm8k", "math500", "aime24", "humaneval", "game24"])
def test_a_task_without_shipped_problems_says_what_to_give(name):
    with pytest.raises(UsageError, match=rf"no data for the task {name}.*--data FILE"):
        task(name).problems()


def test_gsm8k_has_its_answer_behind_four_signs(tmp_path):
    path = write(tmp_path / "test.jsonl", GSM8K, {**GSM8K, "answer": "#### 1,080"})
    first, second = task("gsm8k").problems(path)
    assert (first.name, first.question, first.answer) == ("test.jsonl:1", GSM8K["question"], "72")
    assert second.answer == "1,080"


def test_math_is_read_from_the_lines_of_math500_and_from_a_directory_of_problems(tmp_path):
    (problem,) = task("math500").problems(write(tmp_path / "test.jsonl", MATH))
    assert problem.name == "test/algebra/1.json"
    assert (problem.question, problem.answer) == (MATH["problem"], "\\frac{1}{2}")
    original = {key: MATH[key] for key in ("problem", "solution")} | {"level": "Level 2"}
    for number in (10, 9):
        for split in ("train", "test"):
            directory = tmp_path / "MATH" / split / "algebra"
            directory.mkdir(parents=True, exist_ok=True)
            record = original | {"problem": f"{split} {number}"}
            (directory / f"{number}.json").write_text(json.dumps(record))
    found = task("math500").problems(tmp_path / "MATH")
    assert [(one.question, one.answer) for one in found] == [
        ("test 9", "\\frac{1}{2}"),
        ("test 10", "\\frac{1}{2}"),
    ]
    assert [one.name for one in found] == ["9.json", "10.json"]


def test_problems_of_the_same_name_are_told_apart_by_their_places(tmp_path):
    for folder in ("algebra", "geometry"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "1.json").write_text(json.dumps({**MATH, "unique_id": None}))
    names = [problem.name for problem in task("math500").problems(tmp_path)]
    assert names == [str(tmp_path / "algebra/1.json"), str(tmp_path / "geometry/1.json")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("aime.csv", 'ID,Year,Problem Number,Question,Answer\n2024-I-1,2024,1,"Find x, y.",033\n'),
        ("aime.jsonl", '{"ID": "2024-I-1", "Problem": "Find x, y.", "Answer": 33}\n'),
        ("aime.json", '[{"id": "2024-I-1", "problem": "Find x, y.", "answer": "033"}]'),
        (
            "boxed.jsonl",
            '{"id": "2024-I-1", "problem": "Find x, y.", "solution": "So \\\\boxed{033}."}',
        ),
    ],
)
def test_aime_is_read_under_the_names_of_all_its_publishers(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    (problem,) = task("aime24").problems(tmp_path / name)
    assert (problem.name, problem.question, problem.answer) == ("2024-I-1", "Find x, y.", "33")


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_humaneval_is_read_compressed_or_not(tmp_path, ending):
    (problem,) = task("humaneval").problems(write(tmp_path / f"HumanEval{ending}", HUMANEVAL))
    assert (problem.name, problem.question) == ("HumanEval/0", HUMANEVAL["prompt"])
    assert problem.answer == HUMANEVAL["canonical_solution"]
    assert set(problem.fields) == {"prompt", "entry_point", "test"}


def test_game24_is_read_from_the_csv_of_tree_of_thoughts(tmp_path):
    (tmp_path / "24.csv").write_text(GAME24)
    first, second = task("game24").problems(tmp_path / "24.csv")
    assert first.question == "Use 1, 1, 4 and 6 to make 24."
    assert second.question == "Use 1, 1, 11 and 11 to make 24."
    assert first.answer == "24"


def test_countdown_is_read_as_numbers_and_target_or_as_a_question(tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        {"target": 40, "nums": [3, 5, 7, 2]},
        {"target": 40, "numbers": "3, 5, 7, 2"},
        {"question": "Use 3, 5, 7 and 2 to make 40."},
    )
    found = task("countdown").problems(path)
    assert {problem.question for problem in found} == {"Use 3, 5, 7 and 2 to make 40."}


PROMPT, TEST = HUMANEVAL["prompt"], HUMANEVAL["test"]


@pytest.mark.parametrize(
    ("name", "record", "said"),
    [
        ("arithmetic", {"question": "q"}, "it has no 'answer'"),
        ("gsm8k", {"question": "q", "answer": "72"}, "'answer' has no '#### '"),
        ("gsm8k", {"question": "q", "answer": "####"}, "'answer' has no '#### '"),
        ("gsm8k", {"answer": "#### 1"}, "it has no 'question'. Fields that it has: 'answer'"),
        ("math500", {"problem": "p", "solution": "so 7"}, "it has no 'answer', and no 'solution'"),
        ("math500", {"answer": "7"}, "it has no 'problem' or 'question'"),
        ("aime24", {"problem": "p", "answer": "1000"}, "its answer is '1000'. Answers of AIME are"),
        ("aime24", {"problem": "p", "answer": "x"}, "integers from 0 to 999"),
        ("humaneval", {"prompt": PROMPT, "test": TEST}, "it has no 'entry_point'"),
        ("humaneval", {**HUMANEVAL, "entry_point": "total("}, "'entry_point' is 'total('"),
        ("humaneval", {**HUMANEVAL, "entry_point": "other"}, "'prompt' does not define 'other'"),
        ("humaneval", {**HUMANEVAL, "test": "assert True"}, "'test' does not define 'check'"),
        ("game24", {"Rank": "1"}, "it has no 'puzzles' or 'numbers'"),
        ("game24", {"Puzzles": "1 1 4"}, "'puzzles' has 3 numbers. Give 4"),
        ("game24", {"Puzzles": "1 1 4 x"}, "Give whole numbers"),
        ("countdown", {"nums": [1, 2], "target": "x"}, "'target' is 'x'"),
        ("countdown", {"nums": [1], "target": 3}, "Give whole numbers"),
        ("countdown", {"nums": [1, 2], "target": 10**9}, "at most 9 digits"),
        ("countdown", {"nums": [1, 10**9], "target": 3}, "at most 9 digits"),
        ("countdown", {"nums": ["\u0661", 2], "target": 3}, "at most 9 digits"),
        ("game24", {"Puzzles": "1 1 4 6000000000"}, "at most 9 digits"),
        ("countdown", {"question": "What now?"}, "does not name a list of numbers"),
    ],
)
def test_an_invalid_record_is_refused_by_field_and_expected_type(tmp_path, name, record, said):
    path = write(tmp_path / "a.jsonl", record)
    with pytest.raises(UsageError) as raised:
        task(name).problems(path)
    assert f"{path}:1: " in str(raised.value)
    assert said in str(raised.value)


# ---- graders -------------------------------------------------------------------------------------


def test_answers_of_gsm8k_are_graded_against_what_stands_behind_the_signs(tmp_path):
    thousand = {**GSM8K, "answer": "#### 1,080"}
    first, second = task("gsm8k").problems(write(tmp_path / "test.jsonl", GSM8K, thousand))
    grader = task("gsm8k").grader()
    assert grader.grade("48 + 24 = 72, so \\boxed{72}.", first)
    assert grader.grade("\\boxed{\\$72.00}", first)
    assert not grader.grade("\\boxed{24}", first)
    assert grader.grade("so 72", first)
    assert not grader.grade("so 73", first)
    assert grader.grade("\\boxed{1080}", second)
    assert not grader.grade("\\boxed{1}", second)
    grader.close()


def test_leading_zeros_of_aime_mean_nothing(tmp_path):
    path = write(tmp_path / "a.jsonl", {"problem": "p", "answer": "025"})
    (problem,) = task("aime24").problems(path)
    grader = task("aime24").grader()
    assert grader.grade("\\boxed{25}", problem)
    assert grader.grade("\\boxed{025}", problem)
    assert not grader.grade("\\boxed{250}", problem)
    grader.close()


def test_expressions_are_graded_by_the_exact_checkers(tmp_path):
    (tmp_path / "24.csv").write_text(GAME24)
    problem = task("game24").problems(tmp_path / "24.csv")[0]
    grader = task("game24").grader()
    assert grader.grade("\\boxed{(1 + 1 * 4 - 1) * 6}", problem) is False  # the one is used twice
    assert grader.grade("\\boxed{6 * 4 * 1 * 1}", problem)
    assert not grader.grade("\\boxed{6 * 4}", problem)
    assert not grader.grade(None, problem)
    path = write(tmp_path / "a.jsonl", {"target": 40, "nums": [3, 5, 7, 2]})
    (problem,) = task("countdown").problems(path)
    assert task("countdown").grader().grade("\\boxed{(3 + 5) * (7 - 2)}", problem)
    assert task("countdown").grader().grade("\\boxed{40}", problem) is False


def test_programs_are_graded_in_a_sandbox_and_their_isolation_is_asked_for_first(monkeypatch):
    assert task("humaneval").grader()._sandbox.isolation in sandbox.SAFE
    monkeypatch.setattr(sandbox, "why_not", lambda kind: None if kind == "none" else "forbidden")
    with pytest.raises(IsolationError, match="forbidden"):
        task("humaneval").grader()
    assert task("humaneval").grader(unsafe_code=True)._sandbox.isolation == "none"


def test_unsafe_code_is_refused_where_answers_are_no_programs():
    with pytest.raises(ParameterError, match="unsafe_code"):
        task("gsm8k").grader(unsafe_code=True)
