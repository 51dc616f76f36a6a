"""The time of a step, fitted to measured ones, and the file that holds them."""

import json

import pytest

from forethought import LLM
from forethought.bench.step_times import (
    MeasuredEngine,
    MeasuredStep,
    StepTimes,
    attended_tokens,
    measure_engine,
)
from forethought.errors import ParameterError, UsageError
from tokens import speaking

DECODES, CONTEXTS, PROMPTS = (1, 2, 4, 8), (64, 512), (16, 64, 256)


def milliseconds(decodes, context, prefilled, attended, calls):
    """Flat up to four decodes, and linear in the rest."""
    base = 10.0 if decodes <= 4 else 10.0 + 3.0 * (decodes - 4)
    linear = 1e-3 * context + 0.1 * prefilled + 1e-5 * attended
    return base + linear + (0.5 + 0.25 * decodes) * calls


def step(decodes=0, context=0, prefilled=0, calls=1):
    counts = decodes, decodes * context, prefilled, attended_tokens(0, prefilled), calls
    return MeasuredStep(*counts, milliseconds(*counts))


def engine(steps=None, **fields):
    if steps is None:
        counts = [(batch, context) for batch in DECODES for context in CONTEXTS]
        steps = [step(*count, calls=calls) for count in counts for calls in (1, 0.25)]
        steps += [step(prefilled=length) for length in PROMPTS]
    limits = {"max_batch_size": 16, "max_num_tokens": 256, "kv_tokens": 9000, "kv_bytes": 64}
    limits["steps_per_call"] = 4
    return MeasuredEngine(**limits | fields, steps=tuple(steps), label="tiny")


def test_times_that_follow_the_formula_are_predicted_between_and_beyond_the_measured_ones():
    times = StepTimes.fit(engine())
    for counts in ((1, 64, 0, 0), (3, 900, 0, 0), (6, 600, 100, 9000), (0, 0, 200, 20100)):
        seconds = times.step(*counts) + times.call(counts[0])
        assert seconds == pytest.approx(milliseconds(*counts, 1) / 1e3, rel=1e-6)
    assert times.call(4) - times.call(2) == pytest.approx(0.0005)
    assert times.step(12, 0) == pytest.approx(times.step(8, 0) + 0.012)  # on from four to eight


def test_no_coefficient_is_negative_where_the_fit_would_make_it_so():
    falling = [
        MeasuredStep(1, context, 0, 0, 1, 10.0 - context / 100) for context in (100, 500, 900)
    ]
    times = StepTimes.fit(engine([*falling, step(prefilled=16), step(prefilled=64)]))
    assert times.per_context == 0.0
    assert min(times.base) >= 0.0
    assert times.step(1, 500) + times.call(1) == pytest.approx(0.0025, abs=0.0015)


def test_the_chunks_of_a_prompt_attend_to_as_many_tokens_as_the_whole():
    assert attended_tokens(0, 100) == 5050
    assert attended_tokens(0, 60) + attended_tokens(60, 40) == attended_tokens(0, 100)


def test_a_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "steps.json"
    engine().save(path)
    assert MeasuredEngine.load(path) == engine()


@pytest.mark.parametrize(
    "change",
    [
        {"max_batch_size": 0},
        {"max_batch_size": 300},
        {"kv_tokens": "many"},
        {"steps": []},
        {"steps": [{"decodes": 1}]},
        {"steps": [step(2, 64)._asdict()]},
        {"steps": [step(2, 64)._asdict(), step(prefilled=16)._asdict() | {"ms": 0}]},
    ],
)
def test_a_file_without_usable_step_times_is_named(tmp_path, change):
    path = tmp_path / "steps.json"
    engine().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UsageError, match=r"steps\.json"):
        MeasuredEngine.load(path)
    path.write_text("[]")
    with pytest.raises(UsageError, match=r"steps\.json"):
        MeasuredEngine.load(path)


def test_an_engine_of_impossible_size_is_refused():
    with pytest.raises(ParameterError, match="max_batch_size"):
        engine(max_batch_size=1 << 20, max_num_tokens=1 << 20)


def test_a_model_is_measured_up_to_its_limits():
    with LLM(speaking("byte_level"), dtype="float32", max_batch_size=3, max_num_tokens=48) as llm:
        measured = measure_engine(llm, rounds=1)
        llm.lend("test").local_engine.check_integrity()
        llm.take_back()
    assert (measured.max_batch_size, measured.max_num_tokens) == (3, 48)
    assert {s.decodes for s in measured.steps} == {0, 1, 2, 3}
    assert max(s.prefilled for s in measured.steps) == 48
    assert measured.kv_bytes > 0
    assert all(s.ms > 0 for s in measured.steps)
    times = StepTimes.fit(measured)
    assert times.step(2, 100) + times.call(2) > 0


def test_a_time_that_noise_has_made_nothing_of_moves_the_fit_little():
    steps = engine().steps
    noisy = StepTimes.fit(engine([steps[0]._replace(ms=1e-6), *steps[1:]]))
    for counts in ((8, 4096, 0, 0), (4, 2048, 0, 0), (0, 0, 256, attended_tokens(0, 256))):
        seconds = noisy.step(*counts) + noisy.call(counts[0])
        assert seconds == pytest.approx(milliseconds(*counts, 1) / 1e3, rel=0.1)
