"""The bodies of ollama's ``/api/chat`` and ``/api/generate``, and the chat that each stands for.

Fields and options that are not listed are refused by name.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from forethought.server.protocol.body import MAX_ITEMS, Body, Free, Positive, Seed, Stop, Text, TopK
from forethought.server.protocol.chat_request import ChatRequest, Tool

_Nothing = Annotated[list[Any], Field(max_length=0)]
_RENAMED = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}
"""Options -> fields of a chat; the others have one name."""
FIELDS = {
    **{field: f"options.{option}" for option, field in _RENAMED.items()},
    **dict.fromkeys(("json_schema", "response_format"), "format"),
    **dict.fromkeys(("thinking_budget", "reasoning_effort"), "think"),
}
"""Fields of a chat -> those of these bodies, for messages."""
_UNSENT = {"num_ctx", "repeat_last_n"}
"""Options that are checked, and are true of every chat here."""


class Options(Body):
    """How to sample. ``num_predict``: -1 and -2 are no limit but the context."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: TopK | None = None
    min_p: float | None = None
    seed: Seed | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=32)] | None = None
    num_predict: Annotated[int, Field(ge=-2)] | None = None
    num_ctx: Positive | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Literal[-1] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class CalledFunction(Body):
    """The function of a call, whose arguments are an object."""

    name: Text
    arguments: Free = Field(default_factory=dict)
    index: int | None = None


class CalledTool(Body):
    """A call that an assistant's message holds."""

    function: CalledFunction
    id: Text | None = None


class OllamaMessage(Body):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text = ""
    thinking: Text | None = None
    images: _Nothing | None = None
    tool_calls: Annotated[list[CalledTool], Field(max_length=MAX_ITEMS)] | None = None
    tool_name: Text | None = None
    tool_call_id: Text | None = None


class OllamaRequest(Body):
    """What both APIs have in common."""

    model: Text
    stream: bool = True
    think: bool | Literal["low", "medium", "high"] | None = None
    format: Literal["", "json"] | Free | None = None
    options: Options = Field(default_factory=Options)
    # accepted without effect: the model stays loaded
    keep_alive: Text | float | None = None


class OllamaChatRequest(OllamaRequest):
    """``POST /api/chat``."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True, max_length=MAX_ITEMS)]
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None


class OllamaGenerateRequest(OllamaRequest):
    """``POST /api/generate``; ``raw``: without the chat template."""

    prompt: Text = ""
    system: Text = ""
    raw: bool = False
    images: _Nothing | None = None
    context: _Nothing | None = None
    suffix: Literal[""] | None = None
    template: Literal[""] | None = None


class ShowRequest(Body):
    """``POST /api/show``."""

    model: Text
    # accepted without effect: there are no details to leave out
    verbose: bool | None = None


def chat_of(body: OllamaChatRequest | OllamaGenerateRequest, model: str) -> ChatRequest | None:
    """The chat that a body stands for, of the model that it names; None: it has no message.

    Raises pydantic's ValidationError if it stands for none.
    """
    fields: dict[str, Any] = {"model": model, "stream": body.stream}
    options = body.options.model_dump(exclude_none=True, exclude=_UNSENT)
    fields |= {_RENAMED.get(name, name): value for name, value in options.items()}
    if fields.get("max_tokens", 0) < 0:
        del fields["max_tokens"]
    if isinstance(body, OllamaChatRequest):
        fields |= {"messages": [*_messages(body.messages)], "tools": body.tools}
    else:
        turns = {"system": body.system, "user": body.prompt}
        turns = turns if body.prompt else {}
        fields["messages"] = [{"role": r, "content": text} for r, text in turns.items() if text]
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format:
        fields["json_schema"] = body.format
    if body.think is True:
        fields["thinking_budget"] = -1
    elif body.think is not None:
        fields["reasoning_effort"] = body.think or "none"
    return ChatRequest.model_validate(fields) if fields["messages"] else None


def _messages(messages: Sequence[OllamaMessage]) -> Iterator[dict[str, Any]]:
    """A result belongs to the first open call of its tool; ollama's calls need have no id."""
    open_calls = _OpenCalls()
    for index, message in enumerate(messages):
        fields: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking is not None:
            fields["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [
                (call.id or f"call_{index}_{number}", call.function)
                for number, call in enumerate(message.tool_calls)
            ]
            for call_id, function in calls:
                open_calls.add(call_id, function.name)
            fields["tool_calls"] = [_call(*call) for call in calls]
        if message.role == "tool":
            fields["tool_call_id"] = message.tool_call_id or open_calls.take(message.tool_name)
        yield fields


class _OpenCalls:
    """The ids of calls without a result, the first one first."""

    def __init__(self) -> None:
        self._names = OrderedDict[str, str]()  # by id
        self._ids = dict[str, deque[str]]()  # by name

    def add(self, call_id: str, name: str) -> None:
        self._names[call_id] = name
        self._ids.setdefault(name, deque()).append(call_id)

    def take(self, name: str | None) -> str | None:
        """The first one, of the tool if it is named; None: there is none."""
        if name is None and self._names:
            name = next(iter(self._names.values()))
        ids = self._ids.get(name or "")
        if not ids:
            return None
        self._names.pop(call_id := ids.popleft(), None)
        return call_id


def _call(call_id: str, function: CalledFunction) -> dict[str, Any]:
    arguments = json.dumps(function.arguments)
    return {"id": call_id, "function": {"name": function.name, "arguments": arguments}}
