"""Countdown problems, their exact solver, the search traces and the examples made of them."""

import itertools
import random
import re
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from countdown import corpus
from countdown.traces import LONGEST_SEARCH, UNSURE, write_trace
from forethought.errors import ParameterError
from forethought.evaluation.generated.countdown import (
    LARGEST,
    QUESTIONS,
    SIZES,
    TARGETS,
    Problem,
    fixed_test_problems,
    is_held_out,
    question_text,
    reachable,
    sample_problem,
    solve,
)
from forethought.rewards.verifier import read_countdown, read_expression, verifier
from forethought.training.chat_tokenizer import END, prompt_text

accepts = verifier("countdown")


@pytest.fixture(scope="module")
def sample():
    rng = random.Random(5)
    return [sample_problem(rng, size) for size in SIZES for _ in range(150)]


@pytest.fixture(scope="module")
def tokenizer():
    return corpus.train_tokenizer(samples=200)


# ---- problems -----------------------------------------------------------------------------------


def brute_force(numbers):
    """Every value of every binary tree over all the numbers in whole steps of 1 to LARGEST."""
    if len(numbers) == 1:
        return {Fraction(numbers[0])}
    found = set()
    for order in set(itertools.permutations(numbers)):
        for cut in range(1, len(order)):
            for one in brute_force(order[:cut]):
                for other in brute_force(order[cut:]):
                    values = [one + other, one - other, one * other]
                    values += [one / other] if other else []
                    found |= {v for v in values if 1 <= v <= LARGEST and v.denominator == 1}
    return found


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=3))
def test_the_reachable_values_are_those_of_a_brute_force_over_fractions(numbers):
    assert reachable(tuple(numbers)) == brute_force(tuple(numbers))


def test_the_reachable_values_of_four_numbers_are_those_of_a_brute_force():
    assert reachable((3, 5, 7, 2)) == brute_force((3, 5, 7, 2))


def test_hand_computed_problems_are_solved_and_impossible_ones_are_not():
    assert [str(step) for step in solve(Problem((2, 3), 6))] == ["3 * 2 = 6"]
    assert solve(Problem((3, 5, 7), 50)) is not None  # (3 + 7) * 5
    assert solve(Problem((1, 1, 1), 50)) is None
    assert solve(Problem((3, 3, 8, 8), 24)) is None  # only in fractions: 8 / (3 - 8 / 3)


def test_a_solution_uses_every_number_once_and_ends_at_the_target(sample):
    for problem in sample:
        left = Counter(problem.numbers)
        for step in solve(problem):
            left -= Counter([step.left])
            left -= Counter([step.right])
            left += Counter([step.value])
        assert left == Counter([problem.target])


def test_every_question_names_its_numbers_and_target(sample):
    for problem, wording in zip(sample, itertools.cycle(QUESTIONS), strict=False):
        asked = read_countdown(question_text(problem, wording))
        assert asked == (problem.numbers, problem.target)
        assert problem.target in TARGETS


def test_training_and_held_out_problems_share_no_multiset_of_numbers_with_its_target(sample):
    rng = random.Random(6)
    held_out = [sample_problem(rng, size, held_out=True) for size in SIZES for _ in range(50)]
    assert not any(map(is_held_out, sample))
    assert all(map(is_held_out, held_out))
    for problem in held_out:
        for order in itertools.permutations(problem.numbers):
            assert is_held_out(Problem(order, problem.target))


def test_about_one_problem_in_sixteen_is_held_out():
    problems = [Problem((a, b, c), 50) for a in range(20) for b in range(20) for c in range(20)]
    distinct = {tuple(sorted(p.numbers)): p for p in problems}.values()
    assert 0.04 < sum(map(is_held_out, distinct)) / len(distinct) < 0.09


def test_the_test_set_is_fixed_distinct_and_held_out():
    problems = fixed_test_problems(10)
    assert problems == fixed_test_problems(10)
    assert [len(problem.numbers) for problem in problems] == [3] * 10 + [4] * 10
    assert len({(tuple(sorted(p.numbers)), p.target) for p in problems}) == 20
    assert all(map(is_held_out, problems))


# ---- traces -------------------------------------------------------------------------------------

STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


def replay(problem, search):
    """Carry out a search line by line; the numbers left when it ends."""
    state, outer, hit = Counter(problem.numbers), None, False
    for line in search.splitlines():
        assert not hit, "nothing follows a hit"
        if line == "back":
            state, outer = outer, None
            continue
        left, now = Counter(state), None
        for one, sign, other, value in STEP.findall(line):
            expression = read_expression(f"{one}{sign}{other}")
            assert expression.value == int(value)
            for number in (one, other):
                assert left[int(number)] > 0, line
                left[int(number)] -= 1
            left[int(value)] += 1
            now = +left
        if "left" in line:
            told = Counter(map(int, line.split("left ")[1].split()))
            assert told == now
            state, outer = now, state
        else:
            assert now.total() == 1
            hit = line.endswith(", yes")
            assert hit == (now == Counter([problem.target]))
            assert hit or line.endswith(", back")
    assert hit
    return now


def test_every_line_of_a_search_is_right_and_the_last_one_hits(sample):
    rng = random.Random(1)
    for problem in sample:
        trace = write_trace(problem, rng)
        assert replay(problem, trace.search) == Counter([problem.target])
        assert len(trace.search.splitlines()) <= LONGEST_SEARCH + 7


def test_the_checker_accepts_the_answer_of_every_trace(sample):
    rng = random.Random(2)
    for problem in sample:
        trace = write_trace(problem, rng)
        assert accepts(problem.question, trace.text)
        assert Counter(read_expression(trace.answer).numbers) == Counter(problem.numbers)


def test_numbers_that_occur_again_as_a_result_are_not_mixed_up():
    rng = random.Random(3)
    for problem in (Problem((3, 5, 8, 8), 80), Problem((2, 2, 4, 16), 64), Problem((9, 9, 9), 90)):
        for _ in range(20):
            assert accepts(problem.question, write_trace(problem, rng).text)


def test_searches_of_one_problem_differ_and_depend_on_the_generator_alone():
    problem = Problem((3, 5, 7, 2), 40)
    rng = random.Random(4)
    assert len({write_trace(problem, rng).search for _ in range(20)}) > 10
    first, again = (write_trace(problem, random.Random(9)) for _ in range(2))
    assert first == again


def test_a_problem_without_a_solution_is_refused():
    with pytest.raises(ParameterError, match="99 cannot be made"):
        write_trace(Problem((9, 9, 9), 99), random.Random(0))


def test_backtracking_is_in_most_traces(sample):
    rng = random.Random(5)
    traces = [write_trace(problem, rng).search for problem in sample]
    assert sum("back" in trace for trace in traces) > len(traces) / 2


# ---- examples -----------------------------------------------------------------------------------


def trained_text(tokenizer, example):
    ids = [t for t, mark in zip(example.ids, example.trained, strict=True) if mark]
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_every_digit_is_a_token(tokenizer):
    tokens = tokenizer.encode("13 * 7 = 91, back\n").ids
    assert [tokenizer.decode([t]) for t in tokens] == [*"13", " * ", "7", " = ", *"91", ", back\n"]


def test_any_text_survives_the_tokenizer(tokenizer):
    text = "naïve — 42 × π\n\n  “été”\t{}"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_question_is_never_trained_on_and_the_whole_trace_is(tokenizer, sample):
    rng = random.Random(0)
    for problem in sample[::20]:
        example = corpus.solved(tokenizer, rng, problem)
        told = trained_text(tokenizer, example)
        assert accepts(problem.question, told)
        assert told.endswith("}." + END)
        assert "make" not in told


def test_examples_fit_into_the_rows_of_the_finish(tokenizer):
    rng = random.Random(1)
    lengths = [len(corpus.make_example(tokenizer, rng, "four").ids) for _ in range(200)]
    assert max(lengths) <= 420


def test_a_drill_trains_on_results_alone_and_they_are_right(tokenizer):
    rng = random.Random(0)
    for _ in range(20):
        example = corpus.drill(tokenizer, rng)
        assert all(line.isdigit() for line in trained_text(tokenizer, example).split())
        for one, sign, other, value in STEP.findall(tokenizer.decode(example.ids)):
            assert read_expression(f"{one}{sign}{other}").value == int(value) <= LARGEST


def test_probes_before_the_end_of_the_search_are_answered_with_doubt(tokenizer, sample):
    rng, kinds = random.Random(0), Counter()
    for problem in sample:
        example = corpus.probed(tokenizer, rng, problem)
        whole = tokenizer.decode(example.ids, skip_special_tokens=False)
        guess = whole.rsplit("\\boxed{", 1)[1].split("}")[0]
        assert trained_text(tokenizer, example).endswith(guess + "}\n\\]" + END)
        found = ", yes\n" in whole
        assert (guess == UNSURE) == (not found)
        assert not found or accepts(problem.question, f"\\boxed{{{guess}}}")
        kinds[found] += 1
    assert min(kinds.values()) > 10


def test_the_template_opens_the_think_block():
    assert prompt_text("Use 1 and 2 to make 3.").endswith("<|assistant|><think>\n")
