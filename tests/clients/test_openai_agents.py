"""The openai-agents SDK: sessions of three turns with a tool, over responses and over chats."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

agents = pytest.importorskip(
    "agents",
    reason="openai-agents needs another openai: make test-clients has an environment for it",
)
TURNS = {"What is 2 + 3?": "It is 5.", "And 10 more?": "It is 15.", "Thanks": "You are welcome."}
"""What the scripted server answers, by way of the tool or without it."""


@agents.function_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def agent_of(server: str, kind: str, **settings: Any) -> Any:
    agents.set_tracing_disabled(True)
    client = agents.AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)
    models = {
        "responses": agents.OpenAIResponsesModel,
        "chats": agents.OpenAIChatCompletionsModel,
    }
    return agents.Agent(
        name="adder",
        instructions="Use the tool to add.",
        model=models[kind](model="scripted", openai_client=client),
        tools=[add],
        model_settings=agents.ModelSettings(**settings),
    )


async def run(agent: Any, items: Any, streams: bool, **options: Any) -> Any:
    if not streams:
        return await agents.Runner.run(agent, items, **options)
    result = agents.Runner.run_streamed(agent, items, **options)
    kinds = [event.type async for event in result.stream_events()]
    assert "raw_response_event" in kinds
    return result


def called(result: Any) -> list[str]:
    return [item.output for item in result.new_items if item.type == "tool_call_output_item"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("kind", ["responses", "chats"])
def test_a_session_of_three_turns_sends_all_items_again(
    scripted: str, kind: str, streams: bool
) -> None:
    async def session() -> None:
        agent, items, outputs = agent_of(scripted, kind), [], []
        for question, answer in TURNS.items():
            result = await run(agent, [*items, {"role": "user", "content": question}], streams)
            assert result.final_output == answer
            items = result.to_input_list()
            outputs += called(result)
        assert outputs == ["5", "15"]

    asyncio.run(session())


@pytest.mark.parametrize("streams", [False, True])
def test_a_session_goes_on_from_the_response_before(scripted: str, streams: bool) -> None:
    async def session() -> None:
        agent, previous = agent_of(scripted, "responses"), None
        for question, answer in TURNS.items():
            result = await run(agent, question, streams, previous_response_id=previous)
            assert result.final_output == answer
            previous = result.last_response_id

    asyncio.run(session())


def test_a_session_without_a_store_asks_for_the_thoughts(scripted: str) -> None:
    async def session() -> None:
        settings: dict[str, Any] = {
            "store": False,
            "response_include": ["reasoning.encrypted_content"],
            "reasoning": {"effort": "low", "summary": "auto"},
            "verbosity": "low",
            "truncation": "auto",
            "prompt_cache_retention": "24h",
        }
        agent, items = agent_of(scripted, "responses", **settings), []
        for question, answer in TURNS.items():
            result = await run(agent, [*items, {"role": "user", "content": question}], False)
            assert result.final_output == answer
            items = result.to_input_list()

    asyncio.run(session())
