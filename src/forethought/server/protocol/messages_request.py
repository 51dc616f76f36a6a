"""The bodies of ``POST /v1/messages`` and ``/v1/messages/count_tokens``, as Anthropic's clients
send them, and the chat that they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from forethought.server.protocol.body import (
    MAX_ITEMS,
    Body,
    Few,
    Free,
    Generating,
    Interruptible,
    Positive,
    Stop,
    Text,
)
from forethought.server.protocol.chat_request import ChatRequest


class Block(Body):
    """A part of a message."""

    cache_control: Few | None = None
    """Accepted without effect: prefixes are always kept."""


class TextBlock(Block):
    """Text."""

    type: Literal["text"]
    text: Text
    citations: None = None


class ThinkingBlock(Block):
    """A thought of an earlier answer."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text = ""


class ToolUseBlock(Block):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Free
    caller: Few | None = None


TextBlocks = Annotated[
    list[Annotated[TextBlock, Interruptible]], Field(fail_fast=True, max_length=MAX_ITEMS)
]


class ToolResultBlock(Block):
    """What a call has returned."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Text | TextBlocks = ""
    is_error: bool = False


def block_kind(block: Any) -> str:
    """The tag of a block's type for pydantic; no name of a field."""
    kind = block.get("type") if isinstance(block, dict) else None
    return f"<{kind}>" if kind in ("thinking", "tool_use", "tool_result") else "<text>"


AnyBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(block_kind),
]
Blocks = Annotated[
    list[Annotated[AnyBlock, Interruptible]], Field(fail_fast=True, max_length=MAX_ITEMS)
]


class AnthropicMessage(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Text | Blocks


class AnthropicTool(Body):
    """A function that the model may call."""

    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: Text | None = None
    input_schema: Free
    strict: bool | None = None
    cache_control: Few | None = None


class ToolChoice(Body):
    """Whether tools have to be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    """How much to think. ``adaptive``: as the model does unasked."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Positive | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    """The shape of the answer."""

    type: Literal["json_schema"]
    schema_: Free = Field(alias="schema")


class OutputConfig(Body):
    """How much to think, and the shape of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Generating):
    """``POST /v1/messages/count_tokens``; fields of the answer have no effect on the count."""

    messages: Annotated[
        list[Annotated[AnthropicMessage, Interruptible]],
        Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS),
    ]
    system: Text | TextBlocks | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Few | None = None
    """As of a block."""
    speed: Literal["standard"] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None  # type: ignore[assignment]


class MessagesRequest(CountTokensRequest):
    """``POST /v1/messages``."""

    max_tokens: Positive
    stop_sequences: Annotated[list[Stop], Field(max_length=32)] | None = None


_SHARED = (*Generating.model_fields.keys() - {"service_tier"},)
"""Fields that mean the same in a chat."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of(body: CountTokensRequest) -> ChatRequest:
    """The chat that a body stands for; raises pydantic's ValidationError where there is none."""
    fields = body.model_dump(include={*_SHARED}, exclude_unset=True, by_alias=True)
    messages = fields["messages"] = [*_system(body.system), *_messages(body.messages)]
    if messages and _is_begun_answer(messages[-1]):
        fields["continue_final_message"] = True
    if body.tools:
        fields["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        fields |= _choice(body.tool_choice)
    if isinstance(body, MessagesRequest):
        fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
    if body.thinking is not None:
        fields |= _thinking(body.thinking)
    if body.output_config is not None:
        fields |= _output(body.output_config)
    return ChatRequest.model_validate(fields)


def _is_begun_answer(message: Mapping[str, Any]) -> bool:
    """Whether the answer is to go on after a message, as after an assistant's last words."""
    is_text = message["role"] == "assistant" and not message.get("tool_calls")
    return is_text and bool(message["content"])


def _thinking(thinking: Thinking) -> dict[str, Any]:
    if thinking.type == "disabled":
        return {"reasoning_effort": "none"}
    fields: dict[str, Any] = {"thinking_budget": thinking.budget_tokens}
    return {**fields, "include_reasoning": thinking.display != "omitted"}


def _output(config: OutputConfig) -> dict[str, Any]:
    effort = "xhigh" if config.effort == "max" else config.effort
    fields: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if config.format is None:
        return fields
    schema = {"name": "output", "schema": config.format.schema_}
    return {**fields, "response_format": {"type": "json_schema", "json_schema": schema}}


def _system(system: str | Sequence[TextBlock] | None) -> list[dict[str, Any]]:
    return [] if not system else [{"role": "system", "content": _joined(system)}]


def _joined(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n\n".join(block.text for block in content)


def _messages(messages: Sequence[AnthropicMessage]) -> Iterator[dict[str, Any]]:
    for message in messages:
        content = message.content
        if isinstance(content, str):
            yield {"role": message.role, "content": content}
        elif message.role == "assistant":
            yield _assistant(content)
        else:
            yield from _results(content)
            texts = [block for block in content if isinstance(block, TextBlock)]
            if texts or not content:
                yield {"role": message.role, "content": _joined(texts)}


def _assistant(blocks: Sequence[Block]) -> dict[str, Any]:
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        {
            "id": block.id,
            "function": {"name": block.name, "arguments": json.dumps(block.input)},
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    return {
        "role": "assistant",
        "content": "".join(texts),
        "reasoning_content": "".join(thoughts) or None,
        "tool_calls": calls or None,
    }


def _results(blocks: Sequence[Block]) -> Iterator[dict[str, Any]]:
    """What calls have returned, as messages of their tools."""
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            text = _joined(block.content)
            content = f"Error: {text}" if block.is_error else text
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function = {"name": tool.name, "parameters": tool.input_schema}
    described = {"description": tool.description, "strict": tool.strict}
    return {"type": "function", "function": {**function, **described}}


def _choice(choice: ToolChoice) -> dict[str, Any]:
    chosen: Any = _CHOICES.get(choice.type)
    if chosen is None:
        chosen = {"type": "function", "function": {"name": choice.name}}
    return {"tool_choice": chosen, "parallel_tool_calls": not choice.disable_parallel_tool_use}
