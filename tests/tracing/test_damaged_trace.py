"""Damaged traces are refused, tracers and callbacks that raise are logged, and nothing waits."""

import asyncio
import concurrent.futures
import contextlib
import copy
import json
import logging
import random

import pytest

from forethought import methods
from forethought.errors import FileError, TraceError, UsageError
from forethought.scaffolding import (
    Budget,
    ComputeTask,
    Controller,
    NativeGenerationController,
    NativeRewardController,
    ParallelProcess,
    ScaffoldingLlm,
    ScriptedWorker,
    Stage,
    Trace,
    replay,
)
from forethought.scaffolding.thinking import thinking_of
from forethought.scaffolding.tracer import Recorder, Tracer
from forethought.tracing.trace_html import trace_html
from forethought.tracing.trace_mooncake import mooncake_requests
from forethought.tracing.trace_otel import otel_spans
from forethought.tracing.trace_requests import requests

METHODS = {
    "plain": lambda: methods.create("plain"),
    "vote": lambda: methods.create("majority_vote", default_sample_num=4),
    "best": lambda: methods.create("best_of_n", reward_controller=NativeRewardController()),
    "dynasor": lambda: methods.create("dynasor", chunk_size=4, probe_length=3),
    "first_answer": lambda: methods.create("first_answer", line_end="{"),
}


def workers(controller):
    worker = ScriptedWorker(
        lambda prompt, index: f"so \\boxed{{{index % 2}}}",
        score=lambda question, answer: 0.5,
        markers=("<think>", "</think>"),
    )
    return dict.fromkeys([*methods.worker_tags(controller), "generation"], worker)


def recorded(controller, **options):
    with ScaffoldingLlm(controller, workers(controller), trace=True) as llm:
        return llm.generate("p", **options).trace


def written(trace, tmp_path):
    path = tmp_path / "trace.json"
    trace.save(path)
    return path, json.loads(path.read_text(encoding="utf-8"))


def places(value, path=()):
    """The path of every entry of nested containers."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in entries:
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from places(item, (*path, key))


def damage(values, path, new):
    """A copy with another value at ``path``, or without it if there is no new one."""
    changed = copy.deepcopy(values)
    *parents, last = path
    target = changed
    for key in parents:
        target = target[key]
    if new is None:
        del target[last]
    else:
        target[last] = new
    return changed


DAMAGE = (None, "x", -1, 7, [], {"$": "Usage", "value": {}})


@pytest.mark.parametrize("name", METHODS)
def test_a_damaged_trace_is_refused_or_replayed_and_never_waited_for(name, tmp_path):
    path, values = written(recorded(METHODS[name]()), tmp_path)
    draws = random.Random(name)
    cases = [(place, new) for place in places(values) for new in DAMAGE]
    for place, new in draws.sample(cases, min(len(cases), 60)):
        path.write_text(json.dumps(damage(values, place, new)), encoding="utf-8")
        with contextlib.suppress(UsageError):  # and no other error, such as RequestTimeout
            replay(Trace.load(path), METHODS[name](), timeout=1e6)


READERS = (Trace.text, trace_html, otel_spans, requests, lambda trace: mooncake_requests([trace]))


@pytest.mark.parametrize("name", METHODS)
def test_a_damaged_trace_is_refused_or_can_be_read(name, tmp_path):
    path, values = written(recorded(METHODS[name]()), tmp_path)
    draws = random.Random(name)
    cases = [(place, new) for place in places(values) for new in (*DAMAGE, {}, [{}], None)]
    for place, new in draws.sample(cases, min(len(cases), 150)):
        path.write_text(json.dumps(damage(values, place, new)), encoding="utf-8")
        try:
            trace = Trace.load(path)
        except TraceError:
            continue
        for read in READERS:
            with contextlib.suppress(UsageError):  # what it has no tokens for, it refuses
                list(read(trace))


@pytest.mark.parametrize(
    ("place", "new", "named"),
    [
        (("spans", 0, "results", "samples", 0, "value", "stop_reason"), None, "stop_reason"),
        (("spans", 0, "results", "samples", 0, "value", "text"), 7, "text"),
        (("spans", 0, "results", "samples", 0, "value"), None, "spans.0.results.samples.0"),
        (("spans", 0, "results", "samples", 0, "$"), "Other", "Other"),
        (("spans", 0, "outcome"), "over", "spans.0.outcome"),
        (("spans", 0, "order"), 4, "spans.order"),
        (("spans", 0, "number"), 1, "spans.0.number"),
        (("spans", 0, "usage", "prompt_tokens"), "many", "spans.0.usage"),
        (("spans", 0, "usage", "tokens"), 1, "spans.0.usage"),
        (("spans", 0, "branch"), "4", "spans.0.branch"),
        (("spans", 0, "new"), 1, "spans.0.new"),
        (("spans", 0, "kind"), None, "spans.0.kind"),
        (("spans",), "x", "spans"),
        (("kwargs",), {"a": {"$": "tuple"}}, "kwargs.a"),
        (("method",), None, "method"),
        (("outputs", 0, "value", "text"), None, "outputs.0"),
        (("stages", 0, "why"), None, "stages.0"),
        (("stages", 0, "at"), "x", "stages.0.at"),
        (("error",), {"type": "x"}, "error"),
        (("outputs", 0), {}, "outputs.0"),
        (("spans", 0, "results", "output_str"), {}, "spans.0.results.output_str"),
        (("spans", 0, "request", "sampling"), "x", "spans.0.request.sampling"),
        (("spans", 0, "request", "prompt"), [{}], "spans.0.request.prompt"),
        (("budget", "tokens"), -4, "budget"),
    ],
)
def test_what_is_damaged_is_named(place, new, named, tmp_path):
    path, values = written(recorded(methods.create("plain")), tmp_path)
    values["stages"] = [{"at": 0.0, "branch": "", "name": "chosen", "why": "", "fields": {}}]
    path.write_text(json.dumps(damage(values, place, new)))
    with pytest.raises(TraceError) as raised:
        replay(Trace.load(path), methods.create("plain"), timeout=1e6)
    assert named in raised.value.why


@pytest.mark.parametrize("cut", [0, 1, 40, -1])
def test_a_cut_file_is_refused(cut, tmp_path):
    path, _ = written(recorded(methods.create("plain")), tmp_path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(TraceError, match="cannot read the trace"):
        Trace.load(path)


def test_a_trace_whose_order_cannot_be_is_given_up_at_once(tmp_path):
    path, values = written(recorded(METHODS["vote"]()), tmp_path)
    ends = [span for span in values["spans"] if span["order"] is not None]
    ends[0]["order"], ends[-1]["order"] = ends[-1]["order"], ends[0]["order"]
    path.write_text(json.dumps(values))
    with pytest.raises(TraceError, match="this trace cannot be replayed"):
        replay(Trace.load(path), METHODS["vote"](), timeout=1e6)


# ---- writing ----------------------------------------------------------------------------------


def test_a_trace_that_cannot_be_written_leaves_the_older_one(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    trace = recorded(methods.create("plain"))
    trace.save(path)
    before = path.read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(FileError, match=r"cannot write the trace .*No space left"):
        trace.save(path)
    assert (path.read_bytes(), [file.name for file in tmp_path.iterdir()]) == (before, [path.name])


def test_a_trace_keeps_a_lone_surrogate(tmp_path):
    path = tmp_path / "trace.json"
    controller = NativeGenerationController()
    with ScaffoldingLlm(controller, {"generation": ScriptedWorker("a\udc80")}, trace=True) as llm:
        llm.generate("p").trace.save(path)
    assert Trace.load(path).scaffolding_outputs[0].text == "a\udc80"


# ---- what raises ------------------------------------------------------------------------------

EVENTS = ("begin", "turn", "resume", "ended", "stage", "profiled", "exhausted", "finish")


class Everything(Controller):
    """Spawns branches, computes, generates, and says a stage."""

    def __init__(self):
        super().__init__()
        self.generation = NativeGenerationController()

    def process(self, tasks, **kwargs):
        yield Stage("chosen")
        for tag in ("generation", "other"):
            thinking_of(tasks[0], tag)
        copies = [[task.copy()] for task in (tasks[0], tasks[0])]
        yield ParallelProcess([self.generation] * 2, copies, [{}] * 2)
        yield [ComputeTask(lambda: 1)]
        tasks[0].worker_tag = "generation"
        yield list(tasks)


def breaking(event, number, error):
    """A recorder that raises at the given call of one of its methods."""

    class Breaking(Recorder):
        calls = 0

    def broken(self, *args, **kwargs):
        Breaking.calls += 1
        if Breaking.calls > number:
            raise error("broken")
        return getattr(Recorder, event)(self, *args, **kwargs)

    setattr(Breaking, event, broken)
    return Breaking


@pytest.mark.parametrize("error", [ValueError, SystemExit, asyncio.CancelledError])
@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("event", EVENTS)
def test_a_tracer_that_raises_is_logged_and_costs_no_result(event, number, error, caplog):
    kind = breaking(event, number, error)

    class Llm(ScaffoldingLlm):
        def _tracer(self, request, account):
            trace = Trace(request.result.id, "", 0.0)
            return kind(trace, account, request.prompt, request.kwargs)

    controller = Everything()
    with Llm(controller, workers(controller)) as llm, caplog.at_level(logging.ERROR):
        assert llm.generate("p").output.text.startswith("so")
        budget = Budget(tokens=4)
        limited = llm.generate_async("p", budget=budget)
        assert limited.result(60).spent_budget == "tokens"
    is_complete = limited.trace.seconds is not None
    assert is_complete == ("is incomplete" not in caplog.text)


def test_a_callback_that_raises_or_reads_the_stream_keeps_nobody_waiting(caplog):
    controller = NativeGenerationController(streaming=True)
    with ScaffoldingLlm(controller, {"generation": ScriptedWorker("abc")}) as llm:
        result, texts = llm.generate_async("p"), []

        def leave():
            raise SystemExit

        result.on_finish(leave)
        result.on_finish(lambda: texts.append([event.output.text for event in result.events()]))
        assert "".join(event.output.text for event in result.events()) == "abc"
        assert llm.generate("p").output.text == "abc"
    assert "".join(texts[0]) == "abc"
    assert "a callback of" in caplog.text


@pytest.mark.parametrize("error", [ValueError, SystemExit, asyncio.CancelledError])
@pytest.mark.parametrize("method", ["thinking", "on_scope_end", "on_loop_end"])
def test_a_worker_that_raises_ends_the_request(method, error):
    def broken(self, *args):
        raise error("broken")

    kind = type("Broken", (ScriptedWorker,), {method: broken})
    with (
        contextlib.suppress(error, concurrent.futures.CancelledError),
        ScaffoldingLlm(Everything(), {"generation": kind(["so"] * 9)}) as llm,
    ):
        result = llm.generate_async("p")
        with contextlib.suppress(Exception):
            result.result(60)
        assert result.finished
        assert result.error is None if method != "thinking" else result.error is not None


def test_a_replay_whose_tracer_fails_is_refused(monkeypatch):
    trace = recorded(methods.create("plain"))
    monkeypatch.setattr(Recorder, "ended", lambda *args: 1 / 0)
    with pytest.raises(TraceError, match=r"this trace cannot be replayed.*ZeroDivisionError"):
        replay(trace, methods.create("plain"), timeout=1e6)


def test_every_event_of_a_tracer_is_tried():
    own = {name for name in vars(Tracer) if not name.startswith("_")}
    assert own - {"trace", "failed"} == {*EVENTS}
