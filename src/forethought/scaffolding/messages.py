"""Messages of a chat, tool calls and descriptions of tools, with the names of ``tensorrt_llm``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forethought.errors import ParameterError


@dataclass
class RoleMessage:
    """A message with a role."""

    role: str
    content: str | None

    def to_dict(self) -> dict[str, Any]:
        """The message as OpenAI's API takes it."""
        return {"role": self.role, "content": self.content}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> RoleMessage:
        """A plain message from ``{"role": ..., "content": ...}``."""
        return RoleMessage(str(values["role"]), values.get("content"))


class UserMessage(RoleMessage):
    """A message of the user."""

    def __init__(self, content: str) -> None:
        super().__init__("user", content)


class SystemMessage(RoleMessage):
    """A system prompt."""

    def __init__(self, content: str) -> None:
        super().__init__("system", content)


@dataclass
class ToolFunction:
    """The function that a tool call names."""

    name: str = ""
    arguments: str = ""
    """JSON, as the model wrote it."""


@dataclass
class ToolCall:
    """One call of a tool, with the attributes that the ``openai`` package gives it."""

    id: str | None = None
    function: ToolFunction = field(default_factory=ToolFunction)
    type: str = "function"

    def to_dict(self) -> dict[str, Any]:
        """The call as OpenAI's API takes it."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}

    @staticmethod
    def create(call: Any) -> ToolCall:
        """``call`` as a ``ToolCall``: from itself, OpenAI's dictionary or a similar object."""
        if isinstance(call, ToolCall):
            return call
        try:
            if isinstance(call, Mapping):
                named = call["function"]
                function = ToolFunction(str(named["name"]), str(named["arguments"]))
                return ToolCall(call.get("id"), function)
            function = ToolFunction(str(call.function.name), str(call.function.arguments))
            return ToolCall(call.id, function)
        except (AttributeError, KeyError, TypeError) as error:
            raise ParameterError(
                "invalid tool call",
                f"got {call!r}",
                "Give a ToolCall, or a dictionary in OpenAI's form",
            ) from error


class AssistantMessage(RoleMessage):
    """A message of the model: text, tool calls, or both.

    Args:
        content: its text; None for a message that only calls tools.
        reasoning: its reasoning, if the server separates it.
        reasoning_content: an alias of ``reasoning`` that some servers use.
        tool_calls: the calls; dictionaries in OpenAI's form become ``ToolCall``.
        finish_reason: why it ended.
        refusal: why the model does not answer, in place of a text.

    Attributes:
        unreadable_call: why a call in ``content`` cannot be read; None if all can be.
    """

    unreadable_call: str | None = None

    def __init__(
        self,
        content: str | None,
        reasoning: str | None = None,
        reasoning_content: str | None = None,
        tool_calls: Sequence[Any] | None = None,
        finish_reason: str | None = None,
        refusal: str | None = None,
    ) -> None:
        super().__init__("assistant", content)
        self.reasoning, self.reasoning_content = reasoning, reasoning_content
        self.tool_calls: list[ToolCall] | None = None
        if tool_calls is not None:
            self.tool_calls = [ToolCall.create(call) for call in tool_calls]
        self.finish_reason, self.refusal = finish_reason, refusal

    def to_dict(self) -> dict[str, Any]:
        """The message as OpenAI's API takes it; without the reasoning, as the API demands."""
        message = super().to_dict()
        if self.tool_calls:
            message["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        if self.refusal:
            message["refusal"] = self.refusal
        return message


class ToolMessage(RoleMessage):
    """The result of one tool call.

    Args:
        content: what the model reads.
        tool_call_id: of the call.
        trace_stdout: what the tool printed, for readers of the chat; it is not sent.
        trace_stderr: the tool's error output, likewise.
    """

    def __init__(
        self,
        content: str,
        tool_call_id: str | None,
        *,
        trace_stdout: str | None = None,
        trace_stderr: str | None = None,
    ) -> None:
        super().__init__("tool", content)
        self.tool_call_id = tool_call_id
        self.trace_stdout, self.trace_stderr = trace_stdout, trace_stderr

    def to_dict(self) -> dict[str, Any]:
        """The message as OpenAI's API takes it."""
        return {**super().to_dict(), "tool_call_id": self.tool_call_id}


@dataclass
class ToolDescription:
    """A function that the model may call; ``parameters`` is JSON schema of its properties."""

    name: str
    description: str
    parameters: dict[str, Any]


class OpenAIToolDescription(ToolDescription):
    """A tool description in the format of OpenAI's API."""

    def to_dict(self) -> dict[str, Any]:
        """The function-tool schema of OpenAI's API."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {"type": "object", "properties": self.parameters},
            },
        }
