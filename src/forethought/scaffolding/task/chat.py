"""The task to take the assistant's next turn in a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from forethought.scaffolding.messages import AssistantMessage, RoleMessage, UserMessage
from forethought.scaffolding.task.generation import StreamGenerationTask


@dataclass(eq=False)
class ChatTask(StreamGenerationTask):
    """The assistant's next turn in a chat; the answer is appended to ``messages``."""

    messages: list[RoleMessage] = field(default_factory=list)
    tools: Any = None
    """Descriptions of the functions that the model may call."""
    enable_token_counting: bool = False
    """Count the tokens of all turns in the three fields below."""
    prompt_tokens_num: int = field(default=0, init=False)
    completion_tokens_num: int = field(default=0, init=False)
    reasoning_tokens_num: int = field(default=0, init=False)
    unique_id: int | None = None

    @property
    def under_way(self) -> bool:
        """False: a turn is generated at once, and has no steps."""
        return False

    def copy(self) -> Self:
        """The same chat, free to go on differently, with its results blank."""
        twin = super().copy()
        twin.prompt_tokens_num = twin.completion_tokens_num = twin.reasoning_tokens_num = 0
        return twin

    def messages_to_dict_content(self, start_index: int = 0) -> list[dict[str, Any]]:
        """The messages from ``start_index`` on, as OpenAI's API takes them."""
        return [message.to_dict() for message in self.messages[start_index:]]

    def add_message(self, message: RoleMessage) -> None:
        """Append one message."""
        self.messages.append(message)

    def add_messages(self, messages: Sequence[RoleMessage]) -> None:
        """Append messages."""
        self.messages.extend(messages)

    def last_assistant_content(self) -> str | None:
        """What the assistant said last; None if it has said nothing."""
        said = [m for m in self.messages if isinstance(m, AssistantMessage)]
        return said[-1].content if said else None

    @staticmethod
    def create_from_prompt(  # type: ignore[override]  # the established signature
        user_prompt: str | None,
        system_prompts: Sequence[RoleMessage] | None = None,
        tools: Any = None,
    ) -> ChatTask:
        """A chat that opens with ``system_prompts`` and a user's message, as far as given.

        Args:
            user_prompt: text of the user's message; None: the chat has no user's message yet.
            system_prompts: messages before it.
            tools: descriptions of the functions that the model may call.
        """
        messages = [*(system_prompts or ())]
        if user_prompt is not None:
            messages.append(UserMessage(user_prompt))
        return ChatTask(messages=messages, tools=tools)

    @staticmethod
    def create_from_messages(messages: Sequence[RoleMessage], tools: Any = None) -> ChatTask:
        """A chat that goes on from ``messages``."""
        return ChatTask(messages=list(messages), tools=tools)
