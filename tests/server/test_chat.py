"""Chats over HTTP, through OpenAI's own client and by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from forethought.llm.tool_messages import as_text
from forethought.server.settings import Settings
from forethought.workers.scripted import Reply
from http_servers import WAIT, Served, scripted

THOUGHT = "<think>\nfirst this\n</think>\n\nthe answer"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def answers(prompt: str, index: int) -> str | Reply:
    table = {
        "think": THOUGHT,
        "call": "Let me see. " + as_text("add", {"a": 1}),
        "two calls": as_text("add", {"a": 1}) + as_text("add", {"a": 2}),
        "json": '{"name": "Ann", "age": 7}',
        "fail": Reply("never", error=RuntimeError("a secret of the server")),
        "votes": r"so \boxed{7}" if index % 3 else r"so \boxed{8}",
        "<tag>": "a <b> c",
    }
    return table.get(prompt, f"you said {prompt}")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with scripted(answers) as running:
        yield running


def say(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": [{"role": "user", "content": text}], **fields}


def test_a_chat_is_answered_with_thought_and_content_apart(server: Served) -> None:
    answer = server.client.chat.completions.create(**say("think"))
    message = answer.choices[0].message
    assert message.content == "the answer"
    assert message.model_extra == {"reasoning": "first this", "reasoning_content": "first this"}
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("think")
    assert answer.usage.completion_tokens == len(THOUGHT)
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.reasoning_tokens == len("first this")


def test_a_stream_begins_with_the_role_and_ends_with_the_usage(server: Served) -> None:
    chunks = list(
        server.client.chat.completions.create(
            **say("think"), stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(THOUGHT)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert "".join(delta.content or "" for delta in deltas) == "the answer"
    thoughts = [(delta.model_extra or {}).get("reasoning", "") for delta in deltas]
    assert "".join(thoughts) == "first this"
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_many_streams_at_once_each_get_their_own_answer(server: Served) -> None:
    async def ask(client: AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(**say(f"number {number}"), stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=server.url, api_key="key", timeout=WAIT) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(64)))

    assert asyncio.run(ask_all()) == [f"you said number {number}" for number in range(64)]


def test_n_answers_are_n_choices(server: Served) -> None:
    answer = server.client.chat.completions.create(**say("hello", n=3))
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {"you said hello"}


def test_a_stream_of_n_answers_says_which_each_piece_belongs_to(server: Served) -> None:
    texts = {0: "", 1: ""}
    for chunk in server.client.chat.completions.create(**say("hello", n=2), stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: "you said hello", 1: "you said hello"}


def test_a_limit_of_tokens_ends_an_answer_with_length(server: Served) -> None:
    answer = server.client.chat.completions.create(**say("hello", max_completion_tokens=3))
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("you", "length")


def test_a_stop_string_ends_an_answer(server: Served) -> None:
    answer = server.client.chat.completions.create(**say("hello", stop=" said"))
    assert answer.choices[0].message.content == "you"


# ---- tools --------------------------------------------------------------------------------------


def test_tool_calls_are_parsed_and_their_results_go_back(server: Served) -> None:
    client = server.client
    first = client.chat.completions.create(**say("call", tools=[ADD]))
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.content == "Let me see."
    assert message.tool_calls is not None
    call = message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
    sent: list[Any] = [{"role": "user", "content": "call"}, message.model_dump(), result]
    second = client.chat.completions.create(model="scripted", messages=sent, tools=[ADD])
    assert second.choices[0].message.content == "you said 2"


def test_a_streamed_call_is_no_content(server: Served) -> None:
    deltas = [
        chunk.choices[0].delta
        for chunk in server.client.chat.completions.create(**say("call", tools=[ADD]), stream=True)
    ]
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 0]
    assert calls[0].function is not None
    assert calls[0].function.name == "add"
    arguments = "".join(call.function.arguments or "" for call in calls if call.function)
    assert json.loads(arguments) == {"a": 1}


def test_parallel_calls_are_left_out_on_request(server: Served) -> None:
    for several, count in ((True, 2), (False, 1)):
        answer = server.client.chat.completions.create(
            **say("two calls", tools=[ADD], parallel_tool_calls=several)
        )
        assert len(answer.choices[0].message.tool_calls or []) == count


def test_without_tools_the_text_of_a_call_is_content(server: Served) -> None:
    answer = server.client.chat.completions.create(**say("call"))
    assert "<tool_call>" in (answer.choices[0].message.content or "")


def test_tools_pass_through_a_method(server: Served) -> None:
    answer = server.client.chat.completions.create(
        **{**say("call", tools=[ADD]), "model": "majority_vote@3-scripted"}
    )
    assert answer.choices[0].finish_reason == "tool_calls"


class Person(BaseModel):
    name: str
    age: int


def test_parse_returns_an_object(server: Served) -> None:
    answer = server.client.chat.completions.parse(**say("json", response_format=Person))
    assert answer.choices[0].message.parsed == Person(name="Ann", age=7)


# ---- methods ------------------------------------------------------------------------------------


def test_a_method_in_front_of_the_models_name_is_used(server: Served) -> None:
    answer = server.client.chat.completions.create(
        **{**say("votes"), "model": "majority_vote@3-scripted"}
    )
    assert answer.choices[0].message.content == r"so \boxed{7}"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3 * len("votes")
    assert answer.model == "majority_vote@3-scripted"


def test_a_method_in_the_body_takes_settings(server: Served) -> None:
    extra = {"method": "majority_vote", "method_params": {"default_sample_num": 3}}
    answer = server.client.chat.completions.create(**say("votes"), extra_body=extra)
    assert answer.choices[0].message.content == r"so \boxed{7}"


def test_methods_side_by_side_give_a_choice_each(server: Served) -> None:
    body = {**say("hello"), "model": "plain|majority_vote@2-scripted"}
    answer = server.client.chat.completions.create(**body)
    assert [choice.message.content for choice in answer.choices] == ["you said hello"] * 2
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3 * len("hello")


def test_of_methods_one_after_the_other_the_next_is_asked_the_answer(server: Served) -> None:
    body = {**say("think"), "model": "plain&plain-scripted"}
    answer = server.client.chat.completions.create(**body)
    assert answer.choices[0].message.content == "you said the answer"
    streamed = server.client.chat.completions.create(**body, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert text == "you said the answer"


def test_events_tell_what_a_method_does(server: Served) -> None:
    body = say("votes", method="majority_vote@3", events=True, stream=True)
    events = server.send("/v1/chat/completions", body).events
    told = [data for name, data in events if name == "forethought"]
    assert told[0]["type"] == "started"
    assert told[0]["method"] == "majority_vote@3"
    assert told[-1]["type"] == "finished"
    assert told[-1]["text"] == r"so \boxed{7}"
    assert told[-1]["usage"]["prompt_tokens"] == 3 * len("votes")
    stages = [(each["branch"], each["name"]) for each in told if each["type"] == "stage"]
    assert {(str(branch), "spawned") for branch in range(3)} <= set(stages)
    for branch in ("0", "1", "2"):
        pieces = [e for e in told if e["type"] == "delta" and e["branch"] == branch]
        assert "".join(each["text"] for each in pieces).startswith("so")
        assert sum(each["num_tokens"] for each in pieces) == sum(len(e["text"]) for e in pieces)
    assert events[-1] == ("message", "[DONE]")
    assert [each["at"] for each in told] == sorted(each["at"] for each in told)


def test_without_being_asked_for_no_events_come(server: Served) -> None:
    events = server.send("/v1/chat/completions", say("hello", stream=True)).events
    assert {name for name, _ in events} == {"message"}


def test_a_budget_limits_all_that_a_method_does(server: Served) -> None:
    body = say("votes", method="majority_vote@3", budget={"calls": 2})
    answer = server.send("/v1/chat/completions", body)
    assert (answer.status, answer.json["usage"]["spent_budget"]) == (200, "calls")
    assert answer.json["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("method", "num_thoughts"),
    [
        ("majority_vote@4", 4),
        ("dynasor+majority_vote@4", 4),
        ("plain|plain", 2),
        ("self_refine", 3),
    ],
)
def test_the_reasoning_tokens_are_those_of_all_that_was_run(method: str, num_thoughts: int) -> None:
    params = {"num_refinements": 1} if method == "self_refine" else None
    with scripted(lambda prompt, index: THOUGHT) as server:
        body = say("think", method=method, method_params=params)
        usage = server.send("/v1/chat/completions", body).json["usage"]
        response = server.send("/v1/responses", {"input": "think", "method": "majority_vote@4"})
    details = usage["completion_tokens_details"]
    assert details["reasoning_tokens"] == num_thoughts * len("first this")
    assert usage["completion_tokens"] == num_thoughts * len(THOUGHT)
    told = response.json["usage"]["output_tokens_details"]
    assert (told["reasoning_tokens"], told["discarded_tokens"]) == (4 * len("first this"), 0)


@pytest.mark.parametrize("tokens", [5, 30, 60, 70, 100])
@pytest.mark.parametrize("method", ["dynasor", "majority_vote@4", "self_refine", "budget_forcing"])
def test_a_budget_of_tokens_is_kept_exactly_and_leaves_an_answer(method: str, tokens: int) -> None:
    with scripted(lambda prompt, index: Reply("so " * 200)) as server:
        fields = {"method": method, "budget": {"tokens": tokens}}
        whole = server.send("/v1/chat/completions", say("think", **fields)).json
        stream = {"stream": True, "stream_options": {"include_usage": True}, "events": True}
        events = server.send("/v1/chat/completions", say("think", **fields, **stream)).events
    streamed = [data for name, data in events if name == "message" and data != "[DONE]"]
    for usage in (whole["usage"], streamed[-1]["usage"]):
        assert (usage["completion_tokens"], usage["spent_budget"]) == (tokens, "tokens")
    [choice] = whole["choices"]
    assert choice["finish_reason"] == streamed[-2]["choices"][0]["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("so")
    finished = [data for name, data in events if name == "forethought"][-1]
    assert finished["usage"]["spent_budget"] == "tokens"


def test_the_events_of_a_search_say_which_beam_a_text_belongs_to() -> None:
    settings = {"default_sample_num": 1, "num_thoughts": 2, "num_evaluations": 1, "max_steps": 1}
    fields = {"method": "tree_of_thoughts", "method_params": settings}
    with scripted(lambda prompt, index: f"sure {index}" if prompt == "?" else "sure") as server:
        stream = {"stream": True, "events": True}
        events = server.send("/v1/chat/completions", say("?", **fields, **stream)).events
    texts: dict[str, str] = {}
    for data in (data for name, data in events if name == "forethought"):
        if data["type"] == "delta":
            key = json.dumps(data["fields"])
            texts[key] = texts.get(key, "") + data["text"]
    assert texts['{"beam": [0]}'].startswith("sure")
    assert texts['{"beam": [0], "aside": "judgement 0"}'] == "sure"


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"n": 3, "budget": {"tokens": 1}}, ["y", "", ""]),
        ({"n": 2, "budget": {"calls": 1}}, ["you said so", ""]),
        ({"method": "plain|plain", "budget": {"calls": 1}}, ["you said so", ""]),
        ({"method": "plain&plain", "budget": {"calls": 1}}, ["you said so"]),
        ({"method": "plain&plain", "budget": {"tokens": 3}}, ["you"]),
    ],
)
def test_what_has_a_text_as_the_budget_ends_is_answered_without_the_rest(
    server: Served, fields: dict[str, Any], texts: list[str]
) -> None:
    answer = server.send("/v1/chat/completions", say("so", **fields))
    assert answer.status == 200, answer.text
    choices = answer.json["choices"]
    assert [choice["message"]["content"] for choice in choices] == texts
    for choice in choices:
        is_whole = choice["message"]["content"] == "you said so"
        assert choice["finish_reason"] == ("stop" if is_whole else "length")
    events = server.send("/v1/chat/completions", say("so", **fields, stream=True)).events
    chunks = [data["choices"][0] for _, data in events if data != "[DONE]"]
    streamed = [""] * len(texts)
    for chunk in chunks:
        streamed[chunk["index"]] += chunk["delta"].get("content") or ""
    assert streamed == texts


def deep(levels: int) -> dict[str, Any]:
    """JSON of so many levels."""
    found: dict[str, Any] = {}
    for _ in range(levels - 1):
        found = {"a": found}
    return found


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"nonsense": 0}, "nonsense"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"store": True}, "store"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"budget": {"tokens": -1}}, "budget.tokens"),
        ({"stream_options": {"nonsense": 1}}, "stream_options.nonsense"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"stop": ["s"] * 33}, "stop"),
        ({"stop": ["s" * 1025]}, "stop.0"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"logit_bias": {str(token): 1.0 for token in range(1025)}}, "logit_bias"),
        ({"tools": [ADD] * 129}, "tools"),
        ({"metadata": {str(number): "x" for number in range(65)}}, "metadata"),
        ({"method": "majority_vote", "method_params": deep(65)}, "method_params"),
        ({"structured_outputs": {"json": deep(65)}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(deep(65))}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a" * 20_000}}, "structured_outputs.regex"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"n": 1000}, "n"),
        ({"top_p": 2.0}, "top_p"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning_budget": -5}, "reasoning_budget"),
        ({"thinking_budget": 3, "reasoning_effort": "low"}, "reasoning_effort"),
        ({"cache_salt": "x"}, "cache_salt"),
        ({"method_params": {"nonsense": 1}}, "method_params.nonsense"),
        ({"method": "majority_vote", "method_params": {"nonsense": 1}}, "method_params.nonsense"),
        (
            {"method": "majority_vote", "method_params": {"default_sample_num": 0}},
            "method_params.default_sample_num",
        ),
        ({"method": "repeated_sampling"}, "method_params.verifier"),
        ({"method": "best_of_n"}, "method"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_a_field_that_cannot_be_honoured_is_named(
    server: Served, change: dict[str, Any], param: str
) -> None:
    answer = server.send("/v1/chat/completions", {**say("hello"), **change})
    assert answer.status == 400
    assert answer.error["param"] == param
    assert param.rpartition(".")[2].removeprefix("max_completion_") in answer.error["message"]


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": -1.0},
        {"temperature": 1e9},
        {"max_tokens": 0},
        {"max_tokens": 3, "max_completion_tokens": 4},
        {"top_logprobs": 3},
        {"logit_bias": {"x": 1.0}},
        {"logit_bias": {"-1": 1.0}},
        {"logit_bias": {"5": -100.0, "05": 100.0}},  # one token twice
        {"logit_bias": {" 5": 1.0}},
        {"logit_bias": {"\u0665": 1.0}},  # a digit that is not ASCII
        {"tool_choice": "required"},
        {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "nobody"}}},
        {"tools": [ADD, ADD]},
        {"thinking_budget": 3, "reasoning_effort": "low"},
        {"thinking_budget": 3, "reasoning_budget": 4},
        {"method": "nonsense"},
        {"method": "os:system"},
        {"method": "majority_vote@0"},
        {"method": "majority_vote@100000"},
        {"method": "+".join(["majority_vote"] * 40)},
        {"method": "plain|plain", "method_params": {"x": 1}},
        {"method": "majority_vote", "method_params": {"nonsense": 1}},
        {"method": "majority_vote", "method_params": {"default_sample_num": 10**9}},
        {"method": "majority_vote", "method_params": {"generation_controller": "os:system"}},
        {"method": "dynasor", "method_params": {"generation_dir": "/tmp"}},
        {"method": "compute_optimal", "method_params": {"policy": "/etc/passwd"}},
        {"method": "best_of_n"},
        {"n": 100_000},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
    ],
)
def test_what_cannot_be_is_refused_before_it_runs(server: Served, change: dict[str, Any]) -> None:
    asked = server.backend.worker.calls.maxlen and len(server.backend.worker.calls)
    answer = server.send("/v1/chat/completions", {**say("hello"), **change})
    assert answer.status == 400, answer.text
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["message"]
    assert len(server.backend.worker.calls) == asked


@pytest.mark.parametrize("body", [b"[1]", b'"x"', b"3", b"null"])
def test_a_body_that_is_no_object_is_refused(server: Served, body: bytes) -> None:
    answer = server.send("/v1/chat/completions", body)
    assert (answer.status, answer.error["message"]) == (400, "the body is no JSON object")
    assert (answer.error["param"], answer.error["code"]) == (None, "invalid_json")


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]})],
)
def test_tokens_of_an_unknown_model_are_not_found(
    server: Served, path: str, body: dict[str, Any]
) -> None:
    assert server.send(path, {**body, "model": "dynasor-scripted"}).status == 200
    answer = server.send(path, {**body, "model": "nope"})
    assert (answer.status, answer.error["param"]) == (404, "model")


def test_an_unknown_model_is_not_found(server: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt"):
        server.client.chat.completions.create(**{**say("hello"), "model": "gpt"})


def test_fields_without_effect_are_taken(server: Served) -> None:
    fields = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    assert server.client.chat.completions.create(**say("hello", **fields)).choices


def test_an_error_in_the_middle_says_nothing_of_the_server(server: Served) -> None:
    answer = server.send("/v1/chat/completions", say("fail"))
    assert answer.status == 500
    assert "secret" not in answer.text


def test_a_stream_that_fails_before_its_first_token_has_a_status(server: Served) -> None:
    with pytest.raises(openai.InternalServerError):
        list(server.client.chat.completions.create(**say("fail"), stream=True))


def test_markup_in_an_answer_comes_as_it_is(server: Served) -> None:
    answer = server.send("/v1/chat/completions", say("<tag>"))
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.json["choices"][0]["message"]["content"] == "a <b> c"


def test_methods_are_listed_as_models_where_the_server_is_told_to() -> None:
    with scripted(answers, Settings(lists_methods=True)) as running:
        names = [model.id for model in running.client.models.list()]
        assert names[0] == "scripted"
        assert "majority_vote-scripted" in names
        for name in ("majority_vote-scripted", "dynasor-scripted"):
            answer = running.client.chat.completions.create(**{**say("votes"), "model": name})
            assert answer.choices[0].message.content


@pytest.mark.parametrize("num_choices", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_method_refuses_is_refused_with_a_status_however_many_choices_there_are(
    server: Served, stream: bool, num_choices: int
) -> None:
    fields = {"method": "first_answer", "thinking_budget": 0, "n": num_choices}
    answer = server.send("/v1/chat/completions", say("hello", **fields, stream=stream))
    assert answer.status == 400, answer.text
    assert "thinking_budget" in answer.json["error"]["message"]
