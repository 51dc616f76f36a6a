"""ollama's own Python client."""

from __future__ import annotations

import asyncio

import pytest

ollama = pytest.importorskip("ollama", reason="ollama's client is not installed here")
QUESTION = [{"role": "user", "content": "What is 3 + 4?"}]
GREEDY = {"temperature": 0, "num_predict": 100}


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


def test_a_chat_and_its_stream_are_the_same(server, model):
    client = ollama.Client(server)
    whole = client.chat(model, messages=QUESTION, options=GREEDY)
    parts = list(client.chat(model, messages=QUESTION, options=GREEDY, stream=True))
    for name in ("content", "thinking"):
        joined = "".join(getattr(part.message, name) or "" for part in parts)
        assert joined == getattr(whole.message, name)
    assert "7" in whole.message.content
    assert (whole.eval_count, whole.prompt_eval_count) == (23, 11)
    assert whole.total_duration >= whole.eval_duration > 0


def test_a_prompt_is_answered_and_continued(server, model):
    client = ollama.Client(server)
    answer = client.generate(model, "What is 3 + 4?", options=GREEDY)
    assert "7" in answer.response
    assert "7" in answer.thinking
    raw = client.generate(model, "3 + 4 =", raw=True, options={"num_predict": 5})
    assert (raw.eval_count, raw.done_reason) == (5, "length")
    assert client.generate(model).done_reason == "load"


def test_a_schema_is_the_format(server, model):
    shape = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    answer = ollama.Client(server).chat(model, messages=QUESTION, format=shape, options=GREEDY)
    assert answer.message.content.strip()[0] == "{"


def test_a_tool_is_called_and_its_result_is_read(scripted):
    client = ollama.Client(scripted)
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    answer = client.chat("scripted", messages=messages, tools=[add])
    (call,) = answer.message.tool_calls
    result = str(add(**call.function.arguments))
    messages += [answer.message, {"role": "tool", "content": result, "tool_name": "add"}]
    assert client.chat("scripted", messages=messages, tools=[add]).message.content == "It is 5."


def test_models_are_listed_and_shown(server, model):
    client = ollama.Client(server)
    assert [entry.model for entry in client.list().models] == [model]
    assert "thinking" in client.show(model).capabilities


def test_methods_are_models(server, model):
    async def vote():
        client = ollama.AsyncClient(server)
        return await client.chat(f"majority_vote@4-{model}", messages=QUESTION)

    assert "7" in asyncio.run(vote()).message.content


@pytest.mark.parametrize("options", [{"mirostat": 1}, {"num_ctx": 1 << 20}])
def test_what_is_not_supported_is_named(server, model, options):
    with pytest.raises(ollama.ResponseError, match=next(iter(options))):
        ollama.Client(server).chat(model, messages=QUESTION, options=options)
