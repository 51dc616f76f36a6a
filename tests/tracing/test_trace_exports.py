"""Traces as timelines, spans and load; and of requests on the engine and on a server."""

import json
import re
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from openai import AsyncOpenAI

from forethought import AsyncLLM, methods
from forethought.assets import problems
from forethought.cli.main import main
from forethought.errors import ParameterError, RequestError
from forethought.scaffolding import (
    AsCompleted,
    Controller,
    EngineWorker,
    GenerationTask,
    MCPCallTask,
    NativeGenerationController,
    NativeRewardController,
    OpenaiWorker,
    Reply,
    ScaffoldingLlm,
    ScriptedWorker,
    Stage,
    StreamGenerationTask,
    Trace,
    Worker,
    replay,
)
from forethought.tracing.trace_html import trace_html
from forethought.tracing.trace_mooncake import mooncake_requests
from forethought.tracing.trace_otel import otel_spans, otlp, send_otel
from forethought.tracing.trace_requests import requests
from openai_server import EngineServer, serving

NASTY = "<script>alert('x')</script>&\"</pre>"


class Probing(Controller):
    """A stream of four tokens per step, a probe of it after the first step, a tool and a reward."""

    class WorkerTag(NativeRewardController.WorkerTag.__base__):
        GENERATION = "generation"
        REWARD = "reward"
        TOOLCALL = "tool_call"

    def process(self, tasks, **kwargs):
        stream = StreamGenerationTask(input_str=tasks[0].input_str, streaming_step=4)
        stream.worker_tag = self.WorkerTag.GENERATION
        yield [stream]
        running = AsCompleted([stream, stream.fork(" so", max_tokens=2)])
        probe = yield running
        while isinstance(probe, StreamGenerationTask):
            probe = yield running
        yield Stage("probed", NASTY, fields={"answer": probe.output_str})
        stream.cancel_flag = True
        if stream.under_way:
            yield [stream]
        yield [MCPCallTask.create_mcptask("1", "add", "{}", self.WorkerTag.TOOLCALL)]
        tasks[0].output_str = stream.output_str
        reward = NativeRewardController()
        yield from reward.process([tasks[0]])


class Tools(Worker):
    async def call(self, task):
        task.result_str = "3"

    task_handlers = {MCPCallTask: call}  # noqa: RUF012


@pytest.fixture
def trace(tmp_path):
    """A stream that is probed and cancelled, a tool and a reward, as read from its file."""

    def says(prompt, index):
        return "It is 7" if prompt.endswith(" so") else Reply("abcdefgh" * 20)

    worker = ScriptedWorker(says, score=lambda question, answer: 0.5)
    workers = {"generation": worker, "reward": worker, "tool_call": Tools()}
    with ScaffoldingLlm(Probing(), workers, trace=True) as llm:
        result = llm.generate(NASTY, sampling_params={"temperature": 0.5})
    result.trace.save(tmp_path / "trace.json")
    return Trace.load(tmp_path / "trace.json")


# ---- the requests of a trace -------------------------------------------------------------------


def test_a_stream_is_one_request_and_its_forks_know_the_whole_prompt(trace):
    stream, probe, tool, reward = requests(trace)
    assert (len(stream.spans) > 1, stream.output().text[:4]) == (True, "abcd")
    assert (stream.outcome, stream.finish_reason) == ("cancelled", "abort")
    assert probe.fork_of is stream
    assert probe.is_probe
    assert (probe.prompt.text, probe.num_kept) == (NASTY + "abcd so", 4)
    assert probe.output().text == "It"
    assert (tool.span.name, reward.span.name) == ("MCPCallTask", "RewardTask")


# ---- the timeline ------------------------------------------------------------------------------


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.attributes = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]


def test_the_timeline_has_lanes_bars_and_ticks_and_every_text_is_escaped(trace):
    page = trace_html(trace)
    elements = Elements()
    elements.feed(page)
    assert not {"script", "img", "link", "iframe", "object", "form"} & set(elements.tags)
    links = [value for _, name, value in elements.attributes if name in ("href", "src")]
    assert links == ["#task-0", "#task-1", "#task-2", "#task-3"]
    assert not re.search(r"https?://|url\(|@import", page)
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page
    classes = [value for _, name, value in elements.attributes if name == "class"]
    assert classes.count("lane") == 1
    assert [c for c in classes if c.startswith("bar")] == [
        "bar cancelled",
        "bar probe",
        "bar tool",
        "bar done",
    ]
    assert classes.count("tick") == 2  # probed and scored
    assert page.count("alert(&#x27;x&#x27;)") >= 3


def test_branches_have_lanes_of_their_own_and_bars_do_not_cover_each_other():
    controller = methods.create("majority_vote", default_sample_num=3)
    worker = ScriptedWorker(lambda p, i: f"\\boxed{{{i}}}")
    with ScaffoldingLlm(controller, {"generation": worker}, trace=True) as llm:
        page = trace_html(llm.generate("p").trace)
    assert page.count('class="lane"') == 4

    class Both(NativeGenerationController):
        def process(self, tasks, **kwargs):
            yield from super().process([tasks[0], GenerationTask(input_str="q")])

    with ScaffoldingLlm(Both(), {"generation": worker}, trace=True) as llm:
        page = trace_html(llm.generate("p").trace)
    tops = re.findall(r'class="bar[^>]*top:(\d+)px', page)
    assert len(set(tops)) == 2


# ---- spans -------------------------------------------------------------------------------------


def test_spans_follow_the_conventions_for_generative_models(trace):
    spans = otel_spans(trace, model="m", content=True)
    root, stream, probe, tool, reward = spans
    assert [span.name for span in spans] == [
        "invoke_workflow Probing",
        "text_completion m",
        "text_completion m",
        "execute_tool add",
        "score",
    ]
    assert {span.parent_id for span in spans[1:]} == {root.span_id}
    assert probe.links == [stream.span_id]
    asked = stream.attributes
    assert asked["gen_ai.operation.name"] == "text_completion"
    assert asked["gen_ai.request.model"] == "m"
    assert asked["gen_ai.response.finish_reasons"] == ["abort"]
    assert asked["forethought.outcome"] == "cancelled"
    assert asked["gen_ai.usage.input_tokens"] == len(NASTY)
    assert probe.attributes["gen_ai.request.max_tokens"] == 2
    assert json.loads(probe.attributes["gen_ai.output.messages"])[0]["parts"][0]["content"] == "It"
    assert tool.attributes["gen_ai.tool.call.result"] == "3"
    assert reward.events[0][1:] == (
        "gen_ai.evaluation.result",
        {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": 0.5},
    )
    assert [name for _, name, _ in root.events] == ["forethought.probed", "forethought.scored"]
    assert not any("messages" in name for s in otel_spans(trace) for name in s.attributes)


def test_branches_are_workflows_inside_and_failures_have_their_type():
    def says(prompt, index):
        return Reply("", error=OSError("gone")) if index else "\\boxed{1}"

    controller = methods.create("majority_vote", default_sample_num=2, early_stop=False)
    with ScaffoldingLlm(controller, {"generation": ScriptedWorker(says)}, trace=True) as llm:
        result = llm.generate_async("p")
        with pytest.raises(Exception, match="gone"):
            result.result(60)
    spans = {
        span.name + span.attributes.get("forethought.branch", ""): span
        for span in otel_spans(result.trace)
    }
    root = spans["invoke_workflow MajorityVoteController"]
    branch = spans["invoke_workflow NativeGenerationController1"]
    assert branch.parent_id == root.span_id
    assert root.attributes["error.type"] == branch.attributes["error.type"] == "OSError"
    assert "gone" in root.error


def test_what_is_written_is_what_the_sdk_sends(trace):
    """Both are decoded by OTLP's own message types."""
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    send_otel(trace, exporter, model="m")
    sent = encode_spans(exporter.get_finished_spans())
    found = sent.resource_spans[0].scope_spans[0].spans
    written = otlp(trace, model="m")["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert len(found) == len(written)
    for one, other in zip(found, written, strict=True):
        assert one.trace_id.hex() == other["traceId"]
        assert one.span_id.hex() == other["spanId"]
        assert one.parent_span_id.hex() == other.get("parentSpanId", "")
        assert (one.name, one.kind) == (other["name"], other["kind"])
        assert str(one.start_time_unix_nano) == other["startTimeUnixNano"]
        plain = MessageToDict(one)
        assert plain.get("attributes", []) == other.get("attributes", [])
        assert plain.get("events", []) == other.get("events", [])
        assert [link.span_id.hex() for link in one.links] == [
            link["spanId"] for link in other.get("links", [])
        ]


def test_spans_reach_a_collector_and_a_refusal_is_an_error(trace):
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies, statuses = [], [200, 400]

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(statuses.pop(0))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    exporter = OTLPSpanExporter(endpoint=f"http://127.0.0.1:{server.server_address[1]}/v1/traces")
    try:
        send_otel(trace, exporter)
        with pytest.raises(RequestError, match="not sent"):
            send_otel(trace, exporter)
    finally:
        exporter.shutdown()
        server.shutdown()
        thread.join()
        server.server_close()
    request = ExportTraceServiceRequest.FromString(bodies[0])
    assert len(request.resource_spans[0].scope_spans[0].spans) == 5


# ---- load --------------------------------------------------------------------------------------


def test_the_load_shares_blocks_as_the_prompts_share_beginnings(trace):
    stream, probe = mooncake_requests([trace], block_size=8)
    assert (stream["kind"], stream["cancelled"]) == ("completion", True)
    assert stream["input_length"] == len(NASTY)
    assert len(stream["hash_ids"]) == -(-len(NASTY) // 8)
    assert (probe["kind"], probe["fork_of"], probe["fork_at"]) == ("probe", stream["request"], 4)
    assert (probe["input_length"], probe["output_length"]) == (len(NASTY) + 7, 2)
    num_shared = len(NASTY) // 8
    assert probe["hash_ids"][:num_shared] == stream["hash_ids"][:num_shared]
    assert probe["hash_ids"][-1] not in stream["hash_ids"]
    assert probe["timestamp"] >= stream["timestamp"]
    with pytest.raises(ParameterError, match="block_size"):
        mooncake_requests([trace], block_size=0)


def test_the_loads_of_several_traces_have_one_clock_and_one_table_of_blocks(trace):
    later = Trace(**{name: getattr(trace, name) for name in trace.__slots__})
    later.started += 2.0
    lines = mooncake_requests([later, trace], block_size=8)
    assert [line["request"] for line in lines] == [2, 3, 0, 1]
    assert [line["session"] for line in lines] == [1, 1, 0, 0]
    first, second = lines[0], lines[2]
    assert second["timestamp"] - first["timestamp"] == 2000
    assert second["hash_ids"] == first["hash_ids"]


# ---- the command -------------------------------------------------------------------------------


def test_the_command_writes_all_formats_and_refuses_what_does_not_belong(trace, tmp_path, capsys):
    file, out = (
        str(tmp_path / "trace.json"),
        {name: str(tmp_path / name) for name in ("t.html", "spans.json", "load.jsonl")},
    )
    assert main(["trace", "show", file, "--html", out["t.html"]]) == 0
    exports = ["--otel", out["spans.json"], "--model", "m", "--mooncake", out["load.jsonl"]]
    assert main(["trace", "export", file, *exports, "--block-size", "8"]) == 0
    assert capsys.readouterr().out == ""
    read = {name: (tmp_path / name).read_text() for name in out}
    assert read["t.html"] == trace_html(trace)
    assert json.loads(read["spans.json"]) == otlp(trace, model="m")
    assert [*map(json.loads, read["load.jsonl"].splitlines())] == mooncake_requests([trace], 8)
    for wrong in (["export", file], ["export", file, "--html", "x"], ["show", file, "--otel", "x"]):
        assert main(["trace", *wrong]) == 2


# ---- recorded on the engine and on a server ----------------------------------------------------


@pytest.fixture(scope="module")
def llm():
    llm = AsyncLLM()
    yield llm
    llm.shutdown()


METHODS = {
    "vote": lambda: methods.create("majority_vote", default_sample_num=3),
    "dynasor": lambda: methods.create("dynasor", chunk_size=16, certainty_threshold=2),
    "beams": lambda: methods.create("beam_search", default_sample_num=2, width=2, step_token="\n"),
}


def recorded(worker, name, prompt, tmp_path):
    """The result of a method on a worker, and its trace from a file."""
    params = {"temperature": 0.7, "seed": 3, "max_tokens": 40}
    controller = METHODS[name]()
    workers = dict.fromkeys(methods.worker_tags(controller), worker)
    with ScaffoldingLlm(controller, workers, trace=True) as scaffolding:
        result = scaffolding.generate(prompt, sampling_params=params)
    result.trace.save(tmp_path / "trace.json")
    return result, Trace.load(tmp_path / "trace.json")


def expect_replay(result, trace, name):
    again = replay(trace, METHODS[name](), timeout=120)
    assert again.outputs == result.outputs == trace.scaffolding_outputs
    assert again.usage == result.usage
    assert len(again.trace.spans) == len(trace.spans)


@pytest.mark.parametrize("name", ["dynasor", "beams"])
def test_a_request_on_the_engine_is_replayed_from_its_file(llm, name, tmp_path):
    prompt = llm.chat_prompt([{"role": "user", "content": problems()[0]["question"]}])
    result, trace = recorded(EngineWorker(llm), name, prompt, tmp_path)
    expect_replay(result, trace, name)
    assert "<h2>Timeline</h2>" in trace_html(trace)
    lines = mooncake_requests([trace], block_size=16)
    first = lines[0]["hash_ids"][: len(prompt) // 16]
    assert len(first) == len(prompt) // 16
    for line in lines:  # ids are known, so the blocks of the common prompt are exactly the same
        assert line["hash_ids"][: len(first)] == first
        assert len(line["hash_ids"]) == -(-line["input_length"] // 16)


@pytest.mark.parametrize("name", ["vote", "dynasor"])
def test_a_request_on_a_server_is_replayed_from_its_file(llm, name, tmp_path):
    prompt = f"<|user|>{problems()[0]['question']}<|assistant|><think>\n"
    with serving(EngineServer(llm)) as server:
        worker = OpenaiWorker(AsyncOpenAI(base_url=server.url, api_key="none", timeout=60), "m")
        result, trace = recorded(worker, name, prompt, tmp_path)
    expect_replay(result, trace, name)
    assert all(line["input_length"] for line in mooncake_requests([trace]))
    assert len(otel_spans(trace)) >= 2
