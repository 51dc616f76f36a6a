"""Tools: the calls in a model's text, and the grammar that forces one.

The text of a call has one of these formats, whichever the chat template knows::

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>       Hermes, Qwen
    [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]                Mistral
    {"name": "add", "parameters": {"a": 1}}                             Llama 3, forced calls

Where a tokenizer has a response template, transformers' parser reads its texts instead
(``llm.response``); forced calls are JSON for every model.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from forethought.config.guided import GuidedDecodingParams
from forethought.errors import ParameterError

OPENINGS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
"""What begins a call in a text."""
_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_decoder = json.JSONDecoder()


class Call(NamedTuple):
    """One call, in OpenAI's terms."""

    name: str
    arguments: str
    """JSON."""
    id: str

    @classmethod
    def create(cls, name: str, arguments: Any) -> Call:
        """A call with a new id; arguments that are no text are written as JSON, none as ``{}``."""
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
        text = text if text.strip() else "{}"
        return cls(name, text, f"call_{uuid.uuid4().hex[:24]}")

    def to_dict(self) -> dict[str, Any]:
        """As a chat message holds it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request.

    Attributes:
        tools: as the chat template takes them: dictionaries with ``type`` and ``function``.
        choice: ``"auto"``, ``"none"``, ``"required"``, or the name of a function.
        several: whether an answer may hold several calls.

    Raises:
        ParameterError: a choice without tools, or of one that there is not; or two of one name.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    choice: str = "auto"
    several: bool = True
    named: bool = field(default=False)
    """Whether ``choice`` is the name of a function."""

    def __post_init__(self) -> None:
        names = [tool["function"]["name"] for tool in self.tools]
        if len(set(names)) < len(names):
            raise ParameterError(
                "invalid tools", "two of them have one name", "Rename one", param="tools"
            )
        if self.named and self.choice not in names:
            raise ParameterError(
                "invalid tool_choice",
                f"there is no tool {self.choice!r}",
                f"Tools: {names}",
                param="tool_choice",
            )
        if not self.tools and self.choice == "required":
            raise ParameterError(
                "tool_choice needs tools", "there are none", "Give tools", param="tool_choice"
            )

    @property
    def offered(self) -> list[dict[str, Any]]:
        """Those that the model is told of."""
        return [] if self.choice == "none" else [dict(tool) for tool in self.tools]

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.named or self.choice == "required"

    @property
    def choice_field(self) -> Any:
        """As OpenAI's API has it."""
        if not self.named:
            return self.choice
        return {"type": "function", "function": {"name": self.choice}}

    @property
    def shape(self) -> GuidedDecodingParams:
        """The grammar of a forced call: a JSON object with the name and the arguments."""
        allowed = [t for t in self.tools if not self.named or t["function"]["name"] == self.choice]
        calls = [_call_schema(tool["function"]) for tool in allowed]
        schema = dict(calls[0] if len(calls) == 1 else {"anyOf": calls})
        schema["x-guidance"] = {"whitespace_flexible": False}  # small models write blanks for ever
        hoisted: dict[str, Any] = {}
        for tool in allowed:
            parameters = tool["function"].get("parameters") or {}
            hoisted |= parameters.get("$defs") or {}
        return GuidedDecodingParams(json=schema | ({"$defs": hoisted} if hoisted else {}))

    def parse(self, text: str) -> tuple[str, list[Call]]:
        """The content of an answer without its calls, and the calls."""
        if not self.offered:
            return text, []
        content, calls = _parse(text, {tool["function"]["name"] for tool in self.tools})
        return content, calls if self.several else calls[:1]


def _call_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = dict(function.get("parameters") or {"type": "object"})
    parameters.pop("$defs", None)
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _parse(text: str, known: set[str]) -> tuple[str, list[Call]]:
    """The calls in a text by their format; a text without any is content."""
    if "<tool_call>" in text:
        calls = [call for body in _HERMES.findall(text) for call in _calls(body, known)]
        content = _HERMES.sub("", text).strip()
    else:
        opening = next((mark for mark in OPENINGS if mark in text), "")
        before, _, body = text.partition(opening) if opening else ("", "", text)
        calls, content = _calls(body.strip(), known), before.strip()
    return (content, calls) if calls else (text, [])


def _calls(text: str, known: set[str]) -> list[Call]:
    """The calls in JSON text: an object or a list of them; none if it is something else."""
    try:
        value, end = _decoder.raw_decode(text)
    except (ValueError, RecursionError):
        return []
    if text[end:].strip():
        return []
    found = []
    for each in value if isinstance(value, list) else [value]:
        name = each.get("name") if isinstance(each, dict) else None
        if not isinstance(name, str) or name not in known:
            return []
        found.append(Call.create(name, each.get("arguments", each.get("parameters", {}))))
    return found


def as_text(name: str, arguments: Any) -> str:
    """A call as a model writes it, in Hermes' format."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
