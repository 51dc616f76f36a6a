"""First-answer stopping: where the thought is closed, and what is generated for it."""

from __future__ import annotations

import pytest

from engines import expect_empty
from forethought import LLM, methods
from forethought.errors import ParameterError
from forethought.methods.stack import stack
from forethought.scaffolding import EngineWorker, ScaffoldingLlm, ScriptedWorker, Stage
from scripted import answer

PROMPT = "p<think>"
WHOLE = "3+4=8.\nSo the answer is 8.\nWait, 7. So the answer is 7.\n</think>7!"


def says(prompt: str, index: int = 0) -> str:
    """The thought, from wherever a part of it ends; "8!" behind a thought closed early."""
    said = prompt.removeprefix(PROMPT)
    if WHOLE.startswith(said):
        return WHOLE[len(said) :]
    assert said == "3+4=8.\nSo the answer is 8.\n</think>", said
    return "8!"


def ask(script=says, params=None, **settings):
    worker = ScriptedWorker(script)
    controller = methods.create("first_answer", **settings)
    return answer(controller, worker, PROMPT, sampling_params=params), worker


def test_the_thought_ends_with_the_line_that_states_the_first_answer():
    result, worker = ask()
    assert result.output.text == "3+4=8.\nSo the answer is 8.\n</think>8!"
    assert result.output.token_ids == [*map(ord, result.output.text)]
    told = result.output.meta["first_answer"]
    assert told == {"marker": "answer is", "chain_tokens": len("3+4=8.\nSo the answer is 8.\n")}
    assert result.usage.completion_tokens == told["chain_tokens"] + len("8!")
    assert [call.ended for call in worker.calls] == ["cancelled", "done"]
    stages = [event.output for event in result.events(stages=True)]
    [stage] = [each for each in stages if isinstance(each, Stage) and each.name == "early_exit"]
    assert stage.fields == {"marker": "answer is", "at": told["chain_tokens"]}


def test_a_thought_that_states_no_answer_comes_to_its_own_end():
    result, worker = ask(markers=("finally",))
    assert result.output.text == WHOLE
    assert result.output.meta["first_answer"]["marker"] is None
    assert len(worker.calls) == 1


def test_behind_a_thought_that_the_prompt_closes_the_answer_is_left_alone():
    said = "The answer is 7.\nIt is so because 3+4.\n"
    worker = ScriptedWorker(lambda prompt, index: said)
    controller = methods.create("first_answer")
    result = answer(controller, worker, "3+4?<think>\n\n</think>\n\n")
    assert result.output.text == said
    assert result.output.meta["first_answer"] == {"marker": None, "chain_tokens": 0}
    assert len(worker.calls) == 1


@pytest.mark.parametrize("markers", [("is:", "answer is"), ("zz", "is"), ("is", "answer is")])
def test_a_marker_is_found_however_the_text_comes(markers):
    """Token by token, where the marker and the end of its line are split over steps."""
    result, _ = ask(markers=markers)
    assert result.output.text == "3+4=8.\nSo the answer is 8.\n</think>8!"
    assert result.output.meta["first_answer"]["marker"] == markers[1]


@pytest.mark.parametrize("whole", ["so \\boxed{7}</think>7\n", "so</think>The answer is 7.\n"])
def test_an_answer_without_the_end_of_its_line_in_the_thought_ends_nothing(whole):
    result, worker = ask(lambda prompt, index: whole)
    assert result.output.text == whole
    assert result.output.meta["first_answer"]["marker"] is None
    assert len(worker.calls) == 1


@pytest.mark.parametrize(
    ("max_tokens", "text"),
    [
        (5, "3+4=8"),
        (26, "3+4=8.\nSo the answer is 8."),
        (27, "3+4=8.\nSo the answer is 8.\n"),
        (28, "3+4=8.\nSo the answer is 8.\n</think>8"),
    ],
)
def test_max_tokens_is_that_of_the_whole_output(max_tokens, text):
    result, _ = ask(params={"max_tokens": max_tokens})
    assert (result.output.text, result.output.finish_reason) == (text, "length")
    assert result.usage.completion_tokens == min(max_tokens, result.usage.completion_tokens)


def test_a_users_own_stop_string_ends_the_output():
    result, _ = ask(params={"stop": ["4="]})
    assert (result.output.text, result.output.stop_reason) == ("3+", "4=")


def test_what_is_streamed_is_the_output():
    worker = ScriptedWorker(says)
    controller = methods.create("first_answer", streaming=True)
    with ScaffoldingLlm(controller, dict.fromkeys(methods.worker_tags(controller), worker)) as llm:
        result = llm.generate_async(PROMPT)
        seen = [each.cur_output.text for each in result]
    assert seen[-1] == "3+4=8.\nSo the answer is 8.\n</think>8!"


def test_votes_are_put_around_it():
    controller = stack("first_answer+majority_vote@2", answer_space="text")
    result = answer(controller, ScriptedWorker(says), PROMPT)
    assert result.output.text.endswith("8!")


def test_what_it_cannot_honour_is_refused():
    with pytest.raises(ParameterError, match="cannot honour thinking_budget"):
        ask(params={"thinking_budget": 3})
    for settings in ({"markers": ()}, {"markers": "answer"}, {"line_end": ""}):
        with pytest.raises(ParameterError):
            methods.create("first_answer", **settings)


def test_on_the_engine_each_part_continues_the_sequence_before_it():
    question = "Sam has 110 nuts. He uses 84. He uses 12. How many nuts does Sam have now?"
    llm = LLM(dtype="float32", kv_cache_config={"max_tokens": 4096, "page_size": 4})
    with EngineWorker(llm) as worker:
        controller = methods.create("first_answer")
        workers = dict.fromkeys(methods.worker_tags(controller), worker)
        prompt = worker.llm.chat_prompt([{"role": "user", "content": question}])
        with ScaffoldingLlm(controller, workers) as scaffolding:
            result = scaffolding.generate(prompt, sampling_params={"temperature": 0.0})
        assert result.output.meta["first_answer"]["marker"] == "answer is"
        assert result.output.text.count("answer is") == 2
        assert worker.llm.stats.prefilled <= len(prompt) + 4, "the marker, and a token before it"
        expect_empty(llm._frontend.engine)
