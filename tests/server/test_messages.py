"""Anthropic's own client talks to the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from forethought.llm.tool_messages import as_text
from forethought.server.protocol.chat_request import message_dicts
from forethought.server.protocol.messages_request import MessagesRequest, chat_of
from forethought.server.settings import Settings
from forethought.workers.scripted import Reply
from http_servers import WAIT, Served, scripted

THOUGHT = "<think>\nfirst this\n</think>\n\nthe answer"
ADD: Any = {
    "name": "add",
    "description": "adds",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
NUM_CALLS = 10


def answers(prompt: str, index: int) -> str | Reply:
    table = {
        "think": THOUGHT,
        "call": "Let me see. " + as_text("add", {"a": 1}),
        "two calls": as_text("add", {"a": 1}) + as_text("add", {"a": 2}),
        "votes": r"so \boxed{7}" if index % 3 else r"so \boxed{8}",
        "stop": "one. two. three.",
        "fail": Reply("never", error=RuntimeError("a secret of the server")),
    }
    if prompt == "count up" or prompt.startswith("up to "):
        number = int(prompt.rpartition(" ")[2]) if prompt[-1].isdigit() else 0
        return "all done" if number == NUM_CALLS else as_text("add", {"a": number})
    return table.get(prompt, f"you said {prompt}")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with scripted(answers) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[Anthropic]:
    url = f"http://127.0.0.1:{server.port}"
    with Anthropic(base_url=url, api_key="key", max_retries=0, timeout=WAIT) as opened:
        yield opened


def say(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "scripted", "max_tokens": 200, "messages": messages, **fields}


def test_a_message_has_its_thought_and_its_text_in_blocks(client: Anthropic) -> None:
    message = client.messages.create(**say("think"))
    assert [block.type for block in message.content] == ["thinking", "text"]
    thought, text = message.content
    assert (thought.thinking, text.text) == ("first this", "the answer")  # type: ignore[union-attr]
    assert (message.role, message.type, message.stop_reason) == ("assistant", "message", "end_turn")
    assert message.usage.input_tokens == len("think")
    assert message.usage.output_tokens == len(THOUGHT)


@pytest.mark.parametrize("text", ["think", "call", "two calls", "hello"])
def test_a_stream_adds_up_to_the_message(client: Anthropic, text: str) -> None:
    fields = say(text, tools=[ADD], extra_body={"temperature": 0.0})
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()

    def without_ids(message: Any) -> list[dict[str, Any]]:
        blocks = [block.model_dump(exclude={"id"}) for block in message.content]
        return [{k: v for k, v in block.items() if v is not None} for block in blocks]

    assert without_ids(streamed) == without_ids(whole)
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_events_have_the_order_that_clients_expect(server: Served) -> None:
    events = server.send("/v1/messages", say("call", tools=[ADD], stream=True)).events
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "ping"]
    assert names[-2:] == ["message_delta", "message_stop"]
    assert all(name == data["type"] for name, data in events)
    blocks = [data for name, data in events if name == "content_block_start"]
    assert [(block["index"], block["content_block"]["type"]) for block in blocks] == [
        (0, "text"),
        (1, "tool_use"),
    ]
    open_block = None
    for name, data in events:
        if name == "content_block_start":
            assert open_block is None
            open_block = data["index"]
        elif name.startswith("content_block"):
            assert data["index"] == open_block
            open_block = None if name == "content_block_stop" else open_block
    arguments = [d["delta"].get("partial_json", "") for n, d in events if n.endswith("block_delta")]
    assert json.loads("".join(arguments)) == {"a": 1}


def test_a_call_is_answered_and_the_conversation_goes_on(client: Anthropic) -> None:
    """An agent's loop of ten calls: each answer and each result is sent back as it came."""
    messages: list[Any] = [{"role": "user", "content": "count up"}]
    for number in range(NUM_CALLS + 1):
        answer = client.messages.create(
            model="scripted", max_tokens=200, messages=messages, tools=[ADD]
        )
        if answer.stop_reason != "tool_use":
            break
        (call,) = (block for block in answer.content if block.type == "tool_use")
        assert (call.name, call.input) == ("add", {"a": number})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": f"up to {number + 1}"}
        messages += [
            {"role": "assistant", "content": [block.model_dump() for block in answer.content]},
            {"role": "user", "content": [result]},
        ]
    assert number == NUM_CALLS
    (text,) = answer.content
    assert text.type == "text"
    assert text.text == "all done"


def test_a_forced_call_is_one_of_the_tool(client: Anthropic) -> None:
    choice: Any = {"type": "tool", "name": "add", "disable_parallel_tool_use": True}
    message = client.messages.create(**say("two calls", tools=[ADD], tool_choice=choice))
    assert [block.type for block in message.content] == ["tool_use"]
    assert message.stop_reason == "tool_use"


def test_a_method_answers_by_the_name_of_the_model(client: Anthropic) -> None:
    message = client.messages.create(**say("votes") | {"model": "majority_vote@3-scripted"})
    (text,) = message.content
    assert text.type == "text"
    assert text.text == r"so \boxed{7}"


def test_limits_and_stop_sequences_say_why_an_answer_ends(client: Anthropic) -> None:
    cut = client.messages.create(**say("stop") | {"max_tokens": 3})
    assert cut.stop_reason == "max_tokens"
    stopped = client.messages.create(**say("stop", stop_sequences=[" three"]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " three")


def test_parts_of_a_conversation_reach_the_model(client: Anthropic) -> None:
    system: Any = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    blocks = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages: Any = [{"role": "user", "content": blocks}]
    count = client.messages.count_tokens(model="scripted", system=system, messages=messages)
    message = client.messages.create(
        model="scripted", max_tokens=200, system=system, messages=messages
    )
    assert message.usage.input_tokens == count.input_tokens
    (text,) = message.content
    assert text.type == "text"
    assert text.text == "you said one\n\ntwo"


def test_a_conversation_is_the_chat_of_its_parts() -> None:
    call = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "2", "is_error": True}
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    body = MessagesRequest.model_validate(
        {
            "max_tokens": 5,
            "system": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}],
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [thought, {"type": "text", "text": "so"}, call]},
                {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
            ],
            "thinking": {"type": "enabled", "budget_tokens": 7, "display": "omitted"},
            "output_config": {
                "effort": "max",
                "format": {"type": "json_schema", "schema": {"type": "object"}},
            },
            "method": "majority_vote@3",
        }
    )
    chat = chat_of(body)
    system, user, assistant, tool, last = message_dicts(chat.messages)
    assert system == {"role": "system", "content": "be\n\nbrief"}
    assert user == {"role": "user", "content": "hi"}
    assert assistant["reasoning_content"] == "hm"
    assert assistant["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert tool == {"role": "tool", "content": "Error: 2", "tool_call_id": "c1"}
    assert last == {"role": "user", "content": "and?"}
    assert (chat.max_tokens, chat.thinking_budget, chat.include_reasoning) == (5, 7, False)
    assert (chat.reasoning_effort, chat.method) == ("xhigh", "majority_vote@3")
    assert chat.response_format is not None
    assert chat.response_format.json_schema is not None
    assert chat.response_format.json_schema.schema_ == {"type": "object"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": "claude"}, "claude"),
        ({"container": "c"}, "container is not supported"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "base64"}}]}
                ]
            },
            "messages.0.content.0",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "none"}}, "none"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "budget_tokens"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    server: Served, changes: dict[str, Any], why: str
) -> None:
    answer = server.send("/v1/messages", say("hello") | changes)
    assert answer.status in (400, 404)
    assert answer.json["type"] == "error"
    assert why in answer.json["error"]["message"]


def test_errors_are_those_of_the_client(client: Anthropic, server: Served) -> None:
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        client.messages.create(**say("hello") | {"model": "claude"})
    with pytest.raises(anthropic.InternalServerError) as failed:
        client.messages.create(**say("fail"))
    assert "secret" not in str(failed.value)
    answer = server.send("/v1/messages", say("fail", stream=True))
    assert answer.status == 500


def test_the_key_may_be_in_the_header_of_anthropics_clients() -> None:
    with scripted(answers, Settings(api_keys=("right",))) as running:
        url = f"http://127.0.0.1:{running.port}"
        for key, is_right in (("right", True), ("wrong", False)):
            with Anthropic(base_url=url, api_key=key, max_retries=0, timeout=WAIT) as client:
                if is_right:
                    assert client.messages.create(**say("hello")).content
                else:
                    with pytest.raises(anthropic.AuthenticationError):
                        client.messages.create(**say("hello"))


@pytest.mark.parametrize("content", ["Once upon", [{"type": "text", "text": "Once upon"}]])
def test_the_answer_goes_on_after_the_last_words_of_an_assistant(content: Any) -> None:
    begun = {"role": "assistant", "content": content}
    body = say("a tale")
    body["messages"].append(begun)
    assert chat_of(MessagesRequest.model_validate(body)).prompt_end == "last"
    assert chat_of(MessagesRequest.model_validate(say("a tale"))).prompt_end == "answer"
    call = {"type": "tool_use", "id": "c", "name": "add", "input": {}}
    for whole in ("", [call], [{"type": "text", "text": "Let me see."}, call]):
        body["messages"][-1] = {"role": "assistant", "content": whole}
        assert chat_of(MessagesRequest.model_validate(body)).prompt_end == "answer"
