"""The messages and tool descriptions of a chat, in the form that OpenAI's API speaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
    """What the user says."""

    def __init__(self, content: str) -> None:
        super().__init__("user", content)


class SystemMessage(RoleMessage):
    """What the system prompt says."""

    def __init__(self, content: str) -> None:
        super().__init__("system", content)


class AssistantMessage(RoleMessage):
    """What the model said: text, tool calls, or both.

    Args:
        content: its text; None for a message that only calls tools.
        reasoning: its thoughts, where the server tells them apart.
        reasoning_content: the same under the name that some servers use.
        tool_calls: the calls, as dictionaries in OpenAI's form.
        finish_reason: why it ended.
    """

    def __init__(
        self,
        content: str | None,
        reasoning: str | None = None,
        reasoning_content: str | None = None,
        tool_calls: list[dict[str, Any]] | None = None,
        finish_reason: str | None = None,
    ) -> None:
        super().__init__("assistant", content)
        self.reasoning, self.reasoning_content = reasoning, reasoning_content
        self.tool_calls, self.finish_reason = tool_calls, finish_reason

    def to_dict(self) -> dict[str, Any]:
        """The message as OpenAI's API takes it; thoughts stay out, as the API demands."""
        message = super().to_dict()
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


class ToolMessage(RoleMessage):
    """What a tool answered to one call."""

    def __init__(self, content: str, tool_call_id: str) -> None:
        super().__init__("tool", content)
        self.tool_call_id = tool_call_id

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
    """A tool description that knows OpenAI's form."""

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
