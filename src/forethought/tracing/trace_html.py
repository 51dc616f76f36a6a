"""Traces as one HTML file: a timeline of branches and tasks, and the text of each of them.

A lane per branch, a bar per task (a stream is one bar, with a mark where each step ended), a tick
per stage. A bar links to the task's entry below, with its inputs and results. The file needs no
script and no network, and a content security policy forbids both.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from forethought.saved_file import save_text
from forethought.scaffolding.trace import Prices, Span, Trace, shown_cost
from forethought.scaffolding.trace_values import decoded
from forethought.tracing.trace_requests import TracedRequest, requests

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1b1f24; --faint: #6a737d; --line: #d8dee4;
  --lane: #f6f8fa; --done: #2f6fb3; --probe: #8250df; --tool: #1a7f37; --failed: #c4314b;
  --cancelled: #9a6700; --tick: #24292f; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --text: #e6e8eb; --faint: #98a1ab;
  --line: #30363d; --lane: #1c2126; --done: #58a6ff; --probe: #bc8cff; --tool: #3fb950;
  --failed: #ff7b8a; --cancelled: #d29922; --tick: #e6e8eb; } }
* { box-sizing: border-box; }
body { background: var(--page); color: var(--text); font: 14px/1.45 system-ui, sans-serif;
  margin: 0 auto; max-width: 1200px; padding: 1.5rem; }
h1 { font-size: 1.3rem; margin: 0; } h2 { font-size: 1rem; margin: 1.6rem 0 .5rem; }
.about, .axis, dt, .key { color: var(--faint); }
.lane { display: grid; grid-template-columns: 11rem 1fr; border-top: 1px solid var(--line); }
.lane > :first-child { overflow: hidden; padding: 3px 8px 3px 0; text-overflow: ellipsis;
  white-space: nowrap; }
.track { background: var(--lane); overflow: hidden; position: relative; }
.bar { background: var(--done); border-radius: 3px; height: 16px; min-width: 3px; overflow: hidden;
  color: #fff; font-size: 11px; line-height: 16px; padding: 0 3px; position: absolute;
  text-decoration: none; white-space: nowrap; }
@media (prefers-color-scheme: dark) { .bar { color: #0b0d0f; } }
.bar.probe { background: var(--probe); } .bar.tool { background: var(--tool); }
.bar.failed { background: var(--failed); }
.bar.cancelled, .bar.budget { background: var(--cancelled); }
.step { border-left: 1px solid var(--page); height: 16px; opacity: .6; position: absolute; }
.tick { border-left: 2px solid var(--tick); bottom: 0; position: absolute; top: 0; width: 6px; }
.axis { display: flex; justify-content: space-between; margin-left: 11rem; }
.key span { display: inline-block; margin-right: 1.2em; }
.key i { border-radius: 2px; display: inline-block; height: 10px; margin-right: 5px; width: 14px; }
article { border-top: 1px solid var(--line); padding: .5rem 0; }
article:target { background: var(--lane); }
pre { background: var(--lane); border-radius: 4px; margin: .3rem 0; max-height: 22rem;
  overflow: auto; padding: .5rem; white-space: pre-wrap; overflow-wrap: anywhere; }
article pre { font-size: 12.5px; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_ROW = 19
"""Pixels from one row of bars to the next."""


def trace_html(trace: Trace, prices: Prices | None = None) -> str:
    """The whole page; with ``prices``, what the request and its tasks cost, too."""
    return _Page(trace, prices).text()


def save_html(trace: Trace, path: str | Path, prices: Prices | None = None) -> None:
    """Write the page."""
    save_text(path, trace_html(trace, prices), "timeline")


class _Page:
    """Writes the page of one trace. Whatever comes from the trace goes through ``_escaped``."""

    def __init__(self, trace: Trace, prices: Prices | None) -> None:
        self._prices = prices
        self._trace, self._requests = trace, requests(trace)
        ends = [span.end or span.start for span in trace.spans]
        self._seconds = max([trace.seconds or 0.0, *ends, 1e-6])

    def text(self) -> str:
        trace = self._trace
        title = _escaped(f"{trace.method} {trace.request_id[:8]}")
        return "".join(
            [
                '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
                f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                f"<title>{title}</title><style>{_STYLE}</style></head><body>",
                f"<h1>{_escaped(trace.method)}</h1>",
                f'<p class="about">{_escaped(self._about())}</p>',
                self._answers(),
                "<h2>Timeline</h2>",
                _key(),
                *map(self._lane, self._branches()),
                f'<div class="axis"><span>0 s</span><span>{self._seconds:.3f} s</span></div>',
                "<h2>Tasks</h2>",
                *map(self._entry, self._requests),
                "</body></html>\n",
            ]
        )

    def _about(self) -> str:
        trace, usage = self._trace, self._trace.usage
        parts = [
            "not ended" if trace.seconds is None else f"{trace.seconds:.3f} s",
            f"{len(self._requests)} tasks",
            f"{usage.get('prompt_tokens', 0)} prompt tokens",
            f"{usage.get('completion_tokens', 0)} completion tokens",
        ]
        if self._prices is not None:
            parts.append(shown_cost(usage, self._prices))
        if trace.stopped:
            parts.append("ended from outside")
        return " · ".join(filter(None, parts))

    def _answers(self) -> str:
        trace = self._trace
        error = [] if trace.error is None else [_fields({"failed": _error(trace.error)})]
        texts = [_fields({"answer": output.text}) for output in trace.scaffolding_outputs]
        return "".join([_fields({"prompt": decoded(trace.prompt)}), *texts, *error])

    # ---- the timeline -------------------------------------------------------------------------

    def _branches(self) -> list[Span | None]:
        """The request itself (None), and its branches, each after the one that spawned it."""
        branches = [span for span in self._trace.spans if span.kind == "branch"]
        return [None, *sorted(branches, key=lambda span: [*map(int, span.branch.split("."))])]

    def _lane(self, branch: Span | None) -> str:
        path = "" if branch is None else branch.branch
        requests = [request for request in self._requests if request.span.branch == path]
        rows, bars = _rows(requests, self._seconds), []
        for request, row in zip(requests, rows, strict=True):
            bars.append(self._bar(request, row))
        ticks = [self._tick(stage) for stage in self._trace.stages if stage["branch"] == path]
        name = "request" if branch is None else f"{path} {branch.name}"
        state = "" if branch is None else f" ({branch.outcome or 'not ended'})"
        height = _ROW * (max(rows, default=0) + 1) + 4
        return (
            f'<div class="lane"><div title="{_escaped(name + state)}">{_escaped(name)}</div>'
            f'<div class="track" style="height:{height}px">{"".join(bars + ticks)}</div></div>'
        )

    def _bar(self, request: TracedRequest, row: int) -> str:
        end = self._seconds if request.end is None else request.end
        offset, width = self._percent(request.start), self._percent(end - request.start)
        top = row * _ROW + 3
        steps = [
            f'<span class="step" style="left:{self._percent(span.end or end)};top:{top}px"></span>'
            for span in request.spans[:-1]
        ]
        label = _label(request)
        return (
            f'<a class="bar {_kind(request)}" href="#task-{request.number}" '
            f'style="left:{offset};width:{width};top:{top}px" title="{_escaped(label)}">'
            f"{_escaped(label)}</a>{''.join(steps)}"
        )

    def _tick(self, stage: Mapping[str, Any]) -> str:
        parts = [f"{stage['at']:.3f} s", stage["name"], stage["why"], _json(stage["fields"])]
        title = _escaped(": ".join(part for part in parts if part not in ("", "{}")))
        return (
            f'<span class="tick" style="left:{self._percent(stage["at"])}" title="{title}"></span>'
        )

    def _percent(self, seconds: float) -> str:
        return f"{100 * seconds / self._seconds:.3f}%"

    # ---- the tasks ----------------------------------------------------------------------------

    def _entry(self, request: TracedRequest) -> str:
        span, last = request.span, request.spans[-1]
        inputs = {name: value for name, value in decoded(span.request).items() if value}
        output = {
            "output": request.output().text or None,
            "score": last.results.get("score"),
            "result": last.results.get("result_str"),
            "failed": None if last.error is None else _error(last.error),
        }
        got = {name: value for name, value in output.items() if value is not None}
        counts = {name: count for name, count in request.usage.items() if count}
        if self._prices is not None and counts:
            got["cost"] = shown_cost(counts, self._prices).removeprefix("cost ")
        return (
            f'<article id="task-{request.number}"><strong>{_escaped(_label(request))}</strong>'
            f"{_fields(inputs | got | ({'tokens': counts} if counts else {}))}</article>"
        )


def _label(request: TracedRequest) -> str:
    """A task in a line."""
    span, parts = request.span, [f"{request.number} {request.span.name}"]
    if span.request.get("tool"):
        parts.append(str(span.request["tool"]))
    if request.fork_of is not None:
        parts.append(f"{'probe' if request.is_probe else 'fork'} of {request.fork_of.number}")
    if request.end is not None:
        parts.append(f"{request.end - request.start:.3f} s")
    if request.outcome != "done":
        parts.append(request.outcome or "not ended")
    return " · ".join(parts)


def _kind(request: TracedRequest) -> str:
    if request.outcome in ("failed", "cancelled", "budget"):
        return request.outcome
    if request.span.name == "MCPCallTask":
        return "tool"
    return "probe" if request.is_probe else "done"


def _rows(requests: Iterable[TracedRequest], latest: float) -> list[int]:
    """A row for each of the tasks of a lane, so that none covers another."""
    ends: list[float] = []
    rows = []
    for request in requests:
        row = next((row for row, end in enumerate(ends) if end <= request.start), len(ends))
        end = latest if request.end is None else request.end
        ends[row : row + 1] = [end]
        rows.append(row)
    return rows


def _key() -> str:
    kinds = {
        "done": "task",
        "probe": "probe: a fork of a running task",
        "tool": "tool",
        "failed": "failed",
        "cancelled": "cancelled, or the budget ended it",
        "tick": "stage",
    }
    items = [
        f'<span><i style="background:var(--{kind})"></i>{text}</span>'
        for kind, text in kinds.items()
    ]
    return f'<p class="key">{"".join(items)}</p>'


def _fields(fields: Mapping[str, Any]) -> str:
    items = [
        f"<dt>{_escaped(name)}</dt><pre>{_escaped(_json(value))}</pre>"
        for name, value in fields.items()
        if value is not None
    ]
    return "".join(items)


def _error(error: Mapping[str, str]) -> str:
    return f"{error['type']}: " + ": ".join(filter(None, (error["what"], error["why"])))


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _escaped(text: str) -> str:
    return html.escape(text)
