"""Best of N: the sample with the highest score is returned."""

import re

import pytest

from forethought.errors import BudgetExceeded, ParameterError, TaskError
from forethought.methods import BestOfNController
from forethought.outputs import Logprob
from forethought.scaffolding import (
    Budget,
    CompareRewardController,
    ConfidenceRewardController,
    GenerationTask,
    JudgeRewardController,
    NativeGenerationController,
    NativeRewardController,
    Reply,
    ScaffoldingLlm,
    ScriptedWorker,
)
from scripted import TimeEnds, answer


def best(texts, count, kind=BestOfNController, **options):
    worker = ScriptedWorker(list(texts), score=lambda question, text: float(len(text)))
    controller = kind(NativeGenerationController(), NativeRewardController(), count)
    return answer(controller, worker, **options), worker


def test_the_best_sample_is_returned_with_its_text_and_tokens():
    result, _ = best(["a", "ccc", "bb"], 3)
    assert result.output.text == "ccc"
    assert result.output.token_ids == [99, 99, 99]
    assert result.output.meta["best_of_n"] == {"scores": [1.0, 3.0, 2.0], "index": 1}


def test_answers_are_scored_by_the_question_where_the_prompt_is_ids():
    asked = []
    worker = ScriptedWorker(["a", "b"], score=lambda question, text: asked.append(question) or 1.0)
    controller = BestOfNController(NativeGenerationController(), NativeRewardController(), 2)
    answer(controller, worker, [1, 2, 3], question="why?")
    assert asked == ["why?", "why?"]
    with pytest.raises(ParameterError, match="question"):
        answer(controller, worker, [1, 2, 3], question=7)


def test_the_first_of_equals_wins():
    assert best(["aa", "bb", "c"], 3)[0].output.text == "aa"


@pytest.mark.parametrize("count", [1, 2, 5])
def test_as_many_samples_are_made_as_asked_for(count):
    assert len(best("abcde", count)[1].calls) == count
    assert len(best("abcde", 4, sample_num=count)[1].calls) == count


def test_another_choice_can_be_put_in_its_place():
    class Worst(BestOfNController):
        def select_best(self, tasks, reward_values, **kwargs):
            index = reward_values.index(min(reward_values))
            return tasks[index], index

    assert best(["aa", "b", "cc"], 3, Worst)[0].output.text == "b"


def test_bad_numbers_are_refused():
    with pytest.raises(ParameterError, match="sample_num"):
        best("abc", 0)
    native = NativeGenerationController()
    process = BestOfNController(native, native).process([GenerationTask(), GenerationTask()])
    with pytest.raises(ParameterError, match="one task"):
        next(process)


def test_each_sample_has_a_seed_of_its_own_wherever_the_seed_comes_from():
    worker = ScriptedWorker(list("abab"), score=lambda question, text: 0.0)
    for settings, options in (({"seed": 7}, {}), ({}, {"sampling_params": {"seed": 7}})):
        inner = NativeGenerationController(settings)
        answer(BestOfNController(inner, NativeRewardController(), 2), worker, **options)
    one, other, *again = [call.task.seed for call in worker.calls]
    assert len({7, one, other}) == 3
    assert again == [one, other]


class Dropping(NativeGenerationController):
    """Failures of its generations are only noted."""

    def process(self, tasks, **kwargs):
        tasks[0].on_failure = "drop"
        yield from super().process(tasks, **kwargs)


BAD = Reply("", error=OSError("gone"))


def test_samples_that_were_dropped_are_not_judged_and_never_win():
    worker = ScriptedWorker(["a", BAD, "ccc", BAD], score=lambda question, text: -len(text))
    controller = BestOfNController(Dropping(), NativeRewardController(), 4)
    result = answer(controller, worker)
    assert result.output.text == "a"
    assert result.output.meta["best_of_n"] == {"scores": [-1, None, -3, None], "index": 0}
    worker = ScriptedWorker([BAD, "bb"], score=lambda question, text: 1.0)
    result = answer(BestOfNController(Dropping(), NativeRewardController(), 2), worker)
    assert (result.output.text, result.output.meta["best_of_n"]["index"]) == ("bb", 1)
    with pytest.raises(TaskError, match="gone"):
        answer(controller, ScriptedWorker([BAD] * 4, score=lambda question, text: 1.0))


class Broken(NativeGenerationController):
    """Its second sample fails in the controller itself; the third in its worker."""

    def process(self, tasks, **kwargs):
        yield from super().process(tasks, **kwargs)
        if tasks[0].output_str == "bb":
            raise ValueError("broken")


def test_samples_that_fail_are_raised_or_dropped_as_on_failure_says():
    def ask(replies, **settings):
        worker = ScriptedWorker(replies, score=lambda question, text: float(len(text)))
        controller = BestOfNController(Broken(), NativeRewardController(), 4, **settings)
        return answer(controller, worker).output

    replies = ["a", "bb", BAD, "ccc"]
    output = ask(replies, on_failure="drop")
    assert (output.text, output.meta["best_of_n"]["scores"]) == ("ccc", [1.0, None, None, 3.0])
    assert output.candidates == ["a", None, None, "ccc"]
    with pytest.raises(TaskError, match="gone"):
        ask(["a", BAD, "bb", "ccc"])
    with pytest.raises(ValueError, match="broken"):
        ask(["a", "bb", "c", "d"])
    with pytest.raises(ValueError, match="broken"):
        ask(["bb", BAD, BAD, BAD], on_failure="drop")
    with pytest.raises(ParameterError, match="on_failure"):
        ask([], on_failure="ignore")


def test_a_reward_controller_that_leaves_no_scores_is_refused():
    controller = BestOfNController(NativeGenerationController(), NativeGenerationController(), 2)
    with pytest.raises(ParameterError, match="no reward controller"):
        answer(controller, ScriptedWorker(lambda prompt, index: "x"))


def test_what_a_choice_cannot_use_is_refused_before_anything_runs():
    worker = ScriptedWorker(["x"])
    controller = BestOfNController(NativeGenerationController(), NativeRewardController())
    with pytest.raises(ParameterError, match="no argument 'weights'"):
        answer(controller, worker, select_best_kwargs={"weights": [1, 2]})
    with pytest.raises(ParameterError, match="invalid reward_controller"):
        BestOfNController(NativeGenerationController(), "reward")
    assert worker.calls == []


# ---- weighted, by judges, and with a budget ------------------------------------------------------


def chosen(texts, rewards, **settings):
    worker = ScriptedWorker(texts, score=lambda question, text: rewards[texts.index(text)])
    controller = BestOfNController(
        NativeGenerationController(), NativeRewardController(), len(texts), **settings
    )
    return answer(controller, worker).output


SAID = [r"a \boxed{7}", r"b \boxed{5}", r"c \boxed{14/2}", r"d \boxed{5}"]


def test_a_weighted_choice_adds_the_scores_of_equal_answers():
    """7 has 0.5 + 0.4 = 0.9 and 5 has 0.8 + 0.0; the best sample alone says 5."""
    rewards = [0.5, 0.8, 0.4, 0.0]
    assert chosen(SAID, rewards).text == SAID[1]
    output = chosen(SAID, rewards, choice="weighted")
    assert output.text == SAID[0]
    told = output.meta["best_of_n"]
    assert told.items() >= {"scores": rewards, "index": 0, "answer": "7", "num_voters": 4}.items()
    assert chosen(SAID, [0.4, 0.8, 0.5, 0.0], choice="weighted").text == SAID[2]
    heaviest = chosen([*SAID, r"e \boxed{9}"], [0.1, 0.2, 0.1, 0.2, 0.9], choice="weighted")
    assert heaviest.text == r"e \boxed{9}", "0.9 of one sample before 0.4 and 0.2 of two"


def test_a_weighted_choice_without_answers_takes_the_best_and_refuses_negative_scores():
    assert chosen(["a", "b"], [0.1, 0.2], choice="weighted").text == "b"
    assert chosen(["(A)", "(B)"], [2, 1], choice="weighted", answer_space="choice").text == "(A)"
    with pytest.raises(ParameterError, match="from 0 on"):
        chosen(["a", "b"], [0.1, -0.2], choice="weighted")
    with pytest.raises(ParameterError, match="choice"):
        BestOfNController(NativeGenerationController(), NativeRewardController(), choice="worst")


def judged(texts, judge, reply, **settings):
    """Best of N with a judge whose answers are scripted as a function of what it is asked."""
    asked = []

    def script(prompt, index):
        asked.append(prompt)
        return reply(prompt)

    controller = BestOfNController(NativeGenerationController(), judge, len(texts), **settings)
    workers = {"generation": ScriptedWorker(texts), "reward": ScriptedWorker(script)}
    with ScaffoldingLlm(controller, workers) as llm:
        return llm.generate("what?").output, asked


def test_a_judge_scores_each_answer_by_itself():
    says = {"a1": "It is fine. Score: 3", "b2": "Score: 2\n**Score:** 7.5", "c3": "no idea"}
    reply = lambda prompt: next(said for text, said in says.items() if text in prompt)  # noqa: E731
    output, asked = judged([*says], JudgeRewardController(), reply)
    assert output.text == "b2"
    assert output.meta["best_of_n"]["scores"] == [0.3, 0.75, 0.0], "no score is none"
    assert all("what?" in prompt and "to 10 (right)" in prompt for prompt in asked)
    output, _ = judged(["a", "b"], JudgeRewardController(), lambda prompt: "Score: 11")
    assert (output.text, output.meta["best_of_n"]["scores"]) == ("a", [0.0, 0.0])


def test_judges_are_shown_answers_without_their_thoughts_and_equal_ones_once():
    texts = ["long thought\n</think>\n7", "other one</think>7", "no</think> 8", "cut off"]
    output, asked = judged(texts, JudgeRewardController(), lambda prompt: "Score: 1")
    assert output.text == texts[0]
    assert not any("thought" in prompt or "other" in prompt for prompt in asked)
    assert sum("Answer:\n7\n" in prompt for prompt in asked) == 2
    assert sum("Answer:\ncut off\n" in prompt for prompt in asked) == 1
    output, asked = judged(texts[:3], CompareRewardController(2), largest)
    assert output.text == texts[2]
    [prompt] = asked
    assert "Answer 1:\n7\n\nAnswer 2:\n8\n" in prompt


def largest(prompt):
    """A judge that prefers the largest number."""
    found = re.findall(r"Answer (\d+):\n(\d+)", prompt)
    return f"Best: {max(found, key=lambda each: int(each[1]))[0]}"


@pytest.mark.parametrize(
    ("texts", "size", "scores", "judgements"),
    [
        (["1", "2"], 2, [0, 1], 1),
        (["2", "1"], 2, [1, 0], 1),
        (["1", "3", "2", "5", "4"], 2, [0, 1, 0, 3, 2], 4),
        (["1", "3", "2", "5", "4"], 4, [0, 0, 0, 2, 1], 2),
        (["3", "3", "3"], 2, [0, 0, 0], 0),
        (["7"], 2, [0], 0),
    ],
)
def test_a_judge_compares_groups_and_their_winners_until_one_is_left(
    texts, size, scores, judgements
):
    output, asked = judged(texts, CompareRewardController(size), largest)
    assert output.text == max(texts)
    assert output.meta["best_of_n"]["scores"] == scores
    assert len(asked) == judgements


def test_where_the_judge_names_none_the_first_of_a_group_goes_on():
    assert judged(["1", "2"], CompareRewardController(), lambda prompt: "hm")[0].text == "1"
    assert judged(["1", "2"], CompareRewardController(), lambda p: "Best: 9")[0].text == "1"
    text = judged(["{count}", "2"], CompareRewardController(), lambda p: "Best: 1")[1][0]
    assert "Answer 1:\n{count}" in text


def test_settings_of_judges_are_checked():
    with pytest.raises(ParameterError, match=r"\{answer\}"):
        JudgeRewardController("what do you think?")
    with pytest.raises(ParameterError, match="group_size"):
        CompareRewardController(1)
    assert JudgeRewardController(sampling_params={"temperature": 0.5}).sampling_params == {
        "temperature": 0.5,
        "max_tokens": 1024,
    }


def test_when_the_budget_ends_the_best_of_those_finished_is_returned():
    replies = ["aa", "bb", Reply("cc", delay=60)]
    worker = TimeEnds(replies, score=lambda question, text: float(text == "bb"))
    controller = BestOfNController(NativeGenerationController(), NativeRewardController(), 3)
    output = answer(controller, worker, budget=Budget(seconds=600)).output
    assert (output.text, output.candidates) == ("aa", ["aa", "bb", None])
    assert output.meta["best_of_n"]["scores"] == [0.0, 0.0, None], "no reward could be asked"
    scripted = [sure("aa", 1), sure("bb", 2), Reply("cc", delay=60)]
    controller = BestOfNController(
        NativeGenerationController(), ConfidenceRewardController("mean"), 3
    )
    output = answer(controller, TimeEnds(scripted), budget=Budget(seconds=600)).output
    assert output.text == "bb", "the confidence costs nothing"
    with pytest.raises(BudgetExceeded):
        answer(controller, ScriptedWorker([Reply("a", delay=60)] * 3), budget=Budget(seconds=0.1))


def sure(text, value):
    return Reply(text, logprobs=[{ord(c): Logprob(-value, 1)} for c in text])
