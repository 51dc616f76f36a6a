"""Metrics of speculation: what a step is, what is counted, and what plain values come of it."""

from __future__ import annotations

from forethought.outputs import SpeculationMetrics


def test_a_step_yields_one_token_more_than_it_accepts() -> None:
    metrics = SpeculationMetrics()
    assert metrics.mean_acceptance_length is None
    for drafted, accepted in ((4, 4), (4, 1), (0, 0), (3, 0)):
        metrics.record(drafted, accepted)
    assert (metrics.steps, metrics.drafted, metrics.accepted) == (4, 11, 5)
    assert metrics.accepted_by_position == [2, 1, 1, 1]
    assert metrics.mean_acceptance_length == 1 + 5 / 4
    assert sum(metrics.accepted_by_position) == metrics.accepted


def test_metrics_of_several_generations_add_up() -> None:
    one, two = SpeculationMetrics(), SpeculationMetrics(synthetic=True)
    one.record(2, 1)
    two.record(3, 3)
    both = one + two
    assert both == two + one == SpeculationMetrics(2, 5, 4, [2, 1, 1], synthetic=True)
    assert (one.accepted_by_position, two.accepted_by_position) == ([1], [1, 1, 1])


def test_a_copy_keeps_its_counts() -> None:
    metrics = SpeculationMetrics()
    metrics.record(2, 2)
    before = metrics.copy()
    metrics.record(2, 2)
    assert before == SpeculationMetrics(1, 2, 2, [1, 1])


def test_plain_values_hold_the_mean_acceptance_length() -> None:
    assert SpeculationMetrics(3, 9, 5, [3, 2]).to_dict() == {
        "steps": 3,
        "drafted": 9,
        "accepted": 5,
        "accepted_by_position": [3, 2],
        "synthetic": False,
        "lossy": False,
        "mean_acceptance_length": 2.667,
    }
    assert SpeculationMetrics().to_dict()["mean_acceptance_length"] is None
