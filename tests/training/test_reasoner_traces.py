"""Think traces: their arithmetic, their slips, and the honest guess at every point."""

import random
import re

import pytest

from forethought.evaluation.generated.arithmetic import (
    MOST_STEPS,
    Step,
    calculate,
    sample_calculation,
    sample_problem,
)
from forethought.evaluation.generated.arithmetic_questions import sample_chain, sample_varied
from reasoner.corpus import guess_at
from reasoner.traces import (
    CONFIRMATIONS,
    MOST_RECHECKED,
    UNSURE,
    by_parts,
    derived,
    expected,
    rechecked,
    write_trace,
)

BEFORE_AN_ANSWER = {text.split("{}")[0] for text in CONFIRMATIONS}
FORMULA = re.compile(r"(\d+) ([-+x/]) (\d+) = (-?\d+)")


def lines_of(pieces):
    return "".join(piece.text for piece in pieces).splitlines()


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


def test_a_slip_is_written_doubted_and_corrected(slipped):
    """The slip may be in a part of a product; the step's own value is the one that is doubted."""
    caught = 0
    for _, trace in slipped:
        wrong = [line for line in lines_of(trace.derivation) if not is_true(line)]
        assert len(wrong) == trace.text.count("That was a slip.") <= 1
        caught += bool(wrong)
        if wrong:
            value = FORMULA.findall(wrong[0])[-1][-1]
            line = next(line for line in lines_of(trace.rechecks) if line.endswith("a slip."))
            assert f", I had {value}. " in line.partition(". Again: ")[2]
            assert is_true(line)
    assert caught > 0.9 * len(slipped)


def test_a_slip_of_a_recheck_changes_nothing(slipped):
    """Two values of three stand: that of the derivation is computed once more, and kept."""
    caught = 0
    for _, trace in slipped:
        for line in lines_of(trace.rechecks):
            if not is_true(line):
                before, _, after = line.partition(", I had ")
                due, _, again = after.partition(". Again: ")
                assert FORMULA.findall(before)[-1][-1] != due
                assert is_true(again)
                assert again.endswith(f"{FORMULA.findall(again)[-1][-1]}, yes.")
                caught += 1
    assert caught > 0.2 * len(slipped)


def test_a_recheck_without_its_last_line_has_the_answer_of_the_derivation(slipped):
    """Its early end is marked as a slip: it is not what the reasoner is to write."""
    ended = [
        (problem, trace.rechecks[n + 1].text)
        for problem, trace in slipped
        for n, piece in enumerate(trace.rechecks)
        if not piece.trained and piece.text in BEFORE_AN_ANSWER
    ]
    assert len(ended) > 0.05 * len(slipped)
    assert all(text.startswith(problem.answer) for problem, text in ended)


@pytest.mark.parametrize("count", range(MOST_RECHECKED + 1, MOST_STEPS + 1))
def test_a_long_problem_is_answered_after_its_derivation(count):
    rng = random.Random(5)
    for _ in range(30):
        is_answered_at_once(write_trace(sample_chain(rng, count), rng, slip_rate=1.0))


@pytest.mark.parametrize("kind", ["sum", "sum chain"])
def test_a_bare_sum_is_answered_after_its_derivation(kind):
    rng = random.Random(6)
    for _ in range(30):
        is_answered_at_once(write_trace(sample_varied(rng, kind), rng, slip_rate=1.0))


def is_answered_at_once(trace):
    assert [piece.text.partition("\n")[0] for piece in trace.rechecks] == ["</think>"]
    assert is_true(trace.text)


def test_the_values_marked_as_slips_are_the_wrong_ones(slipped):
    for _, trace in slipped:
        text, wrong = "", []
        for piece in trace.pieces:
            text += piece.text
            if piece.is_value and not is_true(re.split("[,:] ", text.splitlines()[-1])[-1]):
                wrong.append(piece)
        assert wrong == [piece for piece in trace.pieces if piece.is_value and not piece.trained]


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
    assert [f.left for f in rechecked(step, 0)[:2]] == [40, 7]


def test_a_quotient_is_checked_by_its_product_with_the_divisor():
    """Which is the number that was divided where the noted quotient is right, and another else."""
    step = Step("", 1218, "/", 7)
    for noted in (174, 104):
        formulas = rechecked(step, noted)
        assert [(f.left, f.sign, f.right) for f in formulas[:2]] == [
            (100, "x", 7), (noted - 100, "x", 7)
        ]  # fmt: skip
        assert formulas[-1].value == noted * 7
        assert (formulas[-1].value == expected(step, noted)) is (noted == 174)


@pytest.mark.parametrize(
    ("right", "parts"), [(548, [(1053, 48), (1005, 500)]), (57, [(1053, 7), (1046, 50)])]
)
def test_a_recheck_of_a_difference_takes_the_leading_digit_last(right, parts):
    formulas = rechecked(Step("", 1053, "-", right), 0)
    assert [(f.left, f.right) for f in formulas] == parts
    assert formulas[-1].value == 1053 - right


@pytest.mark.parametrize("right", [500, 50, 7])
def test_a_recheck_of_a_difference_of_one_digit_is_the_difference_itself(right):
    assert [f.right for f in rechecked(Step("", 1053, "-", right), 0)] == [right]


def test_the_first_recheck_calculates_and_later_ones_may_read_the_question_again(clean):
    firsts = [trace.rechecks[0].text for _, trace in clean]
    assert not any("read the question" in text for text in firsts)
    assert any("read the question" in trace.text for _, trace in clean)


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
