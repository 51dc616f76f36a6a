import numpy as np
import pytest

from forethought.speculative.length.latency import (
    FIRST,
    FIRST_RATIO,
    ForwardLatency,
    LinearLatency,
    Slowdown,
)

TRUE = np.array([0.01, 2e-4, 1e-7])


def sizes(rng):
    rows = int(rng.integers(1, 64))
    return np.array([1.0, rows * int(rng.integers(1, 6)), rows * int(rng.integers(50, 2000))])


def fitted(observations, seed=0, noise=0.0, outliers=0.0, true=TRUE):
    rng = np.random.default_rng(seed)
    model = LinearLatency((0.8, 0.1, 0.1))
    for _ in range(observations):
        terms = sizes(rng)
        factor = float(np.exp(rng.normal(0.0, noise)))
        factor *= rng.uniform(5.0, 50.0) if rng.random() < outliers else 1.0
        model.observe(terms, float(true @ terms) * factor)
    return model


def error(model, true=TRUE):
    """Largest relative error over sizes that it may be asked about."""
    rng = np.random.default_rng(99)
    terms = [sizes(rng) for _ in range(50)]
    return max(abs(model.predict(each) / float(true @ each) - 1.0) for each in terms)


def test_it_predicts_nothing_before_the_first_observations():
    assert not fitted(FIRST - 1).ready
    assert fitted(FIRST - 1).predict((1.0, 1.0, 1.0)) == 0.0
    assert fitted(FIRST).ready


def test_it_finds_the_coefficients_of_a_machine_without_noise():
    assert fitted(600).coefficients == pytest.approx(TRUE, rel=0.02)


def test_noise_and_outliers_do_not_move_it():
    assert error(fitted(600, noise=0.03)) < 0.05
    assert error(fitted(600, noise=0.03, outliers=0.05)) < 0.08


def test_a_model_that_believed_outliers_would_fail_that_test():
    rng = np.random.default_rng(0)
    terms = np.array([sizes(rng) for _ in range(600)])
    factors = np.where(rng.random(600) < 0.05, rng.uniform(5.0, 50.0, 600), 1.0)
    naive, *_ = np.linalg.lstsq(terms, terms @ TRUE * factors, rcond=None)
    assert abs(naive @ [1.0, 64.0, 6400.0] / (TRUE @ [1.0, 64.0, 6400.0]) - 1.0) > 0.3


@pytest.mark.parametrize("slow", [0, 1], ids=["first", "second"])
def test_a_slow_first_step_is_outvoted(slow):
    model = LinearLatency((0.8, 0.1, 0.1))
    for number in range(FIRST):
        model.observe((1.0, 8.0, 800.0), 1.0 if number == slow else 0.01)
    assert model.predict((1.0, 8.0, 800.0)) == pytest.approx(0.01, rel=0.2)


def test_coefficients_are_never_negative():
    rng = np.random.default_rng(3)
    model = LinearLatency((0.8, 0.1, 0.1))
    for _ in range(400):  # noise alone would give tokens and context either sign
        model.observe(sizes(rng), 0.02 * float(np.exp(rng.normal(0.0, 0.1))))
        assert (model.coefficients >= 0.0).all()
    assert model.predict((1.0, 32.0, 3200.0)) == pytest.approx(0.02, rel=0.2)


def test_it_follows_a_machine_that_becomes_slower():
    rng = np.random.default_rng(0)
    model = fitted(300)
    for _ in range(600):
        terms = sizes(rng)
        model.observe(terms, 2.0 * float(TRUE @ terms))
    assert error(model, 2.0 * TRUE) < 0.05


def test_many_steps_of_one_kind_do_not_wipe_out_the_others():
    model = fitted(300)
    before = model.predict((1.0, 64.0, 64000.0))
    for _ in range(5000):
        model.observe((1.0, 4.0, 400.0), float(TRUE @ [1.0, 4.0, 400.0]))
    assert model.predict((1.0, 64.0, 64000.0)) == pytest.approx(before, rel=0.05)


def test_outliers_are_clipped_from_what_it_returns():
    model = fitted(200, noise=0.02)
    terms = (1.0, 32.0, 3200.0)
    usual = float(TRUE @ terms)
    assert model.observe(terms, usual) == pytest.approx(usual, rel=0.02)
    assert model.observe(terms, 20 * usual) < 1.2 * usual


def test_a_fit_that_would_predict_less_than_no_time_still_learns():
    """Larger sizes that take less: coefficients that may be below 0 extrapolate to nothing."""
    model = LinearLatency((0.8, 0.1, 0.1))
    for tokens, seconds in [(1.0, 0.12)] * 5 + [(3.0, 0.02)] * 4:
        model.observe((1.0, tokens, 500.0 * tokens), seconds)
    assert float(model._free @ [1.0, 8.0, 4000.0]) < 0.0
    for _ in range(300):
        model.observe((1.0, 8.0, 4000.0), 0.02)
    assert model.predict((1.0, 8.0, 4000.0)) == pytest.approx(0.02, rel=0.2)


def bent(tokens):
    """Flat up to 32 tokens, then steep."""
    return 0.01 + 5e-4 * max(tokens - 32, 0)


def test_measured_sizes_outweigh_the_line_through_them():
    model, rng = ForwardLatency(), np.random.default_rng(0)
    tried = [8, 32, 64, 128]
    for _ in range(400):
        tokens = int(rng.choice(tried))
        model.observe(tokens, 1000, bent(tokens) * float(np.exp(rng.normal(0.0, 0.02))))
    for tokens in tried:
        assert model.predict(tokens, 1000) == pytest.approx(bent(tokens), rel=0.05)
    line = model.linear.predict((1.0, 32.0, 1000.0))
    assert abs(line / bent(32) - 1.0) > 0.2  # which the line alone misses


def test_between_measured_sizes_it_lies_between_them():
    model = ForwardLatency()
    for _ in range(50):
        for tokens in (8, 32, 64, 128):
            model.observe(tokens, 1000, bent(tokens))
    assert bent(64) < model.predict(96, 1000) < bent(128)
    assert model.predict(96, 1000) == pytest.approx(bent(96), rel=0.1)


def test_old_measurements_give_way_to_the_line():
    model = ForwardLatency()
    for _ in range(20):
        model.observe(64, 1000, 0.02)
        model.observe(8, 1000, 0.01)
    for _ in range(3000):  # the machine is twice as fast now; 64 tokens were not tried again
        model.observe(8, 1000, 0.005)
    assert model.predict(64, 1000) == pytest.approx(
        model.linear.predict((1.0, 64.0, 1000.0)), rel=0.01
    )


def test_many_predictions_are_the_single_ones():
    model, rng = ForwardLatency(), np.random.default_rng(1)
    for _ in range(100):
        tokens = int(rng.integers(1, 300))
        model.observe(tokens, 50 * tokens, bent(tokens))
    tokens = np.arange(1.0, 400.0)
    one_by_one = [model.predict(each, 4000.0) for each in tokens]
    assert model.predict_many(tokens, 4000.0) == pytest.approx(one_by_one, rel=1e-9)


def test_single_steps_and_those_of_a_call_are_one_model():
    """Predicted: a step of a size in a call, where that size was measured in single steps alone."""
    model, rng = ForwardLatency(), np.random.default_rng(0)
    for _ in range(300):
        tokens, calls = [(1, 1.0), (1, 1 / 8), (9, 1 / 8), (5, 1.0)][int(rng.integers(4))]
        noise = float(np.exp(rng.normal(0.0, 0.02)))
        model.observe(tokens, 100, (0.01 + 1e-3 * tokens + 0.03 * calls) * noise, calls)
    assert model.predict(5, 100, 1 / 8) == pytest.approx(0.01875, rel=0.1)
    assert model.predict(9, 100, 1.0) == pytest.approx(0.049, rel=0.1)
    many = model.predict_many(np.array([5.0, 9.0]), 100, 1 / 8)
    assert many == pytest.approx([model.predict(n, 100, 1 / 8) for n in (5, 9)])


def test_steps_of_rows_that_have_ended_count_as_those_of_one_token():
    """Of a call on a GPU that went on behind the end of its only row: less than a token a step."""
    model = ForwardLatency()
    for _ in range(100):
        for tokens in (0.25, 0.5, 1, 4):
            model.observe(tokens, 100, 0.01 + 1e-3 * max(tokens, 1), 1 / 8, 8)
    assert model._where == sorted(model._where)
    assert model.predict(1, 100, 1 / 8) == pytest.approx(0.011, rel=0.05)
    assert model.predict(2, 100, 1 / 8) == pytest.approx(0.012, rel=0.05)


def test_a_forward_is_never_estimated_to_take_no_time():
    model = ForwardLatency()
    for context in range(1, 160):
        model.observe(200 - context, context, 1e-6 * context**2)
    assert model.linear.coefficients.tolist()[:2] == [0.0, 0.0]
    assert model.predict(1, 0) > 0.0
    assert (model.predict_many(np.arange(1.0, 9.0), 0) > 0.0).all()


# ---- ageing --------------------------------------------------------------------------------------


def test_a_time_that_was_learned_long_ago_gives_way_to_the_next_one():
    fresh, aged = fitted(300, noise=0.02), fitted(300, noise=0.02)
    aged.age(3000)
    terms = (1.0, 32.0, 3200.0)
    before = fresh.predict(terms)
    assert aged.predict(terms) == pytest.approx(before)
    for model in (fresh, aged):
        model.observe(terms, 1.5 * before)
    assert fresh.predict(terms) < 1.1 * before
    assert aged.predict(terms) > 1.2 * before


def test_forwards_measured_long_ago_give_way_to_the_next_ones():
    fresh, aged = ForwardLatency(), ForwardLatency()
    for model in (fresh, aged):
        for _ in range(100):
            model.observe(4.0, 400.0, 0.01)
    aged.age(3000)
    for model in (fresh, aged):
        for _ in range(2):
            model.observe(4.0, 400.0, 0.015)
    assert fresh.predict(4.0, 400.0) < 0.011
    assert aged.predict(4.0, 400.0) > 0.012


# ---- slowdown ------------------------------------------------------------------------------------


def test_what_slows_plain_steps_and_drafts_is_the_machine():
    slowdown = Slowdown()
    for ratio in (1.0, 1.0, 1.0):
        slowdown.observe_drafted(ratio)
    assert [slowdown.observe_drafted(2.5) for _ in range(2)] == [1.0, 1.0]
    assert slowdown.is_doubtful
    slowdown.observe_plain(2.4, is_drafting=True)
    assert slowdown.factor == 2.4
    assert slowdown.observe_drafted(2.5) == pytest.approx(2.5 / 2.4)
    assert not slowdown.is_doubtful


def test_drafts_that_become_slow_alone_are_believed_after_a_plain_step():
    slowdown = Slowdown()
    for ratio in (1.0, 1.0, 1.0, 2.5, 2.5):
        slowdown.observe_drafted(ratio)
    slowdown.observe_plain(1.0, is_drafting=True)
    assert slowdown.factor == 1.0
    assert slowdown.observe_drafted(2.5) == 2.5


def test_one_pause_is_taken_for_nothing():
    slowdown = Slowdown()
    assert slowdown.observe_drafted(40.0) == FIRST_RATIO
    for ratio in (1.0, 1.0):
        slowdown.observe_drafted(ratio)
    assert slowdown.observe_drafted(40.0) == 1.0
    slowdown.observe_plain(40.0, is_drafting=True)
    assert slowdown.factor == 1.0
    for ratio in (1.0, 40.0, 1.0):
        slowdown.observe_plain(ratio, is_drafting=False)
    assert slowdown.factor == 1.0


def test_plain_steps_that_agree_outvote_drafts_that_were_learned_under_another_load():
    slowdown = Slowdown()
    for _ in range(3):
        slowdown.observe_plain(5.0, is_drafting=False)
    for _ in range(3):  # the load ends, and drafts are learned as if it had not
        slowdown.observe_drafted(5.0)
    for _ in range(2):
        slowdown.observe_plain(1.0, is_drafting=True)
    assert slowdown.factor == 1.0


def test_drafts_that_become_much_faster_are_put_to_the_test():
    slowdown = Slowdown()
    for ratio in (1.0, 1.0, 1.0, 0.4, 0.4):
        slowdown.observe_drafted(ratio)
    assert slowdown.is_doubtful
