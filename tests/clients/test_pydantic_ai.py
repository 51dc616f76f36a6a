"""pydantic-ai: an agent with a tool, with a typed output, and as a stream."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

pydantic_ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed here")


def agent_of(server: str, name: str, **fields: Any) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{server}/v1", api_key="none")
    return pydantic_ai.Agent(OpenAIChatModel(name, provider=provider), **fields)


def test_an_agent_calls_a_tool_and_reads_its_result(scripted):
    agent, calls = agent_of(scripted, "scripted"), []

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        calls.append((a, b))
        return a + b

    assert agent.run_sync("What is 2 + 3?").output == "It is 5."
    assert calls == [(2, 3)]


def test_an_output_has_its_type(server, model):
    from pydantic import BaseModel

    class Sum(BaseModel):
        """A sum."""

        result: Literal[7, 8]

    for output in (pydantic_ai.NativeOutput(Sum), pydantic_ai.ToolOutput(Sum)):
        agent = agent_of(server, model, output_type=output)
        answer = agent.run_sync("What is 3 + 4?", model_settings={"temperature": 0.0})
        assert isinstance(answer.output, Sum)


def test_a_stream_ends_with_the_answer(server, model):
    async def run() -> str:
        agent = agent_of(server, model, model_settings={"temperature": 0.0})
        async with agent.run_stream("What is 3 + 4?") as stream:
            texts = stream.stream_text(delta=True, debounce_by=None)
            return "".join([text async for text in texts])

    assert "7" in asyncio.run(run())
