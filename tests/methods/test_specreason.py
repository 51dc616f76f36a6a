"""SpecReason: which steps of the small model are kept, and what the base model writes."""

from __future__ import annotations

import math

import pytest

from engines import expect_empty
from forethought import LLM, methods
from forethought.errors import ParameterError, TaskError
from forethought.methods import SpecReasonController
from forethought.methods.parts.steps import SCORE_PROMPT
from forethought.scaffolding import (
    Budget,
    EngineWorker,
    Reply,
    ScaffoldingLlm,
    ScriptedWorker,
    Stage,
)
from tokens import thinking

TAG = SpecReasonController.WorkerTag
SMALL = ["s1\n\n", "s2\n\n", "s3</think>x"]
BASE = ["b1\n\n", "b2\n\n", "b3</think>y"]


def small_says(prompt, index=0):
    return SMALL[prompt.count("\n\n")]


def base_says(scores):
    """The base model, which gives these scores in turn."""
    given = iter(scores)

    def script(prompt, index):
        if prompt.endswith(SCORE_PROMPT):
            return next(given)
        return "answer" if "</think>" in prompt else BASE[prompt.count("\n\n")]

    return script


def solve(scores, *, prompt="p", budget=None, params=None, small=small_says, **settings):
    """The result, and the workers of the small and the base model."""
    controller = methods.create("specreason", **settings)
    workers = {TAG.SMALL: ScriptedWorker(small), TAG.BASE: ScriptedWorker(base_says(scores))}
    with ScaffoldingLlm(controller, workers) as llm:
        result = llm.generate(prompt, sampling_params=params, budget=budget)
    return result, *workers.values()


@pytest.mark.parametrize(
    ("scores", "text", "accepted"),
    [
        ("999", "s1\n\ns2\n\ns3</think>answer", 3),
        ("679", "b1\n\ns2\n\ns3</think>answer", 2),
        ("7x6", "s1\n\nb2\n\nb3</think>answer", 1),
        ("000", "b1\n\nb2\n\nb3</think>answer", 0),
    ],
)
def test_steps_of_seven_and_more_are_kept_and_others_are_rewritten(scores, text, accepted):
    result, small, base = solve(scores)
    assert result.output.text == text
    told = result.output.meta["specreason"]
    assert told["scores"] == [int(score) if score.isdigit() else 0 for score in scores]
    assert (told["accepted"], told["rejected"]) == (accepted, 3 - accepted)
    assert len(small.calls) == 3
    assert len(base.calls) == 3 + (3 - accepted) + 1
    assert result.output.finish_reason == "stop"


def test_the_score_is_one_token_behind_the_step_and_drawn_greedily():
    _, _, base = solve("999", params={"temperature": 0.6})
    judged = base.calls[0]
    assert judged.prompt == f"ps1{SCORE_PROMPT}"
    assert (judged.task.max_tokens, judged.task.temperature) == (1, 0.0)
    assert base.calls[-1].task.temperature == 0.6


def test_a_rejected_step_is_the_prediction_of_the_step_that_replaces_it():
    _, small, base = solve("7x6")
    predicted = [call.task.prediction for call in base.calls]
    assert predicted == [None, None, "s2\n\n", None, "s3</think>", None]
    assert all(call.task.prediction is None for call in small.calls)


@pytest.mark.parametrize("scores", ["999", "679", "7x6", "000"])
def test_drafts_ahead_of_the_scores_change_nothing_but_the_time(scores):
    alone, _, base = solve(scores)
    ahead, small, other = solve(scores, pipelined=True)
    assert ahead.output.text == alone.output.text
    assert ahead.output.meta == alone.output.meta
    assert other.prompts == base.prompts
    assert set(small.prompts) >= {"p", "p" + (BASE if scores[0] < "7" else SMALL)[0]}


def test_the_next_step_is_drafted_during_scoring_and_cancelled_on_rejection():
    begun = []

    def slow(prompt, index):
        begun.append(prompt)
        return Reply(SMALL[prompt.count("\n\n")], delay=0.0 if prompt == "p" else 60.0)

    def judge(prompt, index):
        if prompt.endswith(SCORE_PROMPT):
            begun.append("score")
            return "0"
        return "answer" if "</think>" in prompt else BASE[2]

    controller = methods.create("specreason", pipelined=True)
    workers = {TAG.SMALL: ScriptedWorker(slow), TAG.BASE: ScriptedWorker(judge)}
    with ScaffoldingLlm(controller, workers) as llm:
        result = llm.generate("p")
    assert result.output.text == "b3</think>answer"
    assert begun == ["p", "score", "ps1\n\n"]
    assert [call.ended for call in workers[TAG.SMALL].calls] == ["done", "cancelled"]


def test_without_steps_behind_it_nothing_is_drafted_ahead():
    _, small, _ = solve("9", max_steps=1, pipelined=True)
    assert len(small.calls) == 1
    _, small, _ = solve("999", pipelined=True)
    assert len(small.calls) == 3


def test_a_draft_ahead_that_fails_is_drafted_again():
    def small(prompt, index):
        failing = prompt != "p" and index == 0
        return Reply(small_says(prompt), error=OSError("gone") if failing else None)

    result, _, _ = solve("999", small=small, pipelined=True)
    assert result.output.text == "s1\n\ns2\n\ns3</think>answer"


def test_each_score_is_told_as_a_stage():
    result, _, _ = solve("679")
    stages = [event.output for event in result.events(stages=True)]
    scored = [stage.fields for stage in stages if isinstance(stage, Stage)]
    assert [(one["step"], one["score"], one["accepted"]) for one in scored] == [
        (0, 6, False),
        (1, 7, True),
        (2, 9, True),
    ]


def test_the_first_steps_are_the_base_models_and_the_threshold_can_be_set():
    result, small, _ = solve("99", first_n_base_steps=1)
    assert result.output.text == "b1\n\ns2\n\ns3</think>answer"
    assert result.output.meta["specreason"]["scores"] == [None, 9, 9]
    assert len(small.calls) == 2
    assert solve("345", score_threshold=4)[0].output.text == "b1\n\ns2\n\ns3</think>answer"


def test_behind_as_many_steps_as_allowed_the_base_model_writes_the_rest():
    result, small, _ = solve("9", max_steps=1)
    assert result.output.text == "s1\n\nb2\n\n"
    assert len(small.calls) == 1


@pytest.mark.parametrize("max_tokens", [None, 60])
def test_a_users_stop_that_is_the_end_of_a_step_ends_the_answer(max_tokens):
    def small(prompt, index):
        return "s1\n\n" if prompt == "p" else "s2</think>"

    worker = ScriptedWorker(
        lambda prompt, index: "9" if prompt.endswith(SCORE_PROMPT) else "a\n\nb"
    )
    controller = methods.create("specreason")
    workers = {TAG.SMALL: ScriptedWorker(small), TAG.BASE: worker}
    with ScaffoldingLlm(controller, workers) as llm:
        params = {"stop": ["\n\n"], "max_tokens": max_tokens}
        result = llm.generate("p", sampling_params=params)
    assert result.output.text == "s1\n\ns2</think>a"
    assert (result.output.finish_reason, result.output.stop_reason) == ("stop", "\n\n")


def test_a_long_step_is_cut_at_its_limit():
    def small(prompt, index):
        return "abcdef"[len(prompt) - 1 :]

    result, worker, _ = solve("9999", small=small, step_tokens=4, think_end=None)
    assert result.output.text == "abcdef"
    assert [len(call.prompt) for call in worker.calls] == [1, 5]


def test_max_tokens_is_that_of_the_whole_output():
    result, _, _ = solve("999", params={"max_tokens": 5})
    assert result.output.finish_reason == "length"
    assert result.output.text == "s1\n\ns2\n\ns"


@pytest.mark.parametrize(
    ("budget", "text"),
    [(Budget(calls=3), "s1\n\n"), (Budget(calls=4), "s1\n\ns2\n\n"), (Budget(tokens=4), "s1\n\n")],
)
def test_what_there_is_at_the_end_of_the_budget_is_returned(budget, text):
    result, _, _ = solve("999", budget=budget)
    assert (result.output.text, result.output.finish_reason) == (text, "length")
    assert result.output.meta["specreason"]["budget_ended"]
    unjudged, _, _ = solve("999", budget=Budget(calls=1))
    assert (unjudged.output.text, unjudged.output.finish_reason) == ("s1\n\n", "length")


def test_a_failing_draft_fails_the_request():
    with pytest.raises(TaskError, match="gone"):
        solve("9", small=lambda prompt, index: Reply("", error=OSError("gone")))


def test_what_it_cannot_honour_is_refused():
    with pytest.raises(ParameterError, match="works in text"):
        solve("9", prompt=[1, 2])
    with pytest.raises(ParameterError, match="cannot honour thinking_budget"):
        solve("9", params={"thinking_budget": 3})
    for settings in ({"score_threshold": 11}, {"step_end": ""}, {"first_n_base_steps": -1}):
        with pytest.raises(ParameterError):
            methods.create("specreason", **settings)


def likely(probabilities, **settings):
    """The result and the base model's calls, where it gives the tokens of each step these
    probabilities in turn."""
    given = iter(probabilities)

    def base(prompt, index):
        if prompt == "p" and index == 0:
            return "x"  # the token behind the prompt
        if prompt.endswith(("s1\n\n", "s2\n\n", "s3</think>")) and index == 0:
            return Reply("x", suffix_logprobs=[math.log(each) for each in next(given)])
        return "answer" if "</think>" in prompt else BASE[prompt.count("\n\n")]

    controller = methods.create("specreason", scorer="likelihood", **settings)
    workers = {TAG.SMALL: ScriptedWorker(small_says), TAG.BASE: ScriptedWorker(base)}
    with ScaffoldingLlm(controller, workers) as llm:
        result = llm.generate("p")
    return result, workers[TAG.BASE].calls


@pytest.mark.parametrize(
    ("settings", "text", "scores"),
    [
        ({}, "s1\n\nb2\n\ns3</think>answer", [0.5, 0.05, 0.1]),
        ({"score_threshold": 0.2}, "s1\n\nb2\n\nb3</think>answer", [0.5, 0.05, 0.1]),
        ({"aggregation": "mean"}, "s1\n\ns2\n\ns3</think>answer", [0.5**0.5, 0.05**0.5, 0.1]),
    ],
)
def test_a_step_is_scored_by_the_probability_of_its_tokens(settings, text, scores):
    result, calls = likely([(1.0, 0.5), (0.05, 1.0), (0.1,)], **settings)
    assert result.output.text == text
    assert result.output.meta["specreason"]["scores"] == pytest.approx(scores)
    assert all(call.task.temperature == 0.0 for call in calls if call.task.score_suffix)


def test_scores_and_steps_of_the_base_model_go_on_behind_the_kept_steps():
    _, calls = likely([(0.5,), (0.01,), (0.5,)])
    scored = [call.task for call in calls if call.task.score_suffix]
    assert [task.fork_point.suffix for task in scored] == ["s1\n\n", "s2\n\n", "s3</think>"]
    assert scored[1].fork_point.num_kept == 0, "behind the first step, which was kept"
    [rewritten] = [call.task for call in calls if call.task.prediction]
    assert (rewritten.input_str, rewritten.fork_point.num_kept) == ("ps1\n\n", 0)
    assert scored[2].input_str == "ps1\n\nb2\n\ns3</think>"


def test_a_worker_that_cannot_score_by_likelihood_is_named():
    with pytest.raises(ParameterError, match="cannot score by likelihood"):
        solve("999", scorer="likelihood")


def test_on_two_engines_a_kept_step_is_computed_once_by_the_base_model():
    """The same model twice: its own steps are probable, whatever it draws greedily."""
    fields = {"kv_cache_config": {"max_tokens": 4096, "page_size": 4}, "dtype": "float32"}
    small, base = LLM(thinking(), **fields), LLM(thinking(), **fields)
    settings = {"scorer": "likelihood", "step_tokens": 8, "think_end": None}
    params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 24}
    tags = {"score_threshold": 0.0}
    with EngineWorker(small) as drafting, EngineWorker(base) as judging:
        controller = methods.create("specreason", **settings, **tags)
        with ScaffoldingLlm(controller, {TAG.SMALL: drafting, TAG.BASE: judging}) as llm:
            result = llm.generate("a b c", sampling_params=params)
        told = result.output.meta["specreason"]
        assert told["accepted"] == len(told["scores"]) >= 3
        assert all(0.0 < score <= 1.0 for score in told["scores"])
        stats, num_steps = judging.llm.stats, len(told["scores"])
        prompt = len(judging.llm.tokenizer("a b c").input_ids)
        assert stats.decoded == 1 + num_steps, "a token behind the prompt and behind each step"
        text = len(judging.llm.tokenizer(result.output.text).input_ids)
        assert stats.prefilled <= prompt + text + 3 * num_steps
        controller = methods.create("specreason", **settings, score_threshold=1.0)
        with ScaffoldingLlm(controller, {TAG.SMALL: drafting, TAG.BASE: judging}) as llm:
            rewritten = llm.generate("a b c", sampling_params=params)
        assert rewritten.output.meta["specreason"]["accepted"] == 0
        expect_empty(small._frontend.engine)
        expect_empty(base._frontend.engine)


def test_on_two_engines_the_base_model_decodes_one_token_per_kept_step():
    fields = {"kv_cache_config": {"max_tokens": 4096, "page_size": 4}, "dtype": "float32"}
    small, base = LLM(thinking(), **fields), LLM(thinking(), **fields)
    controller = methods.create("specreason", score_threshold=0, step_tokens=8, think_end=None)
    params = {"temperature": 1.0, "seed": 2, "ignore_eos": True, "max_tokens": 24}
    with EngineWorker(small) as drafting, EngineWorker(base) as judging:
        with ScaffoldingLlm(controller, {TAG.SMALL: drafting, TAG.BASE: judging}) as llm:
            result = llm.generate("a b c", sampling_params=params)
        told = result.output.meta["specreason"]
        assert told["accepted"] == len(told["scores"]) == judging.llm.stats.decoded >= 3
        assert drafting.llm.stats.decoded == 24
        assert result.output.finish_reason == "length"
        expect_empty(small._frontend.engine)
        expect_empty(base._frontend.engine)
