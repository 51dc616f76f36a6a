"""How models write calls of tools: the formats, which of them a model's chat template writes, and
the grammar of a forced call.

====================  ==============================================================================
``hermes``            ``<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>``: Hermes,
                      Qwen2.5, Qwen3
``qwen3_coder``       ``<tool_call><function=add><parameter=a>1</parameter></function></tool_call>``
``llama3``            ``{"name": "add", "parameters": {"a": 1}}``, also after ``<|python_tag|>``
``mistral``           ``[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]``
``mistral_args``      ``[TOOL_CALLS]add[ARGS]{"a": 1}``
``deepseek_v3``       ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>add``, and a block of JSON
``deepseek_v3_1``     ``<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>``
``harmony``           ``<|channel|>commentary to=functions.add <|constrain|>json<|message|>{...}``:
                      gpt-oss, whose thought and answer are messages in channels, too
====================  ==============================================================================

A tokenizer with a response template does without (``llm.response``).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from forethought.config.guided import GuidedDecodingParams
from forethought.errors import ParameterError
from forethought.llm import call_formats
from forethought.llm.call_grammar import json_arguments, xml_parameters
from forethought.llm.call_reader import MAX_CALLS, CallReader, ReadCalls
from forethought.llm.tool_messages import (
    arguments_of,
    described,
    has_calls,
    hermes_messages,
    shows_tools,
)

_THOUGHT = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
"""What is before and after a thought in front of a call, in a format of messages."""
Openings = Mapping[str, ReadCalls]
_JSON_HEAD = '{"name": "%s", "arguments": '
_DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>%s"
_DEEPSEEK_END = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """What a chat template makes of a message with a call."""

    text: str
    takes_text: bool
    """Whether the arguments have to be text rather than an object."""
    takes_no_content: bool
    """Whether the content has to be null."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format.

    Attributes:
        marks: texts that are all in what a template of this format writes for a call.
        openings: text that begins calls -> what reads what follows.
        head: what precedes the arguments of a forced call, with ``%s`` for the name.
        tail: what follows them.
        reads_bare: whether JSON at the beginning of an answer is a call.
        reads_messages: whether the format is one of whole answers, so that also those without tools
            are read by it.
        has_parameters: whether a forced call has its arguments one by one as text.
        added_tokens: text -> id of the tokens beside the tokenizer's vocabulary, which a grammar
            names by their ids.
        has_special_marks: whether some of the marks are special tokens of the tokenizer, which
            texts have only if ``skip_special_tokens`` is False.
        written: what the chat template makes of a call; None: it writes none.
        shows_tools: whether the chat template has a place for tools; None: its text decides.
    """

    name: str
    marks: tuple[str, ...]
    openings: Openings
    head: str
    tail: str = ""
    reads_bare: bool = False
    reads_messages: bool = False
    has_parameters: bool = False
    added_tokens: Mapping[str, int] = field(default_factory=dict)
    has_special_marks: bool = False
    written: WrittenCall | None = None
    shows_tools: bool | None = None

    def is_in(self, text: str) -> bool:
        """Whether a call in ``text`` is of this format."""
        return all(mark in text for mark in self.marks)

    @property
    def is_native(self) -> bool:
        """Whether the chat template writes calls in this format."""
        return self.written is not None and self.is_in(self.written.text)

    @property
    def example(self) -> str:
        """A call, for the description of tools."""
        value = "<value>" if self.has_parameters else "<object with the arguments>"
        body = f"<parameter=<name>>\n{value}\n</parameter>\n" if self.has_parameters else value
        return f"{self.head.replace('%s', '<name of the function>')}{body}{self.tail}"

    def reader(
        self,
        functions: Mapping[str, Mapping[str, Any]],
        *,
        is_forced: bool = False,
        max_calls: int = MAX_CALLS,
    ) -> CallReader:
        """Reads one answer, with calls of ``functions``: name -> schema of the parameters."""
        return CallReader(
            self.openings,
            functions,
            bare=call_formats.json_calls if self.reads_bare or is_forced else None,
            is_forced=is_forced,
            max_calls=max_calls,
        )

    def shape(self, functions: Mapping[str, Mapping[str, Any]]) -> GuidedDecodingParams:
        """The grammar of one call of one of ``functions``.

        Raises ParameterError for a schema that is none.
        """
        rules, calls = list[str](), list[str]()
        for number, (name, schema) in enumerate(functions.items()):
            head, tail, body = self.head, self.tail, None
            if self.has_parameters:
                body = xml_parameters(schema, f"value{number}", rules, self._literal)
            if body is None:
                body = f"arguments{number}"
                rules.append(f"{body}: {json_arguments(schema)}")
                if self.has_parameters:
                    head, tail = FORMATS["hermes"].head, FORMATS["hermes"].tail
            calls.append(" ".join([*self._literal(_named(head, name)), body, *self._literal(tail)]))
        start = " | ".join(calls)
        if self.reads_messages:  # which begin with a thought
            opening, closing = (" ".join(self._literal(text)) for text in _THOUGHT)
            start = f"({opening} thought {closing})? ({start})"
            rules.append("thought: /(?s:.)+/")
        return GuidedDecodingParams(grammar="\n".join([f"start: {start}", *rules]))

    def begins_forced(self, text: str, names: Sequence[str]) -> list[str]:
        """The names whose forced calls begin with a text, which ends before the arguments."""
        heads = [self.head] if not self.has_parameters else [self.head, FORMATS["hermes"].head]
        return [name for name in names if any(_named(h, name).startswith(text) for h in heads)]

    def begun(self, prompt: str) -> str:
        """What the end of a prompt has of the answer's first message, in a format of messages."""
        return prompt.rpartition("<|start|>assistant")[2] if self.reads_messages else ""

    def _literal(self, text: str) -> Iterator[str]:
        """A text in the notation of grammars; tokens beside the vocabulary by their ids."""
        tokens = sorted(self.added_tokens, key=len, reverse=True)
        pattern = "|".join(map(re.escape, tokens)) or r"(?!)"
        for part in re.split(f"({pattern})", text):
            if part in self.added_tokens:
                yield f"<[{self.added_tokens[part]}]>"
            elif part:
                yield json.dumps(part, ensure_ascii=False)


def _named(head: str, name: str) -> str:
    quoted = json.dumps(name, ensure_ascii=False)[1:-1] if '"' in head else name
    return head.replace("%s", quoted)


_TAGGED: Openings = {"<tool_call>": call_formats.tagged_calls}
_FUNCTION: Openings = {"<function=": call_formats.function_call}
_PYTHON: Openings = {"<|python_tag|>": call_formats.json_calls}
_MISTRAL: Openings = {"[TOOL_CALLS]": call_formats.mistral_calls}
_DEEPSEEK_OPENINGS: Openings = {
    "<｜tool▁calls▁begin｜>": call_formats.deepseek_calls,
    "<｜tool▁call▁begin｜>": call_formats.deepseek_call,
}
_ALL = (
    ToolFormat(
        "harmony",
        ("<|channel|>commentary", "to=functions."),
        call_formats.HARMONY_OPENINGS,
        "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>",
        reads_messages=True,
    ),
    ToolFormat(
        "deepseek_v3",
        ("<｜tool▁call▁begin｜>", "```json"),
        _DEEPSEEK_OPENINGS,
        _DEEPSEEK % "function<｜tool▁sep｜>%s\n```json\n",
        f"\n```{_DEEPSEEK_END}",
    ),
    ToolFormat(
        "deepseek_v3_1",
        ("<｜tool▁call▁begin｜>",),
        _DEEPSEEK_OPENINGS,
        _DEEPSEEK % "%s<｜tool▁sep｜>",
        _DEEPSEEK_END,
    ),
    ToolFormat(
        "qwen3_coder",
        ("<function=", "<parameter="),
        {**_TAGGED, **_FUNCTION},
        "<tool_call>\n<function=%s>\n",
        "</function>\n</tool_call>",
        has_parameters=True,
    ),
    ToolFormat(
        "hermes",
        ("<tool_call>", '"name"'),
        _TAGGED,
        f"<tool_call>\n{_JSON_HEAD}",
        "}\n</tool_call>",
    ),
    ToolFormat("mistral_args", ("[TOOL_CALLS]", "[ARGS]"), _MISTRAL, "[TOOL_CALLS]%s[ARGS]"),
    ToolFormat(
        "mistral", ("[TOOL_CALLS]", '"name"'), _MISTRAL, f"[TOOL_CALLS] [{_JSON_HEAD}", "}]"
    ),
    ToolFormat(
        "llama3",
        ('{"name": "', '"parameters": '),
        _PYTHON,
        '{"name": "%s", "parameters": ',
        "}",
        reads_bare=True,
    ),
)
FORMATS: Mapping[str, ToolFormat] = MappingProxyType({form.name: form for form in _ALL})
"""Name -> format; of two that a template may be of, the first."""
ANY = ToolFormat(
    "any",
    (),
    {**_TAGGED, **_PYTHON, **_MISTRAL, **_DEEPSEEK_OPENINGS},
    _JSON_HEAD,
    "}",
    reads_bare=True,
)
"""Where the format is not known: the calls of all but harmony; a forced one is JSON."""


def named_format(name: str) -> ToolFormat:
    """The format of this name; raises ParameterError if there is none."""
    if name not in FORMATS:
        raise ParameterError(
            f"unknown tool_format {name!r}",
            "there is no such format of tool calls",
            f"Give one of {', '.join(FORMATS)}, or leave it out: the chat template tells",
            param="tool_format",
        )
    return FORMATS[name]


def tool_format_of(hf: Any, name: str | None = None) -> ToolFormat | None:
    """The format of a model: by ``name``, or else what the chat template of its tokenizer writes
    for a call; a template that writes none gets tools in that of Hermes. None: the tokenizer's
    response template says how answers are read.

    Raises ParameterError for an unknown name.
    """
    if name is None and getattr(hf, "response_template", None) is not None:
        return None
    written = _written_call(hf)
    form = named_format(name) if name is not None else _format_of(hf, written)
    special = [entry.content for entry in hf.added_tokens_decoder.values() if entry.special]
    marks = "".join([*form.openings, form.head, form.tail])
    return replace(
        form,
        written=written,
        shows_tools=_shows_tools(hf),
        added_tokens=hf.get_added_vocab(),
        has_special_marks=any(token in marks for token in special),
    )


def with_tools(
    hf: Any,
    form: ToolFormat | None,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A conversation with calls and results of tools, and further arguments, as the chat template
    of ``hf`` takes them.
    """
    shown = [_as_template_takes(message, form) for message in messages]
    if shows_tools(hf) if form is None or form.shows_tools is None else form.shows_tools:
        return shown, {"tools": list(tools)} if tools else {}
    if not tools and not has_calls(messages):
        return shown, {}
    if form is not None and form.is_native:
        return described(shown, tools, form.example), {}
    return hermes_messages(messages, tools), {}


def _as_template_takes(message: Mapping[str, Any], form: ToolFormat | None) -> dict[str, Any]:
    """A message whose calls have their arguments as objects or as text."""
    if not message.get("tool_calls") or form is None or form.written is None:
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        value = arguments_of(call["function"]["arguments"])
        if form.written.takes_text:
            value = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": value}})
    result = {**message, "tool_calls": calls}
    if form.written.takes_no_content and not message.get("content"):
        result["content"] = None
    if form.reads_messages and message.get("reasoning_content"):
        result["thinking"] = message["reasoning_content"]
    return result


def _format_of(hf: Any, written: WrittenCall | None) -> ToolFormat:
    if written is None and not _shows_tools(hf):
        return FORMATS["hermes"]
    text = str(hf.chat_template) if written is None else written.text
    return next((form for form in FORMATS.values() if form.is_in(text)), ANY)


_CALLED, _TOOL = "probe_call", "probe_tool"
_QUESTION = {"role": "user", "content": "?"}
_VARIANTS = (({"x": "y"}, ""), ({"x": "y"}, None), ('{"x": "y"}', ""), ('{"x": "y"}', None))
"""Arguments and content with which chat templates take a message with a call."""


def _render(hf: Any, *messages: Mapping[str, Any]) -> str:
    """A conversation with a tool in the chat template of a tokenizer; raises what that raises."""
    parameters = {"type": "object", "properties": {}}
    tool = {"name": _TOOL, "description": _TOOL, "parameters": parameters}
    tools = [{"type": "function", "function": tool}]
    return str(hf.apply_chat_template(list(messages), tokenize=False, tools=tools))


def _shows_tools(hf: Any) -> bool:
    try:
        return _TOOL in _render(hf, _QUESTION)
    except Exception:  # whatever a template raises
        return shows_tools(hf)


def _written_call(hf: Any) -> WrittenCall | None:
    """What a chat template writes for a call of the assistant; None: it writes none."""
    for arguments, content in _VARIANTS:
        function = {"name": _CALLED, "arguments": arguments}
        call = {"id": "probe0001", "type": "function", "function": function}
        turn = {"role": "assistant", "content": content, "tool_calls": [call]}
        with contextlib.suppress(Exception):  # whatever a template raises
            text, before = _render(hf, _QUESTION, turn), _render(hf, _QUESTION)
            pairs = enumerate(zip(text, before, strict=False))
            place = next((place for place, (a, b) in pairs if a != b), len(before))
            if _CALLED in text[place:]:
                return WrittenCall(text[place:], isinstance(arguments, str), content is None)
    return None
