"""Think traces: their arithmetic, their slips, and the honest guess at every point."""

import random
import re

import pytest

from forethought.training.reasoner.corpus import guess_at
from forethought.training.reasoner.problems import (
    MOST_STEPS,
    Step,
    calculate,
    sample_calculation,
    sample_problem,
)
from forethought.training.reasoner.questions import sample_chain
from forethought.training.reasoner.traces import (
    MOST_RECHECKED,
    UNSURE,
    by_parts,
    derived,
    rechecked,
    write_trace,
)

FORMULA = re.compile(r"(\d+) ([-+x/]) (\d+) = (-?\d+)")


def lines_of(pieces):
    return "".join(piece.text for piece in pieces).splitlines()


def values_of(problem):
    return {str(step.value) for step in problem.steps}


def is_true(line):
    """Whether every formula of a line holds."""
    return all(
        calculate(int(left), sign, int(right)) == int(value)
        for left, sign, right, value in FORMULA.findall(line)
    )


@pytest.fixture(scope="module")
def clean():
    rng = random.Random(1)
    problems = [sample_problem(rng) for _ in range(300)]
    return [(problem, write_trace(problem, rng)) for problem in problems]


@pytest.fixture(scope="module")
def slipped():
    rng = random.Random(2)
    problems = [sample_problem(rng) for _ in range(300)]
    return [(problem, write_trace(problem, rng, slip_rate=1.0)) for problem in problems]


def test_without_slips_every_formula_is_true(clean):
    for _, trace in clean:
        assert is_true(trace.text)


def test_every_trace_ends_with_the_right_answer_in_a_box(clean, slipped):
    for problem, trace in clean + slipped:
        ending = f"</think>\nThe answer is \\boxed{{{problem.answer}}}."
        assert trace.text.endswith(ending)
        assert trace.text.count("</think>") == 1


def test_a_slip_is_written_found_and_corrected(slipped):
    """The first re-check that calculates differs from it, and the second derivation is right."""
    caught = 0
    for problem, trace in slipped:
        wrong = [line for line in lines_of(trace.derivation) if not is_true(line)]
        assert len(wrong) <= 1
        caught += bool(wrong)
        if wrong:
            before = trace.derivation[-1].guess
            comparison = f"That gives {problem.answer}. Is it {before}? No.\n"
            assert trace.text.count("That gives") == trace.text.count(comparison) == 1
            anew = trace.text.partition(comparison)[2]
            assert is_true(anew)
            assert anew.count(f"So the answer is {problem.answer}.") == 1
    assert caught > 0.9 * len(slipped)


def test_a_recheck_without_slips_of_its_own_has_true_formulas_alone(slipped):
    for _, trace in slipped:
        assert all(is_true(line) for line in lines_of(trace.rechecks))


def test_a_slip_of_a_recheck_is_found_and_changes_no_answer():
    rng, found = random.Random(3), 0
    for _ in range(300):
        problem = sample_problem(rng)
        trace = write_trace(problem, rng, check_slip_rate=1.0)
        assert all(is_true(line) for line in lines_of(trace.derivation))
        assert {piece.guess for piece in trace.rechecks} <= {UNSURE, *values_of(problem)}
        assert trace.text.endswith(f"\\boxed{{{problem.answer}}}.")
        checks, no, anew = trace.text.partition("? No.\n")
        if no:
            found += 1
            assert not is_true(checks)
            assert checks.endswith(f"Is it {problem.answer}")
            assert is_true(anew)
    assert found > 200


def test_a_recheck_that_agrees_says_so(clean):
    for problem, trace in clean:
        answer = problem.answer
        compared = re.findall("That gives.*", trace.text)
        assert compared == [f"That gives {answer}. Is it {answer}? Yes."] * len(compared)


@pytest.mark.parametrize("count", range(MOST_RECHECKED + 1, MOST_STEPS + 1))
def test_a_long_problem_is_answered_after_its_derivation(count):
    rng = random.Random(5)
    for _ in range(30):
        trace = write_trace(sample_chain(rng, count), rng, slip_rate=1.0, check_slip_rate=1.0)
        assert [piece.text.partition("\n")[0] for piece in trace.rechecks] == ["</think>"]
        assert is_true(trace.text)


def test_the_wrong_value_is_the_one_piece_marked_as_a_slip(slipped):
    for _, trace in slipped:
        text, wrong = "", []
        for piece in trace.derivation:
            text += piece.text
            if piece.is_value and not is_true(text.splitlines()[-1].split(", ")[-1]):
                wrong.append(piece)
        assert wrong == [piece for piece in trace.pieces if piece.is_slip]


@pytest.mark.parametrize("split_left", [True, False])
def test_a_calculation_by_parts_has_the_value_of_the_calculation_itself(split_left):
    rng = random.Random(4)
    for _ in range(3000):
        left, sign, right = sample_calculation(rng)
        formulas = by_parts(left, sign, right, split_left=split_left)
        assert not any(formula.is_slip for formula in formulas)
        assert formulas[-1].value == calculate(left, sign, right)


def test_a_recheck_splits_the_other_factor_than_the_derivation():
    step = Step("", 47, "x", 23)
    assert [f.right for f in derived(step)[:2]] == [20, 3]
    assert [f.left for f in rechecked(step)[:2]] == [40, 7]


def test_a_long_quotient_is_computed_with_what_remains_written_down():
    formulas = [(f.left, f.sign, f.right, f.value) for f in derived(Step("", 1539, "/", 9))]
    assert formulas == [
        (900, "/", 9, 100),
        (1539, "-", 900, 639),
        (639, "/", 9, 71),
        (100, "+", 71, 171),
    ]


def test_rechecks_make_the_trace_several_times_longer_than_the_derivation(clean):
    whole = sum(len(trace.text) for _, trace in clean)
    first = sum(len(piece.text) for _, trace in clean for piece in trace.derivation)
    assert 2.5 < whole / first < 5


def test_a_finished_clean_derivation_is_answered_rightly_wherever_it_is_cut(clean):
    for problem, trace in clean[:50]:
        finished = trace.text.index("So the answer is")
        for cut in range(finished, len(trace.text)):
            assert guess_at(trace.pieces, cut) == problem.answer


def test_before_the_end_the_guess_is_unsure_or_a_value_already_computed(clean):
    for _, trace in clean[:50]:
        text = trace.text
        for cut in range(text.index("So the answer is")):
            guess = guess_at(trace.pieces, cut)
            assert guess == UNSURE or f"= {guess}.\n"[:-1] in text[:cut]


def test_an_unfinished_guess_never_outlives_the_words_before_the_next_number(clean):
    """So probes a dozen tokens apart do not agree on a value that is not the answer."""
    for _, trace in clean:
        held = ""
        for piece in trace.derivation:
            held = "" if piece.guess == UNSURE else held + piece.text
            if piece.guess != trace.derivation[-1].guess:
                assert len(held.split()) <= 6
