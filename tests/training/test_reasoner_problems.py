"""The problem generator: right answers, a split into training and test, one test set."""

import random
import sys

import pytest

from forethought.assets import problems as shipped_problems
from forethought.training.reasoner import problems
from forethought.training.reasoner.problems import (
    LARGEST,
    Step,
    calculate,
    fixed_test_problems,
    is_held_out,
    sample_calculation,
    sample_problem,
)


@pytest.fixture(scope="module")
def sample():
    rng = random.Random(5)
    return [sample_problem(rng) for _ in range(2000)]


def test_every_step_computes_from_the_story_or_from_the_step_it_names(sample):
    for problem in sample:
        for index, step in enumerate(problem.steps):
            for operand, source in zip(
                (step.left, step.right), problem.inputs[2 * index : 2 * index + 2], strict=True
            ):
                if source is not None:
                    assert operand == problem.steps[source].value


def test_divisions_leave_no_remainder_and_values_stay_in_range(sample):
    for step in (step for problem in sample for step in problem.steps):
        assert 0 < step.value <= LARGEST
        if step.sign == "/":
            assert step.value * step.right == step.left


def test_numbers_that_enter_from_the_story_are_told_in_the_question(sample):
    for problem in sample:
        words = problem.question.replace(".", " ").replace("?", " ").split()
        for index, step in enumerate(problem.steps):
            for operand, source in zip(
                (step.left, step.right), problem.inputs[2 * index : 2 * index + 2], strict=True
            ):
                assert source is not None or str(operand) in words


def test_training_problems_and_held_out_problems_share_no_chain_of_calculations(sample):
    rng = random.Random(6)
    held_out = [sample_problem(rng, held_out=True) for _ in range(200)]
    assert not any(is_held_out(p.family, p.steps) for p in sample)
    assert all(is_held_out(p.family, p.steps) for p in held_out)
    chains = {(p.family, tuple((s.left, s.sign, s.right) for s in p.steps)) for p in sample}
    assert not any(
        (p.family, tuple((s.left, s.sign, s.right) for s in p.steps)) in chains for p in held_out
    )


def test_the_wall_keeps_about_one_chain_in_sixteen():
    """5000 chains at 1/16: mean 312.5, standard deviation 17.1; the count lies within five."""
    chains = [(Step("", left, "+", right),) for left in range(100) for right in range(50)]
    count = sum(is_held_out("collection", chain) for chain in chains)
    assert abs(count - 312.5) < 5 * 17.1


def test_the_same_seed_gives_the_same_problems_and_another_seed_does_not():
    assert fixed_test_problems(20) == fixed_test_problems(20)
    assert fixed_test_problems(20) != fixed_test_problems(20, seed=1)


def test_the_shipped_problems_are_the_generated_ones():
    generated = [{"question": p.question, "answer": p.answer} for p in fixed_test_problems()]
    assert shipped_problems() == generated
    assert len({problem["question"] for problem in generated}) == 200


def test_drilled_calculations_are_exact_and_in_range():
    rng = random.Random(8)
    for _ in range(2000):
        left, sign, right = sample_calculation(rng)
        assert 0 < calculate(left, sign, right) <= LARGEST
        assert sign != "/" or left % right == 0


def test_the_program_writes_held_out_questions_first_then_training_ones(tmp_path, monkeypatch):
    drawn, draw = [], problems.sample_problem

    def drawing(rng, *, held_out):
        drawn.append(draw(rng, held_out=held_out))
        return drawn[-1]

    monkeypatch.setattr(problems, "sample_problem", drawing)
    for name in ("first", "again"):
        command = f"problems --seed 3 --train 40 --held-out 5 --out {tmp_path / name / 'p.txt'}"
        monkeypatch.setattr(sys, "argv", command.split())
        problems.main()
    lines = (tmp_path / "first" / "p.txt").read_text().splitlines()
    assert lines == (tmp_path / "again" / "p.txt").read_text().splitlines()
    assert lines == [problem.question for problem in drawn[:45]]
    sides = [problems.is_held_out(problem.family, problem.steps) for problem in drawn[:45]]
    assert sides == [True] * 5 + [False] * 40
