"""Tools in the messages of a model whose chat template has no place for them: the form of Hermes.

The tools are described in the system message, calls are text of the assistant, and their results
are messages of the user::

    system      ... <tools>{"type": "function", "function": {"name": "add", ...}}</tools> ...
    assistant   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    user        <tool_response>1</tool_response>
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from forethought.server.protocol.tool_calls import as_text

_PROMPT = """\
You may call functions to answer the user. These are their signatures, within <tools></tools>:
<tools>
{tools}
</tools>
To call a function, write a JSON object with its name and its arguments within \
<tool_call></tool_call>:
<tool_call>
{"name": <name of the function>, "arguments": <object with the arguments>}
</tool_call>"""


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
    if not tools:
        return shown
    described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _PROMPT.replace("{tools}", described)
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
    calls = [as_text(function["name"], _arguments(function["arguments"])) for function in called]
    return {**fields, "content": "\n".join(filter(None, [content, *calls]))}


def _arguments(value: Any) -> Any:
    """The arguments of a call as JSON, or as the model wrote them."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def merged_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the text of the system message in front of the next one."""
    system, first, *rest = messages
    return [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *rest]
