"""A model's message read from its text: what it says, its thought, and the tools that it calls.

Every family of models writes calls in a form of its own. A tokenizer may say which, in its
``response_template``, which transformers' parser reads (``ResponseParser``); else the form is a
``ToolFormat`` (``FormatParser``).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forethought.errors import ParameterError
from forethought.llm.reasoning import opens_thought, split
from forethought.llm.tokenizer import Tokenizer
from forethought.llm.tool_format import ToolFormat

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names that templates have for a thought."""
_TAIL = 256
"""Tokens at the end of a prompt in which the message may have begun."""
_UNREADABLE = "it has not the name of a tool, or its arguments are no JSON"


@dataclass(frozen=True, slots=True)
class Response:
    """A message of the model."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[tuple[str, str], ...] = ()
    """Name and arguments, as JSON, of each call."""
    error: str | None = None
    """Why a call cannot be read; ``content`` is the whole text then."""


class ResponseParser:
    """Reads messages as a response template says: ``template``, or else the tokenizer's own.

    Raises ParameterError if there is none, or transformers refuses it.
    """

    def __init__(self, tokenizer: Any, template: Mapping[str, Any] | None = None) -> None:
        tokenizer_template = getattr(tokenizer, "response_template", None)
        self._template = tokenizer_template if template is None else dict(template)
        if self._template is None:
            raise ParameterError(
                "this model's tool calls cannot be read",
                "its tokenizer has no response_template, and every model has its own format",
                "Give one (response_template=...), or use a server that parses tool calls",
            )
        self._tokenizer = tokenizer
        try:
            tokenizer.parse_response("", self._template, prefix="")
        except (TypeError, ValueError) as error:
            raise ParameterError("invalid response_template", str(error)) from error

    def parse(
        self, text: str, prompt: Sequence[int], tools: Sequence[Mapping[str, Any]] | None
    ) -> Response:
        """Read a generated message, special tokens included.

        The end of ``prompt`` may open the message. The types of arguments follow ``tools``,
        descriptions in OpenAI's form.
        """
        prefix = self._tokenizer.decode(list(prompt))
        try:
            parsed = self._tokenizer.parse_response(
                text, self._template, prefix=prefix, tools=list(tools or ())
            )
            calls = tuple(map(_call, parsed.get("tool_calls") or ()))
        except (KeyError, TypeError, ValueError) as error:
            return Response(text, error=str(error))
        reasoning = next((parsed[name] for name in _REASONING if parsed.get(name)), None)
        return Response(parsed.get("content") or "", reasoning, calls)

    def stream(
        self,
        prompt: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        keeps_reasoning: bool = False,
    ) -> ResponseStream:
        """Reads a message while it is generated; arguments as ``parse``. ``keeps_reasoning`` leaves
        the thought in the content, with its markers.
        """
        prefix = self._tokenizer.decode(list(prompt))
        reading = self._tokenizer.get_response_parser(
            self._template, prefix=prefix, tools=list(tools)
        )
        names = {str(tool.get("function", tool)["name"]) for tool in tools}
        return ResponseStream(reading, names, keeps_reasoning)


class FormatParser:
    """Reads messages with calls in a format, and thoughts between ``markers``."""

    def __init__(
        self, tokenizer: Tokenizer, form: ToolFormat, markers: tuple[str, str] | None
    ) -> None:
        self._tokenizer, self._format, self._markers = tokenizer, form, markers

    def parse(
        self, text: str, prompt: Sequence[int], tools: Sequence[Mapping[str, Any]] | None
    ) -> Response:
        """Read a generated message; as ``ResponseParser.parse``."""
        tail = self._tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False)
        thought = split(text, self._markers, opens_thought(tail, self._markers))
        described = [tool.get("function", tool) for tool in tools or ()]
        functions = {f["name"]: f.get("parameters") or {} for f in described if "name" in f}
        reader = self._format.reader(functions)
        reader.push(self._format.begun(tail))
        parts = [reader.push(thought.content), reader.finish()]
        reasoning, content = ("".join(texts) for texts in zip(*parts, strict=True))
        calls = tuple((call.name, call.arguments) for call in reader.whole_calls)
        if reader.num_malformed and not calls:
            return Response(text, error=_UNREADABLE)
        return Response(content, thought.reasoning + reasoning or None, calls)


class ResponseStream:
    """The message in a growing text.

    Text of a call is held back. At the end it is a call or, where it cannot be read or names no
    function of ``functions``, content after all. White space around content and thought belongs to
    the markers.

    Attributes:
        calls: name and arguments, as JSON, of each call, once the text is over.
    """

    def __init__(
        self, reading: Any, functions: Collection[str], keeps_reasoning: bool = False
    ) -> None:
        self._reading, self._functions, self._keeps = reading, functions, keeps_reasoning
        self.calls: tuple[tuple[str, str], ...] = ()
        self._text, self._place, self._follows_call = "", 0, False
        self._reasoning, self._content = _Trimmed(), _Trimmed()
        self._failed = False

    def push(self, text: str) -> tuple[str, str]:
        """The thought and the content that are new and certain, ``text`` being the next piece."""
        self._text += text
        if self._failed:
            return "", ""
        try:
            return self._taken(self._reading.feed(text))
        except (KeyError, TypeError, ValueError):  # a call that is none
            self._failed = True
            return "", ""

    def finish(self) -> tuple[str, str]:
        """What is missing at the end of the text."""
        reasoning = content = ""
        if not self._failed:
            try:
                message, events = self._reading.finalize()
                reasoning, content = self._taken(events)
                calls = tuple(map(_call, message.get("tool_calls") or ()))
                self._failed = any(name not in self._functions for name, _ in calls)
                self.calls = () if self._failed else calls
            except (KeyError, TypeError, ValueError):
                self._failed = True
        if self._failed:
            content += self._content.push(self._text[self._place :])
        return reasoning, content

    def _taken(self, events: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        """The thought and the content of events of the parser."""
        reasoning = content = ""
        for event in events:
            if event["type"] != "region_chunk":
                continue
            is_thought = event["field"] in _REASONING
            if not is_thought and event["field"] != "content":
                self._follows_call = True
                continue
            chunk: str = event["text"]
            begin = max(self._place, self._text.find(chunk, self._place))
            end = begin + len(chunk)
            if self._keeps and not self._follows_call:
                chunk = self._text[self._place : end]
            self._place = max(self._place, end)
            if is_thought and not self._keeps:
                reasoning += self._reasoning.push(chunk)
            else:
                content += self._content.push(chunk)
        return reasoning, content


class _Trimmed:
    """Text without the white space at its ends, which may be within it as well."""

    def __init__(self) -> None:
        self._held, self._has_begun = "", False

    def push(self, text: str) -> str:
        """The text before ``text`` that is certain not to be trailing white space."""
        self._held += text
        if not self._has_begun:
            self._held = self._held.lstrip()
        certain = self._held.rstrip()
        self._held = self._held[len(certain) :]
        self._has_begun = self._has_begun or bool(certain)
        return certain


def _call(call: Mapping[str, Any]) -> tuple[str, str]:
    """Name and arguments of a parsed call; raises ValueError if the model wrote something else."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise ValueError(f"a call needs a name and arguments, and this is {json.dumps(call)}")
    arguments = function.get("arguments", function.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return name, arguments
