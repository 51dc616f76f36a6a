"""Best of N: the sample with the highest score is returned."""

import pytest

from forethought.errors import ParameterError, TaskError
from forethought.methods import BestOfNController
from forethought.scaffolding import (
    GenerationTask,
    NativeGenerationController,
    NativeRewardController,
    Reply,
    ScriptedWorker,
)
from scripted import answer


def best(texts, count, kind=BestOfNController, **options):
    worker = ScriptedWorker(list(texts), score=lambda question, text: float(len(text)))
    controller = kind(NativeGenerationController(), NativeRewardController(), count)
    return answer(controller, worker, **options), worker


def test_the_best_sample_is_returned_with_its_text_and_tokens():
    result, _ = best(["a", "ccc", "bb"], 3)
    assert result.output.text == "ccc"
    assert result.output.token_ids == [99, 99, 99]
    assert result.output.meta["best_of_n"] == {"scores": [1.0, 3.0, 2.0], "index": 1}


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
