"""Messages, tools and shapes of a chat's body, as chat templates and the engine take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forethought.config.guided import GuidedDecodingParams
from forethought.errors import ParameterError
from forethought.server.protocol import ChatRequest, Message, ResponseFormat, Tool
from forethought.server.tool_calls import Tools


def tools_of(body: ChatRequest) -> Tools:
    """The tools of a request."""
    choice = body.tool_choice or ("auto" if body.tools else "none")
    named = not isinstance(choice, str)
    return make_tools(
        body.tools or [],
        choice if isinstance(choice, str) else choice.function.name,
        named,
        body.parallel_tool_calls is not False,
    )


def make_tools(tools: Sequence[Tool], choice: str, named: bool, several: bool) -> Tools:
    """Tools, as chat templates take them."""
    given = [tool.model_dump(exclude_none=True) for tool in tools]
    for tool in given:
        tool["function"].pop("strict", None)
    return Tools(given, choice, several, named)


def message_dict(message: Message) -> dict[str, Any]:
    """A message as chat templates take it.

    Raises:
        ParameterError: it lacks what its role needs.
    """
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    made: dict[str, Any] = {"role": role, "content": content if content is not None else ""}
    if message.content is None and (role != "assistant" or not message.tool_calls):
        raise ParameterError(f"a message of the {role} needs content", "it is null", "Give text")
    if message.name is not None:
        made["name"] = message.name
    if role == "tool":
        if message.tool_call_id is None:
            raise ParameterError("a tool's message needs tool_call_id", "it is missing", "")
        made["tool_call_id"] = message.tool_call_id
    thought = message.reasoning_content or message.reasoning
    if thought and role == "assistant":
        made["reasoning_content"] = thought
    if message.tool_calls:
        made["tool_calls"] = [
            call.model_dump(exclude={"index"}, exclude_none=True) for call in message.tool_calls
        ]
    return made


def shape_of(given: ResponseFormat | None) -> GuidedDecodingParams | None:
    """The shape that a ``response_format`` demands; None for text."""
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return GuidedDecodingParams(json_object=True)
    schema = given.json_schema.schema_ if given.json_schema else None
    if schema is None:
        raise ParameterError("response_format needs json_schema.schema", "it is missing", "Give it")
    return GuidedDecodingParams(json=schema)
