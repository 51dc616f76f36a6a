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
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from forethought.config.guided import GuidedDecodingParams
from forethought.errors import ParameterError

OPENINGS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
"""What begins a call in a text."""
_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)'
)
"""What precedes the arguments of a call."""
_decoder = json.JSONDecoder()


class CallPiece(NamedTuple):
    """New text of a call that is generated."""

    number: int
    """Of the call in its answer."""
    opening: Call | None
    """The call, where it begins here."""
    arguments: str
    """That are new."""


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
        text = "{}" if text.strip() in ("", "null") else text
        return cls(name, text, f"call_{uuid.uuid4().hex[:24]}")

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are JSON; not if a stop string has cut them."""
        try:
            json.loads(self.arguments)
        except (ValueError, RecursionError):
            return False
        return True

    def to_dict(self) -> dict[str, Any]:
        """As a chat message holds it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request.

    Attributes:
        tools: as the request has them: dictionaries with ``type`` and ``function``.
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
        """Those that the model is shown; ``strict`` is sent to other servers alone."""
        return [] if self.choice == "none" else [_shown(tool) for tool in self.tools]

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
        places = ["#"] if len(allowed) == 1 else [f"#/anyOf/{n}" for n in range(len(allowed))]
        calls = [
            _call_schema(tool["function"], place)
            for tool, place in zip(allowed, places, strict=True)
        ]
        schema = dict(calls[0] if len(calls) == 1 else {"anyOf": calls})
        schema["x-guidance"] = {"whitespace_flexible": False}  # small models write blanks for ever
        return GuidedDecodingParams(json=schema)

    @property
    def callable(self) -> list[str]:
        """The names that a call may have."""
        names = [tool["function"]["name"] for tool in self.tools]
        return [self.choice] if self.named else names

    def parse(self, text: str, is_cut: bool = False) -> tuple[str, list[Call]]:
        """The content of an answer without its thought and calls, and the calls.

        ``is_cut``: it has ended at its length; a call at the end of it is returned with the
        arguments so far.
        """
        if not self.offered:
            return text, []
        if self.forced and text.lstrip().startswith("{"):
            return _forced(text, self.callable, is_cut)
        content, calls = _parse(text, {tool["function"]["name"] for tool in self.tools}, is_cut)
        return content, calls if self.several else calls[:1]


def _shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: value for name, value in tool["function"].items() if name != "strict"}
    return {**tool, "function": function}


def _forced(text: str, names: Sequence[str], is_cut: bool) -> tuple[str, list[Call]]:
    """The call, or the beginning of one, that a grammar has forced."""
    reading = CallText(names)
    reading.push(text)
    if reading.call is not None:
        return "", [reading.call._replace(arguments=reading.arguments)]
    if not is_cut:
        return text, []
    begun = re.match(r'\s*\{\s*"name"\s*:\s*"([^"]*)', text)
    fitting = [name for name in names if name.startswith(begun[1] if begun else "")]
    return "", [Call.create(name, None) for name in fitting if len(fitting) == 1]


class CallText:
    """The text of a call, read while it grows. ``call`` has its name and an id, once the name is
    known.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.call: Call | None = None
        self._names, self._head, self._value = names, "", ""
        self._depth, self._in_string, self._is_escaped, self._has_ended = 0, False, False, False

    @property
    def arguments(self) -> str:
        """Those that have come, as the model writes them; none are ``{}``."""
        return "{}" if self._value.strip() in ("", "null") else self._value

    def push(self, text: str) -> str:
        """The arguments that are new and certain, ``text`` being the next piece."""
        if self.call is None:
            self._head += text
            opening = _HEAD.match(self._head)
            if opening is None or (name := json.loads(opening[1])) not in self._names:
                return ""
            self.call, text = Call.create(name, None), self._head[opening.end() :]
        before = len(self._value)
        self._value += "" if self._has_ended else text[: self._length(text)]
        if not self._value.startswith("{"):  # it may be null
            return ""
        return self._value[before:]

    def _length(self, text: str) -> int:
        """How much of the next piece belongs to the value of the arguments."""
        for place, character in enumerate(text):
            if not self._in_string and not self._depth and character in ",} \n":
                self._has_ended = True
                return place
            if self._in_string:
                self._in_string = self._is_escaped or character != '"'
                self._is_escaped = not self._is_escaped and character == "\\"
            elif character == '"':
                self._in_string = True
            else:
                self._depth += (character in "{[") - (character in "}]")
            if not self._in_string and not self._depth and character in '"}]':
                self._has_ended = True
                return place + 1
        return len(text)


_COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas")
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")
"""Words of a schema that say which further properties an object may have."""


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema whose objects have the properties that it names and no others.

    An object that says otherwise, or is combined of several schemas, stays as it is.
    """
    return _closed(schema, frozenset(_combined_refs(schema, False)))


def _closed(schema: Any, open_refs: Set[str]) -> Any:
    """``closed`` of a subschema; definitions that ``open_refs`` refer to stay as they are."""
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    for word in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(word), Mapping):
            result[word] = {
                name: value if f"#/{word}/{name}" in open_refs else _closed(value, open_refs)
                for name, value in schema[word].items()
            }
    is_combined = any(word in schema for word in _COMBINING)
    is_object = "properties" in schema or "object" in _types(schema)
    lists = ["prefixItems"] if is_object else ["prefixItems", "anyOf", "oneOf"]
    for word in lists:
        if isinstance(schema.get(word), list):
            result[word] = [_closed(value, open_refs) for value in schema[word]]
    if "items" in schema:
        result["items"] = _closed(schema["items"], open_refs)
    if is_object and not is_combined and not any(word in schema for word in _OPEN):
        result["additionalProperties"] = False
    return result


def _combined_refs(schema: Any, is_combined: bool) -> Iterator[str]:
    """The references in a schema whose objects have further properties by other schemas."""
    if isinstance(schema, list):
        for item in schema:
            yield from _combined_refs(item, is_combined)
    if not isinstance(schema, Mapping):
        return
    is_object = "properties" in schema or "object" in _types(schema)
    if "$ref" in schema and (is_combined or is_object):
        yield str(schema["$ref"])
    for word, part in schema.items():
        in_combination = word == "allOf" or (is_object and word in _COMBINING)
        yield from _combined_refs(part, in_combination)


def _types(schema: Mapping[str, Any]) -> Sequence[Any]:
    types = schema.get("type")
    return types if isinstance(types, list) else [types]


_NAMES = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Words of a schema that have schemas by names."""
_VALUES = ("const", "enum", "default", "examples")
"""Words of a schema that have values."""


def _moved(schema: Any, root: str) -> Any:
    """A schema to be put at ``root`` of another one: its references lead to itself there."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    result: dict[str, Any] = {}
    for word, part in schema.items():
        if word == "$ref" and isinstance(part, str) and (part == "#" or part.startswith("#/")):
            result[word] = root + part[1:]
        elif word in _NAMES and isinstance(part, Mapping):
            result[word] = {name: _moved(item, root) for name, item in part.items()}
        elif word != "$id":  # references would lead to it
            result[word] = part if word in _VALUES else _moved(part, root)
    return result


def _call_schema(function: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The schema of a call, to be put at ``place``."""
    parameters = function.get("parameters") or {}
    if not any(word in parameters for word in (*_COMBINING, *_VALUES, "type")):
        parameters = {"type": "object", **parameters}  # arguments are none but objects
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "arguments": _moved(closed(parameters), f"{place}/properties/arguments"),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _parse(text: str, names: set[str], is_cut: bool) -> tuple[str, list[Call]]:
    """The calls in a text by their format; a text without any is content."""
    opening = next((mark for mark in OPENINGS if mark in text), "")
    if opening == "<tool_call>":
        bodies, content = _HERMES.findall(text), _HERMES.sub("", text).strip()
    else:
        before, _, body = text.partition(opening) if opening else ("", "", text)
        bodies, content = [body.strip()], before.strip()
    calls = [call for body in bodies for call in _calls(body, names)]
    is_open = is_cut and not text.rstrip().endswith("</tool_call>")
    if is_open and not _calls(bodies[-1], names):
        calls += _cut_calls(bodies[-1], names)
        if opening and not calls:  # its name is not known: half a call is no content
            return content, []
    return (content, calls) if calls else (text, [])


def _cut_calls(text: str, names: set[str]) -> list[Call]:
    """The calls in JSON text that ends within the last one."""
    calls, rest = list[Call](), text.lstrip("[ \n")
    while rest:
        try:
            _, end = _decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            reading = CallText(names)
            reading.push(rest)
            last = [] if reading.call is None else [reading.call]
            return [*calls, *(call._replace(arguments=reading.arguments) for call in last)]
        calls += _calls(rest[:end], names)
        rest = rest[end:].lstrip(", \n]")
    return calls


def _calls(text: str, names: set[str]) -> list[Call]:
    """The calls in JSON text: an object or a list of them; none if it is something else."""
    try:
        value, end = _decoder.raw_decode(text)
    except (ValueError, RecursionError):
        return []
    if text[end:].strip():
        return []
    calls = []
    for item in value if isinstance(value, list) else [value]:
        name = item.get("name") if isinstance(item, dict) else None
        if not isinstance(name, str) or name not in names:
            return []
        calls.append(Call.create(name, item.get("arguments", item.get("parameters", {}))))
    return calls


def as_text(name: str, arguments: Any) -> str:
    """A call as a model writes it, in Hermes' format."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
