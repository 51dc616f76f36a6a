"""Think traces: their arithmetic, their slips, and the honest guess at every point."""

import random
import re

import pytest

from forethought.training.reasoner.corpus import guess_at
from forethought.training.reasoner.problems import calculate, sample_problem
from forethought.training.reasoner.traces import UNSURE, write_trace

FORMULA = re.compile(r"(\d+) ([-+x/]) (\d+) = (\d+)")


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
        for left, sign, right, value in FORMULA.findall(trace.text):
            assert calculate(int(left), sign, int(right)) == int(value)


def test_every_trace_ends_with_the_right_answer_in_a_box(clean, slipped):
    for problem, trace in clean + slipped:
        ending = f"</think>\nThe answer is \\boxed{{{problem.answer}}}."
        assert trace.text.endswith(ending)
        assert trace.text.count("</think>") == 1


def test_a_slip_is_written_named_and_corrected(slipped):
    caught = 0
    for _, trace in slipped:
        derivation = "".join(piece.text for piece in trace.derivation)
        wrong = [
            value
            for left, sign, right, value in FORMULA.findall(derivation)
            if calculate(int(left), sign, int(right)) != int(value)
        ]
        assert len(wrong) == trace.text.count("That was a slip.") <= 1
        caught += bool(wrong)
        if wrong:
            assert f"but I wrote {wrong[0]}. That was a slip." in trace.text
    assert caught > 0.9 * len(slipped)


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
