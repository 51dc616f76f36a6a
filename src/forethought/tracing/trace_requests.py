"""The requests of a trace: the steps of each stream put together, and what each fork continues.

A trace has a span for each execution of a task, so a stream has one per step, and a fork has only
its suffix. A timeline or a replayed load needs the whole request: when it began and ended, and its
prompt with everything that it continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forethought.scaffolding.trace import Span, Trace
from forethought.scaffolding.trace_values import decoded


@dataclass(slots=True)
class Content:
    """Text, and its token ids where the trace knows them all."""

    text: str | None = ""
    """None: the trace has only ids."""
    ids: list[int] | None = field(default_factory=list)

    def __add__(self, other: Content) -> Content:
        text = None if self.text is None or other.text is None else self.text + other.text
        ids = None if self.ids is None or other.ids is None else self.ids + other.ids
        return Content(text, ids)


@dataclass(slots=True)
class TracedRequest:
    """One task, from its first step to its last."""

    number: int
    """Position among the requests of the trace."""
    spans: list[Span]
    """Its steps; a task that is no stream has one."""
    prompt: Content
    """Everything in front of what it generated."""
    fork_of: TracedRequest | None = None
    num_kept: int | None = None
    """Of a fork: generated tokens of the forked request that it continues, if they are counted."""

    @property
    def span(self) -> Span:
        """Its first step."""
        return self.spans[0]

    @property
    def start(self) -> float:
        """Seconds from the start of the trace."""
        return self.span.start

    @property
    def end(self) -> float | None:
        """Seconds from the start of the trace; None if it had not ended."""
        return self.spans[-1].end

    @property
    def outcome(self) -> str | None:
        """``done``, ``failed``, ``cancelled`` or ``budget``; None: it had not ended."""
        last = self.spans[-1]
        if last.outcome == "done" and self.finish_reason == "abort":
            return "cancelled"
        return last.outcome

    @property
    def finish_reason(self) -> str | None:
        """Why the generation ended."""
        reasons = (span.results.get("finish_reason") for span in reversed(self.spans))
        return next((reason for reason in reasons if reason), None)

    @property
    def usage(self) -> dict[str, int]:
        """The usage of all its steps."""
        return self.spans[-1].usage

    @property
    def is_probe(self) -> bool:
        """Whether it is a fork of a request that was still running."""
        parent = self.fork_of
        return parent is not None and (parent.end is None or parent.end > self.start)

    def output(self, until: int | None = None) -> Content:
        """The output; up to the end of the span number ``until``, or all of it."""
        text: str | None = ""
        ids: list[int] | None = []
        for span in self.spans:
            if until is None or span.number <= until:
                text = _grown(text, span.results.get("output_str"))
                ids = _grown(ids, span.results.get("output_tokens"))
        return Content(text, ids if ids or not text else None)


def requests(trace: Trace) -> list[TracedRequest]:
    """All tasks of a trace, in the order in which they began."""
    traced: list[TracedRequest] = []
    by_span: dict[int, TracedRequest] = {}
    for span in trace.tasks():
        first = by_span.get(-1 if span.step_of is None else span.step_of)
        if first is None:
            parent = None if span.fork_of is None else by_span.get(span.fork_of)
            first = TracedRequest(len(traced), [span], Content(), parent)
            first.prompt, first.num_kept = _prompt(span, parent)
            traced.append(first)
        else:
            first.spans.append(span)
        by_span[span.number] = first
    return traced


def _grown(before: Any, change: Any) -> Any:
    """A result after a step that changed it, as ``Trace`` records it."""
    if change is None:
        return before
    if isinstance(change, dict) and change.get("$") == "grown":
        return (before or type(change["items"])())[: change["kept"]] + change["items"]
    return decoded(change)


def _prompt(span: Span, parent: TracedRequest | None) -> tuple[Content, int | None]:
    """The tokens of a request before its output, and how many of its parent's it continues."""
    if parent is None:
        return _given(span.request.get("prompt"), span.request.get("messages")), None
    num_kept = span.request.get("kept")
    output = parent.output(span.fork_of)
    if num_kept is not None and output.ids is not None and num_kept < len(output.ids):
        share = len(output.text or "") * num_kept // max(1, len(output.ids))
        output = Content(output.text and output.text[:share], output.ids[:num_kept])
    inserted = decoded(span.results.get("inserted_tokens"))
    suffix = Content(str(span.request.get("suffix") or ""), inserted)
    return parent.prompt + output + suffix, num_kept


def _given(prompt: Any, messages: Any) -> Content:
    """A prompt as the task has it; messages replace the text that a template makes of them."""
    value = decoded(prompt)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return Content(None, list(value))
    if value is None and messages:
        value = "".join(f"<{message['role']}>{_message(message)}" for message in decoded(messages))
    return Content(value or "", None)


def _message(message: dict[str, Any]) -> str:
    return f"{message.get('content') or ''}{message.get('tool_calls') or ''}"
