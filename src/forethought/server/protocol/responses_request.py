"""The body of ``POST /v1/responses``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    Tag,
)

from forethought.server.protocol.body import (
    MAX_ITEMS,
    ArgumentsText,
    Body,
    Count,
    Effort,
    Free,
    Generating,
    Interruptible,
    Summary,
    Text,
    Verbosity,
)
from forethought.server.protocol.chat_request import NamedSchema, RefusalPart, part_kind


class InputText(Body):
    """A part of an item's content."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: list[Any] | None = Field(default=None, max_length=0)
    logprobs: list[Free] | None = None


InputPart = Annotated[
    Annotated[InputText, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")],
    Discriminator(part_kind),
]
InputTexts = Annotated[
    list[Annotated[InputPart, Interruptible]], Field(fail_fast=True, max_length=MAX_ITEMS)
]


class InputMessage(Body):
    """A message among the input items."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | InputTexts
    id: Text | None = None
    status: Text | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(Body):
    """A call that the model has made before."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: ArgumentsText = "{}"
    id: Text | None = None
    status: Text | None = None


class FunctionCallOutput(Body):
    """What a function has returned."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Text | InputTexts
    id: Text | None = None
    status: Text | None = None


class ReasoningText(Body):
    """A thought, or its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: Text


class ReasoningItem(Body):
    """A thought that the model has had before; chat templates that can will show it."""

    type: Literal["reasoning"]
    id: Text | None = None
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: Text | None = None
    status: Text | None = None


class ItemReference(Body):
    """An output item of a response that is kept."""

    type: Literal["item_reference"] = "item_reference"
    id: Text


class ResponseTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: Text | None = None
    parameters: Free | None = None
    strict: bool | None = None


class ResponseToolName(Body):
    """The function that has to be called."""

    type: Literal["function"]
    name: Text


class TextFormat(NamedSchema):
    """The shape of a response's text."""

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Body):
    """Of a response's text; the model writes as much as it does."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ReasoningOptions(Body):
    """Of a response's thought, which is in its item whole, and not summarised."""

    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


Includable = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""What a response may show beside its items; of most kinds there is nothing here to show."""


def _kind(item: Any) -> str:
    """The tag of an item's type for pydantic; messages and references need not name theirs."""
    if not isinstance(item, dict):
        return "<message>"
    is_reference = "id" in item and "role" not in item
    return f"<{item.get('type') or ('item_reference' if is_reference else 'message')}>"


InputItem = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutput, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<item_reference>")],
    Discriminator(_kind),
]


class ResponseStreamOptions(Body):
    """Of a stream of a response's events."""

    include_obfuscation: Literal[False] | None = None


class ResponseRequest(Generating):
    """``POST /v1/responses``."""

    input: Text | Annotated[list[InputItem], Field(fail_fast=True, max_length=MAX_ITEMS)]
    instructions: Text | None = None
    max_output_tokens: int | None = None
    continue_final_message: bool | None = None
    background: bool | None = None
    store: bool | None = None
    previous_response_id: Text | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolName | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[Includable], Field(max_length=32)] | None = None
    top_logprobs: Count | None = None
    truncation: Literal["disabled", "auto"] | None = None
    stream_options: ResponseStreamOptions | None = None
