"""Generalist rewards: principles and critiques are sampled, their scores added, the best vote."""

from __future__ import annotations

import re

import pytest

from forethought import methods
from forethought.errors import BudgetExceeded, ParameterError
from forethought.methods.spct import votes_in
from forethought.scaffolding import (
    Budget,
    GenerationTask,
    NativeRewardController,
    Reply,
    ScriptedWorker,
)
from scripted import answer

ANSWERS = ["first", "second", "third"]
CRITIQUES = ["x Scores: [7, 4, 9]", "y Scores: [9, 9, 2]", "z Scores: [6, 5, 8]"]


def run(critiques, meta=None, budget=None, **settings):
    """Best of three by critiques; ``meta`` scores them by their first letter."""

    def says(prompt, index):
        if prompt == "p":
            return ANSWERS[index]
        return critiques(prompt) if callable(critiques) else next(given)

    given = iter(critiques if not callable(critiques) else [])
    worker = ScriptedWorker(says, score=lambda question, text: meta[text[:1]])
    spct = methods.create("spct", shuffled=settings.pop("shuffled", False), **settings)
    controller = methods.create("best_of_n", reward_controller=spct, default_sample_num=3)
    return answer(controller, worker, budget=budget), worker


def told(result):
    return result.output.meta["best_of_n"]["scores"]


def test_the_scores_of_all_critiques_are_added():
    result, worker = run(CRITIQUES, num_critiques=3)
    # 7 + 9 + 6, 4 + 9 + 5, 9 + 2 + 8 of at most 30
    assert told(result) == pytest.approx([22 / 30, 18 / 30, 19 / 30])
    assert result.output.text == "first"
    asked = [call for call in worker.calls if call.prompt != "p"]
    assert len(asked) == 3
    assert "Answer 1:\nfirst\n\nAnswer 2:\nsecond\n\nAnswer 3:\nthird" in asked[0].prompt
    assert "{" not in asked[0].prompt


def test_each_critique_has_a_seed_of_its_own():
    worker = ScriptedWorker(lambda p, n: ANSWERS[n] if p == "p" else CRITIQUES[0])
    spct = methods.create("spct", num_critiques=4, sampling_params={"seed": 5})
    controller = methods.create("best_of_n", reward_controller=spct, default_sample_num=3)
    answer(controller, worker)
    seeds = [call.task.seed for call in worker.calls if call.prompt != "p"]
    assert len(set(seeds)) == len(seeds) == 4


def test_the_seed_of_the_request_seeds_the_critiques():
    def seeds(seed):
        worker = ScriptedWorker(lambda p, n: ANSWERS[n % 3] if "Scores" not in p else CRITIQUES[0])
        controller = methods.create("best_of_n", reward_controller="spct", default_sample_num=3)
        answer(controller, worker, sampling_params={"seed": seed})
        return [call.task.seed for call in worker.calls if "Scores" in call.prompt]

    assert seeds(7) == seeds(7)
    assert len({*seeds(7), *seeds(8)}) == 16
    assert set(seeds(None)) == {None}


def test_only_the_critiques_that_the_meta_reward_prefers_vote():
    meta = {"x": 0.8, "y": 0.1, "z": 0.7}
    settings = {"num_critiques": 3, "meta_reward_controller": NativeRewardController()}
    result, _ = run(CRITIQUES, meta, num_voters=2, **settings)
    assert told(result) == pytest.approx([13 / 20, 9 / 20, 17 / 20])
    assert result.output.text == "third", "without the filter it would be the first"
    result, _ = run(CRITIQUES, meta, **settings)
    assert told(result) == pytest.approx([0.7, 0.4, 0.9]), "half of three, rounded down, is one"


def test_one_critique_alone_would_choose_another_answer():
    result, _ = run(CRITIQUES[2:] + CRITIQUES[:2], num_critiques=1)
    assert result.output.text == "third"


def test_answers_stand_in_another_order_in_each_critique_and_keep_their_scores():
    worth = {"first": 3, "second": 9, "third": 6}

    def fair(prompt):
        order = re.findall(r"Answer \d:\n(\w+)", prompt)
        return f"Scores: {[worth[text] for text in order]}"

    result, worker = run(fair, num_critiques=6, shuffled=True)
    assert told(result) == pytest.approx([0.3, 0.9, 0.6])
    orders = {tuple(re.findall(r"Answer \d:\n(\w+)", call.prompt)) for call in worker.calls}
    assert len(orders - {()}) > 1
    again, other = run(fair, num_critiques=6, shuffled=True)
    assert other.prompts == worker.prompts, "the same orders each time"
    assert told(again) == told(result)


def test_a_judge_that_prefers_the_first_place_favours_nobody_in_the_sum():
    partial = lambda prompt: "Scores: [10, 1, 1]"  # noqa: E731
    fixed, _ = run(partial, num_critiques=30)
    assert told(fixed) == pytest.approx([1.0, 0.1, 0.1])
    mixed, _ = run(partial, num_critiques=30, shuffled=True)
    assert max(told(mixed)) < 0.7


def test_critiques_that_cannot_be_read_do_not_vote():
    result, _ = run(
        ["no scores", "Scores: [1, 2]", "Scores: [1, 2, 11]", CRITIQUES[0]], num_critiques=4
    )
    assert told(result) == pytest.approx([0.7, 0.4, 0.9])
    assert votes_in("Scores: [9, 9, 9] no: **Scores**: [2, 3, 4]", [2, 0, 1]) == [3, 4, 2]
    assert votes_in("Scores: [2, 3.5, 4]", [0, 1, 2]) is None
    result, _ = run(["nothing"], num_critiques=1)
    assert told(result) == [0.0, 0.0, 0.0]


def test_when_the_budget_ends_the_critiques_vote_that_have_ended():
    slow = [CRITIQUES[0], Reply("late" * 100, seconds_per_token=0.001)]
    result, _ = run(slow, num_critiques=2, budget=Budget(tokens=80))
    assert told(result) == pytest.approx([0.7, 0.4, 0.9])
    spct = methods.create("spct", num_critiques=1)
    process = spct.process([GenerationTask(input_str="q")])
    next(process)
    with pytest.raises(BudgetExceeded):
        process.throw(BudgetExceeded("spent"))


def test_mistakes_are_refused_by_name():
    with pytest.raises(ParameterError, match="num_voters needs a meta_reward_controller"):
        methods.create("spct", num_voters=2)
    with pytest.raises(ParameterError, match=r"it has no \{answers\}"):
        methods.create("spct", prompt="Which?")
    with pytest.raises(ParameterError, match="invalid num_critiques"):
        methods.create("spct", num_critiques=0)
    assert methods.create("spct", meta_reward_controller="genrm").meta_reward_controller
