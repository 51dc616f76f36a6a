"""``Telemetry``: the spans of each request, sent to an OpenTelemetry collector.

By the semantic conventions for generative AI, as ``tracing.trace_otel`` makes them of traces: a
span per task, branches as children of the request. They are sent by another thread when a
request is over; a collector that is slow or down costs spans, never a request.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from forethought.errors import DependencyError
from forethought.outputs import Usage
from forethought.scaffolding.trace import Span, Trace
from forethought.scaffolding.trace_values import encoded
from forethought.server.job import Job
from forethought.tracing.trace_otel import TraceParent, send_otel

_logger = logging.getLogger(__name__)

MAX_PENDING = 256
"""Requests whose spans wait to be sent; those of further ones are dropped."""


class Telemetry:
    """Sends the spans of requests through an exporter of the ``opentelemetry`` SDK.

    Args:
        exporter: shut down by ``close``.
        model: name that the spans of generations carry.

    Attributes:
        num_dropped: requests whose spans were not sent.
    """

    def __init__(self, exporter: Any, model: str) -> None:
        self._exporter, self._model = exporter, model
        self._pool = ThreadPoolExecutor(1, "forethought-spans")
        self._num_pending, self.num_dropped = 0, 0
        self._lock = threading.Lock()

    @classmethod
    def to(cls, endpoint: str, model: str) -> Telemetry:
        """To a collector that takes OTLP over HTTP at ``endpoint``, by default its ``/v1/traces``.

        Raises DependencyError if the extra ``otel`` is not installed.
        """
        name = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
        try:
            make = importlib.import_module(name).OTLPSpanExporter
        except ModuleNotFoundError as error:
            package = "opentelemetry-exporter-otlp-proto-http"
            raise DependencyError.missing(package, "--otlp-endpoint", "otel") from error
        url = endpoint.rstrip("/")
        return cls(make(endpoint=url if urlsplit(url).path else f"{url}/v1/traces"), model)

    def record(self, trace: Trace | None, parent: TraceParent | None = None) -> None:
        """Send the spans of a request that is over; nothing if it never began or ``parent`` does
        not record.
        """
        if trace is None or (parent is not None and not parent.is_sampled):
            return
        with self._lock:
            if self._num_pending >= MAX_PENDING:
                self.num_dropped += 1
                return
            self._num_pending += 1
        self._pool.submit(self._send, trace, parent)

    def close(self) -> None:
        """Send what is waiting, and end the exporter."""
        self._pool.shutdown()
        self._exporter.shutdown()

    def _send(self, trace: Trace, parent: TraceParent | None) -> None:
        try:
            send_otel(trace, self._exporter, model=self._model, parent=parent)
        except Exception as error:
            with self._lock:
                self.num_dropped += 1
            _logger.warning("the spans of request %s were not sent: %s", trace.request_id, error)
        finally:
            with self._lock:
                self._num_pending -= 1


def plain_trace(job: Job, reason: str) -> Trace:
    """The trace of a request that the engine has answered without a method: one task."""
    outcomes = {"error": "failed", "abort": "cancelled"}
    usage = _counts(job.usage)
    span = Span(
        0,
        "task",
        "GenerationTask",
        "",
        0.0,
        job.seconds,
        outcomes.get(reason, "done"),
        request={"sampling": encoded(dict(job.ask.params), lenient=True)},
        usage=usage,
        results={"finish_reason": reason},
    )
    started = time.time() - job.seconds
    return Trace(job.ask.id, "none", started, job.seconds, spans=[span], usage=usage)


def _counts(usage: Usage) -> dict[str, int]:
    names = ("prompt_tokens", "completion_tokens", "prefilled", "cached", "decoded", "discarded")
    return {name: getattr(usage, name) for name in names}
