"""Intervals of proportions, against values of the literature and against their own definition."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forethought.errors import ParameterError
from forethought.evaluation.report import Proportion

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
