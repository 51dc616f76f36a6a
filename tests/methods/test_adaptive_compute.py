"""Adaptive inference-time compute: the model's own "a new start is not better" decides."""

from __future__ import annotations

import math

import pytest

from engines import expect_empty
from forethought import LLM, methods
from forethought.errors import ParameterError
from forethought.methods.adaptive_compute import RESTART_PROMPT
from forethought.outputs import Logprob
from forethought.scaffolding import (
    Budget,
    EngineWorker,
    NativeGenerationController,
    Reply,
    ScriptedWorker,
)
from scripted import answer
from tokens import speaking

SAMPLES = ["aaaaaaaa", "bbbbbbbb", "cccccccc", "dddddddd"]


def says_no(probability):
    """One token, with this probability of "No", in two spellings, and half of the rest on "Yes"."""
    words = {"No": probability / 2, " no": probability / 2, "Yes": 1 - probability}
    entries = enumerate(words.items())
    logprobs = {key: Logprob(math.log(p + 1e-12), 1, word) for key, (word, p) in entries}
    return Reply("N", logprobs=[logprobs])


def script(keeps):
    """Samples in turn; ``keeps[text]`` is the probability of "No" behind that text."""
    drawn = iter(SAMPLES)

    def says(prompt, index):
        said = prompt.removeprefix("p")
        return says_no(keeps[said.removesuffix(RESTART_PROMPT)]) if said else next(drawn)

    return ScriptedWorker(says)


def run(keeps, count=4, budget=None, params=None, **settings):
    worker = script(keeps)
    controller = methods.create("adaptive_compute", default_sample_num=count, **settings)
    return answer(controller, worker, budget=budget, sampling_params=params), worker


def told(result):
    return result.output.meta["adaptive_compute"]


def drawn(worker):
    return [call for call in worker.calls if call.prompt == "p"]


def test_each_sample_has_a_seed_of_its_own():
    keeps = dict.fromkeys(SAMPLES, 0.1)
    _, worker = run(keeps, params={"seed": 3}, prune_after=None)
    assert len({call.task.seed for call in drawn(worker)}) == len(drawn(worker)) == 4


def test_the_text_of_each_sample_is_told_apart():
    generation = NativeGenerationController(streaming=True)
    settings = {"generation_controller": generation, "prune_after": None, "count": 2}
    result, _ = run(dict.fromkeys(SAMPLES, 0.1), **settings)
    texts = {}
    for event in result.events():
        if event.fields:
            number = event.fields["sample"]
            texts[number] = texts.get(number, "") + event.output.text
    assert texts == {0: SAMPLES[0], 1: SAMPLES[1]}


def test_the_question_of_a_probe_is_in_no_answer_that_the_budget_cuts():
    keeps = dict.fromkeys(("aaaa", "bbbb"), 0.9)
    settings = {"round_size": 2, "prune_after": 4, "prune_share": 0.0, "restart_below": 0.0}
    result, worker = run(keeps, 2, Budget(tokens=12), **settings)
    assert RESTART_PROMPT in "".join(worker.prompts)
    assert set(result.output.text) in ({"a"}, {"b"})
    assert 4 <= len(result.output.text) < 8


def test_sampling_ends_with_the_first_answer_that_a_new_start_would_not_better():
    keeps = {"aaaaaaaa": 0.4, "bbbbbbbb": 0.9}
    result, worker = run(keeps, prune_after=None)
    assert len(drawn(worker)) == 2
    assert result.output.text == "bbbbbbbb"
    assert told(result) == {
        "index": 1,
        "scores": pytest.approx([0.4, 0.9]),
        "partial_scores": [None, None],
        "pruned": [],
    }
    assert result.output.candidates == ["aaaaaaaa", "bbbbbbbb", None, None]


def test_without_the_threshold_all_are_drawn_and_the_highest_score_is_returned():
    keeps = dict(zip(SAMPLES, (0.4, 0.9, 0.95, 0.2), strict=True))
    result, worker = run(keeps, prune_after=None, threshold=1.0, round_size=4)
    assert len(drawn(worker)) == 4
    assert result.output.text == "cccccccc"


def test_a_score_is_the_share_of_no_among_the_two_words():
    words = {"No": 0.3, "Yes": 0.1, "Well": 0.6}
    entries = {key: Logprob(math.log(p), 1, word) for key, (word, p) in enumerate(words.items())}
    worker = ScriptedWorker(["aaaaaaaa", Reply("W", logprobs=[entries])])
    controller = methods.create("adaptive_compute", prune_after=None, threshold=0.7)
    assert told(answer(controller, worker))["scores"] == pytest.approx([0.3 / (0.3 + 0.1)])


def test_a_probe_is_one_greedy_token_behind_the_sample():
    _, worker = run({"aaaaaaaa": 0.9}, prune_after=None)
    (probe,) = [call for call in worker.calls if call.prompt != "p"]
    assert probe.prompt == f"paaaaaaaa{RESTART_PROMPT}"
    assert (probe.task.max_tokens, probe.task.temperature) == (1, 0.0)


def test_half_of_a_round_is_pruned_in_the_middle_those_with_the_lowest_scores():
    keeps = {"aaa": 0.7, "bbb": 0.3, "ccc": 0.6, "ddd": 0.5, "aaaaaaaa": 0.2, "cccccccc": 0.4}
    result, worker = run(keeps, prune_after=3, round_size=4)
    assert result.output.text == "cccccccc"
    assert told(result)["pruned"] == [1, 3]
    assert told(result)["partial_scores"] == pytest.approx([0.7, 0.3, 0.6, 0.5])
    assert told(result)["scores"] == [pytest.approx(0.2), None, pytest.approx(0.4), None]
    assert [call.ended for call in drawn(worker)] == ["done", "cancelled", "done", "cancelled"]
    # 2 x 3 tokens of the pruned, 2 x 8 of the others, 4 + 2 probes of one token
    assert result.usage.completion_tokens == 6 + 16 + 6
    whole, _ = run(
        dict(zip(SAMPLES, (0.5, 0.3, 0.2, 0.4), strict=True)), round_size=4, prune_after=None
    )
    assert whole.usage.completion_tokens == 4 * 8 + 4


def test_a_sample_that_begins_badly_is_restarted():
    keeps = {"aaa": 0.1, "bbb": 0.6, "bbbbbbbb": 0.9}
    result, worker = run(keeps, prune_after=3, restart_below=0.5)
    assert [call.ended for call in drawn(worker)] == ["cancelled", "done"]
    assert result.output.text == "bbbbbbbb"
    assert told(result)["pruned"] == [0]
    kept, _ = run({"aaa": 0.1, "aaaaaaaa": 0.9}, prune_after=3)
    assert kept.output.text == "aaaaaaaa", "of one sample none is pruned by share"


def test_the_last_chance_for_an_answer_is_not_restarted():
    keeps = {"aaa": 0.1, "bbb": 0.2, "bbbbbbbb": 0.0}
    result, _ = run(keeps, 2, prune_after=3, restart_below=0.5)
    assert result.output.text == "bbbbbbbb"


def test_the_temperature_rises_from_greedy_decoding_with_the_number_of_the_sample():
    keeps = dict.fromkeys(SAMPLES, 0.1)
    _, worker = run(keeps, prune_after=None, params={"temperature": 0.8})
    assert [call.task.temperature for call in drawn(worker)] == pytest.approx([0, 0.4, 0.6, 0.7])
    _, worker = run(keeps, prune_after=None, params={"temperature": 0.8}, annealing=False)
    assert [call.task.temperature for call in drawn(worker)] == [0.8] * 4


def test_samples_shorter_than_the_probe_are_scored_at_their_end_only():
    result, _ = run({"aaaaaaaa": 0.9}, prune_after=64)
    assert told(result)["partial_scores"] == [None]


def test_the_best_answer_so_far_is_returned_when_the_budget_ends():
    keeps = dict(zip(SAMPLES, (0.4, 0.2, 0.1, 0.1), strict=True))
    result, _ = run(keeps, prune_after=None, budget=Budget(tokens=20))
    assert result.output.text == "aaaaaaaa"
    cut, _ = run({}, prune_after=3, budget=Budget(calls=1))
    assert (cut.output.text, cut.output.finish_reason, cut.spent_budget) == (
        "aaa",
        "length",
        "calls",
    )


def test_mistakes_are_refused_by_name():
    with pytest.raises(ParameterError, match="cannot stop the samples of another method"):
        methods.create("adaptive_compute", generation_controller="majority_vote")
    for wrong in ({"threshold": 2}, {"prune_share": -1}, {"round_size": 0}, {"annealing": "x"}):
        with pytest.raises(ParameterError, match="invalid"):
            methods.create("adaptive_compute", **wrong)
    with pytest.raises(ParameterError, match="cannot honour n"):
        run({}, params={"n": 2})


def test_probes_fork_live_sequences_and_nothing_is_left_behind():
    """A shared prompt is prefilled once; a probe prefills its question, not the sample."""
    llm = LLM(speaking(), dtype="float32", kv_cache_config={"max_tokens": 8192, "page_size": 4})
    with EngineWorker(llm) as worker:
        controller = methods.create(
            "adaptive_compute", default_sample_num=4, round_size=4, prune_after=8, threshold=1.0
        )
        params = {"max_tokens": 40, "ignore_eos": True, "seed": 1}
        result = answer(controller, worker, "Say something. " * 8, sampling_params=params)
        assert len(told(result)["pruned"]) == 2
        assert len(result.output.token_ids) == 40
        assert all(0.0 <= score <= 1.0 for score in told(result)["partial_scores"])
        suffix = len(RESTART_PROMPT) + 8
        prompt = len("Say something. " * 8) + 8
        assert result.usage.prefilled <= prompt + 6 * suffix + 4
    expect_empty(llm._frontend.engine)
