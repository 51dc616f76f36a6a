"""Spans of served requests, collected in memory by OpenTelemetry's own exporter."""

from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from forethought.errors import ParameterError
from forethought.methods import MajorityVoteController
from forethought.outputs import Usage
from forethought.scaffolding import NativeGenerationController, ScaffoldingLlm, ScriptedWorker
from forethought.server.settings import Settings
from forethought.server.telemetry import Telemetry, plain_trace
from forethought.tracing.trace_otel import TraceParent

USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached=4)


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


def sent(exporter, *traces):
    telemetry = Telemetry(exporter, "m")
    for trace in traces:
        telemetry.record(trace)
    telemetry.close()
    return exporter.get_finished_spans()


def job(params=None):
    return SimpleNamespace(
        ask=SimpleNamespace(id="chatcmpl-1", params=params or {}), usage=USAGE, seconds=2.0
    )


def test_a_method_has_a_span_per_task_below_those_of_its_branches(exporter):
    worker = ScriptedWorker(["4", "4", "5"])
    vote = MajorityVoteController(NativeGenerationController(), 3)
    with ScaffoldingLlm(vote, {"generation": worker}, trace=True) as llm:
        spans = sent(exporter, llm.generate("2 + 2?").trace)
    by_id = {span.context.span_id: span for span in spans}
    (root,) = [span for span in spans if span.parent is None]
    tasks = [s for s in spans if s.attributes["gen_ai.operation.name"] == "text_completion"]
    assert len(tasks) == 3
    for task in tasks:
        above = task
        while above.parent is not None:
            above = by_id[above.parent.span_id]
            assert above.start_time <= task.start_time
        assert above is root
        assert task.attributes["gen_ai.request.model"] == "m"
    assert len({span.context.trace_id for span in spans}) == 1


def test_plain_decoding_is_one_task_with_its_tokens(exporter):
    request, task = sent(exporter, plain_trace(job({"temperature": 0.5}), "stop"))
    assert task.parent.span_id == request.context.span_id
    assert task.attributes["gen_ai.usage.output_tokens"] == 3
    assert task.attributes["gen_ai.usage.cache_read.input_tokens"] == 4
    assert task.attributes["gen_ai.request.temperature"] == 0.5
    assert list(task.attributes["gen_ai.response.finish_reasons"]) == ["stop"]
    assert task.end_time - task.start_time == 2_000_000_000


@pytest.mark.parametrize(("reason", "outcome"), [("error", "failed"), ("abort", "cancelled")])
def test_a_request_that_did_not_end_well_says_so(exporter, reason, outcome):
    *_, task = sent(exporter, plain_trace(job(), reason))
    assert task.attributes["forethought.outcome"] == outcome


def test_a_request_that_never_began_has_no_spans(exporter):
    assert sent(exporter, None) == ()


def test_a_collector_that_fails_costs_the_spans_and_nothing_else(caplog):
    class Failing(InMemorySpanExporter):
        def export(self, spans):
            return SpanExportResult.FAILURE

    telemetry = Telemetry(Failing(), "m")
    telemetry.record(plain_trace(job(), "stop"))
    telemetry.close()
    assert telemetry.num_dropped == 1
    assert "were not sent" in caplog.text


TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_request_is_part_of_the_callers_trace(exporter):
    telemetry = Telemetry(exporter, "m")
    telemetry.record(plain_trace(job(), "stop"), TraceParent.read(f"00-{TRACE}-{SPAN}-01"))
    telemetry.close()
    request, task = exporter.get_finished_spans()
    assert format(request.context.trace_id, "032x") == TRACE
    assert format(request.parent.span_id, "016x") == SPAN
    assert request.parent.is_remote
    assert task.context.trace_id == request.context.trace_id
    assert task.parent.span_id == request.context.span_id
    assert not task.parent.is_remote


def test_of_a_caller_that_records_nothing_no_spans_are_sent(exporter):
    telemetry = Telemetry(exporter, "m")
    telemetry.record(plain_trace(job(), "stop"), TraceParent.read(f"00-{TRACE}-{SPAN}-00"))
    telemetry.close()
    assert exporter.get_finished_spans() == ()


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
    ],
)
def test_a_header_that_names_no_span_is_as_none(header):
    assert TraceParent.read(header) is None


def test_a_collector_is_named_by_its_address():
    telemetry = Telemetry.to("http://127.0.0.1:4318", "m")
    assert telemetry._exporter._endpoint == "http://127.0.0.1:4318/v1/traces"
    telemetry.close()
    with pytest.raises(ParameterError, match="otlp_endpoint"):
        Settings(otlp_endpoint="somewhere")


def test_the_server_sends_the_spans_of_its_requests(exporter):
    from fastapi.testclient import TestClient

    from forethought.server.app import create_app
    from forethought.server.backends.scripted_backend import ScriptedBackend

    app = create_app(
        ScriptedBackend(lambda prompt, index: "4"), Settings(otlp_endpoint="http://127.0.0.1:9")
    )
    with TestClient(app) as client:
        service = app.state.service
        service.telemetry.close()
        service.telemetry = Telemetry(exporter, "scripted")
        body = {"model": "scripted", "messages": [{"role": "user", "content": "2 + 2?"}]}
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
        path = "/v1/chat/completions"
        assert client.post(path, json=body, headers=headers).status_code == 200
    assert {format(s.context.trace_id, "032x") for s in exporter.get_finished_spans()} == {TRACE}
    names = {span.attributes["gen_ai.operation.name"] for span in exporter.get_finished_spans()}
    assert names == {"invoke_workflow", "text_completion"}
    assert all(s.status.status_code is StatusCode.OK for s in exporter.get_finished_spans())
