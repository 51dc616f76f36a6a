"""Tools of a request: the calls in a model's text, and the grammar that forces one.

How calls are written is the model's ``ToolFormat`` (``llm.tool_format``). Where a tokenizer has a
response template, transformers' parser reads its texts instead (``llm.response``).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from forethought.config.guided import GuidedDecodingParams
from forethought.errors import ParameterError
from forethought.llm.call_reader import MAX_CALLS, CallReader
from forethought.llm.tool_format import ANY, ToolFormat


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
        format: how the model writes calls.

    Raises:
        ParameterError: a choice without tools, or of one that there is not; or two of one name.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    choice: str = "auto"
    several: bool = True
    named: bool = field(default=False)
    """Whether ``choice`` is the name of a function."""
    format: ToolFormat = ANY

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
    def functions(self) -> dict[str, Mapping[str, Any]]:
        """Name -> schema of the parameters, of those that a call may have."""
        functions = [tool["function"] for tool in self.offered]
        return {
            function["name"]: function.get("parameters") or {}
            for function in functions
            if not self.named or function["name"] == self.choice
        }

    @property
    def shape(self) -> GuidedDecodingParams:
        """The grammar of a forced call, in the model's format."""
        return self.format.shape(self.functions)

    @property
    def are_read(self) -> bool:
        """Whether the text of an answer may have calls, or is a message of the format."""
        return bool(self.offered) or self.format.reads_messages

    def reader(self, begun: str = "") -> CallReader:
        """Reads one answer; ``begun`` is the beginning of it, which the prompt has."""
        reader = self.format.reader(
            self.functions, is_forced=self.forced, max_calls=MAX_CALLS if self.several else 1
        )
        reader.push(begun)
        return reader

    def forced_name(self, text: str) -> str | None:
        """The function whose forced call is cut before its arguments, if there is one alone."""
        has_begun = self.forced and bool(text)
        names = self.format.begins_forced(text, list(self.functions)) if has_begun else []
        return names[0] if len(names) == 1 else None

    def parse(
        self, text: str, is_cut: bool = False, begun: str = ""
    ) -> tuple[str, str, list[Call]]:
        """Thought and content of an answer, without the thought between the model's markers, and
        its calls.

        ``is_cut``: it has ended at its length; a call at the end of it is returned with the
        arguments so far.
        """
        if not self.are_read:
            return "", text, []
        reader = self.reader(begun)
        parts = [reader.push(text), reader.finish(is_cut)]
        thought, content = ("".join(texts) for texts in zip(*parts, strict=True))
        calls = [Call.create(call.name, call.arguments) for call in reader.whole_calls]
        if is_cut and not calls and (name := self.forced_name(text)) is not None:
            return thought, "", [Call.create(name, None)]
        return thought, content, calls


def _shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: value for name, value in tool["function"].items() if name != "strict"}
    return {**tool, "function": function}
