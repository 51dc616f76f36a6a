"""Traces as spans of OpenTelemetry, by its semantic conventions for generative AI.

::

    save_otel(trace, "spans.json")                        # OTLP as JSON, without any package
    send_otel(trace, OTLPSpanExporter(endpoint=...))      # through the opentelemetry SDK

The request and its branches are ``invoke_workflow`` spans, tasks ``chat``, ``text_completion`` or
``execute_tool`` spans below them (a stream is one span), stages are events of the branch, and a
fork links to the span whose sequence it continues.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from forethought import __version__
from forethought.errors import DependencyError, RequestError
from forethought.saved_file import save_text
from forethought.scaffolding.trace import Span, Trace, parent_path
from forethought.scaffolding.trace_values import decoded
from forethought.tracing.trace_requests import TracedRequest, requests

PROVIDER = "forethought"

_TRACE_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_INTERNAL, _CLIENT = 1, 3
_OK, _ERROR = 1, 2
_OPERATIONS = MappingProxyType(
    {"ChatTask": "chat", "MCPCallTask": "execute_tool", "RewardTask": "score"}
)
_SAMPLING = MappingProxyType(
    {
        "frequency_penalty": "gen_ai.request.frequency_penalty",
        "max_tokens": "gen_ai.request.max_tokens",
        "n": "gen_ai.request.choice.count",
        "presence_penalty": "gen_ai.request.presence_penalty",
        "seed": "gen_ai.request.seed",
        "temperature": "gen_ai.request.temperature",
        "top_k": "gen_ai.request.top_k",
        "top_p": "gen_ai.request.top_p",
    }
)


class TraceParent(NamedTuple):
    """The span of another program that a request belongs to, as W3C's ``traceparent`` names it."""

    trace_id: str
    span_id: str
    is_sampled: bool

    @classmethod
    def read(cls, header: str) -> TraceParent | None:
        """Parse the header's value; None if it is not valid."""
        match = _TRACE_PARENT.fullmatch(header.strip())
        if match is None:
            return None
        version, trace_id, span_id, flags, more = match.groups()
        if (
            version == "ff"
            or (version == "00" and more)
            or not int(trace_id, 16) * int(span_id, 16)
        ):
            return None
        return cls(trace_id, span_id, bool(int(flags, 16) & 1))


@dataclass(slots=True)
class OtelSpan:
    """A span as OpenTelemetry has it; ids are hexadecimal, times nanoseconds since 1970."""

    span_id: str
    parent_id: str
    """Empty: it has none."""
    name: str
    kind: int
    start: int
    end: int
    attributes: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)
    """Time, name and attributes."""
    links: list[str] = field(default_factory=list)
    """Ids of spans of the same trace."""
    error: str | None = None
    """None: it has not failed."""


def otel_spans(trace: Trace, *, model: str | None = None, content: bool = False) -> list[OtelSpan]:
    """The spans of a trace, the request itself first.

    Args:
        trace: of a request.
        model: name of the model, which a trace does not know.
        content: record prompts, outputs and arguments of tools too.
    """
    return _Spans(trace, model, content).all()


def otlp(trace: Trace, *, model: str | None = None, content: bool = False) -> dict[str, Any]:
    """The spans as an OTLP request in its JSON encoding; arguments as ``otel_spans``."""
    trace_id = _trace_id(trace)
    spans = [_otlp_span(span, trace_id) for span in otel_spans(trace, model=model, content=content)]
    scope = {"name": PROVIDER, "version": __version__}
    resource = {"attributes": _otlp_attributes({"service.name": PROVIDER})}
    return {
        "resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": scope, "spans": spans}]}]
    }


def save_otel(
    trace: Trace, path: str | Path, *, model: str | None = None, content: bool = False
) -> None:
    """Write ``otlp`` as JSON, for a collector's file receiver or an HTTP endpoint."""
    text = json.dumps(otlp(trace, model=model, content=content), ensure_ascii=False)
    save_text(path, text, "OpenTelemetry spans")


def send_otel(
    trace: Trace,
    exporter: Any,
    *,
    model: str | None = None,
    content: bool = False,
    parent: TraceParent | None = None,
) -> None:
    """Hand the spans to a span exporter of the ``opentelemetry`` SDK.

    Args:
        trace: of a request.
        exporter: such as ``OTLPSpanExporter()``; it stays open.
        model: as ``otel_spans``.
        content: as ``otel_spans``.
        parent: the span that the request is a part of; None: it has a trace of its own.

    Raises:
        DependencyError: the SDK is not installed.
        RequestError: the exporter could not send them.
    """
    try:
        export = importlib.import_module("opentelemetry.sdk.trace.export")
        trace_id = _trace_id(trace) if parent is None else parent.trace_id
        above = None if parent is None else parent.span_id
        spans = _readable_spans(otel_spans(trace, model=model, content=content), trace_id, above)
    except ModuleNotFoundError as error:
        raise DependencyError.missing("opentelemetry-sdk", "send_otel", "otel") from error
    if exporter.export(spans) is not export.SpanExportResult.SUCCESS:
        raise RequestError(
            "the spans were not sent", f"{type(exporter).__name__} failed", "See its log"
        )


def _readable_spans(spans: Iterable[OtelSpan], trace_id: str, above: str | None) -> list[Any]:
    """Spans as ``ReadableSpan`` of the SDK.

    Args:
        spans: of one trace.
        trace_id: in hexadecimal digits.
        above: id of the span that a span without parent is below; None: there is none.
    """
    sdk = importlib.import_module("opentelemetry.sdk.trace")
    api = importlib.import_module("opentelemetry.trace")
    resources = importlib.import_module("opentelemetry.sdk.resources")
    scopes = importlib.import_module("opentelemetry.sdk.util.instrumentation")
    number = int(trace_id, 16)
    flags = api.TraceFlags(api.TraceFlags.SAMPLED)

    def context(span_id: str) -> Any:
        is_remote = span_id == above
        return api.SpanContext(number, int(span_id, 16), is_remote=is_remote, trace_flags=flags)

    def parent_of(span: OtelSpan) -> Any:
        span_id = span.parent_id or above
        return context(span_id) if span_id else None

    resource = resources.Resource({"service.name": PROVIDER})
    scope = scopes.InstrumentationScope(PROVIDER, __version__)
    return [
        sdk.ReadableSpan(
            span.name,
            context=context(span.span_id),
            parent=parent_of(span),
            resource=resource,
            attributes=span.attributes,
            events=[sdk.Event(name, fields, at) for at, name, fields in span.events],
            links=[api.Link(context(link)) for link in span.links],
            kind=api.SpanKind.CLIENT if span.kind == _CLIENT else api.SpanKind.INTERNAL,
            instrumentation_scope=scope,
            status=api.Status(api.StatusCode.OK)
            if span.error is None
            else api.Status(api.StatusCode.ERROR, span.error),
            start_time=span.start,
            end_time=span.end,
        )
        for span in spans
    ]


class _Spans:
    """Builds the spans of one trace."""

    def __init__(self, trace: Trace, model: str | None, content: bool) -> None:
        self._trace, self._model, self._content = trace, model, content
        self._begin = round(trace.started * 1e9)
        ends = [span.end or span.start for span in trace.spans]
        self._end = trace.seconds if trace.seconds is not None else max(ends, default=0.0)

    def all(self) -> list[OtelSpan]:
        """The request, its branches and its tasks."""
        trace = self._trace
        root = self._workflow("", trace.method, 0.0, self._end, trace.error)
        root.attributes |= {"forethought.stopped": trace.stopped} | _usage(trace.usage)
        spans = {"": root}
        for span in trace.spans:
            if span.kind == "branch":
                branch = self._workflow(span.branch, span.name, span.start, span.end, span.error)
                branch.attributes |= _outcome(span.outcome)
                spans[span.branch] = branch
            elif span.kind == "budget":
                root.events.append((self._at(span.end), "forethought.budget", {"what": span.name}))
        for stage in trace.stages:
            self._add_stage(spans.get(stage["branch"], root), stage)
        return [*spans.values(), *map(self._task, requests(trace))]

    def _at(self, seconds: float | None) -> int:
        return self._begin + round((self._end if seconds is None else seconds) * 1e9)

    def _id(self, name: str) -> str:
        return _digest(f"{self._trace.request_id}/{name}", 8)

    def _workflow(
        self, path: str, name: str, start: float, end: float | None, error: Any
    ) -> OtelSpan:
        parent = self._id(f"branch {parent_path(path)}") if path else ""
        span = OtelSpan(
            self._id(f"branch {path}"),
            parent,
            f"invoke_workflow {name}",
            _INTERNAL,
            self._at(start),
            self._at(end),
            _provided("invoke_workflow") | {"gen_ai.workflow.name": name},
        )
        if path:
            span.attributes["forethought.branch"] = path
        _fail(span, error)
        return span

    def _add_stage(self, span: OtelSpan, stage: Mapping[str, Any]) -> None:
        fields = {f"forethought.{name}": _plain(value) for name, value in stage["fields"].items()}
        fields = {name: value for name, value in fields.items() if value is not None}
        if stage["why"]:
            fields["forethought.why"] = stage["why"]
        span.events.append((self._at(stage["at"]), f"forethought.{stage['name']}", fields))

    def _task(self, request: TracedRequest) -> OtelSpan:
        first = request.span
        is_generation = "sampling" in first.request
        operation = _OPERATIONS.get(first.name, "text_completion" if is_generation else "compute")
        span = OtelSpan(
            self._id(f"task {first.number}"),
            self._id(f"branch {first.branch}"),
            f"{operation} {self._subject(operation, first)}".strip(),
            _CLIENT if is_generation or operation == "score" else _INTERNAL,
            self._at(request.start),
            self._at(request.end),
            _provided(operation) | _outcome(request.outcome) | _usage(request.usage),
        )
        span.attributes |= _sampling(decoded(first.request.get("sampling", {})))
        if self._model is not None and is_generation:
            span.attributes["gen_ai.request.model"] = self._model
        if request.finish_reason is not None:
            span.attributes["gen_ai.response.finish_reasons"] = [request.finish_reason]
        if request.fork_of is not None:
            span.links.append(self._id(f"task {request.fork_of.span.number}"))
        if operation == "execute_tool":
            span.attributes["gen_ai.tool.name"] = str(first.request.get("tool"))
        self._add_score(span, request)
        if self._content:
            span.attributes |= _contents(request, operation)
        _fail(span, request.spans[-1].error)
        return span

    def _subject(self, operation: str, span: Span) -> str:
        if operation == "execute_tool":
            return str(span.request.get("tool"))
        if operation == "compute":
            return str(span.request.get("function", span.name))
        return "" if operation == "score" else self._model or ""

    def _add_score(self, span: OtelSpan, request: TracedRequest) -> None:
        score = request.span.results.get("score")
        if isinstance(score, float | int):
            fields = {
                "gen_ai.evaluation.name": request.span.tag or "reward",
                "gen_ai.evaluation.score.value": float(score),
            }
            span.events.append((span.end, "gen_ai.evaluation.result", fields))


def _provided(operation: str) -> dict[str, Any]:
    return {"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER}


def _outcome(outcome: str | None) -> dict[str, Any]:
    return {"forethought.outcome": outcome or "not ended"}


def _usage(usage: Mapping[str, int]) -> dict[str, Any]:
    """Counts of tokens, if there are any."""
    names = {
        "prompt_tokens": "gen_ai.usage.input_tokens",
        "completion_tokens": "gen_ai.usage.output_tokens",
        "cached": "gen_ai.usage.cache_read.input_tokens",
    }
    return {name: usage[key] for key, name in names.items() if usage.get(key)}


def _sampling(fields: Mapping[str, Any]) -> dict[str, Any]:
    attributes = {
        name: fields[key]
        for key, name in _SAMPLING.items()
        if isinstance(fields.get(key), int | float)
    }
    stop = fields.get("stop")
    if stop:
        attributes["gen_ai.request.stop_sequences"] = (
            [stop] if isinstance(stop, str) else list(stop)
        )
    return attributes


def _contents(request: TracedRequest, operation: str) -> dict[str, Any]:
    """Input and output as JSON."""
    span = request.span
    if operation == "execute_tool":
        args, result = span.request.get("args"), span.results.get("result_str")
        names = {"gen_ai.tool.call.arguments": args, "gen_ai.tool.call.result": result}
        return {name: _plain(value) for name, value in names.items() if value is not None}
    messages = span.request.get("messages")
    inputs = [{"role": "user", "parts": _parts(request.prompt.text)}]
    if messages:
        inputs = [
            {"role": message["role"], "parts": _parts(message.get("content"))}
            for message in decoded(messages)
        ]
    answer = {"role": "assistant", "parts": _parts(request.output().text)}
    answer["finish_reason"] = request.finish_reason or ""
    return {
        "gen_ai.input.messages": json.dumps(inputs, ensure_ascii=False),
        "gen_ai.output.messages": json.dumps([answer], ensure_ascii=False),
    }


def _parts(text: Any) -> Any:
    return [{"type": "text", "content": "" if text is None else str(text)}]


def _fail(span: OtelSpan, error: Mapping[str, str] | None) -> None:
    if error is not None:
        span.error = ": ".join(filter(None, (error["what"], error["why"])))
        span.attributes["error.type"] = error["type"]


def _plain(value: Any) -> Any:
    """``value`` as an attribute can hold it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _trace_id(trace: Trace) -> str:
    return _digest(trace.request_id, 16)


def _digest(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def _otlp_span(span: OtelSpan, trace_id: str) -> dict[str, Any]:
    attributes = {
        "traceId": trace_id,
        "spanId": span.span_id,
        "parentSpanId": span.parent_id,
        "name": span.name,
        "kind": span.kind,
        "startTimeUnixNano": str(span.start),
        "endTimeUnixNano": str(span.end),
        "attributes": _otlp_attributes(span.attributes),
        "events": [
            {"timeUnixNano": str(at), "name": name, "attributes": _otlp_attributes(fields)}
            for at, name, fields in span.events
        ],
        "links": [{"traceId": trace_id, "spanId": link} for link in span.links],
        "status": {"code": _OK} if span.error is None else {"code": _ERROR, "message": span.error},
    }
    return {name: value for name, value in attributes.items() if value not in ("", [])}


def _otlp_attributes(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _otlp_value(value)} for name, value in attributes.items()]


def _otlp_value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return {"arrayValue": {"values": [_otlp_value(item) for item in value]}}
    return {"stringValue": str(value)}
