"""Tools in the messages of a model whose chat template has no place for them.

The tools are described in the system message. Where the template writes calls, it writes those of
earlier turns; else they are in the form of Hermes, text of the assistant, and their results are
messages of the user::

    system      ... <tools>{"type": "function", "function": {"name": "add", ...}}</tools> ...
    assistant   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    user        <tool_response>1</tool_response>
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

HERMES_EXAMPLE = """\
<tool_call>
{"name": <name of the function>, "arguments": <object with the arguments>}
</tool_call>"""
_PROMPT = """\
You may call functions to answer the user. These are their signatures, within <tools></tools>:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments, which are JSON, in this form:
{example}"""


def has_calls(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether tools were called before."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def hermes_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The messages in the form of Hermes, with a system message that describes the tools."""
    shown: list[dict[str, Any]] = []
    for message in messages:
        converted = _hermes_message(message)
        if message["role"] == "tool" and shown and shown[-1].get("role") == "user":
            shown[-1]["content"] += f"\n{converted['content']}"
        else:
            shown.append(converted)
    return described(shown, tools, HERMES_EXAMPLE)


def described(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], example: str
) -> list[dict[str, Any]]:
    """The messages with a system message that describes the tools, and a call by an example."""
    shown = [dict(message) for message in messages]
    if not tools:
        return shown
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _PROMPT.replace("{example}", example).replace("{tools}", lines)
    if shown and shown[0]["role"] == "system":
        shown[0]["content"] = f"{shown[0]['content']}\n\n{text}"
        return shown
    return [{"role": "system", "content": text}, *shown]


def _hermes_message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = str(message.get("content") or "")
    if message["role"] == "tool":
        text = f"<tool_response>\n{content}\n</tool_response>"
        return {"role": "user", "content": text}
    fields = {name: value for name, value in message.items() if name != "tool_calls"}
    called = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [as_text(function["name"], arguments_of(function["arguments"])) for function in called]
    return {**fields, "content": "\n".join(filter(None, [content, *calls]))}


def arguments_of(value: Any) -> Any:
    """The arguments of a call as JSON, or as the model wrote them."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def merged_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the text of the system message in front of the next one."""
    system, first, *rest = messages
    return [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *rest]


def shows_tools(hf: Any) -> bool:
    """Whether a tokenizer's chat template has a place for tools."""
    return "tools" in str(hf.chat_template)


def as_text(name: str, arguments: Any) -> str:
    """A call as a model writes it, in Hermes' format."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
