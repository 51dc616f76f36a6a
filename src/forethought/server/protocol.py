"""The bodies of requests, checked by pydantic. A field that is not listed here is refused by name.

Names, types and ranges are OpenAI's; after them come the extensions that vLLM's clients send, and
those of this server: ``method``, ``method_params``, ``budget``, ``speculation``, ``events``.
At the end: messages and tools as chat templates take them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from forethought.config.sampling import seed_of, top_k_of
from forethought.errors import ParameterError
from forethought.server.tool_calls import Tools

MAX_DEPTH, MAX_VALUES = 64, 1 << 16
"""Levels and values of the JSON that is passed on as it is: schemas, settings of methods."""


def check_values(content: bytes, limit: int) -> None:
    """Raises ValueError for JSON with more than ``limit`` values, counted by commas, braces and
    brackets outside of strings: reading it would keep others waiting.
    """
    if sum(map(content.count, _BEFORE_VALUES)) <= limit:
        return
    text = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    count, end = 0, 0
    while end >= 0 and count <= limit:
        start = text.find(b'"', end)
        stop = len(text) if start < 0 else start
        count += sum(text.count(mark, end, stop) for mark in _BEFORE_VALUES)
        end = -1 if start < 0 else text.find(b'"', start + 1)
        end += end >= 0
    if count > limit:
        raise ValueError(f"it holds more than {limit:,} values")


_BEFORE_VALUES = (b",", b"{", b"[")


def _shallow(value: Any) -> Any:
    """Refuses deep nesting, which recursive readers could not follow."""
    level, count = [value], 0
    for _ in range(MAX_DEPTH):
        inner = [item for item in level if isinstance(item, dict | list)]
        level = [c for item in inner for c in (item.values() if isinstance(item, dict) else item)]
        count += len(level)
        if count > MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES:,} values")
        if not level:
            return value
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


def _shallow_text(text: str) -> str:
    """``_shallow`` of JSON as text; text that is no JSON is refused where it is needed."""
    try:
        _shallow(json.loads(text))
    except json.JSONDecodeError:
        return text
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    return text


def _object(arguments: str) -> str:
    return arguments if arguments.strip() else "{}"


Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=0)]
"""Text that UTF-8 can encode: with any constraint, pydantic refuses lone surrogates."""
ArgumentsText = Annotated[Text, AfterValidator(_shallow_text), AfterValidator(_object)]
"""Arguments of a call: JSON, or what a model has written in its place."""
Ids = Annotated[list[Count], Field(fail_fast=True)]
Free = Annotated[dict[Text, Any], AfterValidator(_shallow)]
"""Any JSON object."""
Few = Annotated[Free, Field(max_length=64)]
Stop = Annotated[str, Field(max_length=1024)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1), AfterValidator(seed_of)]
"""Any integer of 64 bits; -1: fresh, as vLLM and llama.cpp have it."""
TopK = Annotated[int, AfterValidator(top_k_of)]
"""-1 is no limit, as 0 is."""
Verbosity = Literal["low", "medium", "high"]
Summary = Literal["auto", "concise", "detailed"]


def _itself(value: Any) -> Any:
    """``value``. Calling Python for each item of a list lets other threads run meanwhile."""
    return value


Interruptible = BeforeValidator(_itself)
MAX_ITEMS = 1 << 13
"""Messages of a conversation, and parts of one."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class Body(BaseModel):
    """Base of everything that clients send: no field is unknown, no value is converted.

    A field whose value is ``null`` is not given, whether it is known or not.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if isinstance(values, dict) and None in values.values():
            return {name: value for name, value in values.items() if value is not None}
        return values


# ---- what the generating APIs have in common ---------------------------------------------------


class StreamOptions(Body):
    """Of a stream of chunks."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class BudgetFields(Body):
    """Limits of everything that a method does inside; see ``scaffolding.budget.Budget``."""

    tokens: Positive | None = None
    calls: Positive | None = None
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class Speculation(Body):
    """Speculative decoding of this request; see ``SpeculationParams``."""

    enabled: bool = True
    drafter: Annotated[str, Field(min_length=1)] | None = None
    max_draft_len: Count | None = None


class StructuredOutputs(Body):
    """The shape of the output; exactly one field."""

    json_schema: Free | Annotated[Text, AfterValidator(_shallow_text)] | None = Field(
        default=None, alias="json"
    )
    regex: Annotated[str, Field(max_length=1 << 14)] | None = None
    choice: Annotated[list[Text], Field(max_length=1024)] | None = None
    grammar: Annotated[str, Field(max_length=1 << 16)] | None = None
    json_object: bool | None = None


class Generating(Body):
    """Fields of all generating APIs."""

    model: Text | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    # extensions that vLLM's clients send too
    top_k: TopK | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[Ids, Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: int | None = None
    structured_outputs: StructuredOutputs | None = None
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None
    reasoning_budget: int | None = None
    thinking_soft: Count | None = None
    # methods
    method: Annotated[str, Field(max_length=1024)] | None = None
    method_params: Few | None = None
    budget: BudgetFields | None = None
    speculation: Speculation | Text | None = None
    events: bool | None = None
    # accepted without effect
    user: Text | None = None
    metadata: Few | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None


class Penalised(Generating):
    """Fields of chats and completions."""

    n: Positive | None = None
    seed: Seed | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=32)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[Text, float], Field(max_length=1024)] | None = None
    max_tokens: int | None = None
    stream_options: StreamOptions | None = None


# ---- chats -------------------------------------------------------------------------------------


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


def _part_kind(part: Any) -> str:
    """The tag of a part's type for pydantic; no name of a field."""
    kind = part.get("type") if isinstance(part, dict) else None
    return "<refusal>" if kind == "refusal" else "<text>"


Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")],
    Discriminator(_part_kind),
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


class NamedFunction(Body):
    """A function by its name."""

    name: Text


class NamedTool(Body):
    """The tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    """A named schema."""

    name: Text
    description: Text | None = None
    schema_: Free | None = Field(default=None, alias="schema")
    strict: bool | None = None


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


class ChatRequest(Penalised):
    """``POST /v1/chat/completions``."""

    messages: Messages
    prediction: Prediction | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: Few | None = None
    store: Literal[False] | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Verbosity | None = None


# ---- completions -------------------------------------------------------------------------------


Texts = Annotated[list[Text], Field(fail_fast=True)]
IdLists = Annotated[list[Ids], Field(fail_fast=True)]


class CompletionRequest(Penalised):
    """``POST /v1/completions``."""

    prompt: Text | Ids | Texts | IdLists
    echo: bool | None = None
    logprobs: Count | None = None


# ---- responses ---------------------------------------------------------------------------------


class InputText(Body):
    """A part of an item's content."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: list[Any] | None = Field(default=None, max_length=0)
    logprobs: list[Free] | None = None


InputPart = Annotated[
    Annotated[InputText, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")],
    Discriminator(_part_kind),
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


class TextFormat(Body):
    """The shape of a response's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    schema_: Free | None = Field(default=None, alias="schema")
    strict: bool | None = None


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
    background: bool | None = None
    store: bool | None = None
    previous_response_id: Text | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolName | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    seed: Seed | None = None
    include: Annotated[list[Includable], Field(max_length=32)] | None = None
    top_logprobs: Count | None = None
    truncation: Literal["disabled", "auto"] | None = None
    stream_options: ResponseStreamOptions | None = None


# ---- tokens ------------------------------------------------------------------------------------


MAX_TOKENIZED = 1 << 19
"""Characters of a text that is tokenised for its tokens alone."""


class TokenizeRequest(Body):
    """``POST /tokenize``: a text, or a conversation through the chat template."""

    model: Text | None = None
    prompt: Annotated[str, Field(max_length=MAX_TOKENIZED)] | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """``POST /detokenize``."""

    model: Text | None = None
    tokens: Ids


# ---- errors ------------------------------------------------------------------------------------


def path_of(complaint: Mapping[str, Any], body: Any) -> list[str | int]:
    """The path of the field in ``body`` that a complaint of pydantic is about.

    Where a value may be of several kinds, pydantic names the kind among the steps of the path.
    """
    path: list[str | int] = []
    is_missing = complaint["type"] == "missing"
    for step in complaint["loc"][:-1] if is_missing else complaint["loc"]:
        is_index = isinstance(body, list) and isinstance(step, int) and step < len(body)
        if is_index or (isinstance(body, dict) and step in body):
            body = body[step]
            path.append(step)
    return [*path, complaint["loc"][-1]] if is_missing else path


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


def schema_fields(shape: JsonSchema | TextFormat | None) -> Mapping[str, Any] | None:
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
