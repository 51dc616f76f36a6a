"""Shaped answers of a model that thinks, through the server on the embedded reasoner."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from forethought import AsyncLLM
from forethought.server.app import create_app
from forethought.server.backends.engine_backend import EngineBackend

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
FORCED = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    backend = EngineBackend(AsyncLLM(), "reasoner")
    try:
        with TestClient(create_app(backend)) as client:
            yield client
    finally:
        backend.close()


def choice(client: TestClient, **fields: Any) -> Any:
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    body = {"model": "reasoner", "messages": messages, "max_tokens": 60, "temperature": 0, **fields}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def test_a_shape_is_that_of_the_content_and_not_of_a_thought(client: TestClient) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    found = choice(client, response_format=shape)
    assert found["finish_reason"] == "stop"
    assert json.loads(found["message"]["content"])["a"] in (1, 2)
    assert not found["message"].get("reasoning")


def test_a_model_that_was_not_trained_on_tools_can_be_made_to_call_one(client: TestClient) -> None:
    found = choice(client, tools=[TOOL], tool_choice=FORCED)
    (call,) = found["message"]["tool_calls"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"])["a"] in (1, 2)


def test_white_space_between_the_tokens_of_json_is_short(client: TestClient) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    content = choice(client, response_format=shape)["message"]["content"]
    assert len(content) <= len(json.dumps({"a": 1})) + 5  # one blank at each of its places


def test_an_object_of_any_json_is_written_without_runs_of_blanks(client: TestClient) -> None:
    found = choice(client, response_format={"type": "json_object"})
    assert found["finish_reason"] == "stop"
    assert isinstance(json.loads(found["message"]["content"]), dict)
    assert "  " not in found["message"]["content"]


def test_an_answer_without_a_shape_is_thought_over(client: TestClient) -> None:
    assert choice(client, max_tokens=200)["message"]["reasoning"]


def test_llama_cpps_fields_are_shapes(client: TestClient) -> None:
    message = choice(client, json_schema=SCHEMA, max_tokens=200)["message"]
    assert json.loads(message["content"])["a"] in (1, 2)
    grammar = 'root ::= [0-9] [0-9]? " apples"'
    text = choice(client, grammar=grammar, max_tokens=200)["message"]["content"]
    assert text.endswith(" apples")
    for fields in ({"grammar": grammar}, {"json_schema": SCHEMA}):
        body = {"prompt": "What is 3 + 4?", "max_tokens": 40, "temperature": 0, **fields}
        completion = client.post("/v1/completions", json=body).json()["choices"][0]
        assert completion["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"grammar": "root ::= "}, "grammar"),
        ({"json_schema": {"type": 3}}, "json_schema"),
        ({"json_schema": SCHEMA, "grammar": 'root ::= "a"'}, "json_schema"),
        ({"json_schema": [1]}, "json_schema"),
    ],
)
def test_an_invalid_shape_is_named_as_llama_cpp_names_it(
    client: TestClient, fields: dict[str, Any], param: str
) -> None:
    body = {"prompt": "a", "max_tokens": 5, **fields}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
