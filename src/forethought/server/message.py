"""An answer as a message: its thought, its content and its calls, at once or as it streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forethought.scaffolding.result import ScaffoldingOutput
from forethought.server.backends import Prompted
from forethought.server.reasoning import ReasoningSplitter, Split, split
from forethought.server.service import Service
from forethought.server.tool_calls import OPENINGS, Call, Tools

_REASONS = {"stop": "stop", "length": "length", "tool_calls": "tool_calls"}


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer."""

    content: str
    reasoning: str
    calls: Sequence[Call]
    finish_reason: str
    num_reasoning_tokens: int


def answer_of(
    output: ScaffoldingOutput, service: Service, prompted: Prompted, tools: Tools
) -> Answer:
    """An output as a message."""
    text, markers = output.text or "", service.backend.markers
    if service.settings.reasoning_in_content or not prompted.is_chat:
        reasoning, content = "", text
    else:
        reasoning, content = split(text, markers, prompted.is_open)
    content, calls = tools.parse(content)
    calls = [*calls, *map(_given, output.meta.get("tool_calls", ()))]
    reasoning = reasoning or str(output.meta.get("reasoning") or "")
    reason = _REASONS.get(output.finish_reason or "stop", "stop")
    if calls and reason == "stop":
        reason = "tool_calls"
    return Answer(content, reasoning, calls, reason, _count(reasoning, output, service))


def _given(call: dict[str, Any]) -> Call:
    """A call that another server has parsed."""
    function = call["function"]
    return Call(function["name"], function["arguments"], call.get("id") or Call.create("", "").id)


def _count(reasoning: str, output: ScaffoldingOutput, service: Service) -> int:
    """Tokens of a thought: as they were counted under a budget, or those of its text."""
    if output.thinking is not None:
        return output.thinking.num_tokens
    if not reasoning:
        return 0
    return service.backend.count(reasoning)


class AnswerStream:
    """The pieces of one answer, sorted into thought and content.

    What may be the beginning of a call is held back, and a call is given at the end.

    Args:
        service: with the model's markers.
        prompted: whether the prompt has opened a thought.
        tools: of the request.
    """

    def __init__(self, service: Service, prompted: Prompted, tools: Tools) -> None:
        keep = service.settings.reasoning_in_content or not prompted.is_chat
        markers = None if keep else service.backend.markers
        self._splitter = ReasoningSplitter(markers, prompted.is_open)
        self._watches, self._is_whole = bool(tools.offered), tools.forced
        self._held, self._sent = "", ""
        self._reasoned = False

    def push(self, text: str) -> Split:
        """The new thought and content that are certain."""
        reasoning, content = self._splitter.push(text)
        self._reasoned = self._reasoned or bool(reasoning)
        return Split(reasoning, self._certain(content))

    def finish(self, answer: Answer) -> Split:
        """What is missing at the end of ``answer``."""
        reasoning, content = self._splitter.finish()
        if not self._reasoned and not reasoning:
            reasoning = answer.reasoning  # given by another server, at its end
        if not self._watches:
            return Split(reasoning, content)
        sent = self._sent
        rest = answer.content[len(sent) :] if answer.content.startswith(sent) else ""
        return Split(reasoning, rest)

    def _certain(self, content: str) -> str:
        """The part of the content that is certain to be none of a call."""
        if not self._watches:
            return content
        self._held += content
        if self._is_whole or self._begins_call():
            return ""
        kept = max(_overlap(self._held, opening) for opening in OPENINGS)
        kept = max(kept, len(self._held) - len(self._held.rstrip()))
        certain = self._held[: len(self._held) - kept]
        self._held, self._sent = self._held[len(certain) :], self._sent + certain
        return certain

    def _begins_call(self) -> bool:
        """Whether what is held back is, or may become, a call."""
        if any(opening in self._held for opening in OPENINGS):
            return True
        return not self._sent and self._held.lstrip()[:1] in ("{", "[")


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` with which ``marker`` begins."""
    sizes = range(min(len(text), len(marker) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(marker[:size])), 0)
