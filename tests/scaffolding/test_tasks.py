"""Tasks carry input down and results up; copies, forks and chats of them."""

import pytest

from forethought.errors import ParameterError
from forethought.outputs import Logprob
from forethought.params import SamplingParams
from forethought.scaffolding import (
    AssistantMessage,
    ChatTask,
    GenerationTask,
    OpenAIToolDescription,
    StreamGenerationTask,
    SystemMessage,
    Task,
    TaskStatus,
    ToolMessage,
    UserMessage,
    sampling,
)


def finished(**fields):
    task = GenerationTask(input_str="prompt ", **fields)
    task.output_str, task.output_tokens, task.finish_reason = "one two", [1, 2], "stop"
    task.logprobs = [{1: Logprob(-1.0)}, {2: Logprob(-2.0)}]
    task.customized_result_fields["note"] = 1
    return task


def test_result_is_none_before_a_task_has_run():
    assert GenerationTask(input_str="p").result is None


def test_assigning_the_result_of_another_task_takes_all_of_it_over():
    task = GenerationTask(input_str="p")
    task.result = finished().result
    assert (task.output_str, task.output_tokens) == ("one two", [1, 2])
    assert (task.finish_reason, task.logprobs) == ("stop", finished().logprobs)
    assert task.customized_result_fields == {"note": 1}
    task.output_str = "other"
    assert task.create_scaffolding_output().text == "other"
    assert task.result.outputs[0].token_ids == [1, 2]


def test_a_copy_is_the_same_request_with_blank_results():
    task = finished(temperature=0.5, stop=["x"])
    task.mark = {"a": [1]}
    task.status = TaskStatus.SUCCESS
    copy = task.copy()
    assert (copy.input_str, copy.temperature, copy.stop) == ("prompt ", 0.5, ["x"])
    assert copy.stop is not task.stop
    assert copy.mark is not task.mark
    assert copy.mark["a"] is task.mark["a"]
    assert (copy.result, copy.logprobs, copy.customized_result_fields) == (None, None, {})
    assert copy.status is None
    assert task.output_str == "one two"


def test_a_stream_of_a_task_is_the_same_request():
    stream = StreamGenerationTask.create_from_generation_task(finished(top_p=0.9), 20)
    assert (stream.input_str, stream.top_p, stream.streaming_step) == ("prompt ", 0.9, 20)
    assert (stream.output_str, stream.end_flag, stream.under_way) == (None, False, False)


def test_a_fork_says_in_text_and_by_handle_where_it_goes_on():
    task = finished(worker_tag="w")
    task.request_handle = handle = object()
    child = task.fork("? ", max_tokens=3)
    assert child.input_str == "prompt one two? "
    assert (child.worker_tag, child.max_tokens) == ("w", 3)
    point = child.fork_point
    assert (point.handle, point.kept, point.suffix) == (handle, 2, "? ")
    assert point.input_str == child.input_str
    assert type(task.fork(kind=StreamGenerationTask)) is StreamGenerationTask


def test_a_fork_of_what_has_not_come_back_yet_begins_at_its_prompt():
    """Its worker may have come far by then: as the text has nothing of that, nor has the fork."""
    task = GenerationTask(input_str="prompt ")
    task.request_handle = object()
    assert (task.fork("? ").input_str, task.fork("? ").fork_point.kept) == ("prompt ? ", 0)
    task.output_str = "text of a server"
    assert task.fork("? ").fork_point.kept is None


def test_a_fork_with_an_unknown_field_is_refused():
    with pytest.raises(ParameterError, match="max_token"):
        finished().fork("", max_token=3)


def test_prompts_are_text_or_ids():
    assert GenerationTask.create_from_prompt("p").input_str == "p"
    assert GenerationTask.create_from_prompt([1, 2]).input_tokens == [1, 2]
    with pytest.raises(NotImplementedError):
        Task.create_from_prompt("p")


def test_the_misspelled_status_is_the_correctly_spelled_one():
    assert TaskStatus.WORKER_EXECEPTION is TaskStatus.WORKER_EXCEPTION


def test_tasks_are_told_apart_by_identity():
    assert GenerationTask() != GenerationTask()
    assert len({GenerationTask(), GenerationTask()}) == 2


# ---- chats -------------------------------------------------------------------------------------


def test_a_message_without_content_is_kept_as_it_calls_tools():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = ChatTask.create_from_prompt("hi", [SystemMessage("be kind")])
    chat.add_messages([AssistantMessage(None, tool_calls=[call]), ToolMessage("3", "1")])
    assert chat.messages_to_dict_content() == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    assert chat.messages_to_dict_content(3)[0]["role"] == "tool"
    assert chat.last_assistant_content() is None


def test_a_copied_chat_goes_on_by_itself():
    chat = ChatTask.create_from_messages([UserMessage("hi")])
    copy = chat.copy()
    copy.add_message(AssistantMessage("hello"))
    assert len(chat.messages) == 1
    assert copy.last_assistant_content() == "hello"


def test_a_tool_description_is_openais_schema():
    tool = OpenAIToolDescription("add", "adds", {"a": {"type": "integer"}}).to_dict()
    assert tool["function"]["parameters"]["properties"] == {"a": {"type": "integer"}}


# ---- sampling fields ---------------------------------------------------------------------------


def test_a_default_that_was_chosen_is_not_filled_in():
    task = GenerationTask(input_str="p")
    sampling.choose(task, {"n": 1, "temperature": None})
    sampling.fill(task, {"n": 4, "temperature": 0.5, "top_p": 0.9})
    assert (task.n, task.temperature, task.top_p) == (1, 0.5, 0.9)


def test_the_table_of_sampling_fields_is_complete():
    fields = set(vars(GenerationTask()))
    assert set(sampling.FIELDS) <= fields
    engine = SamplingParams.names() - {"logprobs", "prompt_logprobs", "priority", "cache_salt"}
    assert engine <= set(sampling.FIELDS)


@pytest.mark.parametrize("name", sampling.FIELDS)
def test_every_field_is_filled_where_the_task_leaves_it_and_kept_where_it_does_not(name):
    def value(seed):
        default = sampling.DEFAULTS[name]
        if name == "stop":
            return [f"x{seed}"]
        if isinstance(default, bool):
            return not default
        return {"logit_bias": {seed: 1.0}}.get(name, seed + 2)

    task = GenerationTask()
    sampling.fill(task, {name: value(1)})
    assert getattr(task, name) == value(1)
    sampling.fill(task, {name: value(5)})
    assert getattr(task, name) == value(1)


def test_sampling_fields_become_the_engines_parameters():
    task = GenerationTask(
        max_tokens=5,
        temperature=0.3,
        top_k=4,
        stop="\n",
        seed=7,
        min_tokens=2,
        num_logprobs=3,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        repetition_penalty=1.5,
        logit_bias={3: -1.0},
        stop_token_ids=[9],
        ignore_eos=True,
        n=2,
        min_p=0.1,
        top_p=0.9,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )
    assert sampling.to_params(task, priority=3) == SamplingParams(
        max_tokens=5,
        temperature=0.3,
        top_k=4,
        stop=("\n",),
        seed=7,
        min_tokens=2,
        logprobs=3,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        repetition_penalty=1.5,
        logit_bias={3: -1.0},
        stop_token_ids=(9,),
        ignore_eos=True,
        n=2,
        min_p=0.1,
        top_p=0.9,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        priority=3,
    )
    assert sampling.to_params(GenerationTask()) == SamplingParams()


def test_the_callers_dictionary_is_not_changed():
    params = {"logprobs": 2, "temperature": 0.5}
    assert sampling.checked("x", params) == {"num_logprobs": 2, "temperature": 0.5}
    assert params == {"logprobs": 2, "temperature": 0.5}


def test_a_chat_has_no_steps_to_go_on_with():
    """Else one that was cut short would be taken for a stream, and its next turn for a step."""
    chat = ChatTask.create_from_prompt("hi")
    chat.request_handle = object()
    assert not chat.under_way
