"""Tasks carry input down and results up; copies, forks and chats of them."""

import copy
import pickle

import pytest

from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError
from forethought.outputs import Logprob, Usage
from forethought.scaffolding import (
    AssistantMessage,
    ChatTask,
    ComputeTask,
    Controller,
    GenerationTask,
    OpenAIToolDescription,
    RewardTask,
    ScaffoldingOutput,
    ScriptedWorker,
    StreamGenerationTask,
    SystemMessage,
    Task,
    TaskStatus,
    ToolMessage,
    UserMessage,
    sampling,
)
from scripted import answer


def finished(**fields):
    task = GenerationTask(input_str="prompt ", **fields)
    task.output_str, task.output_tokens, task.finish_reason = "one two", [1, 2], "stop"
    task.logprobs = [{1: Logprob(-1.0)}, {2: Logprob(-2.0)}]
    task.customized_result_fields["note"] = 1
    return task


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda task: pickle.loads(pickle.dumps(task))}
KINDS = {
    "generation": lambda: GenerationTask(input_str="p", stop=["x"], streaming_output_flag=True),
    "stream": lambda: StreamGenerationTask(input_str="p", streaming_step=2),
    "chat": lambda: ChatTask.create_from_prompt("p"),
    "reward": lambda: RewardTask(input_str="p", output_str="a"),
    "compute": lambda: ComputeTask(max, [1, 2]),
    "failing": lambda: GenerationTask(input_str="p", on_failure="drop", temperature=-1.0),
}


class Asks(Controller):
    """Has one task executed, at first step by step."""

    def __init__(self, task):
        super().__init__()
        self.task = task

    def clone(self):
        return self

    def process(self, tasks, **kwargs):
        self.task.worker_tag = "generation"
        yield [self.task]


class Picky(ScriptedWorker):
    """Takes no negative temperature."""

    async def run_task(self, task):
        if getattr(task, "temperature", None) is not None:
            raise ParameterError("invalid temperature", "it is negative", "Give another")
        return await super().run_task(task)


def execute(task):
    answer(Asks(task), Picky(lambda prompt, index: "answer", score=lambda one, other: 0.5))


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_task_can_be_copied_in_depth_and_pickled_before_and_after_it_ran(kind, copied):
    task = KINDS[kind]()
    sibling = copied(task)
    assert type(sibling) is type(task)
    execute(sibling)
    execute(task)
    after = copied(task)
    assert told(after) == told(sibling) == told(task)
    assert getattr(after, "request_handle", None) is None
    execute(after)
    for name, value in vars(after).items():
        if isinstance(value, list | dict | set):
            assert value is not getattr(task, name), name


def told(task):
    """All that a task holds of its request and results, in writing."""
    hidden = ("usage", "request_handle", "ttft_s", "latency_s")
    return {name: str(value) for name, value in vars(task).items() if name not in hidden}


def test_a_shallow_copy_of_a_task_keeps_what_it_continues():
    task = finished()
    task.request_handle = handle = object()
    fork = task.fork("!")
    for sibling in (fork.copy(), copy.copy(fork)):
        assert sibling.fork_point.handle is handle
    assert copy.copy(task).request_handle is handle
    assert task.copy().request_handle is None


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
    task.inserted_tokens, task.num_kept_tokens = [3], 2
    task.status = TaskStatus.SUCCESS
    copy = task.copy()
    assert (copy.input_str, copy.temperature, copy.stop) == ("prompt ", 0.5, ["x"])
    assert copy.stop is not task.stop
    assert copy.mark is not task.mark
    assert copy.mark["a"] is task.mark["a"]
    assert (copy.result, copy.logprobs, copy.customized_result_fields) == (None, None, {})
    assert (copy.inserted_tokens, copy.num_kept_tokens) == (None, None)
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
    assert (point.handle, point.num_kept, point.suffix) == (handle, 2, "? ")
    assert point.input_str == child.input_str
    assert type(task.fork(kind=StreamGenerationTask)) is StreamGenerationTask


def test_a_fork_of_what_has_not_come_back_yet_begins_at_its_prompt():
    """Its worker may have come far by then: as the text has nothing of that, nor has the fork."""
    task = GenerationTask(input_str="prompt ")
    task.request_handle = object()
    assert (task.fork("? ").input_str, task.fork("? ").fork_point.num_kept) == ("prompt ? ", 0)
    task.output_str = "text of a server"
    assert task.fork("? ").fork_point.num_kept is None


def test_a_fork_with_an_unknown_field_is_refused():
    with pytest.raises(ParameterError, match="max_token"):
        finished().fork("", max_token=3)


def another_value(name, number=1):
    """A value of a sampling field that is not its default."""
    default = sampling.DEFAULTS[name]
    if name in ("stop", "dry_sequence_breakers"):
        return [f"x{number}"]
    if isinstance(default, bool):
        return not default
    return {"logit_bias": {number: 1.0}, "stop_token_ids": [number]}.get(name, number + 2)


@pytest.mark.parametrize("name", sampling.FIELDS)
def test_a_fork_inherits_every_sampling_field_unless_it_is_given_another(name):
    task = GenerationTask(input_str="p", **{name: another_value(name)})
    assert getattr(task.fork("?"), name) == another_value(name)
    assert getattr(task.fork("?", StreamGenerationTask), name) == another_value(name)
    assert getattr(task.fork("?", inherit=False), name) == sampling.DEFAULTS[name]
    if name != "suffix":  # means the text to be put behind
        fork = task.fork("?", **{name: another_value(name, 5)})
        assert getattr(fork, name) == another_value(name, 5)
        assert getattr(task.fork("?", **{name: None}), name) == sampling.DEFAULTS[name]


def test_what_a_fork_inherits_is_its_own_to_change():
    task = GenerationTask(input_str="p", stop=["x"], logit_bias={1: 2.0})
    fork = task.fork()
    fork.stop.append("y")
    fork.logit_bias[2] = 3.0
    assert (task.stop, task.logit_bias) == (["x"], {1: 2.0})


def test_what_the_request_or_a_fork_chooses_is_not_filled_by_a_controller():
    task = GenerationTask(input_str="p")
    sampling.choose(task, {"ignore_eos": False, "temperature": 0.5})
    fork = task.fork(stop=[], temperature=None)
    sampling.fill(fork, {"ignore_eos": True, "stop": ["x"], "temperature": 0.9})
    assert (fork.ignore_eos, fork.stop, fork.temperature) == (False, [], 0.9)


def test_a_fork_of_a_task_that_echoes_its_prompt_says_the_prompt_once():
    task = finished(echo=True)
    task.output_str = "prompt one two"
    assert task.fork("? ").input_str == "prompt one two? "


# ---- outputs of several parts ------------------------------------------------------------------


def part(text, ids, scores, **fields):
    if scores is not None:
        fields["logprobs"] = [{t: Logprob(v)} for t, v in zip(ids, scores, strict=True)]
        fields["cumulative_logprob"] = sum(scores)
    return ScaffoldingOutput(text, ids, **fields)


def test_joined_parts_keep_text_ids_and_logprobs():
    one = part("a", [1, 2], [-1.0, -2.0], finish_reason="stop", usage=Usage(completion_tokens=2))
    two = part("b", [4], [-4.0], finish_reason="length", usage=Usage(completion_tokens=1))
    whole = ScaffoldingOutput.join([one, ScaffoldingOutput.inserted("+", [3]), two])
    assert (whole.text, whole.token_ids) == ("a+b", [1, 2, 3, 4])
    assert whole.logprobs == [*one.logprobs, {}, *two.logprobs]
    assert (whole.cumulative_logprob, whole.finish_reason) == (-7.0, "length")
    assert whole.usage.completion_tokens == 3
    assert (one.token_ids, one.usage.completion_tokens) == ([1, 2], 2)
    assert ScaffoldingOutput.join([one, "", two]).token_ids == [1, 2, 4]


def test_stop_tokens_between_parts_are_not_in_the_joined_text():
    task = finished()  # its worker kept the first of the two tokens
    task.cumulative_logprob = -3.0
    fork = task.fork("+")
    fork.output_str, fork.output_tokens = "three", [3]
    fork.logprobs, fork.cumulative_logprob = [{3: Logprob(-4.0)}], -4.0
    fork.num_kept_tokens, fork.inserted_tokens = 1, [9]
    whole = fork.joined
    assert (whole.text, whole.token_ids) == ("one two+three", [1, 9, 3])
    assert whole.logprobs == [{1: Logprob(-1.0)}, {}, {3: Logprob(-4.0)}]
    assert whole.cumulative_logprob == -5.0
    assert (task.output_tokens, fork.fork_point.output.token_ids) == ([1, 2], [1, 2])


def test_what_several_parts_of_one_task_cost_is_counted_once():
    usage = Usage(completion_tokens=5)
    parts = [part("a", [1], None, usage=usage), part("b", [2], None, usage=usage)]
    assert ScaffoldingOutput.join(parts).usage == usage


def test_what_a_part_does_not_know_the_whole_does_not_know():
    one, two = part("a", [1], [-1.0]), part("b", [2], None)
    assert ScaffoldingOutput.join([one, two]).logprobs is None
    assert ScaffoldingOutput.join([one, two]).cumulative_logprob is None
    assert ScaffoldingOutput.join([one, "?", two]).token_ids is None
    assert ScaffoldingOutput.join([one, ScaffoldingOutput(None)]).text is None


def test_on_servers_joined_parts_keep_the_logprobs_of_what_was_generated():
    task = finished(temperature=0.5)
    task.output_tokens = None
    fork = task.fork("? ")
    fork.output_str, fork.logprobs, fork.cumulative_logprob = "three", [{3: Logprob(-3.0)}], -3.0
    assert (fork.joined.text, fork.joined.token_ids) == ("one two? three", None)
    assert [next(iter(entries)) for entries in fork.joined.logprobs] == [1, 2, 3]


def test_what_is_no_fork_any_more_is_joined_with_nothing():
    fork = finished().fork("? ")
    assert fork.joined is None
    fork.output_str, fork.input_str = "three", "another prompt"
    assert fork.joined.text == "three"
    assert finished().joined.text == "one two"


# ---- samples -----------------------------------------------------------------------------------


def seeds(tasks, later=None):
    for task in tasks:
        sampling.fill(task, {"seed": later})
    return [task.seed for task in tasks]


def test_samples_are_the_same_request_with_seeds_of_their_own():
    task = finished(seed=1, temperature=0.5)
    samples = task.samples_of(4)
    assert [(s.input_str, s.temperature, s.result) for s in samples] == [("prompt ", 0.5, None)] * 4
    assert len({1, *seeds(samples)}) == 5
    assert seeds(samples) == seeds(task.samples_of(4))
    assert seeds(task.samples_of(9))[:4] == seeds(samples)
    assert seeds(GenerationTask().samples_of(3)) == [None] * 3
    assert [type(s) for s in StreamGenerationTask().samples_of(1)] == [StreamGenerationTask]


@pytest.mark.parametrize("early", [None, 1])
def test_samples_of_samples_repeat_no_seed(early):
    """Wherever the seed comes from: the request, or a controller that fills it in at the end."""
    task = GenerationTask(input_str="p", seed=early)
    tree = [task, *task.samples_of(8)]
    for sample in tree[1:]:
        tree += sample.samples_of(8)
    drawn = seeds(tree, later=1)
    assert len(set(drawn)) == len(tree)
    late = GenerationTask(input_str="p")
    assert seeds([s.samples_of(3)[2] for s in late.samples_of(2)], later=1) == [
        s.samples_of(3)[2].seed for s in GenerationTask(seed=1).samples_of(2)
    ]


@pytest.mark.parametrize("number", [0, -1, 2.0, True, "3", None])
def test_a_number_of_samples_that_is_none_is_refused(number):
    with pytest.raises(ParameterError, match="num_samples"):
        GenerationTask().samples_of(number)


def test_prompts_are_text_or_ids():
    assert GenerationTask.create_from_prompt("p").input_str == "p"
    assert GenerationTask.create_from_prompt([1, 2]).input_tokens == [1, 2]
    with pytest.raises(NotImplementedError):
        Task.create_from_prompt("p")
    assert [GenerationTask(input_tokens=[1]).prompt, GenerationTask(input_str="p").prompt] == [
        [1],
        "p",
    ]


def test_a_text_set_beside_the_ids_of_a_prompt_is_refused():
    task = GenerationTask.create_from_prompt([1, 2])
    task.input_str = "what the controller meant to ask"
    with pytest.raises(ParameterError, match="two prompts"):
        _ = task.prompt


def test_the_question_is_that_of_the_request_or_else_the_text_that_was_asked():
    assert GenerationTask(input_str="p").question_text == "p"
    assert GenerationTask(input_tokens=[1]).question_text is None
    task = GenerationTask(input_tokens=[1], question="why?")
    stream = StreamGenerationTask.create_from_generation_task(task)
    for other in (task, task.copy(), task.fork("!"), *task.samples_of(2), stream):
        assert other.question_text == "why?"
    chat = ChatTask.create_from_prompt("first")
    chat.add_messages([AssistantMessage("no"), UserMessage("second")])
    assert chat.question_text == "second"
    assert ChatTask(question="why?").question_text == "why?"
    assert ChatTask().question_text is None


def test_the_misspelled_status_is_the_correctly_spelled_one():
    assert TaskStatus.WORKER_EXECEPTION is TaskStatus.WORKER_EXCEPTION


def test_tasks_are_equal_by_identity_only():
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
    of_requests = {"logprobs", "prompt_logprobs", "priority", "cache_salt", "adapter"}
    engine = SamplingParams.names() - of_requests
    assert engine <= set(sampling.FIELDS)


@pytest.mark.parametrize("name", sampling.FIELDS)
def test_only_unset_fields_of_a_task_are_filled(name):
    assert getattr(GenerationTask(), name) == sampling.DEFAULTS[name]
    task = GenerationTask()
    sampling.fill(task, {name: another_value(name, 1)})
    assert getattr(task, name) == another_value(name, 1)
    sampling.fill(task, {name: another_value(name, 5)})
    assert getattr(task, name) == another_value(name, 1)


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
        top_n_sigma=2.0,
        xtc_probability=0.5,
        xtc_threshold=0.2,
        dry_multiplier=0.8,
        dry_base=2.0,
        dry_allowed_length=3,
        dry_penalty_last_n=64,
        dry_sequence_breakers=["."],
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
        top_n_sigma=2.0,
        xtc_probability=0.5,
        xtc_threshold=0.2,
        dry_multiplier=0.8,
        dry_base=2.0,
        dry_allowed_length=3,
        dry_penalty_last_n=64,
        dry_sequence_breakers=(".",),
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
