"""Statistics against published values, hand-computed cases, scipy, and their definitions."""

import math
import random
from itertools import product

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from forethought.errors import ParameterError
from forethought.evaluation.statistics import (
    CoverageFit,
    Proportion,
    SequentialTest,
    clustered_error,
    clustered_interval,
    compare_pairs,
    difference_interval,
    mcnemar,
    mean_pass_at_k,
    pareto_front,
    pass_at_k,
    sign_flip,
)

Z95 = 1.959963984540054


def test_the_interval_agrees_with_published_values():
    # Newcombe (1998), Statistics in Medicine 17, table I, method 3 (score, no correction).
    for successes, trials, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        assert Proportion(successes, trials).interval() == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_each_end_is_where_a_score_test_just_fails_to_reject(counts):
    successes, trials = counts
    share = successes / trials
    low, high = Proportion(successes, trials).interval()
    assert 0.0 <= low <= share <= high <= 1.0
    for end in (low, high):
        if 0.0 < end < 1.0:
            distance = abs(share - end) / math.sqrt(end * (1 - end) / trials)
            assert distance == pytest.approx(Z95, rel=1e-6)


def test_more_confidence_is_a_wider_interval():
    narrow, wide = Proportion(7, 10).interval(0.5), Proportion(7, 10).interval(0.99)
    assert wide[0] < narrow[0] < 0.7 < narrow[1] < wide[1]


@pytest.mark.parametrize(("successes", "trials"), [(0, 0), (3, 2), (-1, 5)])
def test_impossible_counts_are_refused(successes, trials):
    with pytest.raises(ParameterError):
        Proportion(successes, trials)


# ---- clusters ------------------------------------------------------------------------------------


def test_one_attempt_per_problem_has_the_usual_error_of_a_mean():
    values = [1.0, 0.0, 0.0, 1.0, 1.0]
    expected = scipy.stats.sem(values)
    assert clustered_error([[value] for value in values]) == pytest.approx(expected)


def test_the_clustered_error_of_a_hand_computed_case():
    # mean 1/2; sums of deviations 1, 0, -1; sqrt(3/2 * 2) / 6
    clusters = [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    assert clustered_error(clusters) == pytest.approx(math.sqrt(3) / 6)


def test_attempts_that_repeat_each_other_add_no_certainty():
    outcomes = [True, False, False, True, True, False, True, True]
    once = clustered_interval([[outcome] for outcome in outcomes])
    assert clustered_interval([[outcome] * 10 for outcome in outcomes]) == pytest.approx(once)
    naive = Proportion(50, 80).interval()
    assert naive[1] - naive[0] < 0.5 * (once[1] - once[0])


def test_clusters_that_all_agree_are_as_many_trials_as_there_are_clusters():
    assert clustered_interval([[True, True]] * 20) == Proportion(20, 20).interval()
    assert clustered_interval([[False, False, True]]) == Proportion(0, 1).interval()


def test_the_clustered_interval_covers_and_the_naive_one_does_not():
    """Share of 1,000 simulated evaluations (40 problems, 8 attempts each) whose 95 % interval holds
    the true accuracy: at least 0.92; that of the interval that ignores the clusters: below 0.75."""
    rng, covered, naive = np.random.default_rng(0), 0, 0
    for _ in range(1000):
        shares = rng.beta(0.5, 0.5, size=40)  # mean 1/2; most problems are easy or hard
        clusters = rng.random((40, 8)) < shares[:, None]
        low, high = clustered_interval(clusters.tolist())
        covered += low <= 0.5 <= high
        low, high = Proportion(int(clusters.sum()), 320).interval()
        naive += low <= 0.5 <= high
    assert covered >= 920
    assert naive < 750


# ---- pairs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "p"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (0, 6, 2 / 64),
        (1, 6, 16 / 128),  # 2 * (1 + 7) / 128
        (3, 3, 1.0),
        (121, 59, 0.0000044347),
    ],
)
def test_mcnemar_is_the_two_sided_binomial_test_of_the_discordant_pairs(first, second, p):
    assert mcnemar(first, second) == pytest.approx(p, rel=1e-3)
    if first + second:
        exact = scipy.stats.binomtest(first, first + second).pvalue
        assert mcnemar(first, second) == pytest.approx(exact)


@settings(deadline=None)
@given(st.lists(st.integers(-1, 1), max_size=60))
def test_flipping_signs_of_single_attempts_is_mcnemar(differences):
    counts = differences.count(1), differences.count(-1)
    assert sign_flip(differences) == pytest.approx(mcnemar(*counts))


@settings(deadline=None)
@given(st.lists(st.integers(-3, 3), max_size=9))
def test_flipping_signs_counts_all_ways_to_choose_them(differences):
    sums = [
        abs(sum(sign * value for sign, value in zip(signs, differences, strict=True)))
        for signs in product((1, -1), repeat=len(differences))
    ]
    expected = sum(total >= abs(sum(differences)) for total in sums) / len(sums)
    assert sign_flip(differences) == pytest.approx(expected)


def test_the_interval_of_a_difference_of_a_hand_computed_case():
    # 10 pairs, 5 better, 1 worse: (4 / 12), variance (6 + 2) / 12 - (1/3)^2
    half = Z95 * math.sqrt((8 / 12 - 1 / 9) / 12)
    differences = [1] * 5 + [-1] + [0] * 4
    assert difference_interval(differences) == pytest.approx((1 / 3 - half, 1 / 3 + half))


def test_the_interval_of_a_difference_covers():
    """Share of 2,000 simulated comparisons (30 problems; the second solves 20 % that the first does
    not, the first 10 %) whose 95 % interval holds the true difference, 0.1: at least 0.93."""
    rng = np.random.default_rng(1)
    draws = rng.choice([1.0, -1.0, 0.0], p=[0.2, 0.1, 0.7], size=(2000, 30))
    intervals = [difference_interval(one) for one in draws.tolist()]
    assert sum(low <= 0.1 <= high for low, high in intervals) >= 1860


def test_equal_methods_have_an_interval_of_some_width():
    low, high = difference_interval([0] * 20)
    assert low == -high
    assert 0.05 < high < 0.2


def test_a_comparison_counts_who_wins_and_names_its_test():
    first = [[True], [False], [False], [False], [True]]
    second = [[True], [True], [True], [True], [False]]
    found = compare_pairs("plain", first, second)
    assert (found.num_better, found.num_worse, found.test) == (3, 1, "mcnemar")
    assert found.difference == pytest.approx(0.4)
    assert found.p == mcnemar(1, 3) == 0.625
    several = compare_pairs("plain", [[True, False]] * 4, [[True, True]] * 4)
    assert (several.test, several.p, several.difference) == ("sign flip", 0.125, 0.5)


# ---- the sequential test -------------------------------------------------------------------------


def fed(*pairs, level=0.05):
    test = SequentialTest(level)
    for first, second in pairs:
        test.add(first, second)
    return test


WIN, LOSS, TIE = (False, True), (True, False), (True, True)


@pytest.mark.parametrize(
    ("pairs", "evidence"),
    [
        ([], 1.0),
        ([TIE] * 9, 1.0),
        ([WIN], 1.0),  # 2 / (2 * 1)
        ([WIN, WIN], 4 / 3),
        ([WIN, LOSS], 4 / (3 * 2)),
        ([WIN] * 10, 1024 / 11),
        ([LOSS] * 10, 1024 / 11),
    ],
)
def test_the_evidence_of_hand_computed_cases(pairs, evidence):
    assert fed(*pairs).evidence == pytest.approx(evidence)


def test_the_bet_is_fair_on_equal_methods():
    """The mean of E over the two ways in which the next pair can fall is E before it."""
    for wins, losses in product(range(8), repeat=2):
        before = fed(*[WIN] * wins, *[LOSS] * losses)
        after = [fed(*[WIN] * wins, *[LOSS] * losses, last).evidence for last in (WIN, LOSS)]
        assert sum(after) / 2 == pytest.approx(before.evidence)


def test_a_test_is_decided_at_its_level_and_stays_so():
    test = fed(*[WIN] * 7)  # 128 / 8 = 16 < 20
    assert not test.is_decided
    test.add(*WIN)  # 256 / 9 = 28
    assert test.is_decided
    assert test.p == pytest.approx(9 / 256)
    for _ in range(8):
        test.add(*LOSS)
    assert test.is_decided
    with pytest.raises(ParameterError):
        SequentialTest(1.0)


def test_looking_all_the_time_is_free_for_the_sequential_test_and_not_for_mcnemar():
    """Share of 1,000 comparisons of equal methods (up to 300 discordant pairs, looked at after each
    one) that ever claim a difference at level 0.05: at most 0.065 for the sequential test; the
    negative control, McNemar's test repeated after each pair: above 0.15."""
    rng, sequential, repeated = random.Random(5), 0, 0
    few = [-1]  # by the number of pairs: the most wins of the loser at which McNemar rejects
    for number in range(1, 301):
        more = mcnemar(few[-1] + 1, number - few[-1] - 1) <= 0.05
        few.append(few[-1] + more)
    for _ in range(1000):
        test, hit = SequentialTest(0.05), False
        for number in range(1, 301):
            test.add(*(WIN if rng.random() < 0.5 else LOSS))
            hit = hit or min(test.num_better, test.num_worse) <= few[number]
        sequential += test.is_decided
        repeated += hit
    assert sequential <= 65
    assert repeated > 150


def test_a_real_difference_is_found_early():
    """Discordant pairs fall 3 to 1: the mean number until the decision is below 80 of 300, and at
    least 95 of 100 comparisons are decided."""
    rng, needed = random.Random(6), []
    for _ in range(100):
        test = SequentialTest(0.05)
        for number in range(300):
            if test.is_decided:
                needed.append(number)
                break
            test.add(*(WIN if rng.random() < 0.75 else LOSS))
    assert len(needed) >= 95
    assert sum(needed) / len(needed) < 80


# ---- several samples -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "correct", "k", "value"),
    [
        (5, 2, 1, 2 / 5),
        (5, 2, 2, 1 - 3 / 10),
        (5, 2, 4, 1.0),
        (10, 3, 5, 1 - 21 / 252),
        (4, 0, 4, 0.0),
        (4, 4, 1, 1.0),
    ],
)
def test_pass_at_k_of_hand_computed_cases(samples, correct, k, value):
    assert pass_at_k(samples, correct, k) == pytest.approx(value)


def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples():
    """And therefore unbiased: of 2 samples that are right with 0.3, 1 - 0.7^2."""
    outcomes = [
        (sum(one), math.prod(0.3 if right else 0.7 for right in one))
        for one in product((0, 1), repeat=6)
    ]
    mean = sum(weight * pass_at_k(6, correct, 2) for correct, weight in outcomes)
    assert mean == pytest.approx(1 - 0.7**2)


def test_pass_at_more_than_was_drawn_is_refused():
    with pytest.raises(ParameterError, match="pass@5"):
        pass_at_k(4, 1, 5)


def test_pass_at_k_is_reported_for_powers_of_two_and_all_samples():
    found = mean_pass_at_k([[True, False, False, False, False, False]] * 2)
    assert list(found) == [1, 2, 4, 6]
    assert found == pytest.approx({1: 1 / 6, 2: 1 / 3, 4: 2 / 3, 6: 1.0})


def test_the_power_law_is_found_again_and_predicts():
    curve = CoverageFit(-1.2, -0.4)
    fitted = CoverageFit.of({k: curve.predict(k) for k in (1, 2, 4, 8, 16)})
    assert (fitted.a, fitted.b) == pytest.approx((-1.2, -0.4))
    assert fitted.predict(100) == pytest.approx(math.exp(-1.2 * 100**-0.4))


def test_the_fit_is_near_that_of_nonlinear_least_squares():
    coverage = {1: 0.31, 2: 0.44, 4: 0.55, 8: 0.68, 16: 0.74, 32: 0.83}
    expected, _ = scipy.optimize.curve_fit(
        lambda k, a, b: np.exp(a * k**b), [*coverage], [*coverage.values()], p0=(-1, -0.3)
    )
    found = CoverageFit.of(coverage)
    assert (found.a, found.b) == pytest.approx(tuple(expected), rel=0.03)


def test_coverage_without_two_values_inside_has_no_fit():
    assert CoverageFit.of({1: 0.5, 2: 1.0, 4: 1.0}) is None
    assert CoverageFit.of({1: 0.0, 2: 0.0}) is None


# ---- the front -----------------------------------------------------------------------------------


def test_the_front_holds_what_nothing_beats_by_rising_cost():
    points = [(5, 0.9), (1, 0.5), (2, 0.4), (3, 0.7), (3, 0.8), (9, 0.9), (1, 0.5)]
    assert pareto_front(points) == [1, 4, 0]
    assert pareto_front([]) == []
