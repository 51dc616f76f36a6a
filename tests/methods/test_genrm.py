"""Generative verification as the reward of best of N."""

from __future__ import annotations

import math

import pytest

from engines import expect_empty
from forethought import LLM, methods
from forethought.errors import ParameterError
from forethought.outputs import Logprob
from forethought.rewards.genrm_controller import VERIFY_PROMPT, YES_NO_PROMPT
from forethought.scaffolding import Budget, EngineWorker, Reply, ScriptedWorker
from scripted import TimeEnds, answer
from tokens import thinking

ANSWERS = ["six", "seven", "eight"]
YES = {"six": [0.2, 0.9], "seven": [0.7, 0.6], "eight": [0.6, 0.1]}


def yes_no(yes: float) -> Reply:
    """A first token whose "Yes" has two spellings, of which the lesser has 0.1."""
    entries = {1: (" No", 1 - yes), 2: ("Yes", yes - 0.1), 3: (" yes", 0.1)}
    scores = {key: Logprob(math.log(p + 1e-12), 1, token) for key, (token, p) in entries.items()}
    return Reply("N", logprobs=[scores])


def says(prompt: str, index: int):
    """An answer, a verification of it, or the answer to the question behind that."""
    if VERIFY_PROMPT not in prompt:
        return ANSWERS[index]
    said, _, behind = prompt.removeprefix("p").partition(VERIFY_PROMPT)
    if YES_NO_PROMPT not in behind:
        return f"thought {index}"
    return yes_no(YES[said][int(behind.removeprefix("thought ")[0])])


def best(worker=None, *, budget=None, params=None, **settings):
    settings = {"method": "genrm", "num_verifications": 2, **settings}
    controller = methods.create("best_of_n", reward_controller=settings, default_sample_num=3)
    return answer(
        controller, worker or ScriptedWorker(says), "p", budget=budget, sampling_params=params
    )


def test_the_answer_with_the_most_probable_yes_over_all_verifications_wins():
    worker = ScriptedWorker(says)
    output = best(worker, params={"seed": 5}).output
    assert output.text == "seven"  # one verification alone would have chosen six, at 0.9
    assert output.meta["best_of_n"]["scores"] == pytest.approx([0.55, 0.65, 0.35])
    verifications = [call for call in worker.calls if call.prompt.endswith(VERIFY_PROMPT)]
    assert len(verifications) == 6
    assert len({call.task.seed for call in verifications}) == 6
    questions = [call.task for call in worker.calls if call.prompt.endswith(YES_NO_PROMPT)]
    assert [(task.max_tokens, task.temperature) for task in questions] == [(1, 0.0)] * 6


def test_the_question_whether_it_is_correct_is_sampled_in_its_own_way():
    worker = ScriptedWorker(says)
    best(worker, params={"seed": 5, "top_p": 0.5, "stop": ["never"]})
    for call in worker.calls:
        own = (call.task.top_p, call.task.stop) == (0.5, ["never"])
        assert own is not call.prompt.endswith(YES_NO_PROMPT)


def test_without_a_verification_the_question_is_asked_at_once():
    def script(prompt, index):
        said, asked, _ = prompt.removeprefix("p").partition(YES_NO_PROMPT)
        return yes_no(YES[said][0]) if asked else ANSWERS[index]

    worker = ScriptedWorker(script)
    output = best(worker, num_verifications=0).output
    assert output.text == "seven"
    assert output.meta["best_of_n"]["scores"] == pytest.approx([0.2, 0.7, 0.6])
    assert len(worker.calls) == 6


def test_a_worker_without_probabilities_votes_with_its_words():
    def script(prompt, index):
        reply = says(prompt, index)
        return Reply("Y" if "seven" in prompt else "N") if isinstance(reply, Reply) else reply

    output = best(ScriptedWorker(script), yes="y").output
    assert output.meta["best_of_n"]["scores"] == [0.0, 1.0, 0.0]


def test_the_verifications_that_the_budget_leaves_are_counted():
    drawn = sum(map(len, ANSWERS))
    unscored = best(budget=Budget(tokens=drawn)).output
    assert unscored.text in ANSWERS
    assert unscored.meta["best_of_n"]["scores"] == [0.0, 0.0, 0.0]

    def script(prompt, index):
        reply = says(prompt, index)
        late = prompt.endswith(VERIFY_PROMPT) and ("seven" not in prompt or index)
        return Reply(reply, delay=60.0) if late else reply

    worker = TimeEnds(script)
    output = best(worker, budget=Budget(seconds=600)).output
    assert output.meta["best_of_n"]["scores"] == [None, pytest.approx(0.7), None]
    assert output.text == "seven"
    assert all(call.ended is not None for call in worker.calls)


def test_it_scores_answers_and_is_no_method_by_itself():
    with pytest.raises(ParameterError, match="reward controller"):
        answer(methods.create("genrm"), ScriptedWorker(says), "p")
    with pytest.raises(ParameterError, match="num_verifications"):
        methods.create("genrm", num_verifications=-1)


def test_on_the_engine_the_score_is_the_probability_of_the_word():
    fields = {"kv_cache_config": {"max_tokens": 4096, "page_size": 4}, "dtype": "float32"}
    llm = LLM(thinking(), **fields)
    with EngineWorker(llm) as worker:
        words = [worker.tokenizer.decode([token]) for token in range(len(worker.tokenizer))]
        yes = next(word.strip() for word in words if word.strip().isalpha())
        controller = methods.create(
            "best_of_n",
            reward_controller={"method": "genrm", "yes": yes, "verification_tokens": 5},
            default_sample_num=3,
        )
        params = {"temperature": 1.0, "seed": 1, "ignore_eos": True, "max_tokens": 12}
        prompt = worker.tokenizer("a b c").input_ids
        before = worker.llm.stats
        output = answer(controller, worker, prompt, sampling_params=params).output
        after = worker.llm.stats
        assert all(0.0 <= score < 1.0 for score in output.meta["best_of_n"]["scores"])
        assert after.decoded - before.decoded == 3 * 12 + 3 * 4 * (5 + 1)
        asked = [len(worker.tokenizer(text).input_ids) for text in (VERIFY_PROMPT, YES_NO_PROMPT)]
        forks = 3 * 4 * (asked[0] + asked[1] + 2)
        assert after.prefilled - before.prefilled <= len(prompt) + 3 + forks
        expect_empty(llm._frontend.engine)
