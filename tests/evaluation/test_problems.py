"""Reading and choosing problems."""

import json

import pytest

from forethought.errors import ParameterError, UsageError
from forethought.evaluation import problems
from forethought.evaluation.problems import Problem


def write(path, *lines):
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_json_lines_are_read_in_order_and_blank_lines_skipped(tmp_path):
    path = write(
        tmp_path / "own.jsonl",
        json.dumps({"question": "1+1?", "answer": 2, "source": "ignored"}),
        "",
        json.dumps({"problem": "Wie viele? ä", "solution": "\\frac{1}{2}"}),
    )
    first, second = problems.load(path)
    assert (first.question, first.answer) == ("1+1?", "2")
    assert (second.question, second.answer) == ("Wie viele? ä", "\\frac{1}{2}")


def test_other_line_ends_of_unicode_are_part_of_a_line(tmp_path):
    path = tmp_path / "own.jsonl"
    question = "Line\u2028separator and next\x85line"
    record = json.dumps({"question": question, "answer": 2}, ensure_ascii=False)
    path.write_bytes(f"{record}\r\n{record}\n".encode())
    assert [problem.question for problem in problems.load(path)] == [question] * 2


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        '["a", "b"]',
        '{"question": "q"}',
        '{"answer": "a"}',
        '{"question": " ", "answer": 1}',
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line):
    path = write(tmp_path / "own.jsonl", '{"question": "q", "answer": "a"}', line)
    with pytest.raises(UsageError, match=r"own\.jsonl:2"):
        problems.load(path)


def test_a_missing_or_empty_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        problems.load(tmp_path / "nowhere.jsonl")
    with pytest.raises(UsageError, match="no problems"):
        problems.load(write(tmp_path / "empty.jsonl", ""))


def test_the_reference_of_a_worked_solution_is_its_final_answer(tmp_path):
    path = write(
        tmp_path / "own.jsonl",
        json.dumps({"question": "q", "answer": "She has 3 + 4 = 7.\n#### 7"}),
        json.dumps({"question": "q", "answer": "So we get \\boxed{\\frac{1}{2}} in all."}),
    )
    assert [p.answer for p in problems.load(path)] == ["7", "\\frac{1}{2}"]


def test_a_choice_is_the_same_for_the_same_seed_and_without_repeats():
    pool = [Problem(str(i), f"q{i}", str(i)) for i in range(50)]
    chosen = problems.choose(pool, 20, seed=3)
    assert chosen == problems.choose(pool, 20, seed=3)
    assert chosen != problems.choose(pool, 20, seed=4)
    assert len(set(chosen)) == 20
    assert problems.choose(pool, None) == pool


@pytest.mark.parametrize("count", [0, -1, 51])
def test_more_problems_than_there_are_or_none_is_refused(count):
    pool = [Problem(str(i), "q", "a") for i in range(50)]
    with pytest.raises(ParameterError, match="1 to 50"):
        problems.choose(pool, count)
