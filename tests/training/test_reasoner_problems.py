"""The problem generator: right answers, a split into training and test, one test set."""

import random

import pytest

from forethought.assets import problems as shipped_problems
from forethought.evaluation.generated.arithmetic import (
    LARGEST,
    Step,
    calculate,
    fixed_test_problems,
    is_held_out,
    sample_calculation,
    sample_hard_calculation,
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


def test_hard_calculations_are_exact_and_some_differences_are_close_or_negative():
    rng = random.Random(9)
    drawn = [sample_hard_calculation(rng) for _ in range(3000)]
    values = [calculate(*calculation) for calculation in drawn]
    assert all(-100 < value <= LARGEST for value in values)
    assert all(left % right == 0 for left, sign, right in drawn if sign == "/")
    assert 200 < sum(value < 0 for value in values) < 400
    close = [left for (left, sign, _), v in zip(drawn, values, strict=True) if 0 <= v < 10 < left]
    assert len(close) > 200
