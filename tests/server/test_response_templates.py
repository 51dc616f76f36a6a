"""Answers read as a tokenizer's response template says: at once, and as they stream."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from forethought.llm.async_llm import AsyncLLM
from forethought.llm.response import ResponseParser
from forethought.server.backends.engine_backend import EngineBackend
from forethought.server.settings import Settings
from http_servers import Served, served
from models import save_random
from tokens import byte_level, speaking

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": {"open": "[thinks]", "close": "[says]", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*\[calls (?P<name>\w+)\]",
            "close": "[end]",
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"content": "text"},
    },
}
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = '[thinks] a sum [says]\n\nI add. [calls add]{"a": "4"}[end]\n[calls add]{"a": 5}[end]'


def read(text: str, *sizes: int, tools: Any = (ADD,), keeps: bool = False) -> Any:
    """Thought, content and calls of a text that comes in pieces of these sizes, and the rest."""
    hf = byte_level()
    prompt = hf("<|user|>?<|assistant|>").input_ids
    stream = ResponseParser(hf, RESPONSE).stream(prompt, tools, keeps_reasoning=keeps)
    pieces, place = [], 0
    for size in (*sizes, len(text)):
        pieces.append(stream.push(text[place : place + size]))
        place += size
    pieces.append(stream.finish())
    reasoning, content = ("".join(parts) for parts in zip(*pieces, strict=True))
    return reasoning, content, [(name, json.loads(given)) for name, given in stream.calls]


def test_thought_content_and_calls_are_told_apart() -> None:
    assert read(CALL) == ("a sum", "I add.", [("add", {"a": 4}), ("add", {"a": 5})])


@given(st.lists(st.integers(1, 9), max_size=12))
@settings(max_examples=30, deadline=None)
def test_pieces_of_any_size_make_the_same_message(sizes: list[int]) -> None:
    assert read(CALL, *sizes) == read(CALL)
    assert read(CALL, *sizes, keeps=True) == read(CALL, keeps=True)


@pytest.mark.parametrize(
    ("text", "tools"),
    [
        ("So: [calls add]{broken[end] done", (ADD,)),
        ("So: [calls remove]{}[end]", (ADD,)),
        ('So: [calls add]{"a": 1}[end]', ()),
    ],
)
def test_a_call_that_is_none_is_content(text: str, tools: Any) -> None:
    for sizes in ((), (3,), (12, 5)):
        assert read(text, *sizes, tools=tools) == ("", text, [])


def test_a_thought_may_stay_in_the_content_with_its_markers() -> None:
    assert read("[thinks]hm[says] Yes.", keeps=True) == ("", "[thinks]hm[says] Yes.", [])


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    path: Path = tmp_path_factory.mktemp("template")
    config = json.loads((speaking() / "config.json").read_text())
    save_random(LlamaConfig(**{**config, "max_position_embeddings": 512}), path)
    hf = copy.deepcopy(byte_level())
    hf.chat_template, hf.response_template = TEMPLATE, RESPONSE
    hf.save_pretrained(path)
    patient = {"compile_timeout": 600}  # of grammars, on a busy machine
    llm = AsyncLLM(path, dtype="float32", guided_decoding_config=patient)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def server(llm: AsyncLLM) -> Iterator[Served]:
    with served(EngineBackend(llm, "tiny")) as running:
        yield running


def says(text: str, **fields: Any) -> dict[str, Any]:
    """A request whose answer is a text: there is no other choice."""
    shape = {"structured_outputs": {"choice": [text]}, "max_tokens": 200, "temperature": 0}
    return {"messages": [{"role": "user", "content": "?"}], **shape, **fields}


@pytest.mark.parametrize("method", ["plain", "majority_vote@2"])
def test_a_served_model_calls_tools_in_the_format_of_its_template(
    server: Served, method: str
) -> None:
    body = says(CALL, tools=[ADD], method=method)
    choice = server.send(CHAT, body).json["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == ("a sum", "I add.")
    calls = [call["function"] for call in message["tool_calls"]]
    assert [json.loads(call["arguments"]) for call in calls] == [{"a": 4}, {"a": 5}]

    events = server.send(CHAT, {**body, "stream": True}).events
    deltas = [data["choices"][0]["delta"] for _, data in events if data != "[DONE]"]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "a sum"
    assert "".join(delta.get("content") or "" for delta in deltas) == "I add."
    named = [call for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]
    assert [call["function"]["name"] for call in named] == ["add", "add"]


def test_responses_have_the_calls_as_items(server: Served) -> None:
    tool = {"type": "function", **ADD["function"]}
    body = {**says(CALL), "input": "?", "tools": [tool], "max_output_tokens": 200}
    for name in ("messages", "max_tokens"):
        del body[name]
    output = server.send("/v1/responses", body).json["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", *["function_call"] * 2]


def test_a_forced_call_is_read_as_json(server: Served) -> None:
    one = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "add", "parameters": one}}
    body = says("", tools=[tool], tool_choice="required")
    del body["structured_outputs"]
    message = server.send(CHAT, body).json["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "add"


def test_the_option_leaves_the_thought_in_the_content(llm: AsyncLLM) -> None:
    with served(EngineBackend(llm, "tiny"), Settings(reasoning_in_content=True)) as running:
        message = running.send(CHAT, says("[thinks]hm[says]Yes.")).json["choices"][0]["message"]
        assert message["content"] == "[thinks]hm[says]Yes."
