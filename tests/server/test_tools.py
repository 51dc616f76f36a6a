"""Tools: what forces a call, how calls are read, also cut ones, and how they stream."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from forethought import AsyncLLM
from forethought.llm.call_grammar import closed, json_arguments
from forethought.llm.tool_messages import as_text, hermes_messages, merged_system
from forethought.server.backends.backend import raw_prompt
from forethought.server.backends.engine_backend import EngineBackend
from forethought.server.endpoints.message import Answer, AnswerStream
from forethought.server.protocol.tool_calls import Tools
from http_servers import Served, scripted, served

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
WRITE: Any = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "minLength": 60, "maxLength": 80}},
            "required": ["text"],
        },
    },
}
OTHER: Any = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Sam has 3 nuts."}]}
FORCED = {**ASK, "tools": [WRITE], "tool_choice": "required", "temperature": 1, "seed": 1}
TEXT = '{"name":"write","arguments":{"text":"a } \\" b","n":[1,{"c":null}]}}'


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    backend = EngineBackend(AsyncLLM(), "reasoner")
    with served(backend) as running:
        yield running
    backend.close()


# ---- schemas -------------------------------------------------------------------------------------

OPEN = {"type": "object", "additionalProperties": True}
SCHEMAS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "an object": ({"type": "object"}, {"type": "object", "additionalProperties": False}),
    "one that says otherwise": (OPEN, OPEN),
    "one inside": (
        {"properties": {"a": {"type": ["object", "null"]}, "b": OPEN}},
        {
            "properties": {
                "a": {"type": ["object", "null"], "additionalProperties": False},
                "b": OPEN,
            },
            "additionalProperties": False,
        },
    ),
    "of a list": (
        {"type": "array", "items": {"properties": {}}, "prefixItems": [{"type": "object"}]},
        {
            "type": "array",
            "items": {"properties": {}, "additionalProperties": False},
            "prefixItems": [{"type": "object", "additionalProperties": False}],
        },
    ),
    "of alternatives": (
        {"anyOf": [{"type": "object"}, {"type": "string"}]},
        {"anyOf": [{"type": "object", "additionalProperties": False}, {"type": "string"}]},
    ),
    "of a definition": (
        {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object"}}},
        {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", "additionalProperties": False}}},
    ),
}
COMBINED: list[dict[str, Any]] = [
    {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
    {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}, {"properties": {"c": {}}}]},
    {
        "allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": {}}}],
        "$defs": {"A": {"type": "object"}},
    },
]


@pytest.mark.parametrize("kind", SCHEMAS)
def test_objects_are_closed_where_their_schema_does_not_say_otherwise(kind: str) -> None:
    given, wanted = SCHEMAS[kind]
    assert closed(given) == wanted
    inside = {"properties": {"x": given}, "$defs": given.get("$defs", {})}
    assert closed(inside)["properties"]["x"] == wanted


@pytest.mark.parametrize("schema", COMBINED)
def test_what_is_combined_of_several_schemas_stays_satisfiable(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


LIST = {"properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]}
REFERRING: dict[str, tuple[dict[str, Any], Any]] = {
    "$defs": (
        {"properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"const": 7}}},
        {"x": 7},
    ),
    "definitions, as zod writes them": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$id": "https://tools.example/x",
            "properties": {"x": {"$ref": "#/definitions/X"}, "y": {"$ref": "#/properties/x"}},
            "definitions": {"X": {"const": 7}},
        },
        {"x": 7, "y": 7},
    ),
    "the schema itself": (LIST, {"next": {"next": None}}),
    "a property of such a name": (
        {"properties": {"const": {"$ref": "#/$defs/$ref"}}, "$defs": {"$ref": {"const": 7}}},
        {"const": 7},
    ),
    "a value that looks like one": (
        {"properties": {"x": {"const": {"$ref": "#/$defs/X"}}}},
        {"x": {"$ref": "#/$defs/X"}},
    ),
}


@pytest.mark.parametrize("kind", REFERRING)
def test_references_within_parameters_lead_to_them(kind: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    parameters, arguments = REFERRING[kind]
    schema = json.loads(json_arguments(parameters).removeprefix("%json "))
    jsonschema.validate(arguments, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**arguments, "z": 1}, schema)


def test_a_forced_call_keeps_to_a_reference(server: Served) -> None:
    parameters, arguments = REFERRING["definitions, as zod writes them"]
    closing = {**parameters, "required": ["x", "y"]}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": closing}} for name in "ab"
    ]
    answer = server.send(CHAT, {**FORCED, "tools": tools, "max_tokens": 100}).json["choices"][0]
    [call] = answer["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == arguments


def test_a_call_that_a_stop_string_cuts_is_none_to_execute(server: Served) -> None:
    body = {**FORCED, "stop": ["text"], "max_tokens": 300}
    choice = server.send(CHAT, body).json["choices"][0]
    assert choice["finish_reason"] == "stop"
    _, reason = fragments(server.send(CHAT, {**body, "stream": True}))
    assert reason == "stop"


# ---- texts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [None, "", {}])
def test_null_and_empty_arguments_are_none(arguments: Any) -> None:
    tools = Tools([OTHER])
    body = json.dumps({"name": "read", "arguments": arguments})
    for text in (f"<tool_call>{body}</tool_call>", f"[TOOL_CALLS][{body}]", body):
        _, _, [call] = tools.parse(text)
        assert (call.name, call.arguments) == ("read", "{}")


CUTS: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    "hermes": (
        'Well.<tool_call>{"name": "read", "arguments": {"a": 1',
        "Well.",
        [("read", '{"a": 1')],
    ),
    "the second": (
        '<tool_call>{"name": "read", "arguments": {}}</tool_call><tool_call>{"name": "write", '
        '"arguments": {"te',
        "",
        [("read", "{}"), ("write", '{"te')],
    ),
    "mistral": ('[TOOL_CALLS][{"name": "read", "arguments": {"a', "", [("read", '{"a')]),
    "the second of a list": (
        '[TOOL_CALLS][{"name": "read", "arguments": {}}, {"name": "write", "arguments": {"b',
        "",
        [("read", "{}"), ("write", '{"b')],
    ),
    "llama": ('{"name": "read", "parameters": {"a', "", [("read", '{"a')]),
    "within its name": ('Well.<tool_call>{"name": "re', "Well.", []),
    "plain JSON": ('{"nuts": 1', '{"nuts": 1', []),
}


@pytest.mark.parametrize("kind", CUTS)
def test_a_call_that_is_cut_is_a_call(kind: str) -> None:
    text, content, calls = CUTS[kind]
    _, read, found = Tools([WRITE, OTHER]).parse(text, is_cut=True)
    assert (read, [(call.name, call.arguments) for call in found]) == (content, calls)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "write", "arguments": {"te', [("write", '{"te')]),
        ('{"name": "write", "arg', [("write", "{}")]),
        ('{"na', []),
        ('{"name": "w', [("write", "{}")]),
    ],
)
def test_a_forced_call_that_is_cut_is_a_call(text: str, calls: list[tuple[str, str]]) -> None:
    _, content, found = Tools([WRITE, OTHER], "required").parse(text, is_cut=True)
    assert (content, [(call.name, call.arguments) for call in found]) == ("", calls)


def test_a_forced_call_is_given_in_the_fragments_in_which_it_comes() -> None:
    service: Any = SimpleNamespace(backend=SimpleNamespace(markers=None))
    tools = Tools([WRITE], "required")
    stream = AnswerStream(service, raw_prompt("x"), tools)
    pieces = []
    for fragment in ('{"name":"wri', 'te","arguments":', '{"text"', ':"a"', "}}"):
        assert stream.push(fragment) == ("", "")
        pieces.append([(p.opening is not None, p.arguments) for p in stream.take_calls()])
    assert pieces == [[], [], [(True, '{"text"')], [(False, ':"a"')], [(False, "}")]]
    _, content, calls = tools.parse('{"name":"write","arguments":{"text":"a"}}')
    stream.finish(Answer(content, "", calls, "tool_calls", 0))
    assert stream.take_calls() == []


THOUGHT = "<think>Or <tool_call>? No.</think>\n\nYes. " + as_text("read", {}) + as_text("write", {})


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_thought_content_and_calls_stream_as_they_are_read_at_once(size: int) -> None:
    service: Any = SimpleNamespace(backend=SimpleNamespace(markers=("<think>", "</think>")))
    tools = Tools([WRITE, OTHER])
    chat = dataclasses.replace(raw_prompt("x"), is_chat=True)
    stream = AnswerStream(service, chat, tools)
    splits = [stream.push(THOUGHT[n : n + size]) for n in range(0, len(THOUGHT), size)]
    splits.append(stream.finish(Answer("", "", tools.parse(THOUGHT[50:])[2], "stop", 0)))
    assert "".join(split.reasoning for split in splits) == "Or <tool_call>? No."
    assert "".join(split.content for split in splits) == "Yes."
    pieces = stream.take_calls()
    assert [piece.opening.name for piece in pieces if piece.opening] == ["read", "write"]
    assert [piece.number for piece in pieces if piece.opening] == [0, 1]


# ---- the server ----------------------------------------------------------------------------------


def fragments(answer: Any) -> tuple[list[dict[str, Any]], str]:
    """The fragments of calls in a stream, and the reason of its end."""
    chunks = [data for _, data in answer.events if data != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    found = [each for c in choices for each in c["delta"].get("tool_calls", ())]
    return found, choices[-1]["finish_reason"]


def test_the_arguments_of_a_forced_call_stream_as_they_are_generated(server: Served) -> None:
    found, reason = fragments(server.send(CHAT, {**FORCED, "stream": True, "max_tokens": 300}))
    assert found[0]["function"] == {"name": "write", "arguments": ""}
    assert len(found) > 1
    assert {each["index"] for each in found} == {0}
    assert ["id" in each for each in found] == [True, *[False] * (len(found) - 1)]
    text = "".join(each["function"]["arguments"] for each in found)
    assert list(json.loads(text)) == ["text"]
    assert reason == "tool_calls"
    whole = server.send(CHAT, {**FORCED, "max_tokens": 300}).json["choices"][0]
    assert whole["message"]["tool_calls"][0]["function"] == {"name": "write", "arguments": text}


def test_they_stream_as_events_of_a_response_too(server: Served) -> None:
    tool = {"type": "function", "strict": False, **WRITE["function"]}
    body = {"input": "Sam has 3 nuts.", "tools": [tool], "tool_choice": "required", "seed": 1}
    limits = {"temperature": 1, "max_output_tokens": 300}
    events = [data for _, data in server.send(RESPONSES, {**body, **limits, "stream": True}).events]
    deltas = [e["delta"] for e in events if e.get("type", "").endswith("arguments.delta")]
    [done] = [e for e in events if e.get("type", "").endswith("arguments.done")]
    assert deltas
    assert "".join(deltas) == done["arguments"]
    [item] = [each for each in events[-1]["response"]["output"] if each["type"] == "function_call"]
    assert (item["status"], item["arguments"]) == ("completed", done["arguments"])


@pytest.mark.parametrize("num_tokens", [1, 4, 12, 20])
def test_a_forced_call_that_its_limit_cuts_is_a_call(num_tokens: int, server: Served) -> None:
    body = {**FORCED, "max_tokens": num_tokens}
    choice = server.send(CHAT, body).json["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
    [call] = choice["message"]["tool_calls"]
    answer = server.send(CHAT, {**body, "stream": True})
    found, reason = fragments(answer)
    assert reason == "length"
    deltas = [data["choices"][0]["delta"] for _, data in answer.events if data != "[DONE]"]
    assert not any(delta.get("content") for delta in deltas)
    assert found[0]["function"]["name"] == call["function"]["name"] == "write"
    text = "".join(each["function"]["arguments"] for each in found)
    assert text == call["function"]["arguments"]


def test_an_object_of_a_forced_call_has_no_other_keys(server: Served) -> None:
    body = {**ASK, "tools": [OTHER], "tool_choice": "required", "temperature": 1, "max_tokens": 60}
    for seed in range(3):
        choice = server.send(CHAT, {**body, "seed": seed}).json["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == "{}"


def test_half_a_call_of_a_script_is_no_content() -> None:
    from forethought.workers.scripted import Reply

    half = as_text("read", {"a": 1})[:-20]
    with scripted(lambda prompt, index: Reply(half, finish_reason="length")) as running:
        for stream in (False, True):
            answer = running.send(CHAT, {**ASK, "tools": [OTHER], "stream": stream})
            if stream:
                found, reason = fragments(answer)
                assert (found[0]["function"]["name"], reason) == ("read", "length")
                assert "<tool_call>" not in answer.text
            else:
                message = answer.json["choices"][0]["message"]
                assert message["content"] is None
                assert message["tool_calls"][0]["function"]["name"] == "read"


@pytest.mark.parametrize("length", [1, 3000])
def test_a_broken_call_of_a_script_is_content_and_the_answer_is_no_call(length: int) -> None:
    from forethought.workers.scripted import Reply

    broken = '<tool_call>{"name": "read", "arguments": {"a": "%s", b}}</tool_call>' % ("x" * length)
    with scripted(lambda prompt, index: Reply(broken)) as running:
        choice = running.send(CHAT, {**ASK, "tools": [OTHER]}).json["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", broken)
        assert "tool_calls" not in choice["message"]
        answer = running.send(CHAT, {**ASK, "tools": [OTHER], "stream": True})
        chunks = [data for _, data in answer.events if data != "[DONE]"]
        contents = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
        assert ("".join(contents), fragments(answer)[1]) == (broken, "stop")
        tool = {"type": "function", **OTHER["function"]}
        response = running.send(RESPONSES, {"input": "?", "tools": [tool]}).json
        statuses = [
            item["status"] for item in response["output"] if item["type"] == "function_call"
        ]
        assert set(statuses) <= {"incomplete"}


# ---- a template without a place for tools -------------------------------------------------------


def test_tools_go_into_the_system_message_where_the_template_lacks_them(
    server: Served,
) -> None:
    backend = server.backend
    hf = backend.llm.tokenizer
    template = hf.chat_template
    talk = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "x", "type": "function", "function": {"name": "read", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "x", "content": "42"},
    ]
    hf.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    try:
        from forethought.server.backends.backend import Conversation

        for choice in ("auto", "required"):
            conversation = Conversation(talk, Tools([WRITE, OTHER], choice))
            text = backend.detokenize(backend.render(conversation))
            assert text.startswith("<system>")
            assert '"name": "write"' in text
            assert "<tool_call>" in text
            assert "<user><tool_response>\n42\n</tool_response>" in text
    finally:
        hf.chat_template = template


def test_tools_follow_a_system_prompt_or_go_before_the_question() -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    shown = hermes_messages(talk, [OTHER])
    assert shown[0]["content"].startswith("Be brief.\n\n")
    assert talk[0]["content"] == "Be brief."
    merged = merged_system(hermes_messages(talk[1:], [OTHER]))
    assert [message["role"] for message in merged] == ["user"]
    assert merged[0]["content"].endswith("\n\nhi")
