"""Fork-think: one path is forked where the model was least confident, and the answers are voted."""

from __future__ import annotations

import pytest

from engines import expect_empty
from forethought import LLM, methods
from forethought.answers.answer_spaces import TextAnswers
from forethought.errors import ParameterError
from forethought.methods.fork_think import ForkThinkController
from forethought.outputs import Logprob
from forethought.scaffolding import Budget, EngineWorker, Reply, ScriptedWorker
from scripted import answer
from tokens import speaking

LAST = TextAnswers(lambda text: text[-1] if text[-1].isdigit() else None)


def sure(text, *confidences):
    """A reply of which each group of two tokens has one of these confidences."""
    values = [value for value in confidences for _ in range(2)][: len(text)]
    pairs = zip(text, values, strict=True)
    return Reply(text, logprobs=[{ord(each): Logprob(-value, 1)} for each, value in pairs])


SEED = sure("aabbccdd7", 5.0, 1.0, 4.0, 2.0, 9.0)  # groups at 0, 2, 4, 6, 8


def run(script, count, budget=None, params=None, **settings):
    worker = ScriptedWorker({"p": SEED, **script})
    controller = methods.create(
        "fork_think", default_sample_num=count, window=2, answer_space=LAST, **settings
    )
    return answer(controller, worker, budget=budget, sampling_params=params), worker


def told(result):
    return result.output.meta["fork_think"]


FORKS = {"paa": [sure("xx5", 1.0, 1.0), sure("yy5", 1.0, 1.0)], "paabbcc": sure("zz7", 1.0, 1.0)}


def test_the_seed_path_is_forked_at_its_least_confident_groups():
    result, worker = run(FORKS, 4, num_points=2)
    # confidences 5 1 4 2 9: the groups at 2 and at 6; of three forks the first point has two
    assert worker.prompts == ["p", "paa", "paabbcc", "paa"]
    assert told(result) == {
        "answer": "7",
        "answer_rule": None,
        "num_voters": 4,
        "num_uncompared": 0,
        "points": [{"at": 2, "confidence": 1.0}, {"at": 6, "confidence": 2.0}],
        "finished": 4,
    }  # 7 of the seed path and of the second fork, 5 of the others: the first seen wins the tie
    assert result.output.text == "aabbccdd7"
    assert result.output.candidates == ["aabbccdd7", "aaxx5", "aabbcczz7", "aayy5"]


def test_the_path_of_a_fork_is_whole_and_only_what_is_new_was_generated():
    result, _ = run(FORKS, 3, num_points=1)
    assert result.output.text == "aaxx5", "5, 5 against the 7 of the seed path"
    assert result.output.token_ids == [*map(ord, "aaxx5")]
    assert len(result.output.confidences) == 5
    assert result.usage.completion_tokens == 9 + 3 + 3


def test_forks_at_confident_groups_would_give_another_answer():
    sorted_up = {"p": [sure("aabbccdd7", 1.0, 5.0, 4.0, 2.0, 9.0), sure("5", 1.0), sure("5", 1.0)]}
    result, worker = run(sorted_up, 3, num_points=1)
    assert worker.prompts == ["p", "p", "p"], "the least confident group is the first one"
    assert result.output.text == "5"


def test_forks_share_the_token_limit_and_have_their_own_seeds():
    _, worker = run(FORKS, 4, num_points=2, params={"max_tokens": 9, "seed": 3})
    forks = [call.task for call in worker.calls[1:]]
    assert [task.max_tokens for task in forks] == [7, 3, 7]
    assert len({call.task.seed for call in worker.calls}) == 4


def test_the_seed_path_alone_answers_if_nothing_is_forked_or_the_budget_ends():
    result, worker = run({}, 1)
    assert (worker.prompts, result.output.text) == (["p"], "aabbccdd7")
    result, _ = run(FORKS, 4, budget=Budget(calls=1))
    assert (result.output.text, told(result)["finished"]) == ("aabbccdd7", 1)
    assert result.output.candidates == ["aabbccdd7", None, None, None]


def test_mistakes_are_refused_by_name():
    with pytest.raises(ParameterError, match="cannot stop the samples of another method"):
        methods.create("fork_think", generation_controller="dynasor")
    for wrong in ({"num_points": 0}, {"window": 0}, {"on_failure": "x"}):
        with pytest.raises(ParameterError, match="invalid"):
            methods.create("fork_think", **wrong)
    with pytest.raises(ParameterError, match="cannot honour n"):
        run(FORKS, 2, params={"n": 2})


def test_forks_on_the_engine_continue_the_tokens_of_the_seed_path():
    llm = LLM(speaking(), dtype="float32", kv_cache_config={"max_tokens": 8192, "page_size": 4})
    with EngineWorker(llm) as worker:
        controller = methods.create(
            "fork_think", default_sample_num=5, num_points=2, window=4, answer_space="text"
        )
        params = {"max_tokens": 32, "ignore_eos": True, "seed": 1, "temperature": 1.0}
        result = answer(controller, worker, "Hello world. " * 6, sampling_params=params)
        points = [point["at"] for point in told(result)["points"]]
        assert len(points) == 2
        num_new = sum(32 - points[n % 2] for n in range(4))
        assert result.usage.completion_tokens == 32 + num_new
        assert len(result.output.token_ids) == 32
        assert result.usage.prefilled <= len("Hello world. " * 6) + 8 + 4 * 2
    expect_empty(llm._frontend.engine)


def test_the_log_probability_of_a_path_is_the_sum_over_its_tokens(monkeypatch):
    paths, whole = [], ForkThinkController._whole
    monkeypatch.setattr(
        ForkThinkController, "_whole", lambda *args: paths.append(whole(*args)) or paths[-1]
    )
    llm = LLM(speaking(), dtype="float32", kv_cache_config={"max_tokens": 8192, "page_size": 4})
    with EngineWorker(llm) as worker:
        controller = methods.create("fork_think", default_sample_num=3, num_points=1, window=4)
        params = {"max_tokens": 12, "ignore_eos": True, "seed": 1, "temperature": 1.0}
        answer(controller, worker, "Hello", sampling_params={**params, "logprobs": 0})
    assert len(paths) == 2
    for path in paths:
        pairs = zip(path.output_tokens, path.logprobs, strict=True)
        assert path.cumulative_logprob == pytest.approx(sum(e[t].logprob for t, e in pairs))
