"""The public test double says what it is told, the way a model would."""

import asyncio

import pytest

from forethought.errors import UsageError
from forethought.outputs import Logprob, ThinkingOutput, ThoughtEnd
from forethought.scaffolding import Controller, GenerationTask, Reply, ScriptedWorker
from scripted import TAG, answer


def say(worker, prompt="p", **fields):
    task = GenerationTask(input_str=prompt, **fields)
    asyncio.run(worker.run_task(task))
    return task


def test_a_list_is_said_in_order_of_asking():
    worker = ScriptedWorker(["a", "b"])
    assert [say(worker, prompt).output_str for prompt in "xy"] == ["a", "b"]
    with pytest.raises(UsageError, match="no more answers"):
        say(worker, "z")


def test_a_table_is_looked_up_by_prompt():
    worker = ScriptedWorker({"x": "always", "y": ["first", "second"]})
    assert [say(worker, p).output_str for p in "xyxy"] == ["always", "first", "always", "second"]
    with pytest.raises(UsageError, match="no answer"):
        say(worker, "z")


def test_a_function_gets_the_prompt_and_how_often_it_was_asked():
    worker = ScriptedWorker(lambda prompt, index: f"{prompt}{index}")
    assert [say(worker, p).output_str for p in "xxy"] == ["x0", "x1", "y0"]
    assert worker.prompts == ["x", "x", "y"]


def test_texts_are_cut_like_those_of_a_model():
    worker = ScriptedWorker(lambda p, i: "one. two. three")
    task = say(worker, stop=["two", "."])
    assert (task.output_str, task.finish_reason, task.stop_reason) == ("one", "stop", ".")
    assert say(worker, stop=".", include_stop_str_in_output=True).output_str == "one."
    task = say(worker, max_tokens=5)
    assert (task.output_str, task.finish_reason, task.stop_reason) == ("one. ", "length", None)
    assert say(worker, echo=True).output_str == "pone. two. three"
    assert [sample.text for sample in say(worker, n=2).samples] == ["one. two. three"] * 2


def test_a_reply_may_have_log_probabilities_and_a_finish_reason():
    reply = Reply("ab", finish_reason="length", logprobs=[{97: Logprob(-1.0)}, {98: Logprob(-2.0)}])
    task = say(ScriptedWorker([reply]), max_tokens=1)
    assert task.logprobs == [{97: Logprob(-1.0)}]
    assert say(ScriptedWorker([reply])).finish_reason == "length"


def test_tokens_are_characters():
    task = say(ScriptedWorker(["hé"]))
    assert task.output_tokens == [104, 233]
    assert (task.usage.prompt_tokens, task.usage.completion_tokens) == (1, 2)


def test_forks_of_a_script_join_with_their_ids():
    class Asks(Controller):
        def process(self, tasks, **kwargs):
            tasks[0].worker_tag = TAG
            yield tasks
            yield [fork := tasks[0].fork("?")]
            tasks[0].result = fork.joined

    output = answer(Asks(), ScriptedWorker({"p": "ab", "pab?": "c"})).output
    assert (output.text, output.token_ids) == ("ab?c", [97, 98, 63, 99])


@pytest.mark.parametrize(
    ("prompt", "budget", "text", "thought"),
    [
        ("<think>", 3, "abc</think>yes", ThinkingOutput(3, ThoughtEnd.BUDGET)),
        ("<think>\n", 3, "abc</think>yes", ThinkingOutput(3, ThoughtEnd.BUDGET)),
        ("<think>xy", 3, "a</think>yes", ThinkingOutput(3, ThoughtEnd.BUDGET)),
        ("<think>", 0, "</think>yes", ThinkingOutput(0, ThoughtEnd.BUDGET)),
        ("<think>", 9, "abcdef</think>yes", ThinkingOutput(6, ThoughtEnd.NATURAL)),
        ("<think></think>", 2, "abcdef</think>yes", ThinkingOutput(0, None)),
        ("p", 2, "abcdef</think>yes", ThinkingOutput(0, None)),
    ],
)
def test_a_thought_is_closed_at_its_cap(prompt, budget, text, thought):
    worker = ScriptedWorker(lambda p, i: "abcdef</think>yes")
    task = say(worker, prompt, thinking_budget=budget)
    assert (task.output_str, task.thinking) == (text, thought)
    opening = ScriptedWorker(lambda p, i: "<think>\nabcdef</think>yes")
    assert say(opening, thinking_budget=2).output_str == "<think>\nab</think>yes"
    assert say(worker, prompt).thinking is None
