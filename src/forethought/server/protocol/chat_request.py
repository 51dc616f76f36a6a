"""The body of ``POST /v1/chat/completions``; messages and tools as chat templates take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    Tag,
)

from forethought.errors import ParameterError
from forethought.server.protocol.body import (
    MAX_ITEMS,
    ArgumentsText,
    Body,
    Completing,
    Count,
    Effort,
    Few,
    Free,
    Interruptible,
    Text,
    Verbosity,
)
from forethought.server.protocol.tool_calls import Tools


class TextPart(Body):
    """A part of a message; text alone is read."""

    type: Literal["text"]
    text: Text


class RefusalPart(Body):
    """Why an assistant did not answer, in its words."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        """What it said."""
        return self.refusal


def part_kind(part: Any) -> str:
    """The tag of a part's type for pydantic; no name of a field."""
    kind = part.get("type") if isinstance(part, dict) else None
    return "<refusal>" if kind == "refusal" else "<text>"


Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")],
    Discriminator(part_kind),
]
Parts = Annotated[list[Annotated[Part, Interruptible]], Field(fail_fast=True, max_length=MAX_ITEMS)]


class CalledFunction(Body):
    """The function of a call."""

    name: Text
    arguments: ArgumentsText = "{}"


class CalledTool(Body):
    """A call that an assistant's message holds."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Parts | None = None
    name: Text | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: Text | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    # written by clients that send an answer back as it came
    refusal: Text | None = None
    annotations: list[Any] | None = Field(default=None, max_length=0)
    audio: None = None
    function_call: None = None


Messages = Annotated[
    list[Annotated[Message, Interruptible]],
    Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS),
]


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: Text | None = None
    parameters: Free | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool."""

    type: Literal["function"]
    function: Function


ToolList = Annotated[list[Tool], Field(max_length=128)]


class NamedFunction(Body):
    """A function by its name."""

    name: Text


class NamedTool(Body):
    """The tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class NamedSchema(Body):
    """A JSON schema with its name."""

    name: Text | None = None
    description: Text | None = None
    schema_: Free | None = Field(default=None, alias="schema")
    strict: bool | None = None


class JsonSchema(NamedSchema):
    """The schema of a chat's ``response_format``."""

    name: Text


class ResponseFormat(Body):
    """The shape of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Prediction(Body):
    """What the answer may turn out to be: it is the first draft."""

    type: Literal["content"]
    content: Annotated[str, Field(min_length=1)] | Annotated[list[TextPart], Field(min_length=1)]

    @property
    def text(self) -> str:
        """All parts as one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class Prompting(Body):
    """What the prompt of a conversation ends with."""

    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def prompt_end(self) -> Literal["answer", "last", "nothing"]:
        """As of a ``Conversation``; raises ParameterError for fields that exclude each other."""
        if self.continue_final_message and self.add_generation_prompt:
            raise ParameterError(
                "continue_final_message and add_generation_prompt exclude each other",
                "both are true",
                "Give one of them",
                param="continue_final_message",
            )
        if self.continue_final_message:
            return "last"
        return "nothing" if self.add_generation_prompt is False else "answer"


class ChatRequest(Completing, Prompting):
    """``POST /v1/chat/completions``."""

    messages: Messages
    prediction: Prediction | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    response_format: ResponseFormat | None = None
    tools: ToolList | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: Few | None = None
    store: Literal[False] | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Verbosity | None = None


# ---- as chat templates take them ---------------------------------------------------------------


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
    """The tools of a request, as it has sent them."""
    descriptions = [tool.model_dump(exclude_none=True) for tool in tools]
    return Tools(descriptions, choice, several, named)


def schema_fields(shape: NamedSchema | None) -> Mapping[str, Any] | None:
    """What a request says of its schema, for another server; None: it has no named schema."""
    if shape is None or shape.schema_ is None:
        return None
    return shape.model_dump(include={"name", "description", "strict"}, exclude_none=True)


def message_dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates take them; raises ParameterError if one lacks what its role
    needs.
    """
    return [_message_dict(message, index) for index, message in enumerate(messages)]


def _message_dict(message: Message, index: int) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    content = message.refusal if not content and message.refusal else content
    role = "system" if message.role == "developer" else message.role
    result: dict[str, Any] = {"role": role, "content": content if content is not None else ""}
    if content is None and (role != "assistant" or not message.tool_calls):
        what, why = f"a message of the {role} needs content", "it is null"
        raise ParameterError(what, why, "Give text", param=f"messages.{index}.content")
    if message.name is not None:
        result["name"] = message.name
    if role == "tool":
        if message.tool_call_id is None:
            path = f"messages.{index}.tool_call_id"
            raise ParameterError(f"a tool's message needs {path}", "it is missing", "", param=path)
        result["tool_call_id"] = message.tool_call_id
    thought = message.reasoning_content or message.reasoning
    if thought and role == "assistant":
        result["reasoning_content"] = thought
    if message.tool_calls:
        result["tool_calls"] = [
            call.model_dump(exclude={"index"}, exclude_none=True) for call in message.tool_calls
        ]
    return result
