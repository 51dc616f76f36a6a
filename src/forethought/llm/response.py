"""A model's message read from its text: what it says, its thought, and the tools that it calls.

Every family of models writes calls in a form of its own. A tokenizer may say which, in its
``response_template``, which transformers' parser reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forethought.errors import ParameterError

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names that templates have for a thought."""


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
    """Reads messages as a tokenizer's response template says.

    Args:
        tokenizer: of transformers.
        template: a response template in place of the tokenizer's own.

    Raises:
        ParameterError: there is no template, or transformers refuses it.
    """

    def __init__(self, tokenizer: Any, template: Mapping[str, Any] | None = None) -> None:
        own = getattr(tokenizer, "response_template", None)
        self._template = own if template is None else dict(template)
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
        """Read a message.

        Args:
            text: generated, special tokens included.
            prompt: token ids before it, whose end may open the message.
            tools: descriptions in OpenAI's form; the types of arguments follow them.
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


def _call(call: Mapping[str, Any]) -> tuple[str, str]:
    """Name and arguments of a parsed call.

    Raises:
        ValueError: the model wrote something else than a call.
    """
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise ValueError(f"a call needs a name and arguments, and this is {json.dumps(call)}")
    arguments = function.get("arguments", function.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return name, arguments
