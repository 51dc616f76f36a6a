"""Each answer and each event is what the types of the ``openai`` package say, with all fields that
they require."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from forethought import AsyncLLM
from forethought.llm.tool_messages import as_text
from forethought.server.backends.engine_backend import EngineBackend
from forethought.workers.scripted import Reply
from http_servers import Answer, Served, eventually, scripted, served

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTION = {"name": "add", "description": "Add.", "parameters": PARAMETERS}
SHAPE = {"type": "json_schema", "schema": PARAMETERS}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def answers(prompt: str, index: int) -> str | Reply:
    table: dict[str, str | Reply] = {
        "think": "<think>\nhm\n</think>\n\nthe answer",
        "call": "<think>well</think>" + as_text("add", {"a": 1}) + as_text("add", {"a": 2}),
        "slow": Reply("a" * 10_000, seconds_per_token=0.01),
        "fail": Reply("", error=RuntimeError("secret")),
        "nothing": "",
    }
    return table.get(prompt, f"you said {prompt}")


@pytest.fixture(scope="module")
def script() -> Iterator[Served]:
    with scripted(answers) as running:
        yield running


@pytest.fixture(scope="module")
def engine() -> Iterator[Served]:
    llm = AsyncLLM()
    try:
        with served(EngineBackend(llm, "reasoner")) as running:
            yield running
    finally:
        llm.shutdown()


def expect(kind: Any, answer: Answer) -> Any:
    assert answer.status == 200, answer.text
    return TypeAdapter(kind).validate_python(answer.json)


def expect_chunks(kind: Any, answer: Answer) -> list[Any]:
    assert answer.events[-1][1] == "[DONE]"
    return [TypeAdapter(kind).validate_python(data) for _, data in answer.events[:-1]]


def expect_events(answer: Answer) -> list[Any]:
    return [EVENT.validate_python(data) for _, data in answer.events]


CHATS: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"logprobs": True, "top_logprobs": 2},
    {"max_tokens": 3},
    {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": PARAMETERS},
        }
    },
    {"method": "majority_vote@2", "budget": {"tokens": 40}},
    {"prediction": {"type": "content", "content": "It is 7."}},
]


@pytest.mark.parametrize("fields", CHATS, ids=str)
def test_chats(engine: Served, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "max_tokens": 60, **fields}
    expect(ChatCompletion, engine.send(CHAT, body))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = expect_chunks(ChatCompletionChunk, engine.send(CHAT, body | options))
    assert chunks[-1].usage is not None


@pytest.mark.parametrize("text", ["think", "call", "nothing", "x"])
def test_chats_of_a_script(script: Served, text: str) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    body = {"messages": [{"role": "user", "content": text}], "tools": tools}
    expect(ChatCompletion, script.send(CHAT, body))
    expect_chunks(ChatCompletionChunk, script.send(CHAT, body | {"stream": True}))


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2, "n": 2}, {"echo": True}], ids=str)
def test_completions(engine: Served, fields: dict[str, Any]) -> None:
    body = {"prompt": ["Sam has", "Eva"], "max_tokens": 6, **fields}
    expect(Completion, engine.send(COMPLETIONS, body))
    for _, data in engine.send(COMPLETIONS, body | {"stream": True}).events[:-1]:
        for choice in data["choices"]:  # OpenAI's own chunks have null, which their type lacks
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        TypeAdapter(Completion).validate_python(data)


RESPONSES_FIELDS: list[dict[str, Any]] = [
    {},
    {"max_output_tokens": 3},
    {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
    {"text": {"format": SHAPE, "verbosity": "low"}},
    {"text": {"format": {"type": "json_object"}}},
    {"reasoning": {"effort": "minimal", "summary": "auto"}, "truncation": "auto"},
    {"include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "store": False},
    {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    {"top_logprobs": 1, "method": "majority_vote@2"},
    {"metadata": {"a": "b"}, "user": "u", "safety_identifier": "s"},
]


@pytest.mark.parametrize("fields", RESPONSES_FIELDS, ids=str)
def test_responses(engine: Served, fields: dict[str, Any]) -> None:
    body = {"input": "What is 3 + 4?", "max_output_tokens": 60, "temperature": 0, **fields}
    made = expect(Response, engine.send(RESPONSES, body))
    assert made.id.startswith("resp_")
    events = expect_events(engine.send(RESPONSES, body | {"stream": True}))
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert [item.type for item in events[-1].response.output] == [i.type for i in made.output]


@pytest.mark.parametrize("text", ["think", "call", "nothing", "fail", "x"])
def test_responses_of_a_script(script: Served, text: str) -> None:
    body: dict[str, Any] = {"input": text, "tools": [{"type": "function", **FUNCTION}]}
    events = expect_events(script.send(RESPONSES, body | {"stream": True}))
    if text != "fail":
        made = expect(Response, script.send(RESPONSES, body))
        kept = expect(Response, script.send(f"{RESPONSES}/{made.id}"))
        assert kept == made
    else:
        assert events[-1].type == "response.failed"


def test_a_response_in_the_background_that_is_cancelled(script: Served) -> None:
    made = expect(Response, script.send(RESPONSES, {"input": "slow", "background": True}))
    eventually(lambda: script.send(f"{RESPONSES}/{made.id}").json["status"] == "in_progress")
    ended = expect(Response, script.send(f"{RESPONSES}/{made.id}/cancel", b""))
    assert ended.status == "cancelled"
    events = expect_events(script.send(f"{RESPONSES}/{made.id}?stream=true"))
    assert events[-1].response.status == "cancelled"


def test_models(script: Served) -> None:
    for model in script.send("/v1/models").json["data"]:
        TypeAdapter(Model).validate_python(model)
        expect(Model, script.send(f"/v1/models/{model['id']}"))
