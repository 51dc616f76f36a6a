"""Served models whose chat templates write calls with special tokens, one in whole messages."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from forethought.config.guided import GuidedDecodingParams
from forethought.llm.async_llm import AsyncLLM
from forethought.scaffolding import ChatTask, EngineWorker, UserMessage
from forethought.server.backends.backend import Conversation
from forethought.server.backends.engine_backend import EngineBackend
from forethought.server.settings import Settings
from http_servers import Served, served
from models import save_random
from tokens import byte_level, speaking

CHAT = "/v1/chat/completions"
FRAME = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}@{% endfor %}{% else %}<|{{ m.role }}|>"
    "{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}#{% endif %}"
)
MISTRAL = "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
HARMONY = (
    "<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
    "{{ c.function.arguments | tojson }}<|call|>"
)
SPECIAL = {
    "mistral_args": ["[TOOL_CALLS]", "[ARGS]"],
    "harmony": [
        *("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>"),
    ],
}
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "string", "minLength": 20, "maxLength": 30}},
            "required": ["a"],
        },
    },
}


def opened(path: Path, name: str, template: str) -> AsyncLLM:
    """A random model with a chat template and the special tokens of a format."""
    hf = copy.deepcopy(byte_level())
    hf.chat_template = template
    hf.add_special_tokens({"additional_special_tokens": SPECIAL[name]})
    config = json.loads((speaking() / "config.json").read_text())
    sizes = {"max_position_embeddings": 512, "vocab_size": len(hf)}
    save_random(LlamaConfig(**{**config, **sizes}), path)
    hf.save_pretrained(path)
    return AsyncLLM(path, dtype="float32", guided_decoding_config={"compile_timeout": 600})


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    template = FRAME.replace("@", MISTRAL).replace("#", "")
    llm = opened(tmp_path_factory.mktemp("mistral"), "mistral_args", template)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    effort = "Reasoning: {{ reasoning_effort or 'medium' }}"
    template = effort + FRAME.replace("@", HARMONY).replace("#", "<|start|>assistant")
    llm = opened(tmp_path_factory.mktemp("harmony"), "harmony", template)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def server(mistral: AsyncLLM) -> Iterator[Served]:
    with served(EngineBackend(mistral, "tiny")) as running:
        yield running


def says(llm: AsyncLLM, text: str, **fields: Any) -> dict[str, Any]:
    """A request whose answer is a text, special tokens included: there is no other choice."""
    ids = llm.encode(text, special=False)
    shape = {"grammar": "start: " + " ".join(f"<[{token}]>" for token in ids)}
    body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 200, "temperature": 0}
    return {**body, "structured_outputs": shape, **fields}


def deltas(answer: Any) -> list[dict[str, Any]]:
    """The deltas of a stream."""
    chunks = [data for _, data in answer.events if data != "[DONE]"]
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


def test_calls_between_special_tokens_are_read_whole_and_streamed(
    server: Served, mistral: AsyncLLM
) -> None:
    text = 'Well: [TOOL_CALLS]add[ARGS]{"a": "[ARGS] é"}[TOOL_CALLS]add[ARGS]{"a": "2"}'
    body = says(mistral, text, tools=[ADD])
    choice = server.send(CHAT, body).json["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Well:"
    calls = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
    assert [json.loads(arguments) for arguments in calls] == [{"a": "[ARGS] é"}, {"a": "2"}]
    parts = deltas(server.send(CHAT, {**body, "stream": True}))
    assert "".join(part.get("content") or "" for part in parts) == "Well:"
    pieces = [call for part in parts for call in part.get("tool_calls", ())]
    assert [piece["index"] for piece in pieces if "id" in piece] == [0, 1]
    streamed = ["", ""]
    for piece in pieces:
        streamed[piece["index"]] += piece["function"]["arguments"]
    assert streamed == calls


def test_a_forced_call_is_in_the_format_of_the_model_and_streams(server: Served) -> None:
    body = {
        "messages": [{"role": "user", "content": "?"}],
        "tools": [ADD],
        "tool_choice": "required",
        "max_tokens": 100,
        "seed": 1,
    }
    message = server.send(CHAT, body).json["choices"][0]["message"]
    [call] = message["tool_calls"]
    assert message["content"] is None
    assert 20 <= len(json.loads(call["function"]["arguments"])["a"]) <= 30
    parts = deltas(server.send(CHAT, {**body, "stream": True}))
    pieces = [call["function"] for part in parts for call in part.get("tool_calls", ())]
    assert pieces[0] == {"name": "add", "arguments": ""}
    assert len(pieces) > 1
    arguments = "".join(piece["arguments"] for piece in pieces)
    assert arguments == call["function"]["arguments"]
    assert not any(part.get("content") for part in parts)
    cut = server.send(CHAT, {**body, "max_tokens": 2}).json["choices"][0]
    assert (cut["finish_reason"], cut["message"]["content"]) == ("length", None)
    assert cut["message"]["tool_calls"][0]["function"]["name"] == "add"


def test_a_worker_reads_the_calls_of_a_chat_and_says_where_one_is_unreadable(
    mistral: AsyncLLM,
) -> None:
    def answered(text: str) -> Any:
        grammar = says(mistral, text)["structured_outputs"]["grammar"]
        task = ChatTask(messages=[UserMessage("?")])
        task.tools, task.max_tokens = [ADD], 200
        task.guided_decoding = GuidedDecodingParams(grammar=grammar)
        worker = EngineWorker(mistral)
        asyncio.run(worker.run_task(task))
        return task.messages[-1]

    message = answered('[TOOL_CALLS]add[ARGS]{"a": "x"}')
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == [
        ("add", '{"a": "x"}')
    ]
    message = answered('[TOOL_CALLS]add[ARGS]{"a": x}')
    assert message.tool_calls is None
    assert "JSON" in message.unreadable_call


def test_a_chat_without_tools_is_read_in_a_format_of_messages(harmony: AsyncLLM) -> None:
    grammar = says(harmony, ANSWER)["structured_outputs"]["grammar"]
    task = ChatTask(messages=[UserMessage("?")])
    task.max_tokens, task.guided_decoding = 200, GuidedDecodingParams(grammar=grammar)
    asyncio.run(EngineWorker(harmony).run_task(task))
    message = task.messages[-1]
    assert (message.content, message.reasoning) == ("It is 4.", "Hm.")
    assert (task.output_str, task.finish_reason) == ("It is 4.", "stop")


MESSAGES = (
    "<|channel|>analysis<|message|>Hm, a sum.<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>"
    'json<|message|>{"a": "4"}<|call|>'
)
ANSWER = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is 4."
)


def test_the_effort_of_a_request_reaches_a_template_that_reads_it(harmony: AsyncLLM) -> None:
    backend = EngineBackend(harmony, "tiny")
    talk = [{"role": "user", "content": "?"}]
    for effort, shown in (("high", "high"), ("minimal", "low"), (None, "medium")):
        ids = backend.render(Conversation(talk, reasoning_effort=effort))
        assert backend.detokenize(ids).startswith(f"Reasoning: {shown}")
    own = Conversation(talk, template_args={"reasoning_effort": "max"}, reasoning_effort="low")
    assert backend.detokenize(backend.render(own)).startswith("Reasoning: max")
    with served(backend) as server:
        body = {"messages": talk, "reasoning_effort": "low", "max_tokens": 2}
        assert server.send(CHAT, body).status == 200


def test_messages_of_gpt_oss_are_thought_content_and_calls(harmony: AsyncLLM) -> None:
    with served(EngineBackend(harmony, "tiny")) as server:
        body = says(harmony, MESSAGES, tools=[ADD])
        message = server.send(CHAT, body).json["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("Hm, a sum.", "I add.")
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["add"]
        parts = deltas(server.send(CHAT, {**body, "stream": True}))
        assert "".join(part.get("reasoning", "") for part in parts) == "Hm, a sum."
        assert "".join(part.get("content") or "" for part in parts) == "I add."

        message = server.send(CHAT, says(harmony, ANSWER)).json["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("Hm.", "It is 4.")
        scored = says(harmony, ANSWER, logprobs=True, stream=True)
        chunks = [d for _, d in server.send(CHAT, scored).events if d != "[DONE]"]
        entries = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
        tokens = [token["token"] for entry in entries for token in entry["content"]]
        assert "".join(tokens) == "It is 4."
    with served(EngineBackend(harmony, "tiny"), Settings(reasoning_in_content=True)) as server:
        message = server.send(CHAT, says(harmony, ANSWER)).json["choices"][0]["message"]
        assert message["content"] == "<think>Hm.</think>It is 4."
